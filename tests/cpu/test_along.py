"""What rectifies in place is rerun along with the op before it. The kernels are CUDA's; here others stand for them."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from outcore.limit import Limited, limit
from outcore.recording import record, twin
from outcore.recording.twin import Proofs, Twin
from outcore.running import fused, replay
from outcore.running.cells import Cell, View
from outcore.running.replay import Recipe, capture, signature_of
from outcore.values import Trace
from tests.cpu.training import train
from tests.cpu.zoo import Step

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
IN_A_NORM, IN_A_SUM = "normalise and rectify", "add and rectify"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))
        self.norm, self.last_norm = nn.BatchNorm2d(6), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.relu_(self.norm(self.first(x)))
        y = self.last_norm(self.second(y))
        y += x
        return torch.relu_(y)


class NotInPlace(Block):
    """As most people write it."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        y = self.last_norm(self.second(y)) + x
        return torch.relu(y)


class PartOfANorm(Block):
    """Rectifies some channels."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.first(x))
        torch.relu_(y[:, :2])
        out: Tensor = self.last_norm(self.second(y))
        return out


class PartOfASum(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.first(x))
        y += x
        torch.relu_(y[:, 3:])
        out: Tensor = self.last_norm(self.second(y))
        return out


class ReadTwice(Block):
    """Somebody else reads what is rectified afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.first(x))
        level = y.mean()
        out: Tensor = self.second(torch.relu_(y)) * level
        return out


class Scaled(Block):
    """The sum is no plain one."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(x).add_(self.first(x), alpha=0.5)
        out: Tensor = self.norm(torch.relu_(y))
        return out


class PlusOne(Block):
    """A number is added, and no tensor."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(torch.relu(self.second(x) + 1.0))
        return out


class Wide(Block):
    """One number is added to a whole channel."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(x).add_(self.first(x).mean((2, 3), keepdim=True))
        out: Tensor = self.norm(torch.relu_(y))
        return out


class Fickle(Block):
    """Does not always rectify."""

    rectifies = True

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.first(x))
        y = torch.relu_(y) if self.rectifies else torch.tanh_(y)
        out: Tensor = self.last_norm(self.second(y))
        return out + x


def net(kind: type[nn.Module] = Block) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 1), kind(), kind(), nn.Conv2d(6, 2, 1))


def loss_of(model: nn.Module, step: int) -> Tensor:
    out: Tensor = model(IMAGES + step).square().mean()
    return out


class Kernels:
    """PyTorch's own ops in the kernels' place, counted."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.is_gone = False  # from now on none of them can be run
        self.twin_error = self.error = 0.0  # of a normalisation, and of one that rectifies
        self.hidden_twin_error = self.hidden_error = 0.0  # which a new network does not show

    longer_s = 0.0  # than without rectifying

    def normalise_again(
        self,
        func: Any,
        args: Any,
        mean: Tensor,
        deviation: Tensor,
        rows: slice = slice(None),
        *,
        rectified: bool = False,
    ) -> Tensor | None:
        if rectified and self.is_gone:
            return None
        scratch = torch.zeros_like(mean), torch.ones_like(mean)
        out: Tensor = torch.native_batch_norm(args[0], args[1], args[2], *scratch, True, 0.1, args[-1])[0][rows]
        hidden = (args[1] - 1)[None, :, None, None]  # by a weight of one
        out = out + self.twin_error + hidden * self.hidden_twin_error
        if rectified:
            self.done[IN_A_NORM] += 1
            out = (out + self.error + hidden * self.hidden_error).relu_()
        return out

    def is_ready(self, device: torch.device, dtype: torch.dtype) -> bool:
        return True

    def add_relu(self, one: Tensor, other: Any, *, in_place: bool) -> Tensor | None:
        if self.is_gone or not fused.can_add(one, other):
            return None
        self.done[IN_A_SUM] += 1
        return (one if in_place else one.clone()).add_(other).relu_()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels()
    for name in ("is_ready", "add_relu"):
        monkeypatch.setattr(fused, name, getattr(kernels, name))
    monkeypatch.setattr(Twin, "_seconds", lambda one, clock: 1.0 if clock is one._clock else 1.0 + kernels.longer_s)
    monkeypatch.setattr(record, "has_twin", lambda func, args: bool(signature_of(func).scratch(args)))
    for room in (twin, replay):
        monkeypatch.setattr(room, "normalise_again", kernels.normalise_again)
    return kernels


@contextmanager
def recomputed(model: nn.Module) -> Iterator[Limited]:
    ooc = limit(model, "1GiB", planner="recompute-all")
    try:
        yield ooc
    finally:
        ooc.close()


def compare(kind: type[nn.Module], step: Step = loss_of, num_steps: int = 5) -> set[str]:
    """Trains with and without; what was rectified along."""
    wanted = train(net(kind), step, num_steps=num_steps)
    model = net(kind)
    with recomputed(model) as ooc:
        train(model, step, ooc, num_steps=num_steps).assert_same(wanted)
        assert ooc.trace is not None
        return {ooc.trace.ops[ooc.trace.values[op.reads[0]].producer].name for op in ooc.trace.ops if op.along}


@pytest.mark.parametrize(("kind", "add"), [(Block, "aten.add_.Tensor"), (NotInPlace, "aten.add.Tensor")])
def test_a_norm_and_a_sum_are_rectified_along_with_the_same_numbers(
    kernels: Kernels, kind: type[nn.Module], add: str
) -> None:
    assert compare(kind) == {"aten.native_batch_norm.default", add}
    assert kernels.done[IN_A_SUM] >= 2 * 3  # in each planned step, for either block
    assert kernels.done[IN_A_NORM] > kernels.done[IN_A_SUM]


def num_calls(op: str, step: Callable[[], object]) -> int:
    with torch.profiler.profile() as seen:
        step()
    return sum(event.count for event in seen.key_averages() if event.key == op)


@pytest.mark.parametrize(("kind", "op"), [(Block, "aten::clamp_min_"), (NotInPlace, "aten::clamp_min")])
def test_what_was_done_along_is_not_done_again(kernels: Kernels, kind: type[nn.Module], op: str) -> None:
    model = net(kind)
    with recomputed(model) as ooc:
        train(model, loss_of, ooc, num_steps=4)
        kernels.done.clear()
        num_rectified = num_calls(op, lambda: train(model, loss_of, ooc, num_steps=1))
        assert kernels.done == {IN_A_NORM: 2, IN_A_SUM: 2}
        assert num_rectified == 4 + (4 if kind is Block else 0)  # the forward's, and the kernels' own


@pytest.mark.parametrize("kind", [PartOfANorm, PartOfASum, ReadTwice, Scaled, PlusOne, Wide])
def test_other_steps_are_left_alone(kernels: Kernels, kind: type[nn.Module]) -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        if number == 1:
            kernels.done.clear()  # what was compared while recording
        return loss_of(model, number)

    compare(kind, step)
    assert not kernels.done


def test_where_kernels_fail_later_the_ops_themselves_run(kernels: Kernels) -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        kernels.is_gone = number > 2
        return loss_of(model, number)

    assert compare(Block, step)


def test_where_nothing_normalises_again_later_the_op_itself_runs(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        if number == 3:
            monkeypatch.setattr(replay, "normalise_again", lambda *args, **more: None)
        return loss_of(model, number)

    assert compare(Block, step)


@pytest.mark.parametrize("wrong", ["error", "twin_error", "hidden_error", "hidden_twin_error", "longer_s"])
def test_other_bits_or_slower_kernels_are_never_fused(kernels: Kernels, wrong: str) -> None:
    setattr(kernels, wrong, 1000.0)
    assert compare(Block) == {"aten.add_.Tensor"}


def twin_of(
    *, pieces: int = 1, room_bytes: float = math.inf, proofs: Proofs | None = None, num_made: int = 3
) -> tuple[Twin, list[bool]]:
    source = torch.randn(4, 6, 8, 8)
    refused: list[bool] = []
    args = (source, torch.ones(6), torch.zeros(6), torch.zeros(6), torch.ones(6), True, 0.1, 1e-5)
    made = Twin(
        torch.ops.aten.native_batch_norm.default,
        args,
        torch.native_batch_norm(*args)[:num_made],
        piece_bytes=source.nbytes // pieces,
        room_bytes=room_bytes,
        proofs={} if proofs is None else proofs,
        on_refused=lambda: refused.append(True),
    )
    return made, refused


def test_a_piece_that_cannot_be_compared_is_not_fused(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four images in pieces of one, of which the last does not fit any more; there is a twin all the same."""

    def normalise_again(func: Any, args: Any, mean: Tensor, deviation: Tensor, rows: slice, **more: bool) -> Any:
        if more and rows.start == 3:
            raise torch.OutOfMemoryError
        return kernels.normalise_again(func, args, mean, deviation, rows, **more)

    monkeypatch.setattr(twin, "normalise_again", normalise_again)
    found, refused = twin_of(pieces=4)
    assert found.verdict() == {"twin": True, "twin_s": 1.0}
    assert found.fused_s() == math.inf
    assert refused == [True]
    assert twin_of()[0].fused_s() == 1.0


def test_a_norm_that_saves_no_statistics_has_no_twin(kernels: Kernels) -> None:
    found, refused = twin_of(num_made=2)
    assert found.verdict() == {}
    assert found.fused_s() == math.inf
    assert not refused


def test_weights_are_drawn_once_and_only_where_there_is_room(kernels: Kernels) -> None:
    num_bytes = 4 * 6 * 8 * 8 * 4
    proofs: Proofs = {}
    for room_bytes in (num_bytes, 5 * num_bytes - 1):
        found, _ = twin_of(room_bytes=room_bytes, proofs=proofs)
        assert found.verdict() == {}
        assert found.fused_s() == math.inf
    assert not proofs
    assert twin_of(room_bytes=5 * num_bytes, proofs=proofs)[0].verdict()
    assert len(proofs) == 1
    assert twin_of(room_bytes=0, proofs=proofs)[0].verdict()  # known by now
    for room_bytes, fits in ((2 * num_bytes - 1, False), (2 * num_bytes, True)):  # four rows: no piece is smaller
        assert bool(twin_of(pieces=64, room_bytes=room_bytes)[0].verdict()) == fits


def test_what_may_be_another_kernel_is_proven_by_itself(kernels: Kernels) -> None:
    proofs: Proofs = {}
    source, ones = torch.randn(4, 6, 8, 8), torch.ones(6)
    legit, plain = torch.ops.aten._native_batch_norm_legit.default, torch.ops.aten.native_batch_norm.default
    last = source.contiguous(memory_format=torch.channels_last)
    calls: list[tuple[Any, Tensor, Tensor, Tensor | None]] = [
        (plain, source, ones, ones),
        (legit, source, ones, ones),
        (plain, last, ones, ones),
        (plain, torch.randn(2, 6, 8, 8), ones, ones),
        (plain, source.double(), ones.double(), ones.double()),
        (plain, source.bfloat16(), ones.bfloat16(), ones.bfloat16()),
        (plain, source.bfloat16(), ones, ones),
        (plain, source, ones, None),
    ]
    for _ in range(2):
        for func, given, weight, bias in calls:
            args = (given, weight, bias, torch.zeros_like(weight), torch.ones_like(weight), True, 0.1, 1e-5)
            room = {"piece_bytes": given.nbytes, "room_bytes": math.inf, "proofs": proofs, "on_refused": lambda: None}
            Twin(func, args, func(*args), **cast("Any", room))
    assert len(proofs) == len(calls)


def test_all_norms_of_a_step_share_what_was_proven(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Proofs] = []

    def make(*args: Any, **more: Any) -> Twin:
        given.append(more["proofs"])
        return Twin(*args, **more)

    monkeypatch.setattr(record, "Twin", make)
    compare(Block)
    assert len(given) > 1
    assert all(proofs is given[0] for proofs in given)
    assert len(given[0]) == 1


def test_a_proof_that_could_not_be_fused_fuses_nobody(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose own result could be, and was the same: with ones and zeros."""

    def normalise_again(func: Any, args: Any, mean: Tensor, deviation: Tensor, rows: slice, **more: bool) -> Any:
        is_drawn = bool((args[1] != 1).any())
        return None if more and is_drawn else kernels.normalise_again(func, args, mean, deviation, rows, **more)

    monkeypatch.setattr(twin, "normalise_again", normalise_again)
    proofs: Proofs = {}
    for _ in range(2):
        found, _ = twin_of(proofs=proofs)
        assert found.verdict()
        assert found.fused_s() == math.inf


def test_what_cannot_be_normalised_again_is_no_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "normalise_again", lambda *args, **more: None)
    found, refused = twin_of()
    assert found.verdict() == {}
    assert not refused


def test_cudnn_multiplies_in_its_own_order_where_channels_lie_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "normalise", lambda source, numbers, **how: how)
    monkeypatch.setattr(torch, "batch_norm_elemt", lambda *args: "PyTorch's own")
    source, ones = torch.ones(4, 6, 8, 8), torch.ones(6)
    last = source.contiguous(memory_format=torch.channels_last)
    cudnn, plain = torch.ops.aten.cudnn_batch_norm.default, torch.ops.aten.native_batch_norm.default
    for func, given, folded in ((cudnn, last, True), (cudnn, source, False), (plain, last, False)):
        args = (given, ones, ones, None, None, True, 0.1, 1e-5)
        found: list[Any] = [replay.normalise_again(func, args, ones, ones, rectified=also) for also in (False, True)]
        alone = {"folded": True, "rectified": False} if folded else "PyTorch's own"
        assert found == [alone, {"folded": folded, "rectified": True}]


def test_drawn_weights_change_nothing_else(kernels: Kernels) -> None:
    torch.manual_seed(3)
    kept = torch.ones(6), torch.zeros(6)
    args: Any = (torch.randn(4, 6, 8, 8), *kept, torch.zeros(6), torch.ones(6), True, 0.1, 1e-5)
    before = torch.get_rng_state()
    func = torch.ops.aten.native_batch_norm.default
    _, mean, deviation = func(*args[:3], None, None, *args[5:])
    drawn = twin._with_drawn_weights(func, args, mean, deviation)
    func(*drawn)
    assert torch.equal(torch.get_rng_state(), before)
    for index, value in ((1, 1.0), (2, 0.0), (3, 0.0), (4, 1.0)):
        assert drawn[index] is not args[index]
        assert set(args[index].tolist()) == {value}
    assert len({*drawn[1].tolist(), *drawn[2].tolist()}) == 12
    bare = (args[0], None, None, *args[3:])
    assert twin._with_drawn_weights(func, bare, mean, deviation)[1:3] == [None, None]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [0, 1, 2])
def test_rounding_to_half_precision_hides_no_other_order(
    monkeypatch: pytest.MonkeyPatch, layout: torch.memory_format, dtype: torch.dtype, order: int
) -> None:
    """A thousand numbers: of these 16 bits show another order in one of ten thousand, and later steps in others."""

    def normalised(args: Any, mean: Tensor, deviation: Tensor, rows: slice, order: int) -> Tensor:
        weight, bias, mean, deviation = (one[:, None, None] for one in (*args[1:3], mean, deviation))
        shifted = args[0][rows].float() - mean
        orders = (weight * shifted, deviation), (shifted, weight * deviation), (shifted * deviation, weight)
        one, other = (part.double() for part in orders[order])
        out: Tensor = (one * other + bias).float().to(dtype)  # a fused multiply-add, as on a GPU
        return out

    def op(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        wide = args[0].float()
        mean, deviation = wide.mean((0, 2, 3)), wide.var((0, 2, 3)).add(1e-5).rsqrt()
        return normalised(args, mean, deviation, slice(None), 0), mean, deviation

    def normalise_again(func: Any, args: Any, mean: Tensor, deviation: Tensor, rows: slice, **more: bool) -> Any:
        return None if more else normalised(args, mean, deviation, rows, order)

    monkeypatch.setattr(twin, "normalise_again", normalise_again)
    monkeypatch.setattr(twin, "signature_of", lambda func: signature_of(torch.ops.aten.native_batch_norm.default))
    called: Any = op
    for seed in range(32):
        torch.manual_seed(seed)
        source = (2 * torch.randn(4, 4, 8, 8) + 0.3).to(dtype).contiguous(memory_format=layout)
        args = (source, torch.ones(4), torch.zeros(4), None, None, True, 0.1, 1e-5)
        found = Twin(
            called,
            args,
            op(*args),
            piece_bytes=source.nbytes // 2,
            room_bytes=math.inf,
            proofs={},
            on_refused=lambda: None,
        )
        assert bool(found.verdict()) == (order == 0)


def test_what_is_done_along_costs_nothing_and_is_not_expected_of_other_steps(kernels: Kernels) -> None:
    kernels.longer_s = 1e-9
    model = net()
    with recomputed(model) as ooc:
        train(model, loss_of, ooc, num_steps=2)
        trace = ooc.trace
        assert trace is not None
        assert {op.rerun_s for op in trace.ops if op.along} == {0.0}
        assert {op.twin_s for op in trace.ops if op.twin} == {1.0, 1.0 + 1e-9}  # before a sum, before a rectifier
        assert Trace.from_json(trace.to_json()).ops == trace.ops
        ooc.expect(trace)
        assert ooc._expected is not None
        assert not any(op.along or op.twin for op in ooc._expected.ops)


class Sparse(Block):
    """Rectifies what has no storage."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.eye(8).to_sparse()
        torch.relu_(wide)
        out: Tensor = torch.sparse.mm(wide, self.first(x).reshape(8, -1)).reshape(x.shape)
        return out


class FirstOfAll(Block):
    """Sums and norms of what was there before the step."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.relu(self.norm.bias + self.norm.weight)
        out: Tensor = self.first(x) * kept.sum()
        return out


@pytest.mark.parametrize("kind", [Sparse, FirstOfAll])
def test_what_is_no_value_of_the_step_is_left_alone(kernels: Kernels, kind: type[nn.Module]) -> None:
    assert compare(kind) == set()


def test_a_step_that_adds_a_number_in_place_of_a_tensor(kernels: Kernels) -> None:
    class Adds(Block):
        other: Any = None

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(torch.relu_(self.second(x).add_(x if self.other is None else self.other)))
            return out

    def step(model: nn.Module, number: int) -> Tensor:
        for block in model.children():
            if isinstance(block, Adds):
                block.other = 1.5 if number == 3 else None
        return loss_of(model, number)

    assert compare(Adds, step, 6) == {"aten.add_.Tensor"}


def test_a_step_that_does_not_rectify_leaves_the_plan(kernels: Kernels) -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        for block in model.children():
            if isinstance(block, Fickle):
                block.rectifies = number != 4
        return loss_of(model, number)

    assert compare(Fickle, step, 7) == {"aten.native_batch_norm.default"}


@pytest.mark.parametrize(
    ("source", "matrix"),
    [
        (torch.ones(5, 3, 4, 2), (15, 8, False)),
        (torch.ones(5, 3, 4, 2).to(memory_format=torch.channels_last), (40, 3, True)),
        (torch.ones(5, 3, 2, 4, 2).to(memory_format=torch.channels_last_3d), (80, 3, True)),
        (torch.ones(5, 3), (5, 3, True)),
        (torch.ones(5, 3, 7), (15, 7, False)),
        (torch.ones(5, 6, 4, 2)[:, ::2], None),
        (torch.ones(5, 3, 7).transpose(0, 2), None),
    ],
    ids=["images", "channels last", "clips", "rows", "sequences", "gaps", "turned"],
)
def test_tensors_are_matrices_in_the_order_in_which_they_lie(
    source: Tensor, matrix: tuple[int, int, bool] | None
) -> None:
    assert fused._as_matrix(source) == matrix
    assert fused.lie_alike(source, source.clone()) == (matrix is not None)


def test_only_tensors_that_lie_alike_are_added() -> None:
    one = torch.ones(4, 3, 2, 2)
    others = (1.0, one.double(), one[:1], one.to(memory_format=torch.channels_last), one[:1].expand(4, 3, 2, 2))
    assert not any(fused.lie_alike(one, other) for other in others)
    assert not fused.lie_alike(one[:0], one[:0])


def test_nothing_is_fused_on_a_cpu() -> None:
    assert compare(Block) == set()
    assert not fused.is_ready(torch.device("cpu"), torch.float32)
    assert not fused.can_add(torch.ones(3), torch.ones(3))


def called(call: Any, *args: Any, read: list[Cell]) -> Recipe:
    """The recipe of an in-place call on what the cells hold, and the next version of the first of them."""
    recipe = capture(0, call, args, {}, lambda tensor: read.pop(0))
    cell = Cell(2, args[0], overwritten=True)
    cell.recipe = recipe
    recipe.overwrote.append(weakref.ref(cell))
    read.append(cell)
    return recipe


def sum_and_relu(call: Any, summed: Tensor, rectified: Tensor) -> tuple[Recipe, Recipe, list[Cell]]:
    other = torch.ones_like(summed)
    cells = [Cell(0, summed), Cell(1, other)]
    for cell, tensor in zip(cells, (summed, other)):
        cell.hold(tensor)
    made: list[Cell] = cells.copy()
    maker = called(call, summed, other, read=made)
    recipe = called(torch.ops.aten.relu_.default, rectified, read=made)
    recipe.go_along([])
    return maker, recipe, [*cells, *made]


ADD = torch.ops.aten.add_.Tensor


@pytest.mark.parametrize(
    ("call", "summed", "rectified", "goes"),
    [
        (ADD, slice(None), slice(None), True),
        (ADD, slice(0, 2), slice(0, 2), True),
        (ADD, slice(None), slice(0, 2), False),
        (ADD, slice(0, 2), slice(2, 4), False),
        (torch.ops.aten.mul_.Tensor, slice(None), slice(None), False),
    ],
    ids=["all of it", "the same part", "a part", "another part", "no sum"],
)
def test_only_the_same_tensor_goes_along(call: Any, summed: slice, rectified: slice, goes: bool) -> None:
    data = torch.randn(4, 3)
    maker, recipe, _ = sum_and_relu(call, data[summed], data[rectified])
    assert (recipe.along is maker) == maker.rectifies == goes


@pytest.mark.parametrize(
    ("part", "made", "goes"),
    [
        (slice(None), torch.ones(4, 3), True),
        (slice(0, 2), torch.ones(2, 3), False),
        (slice(None), torch.ones(3, 4).T, False),
        (slice(None), torch.ones(5, 3)[1:], False),
    ],
    ids=["alike", "all of a smaller storage", "other strides", "begins elsewhere"],
)
def test_a_result_of_its_own_must_lie_alike(part: slice, made: Tensor, goes: bool) -> None:
    data = torch.randn(4, 3)[part]
    maker, recipe, _ = sum_and_relu(ADD, data, data)
    maker.rectifies, recipe.along = False, None
    recipe.go_along([made])
    assert (recipe.along is maker) == maker.rectifies == goes


def test_the_same_bytes_as_other_numbers_are_not_alike() -> None:
    data = torch.ones(4, 3)
    assert View(data).is_like(View(data.clone()))
    assert not View(data).is_like(View(data.view(torch.int32)))


def test_a_kernel_that_fails_the_second_time_is_noticed(kernels: Kernels) -> None:
    data = torch.tensor([1.0, -5.0])
    maker, recipe, cells = sum_and_relu(ADD, data, data)
    for is_gone, along in ((False, True), (True, False)):
        kernels.is_gone = is_gone
        (made,) = maker.run()[1]
        assert maker.has_rectified == along
        summed = recipe.reads[0]
        summed.data = made.view(data.dtype)
        summed.held = 0, 0
        assert recipe.run(in_place=True)[1][0].view(data.dtype).tolist() == [2.0, 0.0]
        assert summed.data is None
    assert kernels.done == {IN_A_SUM: 1}
    assert len(cells) == 3
