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

from outcore.eager.program import Program
from outcore.errors import BudgetTooSmall, warn
from outcore.fitting.branches import Branches
from outcore.fitting.cache import Remembered
from outcore.fitting.phases import (
    GivenUp,
    LeftPlan,
    Measured,
    New,
    Phase,
    Recorded,
    Restored,
    Settled,
    Shown,
    Timed,
    WasRecorded,
)
from outcore.fitting.preparing import Preparer
from outcore.fitting.remembering import Remembering, rests_on_the_same
from outcore.fitting.settings import FittingSettings
from outcore.fitting.telling import tell_change
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
    key: str = ""  # under which it is kept for later runs
    is_remembered: bool = False  # as it is now
    may_switch: bool = False  # a step may turn out to be of another kind after it began
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
                'and what does not fit is swapped: correct, but slow (give steps that differ names, ooc.step("name"); '
                "where only parts of the model are called, let ooc.step(batch=batch) know the shapes)"
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

    def let_switch(self) -> None:
        """Its steps may turn out to be of another kind from here on."""
        if not self.may_switch:
            self.may_switch = True
            if self.phase.ready is not None:
                self.phase = self.phase.with_ready(self.preparer.made_to_switch(self.phase.ready))

    def program_beside(self, before_bytes: int) -> Program | None:
        """What a step follows that turns out to be of this kind, if it can be followed with so much there before it."""
        ready = self.phase.ready
        return ready.program if ready is not None and before_bytes <= ready.covers_bytes else None

    def has_program(self, program: Program) -> bool:
        return self.phase.ready is not None and self.phase.ready.program is program

    def _go_to(self, phase: Phase) -> None:
        before, after = self.phase.ready, phase.ready
        if after is not None and (before is None or before.program is not after.program):
            self.num_steps = 0
        if after is None:  # what was measured of a plan goes with it
            self.measured = None
        before_phase, self.phase = self.phase, phase
        tell_change(before_phase, phase)

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

    def __init__(self, preparer: Preparer, remembering: Remembering | None = None) -> None:
        self._preparer, self._settings, self._remembering = preparer, preparer.settings, remembering
        self._kinds: OrderedDict[Hashable, Branches[Kind]] = OrderedDict()
        self._alike: dict[Hashable, _Alike] = {}
        self._expected: Trace | None = None
        self._recordings = _Recordings(preparer.settings)
        self._has_told_late = False

    def expect(self, trace: Trace) -> None:
        """The next new kind of step does what `trace` says."""
        self._expected = trace

    def _new_kind(self, signature: Hashable, scalars: Scalars, key: Hashable) -> Kind:
        """It is recorded when it begins, unless it is known without."""
        expected, self._expected = self._expected, None
        kind = Kind(self._preparer, signature, scalars)
        if expected is not None:
            kind.phase = Timed(expected)
        elif self._remembering is not None:
            kind.key = self._remembering.key_of(key)
        return kind

    def _restore(self, kind: Kind, recorded: Trace) -> None:
        """Takes up the plan of an earlier run if that recorded the same. What a plan rests on (which ops may run again,
        which saved tensors stay as they were saved) is never trusted from a file: another loss function may have run
        then, which no key knows of."""
        if self._remembering is None or not kind.key or kind.is_remembered:
            return
        known = self._remembering.find(kind.key)
        if known is not None and rests_on_the_same(known.trace, recorded):
            log.info("a kind of step is planned as in an earlier run: %.3f s a step", known.step_s)
            kind.phase, kind.is_remembered = Restored(known.trace, plan=known.plan), True

    def _remember(self, kind: Kind) -> None:
        """For later runs, once its plan is settled and a step followed it to its end."""
        if self._remembering is None or kind.is_remembered or not kind.key or kind.is_watched or kind.asked_late:
            return
        phase = kind.phase
        if isinstance(phase, Settled):
            predicted = phase.ready.prepared.predicted
            step_s = kind.measured.step_s if kind.measured is not None else predicted.step_s
            self._remembering.save(kind.key, Remembered(phase.trace, phase.ready.prepared.plan, step_s))
            kind.is_remembered = True

    def _forget_remembered(self, kind: Kind) -> None:
        """No step followed the plan of an earlier run: the model does something else now."""
        log.info("the plan of an earlier run is for another step; it is recorded anew")
        assert self._remembering is not None
        self._remembering.forget(kind.key)
        kind.is_remembered = False
        kind.record_again()

    def known(self, signature: Hashable, scalars: Scalars) -> Kind | None:
        """The kind of a step that begins, if there is one already."""
        branches = self._branches(signature, scalars)
        return branches.expected() if branches is not None else None

    def find(self, signature: Hashable, scalars: Scalars) -> Kind:
        """The kind of a step that begins, or what it most likely is."""
        alike = self._alike.setdefault(signature, _Alike())
        key = signature, alike.key_of(scalars)
        if key not in self._kinds:
            self._kinds[key] = Branches(self._new_kind(signature, scalars, key), self._settings)
            while len(self._kinds) > self._settings.most_kinds:
                self._forget(next(iter(self._kinds)))
        self._kinds.move_to_end(key)
        expected = self._kinds[key].expected()
        return expected or Kind(self._preparer, signature, scalars, may_switch=True)

    def beside(self, kind: Kind) -> list[Kind]:
        """The other kinds that its step may turn out to be of."""
        branches = self._branches(kind.signature, kind.scalars)
        return [other for other in branches if other is not kind] if branches is not None else []

    def _branches(self, signature: Hashable, scalars: Scalars) -> Branches[Kind] | None:
        alike = self._alike.get(signature)
        return self._kinds.get((signature, alike.key_of(scalars))) if alike is not None else None

    def _forget(self, key: Hashable) -> None:
        signature = self._kinds.pop(key).kinds[0].signature
        if not self._of(signature):
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

    def was_recorded(self, kind: Kind, scalars: Scalars, trace: Trace, asked_late: set[int]) -> Kind:
        """`asked_late` grows when autograd asks for something after the step. Returns the kind that the step is of."""
        self._recordings.note(recorded=True)
        branches = self._branches(kind.signature, scalars)
        if branches is not None and kind not in branches:
            return self._found_branch(branches, kind, scalars, trace, asked_late)
        kind.scalars, kind.asked_late = scalars, asked_late
        kind.take(WasRecorded(trace))
        self._restore(kind, trace)
        if branches is not None:
            branches.note(kind)
        alike = self._of(kind.signature)
        for other in alike:
            if other is not kind and other.trace is not None and other.trace.fingerprint == trace.fingerprint:
                self._set_idle(kind.signature, differing(other.scalars, scalars))
        if len(alike) >= self._settings.most_alike and not any(other.plan for other in alike):  # none came twice
            self._set_idle(kind.signature, self._alike[kind.signature].telling)
        return kind

    def _found_branch(
        self, branches: Branches[Kind], kind: Kind, scalars: Scalars, trace: Trace, asked_late: set[int]
    ) -> Kind:
        """Work that was expected to be new was recorded."""
        branches.note_recorded()
        for known in branches:
            if known.trace is not None and known.trace.fingerprint == trace.fingerprint:
                if len(branches.kinds) == 1 and known.plan is not None and not known.num_steps:
                    known.take(LeftPlan("no step that does what was recorded follows the plan to its end"))
                branches.note(known)
                return known
        kind.scalars, kind.asked_late = scalars, asked_late
        kind.take(WasRecorded(trace))
        branches.add(kind)
        branches.note(kind)
        return kind

    def followed(self, kind: Kind, scalars: Scalars) -> None:
        """A step did what was recorded."""
        self._recordings.note(recorded=False)
        self._remember(kind)
        branches = self._branches(kind.signature, scalars)
        if branches is not None:
            branches.note(kind)
        if scalars != kind.scalars:
            self._set_idle(kind.signature, differing(kind.scalars, scalars))

    def left(self, kind: Kind, scalars: Scalars, because: str, resembled: Program | None = None) -> None:
        """A step left its plan: it is of a kind of its own if one of its scalars may be the reason, and else of the
        branch whose program it resembled, or of one that is not known yet."""
        if kind.is_remembered and not kind.num_steps:
            self._forget_remembered(kind)
            return
        alike = self._alike.get(kind.signature)
        suspects = differing(kind.scalars, scalars) - alike.idle - alike.telling if alike is not None else frozenset()
        if not suspects or alike is None:
            self._left_for_a_branch(kind, scalars, because, resembled)
            return
        log.info("a step left its plan: %s; steps with other arguments are planned for themselves", because)
        likeliest = min(suspects, key=lambda at: (_LIKELY.index(type(scalars[at])), at))
        alike.telling |= {likeliest}
        self._rebuild(kind.signature)

    def _left_for_a_branch(self, kind: Kind, scalars: Scalars, because: str, resembled: Program | None) -> None:
        kind.num_left += 1
        branches = self._branches(kind.signature, scalars)
        if branches is None:
            return
        log.info("a step left its plan: %s; such steps are told apart as they go on", because)
        known = (branch for branch in branches if resembled is not None and branch.has_program(resembled))
        branches.note(next(known, None))
        for branch in branches:
            branch.let_switch()

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
        table = OrderedDict[Hashable, Branches[Kind]]()
        for key, branches in self._kinds.items():
            if branches.kinds[0].signature != signature:
                table[key] = branches
                continue
            for kind in branches:
                own = signature, alike.key_of(kind.scalars)
                if own not in table or table[own].kinds[0].plan is None:
                    table[own] = Branches(kind, self._settings)
        self._kinds = table

    def _of(self, signature: Hashable) -> list[Kind]:
        return [kind for kind in self if kind.signature == signature]

    # -- as a table ---------------------------------------------------------------------------------------------------

    def values(self) -> list[Kind]:
        return [kind for branches in self._kinds.values() for kind in branches]

    def __len__(self) -> int:
        return len(self.values())

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
