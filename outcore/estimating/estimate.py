"""The public function: estimate(model, batch or step) -> Estimate, the needs of a training step before it is run.

    step on fake tensors ──▶ Trace ──plan for no memory──▶ the least budget that works
                               └────plan for budgets────▶ seconds at each of them

The trace is the one that a recording would give, so peaks and the least budget come from the same planning as in
`limit`. Seconds are estimated from the machine's rates, and are marked as estimates wherever they are shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from outcore.errors import BudgetTooSmall, OutcoreError
from outcore.estimating.fake_step import OptimizerLike, Recorded, record_fake
from outcore.estimating.settings import SETTINGS
from outcore.fitting.settings import FITTING
from outcore.machines import machine_from
from outcore.memory.machine import measure_machine, tiers_below
from outcore.memory.op_rates import measure_op_rates
from outcore.planning import plan
from outcore.planning.rewrites.gradient_sums import sums_in_place
from outcore.reporting.estimates import EstimatedBudget, estimate_page, estimate_table, slowdown_picture
from outcore.reporting.text import as_html, render
from outcore.units import ENDLESS_BYTES, parse_bytes
from outcore.values import Budget, Machine, OpRates, Trace
from outcore.values.codec import Saved

Tell = Callable[[str, float], None]


@dataclass(frozen=True)
class Estimate(Saved):
    """What a training step needs, and what it would cost in less memory. Bytes are computed with the memory model that
    plans are made with; seconds are estimates.

    ```python
    import outcore
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    found = outcore.estimate(model, torch.randn(256, 64), machine="a100")
    print(found.parameter_bytes, found.in_core_peak_bytes, found.least_bytes)
    ```
    """

    KIND: ClassVar[str] = "estimate"

    model: str
    machine: str
    device_bytes: int  # of that machine
    seconds_are: str  # where the seconds come from
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    input_bytes: int
    activation_bytes: int  # what autograd saves for the backward
    largest_op: str
    largest_op_bytes: int  # its operands and results
    in_core_peak_bytes: int
    in_core_step_s: float
    least_bytes: int  # the smallest budget that a plan exists for
    budgets: tuple[EstimatedBudget, ...]  # the smallest first
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the step runs on the machine without a plan."""
        return self.in_core_peak_bytes <= self.device_bytes

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}

    def to_svg(self) -> str:
        """Returns the slowdown over the budget as a figure in SVG."""
        return slowdown_picture(
            self.budgets, self.least_bytes, self.in_core_peak_bytes, title=f"{self.model} on {self.machine}"
        )

    def to_html(self) -> str:
        """Returns a self-contained page with the figure and the table."""
        return estimate_page(self.as_dict(), self.to_svg())

    def __str__(self) -> str:
        return render(estimate_table(self.as_dict()))

    def _repr_html_(self) -> str:
        return self.to_svg() + as_html(str(self))


def estimate(
    model: torch.nn.Module,
    batch_or_step: Any,
    memory: int | str | None = None,
    *,
    optimizer: OptimizerLike = None,
    machine: Machine | str | Path | None = None,
    progress: Tell = lambda what, part: None,
) -> Estimate:
    """Estimates what a training step of `model` needs, and how much slower it would be in less memory.

    The second argument is either a batch, with which the model is called (a dict by name, a tuple by position), or a
    function without arguments that does what is inside `with ooc.step():`. Nothing is run on real data, and neither the
    memory nor a GPU is needed: the step runs on fake tensors, and the model may be on `meta`. `memory` is a further
    budget to plan for. `optimizer`, whose state is counted, is an optimizer of the model, a class, or a name: `adamw`,
    `adam`, `sgd`. `machine` is by default this one; otherwise a :class:`Machine`, a file that ``outcore machine -o``
    wrote, or the name of a machine that comes with the package: `v100`, `rtx3060`, `rtx4090`, `a100`, `h100`, `h200`.

    ```python
    import outcore
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    found = outcore.estimate(model, torch.randn(256, 64), optimizer=torch.optim.AdamW, machine="a100")
    print(found.optimizer_bytes / found.parameter_bytes)  # a little over 2: two moments, and a count of steps
    ```
    """
    if not isinstance(model, torch.nn.Module):
        raise OutcoreError(f"estimate() takes a torch.nn.Module, not {type(model).__name__}; give it the model itself")
    if memory is not None:
        parse_bytes(memory, of_bytes=ENDLESS_BYTES)  # refuses nonsense before time is spent
    progress("measuring this machine" if machine is None else "reading the machine", 0.0)
    target, rates = _machine_and_rates(model, machine)
    wanted_bytes = None if memory is None else parse_bytes(memory, of_bytes=target.device_bytes)
    progress("running the step on fake tensors", 0.1)
    recorded = record_fake(model, batch_or_step, optimizer, target, rates)
    return _estimate(recorded, target, wanted_bytes, progress)


def _machine_and_rates(model: torch.nn.Module, machine: Machine | str | Path | None) -> tuple[Machine, OpRates]:
    if machine is None:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        if device.type == "meta":
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        _, folder = tiers_below(device, "auto", None)
        return measure_machine(device, folder), measure_op_rates(device)
    found = machine if isinstance(machine, Machine) else machine_from(machine)
    if found.op_rates is None:
        raise OutcoreError(
            f"the machine {found.name or found.device} has no rates of ops; measure it again: outcore machine -o FILE"
        )
    return found, found.op_rates


def _estimate(recorded: Recorded, machine: Machine, wanted_bytes: int | None, progress: Tell) -> Estimate:
    is_cuda = machine.device.startswith("cuda")
    trace = sums_in_place(recorded.trace) if is_cuda else recorded.trace
    in_core = plan(trace, machine, Budget(ENDLESS_BYTES), "keep-all")
    least_bytes = min(_least_bytes(trace, machine, is_cuda=is_cuda), in_core.in_core_peak_bytes)
    sizes = _budgets(least_bytes, in_core.in_core_peak_bytes, wanted_bytes, is_cuda=is_cuda)
    points = []
    for number, size_bytes in enumerate(sizes):
        progress("planning for several budgets", 0.3 + 0.7 * number / len(sizes))
        points.append(_at(trace, machine, size_bytes, in_core.in_core_step_s, is_cuda=is_cuda))
    largest_op, largest_op_bytes = _largest_op(trace)
    return Estimate(
        model=trace.model,
        machine=machine.name or machine.device,
        device_bytes=machine.device_bytes,
        seconds_are=f"estimated from {'given' if 'op_rates' in machine.given else 'measured'} rates",
        parameter_bytes=recorded.parameter_bytes,
        gradient_bytes=recorded.gradient_bytes,
        optimizer_bytes=recorded.optimizer_bytes,
        buffer_bytes=recorded.buffer_bytes,
        input_bytes=recorded.input_bytes,
        activation_bytes=_activation_bytes(trace),
        largest_op=largest_op,
        largest_op_bytes=largest_op_bytes,
        in_core_peak_bytes=in_core.in_core_peak_bytes,
        in_core_step_s=in_core.in_core_step_s,
        least_bytes=least_bytes,
        budgets=tuple(points),
        notes=_CUDA_NOTES if is_cuda else (),
    )


_CUDA_NOTES = (
    "workspaces inside kernels (cuDNN, cuBLAS) are known only on the device and are not counted",
    f"plans use about {100 * SETTINGS.reached_budget_share:.0f} % of a budget, because the allocator cannot use the "
    "rest, so at the in-core peak some values are still swapped or recomputed",
)


def _least_bytes(trace: Trace, machine: Machine, *, is_cuda: bool) -> int:
    try:
        plan(trace, machine, Budget(1, machine.host_bytes, machine.disk_bytes))
    except BudgetTooSmall as error:
        margin = FITTING.margin_share if is_cuda else SETTINGS.loop_share
        return int(error.needed_bytes / (1 - margin)) + (FITTING.unsplit_bytes if is_cuda else 0)
    raise OutcoreError("a plan was found for a single byte, which is a bug; please report it")


def _budgets(least_bytes: int, in_core_bytes: int, wanted_bytes: int | None, *, is_cuda: bool) -> list[int]:
    """Returns the budgets to plan for, the smallest first, from the least that works to the in-core peak, and on CUDA
    to the least in which everything is kept."""
    first = min(int(least_bytes * SETTINGS.point_share), in_core_bytes)
    sizes = {first + int((in_core_bytes - first) * share) for share in SETTINGS.point_shares}
    sizes |= {int(in_core_bytes / SETTINGS.reached_budget_share) + 1} if is_cuda else set()
    return sorted(sizes | ({wanted_bytes} if wanted_bytes is not None else set()))


def _at(trace: Trace, machine: Machine, size_bytes: int, in_core_s: float, *, is_cuda: bool) -> EstimatedBudget:
    """Plans for a budget with the default planner. On CUDA a plan gets the part that the allocator can use."""
    usable_bytes = int(size_bytes * SETTINGS.reached_budget_share) if is_cuda else size_bytes
    for tried_bytes in (usable_bytes, int(size_bytes * (1 - FITTING.margin_share)), size_bytes):
        budget = Budget(tried_bytes, machine.host_bytes, machine.disk_bytes)
        try:
            made = plan(trace, machine, budget, brief=True)
        except BudgetTooSmall:
            continue
        by = dict.fromkeys(("swap", "recompute", "remake"), 0)
        for value, decision in made.decisions.items():
            by[decision] = by.get(decision, 0) + trace.bytes_of(value)
        over = made.predicted_step_s / in_core_s - 1 if in_core_s else 0.0
        return EstimatedBudget(
            size_bytes, True, made.predicted_step_s, over, by["swap"], by["recompute"] + by["remake"]
        )
    return EstimatedBudget(size_bytes, False)


def _activation_bytes(trace: Trace) -> int:
    saved = {trace.values[tick.value].storage for tick in trace.ticks if tick.kind == "pack"}
    return sum(trace.storages[storage].bytes for storage in saved if not trace.storages[storage].external)


def _largest_op(trace: Trace) -> tuple[str, int]:
    """Returns the op whose operands and results take the most memory, and their bytes."""
    name, most_bytes = "none", 0
    for op in trace.ops:
        storages = {trace.values[value].storage for value in (*op.reads, *op.writes)}
        num_bytes = sum(trace.storages[storage].bytes for storage in storages) + op.workspace_bytes
        if num_bytes > most_bytes:
            where = f" in {op.module}" if op.module else ""
            name, most_bytes = f"{op.name.removesuffix('.default')}{where}", num_bytes
    return name, most_bytes
