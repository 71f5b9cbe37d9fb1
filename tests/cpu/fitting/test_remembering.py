"""A training that is started again is planned from its second step on, unless its first shows that it changed."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def test_the_second_run_follows_the_plan_of_the_first(tmp_path: Path) -> None:
    first = limit(net(), "1GiB", planner="swap-all", cache=tmp_path)
    losses = train(first)
    assert first.stats()["recorded"] == 1
    second = limit(net(), "1GiB", planner="swap-all", cache=tmp_path)
    assert all(map(torch.equal, train(second), losses))
    assert counts(second) == (1, 2, 0, 0)
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


def test_a_plan_of_an_earlier_run_for_other_work_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
        assert "earlier run" not in caplog.text
        assert counts(ooc) == (1, 3, 0, 0)
        plain = limit(Model(lambda x: x.exp().cos()), "1GiB", cache=False)
        assert all(map(torch.equal, train(plain, num_steps=4), losses))
        again = limit(Model(lambda x: x.exp().cos()), "1GiB", planner="recompute-all", cache=tmp_path)
        assert all(map(torch.equal, train(again, num_steps=4), losses))
        assert "planned as in an earlier run" in caplog.text


def test_what_a_recording_proved_is_not_taken_from_an_earlier_run(tmp_path: Path) -> None:
    """The same ops on the same shapes; in the second run a kernel that is no op writes into what is saved."""

    class Saves(torch.autograd.Function):
        writes = False

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            ctx.save_for_backward(y)
            if Saves.writes:
                y.numpy()[:] *= 2
            return y * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0] * ctx.saved_tensors[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = Saves.apply(self.layers(x.repeat(8, 1)))  # type: ignore[no-untyped-call]
            return y

    train(limit(Model(), "1GiB", planner="recompute-all", cache=tmp_path))
    Saves.writes = True
    expected = train(limit(Model(), "1GiB", planner="keep-all", cache=False), num_steps=4)
    assert all(
        map(
            torch.equal,
            train(limit(Model(), "1GiB", planner="recompute-all", cache=tmp_path), num_steps=4),
            expected,
        )
    )


def test_the_environment_chooses_the_folder_or_none(tmp_path: Path) -> None:
    program = (
        "import torch, outcore; m = torch.nn.Linear(64, 64); ooc = outcore.limit(m, '1GiB')\n"
        "for _ in range(3):\n    with ooc.step(): m(torch.ones(64, 64)).sum().backward()\n    m.zero_grad()\n"
        "ooc.close(); print(ooc.plan is not None)"
    )

    def run(folder: str) -> None:
        environment = {"PATH": "", "PYTHONPATH": str(Path(__file__).parents[3]), "OUTCORE_CACHE": folder}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert done.stdout.strip() == "True"

    run("off")
    assert not [*tmp_path.iterdir()]
    run(str(tmp_path / "cache"))
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert len([*(tmp_path / "cache").glob("*.json.gz")]) == 1


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


@pytest.mark.parametrize("kind", ["a file is in the way", "no folder can be made there"])
def test_a_cache_that_cannot_be_written_to_is_told_of_once(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "file" if kind.startswith("a file") else Path("/proc/nowhere")
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=f"no plan can be saved in {folder} .*name a writable folder") as told:
        ooc = limit(net(), "1GiB", planner="swap-all", cache=folder)
    train(ooc)
    assert len(told) == 1
