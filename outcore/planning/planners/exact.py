"""TraceIndex + Machine + Budget -> decisions by a mixed-integer program, to judge other planners.

Small steps (up to `EXACT.max_enumerated` combinations) are enumerated: every combination of decisions is lowered and
simulated, and the fastest that fits is the answer. That is the definition of exact.

Larger ones are modelled, as in Checkmate (MLSys 2020) and POET (ICML 2022), and solved by HiGHS through SciPy. The
model assumes perfect overlap. An op runs again at most once, and also runs the producers of its unsaved inputs again.
Memory is limited in every slot, with each value on the device while it is in use. Both lanes must be able to copy what
is swapped. The simulator checks what the model leaves out. If a segment does not fit, a cut demands that one of its
values is kept or swapped, and the program is solved again. It is also solved with a reserve of memory for copies in
flight. All of this takes about a minute. The hybrid's plan is the first incumbent, and the fastest plan that fits is
returned. So for large steps `exact` returns the better of the model's optimum and the hybrid's plan. It is no proof of
optimality; `bound` is.
"""

from __future__ import annotations

import time
from itertools import product

import numpy as np

from outcore.errors import OutcoreError
from outcore.planning.planners.hybrid import hybrid
from outcore.planning.planners.pricing import LaneRoom, offer_of, segments_over
from outcore.planning.planners.scoring import Decisions, Progress, better, keep_all, lean_bytes, score
from outcore.planning.settings import EXACT
from outcore.planning.trace_index import TraceIndex, segments_of
from outcore.values import Budget, Decision, Machine


def exact(trace_index: TraceIndex, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Enumerates all decisions if there are few, else returns the optimum of the model."""
    kept = keep_all(trace_index, machine, budget, progress)
    if int(lean_bytes(trace_index, budget, kept).max(initial=0)) <= budget.device_bytes:
        return kept
    choices = [_choices(trace_index, value) for value in trace_index.evictable]
    best = score(trace_index, machine, budget, hybrid(trace_index, machine, budget, progress))
    if np.prod([float(len(options)) for options in choices]) <= EXACT.max_enumerated:
        for choice in product(*choices):
            decisions: Decisions = dict(zip(trace_index.evictable, choice))
            best = better(best, score(trace_index, machine, budget, decisions))
        return dict(best.decisions)
    model, until_s = Model(trace_index, machine, budget), time.monotonic() + EXACT.total_limit_s
    for at, reserve in enumerate(EXACT.reserves):
        progress("solving", at / len(EXACT.reserves))
        solution = None
        for _ in range(EXACT.max_cut_rounds):
            if time.monotonic() > until_s:
                break
            solution = model.solve(int(budget.device_bytes * (1 - reserve)))
            if solution is None or not model.cut(solution):
                break
        if solution is not None:
            best = better(best, score(trace_index, machine, budget, solution))
    return dict(best.decisions)


def _choices(trace_index: TraceIndex, value: int) -> list[Decision]:
    return ["keep", "swap", "recompute", "remake"] if trace_index.recomputable[value] else ["keep", "swap"]


class Model:
    """Columns: keep per value, swap per value, rerun per op. Seconds in ms and bytes in MB, so that sizes are alike."""

    def __init__(self, trace_index: TraceIndex, machine: Machine, budget: Budget) -> None:
        self.trace_index, self.machine, self.budget = trace_index, machine, budget
        self.segments = segments_of(trace_index)
        self.values = list(trace_index.evictable)
        self.keep_at = {value: at for at, value in enumerate(self.values)}
        self.swap_at = {value: at + len(self.values) for at, value in enumerate(self.values)}
        ops = sorted({op for segment in self.segments.values() for op in segment})
        self.rerun_at = {op: at + 2 * len(self.values) for at, op in enumerate(ops)}
        self.num_columns = 2 * len(self.values) + len(ops)
        self.rows: list[tuple[list[tuple[int, float]], float, float]] = []
        self._every_value_somehow()
        self._reruns_pull_in_unsaved()
        self._lanes_keep_up()

    def _every_value_somehow(self) -> None:
        for value in self.values:
            row = [(self.keep_at[value], 1.0), (self.swap_at[value], 1.0)]
            if value in self.segments:
                row.append((self.rerun_at[self.trace_index.producer[value]], 1.0))
            self.rows.append((row, 1.0, np.inf))

    def _reruns_pull_in_unsaved(self) -> None:
        for op, column in self.rerun_at.items():
            for read in self.trace_index.reads[op]:
                maker = self.trace_index.producer[read]
                if read not in self.trace_index.packs and maker in self.rerun_at:
                    self.rows.append(([(self.rerun_at[maker], 1.0), (column, -1.0)], 0.0, np.inf))

    def _lanes_keep_up(self) -> None:
        lanes = LaneRoom(self.trace_index, self.machine, self.budget)
        row: list[tuple[int, float]] = []
        for value in sorted(self.values, key=lambda value: -lanes.out_at[value]):
            row.append((self.swap_at[value], lanes.out_s[value] * 1e3))
            self.rows.append((list(row), -np.inf, lanes.out_room[lanes.out_at[value]] * 1e3))
        row = []
        for value in sorted(self.values, key=lambda value: lanes.in_at[value]):
            row.append((self.swap_at[value], lanes.in_s[value] * 1e3))
            self.rows.append((list(row), -np.inf, lanes.in_room[lanes.in_at[value]] * 1e3))
        stored = [(self.swap_at[value], self.trace_index.value_bytes[value] / 1e6) for value in self.values]
        self.rows.append((stored, -np.inf, (self.budget.host_bytes + self.budget.disk_bytes) / 1e6))

    def _memory(self, device_bytes: int) -> list[tuple[list[tuple[int, float]], float, float]]:
        trace_index = self.trace_index
        needed_bytes = lean_bytes(trace_index, self.budget, dict.fromkeys(self.values, "swap"))
        spans = trace_index.spans
        edges = sorted({edge for span in spans.values() for edge in span if edge < trace_index.trace.num_slots})
        rows = []
        for first, end in zip(edges, [*edges[1:], trace_index.trace.num_slots]):
            room = (device_bytes - int(needed_bytes[first:end].max())) / 1e6
            row = [
                (self.keep_at[value], trace_index.value_bytes[value] / 1e6)
                for value, span in spans.items()
                if span[0] <= first < span[1]
            ]
            if sum(size for _, size in row) > room:
                rows.append((row, -np.inf, room))
        return rows

    def cut(self, decisions: Decisions) -> bool:
        """Adds a constraint for each segment that does not fit: one of its values must not be recomputed. Returns
        whether there are any."""
        offer = offer_of(self.trace_index, self.budget, decisions)
        over_bytes = offer.slot_bytes - self.budget.device_bytes
        worst = segments_over(self.trace_index, offer, over_bytes)
        for tick, (_, slot) in worst.items():
            chain = {self.trace_index.trace.ticks[tick].value}
            chain |= {
                copy.value
                for copy in offer.early
                if copy.made == tick and self.trace_index.tick_slots[copy.asked] > slot
            }
            row = [(column[value], 1.0) for value in chain for column in (self.keep_at, self.swap_at)]
            self.rows.append((row, 1.0, np.inf))
        return bool(worst)

    def solve(self, device_bytes: int) -> Decisions | None:
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import coo_array
        except ImportError:
            raise OutcoreError("the exact planner needs SciPy; install outcore[exact] or choose hybrid") from None
        rows = self.rows + self._memory(device_bytes)
        entries = [(at, column, size) for at, (row, _, _) in enumerate(rows) for column, size in row]
        where = (np.array([entry[0] for entry in entries]), np.array([entry[1] for entry in entries]))
        matrix = coo_array((np.array([entry[2] for entry in entries]), where), shape=(len(rows), self.num_columns))
        cost = np.full(self.num_columns, EXACT.eviction_cost_ms)  # of equal seconds, the fewest evictions
        for op, column in self.rerun_at.items():
            cost[column] = self.trace_index.trace.ops[op].rerun_s / self.machine.speed * 1e3
        solution = milp(
            cost,
            constraints=LinearConstraint(matrix.tocsr(), [row[1] for row in rows], [row[2] for row in rows]),
            bounds=Bounds(0, 1),
            integrality=np.ones(self.num_columns, dtype=np.int64),
            options={"time_limit": EXACT.time_limit_s, "mip_rel_gap": EXACT.gap},
        )
        return None if solution.x is None else self._read(solution.x > 0.5)

    def _read(self, on: np.typing.NDArray[np.bool_]) -> Decisions:
        return {
            value: "keep" if on[self.keep_at[value]] else "swap" if on[self.swap_at[value]] else "recompute"
            for value in self.values
        }
