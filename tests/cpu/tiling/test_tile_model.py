"""`outcore.tile`: a model's large layers with weights on the host, and back; what moves, and what never does."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.errors import TilingError
from outcore.tiling.embedding import TiledEmbedding
from outcore.tiling.linear import TiledLinear

VOCABULARY, WIDTH = 96, 24


class Model(nn.Module):
    """An embedding tied to the output layer, a wide layer, a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))
        self.small = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.small(x + self.wide(x))
        out: Tensor = self.head(x)
        return out


def model_of(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def tiled(model: nn.Module) -> Any:
    return outcore.tile(model, memory="16KB", larger_than="4KB", devices=["cpu"])


TOKENS = torch.randint(0, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, num_steps: int = 6) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_large_layers_are_replaced_and_the_training_is_the_same() -> None:
    plain, model = model_of(), tiled(model_of())
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(TiledLinear) == 3
    assert kinds.count(TiledEmbedding) == 1
    assert kinds.count(nn.Linear) == 1
    assert model.head.weight is model.embedding.weight
    assert train(model) == pytest.approx(train(plain), rel=1e-4)


def test_back_again_it_is_torchs_own_with_the_same_parameters() -> None:
    model = model_of()
    names = [(name, id(parameter)) for name, parameter in model.named_parameters()]
    before = [str(module) for module in model.modules()]
    model.wide[0].register_forward_hook(lambda module, given, out: 2 * out)
    model.small.eval()
    expected = model(TOKENS)
    tiled(model)
    assert isinstance(model.wide[0], TiledLinear)
    torch.testing.assert_close(model(TOKENS), expected)  # hooks go with the layer
    outcore.untile(model)
    assert [str(module) for module in model.modules()] == before
    assert [(name, id(parameter)) for name, parameter in model.named_parameters()] == names
    assert not model.small.training
    assert torch.equal(model(TOKENS), expected)


def test_an_optimizer_made_before_goes_on() -> None:
    plain, model = model_of(), model_of()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (plain, model)]
    tiled(model)
    for _ in range(3):
        for one, optimizer in zip((plain, model), optimizers):
            optimizer.zero_grad()
            one(TOKENS).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs)


MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to": lambda model: model.to("meta"),
    "to type and device": lambda model: model.to("meta", torch.float64),
    "to like": lambda model: model.to(torch.empty(0, device="meta", dtype=torch.float32)),
    "to_empty": lambda model: model.to_empty(device="meta"),
}


@pytest.mark.parametrize("name", MOVES)
def test_moving_the_model_leaves_large_weights_on_the_host(name: str) -> None:
    """ "meta" stands for a device: whatever arrives there was copied."""
    model = tiled(model_of())
    weight = model.embedding.weight
    numbers = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    MOVES[name](model)
    dtype = torch.float64 if "type" in name else torch.float32
    for module in (model.embedding, model.wide[0], model.wide[2], model.head):
        assert module.weight.device.type == "cpu"
        assert module.weight.dtype == dtype
    assert model.embedding.weight is weight
    assert torch.equal(weight.detach(), numbers.to(dtype))
    assert weight.grad is not None
    assert weight.grad.device.type == "cpu"
    assert weight.grad.dtype == dtype
    assert model.small.weight.device.type == "meta"
    assert model.wide[0].bias.device.type == "meta"


class Copied(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest number of elements that any op makes on another device."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device.type != "cpu":
            self.largest = max(self.largest, out.numel())
        return out


def test_a_weight_that_exceeds_the_device_is_not_even_tried_there() -> None:
    model = tiled(model_of())
    small = max(parameter.numel() for parameter in (*model.small.parameters(), model.wide[0].bias))
    with Copied() as copied:  # type: ignore[no-untyped-call]
        model.to("meta")
    assert 0 < copied.largest <= small


def test_types_change_with_the_model() -> None:
    model = tiled(model_of())
    assert model.half().embedding.weight.dtype == model.small.weight.dtype == torch.float16
    assert model.double().head.weight.dtype == torch.float64
    out = model(TOKENS)
    assert out.dtype == torch.float64
    assert model.bfloat16()(TOKENS).dtype == torch.bfloat16


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_takes_its_type_and_gradients_come_back_in_the_weights(cache: bool) -> None:
    plain, model = model_of(), tiled(model_of())
    grads = []
    for one in (plain, model):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            out = one(TOKENS)
            assert out.dtype == torch.bfloat16
            loss = nn.functional.cross_entropy(out.flatten(0, 1).float(), TOKENS.flatten())
        loss.backward()
        grads.append([parameter.grad for parameter in one.parameters() if parameter.grad is not None])
        assert len(grads[-1]) == len(list(one.parameters()))
        assert all(grad.dtype == torch.float32 for grad in grads[-1])
    for theirs, ours in zip(*grads):
        assert (ours - theirs).norm() < 0.03 * theirs.norm()  # both are rounded to eight bits


def test_autocast_sees_a_weight_that_changed() -> None:
    layer = TiledLinear(48, 72, bias=False, memory="6KB", devices=["cpu"])
    x = torch.randn(5, 48)
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        assert torch.equal(layer(x), before)
        with torch.no_grad():
            layer.weight.mul_(2)
        torch.testing.assert_close(layer(x), 2 * before)


def test_a_second_derivative_is_refused_where_plain_layers_hide_that_a_part_is_missing() -> None:
    """A gradient penalty: the graph of the small layer alone would give it a gradient, a wrong one."""
    plain = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 512))
    model: Any = outcore.tile(copy.deepcopy(plain), memory="16KB", larger_than="1KB", devices=["cpu"])
    assert [type(layer) for layer in (model[0], model[2])] == [nn.Linear, TiledLinear]
    x = torch.randn(3, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)  # the first derivative is there
    torch.testing.assert_close(slope, torch.autograd.grad(plain(x).square().sum(), x)[0])
    with pytest.raises(TilingError, match="a second derivative of a TiledLinear was asked for"):
        slope.square().sum().backward()


def test_the_rest_of_the_step_runs_in_a_budget_with_the_same_bits() -> None:
    """Weights of tiled layers, and `outcore.limit` for what the step saves."""

    def trained(memory: str | None) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        sizes = (64, 128, 512, 128, 64)
        model = nn.Sequential(*(part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.GELU())))
        outcore.tile(model, memory="200KB", larger_than="200KB", devices=["cpu"])
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        limited = outcore.limit(model, memory) if memory else None
        for seed in range(4):
            x = torch.randn(256, 64, generator=torch.Generator().manual_seed(seed))
            with limited.step() if limited else nullcontext():
                loss = model(x).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if limited:
            assert limited.stats()["planned"] > 0
            limited.close()
        return losses, list(model.parameters())

    (plain, weights), (ours, theirs) = trained(None), trained("3MiB")
    assert ours == plain
    assert all(torch.equal(*pair) for pair in zip(weights, theirs))


def test_state_goes_from_one_form_to_the_other() -> None:
    plain, model = model_of(1), tiled(model_of(2))
    assert list(plain.state_dict()) == list(model.state_dict())
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(TOKENS), plain(TOKENS))
    other = model_of(3)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(TOKENS), plain(TOKENS))
    memory = io.BytesIO()
    torch.save(model.state_dict(), memory)
    memory.seek(0)
    assigned = tiled(model_of(4))
    assigned.load_state_dict(torch.load(memory), assign=True)
    torch.testing.assert_close(assigned(TOKENS), plain(TOKENS))
    torch.testing.assert_close(copy.deepcopy(model)(TOKENS), plain(TOKENS))


def test_a_model_made_without_memory_gets_it_on_the_host() -> None:
    with torch.device("meta"):
        model = tiled(Model())
    assert model.embedding.weight.is_meta
    model.to_empty(device="cpu")
    model.load_state_dict(model_of().state_dict())
    torch.testing.assert_close(model(TOKENS), model_of()(TOKENS))
    with torch.device("meta"):
        unmoved = tiled(Model())
    with pytest.raises(TilingError, match="the weight of a TiledEmbedding is on meta"):
        unmoved(TOKENS)


def test_embeddings_are_torchs_bit_for_bit() -> None:
    tried: list[dict[str, Any]] = [
        {},
        {"padding_idx": 2},
        {"max_norm": 0.5},
        {"scale_grad_by_freq": True},
        {"sparse": True},
    ]
    for options in tried:
        torch.manual_seed(0)
        plain = nn.Embedding(VOCABULARY, WIDTH, **options)
        torch.manual_seed(0)
        layer = TiledEmbedding(VOCABULARY, WIDTH, **options)
        for one in (plain, layer):
            one(TOKENS).square().sum().backward()
        assert torch.equal(layer(TOKENS), plain(TOKENS))
        assert layer.weight.grad is not None
        assert plain.weight.grad is not None
        assert layer.weight.grad.is_sparse == plain.weight.grad.is_sparse
        assert torch.equal(layer.weight.grad.to_dense(), plain.weight.grad.to_dense())
    with pytest.raises(TilingError, match=r"convert them with \.long\(\)"):
        layer(torch.ones(3))


def test_only_the_layers_themselves_are_replaced() -> None:
    """An attention layer uses the weight of its output layer in its own way: that one is a subclass."""
    attention = nn.MultiheadAttention(WIDTH, 2)
    with pytest.raises(TilingError, match="no Linear or Embedding layer of this model has a weight of more than"):
        outcore.tile(attention, memory="1KB", larger_than=0)
    assert isinstance(outcore.tile(nn.Linear(8, 8), memory="1KB", larger_than=0), TiledLinear)
    with pytest.raises(TilingError, match="lower larger_than"):
        outcore.tile(model_of(), memory="1GiB")


def test_one_layer_under_two_names_stays_one() -> None:
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"first": shared, "again": shared})
    outcore.tile(model, memory="1KB", larger_than=0)
    assert model["first"] is model["again"]
    assert isinstance(model["first"], TiledLinear)


def test_an_encoder_layer_evaluates_without_its_fast_path() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 96, batch_first=True).eval()
    x = torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        expected = layer(x)
        before = layer.activation_relu_or_gelu
        tiled(layer)
        torch.testing.assert_close(layer(x), expected)
        assert not layer.activation_relu_or_gelu
        outcore.untile(layer)
        assert layer.activation_relu_or_gelu == before
