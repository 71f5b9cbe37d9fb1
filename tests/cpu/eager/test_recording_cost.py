"""What a recorded step does besides: on a GPU it makes again what is quickly made, and not over and over."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from outcore.eager.replay import Recipe
from outcore.limit import limit
from outcore.memory.device import CpuMemory
from outcore.memory.store import Store
from outcore.units import GIB


def block(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)


def convolutions(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


@pytest.mark.parametrize(("pinned", "most"), [(True, 2), (False, 6)])
@pytest.mark.parametrize("memory", ["32MiB", "1GiB"])
@pytest.mark.parametrize(("part", "shape"), [(block, (8, 32, 64)), (convolutions, (8, 16, 24, 24))])
def test_products_are_made_again_about_once_or_a_few_times_where_nothing_is_pinned(
    part: Any, shape: Any, memory: str, pinned: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of any length would make them ten times: each of their values is made by itself."""
    monkeypatch.setattr(Store, "pinned_bytes", GIB if pinned else 0)
    monkeypatch.setattr(CpuMemory, "is_slow_to_pin", True)
    num: Counter[bool] = Counter()
    run = Recipe.run_alone

    def counted(self: Recipe, *, in_place: bool) -> tuple[list[Tensor], list[Tensor]]:
        num[self.func._overloadpacket in flop_registry] += 1
        return run(self, in_place=in_place)

    monkeypatch.setattr(Recipe, "run_alone", counted)
    torch.manual_seed(0)
    width = shape[-1] if part is block else shape[1]
    model = nn.Sequential(*(part(width) for _ in range(8)))
    ooc = limit(model, memory)
    with ooc.step():
        model(torch.randn(shape)).sum().backward()
    assert ooc.trace is not None
    names = [op.name.split(".")[1] for op in ooc.trace.ops if op.phase == "forward"]
    num_products = sum(getattr(torch.ops.aten, name) in flop_registry for name in names)
    assert 0 < num[True] <= most * num_products
    ooc.close()
