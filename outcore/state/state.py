"""Training with weights, gradients and optimizer state outside the device while they are not used.

State with a home (`outcore.memory.home`) is on the device in these moments only:

    weight           a module reads it, or its backward asks for it          reading.py
    gradient         the backward has just made it                          gradients.py
    optimizer state  the parameter is being updated                         updates.py

`parameter.data`, `parameter.grad` and the tensors in `optimizer.state` always have the current bytes, at home or on the
device. Whatever reads or writes them (a checkpoint, gradient clipping, a moving average, a deep copy) therefore works
as usual. The hooks only make training fast: where one is missed, a kernel reads the bytes from home.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from outcore.errors import OutcoreError
from outcore.memory.home import Homes, Tier, is_at_home
from outcore.memory.tensors import unseen
from outcore.planning.residency import spilled
from outcore.state.gradients import Gradients
from outcore.state.host_updates import HostUpdates, check_host_updates
from outcore.state.optimizers import splitting_of, unwrapped
from outcore.state.reading import Handle, Reading
from outcore.state.unit import TEMPORARIES, Unit, can_move, rehome
from outcore.state.updates import Updates
from outcore.state.watched import WatchedState, num_users
from outcore.state.window import Window
from outcore.units import format_bytes
from outcore.values import Budget, Residency, StateUnit


class State:
    """The training state of a model. Wrap each training step in `with state.step(): ...`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        window_bytes: int,
        home_bytes: int,
        folder: str | Path | None = None,
        later: bool = True,
        resident_bytes: int = 0,
        spill_bytes: int = 0,
        by_cpu: bool = False,
    ) -> None:
        """Moves the training state home.

        `window_bytes` limits the state's memory on the device at a time, and `home_bytes` its memory outside. `folder`
        holds it if the device is the CPU. With `spill_bytes`, `home_bytes` are of the host, and so many bytes of files
        in `folder` hold what does not fit there. With `later`, an update runs when its weight is read next.
        `resident_bytes` of the state may be placed on the device later. With `by_cpu`, PyTorch's fused CPU kernels
        update parameters that have a home; they round differently.
        """
        self.model = model
        self.optimizer = unwrapped(optimizer)
        check_optimizer(model, self.optimizer)
        if by_cpu:
            check_host_updates(self.optimizer)
        device = next(model.parameters()).device
        splitting = splitting_of(self.optimizer)
        self.splitting = (
            replace(splitting, keeps_gradients=False) if by_cpu else splitting
        )  # gradients are scaled at home
        self.window = Window(Homes(device, home_bytes, folder, spill_bytes=spill_bytes), window_bytes)
        self.kept_for: dict[str, str] = {}  # parameters that cannot leave the device -> the reason
        self._updated = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self._movable = self._choose(device)  # parameters by name, in the order of their numbers
        self.sizes = tuple(self._size_of(name, parameter) for name, parameter in self._movable.items())
        on_disk = self._check_room(resident_bytes)
        self.resident: frozenset[int] = frozenset()  # numbers of the parameters that are on the device
        self.units = _all_at_home(partial(self._unit_at_home, on_disk=on_disk), len(self.sizes))
        self.is_late = later and self.splitting.later
        self._updates = Updates(
            self.optimizer,
            self.units,
            self.window,
            self.splitting,
            later=later,
            by_cpu=by_cpu,
            order=lambda: self._reading.order,
        )
        self._reading = Reading(model, self.units, self.window, self._updates)
        self._updates.early.reached = self._reading.gradient_made
        self._gradients = Gradients(self.units, self.window, self._updates.early)
        self._is_open = True

    def update_early(self, numbers: Iterable[int]) -> None:
        """Lets parameters with these numbers be updated in the backward, as long as `step()` turns out to request the
        same updates."""
        chosen = set(numbers)
        self._updates.early.choose([unit for unit in self.units if unit.number in chosen])

    @property
    def may_be_early(self) -> frozenset[int]:
        """Parameters that may be updated in the backward, because recent steps requested just that."""
        early = self._updates.early
        chosen = early.is_possible and early.foresight.is_sure
        return frozenset(unit.number for unit in self.units if unit.parameter.requires_grad) if chosen else frozenset()

    @property
    def num_early(self) -> int:
        """The number of updates that had already run when `step()` requested them."""
        return self._updates.early.num_taken

    @property
    def host_updates(self) -> HostUpdates | None:
        """The updates that the CPU runs, or None."""
        return self._updates.host

    def _choose(self, device: torch.device) -> dict[str, nn.Parameter]:
        chosen: dict[str, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            why = _why_it_stays(parameter, device)
            if not why and id(parameter) in self._updated and not self.splitting.by_parameter:
                why = self.splitting.because
            if why:
                self.kept_for[name] = why
            else:
                chosen[name] = parameter
        if not self.splitting.by_parameter:
            warnings.warn(
                f"outcore: parameters of {type(self.optimizer).__name__} stay on the device: {self.splitting.because}",
                stacklevel=4,
            )
        return chosen

    def _size_of(self, name: str, parameter: nn.Parameter) -> StateUnit:
        num_bytes, trains = parameter.nbytes, parameter.requires_grad
        kept_bytes = self.splitting.state_bytes(parameter) if trains and id(parameter) in self._updated else 0
        return StateUnit(name, num_bytes, num_bytes if trains else 0, kept_bytes)

    def _check_room(self, resident_bytes: int) -> frozenset[int]:
        """Checks, before anything is moved, that everything that will need a home has room there. In the first step
        nothing stays on the device, but there is no optimizer state yet. Returns what has its home on the disk because
        the host has no room for it."""
        homes = self.window.homes
        all_bytes = sum(size.all_bytes for size in self.sizes)
        first_bytes = sum(size.weight_bytes + size.gradient_bytes for size in self.sizes)
        there = sum(parameter.nbytes for parameter in self._movable.values() if is_at_home(parameter))
        homes.check_room(max(all_bytes - resident_bytes, first_bytes) - there, "the training state")
        streamed = Residency(self.sizes, tier=homes.tier, spills=homes.spill_bytes > 0)
        return spilled(streamed, Budget(0, homes.limit_bytes, homes.spill_bytes)).on_disk

    def _unit_at_home(self, number: int, on_disk: Collection[int]) -> Unit:
        name, tier = self.sizes[number].name, self.window.homes.tier
        return Unit(name, self._movable[name], self.window, number, "disk" if number in on_disk else tier)

    # -- the step -----------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[State]:
        """Wraps one training step, with any number of forwards and backwards."""
        self.begin()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield self
        finally:
            self.end()

    def begin(self) -> None:
        self._reading.begin()

    def end(self) -> None:
        """Ends the step, also after an error: everything is at home afterwards."""
        self.window.clear()
        self._reading.end()
        self._gradients.end()
        self.window.clear()

    def pack(self, tensor: torch.Tensor) -> Handle | None:
        """Returns what autograd saves in place of a weight; None if `tensor` is not on one."""
        return self._reading.pack(tensor)

    def _pack(self, tensor: torch.Tensor) -> Handle | torch.Tensor:
        return self.pack(tensor) or tensor

    def flush(self) -> None:
        """Runs every update that is due."""
        self._updates.flush()

    # -- placement ------------------------------------------------------------------------------------------------

    @property
    def least_window_bytes(self) -> int:
        """The least size of the window."""
        by_parts = self.splitting.by_element or self.host_updates is not None
        needed_bytes = _least_window_bytes(self.model, self.sizes, by_parts=by_parts)
        return max(needed_bytes, self.window.peak_bytes if self.window.is_lean else 0)

    @property
    def residency(self) -> Residency:
        homes = self.window.homes
        return Residency(
            self.sizes,
            self.resident,
            self.window.limit_bytes,
            early=frozenset(unit.number for unit in self.units if unit.early is not None),
            is_late=self.is_late,
            tier=homes.tier,
            by_cpu=self.host_updates is not None,
            spills=homes.spill_bytes > 0,
            on_disk=frozenset(unit.number for unit in self.units if unit.tier != homes.tier and not unit.was_at_home),
        )

    @property
    def reserved_bytes(self) -> int:
        """The device memory that the state may take, in addition to the memory it has at the moment."""
        return self.coming_bytes + (self.window.limit_bytes if len(self.resident) < len(self.sizes) else 0)

    @property
    def coming_bytes(self) -> int:
        """The bytes of optimizer state that resident parameters do not have yet."""
        sizes = [self.sizes[number] for number in self.resident]
        return sum(size.kept_bytes for size in sizes if not self._updates.kept.of(self._movable[size.name]))

    def place(self, residency: Residency) -> None:
        """Moves parameters to the device and off it, as `residency` says."""
        if not self._reading.is_idle:
            return  # a module is reading parameters
        self.window.limit_bytes = residency.window_bytes
        if (residency.resident, residency.on_disk) != (self.resident, self.residency.on_disk):
            self.window.clear()
            with unseen(), torch.inference_mode(False), torch.no_grad():
                for number in residency.resident - self.resident:  # first, because this frees homes
                    self._keep(number)
                for unit in sorted(self.units, key=lambda unit: unit.number not in residency.on_disk):  # the same
                    _rehome(unit, self._updates, on_disk=unit.number in residency.on_disk)
                for number in self.resident - residency.resident:
                    self._stream(number, residency.on_disk)
        self.update_early(residency.early)

    def _keep(self, number: int) -> None:
        unit = self._unit(number)
        if unit.due is not None:
            self._updates.run_due([unit])
        self.window.clear()
        self.resident |= {number}
        self.units.remove(unit)
        self._reading.remove(unit)
        self._gradients.remove(unit)
        self._updates.remove(unit)
        unit.bring_back()

    def _stream(self, number: int, on_disk: Collection[int]) -> None:
        unit = self._unit_at_home(number, on_disk)
        self.resident -= {number}
        self.units.append(unit)
        self._reading.add(unit)
        self._gradients.add(unit)
        self._updates.add(unit)

    def _unit(self, number: int) -> Unit:
        return next(unit for unit in self.units if unit.number == number)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Restores an ordinary model and an ordinary optimizer on the device."""
        if not self._is_open:
            return
        self._is_open = False
        self._updates.flush()
        self.end()
        self._reading.close()
        self._gradients.close()
        self._updates.close()
        for unit in self.units:
            if unit.was_at_home:
                unit.leave_at_home()
            else:
                unit.bring_back()
        self.window.homes.close()

    def __str__(self) -> str:
        streamed = sum(unit.weight.num_bytes for unit in self.units)
        lines = [f"{len(self.units)} parameters ({format_bytes(streamed)}) have a home beside the device"]
        lines += [f"{count} cannot leave it: {why}" for why, count in Counter(self.kept_for.values()).items()]
        return "\n".join(lines)


def _least_window_bytes(model: nn.Module, sizes: Sequence[StateUnit], *, by_parts: bool) -> int:
    """That the window needs for the weights of modules that run inside of each other, with one gradient or, unless
    updates run `by_parts`, what an update takes beside its weight."""
    chains = [0]
    for path, _ in model.named_modules():
        above = {path[:at] for at, letter in enumerate(path) if letter == "."} | {"", path}
        own = [size for size in sizes if size.name.rpartition(".")[0] in above]
        chains.append(sum(size.weight_bytes for size in own))
    largest = max(sizes, key=lambda size: size.all_bytes, default=StateUnit("", 0))
    update_bytes = largest.gradient_bytes + largest.kept_bytes + TEMPORARIES * largest.weight_bytes
    spans = largest.weight_bytes if by_parts else update_bytes
    return max(chains) + max(spans, largest.gradient_bytes) + largest.weight_bytes


def _all_at_home(unit_at_home: Callable[[int], Unit], count: int) -> list[Unit]:
    """Moves units home one after the other. After an error they are on the device again."""
    units: list[Unit] = []
    try:
        units.extend(map(unit_at_home, range(count)))  # those made before an error are in the list
    except BaseException:
        for unit in units:
            if not unit.was_at_home:
                unit.bring_back()
        raise
    return units


def _rehome(unit: Unit, updates: Updates, *, on_disk: bool) -> None:
    """Moves a unit to the disk or to the tier above it, unless somebody holds its tensors."""
    tier: Tier = "disk" if on_disk else unit.window.homes.tier
    if unit.tier == tier or unit.was_at_home:
        return
    if unit.due is not None:
        updates.run_due([unit])
    unit.window.clear()
    own, gradient = int(unit.has_gradient_at_home), unit.gradient
    if not unit.is_held(updates.kept.of) and (gradient is None or not gradient.is_held(own)):
        updates.early.forget(unit)
        rehome(unit, tier)


def _unpack(handle: Any) -> torch.Tensor:
    if isinstance(handle, Handle):
        return handle.run.unpack(handle)
    unpacked: torch.Tensor = handle
    return unpacked


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Raises `OutcoreError` if `optimizer` is not an optimizer of this model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OutcoreError(f"optimizer={type(optimizer).__name__} is no torch optimizer; pass the one that you step")
    own = {id(parameter) for parameter in model.parameters()}
    if isinstance(optimizer.state, WatchedState):
        raise OutcoreError(
            f"the state of this {type(optimizer).__name__} lies beside a device already; close the limit that put it "
            "there first"
        )
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    num_own = sum(id(parameter) in own for parameter in updated)
    if not num_own:
        raise OutcoreError(
            f"none of the {len(updated)} parameters of this {type(optimizer).__name__} belongs to the model; pass the "
            "optimizer that updates it, made after the model was moved to its device"
        )


def _why_it_stays(parameter: nn.Parameter, device: torch.device) -> str:
    """Returns why a parameter cannot have a home; empty if it can."""

    if is_lazy(parameter):
        return "it is not initialised yet"
    if is_at_home(parameter):
        return ""
    if parameter.device != device:
        return f"it is on {parameter.device}"
    if type(parameter) is not nn.Parameter:
        return f"it is a {type(parameter).__name__}"
    if not can_move(parameter, device):
        return "it is small, or lies on a storage that others use too"
    if num_users(parameter) > 1:
        return "others hold a view of it"
    return ""
