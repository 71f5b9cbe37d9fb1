"""Plans of several sizes tried one after the other, as on a GPU whose allocator starts over."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from outcore.eager import held_places
from outcore.eager.execution import Execution
from outcore.eager.held_places import HeldPlaces
from outcore.eager.program import Moves
from outcore.errors import BudgetTooSmall
from outcore.fitting import preparing
from outcore.fitting.headroom import Headroom, Trouble
from outcore.fitting.hooks import ACTIVE
from outcore.fitting.phases import RanOut, Settled, WasRecorded
from outcore.fitting.running import RunningStep
from outcore.limit import Limited, limit
from outcore.planning.allocator import fragmentation, placeholders
from outcore.planning.allocator.hints import AllocatorHints, Placeholder
from outcore.planning.allocator.model import Places
from outcore.planning.planners import hybrid
from outcore.planning.planners.scoring import lean_bytes, swap_all
from outcore.planning.settings import FRAGMENTATION, HYBRID
from outcore.planning.trace_index import index_of
from outcore.units import GIB, MIB
from outcore.values import Budget, Schedule, Trace
from tests.cpu.fitting.played import MACHINE, Life, recorded
from tests.cpu.fitting.pretended import AtOnce, Pretend, gpu_of
from tests.cpu.training import build, train


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are planned for many times, and how good their plans are is nobody's question here."""
    monkeypatch.setattr(hybrid, "HYBRID", replace(HYBRID, max_flips=200))


@functools.cache
def roomy_bytes() -> int:
    model, loss_of = build("resnet")
    ooc = limit(model, "20GiB")
    train(model, loss_of, ooc, 3)
    assert ooc.predicted is not None
    ooc.close()
    return ooc.predicted.peak_bytes


def headroom_of(ooc: Limited) -> Headroom:
    (kind,) = (kind for kind in ooc.kinds if kind.phase.headroom is not None)
    assert kind.phase.headroom is not None
    return kind.phase.headroom


def test_steps_that_are_waited_for_tell_nothing_of_a_host_ahead(pretend: Pretend) -> None:
    """Those measured closely are: their times are read before the next one begins."""
    model, loss_of = build("resnet")
    ooc = pretend.limit(model, int(0.8 * roomy_bytes()))
    asked = gpu_of(ooc).asked
    for ooc.measure in (False, True):
        train(model, loss_of, ooc, 27)
        assert ooc.settled
        assert asked[-3:] == (["watch peak", "step", "end"] if ooc.measure else ["end", "step that fits", "end"])
    ooc.close()


def test_a_host_that_waits_need_not_with_another_headroom(pretend: Pretend) -> None:
    model, loss_of = build("resnet")
    ooc = pretend.limit(model, int(0.8 * roomy_bytes()))
    train(model, loss_of, ooc, 8)
    asked = gpu_of(ooc).asked
    assert asked.count("new headroom") == 1
    (kind,) = (kind for kind in ooc.kinds if kind.plan is not None)
    assert kind.trace is not None
    kind.plan_for(kind.trace)
    train(model, loss_of, ooc, 1)
    assert asked.count("new headroom") == 2
    ooc.close()


def test_a_size_too_small_to_plan_in_ends_the_trying(pretend: Pretend) -> None:
    model, loss_of = build("resnet")
    with pytest.raises(BudgetTooSmall) as caught:
        train(model, loss_of, Limited(model, 1), 2)
    ooc = pretend.limit(model, int(1.15 * caught.value.needed_bytes))
    gpu_of(ooc).starts_over = lambda: True
    train(model, loss_of, ooc, 21)
    assert ooc.settled
    headroom = headroom_of(ooc)
    assert ooc.plan is not None
    assert ooc.plan.budget.device_bytes == headroom.usable_bytes
    planned = [attempt.ready.prepared.plan.budget.device_bytes for attempt in headroom.attempts]
    assert planned == [attempt.usable_bytes for attempt in headroom.attempts]
    ooc.close()


def greedy(memory_bytes: int) -> Trace:
    """A step recorded in so much memory, one of whose ops takes a workspace of all that there is, as cuDNN may."""
    lean = swap_all(index_of(recorded()), MACHINE, Budget(0, 0, GIB), lambda what, part: None)
    level = lean_bytes(index_of(recorded()), Budget(0, 0, GIB), lean)
    at = min((op.slot for op in recorded().ops), key=lambda slot: int(level[slot]))
    ops = [
        replace(op, workspace_bytes=max(0, memory_bytes - int(level[at]))) if op.slot == at else op
        for op in recorded().ops
    ]
    return replace(recorded(), ops=tuple(ops))


def test_as_many_bytes_as_are_named_are_enough_for_a_step_whose_workspace_grows_with_them() -> None:
    """U-Net 3D on an H200: 4.29 GiB were named, and with 4.38 another 4.45, since an op took all that there was."""
    memory_bytes = recorded().before_bytes + MIB
    with pytest.raises(BudgetTooSmall) as caught:
        begun(memory_bytes)
    named_bytes = caught.value.needed_bytes
    life = begun(named_bytes)
    assert life.phase.ready is not None
    assert life.phase.ready.prepared.predicted.peak_bytes <= named_bytes


def begun(memory_bytes: int) -> Life:
    life = Life(planner="hybrid", budget_bytes=memory_bytes, process=AtOnce())
    life.show(WasRecorded(greedy(memory_bytes)))
    life.begin()
    return life


def test_memory_that_comes_and_goes_between_steps_is_planned_for_once(pretend: Pretend) -> None:
    memory_bytes = int(0.9 * roomy_bytes()) + 2 * MIB
    model, loss_of = build("resnet")
    ooc = pretend.limit(model, memory_bytes)
    gpu_of(ooc).starts_over = lambda: True
    for _ in range(16):
        for extra_bytes in (2 * MIB, 0):
            gpu_of(ooc).extra_bytes = extra_bytes
            train(model, loss_of, ooc, 1)
    assert ooc.settled
    ooc.close()


class Deep(nn.Module):
    """Uses as many of its layers as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))
        self.num_used = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: self.num_used]:
            x = layer(x)
        return x


def test_work_that_changed_for_good_tries_its_sizes_anew(pretend: Pretend) -> None:
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(512, 256)
    ooc = pretend.limit(model, 9 * MIB)
    gpu_of(ooc).starts_over = lambda: True
    for step in range(50):
        if step == 23:
            model.num_used = 8
        with ooc.step():
            model(x).sum().backward()
        model.zero_grad()
    before, after = ooc.kinds
    assert not before.is_given_up
    assert before.num_left == 2
    assert after.num_left == 0
    assert after.phase.headroom is not before.phase.headroom
    assert ooc.settled
    ooc.close()


def test_the_numbers_stay_while_sizes_are_tried(pretend: Pretend) -> None:
    memory_bytes = int(0.8 * roomy_bytes())
    model, loss_of = build("resnet")
    plain = train(model, loss_of, None, 27)
    model, loss_of = build("resnet")
    ooc = pretend.limit(model, memory_bytes)
    gpu_of(ooc).starts_over = lambda: ooc.plan is None or ooc.plan.budget.device_bytes > 0.85 * memory_bytes
    train(model, loss_of, ooc, 27).assert_same(plain)
    assert ooc.settled
    headroom = headroom_of(ooc)
    assert headroom.attempts  # how many more are worth trying is the clock's
    assert headroom.attempts[0].num_restarts > 0
    assert ooc.plan is not None
    assert ooc.plan.decisions == headroom.best.ready.prepared.plan.decisions
    assert ooc.predicted is not None
    assert ooc.predicted.peak_bytes <= headroom.usable_bytes
    ooc.close()


def fragmented(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first plan on as if the allocator had had to start over, with small blocks that count, too."""
    monkeypatch.setattr(preparing, "Headroom", functools.partial(Headroom, trouble=Trouble.STARTED_OVER))
    monkeypatch.setattr(placeholders, "SMALLEST_BYTES", 1024)
    monkeypatch.setattr(placeholders, "best_share", lambda *asked: 0.05)


def tight(name: str, pretend: Pretend) -> tuple[nn.Module, Any, Limited]:
    model, loss_of = build(name)
    with pytest.raises(BudgetTooSmall) as caught:
        train(model, loss_of, Limited(model, 1), 2)
    model, loss_of = build(name)
    return model, loss_of, pretend.limit(model, int(1.145 * caught.value.needed_bytes))


def running_execution() -> Execution:
    (step,) = ACTIVE
    assert isinstance(step, RunningStep)
    assert isinstance(step.listener, Execution)
    return step.listener


def test_places_are_kept_once_the_allocator_had_to_start_over(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placeholders, "SMALLEST_BYTES", 1024)
    monkeypatch.setattr(placeholders, "best_share", lambda *asked: 0.05)
    monkeypatch.setattr(Headroom, "cannot_win", lambda self, predicted_s: False)  # however the machine's moment is
    expected = train(*build("autocast"), num_steps=13)
    model, loss_of, ooc = tight("autocast", pretend)
    gpu_of(ooc).starts_over = lambda: True
    expected.assert_same(train(model, loss_of, ooc, num_steps=13))
    headroom = headroom_of(ooc)
    assert headroom.is_fragmented
    assert not headroom.attempts[0].ready.program.placeholders
    assert len(headroom.attempts) > 1
    assert headroom.attempts[1].ready.program.placeholders
    ooc.close()


def test_every_place_is_taken_and_given_back_at_its_gate(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each place in the program where something can be done: forward ops, packs and unpacks, each since the
    gate before the last."""
    fragmented(monkeypatch)
    chosen: list[Placeholder] = []

    def arrange(self: Headroom, trace: Trace, schedule: Schedule, peak_bytes: int, there: Places) -> AllocatorHints:
        first = next(op.slot for op in trace.ops if op.phase == "backward")
        gates = sorted({op.slot for op in trace.ops if op.slot < first} | {tick.slot for tick in trace.ticks})
        chosen[:] = [Placeholder(1000 + gate, since, gate) for since, gate in zip((-1, -1, *gates), gates)]
        return AllocatorHints(tuple(chosen))

    monkeypatch.setattr(Headroom, "arrange", arrange)
    told: dict[HeldPlaces, list[tuple[str, int]]] = {}  # by step, in order
    really = HeldPlaces.move

    def move(self: HeldPlaces, moves: Moves) -> None:
        given, taken = moves
        assert all(self.blocks[at].nbytes() == self.placeholders[at].num_bytes for at in given)
        really(self, moves)
        assert set(taken) <= set(self.blocks)
        assert not set(given) & set(self.blocks)
        if self.placeholders:
            told.setdefault(self, []).extend([*(("give", at) for at in given), *(("take", at) for at in taken)])

    monkeypatch.setattr(HeldPlaces, "move", move)
    expected = train(*build("autocast"), num_steps=6)
    model, loss_of, ooc = tight("autocast", pretend)
    expected.assert_same(train(model, loss_of, ooc, num_steps=6))
    ooc.close()
    assert len(told) >= 4
    last = list(told.values())[-1]
    for number in range(len(chosen)):
        gives = [last.index(("give", number)) for number in range(number + 1)]
        assert gives == sorted(gives)
        assert last.index(("take", number)) < gives[-1]
    assert len(last) == 2 * len(chosen)


@pytest.mark.parametrize("at", [0, 5], ids=["first", "later"])
def test_a_place_that_is_refused_is_excused_and_none_is_asked_for_again(
    at: int, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragmented(monkeypatch)
    expected = train(*build("autocast"), num_steps=5)
    model, loss_of, ooc = tight("autocast", pretend)
    excused, asked, refused = list[int](), list[int](), list[dict[int, Any]]()
    monkeypatch.setattr(gpu_of(ooc).refusals, "excuse", lambda: excused.append(1))
    really = HeldPlaces.move

    def move(self: HeldPlaces, moves: Moves) -> None:
        was_refused = self.is_refused
        really(self, moves)
        if self.is_refused and not was_refused:
            refused.append(dict(self.blocks))

    class Storage(torch.UntypedStorage):
        def __new__(cls, num_bytes: int, **given: Any) -> Any:
            asked.append(num_bytes)
            if len(asked) % 6 == at:
                raise torch.OutOfMemoryError("refused")
            return torch.UntypedStorage(num_bytes, **given)

    monkeypatch.setattr(HeldPlaces, "move", move)
    pretended = SimpleNamespace(**{**vars(torch), "UntypedStorage": Storage})
    monkeypatch.setattr(held_places, "torch", pretended)
    expected.assert_same(train(model, loss_of, ooc, num_steps=5))
    ooc.close()
    assert refused
    assert len(excused) == len(refused)
    assert all(places == {} for places in refused)
    assert len(asked) <= 6 * (len(refused) + 1)


def test_places_go_with_a_step_that_fails(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    fragmented(monkeypatch)
    model, loss_of, ooc = tight("autocast", pretend)
    train(model, loss_of, ooc, num_steps=4)
    kept: list[Execution] = []

    def fail(*_: Any) -> None:
        kept.append(running_execution())
        assert kept[0].plan.places.blocks
        raise KeyError("the user's own")

    model.zero_grad()
    hook = next(iter(model.children())).register_forward_hook(fail)
    with pytest.raises(KeyError), ooc.step():
        loss_of(model, 0)
    hook.remove()
    assert not kept[0].plan.places.blocks
    ooc.close()


def test_starting_over_while_places_are_taken_is_noticed(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    fragmented(monkeypatch)
    num_restarts, really = [0], HeldPlaces.move

    def move(self: HeldPlaces, moves: Moves) -> None:
        num_restarts[0] += len(moves[1]) > 2  # a step's beginning
        really(self, moves)

    monkeypatch.setattr(HeldPlaces, "move", move)
    model, loss_of, ooc = tight("autocast", pretend)
    monkeypatch.setattr(gpu_of(ooc), "begin_step", lambda *, fits: num_restarts[0])
    monkeypatch.setattr(gpu_of(ooc), "num_restarts", lambda: num_restarts[0])
    train(model, loss_of, ooc, num_steps=11)
    assert headroom_of(ooc).attempts[0].num_restarts == 1
    ooc.close()


def test_a_step_that_leaves_its_plan_keeps_no_place(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    fragmented(monkeypatch)
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
                there.append(len(running_execution().plan.places.blocks))
            return x

    model, x = Branching(), torch.randn(512, 256)

    def train_once() -> None:
        with ooc.step():
            model(x).log_softmax(1).sum().backward()
        model.zero_grad()

    ooc = Limited(model, 1)
    train_once()
    with pytest.raises(BudgetTooSmall) as caught:
        train_once()
    ooc.close()
    ooc = pretend.limit(model, int(1.15 * caught.value.needed_bytes))
    for step in range(6):
        leaving[0] = step == 5
        train_once()
        if step == 4:
            (kind,) = ooc.kinds
            assert kind.phase.ready is not None
            assert kind.phase.ready.program.placeholders
    assert there == [0]
    assert kind.num_left == 1
    ooc.close()


def test_memory_that_creeps_is_planned_for_each_time(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A little less than a MiB a step: a plan seen earlier was made for less memory around it than there is by now."""
    # Every size is planned for anew many times, so each search is short.
    monkeypatch.setattr(fragmentation, "FRAGMENTATION", replace(FRAGMENTATION, most_s=0.05))
    monkeypatch.setattr(hybrid, "HYBRID", replace(HYBRID, max_flips=40, num_starts=2))
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(12) for part in (nn.Linear(128, 128), nn.Tanh())])
    x, ooc = torch.randn(2048, 128), pretend.limit(model, 22 * MIB)
    gpu = gpu_of(ooc)
    gpu.starts_over = lambda: True
    for step in range(23):
        if step > 8:
            gpu.extra_bytes += int(0.9 * MIB)
        with ooc.step():
            model(x).sum().backward()
        model.zero_grad()
        if ooc.plan is not None:
            assert ooc.plan.before_bytes + MIB >= gpu.before_step_bytes((x,))
    ooc.close()


def test_seconds_are_corrected_once_however_often_the_best_plan_is_gone_back_to(pretend: Pretend) -> None:
    model, loss_of = build("resnet")
    ooc = pretend.limit(model, int(0.8 * roomy_bytes()))
    train(model, loss_of, ooc, 13)
    (kind,) = ooc.kinds
    assert isinstance(kind.phase, Settled)
    before_s, plan = sum(op.seconds for op in kind.phase.trace.ops), kind.plan
    gpu_of(ooc).starts_over = lambda: True
    for _ in range(3):
        headroom_of(ooc).usable_bytes = 0  # nothing smaller is left
        kind.take(RanOut())
        assert isinstance(kind.phase, Settled)
    assert sum(op.seconds for op in kind.phase.trace.ops) == before_s
    assert kind.plan is plan
    ooc.close()


def test_the_brief_plan_is_for_the_timed_step_alone(pretend: Pretend) -> None:
    model, loss_of = build("resnet")
    ooc = pretend.limit(model, int(0.7 * roomy_bytes()))
    planners = []
    for _ in range(4):
        train(model, loss_of, ooc, 1)
        planners.append(ooc.plan.planner if ooc.plan is not None else "")
    assert planners == ["", "priced", "hybrid", "hybrid"]
    ooc.close()


def run_out(ooc: Limited, model: nn.Module, loss_of: Any) -> None:
    with ooc.step():
        loss_of(model, 0)
        raise torch.OutOfMemoryError("played")


def test_a_timed_step_that_ran_out_leaves_no_brief_plan_behind(pretend: Pretend) -> None:
    model, loss_of = build("resnet")
    ooc = pretend.limit(model, int(0.8 * roomy_bytes()))
    train(model, loss_of, ooc, 1)
    with pytest.raises(torch.OutOfMemoryError):
        run_out(ooc, model, loss_of)
    sizes = []
    for planner in ("priced", "hybrid"):
        model.zero_grad()
        train(model, loss_of, ooc, 1)
        assert ooc.plan is not None
        assert ooc.plan.planner == planner
        sizes.append(ooc.plan.budget.device_bytes)
    assert max(sizes) < 0.92 * ooc.budget.device_bytes
    ooc.close()
