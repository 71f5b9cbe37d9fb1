"""`outcore demo`, the whole of it, in a process of its own: the main job on any machine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outcore import demo as demo_room
from outcore.demo import run_demo
from outcore.errors import BudgetTooSmall, OutcoreError
from outcore.planning.planners import hybrid
from outcore.planning.settings import HYBRID
from outcore.reporting.text import demo_table, render

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same demo with small pictures: what is tested is the comparing, not the size."""
    monkeypatch.setattr(demo_room, "SIDE_PX", 16)
    monkeypatch.setattr(demo_room, "BATCH", {"cpu": 16, "cuda": 16})


def test_the_command_proves_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outcore", "demo", "--json", "--steps", "5", "--html", str(tmp_path / "page.html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["bitwise_equal"] is True
    assert facts["budget_bytes"] == facts["in_core_peak_bytes"] // 3
    assert facts["peak_bytes"] <= facts["budget_bytes"]
    assert facts["in_core_peak_bytes"] > 100 * 1024**2
    assert facts["swapped_bytes"] + facts["recomputed_bytes"] > facts["in_core_peak_bytes"] // 2
    assert abs(facts["predicted_peak_bytes"] - facts["peak_bytes"]) <= 0.03 * facts["peak_bytes"]
    assert facts["step_s"] > 0
    assert facts["in_core_step_s"] > 0
    assert "DigitsResNet" in (tmp_path / "page.html").read_text()


def test_a_changed_bit_is_found(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof must be able to fail: one gradient element moved by one bit, in one step of ours."""
    assert run_demo("60%", num_steps=5).bitwise_equal
    train = demo_room.train

    def disturbed(*args: object, **kwargs: object) -> object:
        ooc = args[4] if len(args) > 4 else None
        for step, found in enumerate(train(*args, **kwargs)):  # type: ignore[arg-type]
            if ooc is not None and step == 1:
                bias = args[3].head.bias  # type: ignore[attr-defined]
                bias.data.view(torch.int32)[0] ^= 1
            yield found

    monkeypatch.setattr(demo_room, "train", disturbed)
    assert not run_demo("60%", num_steps=5).bitwise_equal


def test_a_budget_of_ones_own(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "HYBRID", replace(HYBRID, max_flips=200))
    found = run_demo("70%", num_steps=5)
    assert found.budget_bytes == int(found.in_core_peak_bytes * 0.7)
    assert found.in_budget
    assert found.facts()["in_budget"] is True
    with pytest.raises(BudgetTooSmall) as caught:
        run_demo("256KiB", num_steps=5)
    assert run_demo(caught.value.needed_bytes, num_steps=5).in_budget


def test_without_scikit_learn_the_data_is_made_up(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain wheel has no extras, and the demo is the first command that a newcomer runs."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    found = run_demo("70%", num_steps=5)
    assert found.data.startswith("made up")
    assert "pip install scikit-learn" in render(demo_table(found.facts()))
    assert found.bitwise_equal
    assert found.in_budget


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(OutcoreError, match="4 steps are too few"):
        run_demo(num_steps=4)
