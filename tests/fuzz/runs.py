"""Seed -> verdicts of its program, and their summary. Worker processes cannot import `__main__`, so this file can."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from tests.fuzz.check import check
from tests.fuzz.explore import as_answer
from tests.fuzz.generate import generate


def run_seed(seed: int, scale: int = 1) -> dict[str, Any]:
    program = generate(seed, scale)
    return as_answer(check(program)) | {"features": sorted(program.features)}


def summary_of(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many programs, runs and steps; what is wrong, by kind and by feature."""
    programs, runs, wrong = collections.Counter[str](), collections.Counter[str](), collections.Counter[str]()
    features = collections.Counter[str]()
    combinations: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    least, most = 1.0, 0.0
    steps = planned = left_over = 0
    for answer in answers:
        programs[answer["outcome"]] += 1
        outcomes = {verdict["outcome"] for verdict in answer.get("verdicts", ())}
        for verdict in answer.get("verdicts", ()):
            runs[verdict["outcome"]] += 1
            combinations[f"{verdict['planner']} at {verdict['share']}"][verdict["outcome"]] += 1
            least, most = min(least, verdict["least_measured"]), max(most, verdict["most_measured"])
            left_over += verdict["num_left_over"]
            steps, planned = steps + verdict["num_steps"], planned + verdict["num_planned"]
        for outcome in outcomes - {"same"}:
            wrong[outcome] += 1
        if outcomes - {"same", "refused"}:
            features.update(answer.get("features", ()))
    return {
        "programs": dict(programs),
        "runs": dict(runs),
        "steps": steps,
        "steps_planned": planned,
        "steps_that_left_and_warned_of_their_budget": left_over,
        "measured_peak_by_predicted": [least, most],
        "runs_by_combination": {name: dict(counts) for name, counts in combinations.items()},
        "programs_by_failure": dict(wrong),
        "features_of_failing_programs": dict(features.most_common(30)),
        "failing": [
            [
                answer["task"],
                verdict["planner"],
                verdict["share"],
                verdict["outcome"],
                verdict["step"],
                verdict["detail"],
            ]
            for answer in answers
            for verdict in answer.get("verdicts", ())
            if verdict["outcome"] != "same"
        ][:2000],
    }
