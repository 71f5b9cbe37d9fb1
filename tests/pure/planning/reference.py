"""Device memory of a schedule, the slow and obvious way: blocks with holders, one slot after the other.

A block lives while anybody holds it: the program (natural life), a handle (kept values, and recipes that reach them),
a swap-out under way, our hold on a copy, or autograd with what an unpack gave it. Written against the words in
`outcore/values/schedule.py`, not against the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outcore.values import MADE_AGAIN, Action, Op, Schedule, Tick, Trace


@dataclass
class Block:
    num_bytes: int
    holders: set[str] = field(default_factory=set)


def recipe(trace: Trace, decisions: dict[int, str], value: int) -> set[int]:
    """Every value that remaking `value` reaches; stops at what is kept, swapped or external."""
    saved = {tick.value for tick in trace.ticks if tick.kind == "pack"}
    reached: set[int] = set()
    pending = [value]
    while pending:
        now = pending.pop()
        for read in trace.ops[trace.values[now].producer].reads:
            if trace.storages[trace.values[read].storage].external or read in reached:
                continue
            reached.add(read)
            if read not in saved or decisions.get(read) in MADE_AGAIN:
                pending.append(read)
    return reached


def handle_end(trace: Trace, value: int) -> int:
    ends = [tick.dies for tick in trace.ticks if tick.kind == "unpack" and tick.value == value]
    return max(ends) if ends else trace.num_slots - 1


def version_end(trace: Trace, value: int) -> int:
    """The last slot in which the program has these very bytes: in the op that overwrites them it still does."""
    made = trace.values[value]
    later = [
        trace.ops[other.producer].slot
        for other in trace.values
        if other.storage == made.storage and other.version > made.version and other.producer >= 0
    ]
    return min([trace.storages[made.storage].dies, *later])


class Interpreter:
    def __init__(self, trace: Trace, schedule: Schedule) -> None:
        self.trace, self.schedule = trace, schedule
        self.decisions = schedule.decisions
        self.originals = [Block(storage.bytes) for storage in trace.storages]
        self.copies: dict[int, Block] = {}
        self.leaving: list[tuple[int, Block, str]] = []  # (last slot, block, holder)
        self.all_blocks: list[Block] = [
            block for block, storage in zip(self.originals, trace.storages) if not storage.external
        ]
        self.saved = {tick.value for tick in trace.ticks if tick.kind == "pack"}
        self.ends = {value: handle_end(trace, value) for value in self.saved}
        for value, decision in self.decisions.items():
            if decision in MADE_AGAIN:
                self._hold(value, handle_end(trace, value))
                for between in recipe(trace, self.decisions, value):
                    if between not in self.saved or self.decisions.get(between) in MADE_AGAIN:
                        self._hold(between, -1)
        self.peaks: list[int] = []

    def _hold(self, value: int, until: int) -> None:
        """What a recipe reads lives as long as what it made: that is there, or can still be asked for."""
        end = max(until, version_end(self.trace, value))
        for read in recipe(self.trace, self.decisions, value) & self.saved:
            self.ends[read] = max(self.ends[read], end)

    def run(self) -> list[int]:
        """The highest bytes in every slot."""
        events: dict[int, Op | int] = {op.slot: op for op in self.trace.ops}
        events |= {tick.slot: index for index, tick in enumerate(self.trace.ticks)}
        for slot in range(self.trace.num_slots):
            self._begin(slot)
            self.peaks.append(self._live())
            event = events[slot]
            if isinstance(event, Op):
                self.peaks[-1] = self._live() + event.workspace_bytes
            else:
                self._tick(event, self.trace.ticks[event])
        return self.peaks

    def _live(self) -> int:
        return self.trace.before_bytes + sum(block.num_bytes for block in self.all_blocks if block.holders)

    def _measure(self, more: int = 0) -> None:
        self.peaks[-1] = max(self.peaks[-1], self._live() + more)

    def _begin(self, slot: int) -> None:
        for last, block, holder in self.leaving:
            if last < slot:
                block.holders.discard(holder)
        for storage, block in zip(self.trace.storages, self.originals):
            block.holders.discard("program")
            if storage.born <= slot <= storage.dies:
                block.holders.add("program")

    def _tick(self, index: int, tick: Tick) -> None:
        if tick.kind == "pack" and self.decisions.get(tick.value, "keep") == "keep":
            block = self.originals[self.trace.values[tick.value].storage]
            block.holders.add(f"handle {tick.value}")
            self.leaving.append((self.ends[tick.value], block, f"handle {tick.value}"))
        for action in self.schedule.actions:
            if action.tick == index:
                self._act(action, tick)
                self._measure()
        if tick.kind == "unpack" and tick.value in self.copies:
            self._give(tick, self.copies[tick.value])

    def _give(self, tick: Tick, block: Block) -> None:
        block.holders.add(f"autograd {tick.slot}")
        self.leaving.append((tick.dies, block, f"autograd {tick.slot}"))

    def _act(self, action: Action, tick: Tick) -> None:
        if action.kind == "swap_out":
            self.originals[self.trace.values[action.value].storage].holders.add(f"swap {action.value}")
        elif action.kind == "swap_in":
            self._new_copy(action.value)
        elif action.kind == "free":
            self._free(action.value, tick)
        elif action.kind == "rerun":
            self._rerun(action)

    def _new_copy(self, value: int) -> Block:
        block = Block(self.trace.bytes_of(value), {"us"})
        self.copies[value] = block
        self.all_blocks.append(block)
        return block

    def _free(self, value: int, tick: Tick) -> None:
        original = self.originals[self.trace.values[value].storage]
        if f"swap {value}" in original.holders:
            original.holders.remove(f"swap {value}")
            return
        block = self.copies.pop(value)
        if tick.kind == "unpack" and tick.value == value:
            self._give(tick, block)
        block.holders.remove("us")

    def _rerun(self, action: Action) -> None:
        op = self.trace.ops[action.op]
        made: list[tuple[int, Block]] = []
        for value in op.writes:
            storage = self.trace.values[value].storage
            old = [read for read in op.reads if self.trace.values[read].storage == storage]
            if action.in_place and old:
                made.append((value, self.copies.pop(old[0])))
            else:
                block = Block(self.trace.bytes_of(value), {"us"})
                self.all_blocks.append(block)
                made.append((value, block))
        self._measure(op.workspace_bytes)
        for value, block in made:
            if value in action.values:
                self.copies[value] = block
            else:
                block.holders.clear()
