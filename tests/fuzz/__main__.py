"""The command: `python -m tests.fuzz --programs 2000 --jobs 16 --out verdicts.json`.

`--show SEED` prints a program, `--shrink SEED` makes the smallest one that fails alike, as a script.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from tests.fuzz.check import COMBINATIONS, check
from tests.fuzz.explore import explore
from tests.fuzz.generate import generate
from tests.fuzz.program import source
from tests.fuzz.runs import run_seed, summary_of
from tests.fuzz.shrink import fails_like, script, shrink


def show(seed: int, *, smallest: bool, which: str | None) -> None:
    program = generate(seed)
    report = check(program)
    failing = [v for v in report.verdicts if v.outcome != "same" and (which is None or v.outcome == which)]
    print(f"# {report.outcome} {report.detail}")
    for verdict in failing:
        print(f"# {verdict.planner} {verdict.share} step {verdict.step}: {verdict.outcome}: {verdict.detail}")
    if not (smallest and failing):
        print(source(program))
        return
    verdict = failing[0]
    program = shrink(program, fails_like(verdict))
    title = f"seed {seed}, {verdict.planner} at {verdict.share}: {verdict.outcome}: {verdict.detail}"
    combinations = [(verdict.planner, verdict.share)] if verdict.planner != "keep-all" else []
    print(script(program, title.replace('"', "'"), combinations))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    jobs = int(os.environ.get("OUTCORE_EXPLORE_JOBS", os.cpu_count() or 1))
    parser.add_argument("--programs", type=int, default=int(os.environ.get("OUTCORE_EXPLORE", "200")))
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--scale", type=int, default=1, help="how many times as large tensors are")
    parser.add_argument("--jobs", type=int, default=jobs)
    parser.add_argument("--out", type=Path, default=Path("fuzz.json"))
    parser.add_argument("--show", type=int, metavar="SEED")
    parser.add_argument("--shrink", type=int, metavar="SEED")
    parser.add_argument("--which", help="the kind of failure to show or to shrink: numbers, over, prediction, crash")
    arguments = parser.parse_args()
    if arguments.show is not None or arguments.shrink is not None:
        smallest = arguments.shrink is not None
        show(arguments.shrink if smallest else arguments.show, smallest=smallest, which=arguments.which)
        return
    seeds = range(arguments.first, arguments.first + arguments.programs)
    answers = explore(
        seeds, partial(run_seed, scale=arguments.scale), arguments.jobs, arguments.out, lambda found: summary_of(found)
    )
    for key, value in summary_of(answers).items():
        print(key, value if key != "failing" else "", sep=": ")
        for line in value if key == "failing" else ():
            print("  ", *line)
    print(f"{len(COMBINATIONS)} combinations of planner and budget each; everything in {arguments.out}")


if __name__ == "__main__":
    main()
