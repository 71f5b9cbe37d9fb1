"""A gradient that the backward has just made -> the update that `optimizer.step()` will ask for, run at once: Early.

Weight and gradient are on the device at that moment. An update in the backward therefore moves less than one that waits
for the next forward, and hides behind more work. But nobody has asked for it yet, and nobody may ever: a step may clip,
scale or drop its gradients, or add more to them. So the results go to homes of their own. Until `step()` asks for the
very same update, everything that can be seen is as it was: the weight, the gradient at home, the optimizer's state.
Then old and new homes change places. A step that turns out otherwise lets the results go, and nothing has happened.

This costs a second home for the weight and the optimizer's state, and the gradient goes home although nobody is likely
to read it there. Updates run early where the plan wants it (`Residency.early`) and the results would have been taken in
the steps before (`Foresight`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from outcore.errors import StoreError
from outcore.memory.tensors import below_everything, data_of, set_data, unseen
from outcore.state.optimizers import Optimizer, Splitting, Substep, foreseen, same_settings
from outcore.state.unit import Unit
from outcore.state.watched import is_watched, num_users, unwatch, watch
from outcore.state.window import Item, Window

MOST_PATIENCE = 1024  # steps without a surprise, at most, before updates run early again (guessed)
_WEIGHT = ""  # among the names of a unit's tensors


class Result(NamedTuple):
    """What an early update has made."""

    group: int
    version: int  # of the parameter when it ran
    made: dict[str, Any]  # the optimizer's state of the parameter, as far as it has no home


class Early:
    """The early updates of one unit."""

    __slots__ = ("all", "num_made", "num_usual", "result", "spares", "unit")

    def __init__(self, unit: Unit, all_early: EarlyUpdates) -> None:
        self.unit, self.all = unit, all_early
        self.result: Result | None = None  # of an update that `step()` has not asked for yet
        self.spares: dict[str, torch.Tensor] = {}  # second homes of its tensors
        self.num_made = 0  # gradients since the last step
        self.num_usual = 0  # gradients between the two steps before

    @property
    def is_pending(self) -> bool:
        return self.result is not None

    @property
    def is_foreseen(self) -> bool:
        """Whether an update is expected with its next gradient: the last one before a step like the ones before."""
        return self.unit.early is self and self.num_made + 1 == self.num_usual and self.all.is_sure

    # -- what its update needs, ahead of it ---------------------------------------------------------------------------

    def missing_bytes(self) -> int:
        """That it takes to fetch it ahead."""
        items = (self.unit.weight, *self.unit.kept.values())
        if not self.is_foreseen or self.unit.due is not None or any(item.is_departing for item in items):
            return 0  # what an update in the forward changes is not at home yet
        missing_bytes = sum(item.num_bytes for item in items if item.here is None)
        return missing_bytes + self.unit.weight.num_bytes if missing_bytes else 0  # and the gradient

    def fetch(self) -> None:
        if self.unit.weight.here is None:
            self.unit.fetch()
        for item in self.unit.kept.values():
            item.fetch()
        self.unit.window.ahead[self] = None

    def give_up(self) -> None:
        for item in self.unit.kept.values():
            item.drop()

    def void(self) -> None:
        """Lets go of what the update has made, if it has run."""
        if self.result is not None:
            self.result = None
            if self.unit.due is None and self.unit.weight.here is None:
                unwatch(self.unit.parameter)

    def count_step(self) -> None:
        self.num_usual, self.num_made = self.num_made, 0


class Foresight:
    """Whether the next step will be like the ones before, and ask for its updates as it is now. After a surprise, twice
    as many steps without one have to come first."""

    def __init__(self) -> None:
        self._num_calm, self._patience = 0, 1

    @property
    def is_sure(self) -> bool:
        return self._num_calm >= self._patience

    def learn(self, *, is_calm: bool, was_surprised: bool) -> None:
        """`is_calm`: nobody came near a gradient before the step. `was_surprised`: updates had run early in vain."""
        if was_surprised:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._num_calm = self._num_calm + 1 if is_calm and not was_surprised else 0


class EarlyUpdates:
    """Those of one optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        window: Window,
        splitting: Splitting,
        state_of: Callable[[nn.Parameter], dict[str, Any]],
    ) -> None:
        self.num_taken = 0  # of all updates, those that had run when `step()` asked for them
        self.foresight = Foresight()
        self._optimizer, self._window = optimizer, window
        self._splitting, self._state_of = splitting, state_of
        self._units: dict[Unit, Early] = {}  # that the plan wants to be early
        self._known: dict[Unit, Early] = {}  # all that had gradients
        self._last: Substep | None = None  # as `step()` was called last
        self._next: Substep | None = None  # as it will be called next
        self._groups: dict[int, int] = {}  # parameter, by id -> number of its group
        self._small: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []  # counters, and what they become
        self._agrees = self._was_surprised = False
        self.reached: Callable[[Early], None] = lambda early: None  # tells who fetches ahead that a gradient was made

    @property
    def is_possible(self) -> bool:
        return self._splitting.later and self._splitting.keeps_gradients

    def choose(self, units: list[Unit]) -> None:
        """From now on these are updated early, and no others."""
        for unit, early in self._units.items():
            early.void()
            unit.early = None
        settings = [setting for group in self._optimizer.param_groups for setting in group.values()]
        readable = not any(isinstance(one, torch.Tensor) and one.device.type != "cpu" for one in settings)
        chosen = units if self.is_possible and readable else []  # to compare numbers on a device would wait for it
        self._units = {unit: self._early_of(unit) for unit in chosen}
        for unit, early in self._units.items():
            unit.early = early

    def _early_of(self, unit: Unit) -> Early:
        if unit not in self._known:
            self._known[unit] = Early(unit, self)
        return self._known[unit]

    def forget(self, unit: Unit) -> None:
        self.remove(unit)
        self._known.pop(unit, None)

    def remove(self, unit: Unit) -> None:
        """It waits from now on."""
        if (early := self._units.pop(unit, None)) is not None:
            early.void()
            unit.early = None

    def void(self) -> None:
        """Nothing that ran early is taken: somebody may change what it began with."""
        for early in self._units.values():
            if early.is_pending:
                self._was_surprised = True
                early.void()

    @property
    def is_sure(self) -> bool:
        return bool(self._units) and self.foresight.is_sure and self._last is not None

    # -- in the backward ----------------------------------------------------------------------------------------------

    def _gradient_made(self, unit: Unit, early: Early) -> None:
        was_foreseen, early.num_made = early.is_foreseen, early.num_made + 1
        self._was_surprised |= early.is_pending  # more is added to the gradient that its update has read
        early.void()
        gradient = unit.gradient
        if not was_foreseen or gradient is None or gradient.here is None or gradient.scalings:
            return
        if unit.due is None and unit.is_training and unit.is_itself and not unit.depth and not unit.is_exposed:
            with torch.inference_mode(False), unseen():
                self._try(early, gradient.here)

    def gradient_made(self, unit: Unit) -> None:
        """The unit's gradient is on the device, and on its way home."""
        early = self._early_of(unit)
        if unit.early is None:
            early.num_made += 1
        else:
            self._gradient_made(unit, early)
            self.reached(early)

    def _try(self, early: Early, gradient: torch.Tensor) -> None:
        unit = early.unit
        try:
            if self._may_run(early, gradient):
                self._run(early, gradient)
        except torch.OutOfMemoryError:
            pass  # the update runs when it is asked for
        except Exception:  # whatever it is, `step()` will come upon it again
            self.remove(unit)
        finally:
            for item in (unit.weight, *unit.kept.values()):
                item.drop()

    def _may_run(self, early: Early, gradient: torch.Tensor) -> bool:
        """Whether it fits, and nobody holds what it changes. Spare homes and copies on the device are there then."""
        unit, items = early.unit, _items(early.unit)
        if self._next is None:
            self._foresee()
        if id(unit.parameter) not in self._groups or not self._has_known_state(unit):
            return False
        self._window.ahead.pop(unit, None)
        self._window.ahead.pop(early, None)
        for item in items.values():
            self._window.settle(item)  # what an update in the forward has changed may still be on its way
        num_bytes = sum(item.num_bytes for item in items.values() if item.here is None)
        num_bytes += unit.temporary_bytes(self._next.groups[self._groups[id(unit.parameter)]])  # type: ignore[union-attr]
        self._window.make_room(num_bytes)
        if not self._window.has_room(num_bytes) or not self._has_spares(early):
            return False
        for item in items.values():
            item.arrive()
        return num_users(gradient) <= 2 and not unit.is_held(self._state_of)  # the one that others see, and this one

    def _has_known_state(self, unit: Unit) -> bool:
        state = self._state_of(unit.parameter)
        return bool(state or not self._splitting.state_dtypes) and all(
            state.get(name) is item.home for name, item in unit.kept.items()
        )

    def _has_spares(self, early: Early) -> bool:
        try:
            for name, item in _items(early.unit).items():
                if name not in early.spares:
                    early.spares[name] = self._window.homes.empty_like(item.home)
        except StoreError:
            self.remove(early.unit)
            return False
        return True

    def _foresee(self) -> None:
        assert self._last is not None
        self._next = foreseen(self._optimizer, self._last)
        groups = enumerate(self._optimizer.param_groups)
        self._groups = {id(parameter): number for number, group in groups for parameter in group["params"]}

    def _run(self, early: Early, gradient: torch.Tensor) -> None:
        unit, items = early.unit, _items(early.unit)
        state = self._state_of(unit.parameter)
        group, substep = self._groups[id(unit.parameter)], self._next
        assert substep is not None
        if unit.weight.here is not None and num_users(unit.weight.here) > 1:
            return  # autograd still holds it
        copies = {name: item.arrive() for name, item in items.items()}
        known = {name: copies[name] if name in unit.kept else _copied(kept) for name, kept in state.items()}
        part = nn.Parameter(copies[_WEIGHT])
        part.__dict__.update({k: v for k, v in unit.parameter.__dict__.items() if not k.startswith("_outcore")})
        part.grad = gradient
        with below_everything():
            made = substep.run([(group, part, known)])[0]
        if made.keys() != state.keys() or any(made[name] is not copies[name] for name in unit.kept):
            self.remove(unit)  # it keeps new tensors each time
            return
        for name, item in items.items():
            result = item.hand_over(early.spares[name])
            self._window.depart(result, result.drop)
        small = {name: kept for name, kept in made.items() if name not in unit.kept}
        early.result = Result(group, unit.parameter._version, small)
        if not is_watched(unit.parameter):
            watch(unit.parameter, unit.on_touch)

    # -- in `step()` --------------------------------------------------------------------------------------------------

    def begin_step(self, substep: Substep) -> None:
        """`step()` was called like this. What departed has arrived."""
        self._agrees = self._next is not None and same_settings(self._next, substep)
        self._last, self._next = substep, None

    def accept(self, unit: Unit, group: int) -> bool:
        """Whether the unit's update has run. Then everybody sees what it has made from now on."""
        early = self._units.get(unit)
        if early is not None:
            early.give_up()
        if early is None or early.result is None:
            return False
        result, gradient = early.result, unit.gradient
        is_same = self._agrees and result.group == group and result.version == unit.parameter._version
        is_same = is_same and is_watched(unit.parameter) and unit.has_gradient_at_home
        if not is_same or gradient is None or gradient.scalings or gradient.was_touched:
            self._was_surprised = True
            early.void()
            return False
        early.void()
        self.num_taken += 1
        for name, item in _items(unit).items():
            _exchange(item.home, early.spares[name])
        unit.show_home()
        self._take_small(self._state_of(unit.parameter), result.made)
        return True

    def _take_small(self, state: dict[str, Any], made: dict[str, Any]) -> None:
        for name, kept in made.items():
            if isinstance(kept, torch.Tensor) and isinstance(state.get(name), torch.Tensor):
                self._small[0].append(state[name])
                self._small[1].append(kept)
            else:
                state[name] = kept

    def finish_step(self, *, is_calm: bool) -> None:
        """All updates were asked for."""
        if self._small[0]:
            torch._foreach_copy_(*self._small)
            self._small = [], []
        for early in self._units.values():
            self._was_surprised |= early.is_pending  # its parameter had no gradient any more
            early.void()
        for early in self._known.values():
            early.count_step()
        self.foresight.learn(is_calm=is_calm, was_surprised=self._was_surprised)
        self._was_surprised = False


def _items(unit: Unit) -> dict[str, Item]:
    return {_WEIGHT: unit.weight, **unit.kept}


def _copied(kept: Any) -> Any:
    return kept.clone() if isinstance(kept, torch.Tensor) else kept


def _exchange(home: torch.Tensor, spare: torch.Tensor) -> None:
    """Both stay the objects they are; their bytes change places."""
    old, new = data_of(home), data_of(spare)
    set_data(home, new)
    set_data(spare, old)
