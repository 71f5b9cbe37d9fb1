"""The lanes beside compute in a simulated step: the two copy lanes, and the host.

*Copies* of one direction run in the order in which they are issued. While both copy lanes run, each keeps the machine's
`duplex_share` of its rate. The model advances from event to event. With a share of one the lanes are independent.

*The host* runs the user's Python and autograd, and what the runtime adds: it looks at ops, captures some of them, and
begins copies. Where it also computes, as on the CPU, its seconds add to those of the ops (*in line*). Before a device
that computes by itself it runs ahead, and an op begins no earlier than the host has reached it: the device falls behind
where ops take less than the host needs for them, and what the host lost is hidden again where compute waits or an op
takes long. This lane is walked tick by tick. In between, no op changes what the host owes, so that one number per tick
says how far behind the device falls on the way there: the most that the host, at one of those ops, lags behind the
seconds of all ops before it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from outcore.planning.settings import LOWERING
from outcore.planning.trace_index import TraceIndex, remembered
from outcore.values import HostCosts, Machine, Trace

OUT, IN = 0, 1
Floats = NDArray[np.float64]
NO_COSTS = HostCosts(0.0, 0.0, 0.0, 0.0, 0.0)
NEVER_S = -math.inf


class Lanes:
    """Simulates both lanes. Copies are issued in order of time; `finish` returns when one ends."""

    def __init__(self, duplex_share: float) -> None:
        self._share = min(max(duplex_share, LOWERING.least_duplex_share), 1.0)
        self._now_s = 0.0
        self._queues: tuple[deque[list[float]], deque[list[float]]] = (deque(), deque())  # [key, ready_s, work_s]
        self.start_s: tuple[dict[int, float], dict[int, float]] = ({}, {})
        self.end_s: tuple[dict[int, float], dict[int, float]] = ({}, {})  # the newest copy of each key that has ended

    def issue(self, lane: int, key: int, ready_s: float, work_s: float) -> None:
        self.end_s[lane].pop(key, None)
        self.start_s[lane].pop(key, None)
        self._queues[lane].append([key, ready_s, work_s])

    def advance(self, until_s: float) -> None:
        """Runs both lanes up to `until_s`."""
        while self._now_s < until_s:
            if not self._step(until_s):
                self._now_s = until_s

    def finish(self, lane: int, key: int) -> float:
        """Runs both lanes until the copy has ended, and returns the time at which it ended."""
        while key not in self.end_s[lane]:
            if not self._step(float("inf")):
                raise KeyError(key)
        return self.end_s[lane][key]

    def _step(self, until_s: float) -> bool:
        """Advances to the next event: a copy becomes ready or ends, or `until_s` is reached. Returns False if both
        lanes are empty."""
        now_s, heads = self._now_s, [queue[0] if queue else None for queue in self._queues]
        active = [head is not None and head[1] <= now_s for head in heads]
        rate = self._share if all(active) else 1.0
        next_s = until_s
        for head, runs in zip(heads, active):
            if head is not None:
                next_s = min(next_s, now_s + head[2] / rate if runs else head[1])
        if next_s == float("inf"):
            return False
        for lane, (head, runs) in enumerate(zip(heads, active)):
            if head is not None and runs:
                self._progress(lane, head, next_s, rate)
        self._now_s = next_s
        return True

    def _progress(self, lane: int, head: list[float], next_s: float, rate: float) -> None:
        key = int(head[0])
        self.start_s[lane].setdefault(key, self._now_s)
        left_s = head[2] - (next_s - self._now_s) * rate
        if self._now_s + head[2] / rate <= next_s:
            self.end_s[lane][key] = next_s
            self._queues[lane].popleft()
        else:
            head[2] = left_s


# -- the host ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OfTrace:
    """What the host does in a step whatever its plan, op by op."""

    own_s: Floats  # seconds of the program itself before each op and in all, where it runs ahead of the device
    device_s: Floats  # of the ops before each op
    ops_before: NDArray[np.int64]  # each tick
    writers: NDArray[np.int64]  # ops that write into what is there: the runtime looks at them in every plan


def _of_trace(trace: Trace) -> _OfTrace:
    own_s = np.zeros(len(trace.ops))  # in line they are in the trace's own clock
    if not trace.is_in_line:
        own_s = np.cumsum([op.host_s for op in trace.ops])
    device_s = list(accumulate((op.seconds for op in trace.ops), initial=0.0))[: len(trace.ops)]
    slots = np.array([tick.slot for tick in trace.ticks], dtype=np.int64)
    overwriting = (at for at, op in enumerate(trace.ops) if any(trace.values[value].version for value in op.writes))
    return _OfTrace(
        own_s,
        np.array(device_s),
        slots - np.arange(len(slots)),  # every slot is an op or a tick
        np.fromiter(overwriting, np.int64),
    )


class HostLane:
    """Walks along with a simulated step: its delay is how far the step is behind the seconds of its ops."""

    def __init__(self, trace_index: TraceIndex, machine: Machine, captured: Sequence[int]) -> None:
        """`captured`: the ops of which recipes are kept."""
        trace = trace_index.trace
        self._costs = costs = machine.host or NO_COSTS
        self._in_line = trace.is_in_line
        of_trace = remembered(trace, _of_trace)
        added_s = np.zeros(len(trace.ops) + 1)  # by the runtime, at each op; and after the last
        if len(captured):
            added_s[: max(captured) + 1] = costs.seen_op_s
            added_s[list(captured)] += costs.captured_op_s
            added_s[of_trace.writers[of_trace.writers > max(captured)]] = costs.seen_op_s
        added_s = np.cumsum(added_s)
        num_ticks = len(of_trace.ops_before)
        ticks_s = costs.tick_s * np.arange(1, num_ticks + 1)
        if self._in_line:
            before = np.concatenate(([0.0], added_s))[of_trace.ops_before]
            self._until = [*(before + ticks_s).tolist(), float(added_s[-1]) + costs.tick_s * num_ticks]
        else:
            ticks_before = np.searchsorted(of_trace.ops_before, np.arange(len(trace.ops)), side="right")
            reached_s = of_trace.own_s + added_s[:-1] + costs.tick_s * ticks_before
            self._until = _most_between(reached_s - of_trace.device_s / machine.speed, of_trace.ops_before)
        self._at = 0  # ticks that were reached
        self._spent_s = 0.0  # on copies and reruns, where the host runs ahead

    def reach(self, tick: int, delay_s: float) -> float:
        """The delay of the step when the tick begins. Every tick is asked for once, or not at all."""
        if tick < self._at:
            return delay_s
        if self._in_line:
            before_s = self._until[self._at - 1] if self._at else 0.0
            delay_s += self._until[tick] - before_s
        else:
            delay_s = max(delay_s, self._spent_s + max(self._until[self._at : tick + 1]))
        self._at = tick + 1
        return delay_s

    def finish(self, delay_s: float) -> float:
        """The delay of the whole step."""
        return self.reach(len(self._until) - 1, delay_s)

    def act(self, kind: str, delay_s: float) -> float:
        """The delay after an action of the program."""
        seconds = self._costs.copy_s if kind in _COPIES else self._costs.rerun_s if kind == "rerun" else 0.0
        if self._in_line:
            return delay_s + seconds
        self._spent_s += seconds
        return delay_s

    def delays(self) -> list[float]:
        """Per tick the delay of a step in which nothing is copied or run again."""
        if self._in_line:
            return self._until[:-1]
        return [max(0.0, behind_s) for behind_s in accumulate(self._until[:-1], max)]


_COPIES = frozenset(("swap_out", "swap_in"))


def _most_between(behind_s: Floats, ops_before: NDArray[np.int64]) -> list[float]:
    """Per tick, and for the end of the step, the most of the ops since the tick before."""
    starts = np.concatenate(([0], ops_before))
    ends = np.concatenate((ops_before, [len(behind_s)]))
    most = np.maximum.reduceat(np.append(behind_s, NEVER_S), starts)
    found: list[float] = np.where(starts < ends, most, NEVER_S).tolist()
    return found


def host_lane(trace_index: TraceIndex, machine: Machine, rerun: Iterable[int]) -> HostLane | None:
    """The lane of a program that runs these ops again; None where the host takes no time that is known of."""
    if not has_host(trace_index, machine):
        return None
    ops, captured = trace_index.trace.ops, set(rerun)
    return HostLane(trace_index, machine, sorted(captured.union(*(ops[op].fused for op in captured))))


def has_host(trace_index: TraceIndex, machine: Machine) -> bool:
    return machine.host is not None or remembered(trace_index.trace, _has_host_seconds)


def _has_host_seconds(trace: Trace) -> bool:
    return not trace.is_in_line and any(op.host_s for op in trace.ops)
