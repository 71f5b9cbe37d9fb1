"""Device -> DeviceMemory: what is allocated before, during and after a step. One protocol, a CUDA and a CPU class.

On CUDA the caching allocator reports every figure. It also reserves more than it hands out, restarts (frees its whole
cache) when no free block is large enough, and may refuse memory to an op, which then continues with less. The CPU has
no such allocator: bytes are counted op by op (`outcore.memory.meter`), and nothing can be given back or waited for.

`outcore.fitting` uses only this protocol, so tests can replace a GPU.
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
from outcore.memory.meter import LiveBytes, Optimizers, existing_storages, resident_bytes
from outcore.memory.workspace import AllocatorWorkspaces, NoWorkspaces, WorkspaceMeter
from outcore.planning.allocator.model import ROUND_BYTES, Places


@dataclass(frozen=True)
class Peak:
    """The peak of a step. `reserved_bytes` is what the caching allocator held, or 0 where there is none."""

    allocated_bytes: int
    reserved_bytes: int = 0


class PeakWatch(Protocol):
    """Watches the peak of the running step. If `meter` is not None, it must see every tensor that the step makes."""

    meter: LiveBytes | None

    def read(self) -> Peak: ...
    def stop(self) -> None: ...


class DeviceMemory(Protocol):
    """The memory of the device that a model is on."""

    device: torch.device
    has_caching_allocator: bool  # it reserves more than it hands out, so plans must leave headroom
    counts_op_by_op: bool  # the peak is known only if Python sees every op, also in the backward
    is_slow_to_pin: bool  # pinning takes longer than recomputing a cheap value, so a recorded step drops such values
    refusals: Refusals  # a context manager around a step
    optimizers: Optimizers  # that update the model's parameters

    def block_bytes(self, num_bytes: int) -> int:
        """Returns the size of the block that the allocator hands out for a storage of `num_bytes`."""
        ...

    def allocated_bytes(self) -> int:
        """Returns the bytes that the caching allocator has handed out, or 0 where there is none."""
        ...

    def workspaces(self, before_bytes: int) -> WorkspaceMeter:
        """Returns a meter of what each op allocates beyond its storages. `before_bytes` were allocated before the
        step."""
        ...

    def before_step_bytes(self, inputs: Sequence[torch.Tensor]) -> int:
        """Returns what is allocated when a step begins: parameters, gradients, optimizer state, inputs."""
        ...

    def watch_peak(self, before_bytes: int, inputs: Sequence[torch.Tensor], *, has_unseen: bool) -> PeakWatch:
        """Starts watching the peak. `has_unseen` says that the step uses storages that no op makes."""
        ...

    def before_recording(self) -> None: ...
    def after_recording(self) -> None: ...

    def begin_step(self, *, fits: bool) -> int:
        """Called when a planned step begins. `fits` says that the plan was measured and caused no restart. Returns the
        number of allocator restarts so far."""
        ...

    def num_restarts(self) -> int:
        """Returns the number of allocator restarts so far."""
        ...

    def begin_gradient_pool(self) -> None:
        """Moves the small gradients of the step that begins to pages of their own."""
        ...

    def end_step(self) -> None:
        """Called when a step has ended, also by an exception."""
        ...

    def new_headroom(self) -> None:
        """Called before plans of another size are tried: forgets what was learned about the host's pace."""
        ...

    def give_back(self) -> None:
        """Returns unused pages to the driver."""
        ...

    def places(self) -> Places:
        """Returns address and size of each large block that is allocated."""
        ...

    @property
    def host_waits(self) -> bool:
        """Whether the host waits for the device before each step."""
        ...

    def close(self) -> None:
        """Removes all hooks."""
        ...


def memory_of(model: torch.nn.Module, device: torch.device, budget_bytes: int) -> DeviceMemory:
    """Returns the memory of `device`, prepared for steps of `model` in `budget_bytes`."""
    return CudaMemory(model, device, budget_bytes) if device.type == "cuda" else CpuMemory(model, device)


class CudaMemory:
    has_caching_allocator, counts_op_by_op = True, False
    is_slow_to_pin = True

    def __init__(self, model: torch.nn.Module, device: torch.device, budget_bytes: int) -> None:
        self.device = device
        self.refusals = Refusals(device)
        self.optimizers = Optimizers(model)
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
        gc.collect()  # garbage would count as allocated throughout the step

    def after_recording(self) -> None:
        torch.cuda.empty_cache()  # the optimizer's state is allocated next and should not end up in scattered holes

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
        self.optimizers.remove()
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
        existing = existing_storages(self._model, inputs) if has_unseen else None
        return _CountedPeak(LiveBytes(before_bytes, existing))

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
