"""Real steps recorded at a few sizes predict the trace of any other size, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.planning.families.sizes import Family, Member, Sizes, TimedAt
from outcore.values import Trace
from tests.cpu.zoo import TiedTransformer

Step = Callable[[nn.Module, Sizes], Tensor]


class Pyramid(nn.Module):
    """Strided convolutions: the sizes inside are rounded halves and quarters of the input's."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.head = nn.Linear(32, 10)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.down(image).mean((2, 3)))
        return out


class Shifted(nn.Module):
    """A language model's loss: all tokens but the last predict all tokens but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TiedTransformer()

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def images(model: nn.Module, sizes: Sizes) -> Tensor:
    out: Tensor = model(torch.randn(sizes)).sum()
    return out


def tokens(model: nn.Module, sizes: Sizes) -> Tensor:
    out: Tensor = model(torch.randint(0, 50, sizes)).sum()
    return out


def recorded(make: Callable[[], nn.Module], step: Step, sizes: Sizes) -> Trace:
    torch.manual_seed(0)
    model = make()
    ooc = outcore.limit(model, "100%", planner="keep-all")
    with ooc.step():
        step(model, sizes).backward()
    trace = ooc.trace
    ooc.close()
    assert trace is not None
    return trace


def family_of(make: Callable[[], nn.Module], step: Step, sizes: Sequence[Sizes]) -> Family:
    return Family([Member(each, recorded(make, step, each)) for each in sizes])


@pytest.mark.parametrize(
    ("make", "step", "members", "others"),
    [
        (TiedTransformer, tokens, [(8, 24), (8, 40)], [(8, 31), (8, 96), (8, 24)]),
        (TiedTransformer, tokens, [(8, 24), (8, 40), (12, 32)], [(4, 37), (24, 96)]),
        (Shifted, tokens, [(8, 24), (8, 40), (12, 32)], [(9, 33), (16, 64)]),
        (Pyramid, images, [(4, 3, 32, 32), (4, 3, 48, 48), (6, 3, 64, 64)], [(8, 3, 57, 57), (3, 3, 100, 100)]),
        (Pyramid, images, [(4, 3, 32, 48), (4, 3, 48, 32), (6, 3, 64, 64)], [(5, 3, 40, 72)]),
    ],
)
def test_traces_of_other_sizes_are_predicted_exactly(
    make: Callable[[], nn.Module], step: Step, members: list[Sizes], others: list[Sizes]
) -> None:
    family = family_of(make, step, members)
    for sizes in others:
        assert family.knows(sizes)
        predicted, real = family.at(sizes), recorded(make, step, sizes)
        assert predicted.fingerprint == real.fingerprint
        assert [tick.shape for tick in predicted.ticks] == [tick.shape for tick in real.ticks]
        assert all(op.seconds >= 0 for op in predicted.ops)


def test_seconds_grow_with_the_work() -> None:
    family = family_of(TiedTransformer, tokens, [(8, 24), (8, 96)])
    seconds = [sum(op.seconds for op in family.at((8, length)).ops) for length in (24, 48, 96, 192)]
    assert seconds == sorted(seconds)


def test_what_a_first_call_took_longer_does_not_count() -> None:
    small, large = (Member((8, length), recorded(TiedTransformer, tokens, (8, length))) for length in (24, 96))
    first = replace(small.trace.ops[3], seconds=5.0)  # it loaded a library
    slow = replace(small.trace, ops=(*small.trace.ops[:3], first, *small.trace.ops[4:]))
    predicted = Family([Member(small.sizes, slow), large]).at((8, 48))
    assert predicted.ops[3].seconds <= large.trace.ops[3].seconds


def test_steps_timed_apart_tell_the_seconds_in_the_place_of_recorded_ones() -> None:
    family = family_of(TiedTransformer, tokens, [(8, 24), (8, 96)])
    quick = [TimedAt(member.sizes, (1e-6,) * len(member.trace.ops)) for member in family.members]
    once, twice = Family(family.members, quick[:1]), Family(family.members, quick)
    assert sum(op.seconds for op in once.at((8, 23)).ops) < sum(op.seconds for op in family.at((8, 23)).ops)
    assert [op.seconds for op in twice.at((8, 48)).ops] == pytest.approx([1e-6] * len(family.members[0].trace.ops))


def test_a_dimension_that_never_varied_is_not_known() -> None:
    family = family_of(TiedTransformer, tokens, [(8, 24), (8, 40)])
    assert family.knows((8, 100))
    assert not family.knows((9, 24))
    assert not family.knows((8, 24, 1))


def test_a_step_that_does_other_work_is_no_member() -> None:
    family = family_of(TiedTransformer, tokens, [(8, 24), (8, 40)])
    assert family.admits(Member((8, 64), recorded(TiedTransformer, tokens, (8, 64)))) == ""
    assert "op" in family.admits(Member((8, 64), recorded(Shifted, tokens, (8, 64))))
