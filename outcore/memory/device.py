"""A device -> what its memory tells before, during and after a step: one protocol, a CUDA and a CPU class.

On CUDA a caching allocator knows every figure, but it also reserves more than it hands out, starts over when no free
block is long enough, and may refuse memory to an op that then goes on with less. On the CPU no allocator can be asked:
bytes are counted op by op (`outcore.memory.meter`), and there is nothing to give back or to wait for.

Whoever fits plans to a device (`outcore.fitting`) asks only this protocol, so a test can play a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outcore.memory import cuda_allocator
from outcore.memory.cuda_allocator import HostPacing, Refusals
from outcore.memory.gradient_pool import GradientPool
from outcore.memory.meter import LiveBytes, Optimizers, resident_bytes, storages_there
from outcore.memory.workspace import AllocatorWorkspaces, NoWorkspaces, WorkspaceMeter
from outcore.planning.allocator.model import ROUND_BYTES, Places


@dataclass(frozen=True)
class Peak:
    """The most bytes of a step. `reserved_bytes`: what the allocator held; 0 where there is no caching allocator."""

    allocated_bytes: int
    reserved_bytes: int = 0


class PeakWatch(Protocol):
    """The peak of the step that runs. `meter`: who wants to see every tensor that the step makes, if anybody."""

    meter: LiveBytes | None

    def read(self) -> Peak: ...
    def stop(self) -> None: ...


class DeviceMemory(Protocol):
    """The memory of the device that a model is on."""

    device: torch.device
    has_caching_allocator: bool  # it reserves more than it hands out: plans must leave headroom, found by trying
    counts_op_by_op: bool  # the peak is known only where Python sees every op, also those of the backward
    is_slow_to_pin: bool  # fresh host memory is pinned before a copy: a recorded step drops what is quickly made again
    refusals: Refusals  # a context manager around a step

    def block_bytes(self, num_bytes: int) -> int:
        """What the allocator counts for a storage of that many bytes."""
        ...

    def allocated_bytes(self) -> int:
        """What the allocator has handed out; 0 where there is none to ask."""
        ...

    def workspaces(self, before_bytes: int) -> WorkspaceMeter:
        """Reads what each op of a step allocates beyond its storages. `before_bytes`: allocated when the step began."""
        ...

    def before_step_bytes(self, inputs: Sequence[torch.Tensor]) -> int:
        """What is allocated when a step begins: parameters, gradients, optimizer state, inputs."""
        ...

    def watch_peak(self, before_bytes: int, inputs: Sequence[torch.Tensor], *, has_unseen: bool) -> PeakWatch:
        """Begins to watch the peak. `has_unseen`: the step uses storages that no op makes."""
        ...

    def before_recording(self) -> None: ...
    def after_recording(self) -> None: ...

    def begin_step(self, *, fits: bool) -> int:
        """A planned step begins. `fits`: its plan was measured and made the allocator start over in no step. Returns
        how often the allocator started over so far."""
        ...

    def num_restarts(self) -> int:
        """How often the allocator started over so far."""
        ...

    def begin_gradient_pool(self) -> None:
        """Small gradients of the step that begins go to pages of their own."""
        ...

    def end_step(self) -> None:
        """The step is over, however it ended."""
        ...

    def new_headroom(self) -> None:
        """Plans of another size will be tried: what was learned about the host's pace no longer holds."""
        ...

    def give_back(self) -> None:
        """Gives free pages back to the driver."""
        ...

    def places(self) -> Places:
        """Address and bytes of the large blocks that are there."""
        ...

    @property
    def host_waits(self) -> bool:
        """Whether the host waits for the device before each step."""
        ...

    def close(self) -> None:
        """Takes every hook off again."""
        ...


def memory_of(model: torch.nn.Module, device: torch.device, budget_bytes: int) -> DeviceMemory:
    """The memory of `device`, made ready for steps of `model` in `budget_bytes`."""
    return CudaMemory(model, device, budget_bytes) if device.type == "cuda" else CpuMemory(model, device)


class CudaMemory:
    has_caching_allocator, counts_op_by_op = True, False
    is_slow_to_pin = True

    def __init__(self, model: torch.nn.Module, device: torch.device, budget_bytes: int) -> None:
        self.device = device
        self.refusals = Refusals(device)
        self.gradient_pool = GradientPool(model.parameters(), budget_bytes, device, self.refusals.excuse)
        self._pacing = HostPacing(device)
        cuda_allocator.make_ready(device)

    def block_bytes(self, num_bytes: int) -> int:
        return -(-num_bytes // ROUND_BYTES) * ROUND_BYTES

    def allocated_bytes(self) -> int:
        return cuda_allocator.allocated_bytes(self.device)

    def workspaces(self, before_bytes: int) -> WorkspaceMeter:
        return AllocatorWorkspaces(self.device, before_bytes)

    def before_step_bytes(self, inputs: Sequence[torch.Tensor]) -> int:
        return self.allocated_bytes()

    def watch_peak(self, before_bytes: int, inputs: Sequence[torch.Tensor], *, has_unseen: bool) -> PeakWatch:
        return _AllocatorPeak(self.device)

    def before_recording(self) -> None:
        gc.collect()  # what nobody holds any more would count as there all along

    def after_recording(self) -> None:
        torch.cuda.empty_cache()  # the optimizer's state, made next, should not lie scattered among holes

    def begin_step(self, *, fits: bool) -> int:
        return self._pacing.begin(fits=fits)

    def num_restarts(self) -> int:
        return cuda_allocator.count_restarts(self.device)

    def begin_gradient_pool(self) -> None:
        self.gradient_pool.begin()

    def end_step(self) -> None:
        self.gradient_pool.end()

    def new_headroom(self) -> None:
        self._pacing = HostPacing(self.device)

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def places(self) -> Places:
        return cuda_allocator.places(self.device)

    @property
    def host_waits(self) -> bool:
        return self._pacing.waits

    def close(self) -> None:
        self.gradient_pool.remove()


class _AllocatorPeak:
    meter: LiveBytes | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> Peak:
        return Peak(torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device))

    def stop(self) -> None:
        pass


class CpuMemory:
    has_caching_allocator, counts_op_by_op = False, True
    host_waits = is_slow_to_pin = False

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.device = device
        self.refusals = Refusals(device)
        self.optimizers = Optimizers(model)
        self._model = model

    def block_bytes(self, num_bytes: int) -> int:
        return num_bytes

    def allocated_bytes(self) -> int:
        return 0

    def workspaces(self, before_bytes: int) -> WorkspaceMeter:
        return NoWorkspaces()

    def before_step_bytes(self, inputs: Sequence[torch.Tensor]) -> int:
        resident = resident_bytes(self._model, self.optimizers, self.device)
        return resident + sum(tensor.nbytes for tensor in inputs if tensor.device.type == "cpu")

    def watch_peak(self, before_bytes: int, inputs: Sequence[torch.Tensor], *, has_unseen: bool) -> PeakWatch:
        there = storages_there(self._model, inputs) if has_unseen else None
        return _CountedPeak(LiveBytes(before_bytes, there))

    def before_recording(self) -> None:
        pass

    def after_recording(self) -> None:
        pass

    def begin_step(self, *, fits: bool) -> int:
        return 0

    def num_restarts(self) -> int:
        return 0

    def begin_gradient_pool(self) -> None:
        pass

    def end_step(self) -> None:
        pass

    def new_headroom(self) -> None:
        pass

    def give_back(self) -> None:
        pass

    def places(self) -> Places:
        return ()

    def close(self) -> None:
        self.optimizers.remove()


class _CountedPeak:
    def __init__(self, meter: LiveBytes) -> None:
        self.meter: LiveBytes | None = meter
        self._counted = meter

    def read(self) -> Peak:
        return Peak(self._counted.peak_bytes)

    def stop(self) -> None:
        self._counted.stop()
