"""Several ops are rerun in one pass. The kernels are CUDA's; here others stand for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore.eager import captures, norm_replay, recorded_ops, replay
from outcore.eager import fused_replay as fused
from outcore.eager.norm_replay import NormReplay
from outcore.eager.replay import Saved
from outcore.eager.signatures import signature_of
from outcore.limit import Limited, limit
from outcore.values import Trace
from tests.cpu.blocks import (
    Block,
    CastElsewhere,
    Fickle,
    IntoTheOther,
    NotInPlace,
    OtherWayRound,
    PartOfANorm,
    PartOfASum,
    PlusOne,
    ReadTwice,
    ReadWhole,
    RootMeanSquare,
    Scaled,
    Sums,
    TwoNorms,
    Wide,
)
from tests.cpu.training import train
from tests.cpu.zoo import Step

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
NORM_RELU, NORM_ADD_RELU, ADD_RELU, MUL_CAST = "norm, relu", "norm, add, relu", "add, relu", "mul, cast"


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
        self.norm_replay_error = self.error = 0.0  # of a normalisation, and of one that rectifies
        self.hidden_norm_replay_error = self.hidden_error = 0.0  # which a new network does not show
        self.longer_s = 0.0  # than without rectifying
        self.adds_to_norms = self.multiplies = True

    def normalise_again(
        self,
        func: Any,
        args: Any,
        mean: Tensor,
        deviation: Tensor,
        rows: slice = slice(None),
        *,
        plus: Tensor | None = None,
        rectified: bool = False,
    ) -> Tensor | None:
        if (rectified and self.is_gone) or (plus is not None and not fused.lie_alike(args[0], plus)):
            return None
        scratch = torch.zeros_like(mean), torch.ones_like(mean)
        made, *statistics = torch.native_batch_norm(args[0], args[1], args[2], *scratch, True, 0.1, args[-1])
        assert all(torch.equal(*pair) for pair in zip(statistics, (mean, deviation), strict=True))
        out: Tensor = made[rows]
        hidden = (args[1] - 1)[None, :, None, None]  # by a weight of one
        out = out + self.norm_replay_error + hidden * self.hidden_norm_replay_error
        if rectified:
            self.done[NORM_RELU if plus is None else NORM_ADD_RELU] += 1
            out = out + self.error + hidden * self.hidden_error
            out = (out if plus is None else out + plus).relu_()
        return out

    def is_ready(self, device: torch.device, dtype: torch.dtype) -> bool:
        return True

    def adds_to_norms_alike(self, device: torch.device, dtype: torch.dtype, folded: bool) -> bool:
        return self.adds_to_norms

    def multiplies_alike(self, device: torch.device, *types: torch.dtype) -> bool:
        return self.multiplies

    def add_relu(self, one: Tensor, other: Any, *, in_place: bool) -> Tensor | None:
        if self.is_gone or not fused.can_add(one, other):
            return None
        self.done[ADD_RELU] += 1
        return (one if in_place else one.clone()).add_(other).relu_()

    def multiply_into(self, one: Tensor, other: Tensor, made: Tensor, between: torch.dtype) -> bool:
        if not self.is_gone:
            self.done[MUL_CAST] += 1
            assert (one * other).dtype is between
            made.copy_(one * other)
        return not self.is_gone


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels()
    for name in ("is_ready", "adds_to_norms_alike", "multiplies_alike", "add_relu", "multiply_into"):
        monkeypatch.setattr(fused, name, getattr(kernels, name))
    monkeypatch.setattr(
        NormReplay, "seconds_on", lambda one, clock: 1.0 if clock is one._clock else 1.0 + kernels.longer_s
    )
    monkeypatch.setattr(recorded_ops, "has_norm_replay", lambda func, args: bool(signature_of(func).scratch(args)))
    for room in (norm_replay, replay):
        monkeypatch.setattr(room, "normalise_again", kernels.normalise_again)
    return kernels


@contextmanager
def recomputed(model: nn.Module, *, measure: bool = False) -> Iterator[Limited]:
    ooc = limit(model, "1GiB", planner="recompute-all", measure=measure)
    try:
        yield ooc
    finally:
        ooc.close()


def compare(kind: type[nn.Module], step: Step = loss_of, num_steps: int = 5) -> Counter[str]:
    """Trains with and without; the passes there are, by the names of their ops."""
    wanted = train(net(kind), step, num_steps=num_steps)
    model = net(kind)
    with recomputed(model) as ooc:
        train(model, step, ooc, num_steps=num_steps).assert_same(wanted)
        assert ooc.trace is not None
        return passes_of(ooc.trace)


def passes_of(trace: Trace) -> Counter[str]:
    short = {"native_batch_norm": "norm", "relu_": "relu", "add_": "add", "_to_copy": "cast"}
    words = [op.name.split(".")[1] for op in trace.ops]
    words = [short.get(word, word) for word in words]
    ends = enumerate(op.fused for op in trace.ops)
    return Counter(", ".join(words[op] for op in (*before, index)) for index, before in ends if before)


def step_of(model: nn.Module, step: int) -> Tensor:
    """For blocks of sequences."""
    x = torch.linspace(-1, 1, 16 * 33 * 8).reshape(16, 33, 8) + 0.1 * step
    out: Tensor = model(x).square().mean()
    return out


def sequences(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), kind(), kind(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (Block, {NORM_RELU: 2, NORM_ADD_RELU: 2}),
        (NotInPlace, {NORM_RELU: 2, NORM_ADD_RELU: 2}),
        (OtherWayRound, {NORM_RELU: 2, NORM_ADD_RELU: 2}),
        (IntoTheOther, {NORM_RELU: 2, ADD_RELU: 2}),
        (TwoNorms, {NORM_ADD_RELU: 2}),
        (Sums, {ADD_RELU: 4}),
    ],
)
def test_norms_and_sums_are_rectified_in_one_pass_with_the_same_numbers(
    kernels: Kernels, kind: type[nn.Module], wanted: dict[str, int]
) -> None:
    assert compare(kind) == wanted
    for name, num in wanted.items():
        assert kernels.done[name] >= num * 3  # in each planned step


def test_products_are_cast_in_one_pass_with_the_same_numbers(kernels: Kernels) -> None:
    wanted, model = train(sequences(RootMeanSquare), step_of), sequences(RootMeanSquare)
    with recomputed(model) as ooc:
        train(model, step_of, ooc).assert_same(wanted)
        assert ooc.trace is not None
        assert passes_of(ooc.trace) == {MUL_CAST: 2 * RootMeanSquare.num_casts}
        kernels.done.clear()
        train(model, step_of, ooc, num_steps=1)
        assert kernels.done == {MUL_CAST: 2 * RootMeanSquare.num_casts}


@pytest.mark.parametrize("kind", [ReadWhole, CastElsewhere])
def test_other_products_are_left_alone(kernels: Kernels, kind: type[nn.Module]) -> None:
    wanted, model = train(sequences(kind), step_of), sequences(kind)
    with recomputed(model) as ooc:
        train(model, step_of, ooc).assert_same(wanted)
    assert not kernels.done


@pytest.mark.parametrize("kind", [Block, NotInPlace, OtherWayRound, IntoTheOther, TwoNorms, Sums])
def test_passes_need_the_memory_that_was_predicted(kernels: Kernels, kind: type[nn.Module]) -> None:
    model = net(kind)
    with recomputed(model, measure=True) as ooc:
        train(model, loss_of, ooc)
        assert ooc.timeline is not None
        assert ooc.predicted is not None
        assert ooc.timeline.peak_bytes == ooc.predicted.peak_bytes


class Branches(Block):
    """What it was made from outlives the backward of one of its two outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(self.first(x.expand(-1, 6, -1, -1)))
        return y.square().mean(), self.second(y)


def test_statistics_go_with_the_backward_that_used_them(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan counts on that, also where what was made of them stays."""
    found: list[Saved] = []

    class Seen(Saved):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__(tensor)
            found.append(self)

    monkeypatch.setattr(captures, "Saved", Seen)
    model = Branches()
    with recomputed(model) as ooc:
        for _ in range(4):
            found.clear()
            with ooc.step():
                loss, other = model(IMAGES[:, :1])
                assert all(one.find() is not None for one in found)
                loss.backward()
                assert all(one.find() is None for one in found)
                assert other.grad_fn is not None
        assert len(found) == 4
        assert kernels.done


def num_calls(op: str, step: Callable[[], object]) -> int:
    with torch.profiler.profile() as seen:
        step()
    return sum(event.count for event in seen.key_averages() if event.key == op)


@pytest.mark.parametrize(("kind", "op"), [(Block, "aten::clamp_min_"), (NotInPlace, "aten::clamp_min")])
def test_what_a_pass_does_is_not_done_again(kernels: Kernels, kind: type[nn.Module], op: str) -> None:
    model = net(kind)
    with recomputed(model) as ooc:
        train(model, loss_of, ooc, num_steps=4)
        kernels.done.clear()
        num_rectified = num_calls(op, lambda: train(model, loss_of, ooc, num_steps=1))
        assert kernels.done == {NORM_RELU: 2, NORM_ADD_RELU: 2}
        assert num_rectified == 4 + (4 if kind is Block else 0)  # the forward's, and the kernels' own


@pytest.mark.parametrize("kind", [PartOfANorm, PartOfASum, ReadTwice, Scaled, PlusOne, Wide])
def test_other_steps_are_left_alone(kernels: Kernels, kind: type[nn.Module]) -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        if number == 1:
            kernels.done.clear()  # what was compared while recording
        return loss_of(model, number)

    compare(kind, step)
    assert not kernels.done


@pytest.mark.parametrize("kind", [Block, NotInPlace, OtherWayRound, IntoTheOther, TwoNorms, Sums])
def test_where_kernels_fail_later_the_ops_themselves_run(kernels: Kernels, kind: type[nn.Module]) -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        kernels.is_gone = number > 2
        return loss_of(model, number)

    assert compare(kind, step)


def test_where_a_product_s_kernel_fails_later_the_ops_themselves_run(kernels: Kernels) -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        kernels.is_gone = number > 2
        return step_of(model, number)

    wanted, model = train(sequences(RootMeanSquare), step), sequences(RootMeanSquare)
    with recomputed(model) as ooc:
        train(model, step, ooc).assert_same(wanted)


def test_where_nothing_normalises_again_later_the_op_itself_runs(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        if number == 3:
            monkeypatch.setattr(replay, "normalise_again", lambda *args, **more: None)
        return loss_of(model, number)

    assert compare(Block, step)


@pytest.mark.parametrize(
    "wrong", ["error", "norm_replay_error", "hidden_error", "hidden_norm_replay_error", "longer_s"]
)
def test_other_bits_or_slower_kernels_are_never_fused(kernels: Kernels, wrong: str) -> None:
    setattr(kernels, wrong, 1000.0)
    assert compare(Block) == {ADD_RELU: 2}


def test_what_is_not_multiplied_or_added_alike_is_not_fused(kernels: Kernels) -> None:
    kernels.adds_to_norms = kernels.multiplies = False
    assert compare(Block) == {NORM_RELU: 2, ADD_RELU: 2}
    model = sequences(RootMeanSquare)
    with recomputed(model) as ooc:
        train(model, step_of, ooc, num_steps=2)
        assert ooc.trace is not None
        assert not passes_of(ooc.trace)


def test_no_memory_to_ask_whether_numbers_are_alike(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> bool:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(fused, "is_ready", refused)
    excused: list[bool] = []
    found = recorded_ops.Passes(torch.device("cpu"), lambda: excused.append(True))
    assert not found._asks(fused.is_ready, torch.device("cpu"), torch.float32)
    assert excused == [True]


def test_a_pass_has_its_own_seconds_and_is_not_expected_of_other_steps(kernels: Kernels) -> None:
    kernels.longer_s = 1e-9
    model = net()
    with recomputed(model) as ooc:
        train(model, loss_of, ooc, num_steps=2)
        trace = ooc.trace
        assert trace is not None
        passes = [op for op in trace.ops if op.fused]
        sums = {trace.ops[op.fused[-1]].seconds for op in passes if len(op.fused) == 2}
        assert {op.rerun_s for op in passes} == {1.0 + 1e-9, *sums}
        assert {op.norm_replay_s for op in trace.ops if op.norm_replay} == {1.0}
        assert Trace.from_json(trace.to_json()).ops == trace.ops
    with recomputed(model) as ooc:
        ooc.expect(trace)
        train(model, loss_of, ooc, num_steps=1)
        assert ooc.trace is not None
        assert ooc.trace.fingerprint == trace.fingerprint
        assert not any(op.fused or op.norm_replay for op in ooc.trace.ops)


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


def test_what_has_no_storage_is_left_alone(kernels: Kernels) -> None:
    assert not compare(Sparse)


def test_sums_of_what_was_there_before_the_step(kernels: Kernels) -> None:
    assert compare(FirstOfAll) == {ADD_RELU: 2}


def test_sums_into_what_was_there_before_the_step(kernels: Kernels) -> None:
    """What they wrote over is gone, and nothing brings it back."""

    class Remembers(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Buffer(torch.zeros(4, 6, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.first(x) * torch.relu(self.seen.add_(x.detach()))
            return out

    assert not compare(Remembers)


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

    assert compare(Adds, step, 6) == {ADD_RELU: 2}


def test_a_step_that_does_not_rectify_leaves_the_plan(kernels: Kernels) -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        for block in model.children():
            if isinstance(block, Fickle):
                block.rectifies = number != 4
        return loss_of(model, number)

    assert compare(Fickle, step, 7) == {NORM_RELU: 2}


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
    assert not compare(Block)
    assert not fused.is_ready(torch.device("cpu"), torch.float32)
    assert not fused.can_add(torch.ones(3), torch.ones(3))


def test_a_step_whose_tensors_lie_otherwise(kernels: Kernels) -> None:
    """As many numbers, and no kernel for how they lie."""

    def step(model: nn.Module, number: int) -> Tensor:
        kernels.done.clear()
        order = torch.channels_last if number == 3 else torch.contiguous_format
        out: Tensor = model((IMAGES + number).contiguous(memory_format=order)).square().mean()
        return out

    class Turned(Block):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last_norm(self.second(x).contiguous())
            out: Tensor = torch.relu(y + x)
            return out

    assert compare(Turned, step, 6) == {NORM_ADD_RELU: 2}


def test_a_step_that_rectifies_another_tensor_leaves_the_plan(kernels: Kernels) -> None:
    class Other(Block):
        is_other = False

        def forward(self, x: Tensor) -> Tensor:
            y, z = self.norm(self.first(x)), self.second(x) * 1.5
            out: Tensor = self.last_norm(torch.relu(z if self.is_other else y)) + z
            return out

    def step(model: nn.Module, number: int) -> Tensor:
        for block in model.children():
            if isinstance(block, Other):
                block.is_other = number == 3
        return loss_of(model, number)

    assert compare(Other, step, 7) == {NORM_RELU: 2}
