"""The arguments of a model's forward -> Kind: steps that do the same work, and the table of all kinds.

Steps are distinguished before their first op by the shapes and dtypes of tensors, by modes, and by whether gradients
exist. Python numbers and strings (scalars) change the work in some models (`deep=True`) and not in most (the number of
the step), so at first they are ignored. When a step leaves the plan of a kind that was recorded with other scalars, one
of the differing scalars distinguishes kinds from then on: the first that never changed while the plan was followed. A
wrong choice costs recordings and is reverted: if two recordings do the same work, the scalars that differ between them
are ignored again. A scalar that changes the work cannot cause wrong numbers, because such a step leaves its plan.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from outcore.eager.program import Program
from outcore.errors import BudgetTooSmall, warn
from outcore.fitting.branches import Branches
from outcore.fitting.cache import Remembered
from outcore.fitting.excess import Excess
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
from outcore.values import Plan, Timeline, Trace

log = logging.getLogger("outcore")

Scalars = tuple[bool | int | str | None, ...]
_LIKELY = (bool, type(None), str, int)  # types of scalars, those that most likely change the work first


@dataclass(eq=False)
class Kind:
    """Steps that do the same work: their phase, and what stays known about them across phases."""

    preparer: Preparer
    signature: Hashable = ()
    scalars: Scalars = ()  # of the step that was recorded
    phase: Phase = field(default_factory=New)
    measured: Timeline | None = None  # the last measured step
    num_steps: int = 0  # that followed the current plan
    num_left: int = 0
    num_slowed: int = 0
    is_watched: bool = False
    asked_late: set[int] = field(default_factory=set)
    key: str = ""  # of its entry in the cache on disk
    is_remembered: bool = False  # the cache on disk holds its present plan
    may_switch: bool = False  # a step may turn out to be of another kind after it began
    excess: Excess = field(default_factory=Excess)

    def begin(self, before_bytes: int) -> Phase:
        """Called when a step begins with `before_bytes` in use; returns the phase in which it runs. Bytes by which
        earlier steps exceeded their plan count as in use, as long as a plan fits into the rest."""
        try:
            self._go_to(self.phase.begin(self, before_bytes + self.excess.free_bytes))
        except BudgetTooSmall:
            if not self.excess.free_bytes:
                raise
            self.excess.give_up()
            self._go_to(self.phase.begin(self, before_bytes))
        return self.phase

    def take(self, shown: Shown) -> None:
        """Moves to the phase that follows from what a step has shown."""
        if isinstance(shown, LeftPlan):
            log.info("a step left its plan: %s", shown.because)
        was_given_up = self.is_given_up
        if isinstance(shown, Measured):
            self.excess.note_peak(shown.timeline.peak_bytes, self.preparer.budget.device_bytes)
        self._go_to(self.phase.after(self, shown))
        if isinstance(shown, LeftPlan) and self.is_given_up and not was_given_up:
            warn(
                f"steps called alike keep doing different work ({shown.because}); they run unplanned from here on, "
                'and what does not fit is swapped: correct, but slow (give steps that differ names, ooc.step("name"); '
                "where only parts of the model are called, let ooc.step(batch=batch) know the shapes)"
            )

    def let_switch(self) -> None:
        """Prepares for steps that turn out to be of another kind after they began."""
        if not self.may_switch:
            self.may_switch = True
            if self.phase.ready is not None:
                self.phase = self.phase.with_ready(self.preparer.made_to_switch(self.phase.ready))

    def program_beside(self, before_bytes: int) -> Program | None:
        """Returns the program for a step that turns out to be of this kind, or None if `before_bytes` are too many for
        it."""
        ready = self.phase.ready
        return ready.program if ready is not None and before_bytes <= ready.covers_bytes else None

    def has_program(self, program: Program) -> bool:
        return self.phase.ready is not None and self.phase.ready.program is program

    def _go_to(self, phase: Phase) -> None:
        before, after = self.phase.ready, phase.ready
        if after is not None and (before is None or before.program is not after.program):
            self.num_steps = 0
        if after is None:  # measurements belong to the plan that is dropped
            self.measured = None
        before_phase, self.phase = self.phase, phase
        tell_change(before_phase, phase)

    # -- for code that runs steps for its own purposes (`outcore.tuning`) ---------------------------------------------

    def record_again(self) -> None:
        """Makes the next step be recorded."""
        self.phase = New(self.trace)

    def replace_trace(self, trace: Trace) -> None:
        """Makes the next step be planned for `trace`. Its ops are still timed again if that was due."""
        phase = Recorded if isinstance(self.phase, Recorded) else Timed
        self.phase = phase(trace, self.phase.ready)

    def plan_for(self, trace: Trace) -> None:
        """Makes the next step be planned for `trace`, whose seconds are correct."""
        self.phase = Timed(trace, self.phase.ready)

    def time_again(self, trace: Trace) -> None:
        """Makes the ops of the next step be timed, if there is enough memory for that."""
        self.phase = Recorded(trace, self.phase.ready)

    def stop_measuring(self) -> None:
        """Stops measuring its steps."""
        self.num_steps = max(self.num_steps, self.preparer.settings.num_measured)

    def give_up(self, because: str) -> None:
        """Makes its steps run without a plan."""
        self.phase = GivenUp(because)

    # -- read by users ------------------------------------------------------------------------------------------------

    @property
    def is_asked_late_anew(self) -> bool:
        """Whether autograd asked for a saved tensor after the end of a step, of which the trace does not know."""
        return self.trace is not None and not self.asked_late.issubset(self.trace.asked_late)

    @property
    def is_given_up(self) -> bool:
        return isinstance(self.phase, GivenUp)

    @property
    def trace(self) -> Trace | None:
        """The trace, as it was recorded."""
        return self.phase.trace

    @property
    def plan(self) -> Plan | None:
        return self.phase.ready.prepared.plan if self.phase.ready is not None else None


@dataclass
class _Alike:
    """What is known about the scalars of kinds with the same signature, by their positions."""

    telling: frozenset[int] = frozenset()  # scalars that distinguish kinds
    idle: frozenset[int] = frozenset()  # scalars that changed while the work stayed the same

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
        """Uses `trace` for the next new kind of step, instead of recording it."""
        self._expected = trace

    def _new_kind(self, signature: Hashable, scalars: Scalars, key: Hashable) -> Kind:
        """Makes a kind whose first step is recorded, unless `expect` gave its trace."""
        expected, self._expected = self._expected, None
        kind = Kind(self._preparer, signature, scalars)
        if expected is not None:
            kind.phase = Timed(expected)
        elif self._remembering is not None:
            kind.key = self._remembering.key_of(key)
        return kind

    def _restore(self, kind: Kind, recorded: Trace) -> None:
        """Uses the plan of an earlier run if that run recorded the same step.

        What makes a plan safe (which ops may run again, which saved tensors are not changed) is never taken from a
        file, because a different loss function may have run then, which the cache's key does not cover."""
        if self._remembering is None or not kind.key or kind.is_remembered:
            return
        known = self._remembering.find(kind.key)
        if known is not None and rests_on_the_same(known.trace, recorded):
            log.info("a kind of step is planned as in an earlier run: %.3f s a step", known.step_s)
            kind.phase, kind.is_remembered = Restored(known.trace, plan=known.plan), True

    def _remember(self, kind: Kind) -> None:
        """Saves the plan for later runs, once it is settled and a step has followed it to the end."""
        if self._remembering is None or kind.is_remembered or not kind.key or kind.is_watched or kind.asked_late:
            return
        phase = kind.phase
        if isinstance(phase, Settled):
            predicted = phase.ready.prepared.predicted
            step_s = kind.measured.step_s if kind.measured is not None else predicted.step_s
            self._remembering.save(kind.key, Remembered(phase.trace, phase.ready.prepared.plan, step_s))
            kind.is_remembered = True

    def _forget_remembered(self, kind: Kind) -> None:
        """Drops the plan of an earlier run after the first step left it: the model does something else now."""
        log.info("the plan of an earlier run is for another step; it is recorded anew")
        assert self._remembering is not None
        self._remembering.forget(kind.key)
        kind.is_remembered = False
        kind.record_again()

    def known(self, signature: Hashable, scalars: Scalars) -> Kind | None:
        """Returns the kind that a step which begins is expected to be of, or None if none is known."""
        branches = self._branches(signature, scalars)
        return branches.expected() if branches is not None else None

    def find(self, signature: Hashable, scalars: Scalars) -> Kind:
        """Returns the most likely kind of a step that begins, a new one if none is known."""
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
        """Returns the other kinds that a step of this kind may turn out to be of."""
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
        """Warns, once, if a backward ran after the end of a step."""
        if kind.is_asked_late_anew and not self._has_told_late:
            self._has_told_late = True
            warn(
                "a backward() after the end of ooc.step() asked for tensors of that step; since it cannot be planned, "
                "these tensors are all swapped: correct, but slow (call backward() inside ooc.step())"
            )

    def _tell_if_no_backward(self, trace: Trace) -> None:
        """Warns once of a recorded step whose backward, if there is one, comes after its end."""
        if trace.ticks and not trace.has_backward and not self._has_told_late:
            self._has_told_late = True
            warn(
                "a step ended without a backward(): what it saved for one is all swapped, which is correct, but slow "
                "(call backward() inside ooc.step(), and evaluate outside of it, under torch.no_grad())"
            )

    # -- what a step showed -------------------------------------------------------------------------------------------

    def was_recorded(self, kind: Kind, scalars: Scalars, trace: Trace, asked_late: set[int]) -> Kind:
        """Stores a recording and returns the kind that the step belongs to. `asked_late` grows if autograd asks for
        saved tensors after the step."""
        self._recordings.note(recorded=True)
        self._tell_if_no_backward(trace)
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
        if len(alike) >= self._settings.most_alike and not any(other.plan for other in alike):  # no kind occurred twice
            self._set_idle(kind.signature, self._alike[kind.signature].telling)
        return kind

    def _found_branch(
        self, branches: Branches[Kind], kind: Kind, scalars: Scalars, trace: Trace, asked_late: set[int]
    ) -> Kind:
        """Stores the recording of a step that was expected to be a new branch."""
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
        """Called when a step followed its plan to the end."""
        self._recordings.note(recorded=False)
        self._remember(kind)
        branches = self._branches(kind.signature, scalars)
        if branches is not None:
            branches.note(kind)
        if scalars != kind.scalars:
            self._set_idle(kind.signature, differing(kind.scalars, scalars))

    def left(self, kind: Kind, scalars: Scalars, because: str, resembled: Program | None = None) -> None:
        """Called when a step left its plan. If one of its scalars may be the reason, that scalar distinguishes kinds
        from now on. Otherwise the step belongs to the branch whose program it resembled, or to an unknown one."""
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
        log.info("a step left its plan: %s; such steps are told apart while they run", because)
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
        """Rebuilds the table after other scalars distinguish kinds. Of several kinds with the same key, one with a plan
        stays."""
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

    def __repr__(self) -> str:
        phases = Counter(type(kind.phase).__name__.lower() for kind in self)
        return f"Kinds({', '.join(f'{num} {phase}' for phase, num in phases.items()) or 'none yet'})"

    def clear(self) -> None:
        """Forgets all kinds, so that every step is recorded again."""
        self._kinds.clear()
        self._alike.clear()
        self._recordings = _Recordings(self._settings)


def differing(one: Scalars, other: Scalars) -> frozenset[int]:
    """Returns the positions at which the scalars of two steps with the same signature differ."""
    return frozenset(at for at, (mine, theirs) in enumerate(zip(one, other)) if mine != theirs)


class _Recordings:
    """Counts how many of the last steps were recorded, and warns once if steps keep changing."""

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
