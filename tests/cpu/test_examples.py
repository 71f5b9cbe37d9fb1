"""The examples run as they stand, in less memory than they need."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
BUDGETS_MIB = {
    "plain_loop": 16,
    "accumulation": 6,
    "accelerate_loop": 3,
    "hugging_face": 10,
    "hf_trainer": 10,
    "lightning_trainer": 12,
}
NEEDS = {
    "accelerate_loop": "accelerate",
    "hugging_face": "transformers",
    "hf_trainer": "accelerate",
    "lightning_trainer": "lightning",
}


@pytest.mark.parametrize("name", BUDGETS_MIB)
def test_an_example_runs_in_its_budget(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"the example is for users of {NEEDS[name]}")
    ooc = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)["main"]()
    try:
        assert ooc.plan.in_core_peak_bytes > ooc.budget.device_bytes == BUDGETS_MIB[name] * 1024**2
        assert ooc.timeline.peak_bytes <= ooc.budget.device_bytes
        assert all(kind.num_left == 0 for kind in ooc.kinds.values())
        assert "peak memory" in capsys.readouterr().out
    finally:
        ooc.close()


def test_every_example_is_short_and_run_by_a_test() -> None:
    tests = [path.read_text() for path in (EXAMPLES.parent / "tests").rglob("test_*.py")]
    for path in EXAMPLES.glob("*.py"):
        assert path.read_text().count("\n") < 80, f"{path.name} is long"
        assert any(path.stem in text for text in tests), f"no test runs {path.name}"
