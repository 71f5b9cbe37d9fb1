"""Runs `optimizer.step()` for some parameters at a time, bitwise the same as for all at once.

`step()` is replaced on the optimizer object. Parameters that stayed on the device are updated at once. Those with a
home are updated in parts: while one part is updated, the next one is copied to the device and the previous one home.

An update may also wait until its weight is read next. Then the call of `step()` is only recorded with its settings, and
the update runs when the forward reaches the weight, overlapping with earlier layers. An earlier access to the
parameter, its gradient or its state runs the update first (`outcore.state.watched`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from outcore.memory.device_kind import kind_of
from outcore.memory.tensors import below_everything, unseen
from outcore.state.early import EarlyUpdates
from outcore.state.host_updates import HostUpdates
from outcore.state.kept import KeptState
from outcore.state.optimizers import ELEMENTWISE, Optimizer, Splitting, Substep
from outcore.state.pieces import Piece, kept_bytes_of, share_of, spans_of
from outcore.state.reading import depart
from outcore.state.settings import STATE
from outcore.state.takeover import Takeover, call_post_hooks, call_pre_hooks
from outcore.state.unit import Due, Unit
from outcore.state.watched import unwatch, watch
from outcore.state.window import Window

RESIDENT_BYTES, AHEAD = STATE.resident_bytes, STATE.pieces_ahead

Work = tuple[Substep, int, "Piece"]  # the recorded step, the group, and what to update


class Updates:
    """Replaces `optimizer.step()`."""

    def __init__(
        self,
        optimizer: Optimizer,
        units: Iterable[Unit],
        window: Window,
        splitting: Splitting,
        *,
        later: bool,
        order: Callable[[], list[Unit]] = list,
        by_cpu: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.splitting = splitting
        self.later = later and splitting.later
        self._units = {id(unit.parameter): unit for unit in units}
        self._window = window
        self._order = order
        self._due: dict[Unit, None] = {}
        self._begun: set[Unit] = set()  # units whose due update has begun
        self.kept = KeptState(optimizer)
        self.host = HostUpdates(optimizer, window, self.kept, splitting) if by_cpu else None
        self.early = EarlyUpdates(optimizer, window, splitting, self.kept.of)
        self._takeover = Takeover(optimizer, self)

    # -- the step -----------------------------------------------------------------------------------------------------

    def step(self, original_step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Does what `optimizer.step(closure)` does; `original_step` is the original method."""
        self._run_all_due()
        self._window.settle_all()
        by_element = type(self.optimizer) in ELEMENTWISE
        is_divided = self.splitting.by_parameter and (closure is None or by_element)
        if not is_divided or _is_mixed(self.optimizer, self._window.homes.device):
            self.early.void()
            return original_step() if closure is None else original_step(closure)
        args = call_pre_hooks(self.optimizer, (closure,) if closure is not None else ())
        loss = None
        if args and args[0] is not None:
            with torch.enable_grad():
                loss = args[0]()
            self._window.settle_all()
        with unseen():
            self._update_all()
        call_post_hooks(self.optimizer, args)
        return loss

    def _update_all(self) -> None:
        substep = Substep(self.optimizer)
        resident: list[tuple[int, nn.Parameter]] = []
        now: list[Work] = []
        by_host: list[tuple[Unit, int]] = []
        changed: list[nn.Parameter] = []
        self.early.begin_step(substep)
        is_calm = True
        for group, settings in enumerate(self.optimizer.param_groups):
            for parameter in settings["params"]:
                if parameter.grad is None:
                    continue
                changed.append(parameter)
                unit = self._units.get(id(parameter))
                if unit is None or not unit.is_itself:
                    resident.append((group, parameter))
                    continue
                if self.early.accept(unit, group):
                    continue
                is_calm = is_calm and _is_untouched(unit)
                unit.take_over(self.kept.of(parameter))
                own = unit.has_gradient_at_home
                if self.host is not None and self.host.takes(unit):
                    by_host.append((unit, group))
                elif own and self.later and not self._is_watched(unit):
                    self._put_off(unit, substep, group)
                else:
                    odd = parameter.grad.stride() != unit.weight.home.stride()
                    spans = [None] if odd else self._spans(unit)
                    now += self._work(unit, substep, group, None if own else parameter.grad, spans)
        self._update_resident(substep, resident)
        self._run(now)
        if self.host is not None and by_host:
            self._run_on_host(self.host, by_host)
        self.kept.put_in_order(is_whole=not self._due)
        self._window.settle_all()
        self.early.finish_step(is_calm=is_calm)
        torch.autograd.graph.increment_version(changed)
        if not self.splitting.later:
            for group, left in substep.left.items():
                self.optimizer.param_groups[group].update(left)

    def _update_resident(self, substep: Substep, resident: Sequence[tuple[int, nn.Parameter]]) -> None:
        for part in _parts(resident):
            with below_everything():
                made = substep.run((group, parameter, self.kept.of(parameter)) for group, parameter in part)
            for (_, parameter), state in zip(part, made):
                self.kept.keep(parameter, self.kept.of(parameter), state)

    def _work(
        self, unit: Unit, substep: Substep, group: int, gradient: torch.Tensor | None, spans: Sequence[slice | None]
    ) -> list[Work]:
        known = self.kept.of(unit.parameter)
        new_bytes = 0 if known else kept_bytes_of(unit, self.splitting)
        new_bytes = share_of(unit, spans[0], new_bytes + unit.temporary_bytes(substep.groups[group]))
        return [(substep, group, Piece(unit, span, known, gradient, new_bytes)) for span in spans]

    def _spans(self, unit: Unit) -> Sequence[slice | None]:
        """Returns spans of a unit whose update exceeds a third of the window; otherwise [None], the whole unit."""
        return spans_of(
            unit, kept_bytes_of(unit, self.splitting), self._window.limit_bytes / STATE.window_parts, self.splitting
        )

    def _run(self, work: Sequence[Work]) -> None:
        """Updates pieces one after the other, fetching the next ones and sending the previous ones home meanwhile."""
        for at, (substep, group, piece) in enumerate(work):
            try:
                _fetch(self._window, piece)
                self._window.make_room(piece.new_bytes)
                following = [after for _, _, after in work[at + 1 : at + 1 + AHEAD]]
                _fetch_ahead(self._window, piece.new_bytes, following)
                self._update(substep, group, piece)
            except BaseException:
                piece.give_up()
                raise

    def _update(self, substep: Substep, group: int, piece: Piece) -> None:
        unit, parameter = piece.unit, piece.unit.parameter
        seen, state = parameter.grad, self.kept.of(parameter)
        piece.reserve(self.splitting)
        try:
            part, known = piece.parameter(), piece.state()
            self._begun.add(unit)
            with below_everything():
                made = substep.run([(group, part, known)])[0]
        finally:
            parameter.grad = seen
        piece.take(made)
        if piece.is_last:
            self.kept.keep(
                parameter, state, {name: unit.kept[name].home if name in unit.kept else made[name] for name in made}
            )
            depart(unit)

    def _run_on_host(self, host: HostUpdates, units: Sequence[tuple[Unit, int]]) -> None:
        """Updates whose tensors somebody holds run now. The others run during the next step, in the order in which it
        reads the weights."""
        host.begin([unit for unit, _ in units])
        later: dict[Unit, int] = {}
        for unit, group in units:
            if self.later and unit.has_gradient_at_home and not self._is_watched(unit):
                later[unit] = group
            else:
                host.take(unit, host.start(unit, group))
        for unit in _in_order(self._order(), later):
            self._wait(unit, host.due(unit, later[unit]))

    # -- updates that wait --------------------------------------------------------------------------------------------

    def _put_off(self, unit: Unit, substep: Substep, group: int) -> None:
        span, more_bytes = self._spans(unit)[0], unit.temporary_bytes(substep.groups[group])
        if span is not None:
            more_bytes = share_of(unit, span, more_bytes + unit.weight.num_bytes + kept_bytes_of(unit, self.splitting))
        elif not self.kept.of(unit.parameter):
            more_bytes += kept_bytes_of(unit, self.splitting)
        self._wait(unit, Due(substep, group, span is None, more_bytes))

    def _wait(self, unit: Unit, asked: Due) -> None:
        assert unit.gradient is not None
        unit.conceal()
        unit.due = asked
        unit.give_up()
        self._due[unit] = None
        watch(unit.parameter, self.flush)
        watch(unit.gradient.shown, self.flush)

    def _is_watched(self, unit: Unit) -> bool:
        """Whether somebody holds a view of a tensor that the update reads or changes, whose access is not reported."""
        assert unit.gradient is not None
        return unit.gradient.is_held(num_own=1) or unit.is_held(self.kept.of)  # that of parameter.grad

    def run_due(self, units: Sequence[Unit]) -> None:
        """Runs the updates of these units and leaves their weights on the device. After an error, updates that have not
        begun are due as before."""
        with unseen():
            self._run_due(units)

    def _run_due(self, units: Sequence[Unit]) -> None:
        work: list[Work] = []
        waiting = {unit: unit.due for unit in units if unit.due is not None and unit.gradient is not None}
        for unit, asked in waiting.items():
            if not asked.by_cpu:
                spans = [None] if asked.as_a_whole else self._spans(unit)
                work += self._work(unit, asked.substep, asked.group, None, spans)
            unit.due = None
            del self._due[unit]
            unwatch(unit.parameter)
            if unit.gradient is not None:
                unit.gradient.watch()
        self._begun.clear()
        try:
            with torch.inference_mode(False):
                for unit, asked in waiting.items():
                    if self.host is not None and asked.by_cpu:
                        made = self.host.started(unit, asked)
                        self._begun.add(unit)
                        self.host.take(unit, made)
                self._run(work)
        except BaseException:
            for unit, asked in waiting.items():
                if unit not in self._begun:
                    self._wait(unit, asked)
            raise
        self.kept.put_in_order(is_whole=not self._due)

    def flush(self) -> None:
        """Runs every due update and discards early results, because somebody accesses the state."""
        self.early.void()
        self._run_all_due()

    def _run_all_due(self) -> None:
        if not self._due:
            return
        self.run_due(_in_order(self._order(), self._due))
        self._window.settle_all()

    def add(self, unit: Unit) -> None:
        self._units[id(unit.parameter)] = unit

    def remove(self, unit: Unit, *, at_home: bool = False) -> None:
        """Stops managing a unit. Its optimizer state becomes an ordinary tensor on the device, or stays `at_home`."""
        assert unit.due is None, "its update is due"
        self.early.forget(unit)
        self._begun.discard(unit)
        del self._units[id(unit.parameter)]
        state = self.kept.of(unit.parameter)
        for name, item in unit.kept.items():
            if state.get(name) is item.home:
                state[name] = item.home if at_home else item.home.clone()

    def unit_of(self, parameter: torch.Tensor) -> Unit | None:
        return self._units.get(id(parameter))

    def close(self) -> None:
        """Restores the optimizer, with its state on the device."""
        self.flush()
        self._takeover.close()
        for unit in list(self._units.values()):
            self.remove(unit, at_home=unit.was_at_home)


def _in_order(known: Sequence[Unit], units: Collection[Unit]) -> list[Unit]:
    """Returns the units in a known order, followed by units that it does not contain."""
    return list(dict.fromkeys([*(unit for unit in known if unit in units), *units]))


def _is_untouched(unit: Unit) -> bool:
    """Whether the update could have run when the gradient was made, with the same result."""
    gradient = unit.gradient
    return gradient is not None and unit.has_gradient_at_home and not gradient.scalings and not gradient.was_touched


def _is_mixed(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a gradient's strides differ from its parameter's. On CUDA, torch's implementations for many tensors then
    use another code path for all of them, which parts would not use."""
    return kind_of(device).updates_alike and any(
        parameter.grad is not None and parameter.grad.stride() != parameter.stride()
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def _parts(resident: Sequence[tuple[int, nn.Parameter]]) -> Iterator[list[tuple[int, nn.Parameter]]]:
    """Yields resident parameters in small groups, which limits the temporary memory of their updates."""
    part, num_bytes = list[tuple[int, nn.Parameter]](), 0
    for group, parameter in resident:
        if part and num_bytes + parameter.nbytes > RESIDENT_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append((group, parameter))
        num_bytes += parameter.nbytes
    if part:
        yield part


def _fetch(window: Window, piece: Piece) -> None:
    """Fetches a piece. If memory runs out, copies fetched ahead are released, so that no unit stays partly updated."""
    window.ahead.pop(piece, None)
    try:
        piece.fetch()
    except torch.OutOfMemoryError:
        window.clear()
        piece.fetch()


def _fetch_ahead(window: Window, new_bytes: int, pieces: Sequence[Piece]) -> None:
    if pieces:  # for a single piece, the caller paces the copies
        window.homes.pace()
    for piece in pieces:
        window.settle_over()
        if not window.has_room_ahead(new_bytes + piece.missing_bytes()):
            return
        if piece not in window.ahead:
            try:
                piece.fetch()
            except torch.OutOfMemoryError:
                piece.give_up()
                return
            window.ahead[piece] = None
