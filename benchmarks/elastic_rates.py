"""Finds the rate at which P groups of one chip reach an accuracy in the fewest steps, in one process and untimed.

    python benchmarks/elastic_rates.py --data .carry/mnist --batch 4 --groups 1,4,8,16 --rates 0.02,0.05,0.1

`elastic.py`'s section `partition` compares setups that sum over 4 to 512 samples a step; one rate for all of them
would decide the comparison. Steps do not depend on the machine: a gradient sum over P groups is one process with P
batches, and elastic averaging is P models trained in turn, with the batches, the first weights and the update of the
real trials. So the rate of every setup, the lone group's too, comes from one grid here and is written beside
`partition`.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from outcore.elastic import rules
from outcore.elastic.digits import Digits, accuracy, lenet, load_digits
from outcore.elastic.flat import FlatModel
from outcore.elastic.methods import METHODS, default_alpha
from outcore.elastic.trials import Trial, batches_of

Centers = Iterator[nn.Module]


def gradient_sums(trial: Trial, digits: Digits) -> Centers:
    """sync-sgd: the network after each step."""
    net = first_net(trial, digits)
    optimizer = torch.optim.SGD(net.parameters(), lr=trial.rate, momentum=trial.momentum)
    feeds = [batches_of(trial, len(digits.train_labels), rank) for rank in range(trial.num_workers)]
    while True:
        learn(net, digits, torch.cat([next(feed) for feed in feeds]))
        optimizer.step()
        optimizer.zero_grad()
        yield net


def elastic_averages(trial: Trial, digits: Digits) -> Centers:
    """sync-easgd: the centre after each step; every `period` steps eqs. 1 and 2 with the old pair."""
    center = first_net(trial, digits)
    nets = [copy.deepcopy(center) for _ in range(trial.num_workers)]
    flats, middle = [FlatModel(net) for net in nets], FlatModel(center).vector
    optimizers = [torch.optim.SGD(net.parameters(), lr=trial.rate, momentum=trial.momentum) for net in nets]
    feeds = [batches_of(trial, len(digits.train_labels), rank) for rank in range(trial.num_workers)]
    alpha = trial.join.get("alpha") or default_alpha(METHODS["sync-easgd"], trial.num_workers)
    period, step = trial.join["period"], 0
    while True:
        step += 1
        apart = [rules.difference(flat.vector, middle) for flat in flats] if step % period == 0 else []
        for net, flat, optimizer, feed in zip(nets, flats, optimizers, feeds):
            learn(net, digits, next(feed))
            optimizer.step()
            flat.gradient.zero_()
        for flat, difference in zip(flats, apart):
            rules.worker_elastic(flat.vector, difference, alpha, out=flat.vector)
        if apart:
            rules.center_elastic(middle, torch.stack(apart).sum(0), alpha, out=middle)
        yield center


def first_net(trial: Trial, digits: Digits) -> nn.Module:
    torch.manual_seed(trial.seed)
    return lenet(digits.side)


def learn(net: nn.Module, digits: Digits, chosen: Tensor) -> None:
    nn.functional.cross_entropy(net(digits.train_images[chosen]), digits.train_labels[chosen]).backward()


def steps_to(
    targets: list[float], centers: Centers, judge: Callable[[nn.Module], float], every: int, max_steps: int
) -> dict[str, Any]:
    """The first step at which each target was reached in a judgement every `every` steps (None: not at all)."""
    reached: dict[str, int | None] = {str(target): None for target in targets}
    best = 0.0
    for step, center in enumerate(centers, 1):
        if step % every == 0:
            now = judge(center)
            best = max(best, now)
            for target in targets:
                if now >= target and reached[str(target)] is None:
                    reached[str(target)] = step
            if best >= max(targets) or (step > max_steps // 4 and now < 0.5):
                break
        if step >= max_steps:
            break
    return {"steps_to": reached, "best": best, "num_steps": step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with MNIST")
    parser.add_argument("--methods", default="sync-sgd,sync-easgd", help="of sync-sgd, sync-easgd")
    parser.add_argument("--batch", type=int, default=4, help="samples per group and step [4]")
    parser.add_argument("--groups", default="1,4,8,16", help="numbers of groups [1,4,8,16]")
    parser.add_argument("--rates", default="0.02,0.05,0.1", help="rates of the grid")
    parser.add_argument("--period", type=int, default=4, help="steps between elastic exchanges [4]")
    parser.add_argument("--alpha", type=float, help="moving rate [0.9 over the number of groups]")
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--targets", default="0.97,0.975,0.98", help="accuracies asked for")
    parser.add_argument("--seeds", default="0", help="seeds, as of a trial")
    parser.add_argument("--judged", type=int, default=2000, help="test images of a judgement [2000]")
    parser.add_argument("--max-samples", type=int, default=60_000, help="samples after which a setup gives up")
    parser.add_argument("--out", type=Path, help="results file, one JSON object a line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    digits = load_digits(args.data)
    targets = [float(target) for target in args.targets.split(",")]
    for seed, method, num, rate in product(
        map(int, args.seeds.split(",")),
        args.methods.split(","),
        map(int, args.groups.split(",")),
        args.rates.split(","),
    ):
        if method == "sync-easgd" and num == 1:
            continue
        fields: dict[str, Any] = {"rate": float(rate), "batch": args.batch, "momentum": args.momentum, "seed": seed}
        trial = Trial(method, method, num, join={"period": args.period, "alpha": args.alpha}, **fields)
        run = gradient_sums if method == "sync-sgd" else elastic_averages
        max_steps = args.max_samples // (num * args.batch)
        with torch.enable_grad():
            found = steps_to(
                targets,
                run(trial, digits),
                lambda net: accuracy(net, digits.test_images[: args.judged], digits.test_labels[: args.judged]),
                max(1, max_steps // 60),
                max_steps,
            )
        row = {"method": method, "num_groups": num, "period": args.period, "alpha": args.alpha, **fields, **found}
        print(json.dumps(row), flush=True)
        if args.out:
            with args.out.open("a") as lines:
                lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
