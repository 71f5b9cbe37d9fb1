"""Random training steps for property tests, and one fixed small one.

Chains, residuals, in-place ops, several outputs, several forwards.

Built as a list of events (one per slot) by a tiny pretend autograd: forward ops read the newest versions of what is
there and may save what they read or wrote; each backward asks back, newest first, most of what its forward saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from outcore.values import Machine, Op, Storage, Tick, Trace, Value

MACHINES = st.builds(
    Machine,
    device=st.just("pretend"),
    device_bytes=st.just(10**6),
    host_bytes=st.just(10**6),
    disk_bytes=st.just(10**6),
    swap_out_bytes_per_s=st.sampled_from([1.0, 10.0, 300.0]),
    swap_in_bytes_per_s=st.sampled_from([1.0, 10.0, 300.0]),
    disk_write_bytes_per_s=st.just(2.0),
    disk_read_bytes_per_s=st.just(3.0),
    duplex_share=st.sampled_from([1.0, 0.8, 0.5]),
    copy_latency_s=st.sampled_from([0.0, 0.1]),
    speed=st.sampled_from([1.0, 2.0]),
)


@dataclass
class _Draft:
    """A trace under construction; a slot is an index into `events`."""

    draw: st.DrawFn
    events: list[Op | Tick] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    external: list[bool] = field(default_factory=list)
    newest: dict[int, int] = field(default_factory=dict)  # storage -> value
    num_packs: int = 0

    def fresh(self, producer: int, *, external: bool = False) -> int:
        self.bytes.append(self.draw(st.sampled_from([8, 3, 1, 20, 5, 12, 0])) if not external else 2)
        self.born.append(len(self.events))
        self.used.append(len(self.events))
        self.external.append(external)
        return self.version_of(len(self.bytes) - 1, 0, producer)

    def version_of(self, storage: int, version: int, producer: int) -> int:
        self.values.append(Value(storage, version, producer))
        self.newest[storage] = len(self.values) - 1
        return len(self.values) - 1

    def touch(self, value: int) -> None:
        self.used[self.values[value].storage] = len(self.events)

    def op(self, phase: str, reads: list[int], in_place: bool, num_outputs: int) -> list[int]:
        for read in reads:
            self.touch(read)
        producer, slot, writes = len(self.ops), len(self.events), []
        if in_place and reads:
            old = self.values[reads[0]]
            writes.append(self.version_of(old.storage, old.version + 1, producer))
        writes += [self.fresh(producer) for _ in range(num_outputs)]
        made = Op(
            slot,
            "aten.pretend.default",
            "forward" if phase == "forward" else "backward",
            self.draw(st.sampled_from([0.0, 0.5, 1.0, 4.0])),
            tuple(dict.fromkeys(reads)),
            tuple(writes),
            self.draw(st.sampled_from([0, 0, 2])),
            self.draw(st.sampled_from(["pure"] * 6 + ["random", "no"])) if phase == "forward" else "no",
            "layer",
        )
        self.ops.append(made)
        self.events.append(made)
        return writes

    def pack(self, value: int) -> int:
        self.touch(value)
        tick = Tick(len(self.events), "pack", value, self.num_packs, -1, (1,), "float32")
        self.num_packs += 1
        self.ticks.append(tick)
        self.events.append(tick)
        return tick.pack

    def unpack(self, value: int, pack: int, lives: int) -> None:
        slot = len(self.events)
        self.ticks.append(Tick(slot, "unpack", value, pack, slot + lives))
        self.events.append(self.ticks[-1])


@st.composite
def steps(draw: st.DrawFn, max_ops: int = 7, max_rounds: int = 2) -> Trace:
    draft = _Draft(draw)
    for _ in range(draw(st.integers(1, 2))):
        draft.fresh(-1, external=True)
    for _ in range(draw(st.integers(1, max_rounds))):
        saved = _forward(draft, draw, max_ops)
        _backward(draft, draw, saved)
    draft.op("backward", [], False, 1)
    return _finish(draft, draw)


def _forward(draft: _Draft, draw: st.DrawFn, max_ops: int) -> list[tuple[int, int]]:
    saved: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(1, max_ops))):
        there = [*sorted(draft.newest.values())[-5:], draft.newest[0]]
        reads = draw(st.lists(st.sampled_from(there), min_size=1, max_size=3))
        in_place = draw(st.sampled_from([False, True])) and _may_overwrite(draft, draw, reads[0], saved)
        to_save = [read for read in dict.fromkeys(reads) if not (in_place and read == reads[0])]
        saved += [(read, draft.pack(read)) for read in to_save if draw(st.sampled_from([True, False, False]))]
        made = draft.op("forward", reads, in_place, draw(st.sampled_from([0, 1, 2] if in_place else [1, 1, 2])))
        saved += [(value, draft.pack(value)) for value in made if draw(st.booleans())]
    return saved


def _may_overwrite(draft: _Draft, draw: st.DrawFn, value: int, saved: list[tuple[int, int]]) -> bool:
    """Mostly what nobody saved and the step made; now and then something autograd or the caller would mind."""
    harmless = not draft.external[draft.values[value].storage] and value not in {one for one, _ in saved}
    return harmless or draw(st.sampled_from([False] * 7 + [True]))


def _backward(draft: _Draft, draw: st.DrawFn, saved: list[tuple[int, int]]) -> None:
    gradient: list[int] = []
    for value, pack in reversed(saved):
        for _ in range(draw(st.sampled_from([1, 1, 1, 0, 2]))):
            draft.unpack(value, pack, draw(st.integers(0, 3)))
        if draw(st.booleans()):
            gradient = draft.op("backward", gradient, False, 1)
    draft.op("backward", gradient, False, 1)


def _finish(draft: _Draft, draw: st.DrawFn) -> Trace:
    last = len(draft.events) - 1
    storages = tuple(
        Storage(
            draft.bytes[at],
            0 if draft.external[at] else draft.born[at],
            last if draft.external[at] else min(draft.used[at] + draw(st.sampled_from([0, 0, 0, 0, 0, 0, 1, 6])), last),
            draft.external[at],
            movable=draw(st.sampled_from([True] * 11 + [False])),
        )
        for at in range(len(draft.bytes))
    )
    ticks = tuple(Tick(t.slot, t.kind, t.value, t.pack, min(t.dies, last), t.shape, t.dtype) for t in draft.ticks)
    before_bytes = sum(size for size, outside in zip(draft.bytes, draft.external) if outside)
    return Trace(tuple(draft.ops), tuple(draft.values), storages, ticks, before_bytes)


def chain() -> Trace:
    """x -> a -> b -> b in place -> c; a, b (second version) and c are saved and asked for in reverse."""
    return Trace(
        ops=(
            Op(0, "aten.conv.default", "forward", 1.0, (0,), (1,), replay="pure"),
            Op(2, "aten.norm.default", "forward", 1.0, (1,), (2,), replay="pure"),
            Op(3, "aten.relu_.default", "forward", 1.0, (2,), (3,), replay="pure"),
            Op(5, "aten.conv.default", "forward", 1.0, (3,), (4,), replay="pure"),
            Op(7, "aten.sum.default", "forward", 1.0, (4,), (5,), replay="no"),
            Op(9, "aten.conv_backward.default", "backward", 1.0, (5,), (6,)),
            Op(11, "aten.relu_backward.default", "backward", 1.0, (6,), (7,)),
            Op(13, "aten.conv_backward.default", "backward", 1.0, (7,), (8,)),
        ),
        values=(
            Value(0, 0, -1),
            Value(1, 0, 0),
            Value(2, 0, 1),
            Value(2, 1, 2),
            Value(3, 0, 3),
            Value(4, 0, 4),
            *(Value(5 + at, 0, 5 + at) for at in range(3)),
        ),
        storages=(
            Storage(8, 0, 13, external=True),
            Storage(8, 0, 2),
            Storage(8, 2, 5),
            Storage(8, 5, 7),
            Storage(1, 7, 9),
            Storage(8, 9, 11),
            Storage(8, 11, 13),
            Storage(8, 13, 13),
        ),
        ticks=(
            Tick(1, "pack", 1, 0, -1),
            Tick(4, "pack", 3, 1, -1),
            Tick(6, "pack", 4, 2, -1),
            Tick(8, "unpack", 4, 2, 9),
            Tick(10, "unpack", 3, 1, 11),
            Tick(12, "unpack", 1, 0, 13),
        ),
        before_bytes=8,
    )
