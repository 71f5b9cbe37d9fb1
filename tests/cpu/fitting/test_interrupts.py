"""An interrupt before any line that a step executes leaves the process as it was, and the next step works.

Every line of the files that set something up is interrupted the first time it is executed, in every phase;
OUTCORE_EXPLORE=1 does so every time.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.fitting.hooks import ACTIVE
from outcore.fitting.phases import Phase, Recorded, Settled, Timed, Trying
from outcore.limit import Limited
from tests.cpu.fitting.pretended import Pretend, PretendedGpu

pytestmark = pytest.mark.usefixtures("both_ways")

PACKAGE = Path(outcore.__file__).parent
FILES = {
    str(PACKAGE / "limit.py"),
    str(PACKAGE / "eager" / "intercept.py"),
    str(PACKAGE / "eager" / "doors.py"),
    contextlib.__file__,
}
FILES |= {str(path) for path in (PACKAGE / "fitting").glob("*.py")}
NUM_TIMES = 1000 if os.environ.get("OUTCORE_EXPLORE") else 1
Line = tuple[str, int, int]  # file, line, and how often it was executed in the step


def dispatch_keys() -> tuple[str, str]:
    """What this thread's ops pass through, and what they leave out."""
    return str(torch._C._dispatch_tls_local_include_set()), str(torch._C._dispatch_tls_local_exclude_set())


class Interrupts:
    """Raises before the first line of a step that it did not raise before yet, one after the other."""

    def __init__(self) -> None:
        self.done: set[Line] = set()
        self._num_seen: Counter[tuple[str, int]] = Counter()

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line" and not leaves_with(frame):
            here = frame.f_code.co_filename, frame.f_lineno
            self._num_seen[here] += 1
            line = (*here, self._num_seen[here])
            if line[2] <= NUM_TIMES and line not in self.done:
                self.done.add(line)
                self.last = f"interrupted before {here[0].removeprefix(str(PACKAGE))}:{here[1]}"
                raise KeyboardInterrupt
        return self

    def interrupt(self, call: Callable[[], None]) -> bool:
        """Whether there was a line left."""
        before, num_done = sys.gettrace(), len(self.done)
        self._num_seen.clear()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return len(self.done) > num_done


@functools.cache
def offsets_that_leave_a_with(code: Any) -> frozenset[int]:
    """Where `__exit__(None, None, None)` is called, in bytecode."""
    found = list(dis.get_instructions(code))
    nones = [one.opname == "LOAD_CONST" and one.argval is None for one in found]
    return frozenset(one.offset for at, one in enumerate(found) if nones[at : at + 3] == [True] * 3)


def leaves_with(frame: Any) -> bool:
    """Does the frame leave a `with` next? Between the last call of the body and that, Python looks for no signal: only
    what traces lines can raise there."""
    return frame.f_lasti in offsets_that_leave_a_with(frame.f_code)


class Loop:
    """A small training loop, and what its gradients are without us."""

    def __init__(self, make: Callable[[nn.Module], Limited]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.x = torch.randn(64, 16)
        self.model(self.x).sum().backward()
        self.expected = self.gradients()
        self.dispatch_keys = dispatch_keys()
        self.ooc = make(self.model)

    def gradients(self) -> list[torch.Tensor]:
        found = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.model.zero_grad()
        return found

    def step(self) -> None:
        with self.ooc.step():
            self.model(self.x).sum().backward()

    def reach(self, phase: type[Phase] | None) -> None:
        """Until the next step is one of this phase; None: it is recorded."""
        self.model.zero_grad()
        if phase not in (Trying, Settled) or not self._is_in(phase):
            self.ooc.kinds.clear()
        while phase is not None and not self._is_in(phase):
            self.step()
            self.model.zero_grad()

    def _is_in(self, phase: type[Phase]) -> bool:
        return any(type(kind.phase) is phase for kind in self.ooc.kinds)

    def check_as_before(self, said: str) -> None:
        assert not ACTIVE, said
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, said
        assert not torch.nn.modules.module._has_any_global_hook(), said
        assert dispatch_keys() == self.dispatch_keys, said
        assert gc.isenabled(), said
        assert torch.is_grad_enabled(), said
        hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in self.model.modules()]
        assert hooks == [1, 0, 0, 0, 0], said
        self.model.zero_grad()
        self.step()
        assert all(map(torch.equal, self.gradients(), self.expected)), said


def interrupt_all(loop: Loop, phase: type[Phase] | None) -> int:
    """Interrupts one step after the other, each at another line; how many."""
    interrupts = Interrupts()
    loop.reach(phase)
    while interrupts.interrupt(loop.step):
        loop.check_as_before(interrupts.last)
        loop.reach(phase)
    return len(interrupts.done)


@pytest.mark.parametrize("phase", [None, Timed, Settled], ids=["recorded", "first planned", "settled"])
def test_a_step_on_the_cpu(phase: type[Phase] | None) -> None:
    loop = Loop(lambda model: outcore.limit(model, "100%", planner="recompute-all"))
    assert interrupt_all(loop, phase) > 50
    gc.collect()
    assert loop.ooc.store.num_parcels == 0
    loop.ooc.close()


@pytest.mark.parametrize("phase", [Recorded, Trying], ids=["timed", "tried"])
def test_a_step_as_on_a_gpu(phase: type[Phase], pretend: Pretend) -> None:
    loop = Loop(lambda model: pretend.limit(model, "100%", PretendedGpu, planner="swap-all"))
    assert interrupt_all(loop, phase) > 50
    loop.ooc.close()


def test_a_second_interrupt_while_the_first_is_on_its_way() -> None:
    """As from somebody who presses Ctrl-C twice: the second comes while the step is being left."""
    loop = Loop(lambda model: outcore.limit(model, "100%", planner="recompute-all"))
    loop.reach(Settled)

    def fail() -> None:
        with loop.ooc.step():
            loop.model(loop.x)
            raise KeyboardInterrupt

    interrupts = Interrupts()
    while interrupts.interrupt(fail):
        loop.check_as_before(interrupts.last)
    assert len(interrupts.done) > 50
    loop.ooc.close()
