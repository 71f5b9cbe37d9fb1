"""Plans of several sizes tried one after the other, as on a GPU whose allocator starts over (a counter plays it)."""

from __future__ import annotations

import functools
import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from outcore.errors import BudgetTooSmall
from outcore.limit import Limited, limit
from outcore.planning import hybrid, placeholders, tidy
from outcore.planning.crowd import Crowd, Placeholder
from outcore.planning.holes import Places
from outcore.running import allocator, execute
from outcore.running.execute import Execution
from outcore.running.program import Moves
from outcore.running.room import Room
from outcore.units import MIB
from outcore.values import Schedule, Trace
from tests.cpu.training import build, train


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rooms are planned for many times, and how good their plans are is nobody's question here."""
    monkeypatch.setattr(hybrid, "MAX_FLIPS", 200)


@functools.cache
def roomy_bytes() -> int:
    model, loss_of = build("resnet")
    ooc = limit(model, "20GiB")
    train(model, loss_of, ooc, 3)
    assert ooc.predicted is not None
    ooc.close()
    return ooc.predicted.peak_bytes


def always_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts = itertools.count()
    monkeypatch.setattr(allocator, "count_restarts", lambda device: next(restarts))


def test_steps_that_are_waited_for_tell_nothing_of_a_host_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those measured closely are: their times are read before the next one begins."""
    begun: list[tuple[bool, bool]] = []
    model, loss_of = build("resnet")
    ooc = limit(model, int(0.8 * roomy_bytes()))
    ooc._tries_rooms = True

    def begin(self: allocator.Ahead, *, fits: bool) -> int:
        begun.append((ooc._log is not None, fits))
        return 0

    monkeypatch.setattr(allocator.Ahead, "begin", begin)
    for ooc.measure in (False, True):
        train(model, loss_of, ooc, 26)
        assert ooc.settled
        assert begun[-1] == (ooc.measure, not ooc.measure)
    ooc.close()


def test_a_host_that_waits_need_not_with_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    model, loss_of = build("resnet")
    ooc = limit(model, int(0.8 * roomy_bytes()))
    ooc._tries_rooms = True
    train(model, loss_of, ooc, 8)
    (kind,) = (kind for kind in ooc.kinds.values() if kind.plan is not None)
    ooc.ahead._started_over.extend([True] * allocator.ENOUGH)
    for room, waits in ((kind.room, True), (None, False)):
        kind.room, kind.stale = room, True
        train(model, loss_of, ooc, 1)
        assert ooc.ahead.waits == waits
    ooc.close()


def test_a_room_too_small_to_plan_in_ends_the_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    always_restarts(monkeypatch)
    model, loss_of = build("resnet")
    with pytest.raises(BudgetTooSmall) as caught:
        train(model, loss_of, limit(model, 1), 2)
    ooc = limit(model, int(1.15 * caught.value.needed_bytes))
    ooc._tries_rooms = True
    train(model, loss_of, ooc, 20)
    assert ooc.settled
    room = next(iter(ooc.kinds.values())).room
    assert room is not None
    assert ooc.plan is not None
    assert ooc.plan.budget.device_bytes == room.room_bytes
    assert all(attempt.made[0].budget.device_bytes == attempt.room_bytes for attempt in room.attempts)
    ooc.close()


def test_memory_that_comes_and_goes_between_steps_is_planned_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    always_restarts(monkeypatch)
    memory_bytes = int(0.9 * roomy_bytes()) + 2 * MIB
    model, loss_of = build("resnet")
    ooc = limit(model, memory_bytes)
    ooc._tries_rooms = True
    really, calls = ooc._before_bytes, [0]

    def before_bytes(inputs: tuple[torch.Tensor, ...]) -> int:
        calls[0] += 1
        return really(inputs) + (2 * MIB if calls[0] % 2 else 0)

    monkeypatch.setattr(ooc, "_before_bytes", before_bytes)
    train(model, loss_of, ooc, 32)
    assert ooc.settled
    ooc.close()


def test_a_kind_that_changed_tries_its_rooms_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    always_restarts(monkeypatch)
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))
    num_used = [4]

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[: num_used[0]]:
                x = layer(x)
            return x

    model, x = Deep(), torch.randn(512, 256)
    ooc = limit(model, 9 * MIB)
    ooc._tries_rooms = True
    for step in range(48):
        if step == 22:
            num_used[0] = 8
        with ooc.step():
            model(x).sum().backward()
        model.zero_grad()
    (kind,) = ooc.kinds.values()
    assert not kind.unplanned
    assert kind.num_left == 1
    assert ooc.settled
    ooc.close()


def test_the_numbers_stay_while_rooms_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_bytes = int(0.8 * roomy_bytes())
    model, loss_of = build("resnet")
    plain = train(model, loss_of, None, 26)
    model, loss_of = build("resnet")
    ooc = limit(model, memory_bytes)
    num_restarts = [0]

    def count_restarts(device: torch.device) -> int:
        """In every step of a plan for more than 0.85 of the budget the allocator starts over."""
        kind = ooc._kind or ooc._last
        if kind is not None and kind.room is not None and kind.room.room_bytes > 0.85 * memory_bytes:
            num_restarts[0] += 1
        return num_restarts[0]

    monkeypatch.setattr(allocator, "count_restarts", count_restarts)
    ooc._tries_rooms = True
    train(model, loss_of, ooc, 26).assert_same(plain)
    assert ooc.settled
    room = next(iter(ooc.kinds.values())).room
    assert room is not None
    assert room.attempts  # how many more are worth trying is the clock's
    assert room.attempts[0].num_restarts > 0
    assert ooc.plan is not None
    assert ooc.plan.decisions == room.best.made[0].decisions
    assert ooc.predicted is not None
    assert ooc.predicted.peak_bytes <= room.room_bytes
    ooc.close()


def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first plan on as if the allocator had had to start over, with small blocks that count, too."""
    monkeypatch.setattr(sys.modules["outcore.limit"], "Room", functools.partial(Room, crowded=True))
    monkeypatch.setattr(placeholders, "SMALLEST_BYTES", 1024)
    monkeypatch.setattr(placeholders, "best_share", lambda *asked: 0.05)


def tight(name: str) -> tuple[nn.Module, Any, Limited]:
    model, loss_of = build(name)
    with pytest.raises(BudgetTooSmall) as caught:
        train(model, loss_of, limit(model, 1), 2)
    model, loss_of = build(name)
    ooc = limit(model, int(1.145 * caught.value.needed_bytes))
    ooc._tries_rooms = True
    return model, loss_of, ooc


def test_places_are_kept_once_the_allocator_had_to_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    always_restarts(monkeypatch)
    monkeypatch.setattr(placeholders, "SMALLEST_BYTES", 1024)
    monkeypatch.setattr(placeholders, "best_share", lambda *asked: 0.05)
    monkeypatch.setattr(Room, "is_hopeless", lambda self, predicted_s: False)  # however the machine's moment is
    expected = train(*build("autocast"), num_steps=12)
    model, loss_of, ooc = tight("autocast")
    expected.assert_same(train(model, loss_of, ooc, num_steps=12))
    room = next(iter(ooc.kinds.values())).room
    assert room is not None
    assert room.crowded
    assert not room.attempts[0].made[3].placeholders
    assert len(room.attempts) > 1
    assert room.attempts[1].made[3].placeholders
    ooc.close()


def test_every_place_is_taken_and_given_back_at_its_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each place in the program where something can be done: forward ops, packs and unpacks, each since the
    gate before the last."""
    crowded(monkeypatch)
    chosen: list[Placeholder] = []

    def arrange(self: Room, trace: Trace, schedule: Schedule, peak_bytes: int, there: Places) -> Crowd:
        first = next(op.slot for op in trace.ops if op.phase == "backward")
        gates = sorted({op.slot for op in trace.ops if op.slot < first} | {tick.slot for tick in trace.ticks})
        chosen[:] = [Placeholder(1000 + gate, since, gate) for since, gate in zip((-1, -1, *gates), gates)]
        return Crowd(tuple(chosen))

    monkeypatch.setattr(Room, "arrange", arrange)
    told: list[list[tuple[str, int]]] = []
    really, close = Execution._move, Execution.close

    def move(self: Execution, moves: Moves) -> None:
        given, taken = moves
        if not hasattr(self, "_told"):
            self._told = list[tuple[str, int]]()  # type: ignore[attr-defined]
        assert all(self._places[at].nbytes() == self.program.placeholders[at].num_bytes for at in given)
        really(self, moves)
        assert set(taken) <= set(self._places)
        assert not set(given) & set(self._places)
        self._told += [("give", at) for at in given] + [("take", at) for at in taken]  # type: ignore[attr-defined]

    def closed(self: Execution) -> None:
        if self.program.placeholders:
            told.append(self._told)  # type: ignore[attr-defined]
        close(self)

    monkeypatch.setattr(Execution, "_move", move)
    monkeypatch.setattr(Execution, "close", closed)
    expected = train(*build("autocast"), num_steps=6)
    model, loss_of, ooc = tight("autocast")
    expected.assert_same(train(model, loss_of, ooc, num_steps=6))
    ooc.close()
    assert len(told) >= 4
    for number in range(len(chosen)):
        gives = [told[-1].index(("give", number)) for number in range(number + 1)]
        assert gives == sorted(gives)
        assert told[-1].index(("take", number)) < gives[-1]
    assert len(told[-1]) == 2 * len(chosen)


@pytest.mark.parametrize("at", [0, 5], ids=["first", "later"])
def test_a_place_that_is_refused_is_excused_and_none_is_asked_for_again(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowded(monkeypatch)
    expected = train(*build("autocast"), num_steps=5)
    model, loss_of, ooc = tight("autocast")
    excused, asked, refused = list[int](), list[int](), list[dict[int, Any]]()
    monkeypatch.setattr(ooc._refusals, "excuse", lambda: excused.append(1))
    really = Execution._move

    def move(self: Execution, moves: Moves) -> None:
        had_places = self._keeps_places
        really(self, moves)
        if had_places and not self._keeps_places:
            refused.append(dict(self._places))

    class Storage(torch.UntypedStorage):
        def __new__(cls, num_bytes: int, **given: Any) -> Any:
            asked.append(num_bytes)
            if len(asked) % 6 == at:
                raise torch.OutOfMemoryError("refused")
            return torch.UntypedStorage(num_bytes, **given)

    monkeypatch.setattr(Execution, "_move", move)
    pretended = SimpleNamespace(**{**vars(torch), "UntypedStorage": Storage})
    monkeypatch.setattr(execute, "torch", pretended)
    expected.assert_same(train(model, loss_of, ooc, num_steps=5))
    ooc.close()
    assert refused
    assert len(excused) == len(refused)
    assert all(places == {} for places in refused)
    assert len(asked) <= 6 * (len(refused) + 1)


def test_places_go_with_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded(monkeypatch)
    model, loss_of, ooc = tight("autocast")
    train(model, loss_of, ooc, num_steps=4)
    kept: list[Execution] = []

    def fail(*_: Any) -> None:
        assert isinstance(ooc._run, Execution)
        assert ooc._run._places
        kept.append(ooc._run)
        raise KeyError("the user's own")

    model.zero_grad()
    hook = next(iter(model.children())).register_forward_hook(fail)
    with pytest.raises(KeyError), ooc.step():
        loss_of(model, 0)
    hook.remove()
    assert not kept[0]._places
    ooc.close()


def test_starting_over_while_places_are_taken_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded(monkeypatch)
    num_restarts, really = [0], Execution._move

    def move(self: Execution, moves: Moves) -> None:
        num_restarts[0] += len(moves[1]) > 2  # a step's beginning
        really(self, moves)

    monkeypatch.setattr(Execution, "_move", move)
    monkeypatch.setattr(allocator, "count_restarts", lambda device: num_restarts[0])
    model, loss_of, ooc = tight("autocast")
    train(model, loss_of, ooc, num_steps=10)
    room = next(iter(ooc.kinds.values())).room
    assert room is not None
    assert room.attempts[0].num_restarts == 1
    ooc.close()


def test_a_step_that_leaves_its_plan_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded(monkeypatch)
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))
    layers.append(nn.Linear(256, 4096))
    leaving, there = [False], list[int]()

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                x = layer(x) if number != 2 or not leaving[0] else layer(x).sin()
            if leaving[0]:
                assert isinstance(ooc._run, Execution)
                there.append(len(ooc._run._places))
            return x

    model, x = Branching(), torch.randn(512, 256)

    def train_once() -> None:
        with ooc.step():
            model(x).log_softmax(1).sum().backward()
        model.zero_grad()

    ooc = limit(model, 1)
    train_once()
    with pytest.raises(BudgetTooSmall) as caught:
        train_once()
    ooc.close()
    ooc = limit(model, int(1.15 * caught.value.needed_bytes))
    ooc._tries_rooms = True
    for step in range(6):
        leaving[0] = step == 5
        train_once()
        if step == 4:
            (kind,) = ooc.kinds.values()
            assert kind.program is not None
            assert kind.program.placeholders
    assert there == [0]
    assert kind.num_left == 1
    ooc.close()


def test_memory_that_creeps_is_planned_for_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little less than a MiB a step: a plan seen earlier was made for less memory around it than there is by now."""
    always_restarts(monkeypatch)
    monkeypatch.setattr(tidy, "MOST_S", 0.2)  # every room is planned for anew many times
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(12) for part in (nn.Linear(128, 128), nn.Tanh())])
    x, ooc = torch.randn(8192, 128), limit(model, 60 * MIB)
    ooc._tries_rooms = True
    really, extra = ooc._before_bytes, [0]
    monkeypatch.setattr(ooc, "_before_bytes", lambda inputs: really(inputs) + extra[0])
    for step in range(22):
        if step > 7:
            extra[0] += int(0.9 * MIB)
        with ooc.step():
            model(x).sum().backward()
        model.zero_grad()
        if ooc.plan is not None:
            assert ooc.plan.before_bytes + MIB >= really((x,)) + extra[0]
    ooc.close()


def test_seconds_are_corrected_once_however_often_the_best_plan_is_gone_back_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory_bytes = int(0.8 * roomy_bytes())
    model, loss_of = build("resnet")
    ooc = limit(model, memory_bytes)
    ooc._tries_rooms = True
    train(model, loss_of, ooc, 12)
    assert ooc.settled
    (kind,) = ooc.kinds.values()
    assert kind.room is not None
    assert kind.trace is not None
    before_s = sum(op.seconds for op in kind.trace.ops)
    plan = kind.plan
    for _ in range(3):
        ooc._go_back(kind)
    assert sum(op.seconds for op in kind.trace.ops) == before_s
    assert kind.plan is plan
    ooc.close()


def timed_kind(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, list[str]]:
    """A recorded step as on a GPU, where the second one is timed; and which planners were asked since."""
    monkeypatch.setattr(allocator, "places", lambda device: ())
    model, loss_of = build("resnet")
    ooc = limit(model, int(0.7 * roomy_bytes()))
    train(model, loss_of, ooc, 1)
    asked: list[str] = []
    home = sys.modules["outcore.limit"]
    really = home.plans

    def plans(trace: Any, machine: Any, budget: Any, planner: str, **more: Any) -> Any:
        asked.append(planner)
        return really(trace, machine, budget, planner=planner, **more)

    monkeypatch.setattr(home, "plans", plans)
    monkeypatch.setattr(ooc, "device", SimpleNamespace(type="cuda"))
    ooc._tries_rooms = True
    kind: Any = next(iter(ooc.kinds.values()))
    ooc._make_plan(kind, kind.trace.before_bytes)
    assert (kind.plan.planner, asked) == ("market", ["market"])
    asked.clear()
    return ooc, kind, asked


def end(ooc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    ooc.close()


@pytest.mark.parametrize("more", [[], ["aten.extra.default"]], ids=["the same ops", "others"])
def test_the_brief_plan_is_for_the_timed_step_alone(more: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ooc, kind, asked = timed_kind(monkeypatch)
    names = [op.name for op in kind.trace.ops]
    clock = SimpleNamespace(seconds=lambda: [op.seconds / 2 for op in kind.trace.ops])
    whole_s = sum(op.seconds for op in kind.trace.ops)
    ooc._correct_times(kind, SimpleNamespace(clock=clock, timed=names + more))
    assert kind.stale
    assert sum(op.seconds for op in kind.trace.ops) == pytest.approx(whole_s if more else whole_s / 2)
    ooc._make_plan(kind, kind.trace.before_bytes)
    assert (kind.plan.planner, asked) == ("hybrid", ["hybrid"])
    end(ooc, monkeypatch)


def test_a_timed_step_that_ran_out_leaves_no_brief_plan_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ooc, kind, asked = timed_kind(monkeypatch)
    ooc._ran_out(kind, torch.OutOfMemoryError("played"))
    ooc._make_plan(kind, kind.trace.before_bytes)
    assert kind.plan.planner == "market"
    asked.clear()
    clock = SimpleNamespace(seconds=lambda: [op.seconds / 2 for op in kind.trace.ops])
    ooc._correct_times(kind, SimpleNamespace(clock=clock, timed=[op.name for op in kind.trace.ops]))
    ooc._make_plan(kind, kind.trace.before_bytes)
    assert kind.plan.planner == "hybrid"
    assert set(asked) == {"hybrid"}
    end(ooc, monkeypatch)
