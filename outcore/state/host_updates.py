"""An optimizer + homes -> updates by PyTorch's fused CPU kernels, on the tensors at home themselves: HostUpdates.

These kernels round differently from the kernels of a GPU, and from PyTorch's unfused kernels on the CPU. They run only
if the user requests them. Optimizer state is never copied to the device then.

The updates of a step run one after the other in a separate thread, in the order in which the next step reads the
weights. A reader of a weight waits for its update. A tensor at home must not change while a copy or a kernel reads it,
so the device finishes all its work before the first update begins.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from outcore.errors import OutcoreError
from outcore.memory.device_kind import wait_for
from outcore.state.gradient import OF_MANY, Scaling
from outcore.state.kept import KeptState
from outcore.state.optimizers import Optimizer, Splitting, Substep, try_out
from outcore.state.pieces import home_of, new_homes
from outcore.state.reading import depart
from outcore.state.unit import Due, Unit, can_move
from outcore.state.window import Item, Window

CPU = torch.device("cpu")
ON_HOST = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_OTHER_WAYS = ("foreach", "capturable")  # settings that the fused kernels do not go with


class HostSubstep(Substep):
    """The step as PyTorch's fused CPU kernels run it."""

    device = CPU

    def __init__(self, optimizer: Optimizer, *, deep: bool = False) -> None:
        super().__init__(optimizer, deep=deep)
        self.twin.__dict__.update({name: _on_cpu(kept) for name, kept in self.rest.items()})
        self.groups = [
            {name: False if name in _OTHER_WAYS else _on_cpu(setting) for name, setting in group.items()}
            | {"fused": True}
            for group in self.groups
        ]

    def run(self, parts: Iterable[tuple[int, nn.Parameter, dict[str, Any]]]) -> list[dict[str, Any]]:
        return super().run((group, parameter, _on_cpu(known)) for group, parameter, known in parts)


def check_host_updates(optimizer: Optimizer) -> None:
    """Raises OutcoreError for an optimizer whose step the fused CPU kernels cannot run."""
    name, known = type(optimizer).__name__, ", ".join(kind.__name__ for kind in ON_HOST)
    if type(optimizer) not in ON_HOST:
        raise OutcoreError(
            f"update='cpu' takes the optimizers that PyTorch has fused CPU kernels for ({known}), not {name}"
        )
    try:
        try_out(optimizer, HostSubstep(optimizer, deep=True))
    except Exception as error:
        raise OutcoreError(
            f"PyTorch's fused CPU kernels, which update='cpu' uses, cannot run this {name}: {error}"
        ) from None


class HostUpdates:
    """The updates that the CPU runs for one optimizer."""

    def __init__(self, optimizer: Optimizer, window: Window, kept: KeptState, splitting: Splitting) -> None:
        self.num_done = 0
        self.busy_s = 0.0  # the seconds of all updates so far
        self._optimizer, self._window, self._homes = optimizer, window, window.homes
        self._kept, self._splitting = kept, splitting
        self._substep: HostSubstep | None = None
        self._reserved: list[torch.Tensor] = []  # homes of state that the update that runs will create
        self._thread = ThreadPoolExecutor(1, "outcore-update")
        weakref.finalize(self, self._thread.shutdown, wait=False)

    def takes(self, unit: Unit) -> bool:
        """Whether the unit's gradient has the type and the strides of its weight."""
        gradient, home = unit.parameter.grad, unit.weight.home
        return unit.has_gradient_at_home or (
            gradient is not None
            and gradient.layout is torch.strided
            and gradient.dtype == home.dtype
            and gradient.stride() == home.stride()
        )

    def has_state(self, unit: Unit) -> bool:
        """Whether the optimizer's state of the unit is at home already."""
        return len(unit.kept) >= len(self._splitting.state_dtypes)

    def begin(self, units: Sequence[Unit]) -> None:
        """Called in `step()`. Afterwards the true bytes of these units are at home, and nothing reads them there."""
        for unit in units:
            if unit.is_changed:
                depart(unit)
        self._window.clear()
        for unit in units:
            unit.conceal()
        wait_for(self._homes.device)
        self._substep = HostSubstep(self._optimizer)

    def due(self, unit: Unit, group: int) -> Due:
        """Starts the update of a unit unless it has no state yet: by the time its weight is read, the unit may stay on
        the device, and need no home for its state."""
        assert self._substep is not None
        made = self.start(unit, group) if self.has_state(unit) else None
        return Due(self._substep, group, as_a_whole=False, more_bytes=0, by_cpu=True, on_host=made)

    def started(self, unit: Unit, asked: Due) -> Future[dict[str, Any]]:
        """Starts a due update if it has not begun."""
        if asked.on_host is not None:
            return asked.on_host
        wait_for(self._homes.device)
        return self.start(unit, asked.group, asked)

    def start(self, unit: Unit, group: int, asked: Due | None = None) -> Future[dict[str, Any]]:
        """Starts the update of a unit. The result is the optimizer's state afterwards. The gradient of one that was due
        is at home, whatever has become of `parameter.grad`."""
        substep = self._substep if asked is None else asked.substep
        assert substep is not None
        if not self.has_state(unit):
            self._reserved = new_homes(unit, self._splitting)
        homes, gradient = self._homes, unit.gradient
        part = nn.Parameter(homes.on_host(unit.weight.home))
        scalings: list[Scaling] = []
        if gradient is not None and (asked is not None or unit.has_gradient_at_home):
            part.grad = homes.on_host(gradient.home)
            scalings = [(func, _on_cpu(args), _on_cpu(kwargs)) for func, args, kwargs in gradient.scalings]
            gradient.scalings.clear()
        elif unit.parameter.grad is not None:
            part.grad = unit.parameter.grad.detach().to(CPU)
        known = {
            name: homes.on_host(unit.kept[name].home) if name in unit.kept else _own(kept)
            for name, kept in self._kept.of(unit.parameter).items()
        }
        return self._thread.submit(self.run_all, substep, group, part, known, scalings)

    def run_all(
        self, substep: Substep, group: int, part: nn.Parameter, known: dict[str, Any], scalings: Sequence[Scaling]
    ) -> dict[str, Any]:
        began_s = time.perf_counter()
        with torch.no_grad():
            for func, args, kwargs in scalings:
                func([part.grad] if func in OF_MANY else part.grad, *args, **kwargs)
        made = substep.run([(group, part, known)])[0]
        self.num_done += 1
        self.busy_s += time.perf_counter() - began_s
        return made

    def take(self, unit: Unit, update: Future[dict[str, Any]]) -> None:
        """Waits for the update of a unit and stores its state: large tensors at home, small ones where they were."""
        before, state = self._kept.of(unit.parameter), dict[str, Any]()
        for item in (unit.weight, *unit.kept.values()):
            self._homes.note_written(item.home)
        for name, kept in update.result().items():
            if name in unit.kept:
                state[name] = unit.kept[name].home
            elif can_move(kept, CPU):
                home = home_of(kept.dtype, unit.weight.home, self._reserved, unit)
                self._homes.fill(home, kept)
                unit.kept[name] = Item(unit.window, home)
                state[name] = home
            elif isinstance(kept, torch.Tensor) and isinstance(before.get(name), torch.Tensor):
                state[name] = before[name].copy_(kept)
            else:
                state[name] = self._placed(unit, kept)
        self._reserved = []
        self._kept.keep(unit.parameter, before, state)

    def _placed(self, unit: Unit, kept: Any) -> Any:
        """Returns a new counter on the device on which the optimizer itself would have created it."""
        groups = self._optimizer.param_groups
        own = next(group for group in groups if any(parameter is unit.parameter for parameter in group["params"]))
        on_device = isinstance(kept, torch.Tensor) and (own.get("fused") or own.get("capturable"))
        return kept.to(self._homes.device) if on_device else kept


def _on_cpu(setting: Any) -> Any:
    """Returns settings or state with all tensors on the CPU."""
    if isinstance(setting, torch.Tensor):
        return setting.detach().to(CPU)
    if type(setting) in (tuple, list):
        return type(setting)(_on_cpu(part) for part in setting)
    if type(setting) is dict:
        return {name: _on_cpu(part) for name, part in setting.items()}
    return setting


def _own(kept: Any) -> Any:
    """Returns a copy, so that a tensor that others may hold changes only when the update is stored."""
    return kept.detach().to(CPU, copy=True) if isinstance(kept, torch.Tensor) else kept
