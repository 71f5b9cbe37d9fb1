"""A GPU played by the CPU: a caching allocator whose figures a test sets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from outcore.errors import OutcoreError
from outcore.fitting.loop import Loop
from outcore.fitting.planning_process import PlanningProcess
from outcore.fitting.settings import FITTING
from outcore.limit import Limited, limit
from outcore.memory.device import CpuMemory, Peak, PeakWatch
from outcore.memory.meter import LiveBytes

T = TypeVar("T")


class PretendedGpu(CpuMemory):
    """Tensors lie on the CPU. `starts_over`: does the allocator in the step that ends? `extra_bytes`: there before each
    step, beside the model. What was asked of it is in `asked`."""

    has_caching_allocator = True

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        self.starts_over: Callable[[], bool] = lambda: False
        self.extra_bytes = 0
        self.asked: list[str] = []
        self._num_restarts = 0

    def before_step_bytes(self, inputs: Sequence[torch.Tensor]) -> int:
        return super().before_step_bytes(inputs) + self.extra_bytes

    def watch_peak(self, before_bytes: int, inputs: Sequence[torch.Tensor], *, has_unseen: bool) -> PeakWatch:
        self.asked.append("watch peak")
        return super().watch_peak(before_bytes, inputs, has_unseen=has_unseen)

    def before_recording(self) -> None:
        self.asked.append("before recording")

    def after_recording(self) -> None:
        self.asked.append("after recording")

    def begin_step(self, *, fits: bool) -> int:
        self.asked.append("step that fits" if fits else "step")
        return self._num_restarts

    def num_restarts(self) -> int:
        self._num_restarts += self.starts_over()
        return self._num_restarts

    def begin_gradient_pool(self) -> None:
        self.asked.append("gradient pool")

    def end_step(self) -> None:
        self.asked.append("end")

    def new_headroom(self) -> None:
        self.asked.append("new headroom")

    def give_back(self) -> None:
        self.asked.append("give back")


class Unwatched(CpuMemory):
    """A CPU whose peak is known without seeing every op, as on CUDA: nobody looks at the backward."""

    counts_op_by_op = False

    def watch_peak(self, before_bytes: int, inputs: Sequence[torch.Tensor], *, has_unseen: bool) -> PeakWatch:
        return _Given(before_bytes)


class _Given:
    meter: LiveBytes | None = None

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def read(self) -> Peak:
        return Peak(self._num_bytes, self._num_bytes)

    def stop(self) -> None:
        pass


class AtOnce(PlanningProcess):
    """Answers before anybody can ask whether it did."""

    def submit(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except OutcoreError as error:
            future.set_exception(error)
        return future


class Pretend:
    """Makes limits for one test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._home = sys.modules["outcore.limit"]

    def settings(self, **changed: Any) -> None:
        """Of the limits made from here on."""
        self._monkeypatch.setattr(self._home, "Loop", partial(Loop, settings=replace(FITTING, **changed)))

    def limit(
        self, model: nn.Module, memory: int | str, memory_type: type[CpuMemory] = PretendedGpu, **options: Any
    ) -> Limited:
        with self._monkeypatch.context() as patched:
            patched.setattr("outcore.fitting.loop.PlanningProcess", AtOnce)
            patched.setattr(self._home, "memory_of", lambda model, device, budget_bytes: memory_type(model, device))
            return limit(model, memory, **options)


def gpu_of(ooc: Limited) -> PretendedGpu:
    assert isinstance(ooc.device_memory, PretendedGpu)
    return ooc.device_memory
