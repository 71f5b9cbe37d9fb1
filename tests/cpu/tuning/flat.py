"""`outcore.tune` with every option as a keyword of its own, so that a test says only what it is about."""

from __future__ import annotations

from typing import Any

import outcore
from outcore.tuning import Batch, Data, Effort, Goal, LearningRate, Memory, Workers
from outcore.tuning.advice import Advice


def options(given: dict[str, Any]) -> dict[str, Any]:
    """Flat keywords -> the option objects they belong to."""
    rest = dict(given)

    def taken(*names: str) -> dict[str, Any]:
        return {name: rest.pop(name) for name in names if name in rest}

    found: dict[str, Any] = {
        "dataset": Data(rest.pop("dataset"), **taken("validation", "collate")),
        "memory": Memory(rest.pop("memory"), **taken("host", "disk")),
        "batch": Batch(rest.pop("batch", None), **taken("free", "largest")),
        "learning_rate": LearningRate(rest.pop("learning_rate", None), **taken("rule")),
        "goal": Goal(**taken("target", "num_epochs", "train_s")),
        "effort": Effort(**taken("trial_s", "race", "num_trials", "study")),
        "workers": Workers(rest.pop("workers", None), **taken("communication_s")),
    }
    return found | rest


def tune(make_model: Any, loss_fn: Any, dataset: Any, **given: Any) -> Advice:
    return outcore.tune(make_model, loss_fn, **options(given | {"dataset": dataset}))
