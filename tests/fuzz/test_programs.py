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
from tests.fuzz.generate import REFUSED, SWITCHED_OFF, UNJUDGED, generate
from tests.fuzz.program import Program
from tests.fuzz.runs import run_seed_without, summary_of

NUM_PROGRAMS = 300
NUM_TOGETHER = 15  # programs in one test
NUM_FEW = 4  # in a test, that may fail in plain PyTorch, or not repeat their bits there


def judge(program: Program, report: Report) -> list[str]:
    """What is wrong with a program, and not known."""
    allowed = {*UNJUDGED, *(("refused",) if program.features & REFUSED.keys() else ())}
    return [
        f"seed {program.seed}, {verdict.planner} at {verdict.share}, step {verdict.step}: {verdict.outcome}: "
        f"{verdict.detail}"
        for verdict in report.verdicts
        if verdict.outcome not in {"same", *allowed}
    ]


@pytest.mark.skipif("OUTCORE_EXPLORE" in os.environ, reason="explores instead")
@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, NUM_TOGETHER))
def test_programs_run_as_in_plain_pytorch(first: int) -> None:
    wrong, useless = [], 0
    gc.collect()
    gc.freeze()
    for seed in range(first, first + NUM_TOGETHER):
        program = generate(seed, SWITCHED_OFF)
        two = COMBINATIONS[seed % 12], COMBINATIONS[(seed * 5 + 7) % 12]
        report = check(program, two)
        useless += report.outcome != "ran"
        wrong += judge(program, report)
    assert not wrong, "\n".join(wrong)
    assert useless <= NUM_FEW


@pytest.mark.skipif("OUTCORE_EXPLORE" not in os.environ, reason="OUTCORE_EXPLORE=N explores")
@pytest.mark.timeout(0)
def test_explored_programs_run_as_in_plain_pytorch(tmp_path: Path) -> None:
    num = max(NUM_PROGRAMS, int(os.environ["OUTCORE_EXPLORE"]))
    jobs = int(os.environ.get("OUTCORE_EXPLORE_JOBS", os.cpu_count() or 1))
    answers = explore(range(num), run_seed_without, jobs, tmp_path / "fuzz.json", summary_of)
    bad = [line for line in summary_of(answers)["failing"] if line[3] not in UNJUDGED]
    assert not bad, bad


def test_a_program_is_the_same_for_a_seed_and_loses_only_what_is_off() -> None:
    for seed in range(40):
        whole, less = generate(seed), generate(seed, {"hooks", "in-place ops", "branching steps", "block loop"})
        assert whole == generate(seed)
        assert not less.features & {"hooks", "in-place ops", "branching steps", "block loop"}
        kept = {part.uid for part in whole.everything()} - {
            part.uid for part in whole.everything() if part.feature in {"hooks", "in-place ops", "block loop"}
        }
        assert {part.uid for part in less.everything()} <= kept
