"""What real training loops do with compiled parts: shapes that change, sums of gradients, late backwards, breaks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from outcore.compiled.graphs import Graph
from outcore.errors import OutcoreError
from outcore.limit import Limited, limit
from tests.cpu.compiled.stubs import stub_kernels
from tests.cpu.compiled.training import Training, residuals, same


@pytest.fixture(autouse=True)
def stubs() -> Iterator[None]:
    with stub_kernels():
        yield


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def follow(training: Training, model: nn.Module | None = None, share: float = 0.85, **options: Any) -> Limited:
    """Records and plans in less than in-core needs, and compares every step."""
    expected = training.step()
    ooc = limit(model or training.model, "1GiB", measure=True, **options)
    for _ in range(3):
        assert same(training.step(ooc), expected)
    assert ooc.timeline is not None
    budget_bytes = int(share * ooc.timeline.peak_bytes)
    ooc.close()
    ooc = limit(model or training.model, budget_bytes, measure=True, **options)
    for _ in range(3):
        assert same(training.step(ooc), expected)
    assert ooc.timeline is not None
    assert ooc.timeline.peak_bytes <= budget_bytes
    assert all(kind.num_left == 0 for kind in ooc.kinds.values())
    return ooc


def test_dynamic_shapes_are_compiled_once_and_share_plans() -> None:
    training = residuals(2)
    training.run = torch.compile(training.model, dynamic=True)
    ooc = limit(training.model, "1GiB")
    x, y = training.x, training.y
    for size in (256, 192, 128, 256, 192, 128, 256):
        training.x, training.y = x[:size], y[:size]
        expected = training.step()
        graphs = counters["stats"]["unique_graphs"]
        assert same(training.step(ooc), expected)
    assert counters["stats"]["unique_graphs"] == graphs
    stats = ooc.stats()
    assert (stats["recorded"], stats["planned"], stats["left"], stats["unplanned"]) == (2, 5, 0, 0)
    assert ooc.predicted is not None
    ooc.close()


def test_gradients_are_summed_over_several_steps() -> None:
    training = residuals(2)
    training.model.compile()

    def summed(ooc: Limited | None) -> list[Tensor]:
        torch.manual_seed(1)
        for _ in range(3):
            if ooc is None:
                training.loss().backward()
            else:
                with ooc.step():
                    training.loss().backward()
        return gradients(training.model)

    expected = summed(None)
    ooc = limit(training.model, "1GiB", planner="swap-all")
    for _ in range(3):
        assert same(summed(ooc), expected)
    ooc.close()


def test_two_forwards_before_their_backwards() -> None:
    training = residuals(2)
    training.model.compile()

    def both(ooc: Limited | None) -> list[Tensor]:
        torch.manual_seed(1)
        if ooc is None:
            first, second = training.loss(), training.loss()
            (first + 2 * second).backward()
        else:
            with ooc.step():
                first, second = training.loss(), training.loss()
                (first + 2 * second).backward()
        return gradients(training.model)

    expected = both(None)
    ooc = limit(training.model, "1GiB", planner="swap-all")
    for _ in range(3):
        assert same(both(ooc), expected)
    ooc.close()


def test_a_backward_after_its_step() -> None:
    training = residuals(2)
    training.model.compile()
    torch.manual_seed(1)
    training.loss().backward()
    expected = gradients(training.model)
    ooc = limit(training.model, "1GiB", planner="swap-all")
    for _ in range(3):
        torch.manual_seed(1)
        with ooc.step():
            loss = training.loss()
        loss.backward()
        assert same(gradients(training.model), expected)
    del loss
    ooc.close()


def test_a_forward_whose_backward_never_comes() -> None:
    training = residuals(2)
    training.model.compile()
    expected = training.step()
    ooc = limit(training.model, "1GiB", planner="swap-all")
    for _ in range(3):
        with ooc.step():
            training.loss()
        assert ooc.store.num_parcels == 0
    for _ in range(2):
        assert same(training.step(ooc), expected)
    with torch.no_grad():
        training.loss()
    ooc.close()


def test_evaluation_inside_a_step() -> None:
    training = residuals(2)
    training.model.compile()
    inner = training.loss

    def loss() -> Tensor:
        with torch.no_grad():
            teacher = training.run(training.x)
        return inner() + F.mse_loss(training.run(training.x), teacher)

    training.loss = loss  # type: ignore[method-assign]
    follow(training).close()


class Broken(nn.Module):
    """Compiled in pieces: what is between them runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        y = torch.sigmoid(y) * round(y.sum().item(), 3)
        out: Tensor = self.last(torch.tanh(y))
        return out


def test_graph_breaks() -> None:
    training = residuals(1)
    training = Training(nn.Sequential(Broken(), Broken()), training.x, training.y)
    training.model.compile()
    ooc = follow(training, share=0.9)
    assert ooc.trace is not None
    names = {op.name for op in ooc.trace.ops if op.phase == "forward"}
    assert any(name.startswith("cpp_fused") for name in names)
    ooc.close()


def test_autocast_and_attention() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).reshape(-1, 32, 3, 4, 16).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            out: Tensor = x + self.out(mixed.transpose(1, 2).reshape(-1, 64))
            return out

    training = residuals(1)
    training = Training(nn.Sequential(Attention(), Attention(), Attention()), training.x, training.y)
    training.model.compile()
    inner = training.loss

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner()

    training.loss = loss  # type: ignore[method-assign]
    ooc = follow(training, share=0.9)
    assert ooc.trace is not None
    assert any("scaled_dot_product" in op.name for op in ooc.trace.ops)
    ooc.close()


def test_random_numbers_of_operators() -> None:
    with torch._inductor.config.patch(fallback_random=True):
        training = residuals(2)
        training.model.compile()
        follow(training, planner="priced").close()


def test_cuda_graphs_are_refused_in_one_sentence() -> None:
    compiled: Any = SimpleNamespace(
        current_callable=None,
        compiled_fn_runner=None,
        source_code="",
        fx_kwargs={"cudagraphs": True},
        device_types={"cuda"},
        inputs_to_check=(),
        mutated_input_idxs=(),
    )
    with pytest.raises(OutcoreError, match="compile it with mode='default'"):
        Graph(compiled, [])
