"""A planned step that measures the seconds of its ops, and of the host between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outcore.eager.cells import Handle, Kept
from outcore.eager.execution import Execution
from outcore.eager.launches import Kernel, Tensors
from outcore.eager.planned_launches import PlannedLaunches
from outcore.eager.signatures import OpOverload
from outcore.memory.clock import HostGaps, Looks


class TimedExecution(Execution):
    """Follows its program like any other step, and times its ops."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._host = HostGaps()
        self._gaps: list[tuple[float, int]] = []

    def timed(self, looks: Looks) -> tuple[list[str], list[float], list[float]]:
        """Returns the names of its ops, their seconds, and the host's before each, corrected by `looks`."""
        assert self.times is not None
        seconds = self.times.seconds()
        apart = [looks.apart(gap, op_s) for gap, op_s in zip(self._gaps, seconds, strict=True)]
        return self.times.names, [op_s for _, op_s in apart], [host_s for host_s, _ in apart]

    def op(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._host.arrive()
        self._gaps.append(self._host.take())
        result = super().op(func, args, kwargs)
        self._host.leave()
        return result

    def enter_graph(self, kernels: Sequence[Kernel]) -> PlannedLaunches:
        return _TimedLaunches(super().enter_graph(kernels), self._host, self._gaps)

    def pack(self, tensor: torch.Tensor) -> Handle | Kept:
        self._host.arrive(1)
        handle = super().pack(tensor)
        self._host.leave()
        return handle

    def unpack(self, handle: Handle | Kept) -> torch.Tensor:
        self._host.arrive(1)
        tensor = super().unpack(handle)
        self._host.leave()
        return tensor


class _TimedLaunches(PlannedLaunches):
    """Times the launches of a compiled graph, which are ops of the step, too."""

    def __init__(self, launches: PlannedLaunches, host: HostGaps, gaps: list[tuple[float, int]]) -> None:
        vars(self).update(vars(launches))
        self._host, self._gaps = host, gaps

    def before(self, kernel: Kernel, reads: Tensors, changes: Tensors, numbers: Sequence[Any]) -> Any:
        self._host.arrive()
        self._gaps.append(self._host.take())
        return super().before(kernel, reads, changes, numbers)

    def after(self, mark: Any, fresh: Tensors, overwritten: Tensors) -> None:
        super().after(mark, fresh, overwritten)
        self._host.leave()
