"""Recipes that run as one: what is handed from one to the next must lie as a kernel takes it, else each runs alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from outcore.eager.cells import Cell, Marks
from outcore.eager.replay import Held, Recipe, capture
from outcore.errors import ReplayError
from tests.cpu.eager.test_fused import Kernels, kernels

__all__ = ["kernels"]  # the fixture


class Call:
    """Ops called one after the other, each on what others made, with their recipes."""

    def __init__(self) -> None:
        self.cells: dict[int, Cell] = {}

    def given(self, tensor: Tensor) -> Tensor:
        cell = self.cells[id(tensor)] = Cell(len(self.cells), tensor)
        cell.hold(tensor, Marks())
        return tensor

    def __call__(self, func: Any, *args: Any, of: Tensor | None = None, **kwargs: Any) -> tuple[Recipe, Tensor]:
        """`of`: whose storage the first argument is a view of."""
        known = [self.cells.get(id(arg if of is None or at else of), Held(arg)) for at, arg in enumerate(args)]
        recipe = capture(0, func, args, kwargs, lambda _: known.pop(0))
        made: Tensor = func(*args, **kwargs)
        into = bool(recipe.signature.written)
        cell = self.cells[id(made)] = Cell(len(self.cells), made)
        cell.recipe = recipe
        setattr(recipe, "overwrote" if into else "made", [weakref.ref(cell)])
        return recipe, made


ADD, ADD_, RELU, RELU_ = (
    torch.ops.aten.add.Tensor,
    torch.ops.aten.add_.Tensor,
    torch.ops.aten.relu.default,
    torch.ops.aten.relu_.default,
)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("part", "view", "kernel"),
    [
        (slice(None), lambda y: y, "both"),
        (slice(0, 2), lambda y: y, "in place"),  # a part of a larger storage
        (slice(2, 4), lambda y: y, "in place"),
        (slice(None), lambda y: y[:2], "never"),
        (slice(None), lambda y: y[1:], "never"),
        (slice(None), lambda y: y.T, "never"),
        (slice(None), lambda y: y.view(torch.int32), "never"),
    ],
    ids=["all", "first part", "second part", "less", "the end of it", "turned", "other numbers"],
)
def test_what_is_handed_on_must_lie_as_it_was_made(
    kernels: Kernels, part: slice, view: Callable[[Tensor], Tensor], kernel: str, in_place: bool
) -> None:
    call = Call()
    data, other = torch.linspace(-3, 3, 12).reshape(4, 3), torch.linspace(2, -2, 12).reshape(4, 3)[part].clone()
    before = data.clone()
    one = call.given(data[part])
    source = call.cells[id(one)]
    first, summed = call(ADD_, one, call.given(other))
    last, rectified = call(RELU_, view(summed), of=summed)
    wanted = data.clone()
    assert last.fuse([first], rectified)
    assert last.sources() == [source, call.cells[id(other)]]
    source.hold(again := before.clone()[part], Marks())
    fresh, (made,) = last.run(in_place=in_place)
    assert not fresh
    storage = torch.empty(0, dtype=torch.float32).set_(made.untyped_storage())
    assert torch.equal(storage.reshape(4, 3), wanted)
    assert (source.data is None) == in_place
    assert in_place or torch.equal(again, before[part])  # nobody wrote into it
    assert bool(kernels.done) == (kernel == "both" or (kernel == "in place" and in_place))


def test_what_is_not_read_is_not_fused() -> None:
    call = Call()
    one, other = call.given(torch.ones(4)), call.given(torch.ones(4))
    first, summed = call(ADD, one, other)
    second, _ = call(ADD, one, one)
    last, rectified = call(RELU, summed)
    assert not last.fuse([second], rectified)
    assert not last.fuse([None], rectified)
    assert not last.fuse([first, second], rectified)
    assert not last.inner
    assert last.sources() == [call.cells[id(summed)]]


def test_a_sum_of_one_thing_twice_is_run_in_turn(kernels: Kernels) -> None:
    call = Call()
    one = call.given(torch.tensor([1.0, -5.0]))
    first, summed = call(ADD, one, one)
    second, twice = call(ADD, summed, summed)
    last, rectified = call(RELU, twice)
    assert last.fuse([first, second], rectified)
    assert last.run()[0][0].tolist() == [4.0, 0.0]
    assert not kernels.done
    assert call.cells[id(summed)].data is None
    assert call.cells[id(twice)].data is None


def test_what_another_reader_was_brought_stays_there(kernels: Kernels) -> None:
    """Of several casts of one product some may be no part of a pass."""
    kernels.is_gone = True
    call = Call()
    first, summed = call(ADD, call.given(torch.ones(4)), call.given(torch.ones(4)))
    last, rectified = call(RELU, summed)
    assert last.fuse([first], rectified)
    call.cells[id(summed)].data = summed
    last.run()
    assert call.cells[id(summed)].data is summed


def test_what_was_there_before_the_step_and_an_earlier_op_was_given_must_be_what_it_was() -> None:
    call, weight = Call(), torch.ones(4)
    first, summed = call(ADD, call.given(torch.ones(4)), weight)
    last, rectified = call(RELU, summed)
    assert last.fuse([first], rectified)
    weight.add_(1)
    with pytest.raises(ReplayError, match="changed in place"):
        last.run()
