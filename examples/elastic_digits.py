"""Train a small LeNet on handwritten digits with elastic averaging; any worker may die on the way.

    outcore launch --groups 4 examples/elastic_digits.py            # pinned replicas, each restarted alone if it dies
    torchrun --nproc-per-node 4 examples/elastic_digits.py          # or under torchrun

Every worker trains on its own shard and meets the others every fourth step; rank 0 reports the centre's accuracy.
"""

import argparse
import os

import torch
from torch import nn

import outcore
from outcore.elastic.digits import accuracy, lenet, load_digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="sync-easgd")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--data", help="a folder with MNIST; scikit-learn's digits without it")
    args = parser.parse_args()

    rank, num_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)  # the centre starts from rank 0's weights anyway
    digits = load_digits(args.data)
    net = lenet(digits.side)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    images, labels = digits.train_images[rank::num_workers], digits.train_labels[rank::num_workers]
    steps_per_epoch = len(digits.train_labels) // num_workers // 32

    with outcore.elastic.join(net, optimizer, method=args.method, period=4, limit_s=10) as worker:
        for step in range(worker.global_step, args.epochs * steps_per_epoch):  # a restarted worker goes on from here
            epoch, number = divmod(step, steps_per_epoch)
            shuffle = torch.Generator().manual_seed(1000 * rank + epoch)
            batch = torch.randperm(len(labels), generator=shuffle).split(32)[number]
            nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
            worker.step()
        center, stats = worker.center_state_dict(), worker.stats()

    if rank == 0:
        net.load_state_dict(center)
        reached = accuracy(net, digits.test_images, digits.test_labels)
        print(
            f"centre accuracy {100 * reached:.1f} % after {stats.num_steps} steps, {stats.num_exchanges} exchanges, "
            f"{100 * stats.communication_share:.0f} % of the time waiting"
        )


if __name__ == "__main__":
    main()
