"""What the model is called with -> the kind of step this is: Kind, and the table of them.

Steps are told apart before their first op by the shapes and types of tensors, by modes, and by whether gradients are
there. Python numbers and strings change the work sometimes (`deep=True`) and often not (the number of the step), so at
first they tell nothing apart. Where a step leaves the plan of a kind that was recorded with other scalars, one of those
that differ is told apart from then on: the first one that was never seen to change while the plan held. A wrong guess
costs recordings and is taken back: two recordings of the same work show that what differs between them does not matter.
A scalar that changes the work can never do harm: the plan is left, and the numbers are the same.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from outcore.errors import BudgetTooSmall, warn
from outcore.fitting.phases import GivenUp, LeftPlan, Measured, New, Phase, Recorded, Shown, Timed, WasRecorded
from outcore.fitting.preparing import Preparer
from outcore.fitting.settings import FittingSettings
from outcore.units import format_bytes
from outcore.values import Plan, Timeline, Trace

log = logging.getLogger("outcore")

Scalars = tuple[bool | int | str | None, ...]
_LIKELY = (bool, type(None), str, int)  # which scalars change the work, the likeliest first


@dataclass(eq=False)
class Kind:
    """Steps that do the same work: the phase they are in, and what is known about them for good."""

    preparer: Preparer
    signature: Hashable = ()
    scalars: Scalars = ()  # of the step that was recorded
    phase: Phase = field(default_factory=New)
    measured: Timeline | None = None  # the last step that was measured closely
    num_steps: int = 0  # that followed the plan at hand
    num_left: int = 0
    num_slowed: int = 0
    is_watched: bool = False
    asked_late: set[int] = field(default_factory=set)
    beyond_bytes: int = 0  # that steps took beyond the budget, though they did what was recorded

    def begin(self, before_bytes: int) -> Phase:
        """A step begins; the phase in which it runs. `before_bytes`: what is in memory then. What steps took beyond
        their plan counts as if it were there before, as long as a plan fits beside it."""
        try:
            self._go_to(self.phase.begin(self, before_bytes + self.beyond_bytes))
        except BudgetTooSmall:
            if not self.beyond_bytes:
                raise
            self.beyond_bytes = 0
            self._go_to(self.phase.begin(self, before_bytes))
        return self.phase

    def take(self, shown: Shown) -> None:
        """A step is over, and showed something."""
        if isinstance(shown, LeftPlan):
            log.info("a step left its plan: %s", shown.because)
        was_given_up = self.is_given_up
        if isinstance(shown, Measured):
            self._note_beyond(shown.timeline.peak_bytes)
        self._go_to(self.phase.after(self, shown))
        if isinstance(shown, LeftPlan) and self.is_given_up and not was_given_up:
            warn(
                f"steps called alike keep doing different work ({shown.because}); they run unplanned from here on, "
                "everything swapped: correct, but slow (if only parts of the model are called, let ooc.step(batch=batch) "
                "know the shapes)"
            )

    def _note_beyond(self, peak_bytes: int) -> None:
        """A step that followed its plan took more than the budget: it did more than the recorded one, beside the ops
        that a plan looks at. Nobody could know, so the user is told, and later plans leave that much free."""
        budget_bytes = self.preparer.budget.device_bytes
        if peak_bytes > budget_bytes:
            self.beyond_bytes += peak_bytes - budget_bytes
            warn(
                f"a step took {format_bytes(peak_bytes)} of a budget of {format_bytes(budget_bytes)}: it did more than "
                f"the step that was recorded; the next ones are planned with {format_bytes(self.beyond_bytes)} left "
                "free (do what only some steps do outside of ooc.step())"
            )

    def _go_to(self, phase: Phase) -> None:
        before, after = self.phase.ready, phase.ready
        if after is not None and (before is None or before.program is not after.program):
            self.num_steps = 0
        if after is None:  # what was measured of a plan goes with it
            self.measured = None
        self.phase = phase

    # -- for those who run steps for a purpose of their own (`outcore.tuning`) ----------------------------------------

    def record_again(self) -> None:
        """Its next step is recorded."""
        self.phase = New()

    def replace_trace(self, trace: Trace) -> None:
        """Its next step is planned for `trace`, with its ops timed again where that was still to be done."""
        phase = Recorded if isinstance(self.phase, Recorded) else Timed
        self.phase = phase(trace, self.phase.ready)

    def plan_for(self, trace: Trace) -> None:
        """Its next step is planned for `trace`, whose seconds are right."""
        self.phase = Timed(trace, self.phase.ready)

    def time_again(self, trace: Trace) -> None:
        """The ops of its next step are timed, where there is memory for that."""
        self.phase = Recorded(trace, self.phase.ready)

    def stop_measuring(self) -> None:
        """Its next steps are not measured closely."""
        self.num_steps = max(self.num_steps, self.preparer.settings.num_measured)

    def give_up(self, because: str) -> None:
        """Its steps run unplanned from here on."""
        self.phase = GivenUp(because)

    # -- what a user looks at -----------------------------------------------------------------------------------------

    @property
    def is_asked_late_anew(self) -> bool:
        """Did autograd ask for something after such a step that the trace does not know of?"""
        return self.trace is not None and not self.asked_late.issubset(self.trace.asked_late)

    @property
    def is_given_up(self) -> bool:
        return isinstance(self.phase, GivenUp)

    @property
    def trace(self) -> Trace | None:
        """As it was recorded."""
        return self.phase.trace

    @property
    def plan(self) -> Plan | None:
        return self.phase.ready.prepared.plan if self.phase.ready is not None else None


@dataclass
class _Alike:
    """Kinds that differ in scalars only. Positions among these."""

    telling: frozenset[int] = frozenset()  # that tell kinds apart
    idle: frozenset[int] = frozenset()  # that were seen to change while the work stayed the same

    def key_of(self, scalars: Scalars) -> Hashable:
        return tuple(scalars[at] for at in sorted(self.telling))


class Kinds:
    """The kinds of steps of one loop, the least recently used first."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer, self._settings = preparer, preparer.settings
        self._kinds: OrderedDict[Hashable, Kind] = OrderedDict()
        self._alike: dict[Hashable, _Alike] = {}
        self._expected: Trace | None = None
        self._recordings = _Recordings(preparer.settings)
        self._has_told_late = False

    def expect(self, trace: Trace) -> None:
        """The next new kind of step does what `trace` says."""
        self._expected = trace

    def _first_phase(self) -> Phase:
        """In which a new kind begins: it is recorded, unless its trace is known without."""
        expected, self._expected = self._expected, None
        return Timed(expected) if expected is not None else New()

    def known(self, signature: Hashable, scalars: Scalars) -> Kind | None:
        """The kind of a step that begins, if there is one already."""
        alike = self._alike.get(signature)
        return self._kinds.get((signature, alike.key_of(scalars))) if alike is not None else None

    def find(self, signature: Hashable, scalars: Scalars) -> Kind:
        """The kind of a step that begins."""
        alike = self._alike.setdefault(signature, _Alike())
        key = signature, alike.key_of(scalars)
        if key not in self._kinds:
            self._kinds[key] = Kind(self._preparer, signature, scalars, self._first_phase())
            while len(self._kinds) > self._settings.most_kinds:
                self._forget(next(iter(self._kinds)))
        self._kinds.move_to_end(key)
        return self._kinds[key]

    def _forget(self, key: Hashable) -> None:
        signature = self._kinds.pop(key).signature
        if not any(kind.signature == signature for kind in self._kinds.values()):
            self._alike.pop(signature, None)

    def tell_if_late(self, kind: Kind) -> None:
        """Warns once of backwards after the end of a step."""
        if kind.is_asked_late_anew and not self._has_told_late:
            self._has_told_late = True
            warn(
                "a backward() after the end of ooc.step() asked for tensors of that step; since it cannot be planned, "
                "these tensors are all swapped: correct, but slow (call backward() inside ooc.step())"
            )

    # -- what a step showed -------------------------------------------------------------------------------------------

    def was_recorded(self, kind: Kind, scalars: Scalars, trace: Trace, asked_late: set[int]) -> None:
        """`asked_late` grows when autograd asks for something after the step."""
        kind.scalars, kind.asked_late = scalars, asked_late
        kind.take(WasRecorded(trace))
        self._recordings.note(recorded=True)
        alike = self._of(kind.signature)
        for other in alike:
            if other is not kind and other.trace is not None and other.trace.fingerprint == trace.fingerprint:
                self._set_idle(kind.signature, differing(other.scalars, scalars))
        if len(alike) >= self._settings.most_alike and not any(other.plan for other in alike):  # none came twice
            self._set_idle(kind.signature, self._alike[kind.signature].telling)

    def followed(self, kind: Kind, scalars: Scalars) -> None:
        """A step did what was recorded."""
        self._recordings.note(recorded=False)
        if scalars != kind.scalars:
            self._set_idle(kind.signature, differing(kind.scalars, scalars))

    def left(self, kind: Kind, scalars: Scalars, because: str) -> None:
        """A step left its plan: it is of a kind of its own if one of its scalars may be the reason."""
        alike = self._alike.get(kind.signature)
        suspects = differing(kind.scalars, scalars) - alike.idle - alike.telling if alike is not None else frozenset()
        if not suspects or alike is None:
            kind.take(LeftPlan(because))
            return
        log.info("a step left its plan: %s; steps with other arguments are planned for themselves", because)
        likeliest = min(suspects, key=lambda at: (_LIKELY.index(type(scalars[at])), at))
        alike.telling |= {likeliest}
        self._rebuild(kind.signature)

    def _set_idle(self, signature: Hashable, positions: frozenset[int]) -> None:
        alike = self._alike.get(signature)
        if alike is None or positions <= alike.idle:
            return
        alike.idle |= positions
        if alike.telling & positions:
            alike.telling -= positions
            self._rebuild(signature)

    def _rebuild(self, signature: Hashable) -> None:
        """Other scalars tell kinds apart: each goes to its new place; of several in one place one with a plan stays."""
        alike = self._alike[signature]
        kinds = OrderedDict[Hashable, Kind]()
        for key, kind in self._kinds.items():
            own = (signature, alike.key_of(kind.scalars)) if kind.signature == signature else key
            if own not in kinds or kinds[own].plan is None:
                kinds[own] = kind
        self._kinds = kinds

    def _of(self, signature: Hashable) -> list[Kind]:
        return [kind for kind in self._kinds.values() if kind.signature == signature]

    # -- as a table ---------------------------------------------------------------------------------------------------

    def values(self) -> list[Kind]:
        return list(self._kinds.values())

    def __len__(self) -> int:
        return len(self._kinds)

    def __iter__(self) -> Iterator[Kind]:
        return iter(self.values())

    def clear(self) -> None:
        """Every next step is recorded."""
        self._kinds.clear()
        self._alike.clear()
        self._recordings = _Recordings(self._settings)


def differing(one: Scalars, other: Scalars) -> frozenset[int]:
    """Positions at which the scalars of two steps with the same signature differ."""
    return frozenset(at for at, (mine, theirs) in enumerate(zip(one, other)) if mine != theirs)


class _Recordings:
    """How many of the last steps were recorded, to warn of steps that keep changing, once."""

    def __init__(self, settings: FittingSettings) -> None:
        self._recent = deque[bool](maxlen=settings.num_recent)
        self._most = settings.recorded_share * settings.num_recent
        self._is_told = False

    def note(self, *, recorded: bool) -> None:
        self._recent.append(recorded)
        if self._is_told or sum(self._recent) < self._most:
            return
        self._is_told = True
        warn(
            f"{sum(self._recent)} of the last {len(self._recent)} steps had sizes or arguments that were not seen "
            "before and were recorded, which is slow; pad batches to a few sizes, and give the model no argument that "
            "changes the work in every step"
        )
