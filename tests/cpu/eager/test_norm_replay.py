"""A cheaper op in place of batch normalisation: compared on all of its result, and with weights drawn for it."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from outcore.eager import fused_replay as fused
from outcore.eager import norm_replay, recorded_ops, replay
from outcore.eager.norm_replay import NormReplay, Proofs
from outcore.eager.signatures import signature_of
from tests.cpu.blocks import Block
from tests.cpu.eager.test_fused import NORM_RELU, Kernels, compare, kernels, loss_of, recomputed
from tests.cpu.training import train

__all__ = ["kernels"]  # the fixture


def norm_replay_of(
    *, pieces: int = 1, free_bytes: float = math.inf, proofs: Proofs | None = None, num_made: int = 3
) -> tuple[NormReplay, list[bool]]:
    source = torch.randn(4, 6, 8, 8)
    refused: list[bool] = []
    args = (source, torch.ones(6), torch.zeros(6), torch.zeros(6), torch.ones(6), True, 0.1, 1e-5)
    made = NormReplay(
        torch.ops.aten.native_batch_norm.default,
        args,
        torch.native_batch_norm(*args)[:num_made],
        piece_bytes=source.nbytes // pieces,
        free_bytes=free_bytes,
        proofs={} if proofs is None else proofs,
        on_refused=lambda: refused.append(True),
    )
    return made, refused


def test_a_piece_that_cannot_be_compared_is_not_fused(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four images in pieces of one, of which the last does not fit any more; there is a norm replay all the same."""

    def normalise_again(func: Any, args: Any, mean: Tensor, deviation: Tensor, rows: slice, **more: Any) -> Any:
        if more and rows.start == 3:
            raise torch.OutOfMemoryError
        return kernels.normalise_again(func, args, mean, deviation, rows, **more)

    monkeypatch.setattr(norm_replay, "normalise_again", normalise_again)
    found, refused = norm_replay_of(pieces=4)
    assert found.seconds() == 1.0
    assert found.fused_s() == math.inf
    assert refused == [True]
    assert norm_replay_of()[0].fused_s() == 1.0


def test_a_norm_that_saves_no_statistics_has_no_norm_replay(kernels: Kernels) -> None:
    found, refused = norm_replay_of(num_made=2)
    assert found.seconds() is None
    assert found.fused_s() == math.inf
    assert not refused


def test_weights_are_drawn_once_and_only_where_there_is_room(kernels: Kernels) -> None:
    num_bytes = 4 * 6 * 8 * 8 * 4
    proofs: Proofs = {}
    for free_bytes in (num_bytes, 5 * num_bytes - 1):
        found, _ = norm_replay_of(free_bytes=free_bytes, proofs=proofs)
        assert found.seconds() is None
        assert found.fused_s() == math.inf
    assert not proofs
    assert norm_replay_of(free_bytes=5 * num_bytes, proofs=proofs)[0].seconds() is not None
    assert len(proofs) == 1
    assert norm_replay_of(free_bytes=0, proofs=proofs)[0].seconds() is not None  # known by now
    for free_bytes, fits in ((2 * num_bytes - 1, False), (2 * num_bytes, True)):  # four rows: no piece is smaller
        assert (norm_replay_of(pieces=64, free_bytes=free_bytes)[0].seconds() is not None) == fits


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
            room = {"piece_bytes": given.nbytes, "free_bytes": math.inf, "proofs": proofs, "on_refused": lambda: None}
            NormReplay(func, args, func(*args), **cast("Any", room))
    assert len(proofs) == len(calls)


def test_all_norms_of_a_step_share_what_was_proven(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Proofs] = []

    def make(*args: Any, **more: Any) -> NormReplay:
        given.append(more["proofs"])
        return NormReplay(*args, **more)

    monkeypatch.setattr(recorded_ops, "NormReplay", make)
    compare(Block)
    assert len(given) > 1
    assert all(proofs is given[0] for proofs in given)
    assert len(given[0]) == 1


def test_a_proof_that_could_not_be_fused_fuses_nobody(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose own result could be, and was the same: with ones and zeros."""

    def normalise_again(func: Any, args: Any, mean: Tensor, deviation: Tensor, rows: slice, **more: Any) -> Any:
        is_drawn = bool((args[1] != 1).any())
        return None if more and is_drawn else kernels.normalise_again(func, args, mean, deviation, rows, **more)

    monkeypatch.setattr(norm_replay, "normalise_again", normalise_again)
    proofs: Proofs = {}
    for _ in range(2):
        found, _ = norm_replay_of(proofs=proofs)
        assert found.seconds() is not None
        assert found.fused_s() == math.inf


def test_what_cannot_be_normalised_again_has_no_norm_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_replay, "normalise_again", lambda *args, **more: None)
    found, refused = norm_replay_of()
    assert found.seconds() is None
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
        alone = {"folded": True, "plus": None, "rectified": False} if folded else "PyTorch's own"
        assert found == [alone, {"folded": folded, "plus": None, "rectified": True}]


def test_drawn_weights_change_nothing_else(kernels: Kernels) -> None:
    torch.manual_seed(3)
    kept = torch.ones(6), torch.zeros(6)
    args: Any = (torch.randn(4, 6, 8, 8), *kept, torch.zeros(6), torch.ones(6), True, 0.1, 1e-5)
    before = torch.get_rng_state()
    func = torch.ops.aten.native_batch_norm.default
    _, mean, deviation = func(*args[:3], None, None, *args[5:])
    drawn = norm_replay._with_drawn_weights(func, args, mean, deviation)
    func(*drawn)
    assert torch.equal(torch.get_rng_state(), before)
    for index, value in ((1, 1.0), (2, 0.0), (3, 0.0), (4, 1.0)):
        assert drawn[index] is not args[index]
        assert set(args[index].tolist()) == {value}
    assert len({*drawn[1].tolist(), *drawn[2].tolist()}) == 12
    bare = (args[0], None, None, *args[3:])
    assert norm_replay._with_drawn_weights(func, bare, mean, deviation)[1:3] == [None, None]


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

    def normalise_again(func: Any, args: Any, mean: Tensor, deviation: Tensor, rows: slice, **more: Any) -> Any:
        return None if more else normalised(args, mean, deviation, rows, order)

    monkeypatch.setattr(norm_replay, "normalise_again", normalise_again)
    monkeypatch.setattr(
        norm_replay, "signature_of", lambda func: signature_of(torch.ops.aten.native_batch_norm.default)
    )
    called: Any = op
    for seed in range(32):
        torch.manual_seed(seed)
        source = (2 * torch.randn(4, 4, 8, 8) + 0.3).to(dtype).contiguous(memory_format=layout)
        args = (source, torch.ones(4), torch.zeros(4), None, None, True, 0.1, 1e-5)
        found = NormReplay(
            called,
            args,
            op(*args),
            piece_bytes=source.nbytes // 2,
            free_bytes=math.inf,
            proofs={},
            on_refused=lambda: None,
        )
        assert (found.seconds() is not None) == (order == 0)


def test_statistics_that_a_pass_starts_from_are_kept_however_wide(kernels: Kernels) -> None:
    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 1100, 1), nn.BatchNorm2d(1100), nn.ReLU(), nn.Conv2d(1100, 2, 1))

    wanted, model = train(wide(), loss_of), wide()
    with recomputed(model) as ooc:
        train(model, loss_of, ooc, num_steps=5).assert_same(wanted)
        kernels.done.clear()
        train(model, loss_of, ooc, num_steps=1)
        assert kernels.done == {NORM_RELU: 1}
