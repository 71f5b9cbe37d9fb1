"""Places kept for what would be in the way of the step's largest pieces of memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given

from outcore.fitting.headroom import Headroom, Trouble
from outcore.planning import lower, simulate
from outcore.planning.allocator import placeholders as keeping
from outcore.planning.allocator.hints import AllocatorHints, Placeholder
from outcore.planning.allocator.model import Device, Event, allocations, safe_bytes, wanted_bytes, with_placeholders
from outcore.planning.allocator.placeholders import arrange, best_share, placeholders
from outcore.planning.settings import ALLOCATOR
from outcore.planning.trace_index import index_of
from outcore.units import MIB
from outcore.values import Budget, Decision, Machine, Op, Plan, Schedule, Storage, Tick, Trace, Value
from tests.pure.planning.random_steps import MACHINES, steps

ENOUGH = 1 << 50
MACHINE = Machine("pretend", 10**9, 10**9, 0, 1e9, 1e9, 1.0, 1.0, 1.0, 0.0)


def loss_step(kept_bytes: int = 2 * MIB) -> Trace:
    """A weight is cast (and the cast held until the loss is there), an activation saved, and the loss is large."""
    return Trace(
        ops=(
            Op(0, "aten._to_copy.default", "forward", 1.0, (0,), (1,), replay="pure"),
            Op(1, "aten.mm.default", "forward", 1.0, (1,), (2,), replay="pure"),
            Op(3, "aten.mm.default", "forward", 1.0, (2,), (3,), replay="pure"),
            Op(4, "aten.log_softmax.default", "forward", 1.0, (3,), (4,)),
            Op(7, "aten.mm_backward.default", "backward", 1.0, (4,), (5,)),
            Op(8, "aten.mm_backward.default", "backward", 1.0, (5,), (6,)),
        ),
        values=(Value(0, 0, -1), *(Value(at + 1, 0, at) for at in range(6))),
        storages=(
            Storage(4 * MIB, 0, 8, external=True),
            Storage(3 * MIB, 0, 4),  # the cast
            Storage(kept_bytes, 1, 3),
            Storage(2 * MIB, 3, 4),
            Storage(40 * MIB, 4, 7),  # the giant
            Storage(2 * MIB, 7, 8),  # made in the backward,
            Storage(60 * MIB, 8, 8),  # there when another giant comes
        ),
        ticks=(Tick(2, "pack", 2, 0, -1), Tick(5, "pack", 3, 1, -1), Tick(6, "unpack", 2, 0, 7)),
        before_bytes=4 * MIB,
    )


def scheduled(trace: Trace, decisions: dict[int, Decision]) -> Schedule:
    budget = Budget(100 * MIB, 100 * MIB, 0)
    return lower(trace, Plan(trace.fingerprint, "mine", budget, decisions, trace.before_bytes), MACHINE)


def kept_in(trace: Trace, decision: Decision = "keep") -> set[Placeholder]:
    schedule = scheduled(trace, {2: decision, 3: "keep"})
    return set(placeholders(trace, list(allocations(trace, schedule)), 15 * MIB, ENOUGH))


def test_what_stays_has_its_place_kept_until_it_is_made() -> None:
    cast, kept, logits = Placeholder(3 * MIB, -1, 0), Placeholder(2 * MIB, -1, 1), Placeholder(2 * MIB, -1, 3)
    in_backward = Placeholder(2 * MIB, -1, 6)  # nobody looks at its op: given back where autograd asks for something
    assert kept_in(loss_step()) == {cast, kept, logits, in_backward}
    assert kept_in(loss_step(), "recompute") == {cast, logits, in_backward}  # made again after the giant, or not at all


def test_tiny_ones_have_none() -> None:
    assert Placeholder(MIB, -1, 1) not in kept_in(loss_step(kept_bytes=MIB))


def test_an_op_after_which_nothing_is_saved_is_not_waited_for() -> None:
    """Python stops looking at ops when the forward's last tensor is saved."""
    trace = loss_step()
    ticks = (trace.ticks[0], replace(trace.ticks[1], slot=2), trace.ticks[2])
    found = placeholders(replace(trace, ticks=ticks), list(allocations(trace, scheduled(trace, {}))), 15 * MIB, ENOUGH)
    assert Placeholder(2 * MIB, -1, 2) in found  # op 3 is too late
    assert not [one for one in found if one.until == 3]


def test_without_a_giant_none_is_kept() -> None:
    trace = loss_step()
    events = list(allocations(trace, scheduled(trace, {2: "keep", 3: "keep"})))
    assert placeholders(trace, events, 70 * MIB, ENOUGH) == ()
    assert arrange(trace, scheduled(trace, {}), 10**12, ENOUGH).placeholders == ()


def test_convolutions_that_want_a_workspace_have_none() -> None:
    """What a placeholder holds cuDNN would be refused, and go on with other sums."""
    trace = loss_step()
    convolution = replace(trace.ops[1], name="aten.convolution.default", workspace_bytes=0)
    assert kept_in(replace(trace, ops=(trace.ops[0], convolution, *trace.ops[2:])))
    convolution = replace(convolution, workspace_bytes=512)
    assert not kept_in(replace(trace, ops=(trace.ops[0], convolution, *trace.ops[2:])))


def language_model(num_layers: int = 12) -> Trace:
    """Layers that keep something of changing size, beside values that come and go, and a loss that wants three giants
    at once, after a smaller one. Each layer has one op with two outputs that stay."""
    ops, storages, ticks, slot = list[Op](), [Storage(40 * MIB, 0, 10**6, external=True)], list[Tick](), 0

    def op(name: str, phase: str, *made: tuple[int, int]) -> None:
        """Made: bytes and how many slots it lives."""
        nonlocal slot
        values = tuple(len(storages) + at for at in range(len(made)))
        ops.append(Op(slot, name, "forward" if phase == "forward" else "backward", 1.0, (), values))
        storages.extend(Storage(num_bytes, slot, slot + lives) for num_bytes, lives in made)
        slot += 1

    end = 7 * num_layers + 12
    for layer in range(num_layers):
        size = (21 + 10 * (layer % 3)) * MIB
        op("aten.norm.default", "forward", (2 * size, 3))
        op("aten.mm.default", "forward", (3 * size, 2))
        op("aten.attention.default", "forward", (size, end - slot), (3 * MIB, end - slot))  # both stay
        op("aten.add.default", "forward", (size + 2 * MIB, 5))
        op("aten.gelu.default", "forward", (2 * size + MIB, 2))
        op("aten.mm.default", "forward", (size, end - slot if layer % 2 else 4))
        ticks.append(Tick(slot, "pack", ops[-1].writes[0], layer, -1))
        slot += 1
    op("aten.mm.default", "forward", (300 * MIB, 1))
    op("aten._to_copy.default", "forward", (600 * MIB, 1))
    op("aten._log_softmax.default", "forward", (600 * MIB, 5))
    op("aten.nll_loss.default", "forward", (MIB // 2, 8))
    ticks.append(Tick(slot, "pack", ops[-1].writes[0], num_layers, -1))
    slot += 1
    ticks.append(Tick(slot, "unpack", ops[-1].writes[0], num_layers, slot + 1))
    slot += 1
    op("aten.nll_loss_backward.default", "backward", (600 * MIB, 1))
    op("aten._log_softmax_backward.default", "backward", (600 * MIB, 1))
    op("aten._to_copy.default", "backward", (300 * MIB, 1))
    op("aten.mm.default", "backward", (40 * MIB, 1))
    values = tuple(
        Value(number, 0, next((at for at, op in enumerate(ops) if number in op.writes), -1))
        for number in range(len(storages))
    )
    last = slot + 1
    storages = [replace(storage, dies=min(storage.dies, last)) for storage in storages]
    return Trace(tuple(ops), values, tuple(storages), tuple(ticks), 40 * MIB)


def most_bytes(events: list[Event], *, beside_places: bool = False) -> int:
    there: dict[object, int] = {}
    most = 0
    for kind, who, num_bytes in events:
        if kind == "take":
            there[who] = num_bytes
        elif kind == "give":
            there.pop(who, None)
        if not beside_places or any(isinstance(who, tuple) and who[0] == "place" for who in there):
            most = max(most, sum(there.values()))
    return most


def test_giants_find_their_places_where_the_others_keep_theirs() -> None:
    trace = language_model()
    schedule = scheduled(trace, {})
    events = list(allocations(trace, schedule))
    peak_bytes = trace.before_bytes + most_bytes(events)
    plainly = wanted_bytes(trace, events, AllocatorHints())
    hints = arrange(trace, schedule, int(1.05 * peak_bytes), peak_bytes)
    assert len(hints.placeholders) > 18
    assert not hints.pooled
    assert plainly > 1.15 * peak_bytes
    assert wanted_bytes(trace, events, hints) < 1.04 * peak_bytes
    assert most_bytes(list(with_placeholders(events, hints))) == most_bytes(events)  # and no byte more


def test_the_larger_giants_place_is_kept_while_a_smaller_one_finds_another() -> None:
    trace = language_model()
    events = list(allocations(trace, scheduled(trace, {})))
    found = placeholders(trace, events, 200 * MIB, ENOUGH)
    (later,) = [one for one in found if one.since >= 0]
    assert later.num_bytes == 600 * MIB
    smaller = next(storage for storage in trace.storages if storage.born == later.since)
    assert smaller.bytes == 300 * MIB
    without = AllocatorHints(tuple(one for one in found if one.since < 0))
    assert wanted_bytes(trace, events, AllocatorHints(found)) < wanted_bytes(trace, events, without)


def test_what_is_given_back_together_does_not_lie_together() -> None:
    """One hole for two would be the best for neither."""
    trace = language_model()
    found = placeholders(trace, list(allocations(trace, scheduled(trace, {}))), 200 * MIB, ENOUGH)
    first = [one for one in found if one.since < 0]
    assert len({one.until for one in first}) < len(first)
    assert not [one for one, other in itertools.pairwise(first) if one.until == other.until]


def test_every_block_whose_place_is_kept_goes_there() -> None:
    trace = language_model()
    events = list(allocations(trace, scheduled(trace, {})))
    hints = AllocatorHints(placeholders(trace, events, 200 * MIB, ENOUGH))
    device, kept, landed = Device(1 << 40), dict[int, int](), 0
    for kind, who, num_bytes in with_placeholders(events, hints):
        if kind == "take" and num_bytes > MIB:
            device.take(who, num_bytes)
            if isinstance(who, int):
                landed += kept.pop(device._owned[who][1], 0) == num_bytes
        elif kind == "give":
            if isinstance(who, tuple) and who[0] == "place":
                kept[device._owned[who][1]] = device._owned[who][2]
            device.give(who)
    assert landed == len(hints.placeholders)


@given(steps(), MACHINES)
def test_a_steps_peak_stays_and_all_is_given_back(trace: Trace, machine: Machine) -> None:
    """What is there while a place is kept is never more than the predicted peak."""
    trace = replace(trace, storages=tuple(replace(one, bytes=one.bytes * MIB) for one in trace.storages))
    ops = tuple(replace(op, workspace_bytes=op.workspace_bytes * MIB) for op in trace.ops)
    trace, machine = replace(trace, ops=ops), replace(machine, host_bytes=10**12)
    decisions: dict[int, Decision] = dict.fromkeys(index_of(trace).evictable, "swap")
    for chosen in (decisions, {}):
        plan = Plan(trace.fingerprint, "mine", Budget(10**12, 10**12, 10**12), chosen, trace.before_bytes)
        schedule = lower(trace, plan, machine)
        events, peak_bytes = list(allocations(trace, schedule)), simulate(trace, schedule, machine).peak_bytes
        for giant_bytes in (4 * MIB, 10 * MIB):
            hints = AllocatorHints(placeholders(trace, events, giant_bytes, peak_bytes))
            played = list(with_placeholders(events, hints))
            assert trace.before_bytes + most_bytes(played, beside_places=True) <= peak_bytes
            places = [event for event in played if isinstance(event[1], tuple) and event[1][0] == "place"]
            assert len(places) == 2 * len(hints.placeholders)
            slots = {op.slot for op in trace.ops if op.phase == "forward"} | {tick.slot for tick in trace.ticks}
            assert {one.until for one in hints.placeholders} <= slots
            assert all(one.since < one.until for one in hints.placeholders)


def test_at_one_gate_places_are_given_back_before_others_are_taken() -> None:
    hints = AllocatorHints((Placeholder(MIB, -1, 1), Placeholder(2 * MIB, 1, 2)))
    events: list[Event] = [("end", None, 0), ("take", 7, MIB), ("end", None, 0), ("take", 8, 2 * MIB), ("end", None, 0)]
    told = [event[:2] for event in with_placeholders(events, hints) if event[0] != "end"]
    first, second = ("place", 0), ("place", 1)
    assert told == [
        ("take", first),
        ("give", first),
        ("take", second),
        ("take", 7),
        ("give", second),
        ("take", 8),
    ]


def test_what_a_swap_brings_back_has_its_place_kept_until_then() -> None:
    trace = loss_step(kept_bytes=5 * MIB)
    trace = replace(trace, ticks=(*trace.ticks[:2], replace(trace.ticks[2], dies=8)))
    assert Placeholder(5 * MIB, -1, 5) in kept_in(trace, "swap")  # at the tick that fetches it


def test_what_goes_before_the_last_giant_does_not_lie_among_what_stays() -> None:
    trace = language_model()
    events = list(allocations(trace, scheduled(trace, {})))
    found = placeholders(trace, events, 200 * MIB, ENOUGH)
    last = max(at for at, (kind, _, num_bytes) in enumerate(events) if kind == "take" and num_bytes >= 200 * MIB)
    gone = {who for kind, who, _ in events[:last] if kind == "give"}
    stays = {(one.born, one.bytes): number not in gone for number, one in enumerate(trace.storages)}
    order = [stays[one.until, one.num_bytes] for one in found if one.since < 0]
    assert order == sorted(order, reverse=True)
    assert 0 < sum(order) < len(order)


def test_what_nobody_saw_made_has_no_places_kept_beside_it() -> None:
    """Compiled code's buffers are there before the op that first shows them."""
    trace = loss_step()
    assert kept_in(trace)
    unseen = replace(trace.values[2], producer=-1)
    assert not kept_in(replace(trace, values=(*trace.values[:2], unseen, *trace.values[3:])))


def test_less_is_safe_where_gradients_may_be_pooled_twice() -> None:
    trace = loss_step()
    assert safe_bytes(trace, AllocatorHints(), 1000 * MIB) == 990 * MIB
    assert safe_bytes(trace, AllocatorHints(pooled=frozenset({4})), 1000 * MIB) == 958 * MIB
    assert safe_bytes(trace, AllocatorHints(pooled=frozenset({1})), 10_000 * MIB) == 9_900 * MIB


def test_who_ran_out_of_memory_keeps_no_places() -> None:
    trace = language_model()
    schedule = scheduled(trace, {})
    peak_bytes = trace.before_bytes + most_bytes(list(allocations(trace, schedule)))
    headroom = Headroom(int(1.05 * peak_bytes), Trouble.STARTED_OVER)
    assert headroom.arrange(trace, schedule, peak_bytes, ()).placeholders
    headroom.ran_out()
    assert not headroom.arrange(trace, schedule, peak_bytes, ()).placeholders


@pytest.mark.parametrize(
    ("safe", "wanted", "best"),
    [(1, (5, 4, 2, 3, 9), 1), (3, (5, 4, 3, 2, 9), 2), (5, (5, 4, 3, 2, 9), None)],
    ids=["least", "least of the safe", "none is safe"],
)
def test_the_share_that_wants_least_is_taken_unless_all_is_well_without(
    safe: int, wanted: tuple[int, ...], best: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = language_model()
    by_share = dict(zip((None, *ALLOCATOR.giant_shares), wanted))
    monkeypatch.setattr(keeping, "arranged", lambda trace, events, memory_bytes, peak_bytes, share: share)
    monkeypatch.setattr(keeping, "wanted_bytes", lambda trace, events, share, there: by_share[share])
    monkeypatch.setattr(keeping, "safe_bytes", lambda trace, share, memory_bytes: safe)
    assert best_share(trace, [], 2000 * MIB, ENOUGH) == (ALLOCATOR.giant_shares[best] if best is not None else None)
