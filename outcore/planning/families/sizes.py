"""Traces of one step at a few sizes -> its trace at any other size.

Steps that do the same work on inputs of other sizes form a *family*. Their traces have the same ops with the same
wiring; what differs are shapes, bytes and seconds. Here the sizes of a step are all the dimensions of its inputs.
Dimensions that always change together are one variable (the length of a padded batch appears in the token ids, in the
mask and in the labels), and those that never change are constants.

Bytes and shapes are exact. The size of a tensor is nearly always a whole number times a product of variables, of their
neighbours (a sequence without its last token) or of what strided convolutions make of them. The first such form that
gives every recorded number counts, simple forms before complicated ones. Shapes tell more than bytes do, so storages
that have as many bytes as a saved tensor follow that tensor's shape. Where no form fits, a line through the two nearest
members is the best guess. A wrong guess is safe: the step that shows it leaves its plan, with the same numbers, and
joins the family as another member.

Seconds follow the work of each op: what they are at the recorded sizes is explained by a constant and the bytes the op
moves, for attention also by their square, none of them negative. Ops of a recorded step look slow where the host was
slower than the device; steps whose ops were timed apart (`TimedAt`) count in their place as soon as there are two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from outcore.planning.families.scaling import difference
from outcore.planning.settings import ALLOCATOR, FAMILIES
from outcore.values import Op, Storage, Tick, Trace

Sizes = tuple[int, ...]  # every dimension of every input, in order
Form = Callable[[Sizes], int]  # variables -> a whole number
Floats = npt.NDArray[np.float64]
Item = TypeVar("Item", Op, Storage, Tick)

_NUM_TERMS = 3  # of an op's seconds: a constant, its work, its work squared


@dataclass(frozen=True)
class Member:
    """One recorded step of a family."""

    sizes: Sizes
    trace: Trace


@dataclass(frozen=True)
class TimedAt:
    """Seconds of the ops of one step of a family, timed without the recorder."""

    sizes: Sizes
    seconds: tuple[float, ...]
    host_s: tuple[float, ...] = ()  # of the host before each; empty: not known


class Family:
    """Steps that do the same work on inputs of different sizes: at least two recorded members. `timed` are steps that
    were timed without the recorder."""

    def __init__(self, members: Sequence[Member], timed: Sequence[TimedAt] = ()) -> None:
        assert len(members) > 1
        self.timed = tuple(timed)
        self.members = tuple(sorted(members, key=lambda member: (math.prod(member.sizes), member.sizes)))
        self._columns = tuple(zip(*(member.sizes for member in self.members), strict=True))
        varying = [column for column in self._columns if len(set(column)) > 1]
        self._variables = tuple(dict.fromkeys(varying))  # each variable is given by its values at the members
        self._points = tuple(zip(*self._variables, strict=True)) if self._variables else ((),) * len(self.members)
        self._forms: dict[tuple[int, ...], Form] = {}

    def admits(self, member: Member) -> str:
        """Returns why a recorded step is not a member of this family, or an empty string if it is."""
        if len(member.sizes) != len(self._columns):
            return f"its inputs have {len(member.sizes)} dimensions, not {len(self._columns)}"
        return difference(self.members[0].trace, member.trace)

    def knows(self, sizes: Sizes) -> bool:
        """Whether these sizes vary only in dimensions that vary among the members, and in the same way."""
        return self._point(sizes) is not None

    def at(self, sizes: Sizes) -> Trace:
        """Returns the trace of a step with inputs of these sizes, as it would be recorded."""
        for member in self.members:
            if member.sizes == sizes:
                return member.trace
        point = self._point(sizes)
        assert point is not None, "the family does not know how these dimensions vary together"
        nearest = self._nearest(sizes)
        self._learn_from_shapes()
        traces = [member.trace for member in self.members]
        storages = self._storages(nearest, point)
        work = _moved_bytes(nearest, storages)
        return replace(
            nearest,
            storages=storages,
            ops=tuple(
                self._op(agreed, op, point, op_s)
                for agreed, op, op_s in zip(self._agreed, nearest.ops, self._seconds(work), strict=True)
            ),
            ticks=tuple(
                self._tick(group, tick, point)
                for tick, *group in zip(nearest.ticks, *(trace.ticks for trace in traces), strict=True)
            ),
        )

    # -- sizes --------------------------------------------------------------------------------------------------------

    def _point(self, sizes: Sizes) -> Sizes | None:
        """Returns the values of the variables, or None if a constant dimension differs or two dimensions disagree."""
        if len(sizes) != len(self._columns):
            return None
        found: dict[tuple[int, ...], int] = {}
        for size, column in zip(sizes, self._columns, strict=True):
            if len(set(column)) == 1:
                if size != column[0]:
                    return None
            elif found.setdefault(column, size) != size:
                return None
        return tuple(found[column] for column in self._variables)

    def _nearest(self, sizes: Sizes) -> Trace:
        """Returns the smallest member that is at least as large, whose lifetimes are the most reliable, else the
        largest."""
        work = math.prod(sizes)
        larger = [member for member in self.members if math.prod(member.sizes) >= work]
        return (larger[0] if larger else self.members[-1]).trace

    # -- numbers ------------------------------------------------------------------------------------------------------

    def _number(self, recorded: tuple[int, ...], grain: int, point: Sizes) -> int:
        """Returns a recorded number at another point. It is a multiple of `grain`, to which it was rounded up."""
        if len(set(recorded)) == 1:
            return recorded[0]
        return self._form(recorded, grain)(point)

    def _form(self, recorded: tuple[int, ...], grain: int) -> Form:
        key = (*recorded, grain)
        if key not in self._forms:
            self._forms[key] = _form_of(recorded, self._points, grain)
        return self._forms[key]

    def _learn_from_shapes(self) -> None:
        """Storages with as many bytes as a saved tensor, at every member, have the form of that tensor's shape."""
        if self._forms:
            return
        traces = [member.trace for member in self.members]
        grain = 1 if traces[0].device == "cpu" else ALLOCATOR.round_bytes
        for ticks in zip(*(trace.ticks for trace in traces), strict=True):
            recorded = tuple(trace.bytes_of(tick.value) for trace, tick in zip(traces, ticks, strict=True))
            key = (*recorded, grain)
            if len(set(recorded)) == 1 or key in self._forms:
                continue
            sides = tuple(zip(*(tick.shape for tick in ticks), strict=True))
            form = _volume([_constant(side[0]) if len(set(side)) == 1 else self._form(side, 1) for side in sides])
            factor = _factor_of(form, recorded, self._points, grain)
            if factor is not None:
                self._forms[key] = _scaled(form, factor, grain)

    @property
    def _grain(self) -> int:
        """The unit to which the bytes of storages are rounded up."""
        return 1 if self.members[0].trace.device == "cpu" else ALLOCATOR.round_bytes

    def _storages(self, nearest: Trace, point: Sizes) -> tuple[Storage, ...]:
        groups = zip(*([storage.bytes for storage in member.trace.storages] for member in self.members), strict=True)
        return tuple(
            _changed(storage, bytes=self._number(recorded, self._grain, point)) if len(set(recorded)) > 1 else storage
            for storage, recorded in zip(nearest.storages, groups, strict=True)
        )

    def _tick(self, group: Sequence[Tick], tick: Tick, point: Sizes) -> Tick:
        if all(other.shape == tick.shape for other in group):
            return tick
        shape = tuple(self._number(sides, 1, point) for sides in zip(*(other.shape for other in group), strict=True))
        return _changed(tick, shape=shape)

    @cached_property
    def _agreed(self) -> tuple[_Agreed, ...]:
        """Returns what is common to all members, for each op."""
        known = [timed.host_s for timed in self.timed if timed.host_s]
        known = known or [tuple(op.host_s for op in member.trace.ops) for member in self.members]
        host_s_of_ops = zip(*known, strict=True)
        return tuple(
            _Agreed(
                norm_replay=all(op.norm_replay for op in group),
                is_fused=all(op.fused == group[0].fused for op in group),
                repeats=group[0].repeats if all(op.repeats == group[0].repeats for op in group) else -1,
                workspaces=tuple(op.workspace_bytes for op in group),
                host_s=min(host_s),
            )
            for group, host_s in zip(zip(*(member.trace.ops for member in self.members), strict=True), host_s_of_ops)
        )

    def _op(self, agreed: _Agreed, op: Op, point: Sizes, seconds: float) -> Op:
        """A workspace never shrinks below what was recorded: libraries choose other algorithms at other sizes."""
        changes: dict[str, Any] = {"seconds": seconds, "repeats": agreed.repeats, "host_s": agreed.host_s}
        if any(agreed.workspaces):
            number = self._number(agreed.workspaces, self._grain, point)
            changes["workspace_bytes"] = max(number, min(agreed.workspaces))
        factor = seconds / op.seconds if op.seconds > 0 else 1.0
        if op.norm_replay:
            changes["norm_replay"] = agreed.norm_replay
            changes["norm_replay_s"] = op.norm_replay_s * factor if agreed.norm_replay else 0.0
        if op.fused:
            changes["fused"] = op.fused if agreed.is_fused else ()
            changes["fused_s"] = op.fused_s * factor if agreed.is_fused else 0.0
        return _changed(op, **changes)

    # -- seconds ------------------------------------------------------------------------------------------------------

    @cached_property
    def _costs(self) -> tuple[Floats, Floats]:
        """Returns, for each op, the coefficients of a constant, of its moved bytes and of their square, and the scale
        of the bytes."""
        traces = [member.trace for member in self.members]
        steps = [(_moved_bytes(trace, trace.storages), [op.seconds for op in trace.ops]) for trace in traces]
        timed = [(self._moved_bytes_at(step.sizes), list(step.seconds)) for step in self.timed]
        steps = timed if len(timed) > 1 else steps + timed
        moved = np.stack([moved for moved, _ in steps], axis=1)  # op, step
        seconds = np.array([seconds for _, seconds in steps], dtype=np.float64).T
        scale = np.maximum(moved.max(axis=1), 1.0)
        squared = np.array(["attention" in op.name for op in traces[0].ops])
        work = moved / scale[:, None]
        return _explain(work, _without_first_calls(work, seconds, squared), squared), scale

    def _moved_bytes_at(self, sizes: Sizes) -> Floats:
        point, nearest = self._point(sizes), self._nearest(sizes)
        assert point is not None, "a step was timed at sizes that the family does not know"
        self._learn_from_shapes()
        return _moved_bytes(nearest, self._storages(nearest, point))

    def _seconds(self, moved: Floats) -> list[float]:
        costs, scale = self._costs
        work = moved / scale
        seconds: list[float] = (costs[:, 0] + costs[:, 1] * work + costs[:, 2] * work**2).tolist()
        return seconds


@dataclass(frozen=True)
class _Agreed:
    """What is common to all members of a family, for one op."""

    norm_replay: bool
    is_fused: bool  # with the same ops
    repeats: int
    workspaces: tuple[int, ...]
    host_s: float  # the least: what was more were first calls


def _changed(item: Item, **changes: Any) -> Item:
    """`dataclasses.replace` without a call of the constructor, which takes ten times as long: traces have thousands of
    ops, and a loop waits for them."""
    new = object.__new__(type(item))
    vars(new).update(vars(item), **changes)
    return new


def _moved_bytes(trace: Trace, storages: Sequence[Storage]) -> Floats:
    """Bytes that each op reads and writes, where storages have the bytes of `storages`."""
    storage_of = [value.storage for value in trace.values]
    of_storage = [storage.bytes for storage in storages]
    return np.array(
        [sum(of_storage[storage_of[value]] for value in (*op.reads, *op.writes)) for op in trace.ops], dtype=np.float64
    )


def _without_first_calls(work: Floats, seconds: Floats, squared: npt.NDArray[np.bool_]) -> Floats:
    """Limits the seconds of an op to its seconds at any other size, scaled by the work. What was longer also loaded a
    library, compiled a kernel or waited for memory."""
    power = np.where(squared, 2.0, 1.0)[:, None, None]
    ratio = work[:, :, None] / np.maximum(work[:, None, :], 1e-12)  # op, member, another
    limits = seconds[:, None, :] * np.maximum(ratio, 1.0) ** power
    cleaned: Floats = limits.min(axis=2)
    return cleaned


def _explain(work: Floats, seconds: Floats, squared: npt.NDArray[np.bool_]) -> Floats:
    """Solves least squares with non-negative coefficients, for all ops at once. Every subset of the three terms is
    solved, and the best one without a negative coefficient is used. Only ops that are `squared` have the third term."""
    num_ops, num_members = work.shape
    terms = np.stack([np.ones_like(work), work, work**2], axis=2)  # op, member, term
    best, best_error = np.zeros((num_ops, _NUM_TERMS)), np.full(num_ops, np.inf)
    for size in range(1, min(_NUM_TERMS, num_members) + 1):
        for chosen in itertools.combinations(range(_NUM_TERMS), size):
            part = terms[:, :, chosen]
            solved = np.einsum("otm,om->ot", np.linalg.pinv(part), seconds)
            error = ((np.einsum("omt,ot->om", part, solved) - seconds) ** 2).sum(axis=1)
            allowed = squared if 2 in chosen else np.ones_like(squared)
            better = allowed & (solved >= 0).all(axis=1) & (error < best_error * (1 - 1e-9))
            best_error[better] = error[better]
            best[better] = 0.0
            best[np.ix_(better, np.array(chosen))] = solved[better]
    return best


# -- forms of a tensor's size ------------------------------------------------------------------------------------------


def _form_of(recorded: Sequence[int], points: Sequence[Sizes], grain: int) -> Form:
    """Returns the simplest form that gives every recorded number, or a line through the nearest members."""
    for form in _products(len(points[0])):
        factor = _factor_of(form, recorded, points, grain)
        if factor is not None:
            return _scaled(form, factor, grain)
    return _line(recorded, points, grain)


def _scaled(form: Form, factor: int, grain: int) -> Form:
    return lambda point: _round_up(factor * form(point), grain)


def _constant(number: int) -> Form:
    return lambda point: number


def _volume(sides: Sequence[Form]) -> Form:
    return lambda point: math.prod(side(point) for side in sides)


def _factor_of(form: Form, recorded: Sequence[int], points: Sequence[Sizes], grain: int) -> int | None:
    """Returns the integer factor with which `form` gives every recorded number, the largest if there are several."""
    values = [form(point) for point in points]
    at = max(range(len(values)), key=values.__getitem__)
    if values[at] <= 0:
        return None
    factor = recorded[at] // values[at]
    while factor > 0 and _round_up(factor * values[at], grain) == recorded[at]:
        if all(_round_up(factor * value, grain) == number for value, number in zip(values, recorded, strict=True)):
            return factor
        factor -= 1
    return None


def _round_up(number: int, grain: int) -> int:
    return -(-number // grain) * grain


def _line(recorded: Sequence[int], points: Sequence[Sizes], grain: int) -> Form:
    """Returns a form that interpolates along the product of all variables, between the two nearest members."""
    known = sorted({math.prod(point): number for point, number in zip(points, recorded, strict=True)}.items())

    def form(point: Sizes) -> int:
        at = math.prod(point)
        if len(known) == 1:
            return known[0][1]
        above = next((index for index, (work, _) in enumerate(known) if index and at <= work), len(known) - 1)
        (low, low_number), (high, high_number) = known[above - 1], known[above]
        number = high_number + (high_number - low_number) * (at - high) / (high - low)
        return max(0, _round_up(math.ceil(number), grain))

    return form


@lru_cache(maxsize=FAMILIES.num_forms_kept)
def _products(num_variables: int) -> tuple[Form, ...]:
    """Returns products of the variables, the simple ones first: powers, then powers with one factor shifted by one,
    then strided sizes."""
    powers = itertools.product(range(FAMILIES.largest_power + 1), repeat=num_variables)
    kept = sorted(
        (power for power in powers if 0 < sum(power) <= FAMILIES.largest_degree), key=lambda power: (sum(power), power)
    )
    return (*(_product(power, _as_it_is) for power in kept), *_shifted(kept), *_strided(kept))


def _shifted(powers: Sequence[Sizes]) -> Iterator[Form]:
    for shift in (-1, 1):
        for power in powers:
            for at, exponent in enumerate(power):
                if exponent:
                    yield _shifted_product(power, at, shift)


def _shifted_product(power: Sizes, at: int, shift: int) -> Form:
    """Returns a product in which one factor is shifted by one: a sequence without its last token, or with one more."""
    whole = _product(tuple(exponent - (index == at) for index, exponent in enumerate(power)), _as_it_is)
    return lambda point: whole(point) * (point[at] + shift)


def _strided(powers: Sequence[Sizes]) -> Iterator[Form]:
    for stride in FAMILIES.strides:
        for power in powers:
            yield _product(power, lambda size, stride=stride: -(-size // stride))  # type: ignore[misc]
            yield _product(power, lambda size, stride=stride: size // stride)  # type: ignore[misc]
            for at in range(len(power)) if sum(map(bool, power)) > 1 else ():
                yield _product_with_one_whole(power, at, stride)  # a batch beside a strided size


def _product_with_one_whole(power: Sizes, at: int, stride: int) -> Form:
    def form(point: Sizes) -> int:
        sides = (size if index == at else -(-size // stride) for index, size in enumerate(point))
        return math.prod(side**exponent for side, exponent in zip(sides, power, strict=True))

    return form


def _product(power: Sizes, side: Callable[[int], int]) -> Form:
    return lambda point: math.prod(side(size) ** exponent for size, exponent in zip(point, power, strict=True))


def _as_it_is(size: int) -> int:
    return size
