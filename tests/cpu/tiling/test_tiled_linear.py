from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import TilingError
from outcore.tiling import linear
from outcore.tiling.linear import TiledLinear
from outcore.tiling.product import Job, Report, run_side_by_side


def twins(bias: bool = True, memory: str = "6KB") -> tuple[TiledLinear, nn.Linear]:
    torch.manual_seed(1)
    tiled = TiledLinear(48, 72, bias, memory=memory, devices=["cpu"])
    torch.manual_seed(1)
    return tiled, nn.Linear(48, 72, bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48,), (5, 48), (2, 3, 48), (0, 48)])
def test_output_and_gradients_are_linears(bias: bool, shape: tuple[int, ...]) -> None:
    tiled, plain = twins(bias)
    assert torch.equal(tiled.weight, plain.weight)
    x = torch.randn(shape, requires_grad=True)
    x_plain = x.detach().clone().requires_grad_()
    weights = torch.randn(*shape[:-1], 72)
    (tiled(x) * weights).sum().backward()
    (plain(x_plain) * weights).sum().backward()
    torch.testing.assert_close(tiled(x), plain(x_plain))
    torch.testing.assert_close(x.grad, x_plain.grad)
    torch.testing.assert_close(tiled.weight.grad, plain.weight.grad)
    if tiled.bias is not None and plain.bias is not None:
        torch.testing.assert_close(tiled.bias.grad, plain.bias.grad)


def test_gradcheck() -> None:
    layer = TiledLinear(7, 5, dtype=torch.float64, memory=600, devices=["cpu"])
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: torch.nn.functional.gelu(layer(x)) * w.sum(), (x, layer.weight))


def test_training_equals_in_core_training_step_by_step() -> None:
    def network(layers: list[nn.Module]) -> nn.Sequential:
        return nn.Sequential(layers[0], nn.ReLU(), layers[1])

    torch.manual_seed(2)
    tiled = network([TiledLinear(20, 64, memory="4KB"), TiledLinear(64, 3, memory="2KB")])
    torch.manual_seed(2)
    plain = network([nn.Linear(20, 64), nn.Linear(64, 3)])
    data, labels = torch.randn(64, 20), torch.randint(0, 3, (64,))
    losses: list[list[float]] = [[], []]
    for record, model in zip(losses, (tiled, plain)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(20):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data), labels)
            loss.backward()
            optimizer.step()
            record.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0] / 2


@pytest.mark.parametrize(("memory", "num_pairs"), [("6KB", 1), ("20", 0)])
def test_the_backward_products_run_side_by_side_within_the_memory_of_one(
    memory: str, num_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device; where half of the memory holds not even one element of each matrix, one after the other."""
    pairs: list[tuple[Job, ...]] = []

    def run_noted(jobs: tuple[Job, Job]) -> list[Report]:
        pairs.append(jobs)
        return run_side_by_side(jobs)

    monkeypatch.setattr(linear, "on_one_device", lambda dy, x: True)
    monkeypatch.setattr(linear, "run_side_by_side", run_noted)
    tiled, plain = twins(memory=memory)
    shape = (5, 48) if num_pairs else (1, 48)
    x = torch.randn(shape, requires_grad=True)
    x_plain = x.detach().clone().requires_grad_()
    tiled(x).square().sum().backward()
    plain(x_plain).square().sum().backward()
    torch.testing.assert_close(x.grad, x_plain.grad)
    torch.testing.assert_close(tiled.weight.grad, plain.weight.grad)
    assert [name for name, _ in tiled.reports] == ["forward", "backward input", "backward weight"]
    assert len(pairs) == num_pairs
    if num_pairs:
        assert 0 < sum(report.device_bytes for _, report in tiled.reports[1:]) <= 6000


def test_gradients_accumulate_over_several_backwards() -> None:
    tiled, plain = twins()
    for _ in range(3):
        x = torch.randn(6, 48)
        tiled(x).square().sum().backward()
        plain(x).square().sum().backward()
    torch.testing.assert_close(tiled.weight.grad, plain.weight.grad)


def test_two_forwards_before_one_backward() -> None:
    tiled, plain = twins()
    x = torch.randn(6, 48)
    (tiled(x).sum() + tiled(2 * x).square().sum()).backward()
    (plain(x).sum() + plain(2 * x).square().sum()).backward()
    torch.testing.assert_close(tiled.weight.grad, plain.weight.grad)


def test_a_gradient_somebody_holds_is_not_overwritten() -> None:
    tiled, _ = twins()
    tiled(torch.randn(6, 48)).sum().backward()
    held = tiled.weight.grad
    assert held is not None
    before = held.clone()
    tiled.weight.grad = None
    tiled(torch.randn(6, 48)).sum().backward()
    assert torch.equal(held, before)


def test_only_what_is_asked_for_is_computed() -> None:
    tiled, _ = twins()
    tiled.weight.requires_grad_(False)
    x = torch.randn(6, 48, requires_grad=True)
    tiled(x).sum().backward()
    assert [name for name, _ in tiled.reports] == ["forward", "backward input"]
    with torch.no_grad():
        tiled(x)
    assert [name for name, _ in tiled.reports] == ["forward"]


def test_the_budget_holds_in_all_three_products() -> None:
    tiled, _ = twins(memory="3000")
    tiled(torch.randn(30, 48, requires_grad=True)).sum().backward()
    assert len(tiled.reports) == 3
    for _, report in tiled.reports:
        assert 0 < report.device_bytes <= 3000


def test_state_and_copies_are_linears() -> None:
    tiled, plain = twins()
    plain.load_state_dict(tiled.state_dict())
    clone = copy.deepcopy(tiled)
    x = torch.randn(3, 48)
    assert torch.equal(clone(x), tiled(x))
    shared = TiledLinear.from_linear(plain, memory="4KB")
    assert shared.weight is plain.weight
    torch.testing.assert_close(shared(x), plain(x))


def test_refusals() -> None:
    tiled, _ = twins()
    with pytest.raises(TilingError, match="47 features, the layer takes 48"):
        tiled(torch.randn(3, 47))
    with pytest.raises(TilingError, match="convert"):
        tiled(torch.randn(3, 48).double())
    with torch.device("meta"):
        unmade = TiledLinear(48, 72)
    with pytest.raises(TilingError, match="it stays on the host: call bring_home"):
        unmade(torch.randn(3, 48))


def test_the_public_name() -> None:
    assert outcore.TiledLinear is TiledLinear


def test_the_example_learns() -> None:
    root = Path(__file__).parents[3]
    command = [
        sys.executable,
        str(root / "examples" / "wide_mlp.py"),
        "--width",
        "256",
        "--epochs",
        "3",
        "--batch",
        "64",
    ]
    paths = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=paths)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    last = [line for line in done.stdout.splitlines() if "accuracy" in line][-1]
    assert float(last.split("accuracy")[1].split("%")[0]) > 85
