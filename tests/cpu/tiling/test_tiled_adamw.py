"""Whole training steps with tiled layers: weights updated during the backward, as torch's AdamW would have."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import TilingError
from outcore.tiling.adamw import TiledAdamW
from outcore.tiling.lanes import CpuLane
from outcore.tiling.linear import TiledLinear
from outcore.tiling.product import Job
from outcore.tiling.streams import ThreadStream
from outcore.tiling.update import Update
from tests.cpu.tiling.tiling_products import RATES, Failing

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1, "eps": 1e-6}
DATA, LABELS = torch.randn(40, 24, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 5


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 5))


def tiled(model: nn.Module, memory: str = "12KB") -> Any:
    return outcore.tile(model, memory=memory, larger_than=0, devices=["cpu"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 8, **autocast: Any) -> list[float]:
    losses = []
    for _ in range(num_steps):
        with torch.autocast("cpu", **autocast) if autocast else torch.enable_grad():
            loss = nn.functional.cross_entropy(model(DATA.to(next(model.parameters()).dtype)).float(), LABELS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_is_that_of_torchs_adamw() -> None:
    plain, model = network(), tiled(network())
    theirs = train(plain, torch.optim.AdamW(plain.parameters(), fused=True, **SETTINGS))
    ours = train(model, TiledAdamW(model, **SETTINGS))
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[-1] < ours[0] / 2
    for mine, other in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def test_bits_are_those_of_the_same_gradient_stepped_on_the_host() -> None:
    """The same tiles, stored and then used, or used at once."""
    stored, streamed = tiled(network()), tiled(network())
    first = torch.optim.AdamW(stored.parameters(), fused=True, **SETTINGS)
    second = TiledAdamW(streamed, **SETTINGS)
    for model, optimizer in ((stored, first), (streamed, second)):
        for layer in model.modules():
            if isinstance(layer, TiledLinear):
                layer.memory = "1MB"  # whole products, so that both are cut alike
        train(model, optimizer, 3)
    for mine, other in zip(streamed.parameters(), stored.parameters()):
        assert torch.equal(mine, other)
    state, others = second.state_dict(), first.state_dict()
    assert state["param_groups"] == others["param_groups"]
    for key, kept in others["state"].items():
        assert all(torch.equal(state["state"][key][name], tensor) for name, tensor in kept.items())


def test_no_gradient_is_kept_and_every_layer_says_what_it_moved() -> None:
    model = tiled(network())
    optimizer = TiledAdamW(model, **SETTINGS)
    model(DATA).square().mean().backward()
    assert [name for name, _ in model[2].reports] == ["forward", "backward input", "update"]
    assert [name for name, _ in model[0].reports] == ["forward", "update"]
    for layer in (model[0], model[2], model[4]):
        assert layer.weight.grad is None
        assert layer.bias.grad is not None
        report = layer.reports[-1][1]
        assert report.bytes_out == 3 * layer.weight.nbytes  # the weight and two averages
        assert report.bytes_in >= report.bytes_out
        assert report.device_bytes <= 12_000
        assert report.prediction.bytes_out == report.bytes_out
        assert report.prediction.bytes_in == report.bytes_in
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    plain, model = network().to(dtype), tiled(network()).to(dtype)
    theirs = train(plain, torch.optim.AdamW(plain.parameters(), fused=True, **SETTINGS), 4)
    ours = train(model, TiledAdamW(model, **SETTINGS), 4)
    assert ours == pytest.approx(theirs, rel=1e-6 if dtype == torch.float64 else 0.02)


def test_under_autocast_the_copy_that_products_use_is_written_with_the_weight() -> None:
    model = tiled(network())
    losses = train(model, TiledAdamW(model, **SETTINGS), dtype=torch.bfloat16)
    assert losses[-1] < losses[0] / 2
    layer = model[2]
    assert layer.weight.dtype == torch.float32
    (copied,) = layer.cast_copies()
    assert copied.dtype == torch.bfloat16
    assert torch.equal(copied, layer.weight.detach().bfloat16())
    assert layer.weight_as(torch.bfloat16) is copied  # nothing was converted again


def test_a_shared_weight_is_stepped_with_the_others() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.table(x))
            return out

    tokens, models = torch.arange(30), []
    for make in (torch.optim.AdamW, TiledAdamW):
        torch.manual_seed(0)
        model: Any = Tied() if make is torch.optim.AdamW else tiled(Tied())
        parts = model.parameters() if make is torch.optim.AdamW else model
        optimizer = make(parts, **SETTINGS)
        for _ in range(3):
            nn.functional.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    torch.testing.assert_close(models[1].table.weight, models[0].table.weight, rtol=1e-4, atol=1e-5)


def test_state_goes_to_torchs_adamw_and_back() -> None:
    model = tiled(network())
    optimizer = TiledAdamW(model, **SETTINGS)
    train(model, optimizer, 3)
    plain = network()
    plain.load_state_dict(model.state_dict())
    theirs = torch.optim.AdamW(plain.parameters(), fused=True, **SETTINGS)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, 3) == pytest.approx(train(plain, theirs, 3), rel=1e-4)


def test_a_scheduler_changes_the_rate_of_the_next_backward() -> None:
    model = tiled(network())
    optimizer = TiledAdamW(model, **SETTINGS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 1))
    train(model, optimizer, 1)
    scheduler.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, 1)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters()))  # a rate of zero


def test_what_it_cannot_do_is_refused() -> None:
    model = tiled(network())
    optimizer = TiledAdamW(model, **SETTINGS)
    model(DATA).square().mean().backward()
    with pytest.raises(TilingError, match=r"a second gradient before optimizer\.step\(\)"):
        model(DATA).square().mean().backward()
    with pytest.raises(TilingError, match="without a closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(TilingError, match="neither amsgrad nor maximize"):
        TiledAdamW(model, amsgrad=True)


def test_a_gradient_scaler_is_refused() -> None:
    """Scaled gradients would have updated the weights before the scaler looks whether they are finite."""
    model = tiled(network())
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**30), TiledAdamW(model, **SETTINGS)
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(DATA).float(), LABELS)
    scaler.scale(loss).backward()
    with pytest.raises(TilingError, match="gradients that a GradScaler scaled"):
        scaler.step(optimizer)


def test_without_its_optimizer_a_layer_keeps_gradients_again() -> None:
    model = tiled(network())
    optimizer = TiledAdamW(model, **SETTINGS)
    assert copy.deepcopy(model[0]).make_update(model[0]) is None  # a copy is nobody's
    del optimizer
    gc.collect()
    model(DATA).square().mean().backward()
    assert model[0].weight.grad is not None


def test_an_empty_batch_leaves_a_gradient_of_zero() -> None:
    model = tiled(network())
    TiledAdamW(model, **SETTINGS)
    before = model[0].weight.detach().clone()
    model[0](torch.zeros(0, 24)).sum().backward()
    assert torch.equal(model[0].weight, before)


def state_of(rows: int, cols: int) -> tuple[Update, list[torch.Tensor]]:
    tensors = [torch.randn(rows, cols) for _ in range(3)]

    def apply(gradient: torch.Tensor, tiles: Any) -> None:
        for number, tile in enumerate(tiles, 1):
            tile.add_(gradient, alpha=number)

    return Update(tuple(tensors), apply), tensors


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("slow", ["compute", "copy_in", "copy_out"])
def test_every_element_is_updated_once_however_late_copies_and_products_are(stages: bool, slow: str) -> None:
    streams = {slow: ThreadStream(slow, delay_s=2e-3)}
    lane = CpuLane(stages=stages, compute=streams.get("compute"), copy_in=streams.get("copy_in"))
    if slow == "copy_out":
        lane.copy_out = streams["copy_out"]
    a, b = torch.randn(60, 20), torch.randn(20, 50)
    update, tensors = state_of(60, 50)
    expected = [tensor + number * (a @ b) for number, tensor in enumerate(tensors, 1)]
    report = Job(a, b, memory="9KB", devices=[lane], rates=RATES, update=update).run()
    lane.close()
    assert report.lanes[0].num_pieces > 4
    for tensor, wanted in zip(tensors, expected):
        torch.testing.assert_close(tensor, wanted, rtol=1e-4, atol=1e-4)


def test_a_device_that_fails_leaves_a_weight_that_says_so_and_is_not_updated_twice() -> None:
    lanes = [CpuLane("fails", compute=Failing("fails", 3)), CpuLane("healthy")]
    a, b = torch.randn(60, 20), torch.randn(20, 50)
    update, tensors = state_of(60, 50)
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(TilingError, match="part of it is updated and part is not: load the last checkpoint"):
        Job(a, b, memory="9KB", devices=lanes, rates=RATES, update=update).run()
    for lane in lanes:
        lane.close()
    for number, (tensor, old) in enumerate(zip(tensors, before), 1):
        once = old + number * (a @ b)
        assert (torch.isclose(tensor, old, atol=1e-4) | torch.isclose(tensor, once, atol=1e-4)).all()


def test_what_is_updated_has_the_shape_of_the_product_and_lies_on_the_host() -> None:
    update, _ = state_of(8, 8)
    with pytest.raises(TilingError, match="contiguous host tensor of 8 x 9; one is 8x8 on cpu"):
        Job(torch.ones(8, 4), torch.ones(4, 9), devices=["cpu"], update=update)
    with pytest.raises(TilingError, match="without depth"):
        Job(torch.ones(8, 0), torch.ones(0, 8), devices=["cpu"], update=update)
