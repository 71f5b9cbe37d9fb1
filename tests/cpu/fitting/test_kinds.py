"""Which steps are of one kind: by shapes and modes at once, by Python scalars where they turn out to matter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from outcore.fitting.settings import FITTING
from outcore.limit import Limited, limit
from tests.cpu.fitting.pretended import Pretend


class Layers(nn.Module):
    """How many layers it runs may depend on what it is called with."""

    def __init__(self, num_layers_of: Callable[..., int] = lambda *given: 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.num_layers_of = num_layers_of

    def forward(self, x: Tensor, *given: object) -> Tensor:
        for layer in self.layers[: self.num_layers_of(*given)]:
            x = torch.tanh(layer(x))
        return x


class Loop:
    """Runs steps, each against plain PyTorch."""

    def __init__(self, model: Layers, ooc: Limited) -> None:
        self.model, self.ooc = model, ooc
        self.x = torch.randn(64, 32)

    def step(self, *given: object) -> None:
        found = []
        for around in (torch.enable_grad(), self.ooc.step()):
            self.model.zero_grad()
            with around:
                self.model(self.x, *given).square().mean().backward()
            found.append([parameter.grad for parameter in self.model.parameters() if parameter.grad is not None])
        assert len(found[0]) == len(found[1])
        assert all(map(torch.equal, *found))
        self.model.zero_grad()

    @property
    def num_planned(self) -> int:
        return sum(kind.num_steps for kind in self.ooc.kinds)


@pytest.fixture
def make() -> Iterator[Callable[[Callable[..., int]], Loop]]:
    made: list[Limited] = []

    def make_loop(num_layers_of: Callable[..., int]) -> Loop:
        torch.manual_seed(0)
        model = Layers(num_layers_of)
        made.append(limit(model, "100%", planner="recompute-all"))
        return Loop(model, made[-1])

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "outcore: a model under a memory limit trained")
        yield make_loop
    for ooc in made:
        ooc.close()


Make = Callable[[Callable[..., int]], Loop]


def test_a_number_that_counts_steps_makes_no_kinds(make: Make) -> None:
    loop = make(lambda number, name: 3)
    for number in range(20):
        loop.step(number, f"step {number}")
    assert len(loop.ooc.kinds) == 1
    assert loop.num_planned == 19


def test_a_flag_that_changes_the_work_makes_two(make: Make) -> None:
    loop = make(lambda deep: 5 if deep else 2)
    for number in range(12):
        loop.step(number % 3 == 0)
    assert len(loop.ooc.kinds) == 2
    assert [kind.num_left for kind in loop.ooc.kinds] == [0, 0]
    assert loop.num_planned == 12 - 3  # one left its plan, and both were recorded


def test_a_flag_is_suspected_before_a_number_that_changed_with_it(make: Make) -> None:
    loop = make(lambda number, deep: 5 if deep else 2)
    for number in range(12):
        loop.step(number, number % 2 == 0)
    assert len(loop.ooc.kinds) == 2
    assert loop.num_planned == 12 - 3


def test_what_changed_while_the_plan_held_is_not_suspected(make: Make) -> None:
    loop = make(lambda number, other: 5 if other == 7 else 2)
    for number in range(6):
        loop.step(number, 1)
    for number in range(6, 12):
        loop.step(number, 7)
    assert len(loop.ooc.kinds) == 2
    assert loop.num_planned == 12 - 3


def test_a_wrong_suspicion_is_taken_back_when_the_same_work_is_recorded_twice(make: Make) -> None:
    """The first number counts steps, and is suspected first: the second one is to blame."""
    loop = make(lambda number, depth: depth)
    for number in range(16):
        loop.step(number, 2 + number % 2)
    assert len(loop.ooc.kinds) == 2
    assert loop.num_planned >= 6


def test_work_that_changes_with_no_argument_is_learned_as_a_pattern(make: Make) -> None:
    depth = [2]
    loop = make(lambda number: depth[0])
    for number in range(40):
        depth[0] = 2 + number % 4
        loop.step(number)
    assert len(loop.ooc.kinds) == 4
    before = loop.ooc.stats()["planned"]
    for number in range(40, 52):
        depth[0] = 2 + number % 4
        loop.step(number)
    assert loop.ooc.stats()["planned"] == before + 12


def test_arguments_that_never_come_again_are_not_told_apart_for_ever(pretend: Pretend) -> None:
    """Each changes the work, which repeats itself: what is told apart in the end is the work."""
    torch.manual_seed(0)
    pretend.settings(most_alike=4)
    model = Layers(lambda number: 1 + number * number % 6)
    with limit(model, "100%") as ooc:
        for number in range(40):
            with ooc.step():
                model(torch.randn(8, 32), number).sum().backward()
            model.zero_grad()
        assert len(ooc.kinds) == 4  # of 1, 2, 4 and 5 layers
        assert ooc.stats()["recorded"] <= 14


def test_other_types_are_other_kinds_at_once(make: Make) -> None:
    loop = make(lambda given: 2)
    for given in (True, 1, "1", None) * 3:
        loop.step(given)
    assert len(loop.ooc.kinds) == 4
    assert loop.num_planned == 8


def test_the_least_recently_used_kind_goes_first(pretend: Pretend) -> None:
    pretend.settings(most_kinds=3, num_sizes=100)  # no size shares a plan
    model = Layers()
    with limit(model, "100%", planner="swap-all") as ooc:

        def step(num_rows: int) -> int:
            with ooc.step():
                model(torch.randn(num_rows, 32)).sum().backward()
            model.zero_grad()
            return ooc.kinds.values()[-1].num_steps

        assert [step(num_rows) for num_rows in (1, 2, 3, 1)] == [0, 0, 0, 1]
        assert step(4) == 0  # instead of 2
        assert len(ooc.kinds) == 3
        assert [step(1), step(2)] == [2, 0]  # instead of 3
        assert [step(4), step(3)] == [1, 0]


def test_steps_that_keep_changing_are_warned_of_once(pretend: Pretend) -> None:
    pretend.settings(num_sizes=100)  # no size shares a plan
    model = Layers()
    with warnings.catch_warnings(record=True) as caught, limit(model, "100%", planner="swap-all") as ooc:
        warnings.simplefilter("always")
        for num_rows in range(1, 2 * FITTING.num_recent):
            with ooc.step():
                model(torch.randn(num_rows, 32)).sum().backward()
            model.zero_grad()
        assert len(ooc.kinds) <= FITTING.most_kinds
    (told,) = (warning for warning in caught if "were recorded, which is slow" in str(warning.message))
    assert told.filename == __file__


def test_lengths_that_come_again_are_not_warned_of() -> None:
    model = Layers()
    with warnings.catch_warnings(), limit(model, "100%", planner="swap-all") as ooc:
        warnings.simplefilter("error")
        for step in range(60):
            with ooc.step():
                model(torch.randn(1 + step % 15, 32)).sum().backward()
            model.zero_grad()


def test_sets_of_gradients_make_few_kinds() -> None:
    """As where each micro-batch asks for other experts."""
    model = Layers(lambda: 6)
    with limit(model, "100%", planner="swap-all") as ooc:
        for step in range(3 * FITTING.most_gradient_sets):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.zeros_like(parameter) if step & (1 << number) else None
            with ooc.step():
                model(torch.randn(64, 32)).sum().backward()
        assert FITTING.most_gradient_sets < len(ooc.kinds) <= FITTING.most_gradient_sets + 2
