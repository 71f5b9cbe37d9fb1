"""Trace + Schedule -> nothing, or ScheduleError: no use after free, no unordered access between streams.

The checker visits slots and actions without knowing how `lower` decides. For each value it follows the original storage
(held, being copied, safe to free, freed), the copy outside the device, and the copy that was fetched or recomputed. At
every read it checks that the bytes exist and are ordered before the reader.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NoReturn

from outcore.errors import ScheduleError
from outcore.values import MADE_AGAIN, Action, Op, Schedule, Tick, Trace


def verify(trace: Trace, schedule: Schedule) -> None:
    """Raises ScheduleError at the first action that could read or overwrite the wrong bytes."""
    _Checker(trace, schedule).run()


class _Checker:
    def __init__(self, trace: Trace, schedule: Schedule) -> None:
        self.trace, self.schedule = trace, schedule
        self.decisions = schedule.decisions
        self.saved: set[int] = set()  # values packed so far
        self.newest: dict[int, int] = {}  # storage -> its present version
        for value in self.trace.values:
            if value.producer < 0:
                self.newest[value.storage] = max(value.version, self.newest.get(value.storage, 0))
        self.out: dict[int, str] = {}  # swapped value -> "copying" or "done"
        self.original: set[int] = set()  # swapped values whose device storage is held
        self.held_storages: dict[int, int] = {}  # their storages -> the values
        self.last_asked = {tick.value: at for at, tick in enumerate(self.trace.ticks) if tick.kind == "unpack"}
        self.dropped: set[int] = set()
        self.copy: dict[int, str] = {}  # value -> "loading" or "ready"
        self.given: set[int] = set()  # freed in this tick after it was ready: autograd still gets it

    def run(self) -> None:
        if self.schedule.fingerprint != self.trace.fingerprint:
            raise ScheduleError("this schedule was made for another step; lower the plan again")
        if self.schedule.merges_ops != self.trace.has_merged_ops:
            raise ScheduleError("this schedule and this trace differ in which ops are merged; prepare the plan again")
        by_tick: dict[int, list[Action]] = defaultdict(list)
        last = -1
        for action in self.schedule.actions:
            if not last <= action.tick < len(self.trace.ticks):
                self._refuse(action, "is out of the order of ticks")
            last = action.tick
            by_tick[last].append(action)
        events: list[Op | int] = [*self.trace.ops, *range(len(self.trace.ticks))]
        events.sort(key=lambda event: event.slot if isinstance(event, Op) else self.trace.ticks[event].slot)
        for event in events:
            if isinstance(event, Op):
                self._op(event)
            else:
                self._tick(event, self.trace.ticks[event], by_tick[event])
        left = [value for value in self.copy if value not in self._saved_at_all()]
        if left:
            raise ScheduleError(f"value {left[0]} is remade and never freed; lower the plan again")

    def _saved_at_all(self) -> set[int]:
        return {tick.value for tick in self.trace.ticks if tick.kind == "pack"}

    def _refuse(self, action: Action, why: str) -> NoReturn:
        subject = f"op {action.op}" if action.kind == "rerun" else f"value {action.value}"
        raise ScheduleError(f"{action.kind} of {subject} at tick {action.tick} {why}; lower the plan again")

    def _op(self, op: Op) -> None:
        for value in op.writes:
            storage = self.trace.values[value].storage
            flying = self.held_storages.get(storage)
            if flying is not None and flying != value:
                raise ScheduleError(
                    f"op at slot {op.slot} ({op.name}) overwrites value {flying} while we hold it to copy it; "
                    f"keep value {flying}"
                )
            self.newest[storage] = max(self.trace.values[value].version, self.newest.get(storage, 0))

    def _tick(self, index: int, tick: Tick, actions: list[Action]) -> None:
        if tick.kind == "pack":
            self.saved.add(tick.value)
        self.given = set()
        checks = {
            "drop": self._drop,
            "swap_out": self._swap_out,
            "wait_out": self._wait_out,
            "free": self._free,
            "swap_in": self._swap_in,
            "wait_in": self._wait_in,
            "rerun": self._rerun,
        }
        for action in actions:
            checks[action.kind](action)
        if tick.kind == "pack":
            self._pack_is_covered(index, tick.value)
        elif self.decisions.get(tick.value, "keep") == "keep":
            return  # autograd gets what it saved, and itself raises an error if that was overwritten
        elif not self._there(tick.value) and tick.value not in self.given:
            raise ScheduleError(
                f"value {tick.value} is asked for at tick {index} and is not there; lower the plan again"
            )

    def _pack_is_covered(self, index: int, value: int) -> None:
        decision = self.decisions.get(value, "keep")
        if decision == "swap" and value not in self.out:
            raise ScheduleError(f"value {value} is to be swapped, its pack at tick {index} starts no copy; lower again")
        if decision in MADE_AGAIN and value not in self.dropped:
            raise ScheduleError(f"value {value} is to be recomputed, its pack at tick {index} keeps it; lower again")

    def _current(self, value: int) -> bool:
        """Whether the storage still has the bytes of this version."""
        known = self.trace.values[value]
        return self.newest.get(known.storage, 0) == known.version

    def _there(self, value: int) -> bool:
        """Whether a kernel on the compute stream may read the value now."""
        if self.copy.get(value) == "ready":
            return True
        if self.trace.storages[self.trace.values[value].storage].external:
            return self._current(value)
        if value in self.original:
            return self._current(value)
        return value in self.saved and self.decisions.get(value, "keep") == "keep" and self._current(value)

    def _drop(self, action: Action) -> None:
        if self.decisions.get(action.value) not in MADE_AGAIN:
            self._refuse(action, "drops a value that is not to be recomputed")
        if self.trace.ticks[action.tick].kind != "pack" or self.trace.ticks[action.tick].value != action.value:
            self._refuse(action, "is not at the pack of that value")
        self.dropped.add(action.value)

    def _swap_out(self, action: Action) -> None:
        if self.decisions.get(action.value) != "swap" or action.tier not in ("host", "disk"):
            self._refuse(action, "copies a value that is not to be swapped, or to no tier")
        if self.trace.ticks[action.tick].kind != "pack" or self.trace.ticks[action.tick].value != action.value:
            self._refuse(action, "is not at the pack of that value")
        if action.value in self.out or not self._current(action.value):
            self._refuse(action, "copies it twice, or copies bytes that are already overwritten")
        self.out[action.value] = "copying"
        self.original.add(action.value)
        self.held_storages[self.trace.values[action.value].storage] = action.value

    def _wait_out(self, action: Action) -> None:
        if action.value not in self.out:
            self._refuse(action, "waits for a copy that was not started")
        self.out[action.value] = "done"

    def _free(self, action: Action) -> None:
        value = action.value
        if value in self.original:
            if self.out[value] != "done":
                self._refuse(action, "frees a storage whose copy was not waited for")
            self.original.remove(value)
            del self.held_storages[self.trace.values[value].storage]
        elif value in self.copy:
            if self.copy.pop(value) != "ready":
                self._refuse(action, "frees a copy that is still being filled")
            self.given.add(value)
        else:
            self._refuse(action, "frees what is not held")

    def _swap_in(self, action: Action) -> None:
        value = action.value
        if self.out.get(value) != "done":
            self._refuse(action, "reads a copy that was not waited for")
        if value in self.copy or value in self.original:
            self._refuse(action, "brings back what is still there")
        self.copy[value] = "loading"

    def _wait_in(self, action: Action) -> None:
        if action.value not in self.copy:
            self._refuse(action, "waits for a copy that was not started")
        self.copy[action.value] = "ready"

    def _rerun(self, action: Action) -> None:
        op = self.trace.ops[action.op]
        if any(self.trace.ops[index].replay == "no" for index in (action.op, *op.fused)):
            self._refuse(action, "reruns an op that may not be rerun")
        storages = {self.trace.values[value].storage for value in op.writes}
        for read in self.trace.rerun_reads[action.op]:
            own_external = self.trace.storages[self.trace.values[read].storage].external
            if own_external and self.trace.values[read].storage in storages and self._overwritten_by(op, read):
                continue  # the op overwrites its input: the runtime passes a copy to the rerun
            if not self._there(read):
                self._refuse(action, f"reads value {read}, which is not there")
        if action.in_place:
            self._consume(action, storages)
        for value in action.values:
            if value not in op.writes:
                self._refuse(action, f"holds value {value}, which it does not write")
            if value in self.copy:
                self._refuse(action, f"holds value {value}, which is held already")
            self.copy[value] = "ready"

    def _overwritten_by(self, op: Op, read: int) -> bool:
        """Whether the newest version of the storage is the one that this op made from its input."""
        before = self.trace.values[read]
        versions = [
            self.trace.values[value].version
            for value in op.writes
            if self.trace.values[value].storage == before.storage
        ]
        return self.newest.get(before.storage, 0) == max(versions)

    def _consume(self, action: Action, storages: set[int]) -> None:
        """Checks a rerun in place: it may overwrite only a copy of ours that no later unpack needs. In a fused pass
        only the last op may overwrite its input, because an input of the others may still be needed."""
        reads = [read for read in self.trace.rerun_reads[action.op] if self.trace.values[read].storage in storages]
        if not reads:
            self._refuse(action, "is in place, and overwrites nothing")
        for read in reads:
            if self.copy.get(read) != "ready" or self.last_asked.get(read, -1) >= action.tick:
                self._refuse(action, f"overwrites value {read}, which somebody still needs")
            del self.copy[read]
