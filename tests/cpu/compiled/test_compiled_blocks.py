"""A model whose blocks are compiled stays compiled inside a step; what the graphs save is kept or swapped."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from outcore.limit import limit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(F.gelu(self.up(x))))


def losses(model: nn.Module, ooc: object) -> tuple[list[float], list[Tensor]]:
    found = []
    for step in range(4):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        if ooc is None:
            loss = model(x).square().mean()
            loss.backward()
        else:
            with ooc.step():  # type: ignore[attr-defined]
                loss = model(x).square().mean()
                loss.backward()
        found.append(loss.item())
    return found, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compiled_blocks_stay_compiled() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[Block() for _ in range(2)])
    ours = nn.Sequential(*[Block() for _ in range(2)])
    ours.load_state_dict(plain.state_dict())
    calls = {"count": 0}

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        """A back end that counts how often its graphs really run."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch._aot_autograd.utils import make_boxed_func

        def compiler(inner: torch.fx.GraphModule, inner_inputs: list[Tensor]) -> object:
            def run(*args: Tensor) -> object:
                calls["count"] += 1
                return inner(*args)

            return make_boxed_func(run)

        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)(graph, inputs)

    for model in (plain, ours):
        for index, block in enumerate(model):
            compiled: Any = torch.compile(block, backend=count)
            model[index] = compiled
    expected, expected_grads = losses(plain, None)
    plain_calls, calls["count"] = calls["count"], 0
    counters.clear()
    ooc = limit(ours, "100%", planner="swap-all")
    got, grads = losses(ours, ooc)
    assert calls["count"] == plain_calls == 4 * 2 * 2  # steps x blocks x (forward, backward)
    assert got == expected
    assert all(torch.equal(a, b) for a, b in zip(expected_grads, grads))
    assert ooc.predicted is not None
    assert ooc.predicted.swapped_bytes > 0  # what the graphs saved was swapped
    assert ooc.store.num_parcels == 0
    ooc.close()


class Broken(nn.Module):
    """A function that is compiled in two pieces: what is between them runs eagerly, with the compiler near."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        out: Tensor = self.last(y * round(y.sum().item(), 3)).relu()
        return out


def note(seen: set[str], graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
    """A back end that notes what it is given to compile."""
    seen.add(graph.code)
    return graph


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("planner", ["swap-all", "recompute-all"])
def test_the_compiler_does_not_compile_us(planner: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Broken(), Block())
    ours = nn.Sequential(Block(), Broken(), Block())
    ours.load_state_dict(plain.state_dict())
    seen: dict[str, set[str]] = {"plain": set(), "ours": set()}
    found: dict[str, tuple[list[float], list[Tensor]]] = {}
    for name, model in (("plain", plain), ("ours", ours)):
        torch._dynamo.reset()
        compiled: Any = torch.compile(model[1], backend=partial(note, seen[name]))
        model[1] = compiled
        ooc = limit(model, "100%", planner=planner) if name == "ours" else None
        found[name] = losses(model, ooc)
        if ooc is not None:
            ooc.close()
    assert found["ours"][0] == found["plain"][0]
    assert all(torch.equal(a, b) for a, b in zip(found["plain"][1], found["ours"][1]))
    assert seen["ours"] == seen["plain"]


def test_a_model_compiled_as_a_whole_by_another_backend_is_said_not_to_be_limited() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))
    compiled = torch.compile(model, backend="aot_eager")

    def step() -> None:
        with ooc.step():
            compiled(torch.ones(16, 32)).sum().backward()

    with limit(model, "100%", planner="swap-all") as ooc:
        step()  # compiles
        with pytest.warns(UserWarning, match="nothing of its forward was seen"):
            step()
