"""Program -> verdicts: plain PyTorch twice, then outcore with a planner and a budget, step by step.

Times of ops and rates of copies are drawn from the program's seed instead of being measured: plans are then the same on
every machine, and as different from program to program as those of very different machines.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import outcore
from outcore.planning.planners import hybrid
from outcore.planning.preparing import PURE
from outcore.planning.settings import HYBRID
from tests.fuzz import pieces
from tests.fuzz.program import Program, source

PLANNERS = ("hybrid", "pooch", "swap-all", "recompute-all")
SHARES = (1.0, 0.7, 0.45)  # of the in-core peak
COMBINATIONS = tuple((planner, share) for share in SHARES for planner in PLANNERS)
LEAST_PREDICTED_SHARE = 0.99  # of a predicted peak, that is measured
MAX_RAISES = 4  # times a budget is raised: sizes that come later may each name their own
IN_CORE_STEPS = 4  # of a program, that tell its in-core peak
SWAP_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None  # swapping waits for a disk elsewhere
MAX_FLIPS = 30  # of the hybrid planner's search: any plan must give the same numbers, a good one takes longer to find

_PARCELS = "parcels in the store"

Snapshot = dict[str, bytes | None]


class Refused(Exception):
    """outcore says that it cannot run this program."""


@dataclass
class Verdict:
    """What came of a program under one planner and budget."""

    planner: str
    share: float
    outcome: str  # same, or what is wrong: numbers, over, prediction, crash, refused, budget, left behind
    detail: str = ""
    step: int = -1
    num_planned: int = 0  # steps that followed a plan
    num_steps: int = 0
    raised_bytes: int = 0  # the budget that was named and then used
    num_left_over: int = 0  # steps that left their plan, held more than the budget, and said so
    least_measured: float = 1.0  # of the predicted peaks of steps that did what a recorded one did
    most_measured: float = 0.0
    seconds: float = 0.0

    @property
    def is_wrong(self) -> bool:
        return self.outcome not in ("same", "refused")


@dataclass
class Report:
    """All verdicts of a program."""

    seed: int
    outcome: str  # ran, plain fails, plain differs
    detail: str = ""
    in_core_bytes: int = 0
    seconds: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list)


# -- running a program ------------------------------------------------------------------------------------------------


def namespace(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {name: item for name, item in vars(pieces).items() if not name.startswith("_")}
    names |= {"torch": torch, "nn": nn, "F": F, "np": np, "copy": copy, "checkpoint": checkpoint, "Tensor": Tensor}
    exec(compile(text, "<program>", "exec"), names)
    return names


@lru_cache(maxsize=64)
def _data(rows: int, step: int) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(1000 * step + rows))


def data(rows: int, step: int) -> Tensor:
    return _data(rows, step).clone()


def bits(tensor: Tensor) -> bytes:
    """Of a copy: nothing is made again from memory that NumPy has seen."""
    tensor = tensor.detach().clone()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().contiguous().numpy().tobytes()


class Running:
    """A program's model and optimizer, stepped one step at a time."""

    def __init__(self, program: Program, names: dict[str, Any]) -> None:
        torch.manual_seed(program.seed)
        self.model: nn.Module = names["Net"]()
        self._step: Callable[..., tuple[Tensor, Tensor | None]] = names["step"]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=program.frame.momentum)
        torch.manual_seed(program.seed + 1)

    def step(self, t: int, limited: Callable[[], AbstractContextManager[Any]]) -> Snapshot:
        loss, given = self._step(self.model, self.optimizer, t, limited, data)
        return self.snapshot(loss, given)

    def snapshot(self, loss: Tensor, given: Tensor | None) -> Snapshot:
        """Everything that must not change."""
        seen: Snapshot = {"loss": bits(loss), "rng": torch.get_rng_state().numpy().tobytes()}
        seen["gradient of the input"] = bits(given) if given is not None else None
        for name, parameter in self.model.named_parameters():
            seen[f"gradient of {name}"] = bits(parameter.grad) if parameter.grad is not None else None
            seen[f"parameter {name}"] = bits(parameter)
        for name, buffer in self.model.named_buffers():
            seen[f"buffer {name}"] = bits(buffer)
        for name, item in vars(self.model).items():
            if isinstance(item, Tensor):
                seen[f"attribute {name}"] = bits(item)
            elif isinstance(item, torch.Generator):
                seen[f"generator {name}"] = item.get_state().numpy().tobytes()
        log: list[Any] = self.model.log  # type: ignore[assignment]
        seen["log"] = b"".join(bits(item) for item in log)
        log.clear()
        return seen


def plain(program: Program, names: dict[str, Any]) -> list[Snapshot]:
    running = Running(program, names)
    return [running.step(t, nullcontext) for t in range(program.num_steps)]


class _OpNames(TorchDispatchMode):
    """The operators that a step calls, one after the other."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def work_of(program: Program, names: dict[str, Any]) -> list[tuple[str, ...]]:
    """What each step does inside the limit: memory is promised to steps that do what a recorded one did."""
    running, work = Running(program, names), list[tuple[str, ...]]()
    for t in range(program.num_steps):
        seen: list[str] = []

        @contextmanager
        def limited(seen: list[str] = seen) -> Iterator[None]:
            with _OpNames() as mode:
                yield
            seen += mode.names

        running.step(t, limited)
        work.append(tuple(seen))
    return work


def difference(mine: Snapshot, theirs: Snapshot) -> str:
    """Names of what differs; empty where nothing does."""
    names = [name for name in {**mine, **theirs} if mine.get(name, b"absent") != theirs.get(name, b"absent")]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


# -- as reproducible as can be ----------------------------------------------------------------------------------------


@contextmanager
def drawn_times(seed: int) -> Iterator[None]:
    """Replaces every measurement by numbers drawn from the seed, and keeps the planner's search short."""
    from outcore.memory import clock, machine

    drawn = random.Random(f"times {seed}")
    rate, low = 10 ** drawn.uniform(6, 10), drawn.choice((1e-6, 1e-5, 1e-4))

    def seconds(self: Any) -> list[float]:
        return [low * 10 ** (2 * random.Random(index + seed).random()) for index, _ in enumerate(self._pairs)]

    def measure_machine(device: torch.device, folder: str | None) -> outcore.Machine:
        return outcore.Machine(
            device="cpu", device_bytes=2**33, host_bytes=0, disk_bytes=2**28, swap_out_bytes_per_s=rate,
            swap_in_bytes_per_s=rate, disk_write_bytes_per_s=rate, disk_read_bytes_per_s=rate, duplex_share=0.7,
            copy_latency_s=drawn.choice((1e-6, 1e-4)), measured_at="2000-01-01", given=(),
        )  # fmt: skip

    holders = [module for name, module in sys.modules.items() if name.startswith("outcore.")]
    holders = [module for module in holders if hasattr(module, "measure_machine")]
    before = clock.Clock.seconds, machine.measure_machine, HYBRID
    try:
        setattr(clock.Clock, "seconds", seconds)  # noqa: B010
        setattr(hybrid, "HYBRID", replace(HYBRID, max_flips=MAX_FLIPS))  # noqa: B010
        for module in holders:
            setattr(module, "measure_machine", measure_machine)  # noqa: B010
        yield
    finally:
        setattr(clock.Clock, "seconds", before[0])  # noqa: B010
        setattr(hybrid, "HYBRID", before[2])  # noqa: B010
        for module in holders:
            setattr(module, "measure_machine", before[1])  # noqa: B010


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- one program under outcore ----------------------------------------------------------------------------------------


class Wrong(Exception):
    """A check failed."""

    def __init__(self, outcome: str, detail: str, step: int = -1) -> None:
        super().__init__(detail)
        self.outcome, self.detail, self.step = outcome, detail, step


@dataclass(frozen=True)
class Expected:
    """What plain PyTorch shows of a program, step by step."""

    snapshots: list[Snapshot]
    work: list[tuple[str, ...]]


def limited_run(
    program: Program, names: dict[str, Any], expected: Expected, planner: str, memory_bytes: int, verdict: Verdict
) -> int:
    """Runs under outcore and checks every step; the in-core peak that it planned with. Raises Wrong."""
    running = Running(program, names)
    t = -1
    measure = _is_measured(program)
    ooc = outcore.limit(running.model, memory_bytes, planner=planner, measure=measure, disk=SWAP_FOLDER)
    in_core_bytes, num_recorded, rows = 0, 0, program.frame.rows
    said_bytes = memory_bytes  # the highest peak of which a warning told
    recorded: dict[int, int] = {}  # rows -> the step that was recorded last with as many
    try:
        before = ooc.timeline
        for t in range(program.num_steps):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                seen = running.step(t, ooc.step)
                measured = ooc.timeline
            if not _is_measured(program):
                for kind in ooc.kinds.values():
                    kind.stop_measuring()
            if ooc.stats()["recorded"] > num_recorded:
                num_recorded, recorded[rows[t % len(rows)]] = int(ooc.stats()["recorded"]), t
            different = difference(expected.snapshots[t], seen)
            if different:
                raise Wrong("numbers", f"{different} {'differs' if ',' not in different else 'differ'}", t)
            verdict.num_steps += 1
            if _is_measured(program) and measured is not None and measured is not before:
                verdict.num_planned += 1
                like = recorded.get(rows[t % len(rows)], max(recorded.values()))
                if expected.work[t] == expected.work[like]:
                    _check_memory(ooc, memory_bytes, verdict, t)
                elif any("of a budget of" in str(w.message) for w in said):
                    said_bytes = max(said_bytes, measured.peak_bytes)
                elif measured.peak_bytes > said_bytes:  # the same is not said at every such step
                    raise Wrong("over", f"silently: {measured.peak_bytes} of {memory_bytes} bytes", t)
            before = measured
            verdict.num_left_over += any("left its plan took" in str(warning.message) for warning in said)
            if ooc.plan is not None:
                in_core_bytes = max(in_core_bytes, ooc.plan.in_core_peak_bytes)
        verdict.step = -1
    except (Wrong, outcore.BudgetTooSmall):
        verdict.step = t
        raise
    except outcore.OutcoreError as error:
        raise Refused(f"step {t}: {type(error).__name__}: {error}") from error
    except Exception as error:
        raise Wrong("crash", f"{type(error).__name__}: {error}", t) from error
    finally:
        _close(ooc, running)
    _check_clean(ooc, program, names)
    return in_core_bytes


def _is_measured(program: Program) -> bool:
    """Every second program is measured step by step. In the steps of the others fewer ops are seen, as in real loops
    once a plan has settled: only numbers are compared there."""
    return program.seed % 2 == 0


def _check_memory(ooc: outcore.Limited, memory_bytes: int, verdict: Verdict, t: int) -> None:
    measured, predicted = ooc.timeline, ooc.predicted
    assert measured is not None
    assert predicted is not None
    figures = f"budget {memory_bytes}, predicted {predicted.peak_bytes}, measured {measured.peak_bytes}"
    # What earlier steps took beyond their plan, and said so, counts as if it were there from then on.
    free_bytes = max(kind.excess.free_bytes for kind in ooc.kinds.values())
    share = measured.peak_bytes / predicted.peak_bytes
    least_share = measured.peak_bytes / (predicted.peak_bytes - free_bytes)
    verdict.most_measured, verdict.least_measured = (
        max(verdict.most_measured, share),
        min(verdict.least_measured, least_share),
    )
    if measured.peak_bytes > memory_bytes:
        raise Wrong("over", f"{measured.peak_bytes / memory_bytes:.3f} x the budget ({figures})", t)
    if measured.peak_bytes > predicted.peak_bytes:
        raise Wrong("prediction", f"measured {share:.3f} x ({figures})", t)
    if least_share < LEAST_PREDICTED_SHARE:
        raise Wrong("prediction", f"measured only {least_share:.3f} x ({figures})", t)


def _close(ooc: outcore.Limited, running: Running) -> None:
    running.optimizer.zero_grad()
    for name in ("kept",):
        vars(running.model).pop(name, None)
    with contextlib.suppress(Exception):
        ooc.close()


def _check_clean(ooc: outcore.Limited, program: Program, names: dict[str, Any]) -> None:
    """Nothing is left, neither in the store nor in the process, that plain PyTorch does not leave."""
    left = [name for name, is_left in _left(ooc).items() if is_left]
    if left and not (left == [_PARCELS] and plain_leaks(program, names)):
        raise Wrong("left behind", ", ".join(left))


def _left(ooc: outcore.Limited) -> dict[str, bool]:
    model = ooc.model
    return {
        _PARCELS: ooc.store.num_parcels != 0,
        "hooks on the model": bool(model._forward_pre_hooks or model._forward_hooks),
        "the garbage collector is off": not gc.isenabled(),
        "a dispatch mode": torch._C._len_torch_dispatch_stack() != 0,
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "autocast": torch.is_autocast_enabled("cpu"),
        "gradients are off": not torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
    }


class _Box:
    """What a saved tensor is packed into, to count those that are left."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def plain_leaks(program: Program, names: dict[str, Any]) -> bool:
    """Whether plain PyTorch never frees a graph of the program, as where `save_on_cpu` saves what is on the CPU
    already: the handles in such a graph stay, too."""
    boxes: list[weakref.ref[_Box]] = []

    def pack(tensor: Tensor) -> _Box:
        box = _Box(tensor)
        boxes.append(weakref.ref(box))
        return box

    running = Running(program, names)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        for t in range(program.num_steps):
            running.step(t, nullcontext)
    running.optimizer.zero_grad()
    vars(running.model).pop("kept", None)
    del running
    gc.collect()
    return any(box() is not None for box in boxes)


def verdict_of(
    program: Program,
    names: dict[str, Any],
    expected: Expected,
    planner: str,
    share: float,
    in_core_bytes: int,
    known: Sequence[Verdict] = (),
) -> Verdict:
    """Under one planner and budget. A budget that is too small is raised to what it says it needs, which must do. Not
    for planners that never mix: in more memory more can be made again while they record, and so they need more. A run
    depends on nothing else, so one that is `known` is not repeated."""
    verdict = Verdict(planner, share, "same")
    memory_bytes, failed_at = int(in_core_bytes * share), -2
    started = time.process_time()
    try:
        for attempt in range(MAX_RAISES + 1):
            for one in known:
                if (one.planner, one.raised_bytes) == (planner, memory_bytes):
                    return replace(one, share=share, seconds=time.process_time() - started)
            try:
                verdict.num_planned = verdict.num_steps = 0
                limited_run(program, names, expected, planner, memory_bytes, verdict)
                break
            except outcore.BudgetTooSmall as error:
                is_repeated = verdict.step <= failed_at and planner not in PURE
                if is_repeated or attempt == MAX_RAISES or error.needed_bytes <= memory_bytes:
                    raise Wrong("budget", f"{memory_bytes} bytes were named, then {error}", verdict.step) from None
                memory_bytes, failed_at = error.needed_bytes, verdict.step
                verdict.raised_bytes = memory_bytes
    except Wrong as wrong:
        verdict.outcome, verdict.detail, verdict.step = wrong.outcome, wrong.detail[:500], wrong.step
    except Refused as refused:
        verdict.outcome, verdict.detail = "refused", str(refused)[:500]
    verdict.seconds = time.process_time() - started
    return verdict


def check(program: Program, combinations: tuple[tuple[str, float], ...] = COMBINATIONS) -> Report:
    """Everything about one program. The in-core peak is what the planner that keeps everything needs."""
    report, started = Report(program.seed, "ran"), time.process_time()
    torch.set_num_threads(1)
    names = namespace(source(program))
    with quiet(), drawn_times(program.seed):
        try:
            expected, again = plain(program, names), plain(program, names)
        except Exception as error:
            report.outcome, report.detail = "plain fails", f"{type(error).__name__}: {error}"[:500]
            return report
        different = [difference(mine, theirs) for mine, theirs in zip(expected, again, strict=True)]
        if any(different):
            report.outcome, report.detail = "plain differs", next(filter(None, different))
            return report
        in_core = Verdict("keep-all", 0.0, "same")
        compared = Expected(expected, work_of(program, names))
        try:
            few = replace(program, num_steps=min(program.num_steps, IN_CORE_STEPS))
            report.in_core_bytes = limited_run(few, names, compared, "keep-all", 2**32, in_core)
        except Wrong as wrong:
            in_core.outcome, in_core.detail, in_core.step = wrong.outcome, wrong.detail[:500], wrong.step
        except Refused as refused:
            in_core.outcome, in_core.detail = "refused", str(refused)[:500]
        report.verdicts.append(in_core)
        in_core_bytes = report.in_core_bytes or 300_000
        for planner, share in combinations:
            known = report.verdicts
            report.verdicts.append(verdict_of(program, names, compared, planner, share, in_core_bytes, known))
    report.seconds = time.process_time() - started
    return report
