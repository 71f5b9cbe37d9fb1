"""Random training programs give the bits of plain PyTorch, in the memory they are promised.

Three hundred fixed seeds, each with two of the twelve combinations of planner and budget. OUTCORE_EXPLORE=N checks N
programs with all of them instead, in OUTCORE_EXPLORE_JOBS processes; `python -m tests.fuzz --shrink SEED` then makes a
failing one small.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from tests.fuzz.check import COMBINATIONS, Report, check
from tests.fuzz.explore import explore
from tests.fuzz.generate import generate
from tests.fuzz.runs import run_seed, summary_of

NUM_PROGRAMS = 300
NUM_TOGETHER = 15  # programs in one test
NUM_FEW = 4  # in a test, that may fail in plain PyTorch, or not repeat their bits there


def wrong_in(report: Report) -> list[str]:
    return [
        f"seed {report.seed}, {verdict.planner} at {verdict.share}, step {verdict.step}: {verdict.outcome}: "
        f"{verdict.detail}"
        for verdict in report.verdicts
        if verdict.outcome != "same"
    ]


@pytest.mark.skipif("OUTCORE_EXPLORE" in os.environ, reason="explores instead")
@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, NUM_TOGETHER))
def test_programs_run_as_in_plain_pytorch(first: int) -> None:
    wrong, useless = [], 0
    gc.collect()
    gc.freeze()
    for seed in range(first, first + NUM_TOGETHER):
        two = COMBINATIONS[seed % 12], COMBINATIONS[(seed * 5 + 7) % 12]
        report = check(generate(seed), two)
        useless += report.outcome != "ran"
        wrong += wrong_in(report)
    assert not wrong, "\n".join(wrong)
    assert useless <= NUM_FEW


@pytest.mark.skipif("OUTCORE_EXPLORE" not in os.environ, reason="OUTCORE_EXPLORE=N explores")
@pytest.mark.timeout(0)
def test_explored_programs_run_as_in_plain_pytorch(tmp_path: Path) -> None:
    num = max(NUM_PROGRAMS, int(os.environ["OUTCORE_EXPLORE"]))
    jobs = int(os.environ.get("OUTCORE_EXPLORE_JOBS", os.cpu_count() or 1))
    answers = explore(range(num), run_seed, jobs, tmp_path / "fuzz.json", summary_of)
    assert not summary_of(answers)["failing"]


def test_a_program_is_the_same_for_a_seed() -> None:
    assert all(generate(seed) == generate(seed) for seed in range(40))
