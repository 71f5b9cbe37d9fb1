"""The life of a kind of step as a state machine: each phase holds the data it needs and returns the phase that follows.

A phase has two methods. `begin` is called when a step begins and returns the phase in which the step runs. Plans are
made there, because only then is it known how much memory is in use before the step. `after` is called with what the
step showed and returns the next phase. A step that fails shows nothing, unless it ran out of memory.

    New ──▶ Recorded ──▶ Timing ──▶ Searching ──▶ Trying ──▶ Settled    Restored ──▶ Trying, Settled or Timed
     │          │           │         │     ▲      │  ▲ │       │       GivenUp: from phases that follow a plan
     │          │           │         │     └──────┘  │ │       │       Shared: made and withdrawn by a family
     └──────────┴───────────┴─────────┴───▶ Timed ────┴─────────┤
                                              ▲         │       │
                                              └─────────┴───────┘

When a step begins. Recorded, Timed and Restored are phases between steps: no step runs in them.

    phase      what is found                                          the step runs in
    ---------  -----------------------------------------------------  ----------------------------------------------
    New        nothing is known                                       New: it is recorded
    Recorded   a brief plan fits                                      Timing
               no brief plan fits; the full planner may find one      as from Timed
    Timed      a plan was made, and there is a caching allocator      Trying
               a plan was made, and there is none                     Settled
               no plan can beat the best one that was tried           Settled on that one
    Restored   the plan of an earlier run fits into the free memory   Trying or Settled
               it does not fit                                        as from Timed
    Searching  the search goes on                                     Searching
               a plan was found                                       Trying
               no plan can beat the best one that was tried           Settled on that one
               no plan fits                                           Settled on the best tried; Trying if none was
               the search failed otherwise                            as from Timed
    Timing     its plan is outdated (see below)                       as from Recorded
    Searching,
    Trying,
    Settled    its plan is outdated                                   as from Timed

When a step has ended.

    phase      what the step showed                                   next phase
    ---------  -----------------------------------------------------  ----------------------------------------------
    New        a recording; the planner searches, or the device       Recorded
               times ops a second time
               a recording; neither, or the user gave the plan        Timed
               a recording that an earlier run has planned            Restored (`Kinds` asks the cache)
               none: the trace was given by `expect`                  Timed
    Timing     the seconds of its ops; a search runs in parallel      Searching
               the seconds of its ops; the next step waits for it     Timed
               the same on the CPU, and everything is kept            Settled
    Trying     enough measurements; another plan may be better        Searching or Timed
               enough measurements; this or an earlier plan stays     Settled
               everything is kept, or the plan was given              Settled
    Settled    on the CPU, how long a few steps took                  Settled, its prediction corrected by their pace
    Timing     it ran out of memory; a smaller plan is left           Recorded
               it ran out of memory; none is left                     Timing
    Searching,
    Trying,
    Settled    it ran out of memory; a smaller plan is left           Timed
               it ran out of memory; none is left                     Settled on the best
    all four   no step that does what was recorded ever follows the   New; GivenUp for the third time
               plan to its end
    GivenUp    anything: it swaps everything, without a plan          GivenUp
    Shared     anything: it follows a plan for a larger size          Shared

A single step that leaves its plan does not change the phase: `Kinds` takes it for a step of another kind, which is
recorded when it comes again.

A plan is outdated in three cases: more memory is in use before the step than the plan was made for; the plan assumes
that autograd adds gradients in place, but a dispatch mode of the user was active in a backward, which prevents that; or
autograd asked for saved tensors after the end of a step, which a plan for the step cannot bring back.
"""

from __future__ import annotations

import logging
import statistics
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from outcore.errors import BudgetTooSmall, OutcoreError
from outcore.fitting.headroom import Headroom
from outcore.fitting.preparing import Preparer
from outcore.fitting.ready import Ready
from outcore.fitting.retiming import TimedOps, timed_again
from outcore.fitting.searches import Search, StillSearching
from outcore.planning.rewrites.gradient_sums import adds_in_place
from outcore.planning.trace_index import clock_seconds
from outcore.values import Plan, Timeline, Trace

log = logging.getLogger("outcore")


@dataclass(frozen=True)
class WasRecorded:
    trace: Trace


@dataclass(frozen=True)
class Measured:
    timeline: Timeline
    num_restarts: int  # of the allocator, in the step


@dataclass(frozen=True)
class Took:
    """The step followed its plan, looked at no more than it must be, and computed on the host."""

    seconds: float


@dataclass(frozen=True)
class RanOut:
    """The step ran out of memory."""


@dataclass(frozen=True)
class LeftPlan:
    because: str


Shown = WasRecorded | TimedOps | Measured | Took | RanOut | LeftPlan


class Life(Protocol):
    """What stays known about the steps of a kind across phases."""

    preparer: Preparer
    num_steps: int  # that followed the current plan
    num_left: int  # steps that left their plan
    num_slowed: int  # how often copies were assumed slower than measured
    may_switch: bool  # its steps may turn out to be of another kind
    is_watched: bool  # a dispatch mode of the user's was active in its backward
    asked_late: set[int]  # values that autograd asked for after a step


class Phase:
    """The default: neither a beginning nor an ending step changes the phase."""

    trace: Trace | None = None
    ready: Ready | None = None  # the plan that is followed, or was followed last
    headroom: Headroom | None = None

    def begin(self, life: Life, before_bytes: int) -> Phase:
        return self

    def after(self, life: Life, shown: Shown) -> Phase:
        return self

    def with_ready(self, ready: Ready) -> Phase:
        """Returns the same phase with its plan replaced by another form of it."""
        return self


@dataclass(frozen=True)
class New(Phase):
    """No step is known that the next one may follow, so it is recorded. `trace` is that of a step which will not occur
    again, if there was one."""

    trace: Trace | None = None

    def after(self, life: Life, shown: Shown) -> Phase:
        if not isinstance(shown, WasRecorded):
            return self
        # With a given plan there may be too little memory for a step whose ops are timed one by one.
        preparer = life.preparer
        searches = preparer.memory.has_caching_allocator or preparer.brief_planner != preparer.planner
        if searches and not preparer.is_given_for(shown.trace):
            return Recorded(shown.trace)
        return Timed(shown.trace)


@dataclass(frozen=True)
class GivenUp(Phase):
    """Steps with the same inputs keep doing different work. They run without a plan and swap everything."""

    because: str


@dataclass(frozen=True)
class _Known(Phase):
    """The base of phases with a trace. `ready` is the current plan, or the previous one if a new one is to be made."""

    trace: Trace = field()
    ready: Ready | None = None
    headroom: Headroom | None = None

    def with_ready(self, ready: Ready) -> Phase:
        return replace(self, ready=ready)

    def _trace_now(self, life: Life, before_bytes: int) -> Trace:
        """Returns the trace with the most memory that was in use before any step so far, because that may come and
        go."""
        if self.ready is not None:
            before_bytes = max(before_bytes, self.ready.prepared.plan.before_bytes)
        asked_late = tuple(sorted(life.asked_late.union(self.trace.asked_late)))
        return replace(self.trace, before_bytes=before_bytes, asked_late=asked_late)

    def _has_grown(self, life: Life, before_bytes: int) -> bool:
        """Whether more memory is in use before the step than the plan allows for. A given plan may have been made for
        less; it is replaced only if more is in use than when it was first followed."""
        if self.ready is None:
            return False
        tolerated_bytes = life.preparer.settings.grown_bytes if self.headroom is not None else 0
        return before_bytes > self.ready.covers_bytes + tolerated_bytes

    def _is_outdated(self, life: Life, before_bytes: int) -> bool:
        """Whether the plan was made under assumptions that no longer hold; the module's docstring lists them."""
        if self.ready is not None and self.ready.sums_in_place and life.is_watched:
            return True
        return not life.asked_late.issubset(self.trace.asked_late) or self._has_grown(life, before_bytes)

    def _headroom_now(self, life: Life, before_bytes: int) -> Headroom | None:
        """Returns the headroom to plan in. Attempts with an outdated plan are discarded."""
        return life.preparer.begin_headroom(None if self._is_outdated(life, before_bytes) else self.headroom)


class Recorded(_Known):
    """The ops will be timed again, because in a recorded step the allocator's first calls to the driver count, too."""

    def begin(self, life: Life, before_bytes: int) -> Phase:
        trace, headroom = self._trace_now(life, before_bytes), self._headroom_now(life, before_bytes)
        in_place = _adds_in_place(life, trace)
        try:
            plan = life.preparer.brief_plan(life.preparer.as_run(trace, in_place=in_place), headroom)
        except BudgetTooSmall:  # the full planner may find a plan where the brief one does not
            return Timed(trace, self.ready, headroom).begin(life, before_bytes)
        assert plan is not None, "None would mean that an earlier attempt is better, and there was none"
        ready = life.preparer.make_ready(trace, plan, headroom, in_place=in_place, may_switch=life.may_switch)
        life.preparer.reserve(ready.prepared.predicted)
        return Timing(trace, ready, headroom)


@dataclass(frozen=True)
class Timed(_Known):
    """The seconds of the ops are known, so the next step is planned. With `same_size` the plan uses as much memory as
    the last one, for example because copies turned out slower."""

    same_size: bool = False

    def begin(self, life: Life, before_bytes: int) -> Phase:
        preparer = life.preparer
        trace, headroom = self._trace_now(life, before_bytes), self._headroom_now(life, before_bytes)
        in_place = _adds_in_place(life, trace)
        plan = preparer.plan(preparer.as_run(trace, in_place=in_place), headroom, same_size=self.same_size)
        if plan is None:
            return settled_on_best(life, trace, self.ready, headroom)
        ready = preparer.make_ready(trace, plan, headroom, in_place=in_place, may_switch=life.may_switch)
        if headroom is not None and headroom.cannot_win(ready.prepared.predicted.step_s):
            return settled_on_best(life, trace, ready, headroom)
        preparer.reserve(ready.prepared.predicted)
        return Settled(trace, ready) if headroom is None else Trying(trace, ready, headroom)


@dataclass(frozen=True)
class Restored(_Known):
    """The plan of an earlier run will be followed."""

    plan: Plan = field(kw_only=True)

    def begin(self, life: Life, before_bytes: int) -> Phase:
        preparer, in_place = life.preparer, _adds_in_place(life, self.trace)
        trace = self._trace_now(life, max(before_bytes, self.plan.before_bytes))
        try:
            if before_bytes > self.plan.before_bytes:
                raise BudgetTooSmall(before_bytes, self.plan.before_bytes, "what is in use before the step")
            headroom = preparer.begin_headroom(None)
            if headroom is not None:
                headroom.usable_bytes = self.plan.budget.device_bytes
            ready = preparer.make_ready(trace, self.plan, headroom, in_place=in_place, may_switch=life.may_switch)
        except OutcoreError as error:  # more memory is in use than in that run, or less can be swapped to
            log.info("a plan of an earlier run is not used: %s", error)
            return Timed(trace).begin(life, before_bytes)
        preparer.reserve(ready.prepared.predicted)
        return Settled(trace, ready) if headroom is None else Trying(trace, ready, headroom)


@dataclass(frozen=True)
class _Following(_Known):
    ready: Ready = field()

    def begin(self, life: Life, before_bytes: int) -> Phase:
        phase = self._with_growth(life, before_bytes)
        return phase._planned_anew().begin(life, before_bytes) if phase._is_outdated(life, before_bytes) else phase

    def _with_growth(self, life: Life, before_bytes: int) -> Self:
        """Keeps the plan, with a higher predicted peak, if more memory is in use before the step and the plan still
        fits. Does nothing if there is a headroom, which allows for growth, or if the plan was given."""
        prepared, preparer = self.ready.prepared, life.preparer
        growth_bytes = before_bytes - prepared.plan.before_bytes
        predicted_bytes = prepared.predicted.peak_bytes
        peak_bytes = predicted_bytes + growth_bytes
        if prepared.residency is not None:  # the plan leaves room for the whole window of the training state
            peak_bytes = max(predicted_bytes, prepared.plan.predicted_peak_bytes) + growth_bytes
        if self.headroom is not None or preparer.is_given_for(self.trace) or growth_bytes <= 0:
            return self
        if peak_bytes > preparer.budget.device_bytes:
            return self
        plan = replace(prepared.plan, before_bytes=before_bytes, predicted_peak_bytes=peak_bytes)
        predicted = replace(prepared.predicted, peak_bytes=predicted_bytes + growth_bytes)
        prepared = replace(prepared, plan=plan, predicted=predicted)
        return replace(self, ready=replace(self.ready, prepared=prepared, covers_bytes=before_bytes))

    def after(self, life: Life, shown: Shown) -> Phase:
        if isinstance(shown, LeftPlan):
            life.num_left += 1
            return GivenUp(shown.because) if life.num_left >= life.preparer.settings.num_recordings else New()
        if isinstance(shown, RanOut) and self.headroom is not None:
            if self.headroom.ran_out():
                return self._planned_anew()
            return self._without_smaller(life, self.headroom)
        return self

    def _planned_anew(self) -> Phase:
        return Timed(self.trace, self.ready, self.headroom)

    def _without_smaller(self, life: Life, headroom: Headroom) -> Phase:
        return settled_on_best(life, self.trace, self.ready, headroom)


class Timing(_Following):
    """Follows a brief plan while the ops are timed once more."""

    def after(self, life: Life, shown: Shown) -> Phase:
        if not isinstance(shown, TimedOps):
            return super().after(life, shown)
        if self.headroom is not None:
            self.headroom.forget()
        share = life.preparer.settings.pass_bytes_share
        trace = timed_again(self.trace, shown, share)
        if self.headroom is None and self.ready.prepared.plan.keeps_all:
            return Settled(trace, life.preparer.with_times(self.ready, trace))
        return _planned_next(life, trace, self.ready, self.headroom)

    def _planned_anew(self) -> Phase:
        return Recorded(self.trace, self.ready, self.headroom)

    def _without_smaller(self, life: Life, headroom: Headroom) -> Phase:
        return self


@dataclass(frozen=True)
class Searching(_Following):
    """Follows the current plan while the planning process searches for a better one."""

    headroom: Headroom = field()
    in_place: bool = field(kw_only=True)
    same_size: bool = field(kw_only=True)
    search: Search = field(kw_only=True)

    def begin(self, life: Life, before_bytes: int) -> Phase:
        phase = self._with_growth(life, before_bytes)
        if phase._is_outdated(life, before_bytes):
            return phase._planned_anew().begin(life, before_bytes)
        try:
            return phase._found(life)
        except StillSearching:
            return phase
        except BudgetTooSmall as error:
            log.info("the current plan stays: %s", error)
            if self.headroom.attempts:
                return settled_on_best(life, self.trace, self.ready, self.headroom)
            return Trying(self.trace, self.ready, self.headroom)
        except OutcoreError as error:
            log.info("%s", error)
            return phase._planned_anew().begin(life, before_bytes)

    def _found(self, life: Life) -> Phase:
        preparer, search, headroom = life.preparer, self.search, self.headroom
        step = preparer.as_run(self.trace, in_place=self.in_place)
        plan = preparer.plan(step, headroom, same_size=self.same_size, search=search)
        if plan is None:
            return settled_on_best(life, self.trace, self.ready, headroom)
        ready = search.once("ready", lambda: self._made_ready(life, plan))
        if headroom.cannot_win(ready.prepared.predicted.step_s):
            return settled_on_best(life, self.trace, ready, headroom)
        search.answer("pinned", lambda: preparer.reserve_beside(ready.prepared.predicted))
        preparer.begin_headroom(headroom)
        return Trying(self.trace, ready, headroom)

    def _made_ready(self, life: Life, plan: Plan) -> Ready:
        return life.preparer.make_ready(
            self.trace, plan, self.headroom, in_place=self.in_place, may_switch=life.may_switch, search=self.search
        )

    def _planned_anew(self) -> Phase:
        return Timed(self.trace, self.ready, self.headroom, self.same_size)


class Trying(_Following):
    """Follows a plan and measures it, to judge its size and whether copies are as fast as predicted."""

    def after(self, life: Life, shown: Shown) -> Phase:
        headroom, plan = self.headroom, self.ready.prepared.plan
        if not isinstance(shown, Measured) or headroom is None:
            return super().after(life, shown)
        if life.preparer.uses_given or plan.keeps_all:
            return Settled(self.trace, self.ready, headroom)
        measured = shown.timeline
        if not headroom.note(measured.step_s, shown.num_restarts, measured.reserved_bytes):
            return self
        again = not shown.num_restarts and self._slow_down(life, measured)
        if headroom.judge(self.ready, again=again):
            return _planned_next(life, self.trace, self.ready, headroom, same_size=again)
        return settled_on_best(life, self.trace, self.ready, headroom)

    def _slow_down(self, life: Life, measured: Timeline) -> bool:
        """If compute waited longer for copies than predicted, assumes slower copies and returns True: copies take
        longer while kernels run than they took when they were measured alone."""
        settings, predicted = life.preparer.settings, self.ready.prepared.predicted
        if life.num_slowed >= settings.num_slowed:
            return False
        if measured.stall_s <= predicted.stall_s + settings.stall_share * measured.step_s:
            return False
        life.num_slowed += 1
        life.preparer.slow_copies_down()
        return True


class Shared(_Following):
    """Follows a plan that was made for a larger size (`outcore.fitting.families`). The family decides what follows, so
    neither growth nor a left plan changes the phase."""

    def begin(self, life: Life, before_bytes: int) -> Phase:
        return self

    def after(self, life: Life, shown: Shown) -> Phase:
        return self


@dataclass(frozen=True)
class Settled(_Following):
    """Follows a plan that will not change any more. `took` has the seconds of its first steps on the CPU, and is None
    once they corrected the prediction."""

    took: tuple[float, ...] | None = ()

    def after(self, life: Life, shown: Shown) -> Phase:
        if not isinstance(shown, Took) or self.took is None:
            return super().after(life, shown)
        took = (*self.took, shown.seconds)
        if len(took) < life.preparer.settings.num_paced:
            return replace(self, took=took)
        predicted, settings = self.ready.prepared.predicted, life.preparer.settings
        ops_s = sum(clock_seconds(self.ready.prepared.trace)) + predicted.recompute_s
        pace = 1 + (statistics.median(took) - predicted.step_s) / max(ops_s, 1e-9)
        pace = max(settings.least_host_pace, min(pace, settings.most_host_pace))
        ready = life.preparer.at_pace(self.ready, pace)
        return replace(self, trace=self.trace.at(pace), ready=ready, took=None)

    @property
    def fits(self) -> bool:
        """Whether the plan was measured and caused no allocator restart."""
        return self.headroom is not None and self.headroom.fits


def _planned_next(
    life: Life, trace: Trace, ready: Ready, headroom: Headroom | None, *, same_size: bool = False
) -> Phase:
    """Returns the phase in which a better plan is made: in the planning process while the current plan is followed, or
    in the training process when the next step begins."""
    preparer, timed = life.preparer, Timed(trace, ready, headroom, same_size)
    if headroom is None or not preparer.searches_beside or preparer.is_given_for(trace):
        return timed
    trace = timed._trace_now(life, ready.covers_bytes)
    in_place, search = _adds_in_place(life, trace), Search(preparer.process)
    return Searching(trace, ready, headroom, in_place=in_place, same_size=same_size, search=search)


def _adds_in_place(life: Life, trace: Trace) -> bool:
    """Whether autograd adds gradients in place. It does not under a dispatch mode, which on the CPU counts bytes."""
    return not life.preparer.memory.counts_op_by_op and not life.is_watched and adds_in_place(trace)


def settled_on_best(life: Life, trace: Trace, ready: Ready | None, headroom: Headroom | None) -> Settled:
    """Settles on the plan that was measured to be the fastest, or on the current plan if none was measured."""
    assert headroom is not None
    headroom.settle()
    if headroom.attempts and (ready is None or headroom.best.ready.prepared.plan is not ready.prepared.plan):
        ready = headroom.best.ready
        life.num_steps = 0
        life.preparer.memory.give_back()
    assert ready is not None
    pace = _pace(ready, headroom, life.preparer.settings.most_pace)
    if pace == 1:
        return Settled(trace, ready, headroom)
    ready = life.preparer.at_pace(ready, pace)
    headroom.keep_best(ready)
    return Settled(trace.at(pace), ready, headroom)


def _pace(ready: Ready, headroom: Headroom, most: float) -> float:
    """Returns the factor by which ops take longer in a whole step than one by one, at a lower clock of the device.

    On an H200, Llama's ops add up to 4 % less than its step. The factor corrects the prediction for later steps. It is
    1 if the prediction was corrected before. It is also 1 if the measured step is so much slower than predicted that
    there must be another reason; the difference then stays visible."""
    if headroom.is_paced or not headroom.fits:
        return 1.0
    headroom.is_paced = True
    predicted = ready.prepared.predicted
    pace = (headroom.best.step_s - predicted.stall_s) / max(predicted.step_s - predicted.stall_s, 1e-9)
    return pace if 1 < pace < most else 1.0
