"""A clock that advances with the work that is done and with nothing else, so that no test depends on a busy machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outcore.tuning.throughput.bench import Bench
from outcore.tuning.throughput.limited_steps import LimitedSteps


class WorkClock(TorchDispatchMode):
    """Seconds of the work that was done: each op takes a constant and a share of its inputs' bytes, convolutions and
    products a larger one. A recorder below this mode reads the clock when an op arrives, before it runs and after it:
    from the third time on the op's seconds have passed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_s = self._op_s = 0.0
        self.slower = 1.0  # times as long as usual
        self._num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        num_bytes = sum(leaf.nbytes for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, torch.Tensor))
        slow = any(name in func.name() for name in ("convolution", "mm"))
        self._op_s, self._num_reads = self.slower * (5e-6 + num_bytes * (2e-8 if slow else 1e-9)), 0
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.now_s, self._op_s = self.now_s + self._op_s, 0.0

    def __call__(self) -> float:
        self._num_reads += 1
        return self.now_s + (self._op_s if self._num_reads > 2 else 0.0)


@contextmanager
def work_clock(monkeypatch: pytest.MonkeyPatch, slower: Callable[[], float] = lambda: 1.0) -> Iterator[WorkClock]:
    """Steps on a `Bench` are timed by the work they do. What trains outside of it runs at full speed. `slower()` is
    asked before every step for the times as long that it takes: another device, or something else that runs."""
    clock, step, advance = WorkClock(), Bench.run_step, Bench.advance

    def counted_step(self: Bench, steps: LimitedSteps, data: Any) -> None:
        clock.slower = slower()
        with clock:
            step(self, steps, data)

    def counted_advance(self: Bench) -> None:
        with clock:
            advance(self)

    with monkeypatch.context() as patched:
        patched.setattr("outcore.memory.clock.time", SimpleNamespace(perf_counter=clock))
        patched.setattr(Bench, "clock", staticmethod(clock))
        patched.setattr(Bench, "run_step", counted_step)
        patched.setattr(Bench, "advance", counted_advance)
        yield clock
