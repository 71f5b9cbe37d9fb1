"""A schedule prepared for the hot path, with everything that it needs looked up in advance."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import torch

from outcore.planning.allocator.hints import Placeholder
from outcore.planning.program.simulate import recipe_ops
from outcore.planning.trace_index import index_of
from outcore.values import Action, Schedule, Tick, Trace

Moves = tuple[list[int], list[int]]  # numbers of placeholders to free, and of those to take


class PlannedTick:
    """The properties of one tick that the hot path needs."""

    __slots__ = (
        "actions",
        "decision",
        "dtype",
        "gives_at",
        "is_busy",
        "is_outside",
        "is_pack",
        "is_shared",
        "moves",
        "needs_cell",
        "number",
        "pack",
        "packed_again",
        "shape",
        "value",
    )

    def __init__(self, number: int, tick: Tick, decision: str) -> None:
        self.number = number
        self.is_pack = tick.kind == "pack"
        self.pack = tick.pack
        self.value = tick.value
        self.shape: tuple[int, ...] | None = tick.shape
        self.dtype = getattr(torch, tick.dtype, None)
        self.decision = decision
        self.needs_cell = self.is_busy = self.packed_again = False
        self.is_outside = False  # its value existed before the step
        self.is_shared = False  # several storages have its value: those of merged ops
        self.actions: list[Action] = []
        self.gives_at = -1  # the action before which an unpack must take its tensor, as it releases it
        self.moves: Moves | None = None


class Program:
    """A schedule prepared for a step to follow."""

    def __init__(
        self,
        trace: Trace,
        schedule: Schedule,
        placeholders: Sequence[Placeholder] = (),
        *,
        pools_gradients: bool = False,
        exact_shapes: bool = True,
        may_switch: bool = False,
    ) -> None:
        """`exact_shapes`: whether steps save tensors of exactly the planned shapes. `may_switch`: whether a step may
        change over to another program, so that kept values must be held in a way in which they can still be swapped."""
        self._trace = trace
        self.fast_path: Any = None  # the C++ library's data for it, once a step followed it
        self.ticks = [
            PlannedTick(number, tick, schedule.decisions.get(tick.value, "")) for number, tick in enumerate(trace.ticks)
        ]
        if not exact_shapes:  # smaller tensors than planned may be saved
            for planned in self.ticks:
                planned.shape = None
        for action in schedule.actions:
            self.ticks[action.tick].actions.append(action)
        remade = recipe_ops(index_of(trace), schedule.decisions)
        self.captured = {op: trace.ops[op] for index in remade for op in (*trace.ops[index].fused, index)}
        put_away = {value for value, decision in schedule.decisions.items() if decision != "keep"}
        kept = {tick.value for tick in trace.ticks} - put_away
        held_as_cells = put_away | set(schedule.decisions) if may_switch else put_away
        # Norms that are applied again from the statistics that autograd keeps.
        self.norm_replays = {
            index for index, op in self.captured.items() if op.norm_replay and kept.issuperset(op.writes[1:3])
        }
        self.merged_ops = {index: op.repeats for index, op in enumerate(trace.ops) if op.is_merged}
        self.repeated = {index: trace.ops[index].writes[0] for index in self.merged_ops.values()}
        self.outside = {v for op in self.captured.values() for v in op.writes if _is_outside(trace, v)}
        self.pools_gradients = pools_gradients
        self.placeholders = placeholders
        moves = _moves(placeholders)
        for recorded, planned in zip(trace.ticks, self.ticks):
            planned.moves = moves.get(recorded.slot)
        self.moves = {index: moves[op.slot] for index, op in enumerate(trace.ops) if op.slot in moves}
        self.last_watched = max((*self.captured, *self.moves, *self.merged_ops), default=-1)
        self.names = [op.name for op in trace.ops[: self.last_watched + 1]]
        written = {trace.values[value].storage for op in self.captured.values() for value in op.writes}
        reads = {value for op in self.captured.values() for value in op.reads}
        # Parameters, buffers and inputs that captured ops only read always exist, and need no cell.
        self.held = {v for v in reads if _is_outside(trace, v) and trace.values[v].storage not in written}
        self.cells = held_as_cells | (reads - self.held) | set(self.repeated.values())
        shared = set(self.repeated.values())
        last_packs = {tick.value: tick.number for tick in self.ticks if tick.is_pack}
        for tick in self.ticks:
            tick.gives_at = _gives_at(tick)
            tick.packed_again = tick.is_pack and last_packs[tick.value] > tick.number
            tick.needs_cell = tick.value in self.cells
            tick.is_shared = tick.value in shared
            tick.is_outside = _is_outside(trace, tick.value)
            # Dropping a value needs no work, because its pack does not hold it.
            tick.is_busy = tick.moves is not None or any(action.kind != "drop" for action in tick.actions)

    @cached_property
    def looked_at(self) -> set[int]:
        """The ops that are captured, that repeat another op, or that are repeated."""
        return {*self.captured, *self.merged_ops, *self.repeated}

    @cached_property
    def keeps_everything(self) -> bool:
        """Whether no value is swapped or recomputed, and no op is captured."""
        return not (self.cells or self.held or self.captured or self.merged_ops or self.moves)

    @cached_property
    def pack_values(self) -> list[int]:
        return [tick.value for tick in self.ticks if tick.is_pack]

    # -- comparison with other programs ----------------------------------------------------------------------------

    @cached_property
    def events(self) -> list[Hashable]:
        """The observable part of each tick: shape and dtype of a saved tensor, or the pack of an unpacked one."""
        return [(tick.shape, tick.dtype) if tick.is_pack else tick.pack for tick in self.ticks]

    @cached_property
    def op_keys(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """The name of each op and the values that it reads and writes."""
        return [(op.name, op.reads, op.writes) for op in self._trace.ops]

    @cached_property
    def producers(self) -> list[int]:
        """The op that makes each value; -1 if it existed before the step."""
        return [value.producer for value in self._trace.values]

    def num_ops_before(self, num_ticks: int) -> int:
        """Returns how many ops run before the tick with this number."""
        if num_ticks < 0:
            return 0
        if num_ticks >= len(self.ticks):
            return len(self._trace.ops)
        return self._trace.ticks[num_ticks].slot - num_ticks  # every slot is an op or a tick

    def has_op_at(self, op: int, name: str, num_ticks: int) -> bool:
        """Whether this op runs after the previous tick and before the one with this number."""
        is_in_between = self.num_ops_before(num_ticks - 1) <= op < self.num_ops_before(num_ticks)
        return is_in_between and self.op_keys[op][0] == name

    def gone_before(self, num_ticks: int) -> set[int]:
        """Returns the values that are off the device after this many ticks."""
        gone: set[int] = set()
        for tick in self.ticks[:num_ticks]:
            for action in tick.actions:
                if action.kind in ("drop", "free"):
                    gone.add(action.value)
                elif action.kind in ("swap_in", "rerun"):
                    gone -= {action.value, *action.values}
        return gone

    @classmethod
    def empty(cls) -> Program:
        """Returns a program without a plan; its first tick leaves it."""
        return cls(Trace((), (), (), (), 0), Schedule("", (), {}))


def _gives_at(tick: PlannedTick) -> int:
    """Returns the index of the last free of the unpacked value; -1 if there is none. A value that is freed and brought
    back in the same tick is taken after that; taken before, its old storage would exist beside the new one."""
    own = [at for at, action in enumerate(tick.actions) if action.value == tick.value or tick.value in action.values]
    return own[-1] if own and not tick.is_pack and tick.actions[own[-1]].kind == "free" else -1


def _moves(placeholders: Sequence[Placeholder]) -> dict[int, Moves]:
    """Returns the moves by slot. Placeholders taken before the step have none."""
    found: dict[int, Moves] = {}
    for number, one in enumerate(placeholders):
        found.setdefault(one.until, ([], []))[0].append(number)
        if one.since >= 0:
            found.setdefault(one.since, ([], []))[1].append(number)
    return found


def _is_outside(trace: Trace, value: int) -> bool:
    """Whether a value is on a storage that existed before the step, and is not brought back."""
    return trace.storages[trace.values[value].storage].external
