"""On CUDA: kernels that do several ops in one pass give PyTorch's bits, and a training that uses them its numbers."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from outcore.eager import fused_replay as fused
from outcore.eager.cells import View
from outcore.eager.replay import normalise_again
from outcore.limit import limit
from outcore.values import Trace
from tests.cpu.blocks import Block, NotInPlace, RootMeanSquare
from tests.cpu.eager.test_fused import MUL_CAST, passes_of
from tests.cpu.training import train
from tests.cpu.zoo import Step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
]

CUDA = torch.device("cuda", 0)
LAYOUTS = {
    "plain": ((5, 64, 28, 28), torch.contiguous_format),
    "odd planes": ((5, 33, 7, 7), torch.contiguous_format),
    "large planes": ((2, 3, 112, 112), torch.contiguous_format),
    "channels last": ((5, 64, 28, 28), torch.channels_last),
    "odd channels last": ((3, 33, 9, 5), torch.channels_last),
    "clips": ((2, 16, 4, 14, 14), torch.contiguous_format),
    "clips, channels last": ((2, 16, 4, 14, 14), torch.channels_last_3d),
    "rows": ((300, 130), torch.contiguous_format),
    "sequences": ((7, 12, 50), torch.contiguous_format),
}


@pytest.fixture(autouse=True)
def _same_every_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def drawn(layout: str, dtype: torch.dtype) -> Tensor:
    shape, order = LAYOUTS[layout]
    return torch.randn(shape, device=CUDA).mul_(3).to(dtype).contiguous(memory_format=order)


@pytest.mark.parametrize("dtype", fused.TYPES, ids=str)
def test_triton_is_there_and_adds_alike(dtype: torch.dtype) -> None:
    assert fused.is_ready(CUDA, dtype)


@pytest.mark.parametrize("dtype", fused.TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_give_the_bits_of_two_ops(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source, other = drawn(layout, dtype), drawn(layout, dtype)
    num = source.shape[1]
    weight, bias, mean = (torch.randn(num, device=CUDA) for _ in range(3))
    deviation = torch.rand(num, device=CUDA) + 0.5
    args = (source, weight, bias, None, None, True, 0.1, 1e-5)
    for func in (torch.ops.aten.native_batch_norm.default, torch.ops.aten.cudnn_batch_norm.default):
        for rows in (slice(None), slice(1, 2)):
            wanted = normalise_again(func, args, mean, deviation, rows)
            got = normalise_again(func, args, mean, deviation, rows, rectified=True)
            assert wanted is not None
            assert got is not None
            assert got.stride() == wanted.stride()
            assert not bool(fused.differ(got, wanted.relu()))
            added = normalise_again(func, args, mean, deviation, rows, plus=other[rows], rectified=True)
            assert added is not None
            assert not bool(fused.differ(added, wanted.add_(other[rows]).relu_()))
    wanted = source.clone().add_(other).relu_()
    for in_place in (False, True):
        made = fused.add_relu(source, other, in_place=in_place)
        assert made is not None
        assert (made is source) == in_place
        assert made.stride() == wanted.stride()
        assert not bool(fused.differ(made, wanted))


@pytest.mark.parametrize("made", fused.TYPES, ids=str)
@pytest.mark.parametrize("types", list(itertools.combinations_with_replacement(fused.TYPES, 2)), ids=str)
def test_products_are_cast_with_the_bits_of_two_ops(types: tuple[torch.dtype, ...], made: torch.dtype) -> None:
    torch.manual_seed(0)
    if set(types) == {torch.float16, torch.bfloat16} and not fused.multiplies_alike(CUDA, types[0], types[1], made):
        pytest.skip("a pass that multiplies halves of both kinds is not made here: the kernel rounds otherwise")
    assert fused.multiplies_alike(CUDA, types[0], types[1], made)
    for shape in ((3, 5, 17), (4, 2048), (2, 3, 1500), (1, 1), (70000, 3)):
        others = (shape, shape[-1:], (*shape[:-1], 1), (1, *shape[1:]) if len(shape) == 2 else shape)
        for other_shape in others:
            one, other = (
                torch.randn(shape, device=CUDA).to(types[0]),
                torch.randn(other_shape, device=CUDA).to(types[1]),
            )
            for first, second in ((one, other), (other, one)):
                product = first * second
                wanted = product.to(made)
                got = fused.multiply(first, second, product.dtype, View(wanted))
                assert got is not None
                assert got.stride() == wanted.stride()
                assert not bool(fused.differ(got, wanted))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "last" in name])
def test_cudnn_is_followed_where_channels_lie_last(layout: str) -> None:
    """With weights that are no ones and zeros: these hide in what order it multiplies."""
    torch.manual_seed(0)
    source, func = drawn(layout, torch.float32), torch.ops.aten.cudnn_batch_norm.default
    num = source.shape[1]
    weight, bias = torch.randn(num, device=CUDA), torch.randn(num, device=CUDA)
    args = (source, weight, bias, torch.zeros(num, device=CUDA), torch.ones(num, device=CUDA), True, 0.1, 1e-5)
    wanted, mean, deviation, _ = func(*args)
    got = normalise_again(func, args, mean, deviation)
    assert got is not None
    assert got.stride() == wanted.stride()
    assert not bool(fused.differ(got, wanted))


def test_tensors_that_do_not_lie_alike_are_left_alone() -> None:
    source = torch.randn(4, 8, 6, 6, device=CUDA)
    kept = source.clone()
    last = source.contiguous(memory_format=torch.channels_last)
    wide = torch.ones(1, device=CUDA).expand_as(source)
    for one, other in ((source, last), (source[:, ::2], source[:, 1::2]), (source, wide), (source, 1.0)):
        assert fused.add_relu(one, other, in_place=True) is None
    assert torch.equal(source, kept)
    one = torch.ones(4, device=CUDA)
    assert fused.normalise(source[:, ::2], (one, one, one, one), folded=False, rectified=True) is None
    assert fused.normalise(source[:, :4].contiguous(), (None, None, one, one), folded=False, rectified=True) is None


def trained_alike(net: Callable[[], nn.Module], loss_of: Step) -> Trace:
    """Trains plain and with everything recomputed."""
    gc.collect()
    wanted, model = train(net(), loss_of), net()
    ooc = limit(model, "1GiB", planner="recompute-all")
    try:
        train(model, loss_of, ooc).assert_same(wanted)
        assert ooc.trace is not None
        return ooc.trace
    finally:
        ooc.close()


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [Block, NotInPlace])
def test_a_training_rectifies_in_one_pass_with_the_same_numbers(
    block: type[nn.Module], dtype: torch.dtype, order: torch.memory_format
) -> None:
    images = torch.randn(16, 3, 32, 32, device=CUDA)

    def net() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 6, 1), block(), block(), nn.Conv2d(6, 2, 1)).to(CUDA)
        return model.to(memory_format=order)  # type: ignore[call-overload, no-any-return]

    def loss_of(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype is torch.bfloat16):
            out: Tensor = model((images + step).contiguous(memory_format=order)).float().square().mean()
        return out

    trace = trained_alike(net, loss_of)
    # The sums at least, whatever is faster; norms but where cuDNN, for few numbers in a plane, has a third order.
    is_third = order is torch.contiguous_format and dtype is torch.float32
    assert sum(op.norm_replay for op in trace.ops) == (0 if is_third else 4)
    assert sum(bool(op.fused) for op in trace.ops) >= 2


def test_a_training_casts_products_with_the_same_numbers() -> None:
    x = torch.randn(64, 96, 8, device=CUDA)

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), RootMeanSquare(), RootMeanSquare(), nn.Linear(8, 2)).to(CUDA)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        out: Tensor = model(x + step).square().mean()
        return out

    assert passes_of(trained_alike(net, loss_of)) == {MUL_CAST: 2 * RootMeanSquare.num_casts}
