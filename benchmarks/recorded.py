"""Converts H200 steps that were recorded in another format to traces, with the machine they ran on.

The six steps were recorded in-core, op by op, before the project could record steps itself. Three things are corrected:

- `detach` ops are artefacts of the recording's own pack hook and are removed.
- Natural lifetimes were hidden by autograd's references. A forward storage dies with its last forward read; a storage
  that the step still reads in the backward without an unpack lives until that read.
- Event pairs overstate short ops where the host was the bottleneck. Views cost nothing; a constant per op is subtracted
  from the others so that the ops add up to the measured step.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from outcore.units import GIB
from outcore.values import Machine, Op, Storage, Tick, Trace, Value

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "traces"
BOLD_GIB = {"resnet_640": 16, "gpt_24": 28, "vgg_256": 6, "vit_128": 12, "r3d_64": 6, "resnet152_256": 12}
COPY_BYTES_PER_S = 4.2e12  # read and written, measured on the H200 that recorded them
IDEAL = {  # over in-core, by a mixed-integer program that assumes perfect overlap
    "resnet_640": {32: 0.028, 24: 0.071, 16: 0.131, 12: 0.164, 10: 0.181},
    "gpt_24": {64: 0.035, 48: 0.068, 40: 0.094, 32: 0.120, 28: 0.134, 24: 0.148},
    "vgg_256": {12: 0.020, 8: 0.061, 6: 0.099},
    "vit_128": {24: 0.0, 16: 0.004, 12: 0.007, 8: 0.016},
    "r3d_64": {12: 0.032, 8: 0.071, 6: 0.092},
    "resnet152_256": {24: 0.042, 16: 0.088, 12: 0.119, 8: 0.150},
}


def h200() -> Machine:
    """The machine of the recording: links measured, see docs/design/002-planning.md."""
    return Machine(
        device="cuda NVIDIA H200",
        device_bytes=139 * GIB,
        host_bytes=100 * GIB,
        disk_bytes=0,
        swap_out_bytes_per_s=55.3e9,
        swap_in_bytes_per_s=55.4e9,
        disk_write_bytes_per_s=2e9,
        disk_read_bytes_per_s=2e9,
        duplex_share=50.8 / 55.35,
        name="H200, PCIe 5 x16",
        measured_at="2026-11-15",
        given=("host_bytes", "disk_write_bytes_per_s", "disk_read_bytes_per_s", "copy_latency_s"),
    )


def load(name: str, folder: Path = FOLDER, *, workspace: bool = True) -> Trace:
    """`load("vgg_256")`: one recorded step as a Trace.

    In-core, convolutions took workspaces of up to 6 GiB because they could; under a cap the library falls back to
    algorithms that need less. `workspace=False` leaves them out, as the published ideal does.
    """
    trace = convert(json.loads((folder / f"{name}.json").read_text()), name)
    return trace if workspace else replace(trace, ops=tuple(replace(op, workspace_bytes=0) for op in trace.ops))


def convert(raw: dict[str, Any], name: str) -> Trace:
    step = _Recorded(raw)
    return Trace(
        ops=step.ops,
        values=tuple(step.values),
        storages=step.storages(),
        ticks=step.ticks,
        before_bytes=raw["base_bytes"],
        device=raw["gpu"],
        torch=raw["torch"],
        model=name,
    )


class _Recorded:
    def __init__(self, raw: dict[str, Any]) -> None:
        rows = [dict(zip(raw["op_columns"], row, strict=True)) for row in raw["ops"]]
        self.raw = raw
        self.number = [at for at, row in enumerate(rows) if not row["name"].startswith(("detach", "profiler"))]
        self.rows = [rows[at] for at in self.number]
        self.packed = {value for _, value in raw["packs"]}
        self.last_read = {read: at for at, row in enumerate(rows) for read in row["reads"]}
        self.values, self.storage_bytes = self._values()
        self.slot_of_op, tick_rows = self._slots()
        self.ops = self._ops()
        self.ticks = self._ticks(tick_rows)

    def _values(self) -> tuple[list[Value], list[int]]:
        """Recorded values are versions already: an op that mutates writes the next one of what it read."""
        at_op = {number: at for at, number in enumerate(self.number)}
        home: list[tuple[int, int]] = []
        storage_bytes: list[int] = []
        for kind, num_bytes, producer in self.raw["values"]:
            earlier = self._overwritten(producer, num_bytes) if kind == "tensor" and producer >= 0 else None
            if earlier is not None:
                home.append((home[earlier][0], home[earlier][1] + 1))
            else:
                home.append((len(storage_bytes), 0))
                storage_bytes.append(num_bytes)
        producers = [at_op.get(producer, -1) if kind == "tensor" else -1 for kind, _, producer in self.raw["values"]]
        return [Value(*place, producer) for place, producer in zip(home, producers)], storage_bytes

    def _overwritten(self, producer: int, num_bytes: int) -> int | None:
        """Which of its reads an op overwrote; reads are sorted, so: one of that size nobody saved or read later."""
        row = dict(zip(self.raw["op_columns"], self.raw["ops"][producer], strict=True))
        if not row["mutates"]:
            return None
        fitting = [read for read in row["reads"] if self.raw["values"][read][1] == num_bytes]
        unused = [read for read in fitting if read not in self.packed and self.last_read[read] <= producer]
        found: list[int | None] = [*unused, *fitting, None]
        return found[0]

    def _slots(self) -> tuple[list[int], list[tuple[int, int, int, int]]]:
        """Ticks go before the op they were counted at. -> slot per op, (slot, is unpack, value, pack) per tick."""
        packs = [(number, 0, value, pack) for pack, (number, value) in enumerate(self.raw["packs"])]
        unpacks = [(number, 1, self.raw["packs"][pack][1], pack) for number, pack in self.raw["unpacks"]]
        pending = sorted(packs + unpacks, key=lambda tick: tick[0])
        slot_of_op, ticks, slot = [], [], 0
        for number in [*self.number, len(self.raw["ops"])]:
            while pending and pending[0][0] <= number:
                ticks.append((slot, *pending.pop(0)[1:]))
                slot += 1
            slot_of_op.append(slot)
            slot += 1
        return slot_of_op[:-1], ticks

    def _ops(self) -> tuple[Op, ...]:
        seconds = _device_seconds(self.rows, self.raw["step_s"])
        ops = []
        for at, row in enumerate(self.rows):
            new_bytes = sum(
                self.storage_bytes[self.values[value].storage]
                for value in row["writes"]
                if not self.values[value].version
            )
            replay = "no" if row["phase"] != "f" else "random" if row["random"] else "pure"
            ops.append(
                Op(
                    slot=self.slot_of_op[at],
                    name=f"aten.{row['name']}",
                    phase="forward" if row["phase"] == "f" else "backward",
                    seconds=seconds[at],
                    reads=tuple(row["reads"]),
                    writes=tuple(row["writes"]),
                    workspace_bytes=max(row["peak_during"] - row["allocated_before"] - new_bytes, 0),
                    replay=replay,  # type: ignore[arg-type]
                )
            )
        return tuple(ops)

    def _readers(self) -> dict[int, list[int]]:
        readers: dict[int, list[int]] = {}
        for at, op in enumerate(self.ops):
            for value in op.reads:
                readers.setdefault(value, []).append(at)
        return readers

    def _ticks(self, rows: list[tuple[int, int, int, int]]) -> tuple[Tick, ...]:
        readers, ticks = self._readers(), []
        next_unpack: dict[int, int] = {}
        for slot, is_unpack, value, pack in reversed(rows):
            dies = -1
            if is_unpack:
                until = next_unpack.get(value, self.ops[-1].slot + 1)
                slots = [self.ops[at].slot for at in readers.get(value, ()) if slot < self.ops[at].slot]
                used = [reader for reader in slots if reader < until] or slots[:1]
                dies = max(used, default=slot)
                next_unpack[value] = slot
            ticks.append(Tick(slot, "unpack" if is_unpack else "pack", value, pack, dies))
        return tuple(reversed(ticks))

    def storages(self) -> tuple[Storage, ...]:
        """Born with the first write; dead after the last use that is not autograd's."""
        num = len(self.storage_bytes)
        born, dies = [-1] * num, [-1] * num
        saved = {tick.value for tick in self.ticks}
        for op in self.ops:
            for value in op.writes:
                storage = self.values[value].storage
                born[storage] = op.slot if born[storage] < 0 else born[storage]
                dies[storage] = max(dies[storage], op.slot)
            for value in op.reads:
                forward = self.values[value].producer >= 0 and self.ops[self.values[value].producer].phase == "forward"
                if not (forward and op.phase == "backward" and value in saved):
                    dies[self.values[value].storage] = max(dies[self.values[value].storage], op.slot)
        for tick in self.ticks:
            if tick.kind == "pack":
                storage = self.values[tick.value].storage
                dies[storage] = max(dies[storage], tick.slot)
        external = [True] * num
        for made in self.values:
            external[made.storage] &= made.producer < 0
        last = self.ops[-1].slot
        return tuple(
            Storage(
                self.storage_bytes[at],
                max(born[at], 0),
                last if external[at] or self._is_external(at) else dies[at],
                external=external[at] or self._is_external(at),
            )
            for at in range(num)
        )

    def _is_external(self, storage: int) -> bool:
        return any(value.storage == storage and value.version == 0 and value.producer < 0 for value in self.values)


def _device_seconds(rows: list[dict[str, Any]], step_s: float) -> list[float]:
    """Views are free; the same constant off every other op makes the sum the measured step."""
    measured_s = [row["ms"] / 1e3 if row["writes"] or row["mutates"] else 0.0 for row in rows]
    low_s, high_s = 0.0, max(measured_s)
    if sum(measured_s) <= step_s:
        return measured_s
    for _ in range(60):
        off_s = (low_s + high_s) / 2
        left_s = sum(max(seconds - off_s, seconds * 0.02) for seconds in measured_s)
        low_s, high_s = (off_s, high_s) if left_s > step_s else (low_s, off_s)
    return [max(seconds - high_s, seconds * 0.02) for seconds in measured_s]


def cheaper(trace: Trace, *, norm_replays: bool = True, passes: bool = True, common_ops: bool = True) -> Trace:
    """As our own recorder would have it: batch normalisation has a norm replay, ops are fused, casts repeat each other.

    Whether bits agree is not known here, and norm replays were not timed: they move their bytes as fast as a copy does.
    """
    made = _Cheaper(trace)
    if norm_replays:
        made.add_norm_replays()
    if passes:
        made.add_passes()
    if common_ops:
        made.add_repeats()
    return replace(trace, ops=tuple(made.ops))


class _Cheaper:
    def __init__(self, trace: Trace) -> None:
        self.trace, self.ops = trace, list(trace.ops)
        self.saved = {tick.value for tick in trace.ticks}
        self.readers: dict[int, list[Op]] = {}
        for op in trace.ops:
            for value in op.reads:
                self.readers.setdefault(value, []).append(op)

    def add_norm_replays(self) -> None:
        for index, op in enumerate(self.ops):
            if op.phase == "forward" and "batch_norm" in op.name:
                norm_replay_s = min(op.seconds, 2 * self.trace.bytes_of(op.writes[0]) / COPY_BYTES_PER_S)
                self.ops[index] = replace(op, norm_replay=True, norm_replay_s=norm_replay_s)

    def add_passes(self) -> None:
        for index, op in enumerate(self.ops):
            maker = self._maker(op.reads[0]) if op.phase == "forward" and op.reads else -1
            if maker < 0:
                continue
            head, kind = self.ops[maker], op.name.split(".")[1]
            if kind in ("relu", "relu_") and head.norm_replay:
                self.ops[index] = replace(op, fused=(maker,), fused_s=head.norm_replay_s)
            elif kind in ("relu", "relu_") and head.name.split(".")[1] in ("add", "add_"):
                norms = [norm for norm in map(self._maker, head.reads) if norm >= 0 and self.ops[norm].norm_replay]
                self.ops[index] = replace(op, fused=(*norms[:1], maker), fused_s=head.seconds)
            elif kind == "_to_copy" and head.name.startswith("aten.mul."):
                self.ops[index] = replace(op, fused=(maker,), fused_s=op.seconds)

    def _maker(self, value: int) -> int:
        """The op that made it for one reader, or for casts alone; -1: it is saved, or made for others."""
        readers = self.readers[value]
        alone = len(readers) == 1 or all("_to_copy" in reader.name for reader in readers)
        maker = self.trace.values[value].producer
        made_first = maker >= 0 and self.ops[maker].writes[0] == value
        return maker if alone and made_first and value not in self.saved else -1

    def add_repeats(self) -> None:
        first: dict[tuple[tuple[int, ...], int], int] = {}
        for index, op in enumerate(self.ops):
            if op.phase == "forward" and "_to_copy" in op.name:
                key = op.reads, self.trace.bytes_of(op.writes[0])
                self.ops[index] = replace(op, repeats=first.get(key, -1))
                first.setdefault(key, index)


def repeat(trace: Trace, num_times: int) -> Trace:
    """All forwards of `num_times` copies of a step, then their backwards, newest first: as deep as one likes.

    What was there before the step is shared, except what the step itself overwrites.
    """
    turn = min(tick.slot for tick in trace.ticks if tick.kind == "unpack")
    return _Repeated(trace, num_times, turn).trace()


class _Repeated:
    def __init__(self, trace: Trace, num_times: int, turn: int) -> None:
        self.step, self.num_times, self.turn = trace, num_times, turn
        written = {trace.values[value].storage for op in trace.ops for value in op.writes}
        shared = [storage.external and at not in written for at, storage in enumerate(trace.storages)]
        self.storage_at = _places(shared, num_times)
        self.value_at = _places([shared[value.storage] for value in trace.values], num_times)
        self.num_forward_ops = sum(1 for op in trace.ops if op.slot < turn)

    def _slot(self, copy: int, slot: int) -> int:
        if slot < self.turn:
            return copy * self.turn + slot
        backwards = (self.num_times - 1 - copy) * (self.step.num_slots - self.turn)
        return self.num_times * self.turn + backwards + slot - self.turn

    def _op_at(self, copy: int, op: int) -> int:
        if op < 0:
            return -1
        num_backward = len(self.step.ops) - self.num_forward_ops
        if op < self.num_forward_ops:
            return copy * self.num_forward_ops + op
        backwards = (self.num_times - 1 - copy) * num_backward
        return self.num_times * self.num_forward_ops + backwards + op - self.num_forward_ops

    def trace(self) -> Trace:
        step, copies = self.step, range(self.num_times)
        values: dict[int, Value] = {}
        storages: dict[int, Storage] = {}
        ops: list[Op] = []
        ticks: list[Tick] = []
        for copy in copies:
            value_at, storage_at = self.value_at[copy], self.storage_at[copy]
            for at, value in enumerate(step.values):
                values[value_at[at]] = replace(
                    value, storage=storage_at[value.storage], producer=self._op_at(copy, value.producer)
                )
            for at, storage in enumerate(step.storages):
                born, dies = self._slot(copy, storage.born), self._slot(copy, storage.dies)
                storages[storage_at[at]] = replace(storage, born=born, dies=dies)
            for op in step.ops:
                reads, writes = tuple(value_at[v] for v in op.reads), tuple(value_at[v] for v in op.writes)
                before = tuple(self._op_at(copy, inner) for inner in op.fused)
                repeats = self._op_at(copy, op.repeats)
                slot = self._slot(copy, op.slot)
                ops.append(replace(op, slot=slot, reads=reads, writes=writes, fused=before, repeats=repeats))
            for tick in step.ticks:
                dies = self._slot(copy, tick.dies) if tick.dies >= 0 else -1
                pack = tick.pack + copy * len(step.ticks)
                ticks.append(
                    replace(tick, slot=self._slot(copy, tick.slot), value=value_at[tick.value], pack=pack, dies=dies)
                )
        return replace(
            step,
            ops=tuple(sorted(ops, key=lambda op: op.slot)),
            values=tuple(values[at] for at in range(len(values))),
            storages=tuple(storages[at] for at in range(len(storages))),
            ticks=tuple(sorted(ticks, key=lambda tick: tick.slot)),
            model=f"{step.model} x{self.num_times}",
        )


def _places(shared: list[bool], num_times: int) -> list[list[int]]:
    """Per copy, where each item goes: shared ones have one place for all copies."""
    first = {at: place for place, at in enumerate(at for at, one in enumerate(shared) if one)}
    places, free = [], len(first)
    for _ in range(num_times):
        row = []
        for at, one in enumerate(shared):
            row.append(first[at] if one else free)
            free += 0 if one else 1
        places.append(row)
    return places
