"""A training that is started again is planned from its first step on; whatever changed since is recorded anew."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from outcore.errors import BadFile
from outcore.limit import Limited, limit
from tests.cpu.fitting.test_branches import counts


def net(activation: type[nn.Module] = nn.Tanh, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), activation(), nn.Linear(width, 16), activation(), nn.Linear(16, 4))


def train(ooc: Limited, rows: int = 256, num_steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(ooc.model.parameters())
    losses = []
    for step in range(num_steps):
        x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(step))
        with ooc.step():
            loss = ooc.model(x).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    ooc.close()
    for thread in threading.enumerate():
        if thread.name == "outcore-cache":
            thread.join()
    return losses


def test_the_second_run_records_nothing_and_computes_the_same(tmp_path: Path) -> None:
    first = limit(net(), "1GiB", planner="swap-all", cache=tmp_path)
    losses = train(first)
    assert first.stats()["recorded"] == 1
    second = limit(net(), "1GiB", planner="swap-all", cache=tmp_path)
    assert all(map(torch.equal, train(second), losses))
    assert counts(second) == (0, 3, 0, 0)
    assert second.plan == first.plan
    assert second.trace == first.trace


CHANGES: dict[str, Callable[[Path], Limited]] = {
    "activation": lambda folder: limit(net(nn.Sigmoid), "1GiB", planner="swap-all", cache=folder),
    "width": lambda folder: limit(net(width=48), "1GiB", planner="swap-all", cache=folder),
    "budget": lambda folder: limit(net(), "2GiB", planner="swap-all", cache=folder),
    "planner": lambda folder: limit(net(), "1GiB", planner="keep-all", cache=folder),
    "no cache": lambda folder: limit(net(), "1GiB", planner="swap-all", cache=False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_plan_depends_on_is_in_its_key(tmp_path: Path, change: str) -> None:
    train(limit(net(), "1GiB", planner="swap-all", cache=tmp_path))
    other = CHANGES[change](tmp_path)
    train(other)
    assert other.stats()["recorded"] == 1
    assert other.stats()["left"] == 0


def test_a_plan_of_an_earlier_run_for_other_work_is_left_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model calls a function of the user's, which the key cannot know."""

    class Model(nn.Module):
        def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers, self.function = net(), function

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.function(self.layers(x))

    train(limit(Model(torch.sin), "1GiB", planner="recompute-all", cache=tmp_path))
    changed = Model(lambda x: x.exp().cos())
    ooc = limit(changed, "1GiB", planner="recompute-all", cache=tmp_path)
    with caplog.at_level(logging.INFO, "outcore"):
        losses = train(ooc, num_steps=4)
    assert "another step" in caplog.text
    assert counts(ooc) == (1, 2, 1, 0)
    plain = limit(Model(lambda x: x.exp().cos()), "1GiB", cache=False)
    assert all(map(torch.equal, train(plain, num_steps=4), losses))
    again = limit(Model(lambda x: x.exp().cos()), "1GiB", planner="recompute-all", cache=tmp_path)
    train(again)
    assert again.stats()["recorded"] == 0


def test_the_environment_chooses_the_folder_or_none(tmp_path: Path) -> None:
    program = (
        "import torch, outcore; m = torch.nn.Linear(64, 64); ooc = outcore.limit(m, '1GiB')\n"
        "for _ in range(3):\n    with ooc.step(): m(torch.ones(64, 64)).sum().backward()\n    m.zero_grad()\n"
        "print(ooc.stats()['recorded'])"
    )

    def run(folder: str) -> str:
        environment = {"PATH": "", "PYTHONPATH": str(Path(__file__).parents[3]), "OUTCORE_CACHE": folder}
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert [run(str(tmp_path / "cache")), run(str(tmp_path / "cache")), run("off")] == ["1", "0", "1"]


def test_a_plan_is_taken_from_a_file(tmp_path: Path) -> None:
    first = limit(net(), "1GiB", planner="swap-all")
    train(first)
    assert first.plan is not None
    first.plan.save(tmp_path / "plan.json")
    second = limit(net(), "1GiB", plan=tmp_path / "plan.json")
    train(second)
    assert second.plan is not None
    assert second.plan.decisions == first.plan.decisions
    with pytest.raises(BadFile, match=r"nowhere\.json"):
        limit(net(), "1GiB", plan=str(tmp_path / "nowhere.json"))
