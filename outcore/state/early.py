"""Runs a parameter's update in the backward, before `optimizer.step()` requests it.

At that moment weight and gradient are on the device. An update in the backward therefore moves less data than one that
waits for the next forward, and overlaps with more work. But it was not requested yet, and may never be: gradients may
still be clipped, scaled, dropped or accumulated. Therefore the results go to separate homes. Until `step()` requests
the very same update, everything visible is unchanged: the weight, the gradient at home, the optimizer's state. Then old
and new homes are exchanged. If the step turns out otherwise, the results are discarded, with no visible effect.

This costs a second home for the weight and the optimizer's state, and the gradient goes home although it is unlikely to
be read there. Updates run early if the plan says so (`Residency.early`) and if their results would have been accepted
in the previous steps (`Foresight`).
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

MOST_PATIENCE = 1024  # steps that must go as expected before updates run early again, at most (guessed)
_WEIGHT = ""  # the weight's key among a unit's tensors


class Result(NamedTuple):
    """The results of an early update."""

    group: int
    version: int  # the parameter's version when it ran
    made: dict[str, Any]  # the parameter's optimizer state without a home


class Early:
    """The early updates of one unit."""

    __slots__ = ("all", "num_made", "num_usual", "result", "spares", "unit")

    def __init__(self, unit: Unit, all_early: EarlyUpdates) -> None:
        self.unit, self.all = unit, all_early
        self.result: Result | None = None  # of an update that `step()` has not requested yet
        self.spares: dict[str, torch.Tensor] = {}  # second homes of its tensors
        self.num_made = 0  # gradients since the last step
        self.num_usual = 0  # gradients between the two previous steps

    @property
    def is_pending(self) -> bool:
        return self.result is not None

    @property
    def is_foreseen(self) -> bool:
        """Whether its next gradient is expected to be the last one before `step()`, as in previous steps."""
        return self.unit.early is self and self.num_made + 1 == self.num_usual and self.all.is_sure

    # -- fetching ahead ---------------------------------------------------------------------------

    def missing_bytes(self) -> int:
        """Returns the bytes needed to fetch the update's tensors ahead."""
        items = (self.unit.weight, *self.unit.kept.values())
        if not self.is_foreseen or self.unit.due is not None or any(item.is_departing for item in items):
            return 0  # results of an update in the forward are not at home yet
        missing_bytes = sum(item.num_bytes for item in items if item.here is None)
        return missing_bytes + self.unit.weight.num_bytes if missing_bytes else 0  # including the gradient

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
        """Discards the results of the update, if it has run."""
        if self.result is not None:
            self.result = None
            if self.unit.due is None and self.unit.weight.here is None:
                unwatch(self.unit.parameter)

    def count_step(self) -> None:
        self.num_usual, self.num_made = self.num_made, 0


class Foresight:
    """Predicts whether the next step requests the same updates as the previous ones.

    After a wrong prediction, the number of steps that must go as expected before the next prediction doubles.
    """

    def __init__(self) -> None:
        self._num_calm, self._patience = 0, 1

    @property
    def is_sure(self) -> bool:
        return self._num_calm >= self._patience

    def learn(self, *, is_calm: bool, was_surprised: bool) -> None:
        """Adds a step. `is_calm`: gradients were not accessed before it. `was_surprised`: early updates were in
        vain."""
        if was_surprised:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._num_calm = self._num_calm + 1 if is_calm and not was_surprised else 0


class EarlyUpdates:
    """The early updates of one optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        window: Window,
        splitting: Splitting,
        state_of: Callable[[nn.Parameter], dict[str, Any]],
    ) -> None:
        self.num_taken = 0  # updates that had run when `step()` requested them
        self.foresight = Foresight()
        self._optimizer, self._window = optimizer, window
        self._splitting, self._state_of = splitting, state_of
        self._units: dict[Unit, Early] = {}  # those that the plan has early
        self._known: dict[Unit, Early] = {}  # all units that had gradients
        self._last: Substep | None = None  # the last call of `step()`
        self._next: Substep | None = None  # the expected next call
        self._groups: dict[int, int] = {}  # parameter, by id -> number of its group
        self._small: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []  # small tensors and their new content
        self._agrees = self._was_surprised = False
        self.reached: Callable[[Early], None] = lambda early: None  # called when a gradient was made, to fetch ahead

    @property
    def is_possible(self) -> bool:
        return self._splitting.later and self._splitting.keeps_gradients

    def choose(self, units: list[Unit]) -> None:
        """Makes these units the ones that are updated early."""
        for unit, early in self._units.items():
            early.void()
            unit.early = None
        settings = [setting for group in self._optimizer.param_groups for setting in group.values()]
        readable = not any(isinstance(one, torch.Tensor) and one.device.type != "cpu" for one in settings)
        chosen = units if self.is_possible and readable else []  # comparing settings on the device would wait for it
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
        """Stops updating a unit early."""
        if (early := self._units.pop(unit, None)) is not None:
            early.void()
            unit.early = None

    def void(self) -> None:
        """Discards all early results, because their inputs may be changed."""
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
        self._was_surprised |= early.is_pending  # more is added to the gradient after its update has run
        early.void()
        gradient = unit.gradient
        if not was_foreseen or gradient is None or gradient.here is None or gradient.scalings:
            return
        if unit.due is None and unit.is_training and unit.is_itself and not unit.depth and not unit.is_exposed:
            with torch.inference_mode(False), unseen():
                self._try(early, gradient.here)

    def gradient_made(self, unit: Unit) -> None:
        """Called when the unit's gradient is on the device and on its way home."""
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
            pass  # the update runs when it is requested
        except Exception:  # `step()` will raise it again
            self.remove(unit)
        finally:
            for item in (unit.weight, *unit.kept.values()):
                item.drop()

    def _may_run(self, early: Early, gradient: torch.Tensor) -> bool:
        """Whether the update fits, and nobody holds the tensors it changes. If so, spare homes and copies exist."""
        unit, items = early.unit, _items(early.unit)
        if self._next is None:
            self._foresee()
        if id(unit.parameter) not in self._groups or not self._has_known_state(unit):
            return False
        self._window.ahead.pop(unit, None)
        self._window.ahead.pop(early, None)
        for item in items.values():
            self._window.settle(item)  # results of an update in the forward may still be on their way
        num_bytes = sum(item.num_bytes for item in items.values() if item.here is None)
        num_bytes += unit.temporary_bytes(self._next.groups[self._groups[id(unit.parameter)]])  # type: ignore[union-attr]
        self._window.make_room(num_bytes)
        if not self._window.has_room(num_bytes) or not self._has_spares(early):
            return False
        for item in items.values():
            item.arrive()
        return num_users(gradient) <= 2 and not unit.is_held(self._state_of)  # the visible one and this one

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
            self.remove(unit)  # the optimizer creates new tensors in each step
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
        """Called at the beginning of `step()`, after all departures have ended."""
        self._agrees = self._next is not None and same_settings(self._next, substep)
        self._last, self._next = substep, None

    def accept(self, unit: Unit, group: int) -> bool:
        """Whether the unit's update has already run. If so, its results become visible."""
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
        self._collect_small(self._state_of(unit.parameter), result.made)
        return True

    def _collect_small(self, state: dict[str, Any], made: dict[str, Any]) -> None:
        for name, kept in made.items():
            if isinstance(kept, torch.Tensor) and isinstance(state.get(name), torch.Tensor):
                self._small[0].append(state[name])
                self._small[1].append(kept)
            else:
                state[name] = kept

    def finish_step(self, *, is_calm: bool) -> None:
        """Called at the end of `step()`, when all updates were requested."""
        if self._small[0]:
            torch._foreach_copy_(*self._small)
            self._small = [], []
        for early in self._units.values():
            self._was_surprised |= early.is_pending  # its gradient was removed
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
    """Exchanges the bytes of two tensors, which keep their identities."""
    old, new = data_of(home), data_of(spare)
    set_data(home, new)
    set_data(spare, old)
