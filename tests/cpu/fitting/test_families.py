"""Training loops whose sizes change: a few recordings, shared plans, the same bits, within the budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import psutil
import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.errors import BudgetTooSmall
from outcore.fitting.loop import open_loops
from outcore.limit import Limited
from tests.cpu.fitting.pretended import Pretend
from tests.cpu.zoo import TiedTransformer

Sizes = tuple[int, int]


class Branching(nn.Module):
    """Does other work on long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.more = TiedTransformer(), nn.Linear(50, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.model(tokens)
        return self.more(out.tanh()) if tokens.shape[1] > 60 else out


def train(
    make: Callable[[], nn.Module], sizes: list[Sizes], limit: Callable[[nn.Module], Limited] | None
) -> Iterator[tuple[list[Tensor], Limited | None]]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ooc = limit(model) if limit is not None else None
    for step, size in enumerate(sizes):
        tokens = torch.randint(0, 50, size, generator=torch.Generator().manual_seed(step))
        with ooc.step() if ooc is not None else nullcontext():
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
        numbers = [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        yield numbers, ooc
    if ooc is not None:
        ooc.close()


def drawn(count: int, *, batches: bool = False) -> list[Sizes]:
    draw = random.Random(0)
    return [(draw.randint(6, 12) if batches else 8, draw.randint(24, 96)) for _ in range(count)]


def in_core_bytes(make: Callable[[], nn.Module], size: Sizes) -> int:
    *_, (_, ooc) = train(make, [size] * 2, lambda model: outcore.limit(model, "100%", planner="keep-all"))
    assert ooc is not None
    assert ooc.plan is not None
    return ooc.plan.in_core_peak_bytes


def compare(make: Callable[[], nn.Module], sizes: list[Sizes], memory: int, planner: str) -> tuple[int, int]:
    """Checks bits and peaks of every step; how many steps were recorded, and how many sizes there were."""
    num_recorded = 0
    plain = list(train(make, sizes, None))  # first: both draw from the same generator
    ours = train(make, sizes, lambda model: outcore.limit(model, memory, planner=planner, measure=True))
    for (expected, _), (numbers, ooc) in zip(plain, ours, strict=True):
        assert ooc is not None
        assert all(map(torch.equal, numbers, expected))
        assert ooc.timeline is None or ooc.timeline.peak_bytes <= memory
        num_recorded = int(ooc.stats()["recorded"])
    return num_recorded, len(set(sizes))


@pytest.mark.parametrize("planner", ["hybrid", "swap-all"])
def test_lengths_that_change_are_recorded_twice(planner: str) -> None:
    memory = int(0.6 * in_core_bytes(TiedTransformer, (8, 96)))
    num_recorded, num_sizes = compare(TiedTransformer, drawn(24), memory, planner)
    assert num_recorded <= 2 < num_sizes


def test_batches_and_lengths_that_change_together_are_recorded_a_few_times() -> None:
    memory = int(0.6 * in_core_bytes(TiedTransformer, (12, 96)))
    num_recorded, _ = compare(TiedTransformer, drawn(24, batches=True), memory, "hybrid")
    assert num_recorded <= 3


def test_a_size_that_does_other_work_leaves_the_plan_and_joins_the_family() -> None:
    memory = int(0.7 * in_core_bytes(Branching, (8, 96)))
    sizes = [(8, length) for length in (32, 40, 48, 72, 72, 52, 80, 80, 88, 36, 90)]
    num_recorded, _ = compare(Branching, sizes, memory, "hybrid")
    assert num_recorded <= 5


def test_dimensions_that_vary_together_stay_together() -> None:
    memory = int(0.7 * in_core_bytes(Branching, (50, 72)))
    sizes = [(32, 32), (40, 40), (50, 72), *((length, length) for length in (45, 47, 48, 49))]
    compare(Branching, sizes, memory, "hybrid")


def test_two_sizes_that_alternate_have_plans_of_their_own() -> None:
    memory = int(0.6 * in_core_bytes(TiedTransformer, (8, 96)))
    *_, (_, ooc) = train(TiedTransformer, [(8, 96), (8, 48)] * 4, lambda model: outcore.limit(model, memory))
    assert ooc is not None
    assert len(ooc.kinds) == 2
    assert all(kind.plan is not None for kind in ooc.kinds)


def test_sizes_that_fit_run_with_everything_kept() -> None:
    memory = 2 * in_core_bytes(TiedTransformer, (8, 96))
    *_, (_, ooc) = train(TiedTransformer, drawn(10), lambda model: outcore.limit(model, memory))
    assert ooc is not None
    assert ooc.plan is not None
    assert ooc.plan.count("keep") == len(ooc.plan.decisions)


def test_two_steps_are_timed_apart_where_recorded_seconds_show_the_host(pretend: Pretend) -> None:
    memory = int(0.6 * in_core_bytes(TiedTransformer, (8, 96)))
    sizes: list[Sizes] = [(8, length) for length in (64, 96, 80, 84, 30, 31, 40, 90)]
    plain = list(train(TiedTransformer, sizes, None))
    timed = []
    for (expected, _), (numbers, ooc) in zip(
        plain, train(TiedTransformer, sizes, lambda model: pretend.limit(model, memory)), strict=True
    ):
        assert all(map(torch.equal, numbers, expected))
        assert ooc is not None
        families = open_loops(ooc.model)[0].families
        timed.append([list(family.timed) for family in families._families.values()])
    assert timed[-1] == [[(8, 80), (8, 30)]]


def test_a_limit_that_is_closed_leaves_no_planning_process() -> None:
    memory = int(0.6 * in_core_bytes(TiedTransformer, (8, 96)))
    list(train(TiedTransformer, drawn(8), lambda model: outcore.limit(model, memory)))
    assert not [child for child in psutil.Process().children() if "outcore.planning" in " ".join(child.cmdline())]


@pytest.mark.parametrize("whole", [True, False], ids=["as a whole", "in parts"])
def test_a_step_is_told_what_it_works_on_where_only_parts_of_the_model_are_called(whole: bool) -> None:
    """The hook sees no shapes then: without a batch, steps with other shapes are called alike and run unplanned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    with outcore.limit(model, "100%", planner="swap-all") as ooc:
        for step in range(12):
            batch = {"x": torch.randn(16 + 8 * (step % 4), 8), "name": f"batch {step}"}
            found = []
            for around in (torch.enable_grad(), ooc.step(batch=batch)):
                model.zero_grad()
                with around:
                    x = batch["x"]
                    for part in [model] if whole else model:
                        x = part(x)
                    assert isinstance(x, Tensor)
                    x.square().mean().backward()
                found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
            assert all(map(torch.equal, *found))
        stats = ooc.stats()
    assert stats["planned"] >= 8
    assert stats["left"] == stats["unplanned"] == 0


def test_a_size_that_does_not_fit_is_refused_at_once_and_the_bytes_it_names_are_enough() -> None:
    sizes = [(8, 24), (8, 40), (8, 32), (8, 96), (8, 28)]
    memory = int(0.25 * in_core_bytes(TiedTransformer, (8, 96)))
    with pytest.raises(BudgetTooSmall, match=r"on cpu: .* alone needs") as caught:
        compare(TiedTransformer, sizes, memory, "hybrid")
    assert caught.value.budget_bytes == memory
    assert caught.value.__cause__ is None
    compare(TiedTransformer, sizes, caught.value.needed_bytes, "hybrid")
