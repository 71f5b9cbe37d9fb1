"""The demo: trains a small ResNet on digits, with plain PyTorch and in a third of its memory, and compares all bits.

The same training runs from the same seed, first with everything kept, to measure its peak in the same way as under a
budget. Then plain PyTorch and the training under the budget run one step each in turn, so that load on the machine
slows both alike. Loss and gradients of every step, and the final parameters and buffers, are hashed: equal hashes mean
equal bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import date as Date
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outcore.errors import OutcoreError
from outcore.fitting.settings import FITTING
from outcore.limit import Limited, limit
from outcore.units import parse_bytes
from outcore.values import Machine, Plan, Schedule, Timeline, Trace

NUM_DIGITS = 1797  # that scikit-learn has
SIDE_PX = 64  # the 8 x 8 digits are upscaled, so that activations and not parameters fill the memory
BATCH = {"cpu": 64, "cuda": 768}
NUM_BLOCKS = {
    "cpu": 2,
    "cuda": 8,
}  # per stage; with fewer on a GPU, one op with its workspace would need a third of the memory
BUDGET_PART = 3  # a third of what the step needs in-core
NUM_STEPS = {"cpu": 10, "cuda": 16}  # on a GPU the first steps fit the plan to the allocator
MIN_STEPS = 2 + FITTING.num_measured  # one is recorded, some are measured, the others are timed
Tell = Callable[[str, float], None]  # the current activity, and the share that is done


class Bottleneck(nn.Module):
    """A bottleneck block: convolutions of 1x1, 3x3 and 1x1, and a shortcut."""

    def __init__(self, channels: int, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.around: nn.Module = nn.Identity()
        if channels != outer or stride != 1:
            self.around = nn.Sequential(nn.Conv2d(channels, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inside(x) + self.around(x), inplace=True)


class DigitsResNet(nn.Module):
    """A stem, two stages of bottlenecks and a linear head. All of its ops are deterministic on a GPU."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        more = range(num_blocks - 1)
        self.stage1 = nn.Sequential(Bottleneck(16, 16, 64, 1), *(Bottleneck(64, 16, 64, 1) for _ in more))
        self.stage2 = nn.Sequential(Bottleneck(64, 32, 128, 2), *(Bottleneck(128, 32, 128, 1) for _ in more))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stage2(self.stage1(self.stem(x))).mean((2, 3)))
        return logits


@dataclasses.dataclass(frozen=True)
class Demo:
    """The results of the demo. `facts` are its numbers; the other fields are for the report page."""

    device: str
    num_threads: int
    torch: str
    date: str
    num_steps: int
    batch: int
    planner: str
    in_core_peak_bytes: int
    budget_bytes: int
    peak_bytes: int
    predicted_peak_bytes: int
    bitwise_equal: bool
    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    in_core_step_s: float
    step_s: float
    predicted_step_s: float
    predicted_in_core_step_s: float
    first_loss: float
    last_loss: float
    total_s: float
    data: str
    values: tuple[Machine, Trace, Plan, Schedule, Timeline]

    @property
    def in_budget(self) -> bool:
        return self.peak_bytes <= self.budget_bytes

    def facts(self) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self) if field.name != "values"]
        return {
            **{name: getattr(self, name) for name in names},
            "in_budget": self.in_budget,
            "over_in_core": self.step_s / self.in_core_step_s - 1,
            "predicted_over_in_core": self.predicted_step_s / self.predicted_in_core_step_s - 1,
        }


@dataclasses.dataclass
class Training:
    """The results of one training."""

    marks: list[str] = dataclasses.field(default_factory=list)  # a hash per step, and one of the final state
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    settled: list[int] = dataclasses.field(default_factory=list)  # steps that followed a plan without being measured
    plan: Plan | None = None


def run_demo(
    memory: int | str | None = None,
    *,
    num_steps: int | None = None,
    planner: str = "hybrid",
    disk: str | None = None,
    tell: Tell = lambda what, part: None,
) -> Demo:
    """Trains with plain PyTorch and in `memory` (by default a third of the step's peak), and compares."""
    began_s = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_steps = NUM_STEPS[device.type] if num_steps is None else num_steps
    if num_steps < MIN_STEPS:
        raise OutcoreError(f"{num_steps} steps are too few: some are recorded or watched; take {MIN_STEPS}")
    images, labels, data = load_digits(device)
    limit(
        build(device), memory or "100%", planner=planner, disk=disk, cache=False
    ).close()  # refuses nonsense before time is spent
    with _fair():
        tell("what it needs in-core", 0.0)
        in_core_peak_bytes = _in_core_peak_bytes(images, labels)
        budget_bytes = _budget_bytes(memory, in_core_peak_bytes)
        model = build(device)
        ooc = limit(model, budget_bytes, planner=planner, disk=disk, cache=False)
        try:
            runs = train(images, labels, num_steps, build(device)), train(images, labels, num_steps, model, ooc)
            for plain, ours in zip(*runs):
                part = (len(plain.losses) + len(ours.losses)) / (2 * num_steps)
                tell("plain PyTorch and in less memory, step by step", part)
            found = _compare(ooc, plain, ours, in_core_peak_bytes, time.perf_counter() - began_s)
            return dataclasses.replace(found, data=data)
        finally:
            ooc.close()


def load_digits(device: torch.device) -> tuple[Tensor, Tensor, str]:
    """Returns scikit-learn's 1,797 scanned digits, shuffled with a fixed seed, and what they are. Without scikit-learn
    as many are made up: ten patterns and noise."""
    draw = torch.Generator().manual_seed(0)
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        labels = torch.arange(NUM_DIGITS) % 10
        images = torch.rand(10, 1, 8, 8, generator=draw)[labels] + 0.2 * torch.randn(
            NUM_DIGITS, 1, 8, 8, generator=draw
        )
        return images.to(device), labels.to(device), "made up (for scanned digits: pip install scikit-learn)"
    digits = load()
    order = torch.randperm(len(digits.target), generator=draw)
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)[order]
    return images.to(device), labels.to(device), "scikit-learn's digits"


def build(device: torch.device) -> DigitsResNet:
    torch.manual_seed(0)
    return DigitsResNet(NUM_BLOCKS[device.type]).to(device).train()


def train(
    images: Tensor, labels: Tensor, num_steps: int, model: nn.Module, ooc: Limited | None = None
) -> Iterator[Training]:
    """Runs an ordinary training loop inside `with ooc.step():`; yields after every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch, found, num_followed = BATCH[images.device.type], Training(), 0
    for step in range(num_steps):
        picked = torch.arange(step * batch, (step + 1) * batch, device=images.device) % len(images)
        x, y = F.interpolate(images[picked], size=(SIDE_PX, SIDE_PX), mode="bilinear"), labels[picked]
        began_s = _now_s(images.device)
        with ooc.step() if ooc is not None else nullcontext():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        found.seconds.append(_now_s(images.device) - began_s)
        found.losses.append(loss.item())
        if ooc is not None and ooc.plan is not None:
            num_followed = num_followed + 1 if ooc.plan is found.plan else 1
            found.settled += [step] if num_followed > FITTING.num_measured else []
            found.plan = ooc.plan
        found.marks.append(_hash([loss, *(p.grad for p in model.parameters() if p.grad is not None)]))
        optimizer.step()
        optimizer.zero_grad()
        del x, y, loss  # frees this step's tensors while the other training runs
        yield found
    found.marks.append(_hash(model.state_dict().values()))
    yield found


def _in_core_peak_bytes(images: Tensor, labels: Tensor) -> int:
    """Returns the peak with nothing swapped or recomputed, measured in the same way as under a budget."""
    model = build(images.device)
    ooc = limit(model, "100%", planner="keep-all", cache=False)
    try:
        for _ in train(images, labels, MIN_STEPS, model, ooc):
            if ooc.timeline is not None:  # the second step; the third on a GPU, where the second corrects op times
                return ooc.timeline.peak_bytes
        raise OutcoreError("the demo's step could not be measured in-core, which is a bug; please report it")
    finally:
        ooc.close()


def _budget_bytes(memory: int | str | None, in_core_peak_bytes: int) -> int:
    return in_core_peak_bytes // BUDGET_PART if memory is None else parse_bytes(memory, of_bytes=in_core_peak_bytes)


def _compare(ooc: Limited, plain: Training, ours: Training, in_core_peak_bytes: int, total_s: float) -> Demo:
    trace, plan, schedule, predicted, measured = ooc.trace, ours.plan, ooc.schedule, ooc.predicted, ooc.timeline
    timed = ours.settled or range(1, len(ours.seconds))
    if trace is None or plan is None or schedule is None or predicted is None or measured is None:
        raise OutcoreError("the demo's steps were not planned, which is a bug; run it again with --planner swap-all")
    step_s = statistics.median(ours.seconds[step] for step in timed)
    return Demo(
        device=ooc.machine.device,
        num_threads=torch.get_num_threads(),
        torch=torch.__version__,
        date=Date.today().isoformat(),
        num_steps=len(ours.losses),
        batch=BATCH[ooc.device.type],
        planner=plan.planner,
        in_core_peak_bytes=in_core_peak_bytes,
        budget_bytes=ooc.budget.device_bytes,
        peak_bytes=measured.peak_bytes,
        predicted_peak_bytes=predicted.peak_bytes,
        bitwise_equal=plain.marks == ours.marks,
        kept_bytes=predicted.kept_bytes,
        swapped_bytes=predicted.swapped_bytes,
        recomputed_bytes=predicted.recomputed_bytes,
        in_core_step_s=statistics.median(plain.seconds[step] for step in timed),
        step_s=step_s,
        predicted_step_s=predicted.step_s,
        predicted_in_core_step_s=plan.in_core_step_s,
        first_loss=ours.losses[0],
        last_loss=ours.losses[-1],
        total_s=total_s,
        data="",
        values=(ooc.machine, trace, plan, schedule, dataclasses.replace(measured, step_s=step_s)),
    )


def _hash(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _fair() -> Iterator[None]:
    """Makes both trainings comparable. cuDNN must choose the same kernels in both. On the CPU both use half the cores;
    the other half is left to the swap file's threads and other load."""

    cudnn, num_threads = torch.backends.cudnn, torch.get_num_threads()
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    torch.set_num_threads(max(1, num_threads // 2))
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        torch.set_num_threads(num_threads)
