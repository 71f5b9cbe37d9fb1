"""Train neural networks larger than the memory they are given, with the same numbers.

- `limit` keeps the steps of a training loop within a memory budget, and returns a `Limited`. `outcore.integrations`
  does this in Hugging Face trainers and in Lightning.
- `estimate` returns an `Estimate` of what a step will need and cost, before it is run.
- `plan`, `lower`, `verify` and `simulate` turn a `Trace` and a `Machine` into a `Plan` for a `Budget`, its `Schedule`
  and its `Timeline`. They need neither torch nor the machine that is planned for.
- `load` and `save` move weights between files and models larger than the device.
- `matmul` multiplies matrices larger than the device, in memory or in a `FileMatrix`; `tile` and `untile` do so for a
  model's layers, with `TiledLinear`, `TiledEmbedding` and `TiledAdamW`.
- `elastic` trains with many workers and few messages.
- `tune` finds the batch and the learning rate that train fastest in a budget, as an `Advice`; more is in `tuning`.
- `OutcoreError` is the base class of `BadFile`, `BadSize`, `BudgetTooSmall`, `PlanMismatch`, `ReplayError`,
  `ScheduleError` and `StoreError`.

Names are imported when they are first used.
"""

from __future__ import annotations

import random
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from outcore.errors import (
    BadFile,
    BadSize,
    BudgetTooSmall,
    OutcoreError,
    PlanMismatch,
    ReplayError,
    ScheduleError,
    StoreError,
)

if TYPE_CHECKING:
    from outcore import elastic, tuning
    from outcore.estimating.estimate import Estimate, estimate
    from outcore.limit import Limited, limit
    from outcore.planning import lower, plan, simulate, verify
    from outcore.state.loading import load, save
    from outcore.tiling.adamw import TiledAdamW
    from outcore.tiling.embedding import TiledEmbedding
    from outcore.tiling.linear import TiledLinear
    from outcore.tiling.model import tile, untile
    from outcore.tiling.operands import FileMatrix
    from outcore.tiling.product import matmul
    from outcore.tuning.advice import Advice
    from outcore.tuning.tune import tune
    from outcore.values import Budget, Machine, Plan, Schedule, Timeline, Trace

__version__ = "0.2.0"

_HOMES: dict[str, str] = {
    "limit": "outcore.limit",
    "Limited": "outcore.limit",
    "estimate": "outcore.estimating.estimate",
    "Estimate": "outcore.estimating.estimate",
    "plan": "outcore.planning",
    "lower": "outcore.planning",
    "simulate": "outcore.planning",
    "verify": "outcore.planning",
    "Budget": "outcore.values",
    "Machine": "outcore.values",
    "Plan": "outcore.values",
    "Schedule": "outcore.values",
    "Timeline": "outcore.values",
    "Trace": "outcore.values",
    "matmul": "outcore.tiling.product",
    "FileMatrix": "outcore.tiling.operands",
    "TiledAdamW": "outcore.tiling.adamw",
    "TiledEmbedding": "outcore.tiling.embedding",
    "TiledLinear": "outcore.tiling.linear",
    "load": "outcore.state.loading",
    "save": "outcore.state.loading",
    "tile": "outcore.tiling.model",
    "untile": "outcore.tiling.model",
    "tune": "outcore.tuning.tune",
    "Advice": "outcore.tuning.advice",
    "elastic": "outcore",
    "tuning": "outcore",
}

__all__ = [
    "Advice",
    "BadFile",
    "BadSize",
    "Budget",
    "BudgetTooSmall",
    "Estimate",
    "FileMatrix",
    "Limited",
    "Machine",
    "OutcoreError",
    "Plan",
    "PlanMismatch",
    "ReplayError",
    "Schedule",
    "ScheduleError",
    "StoreError",
    "TiledAdamW",
    "TiledEmbedding",
    "TiledLinear",
    "Timeline",
    "Trace",
    "elastic",
    "estimate",
    "limit",
    "load",
    "lower",
    "matmul",
    "plan",
    "save",
    "simulate",
    "tile",
    "tune",
    "tuning",
    "untile",
    "verify",
]


if not TYPE_CHECKING:  # with a __getattr__, type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'outcore' has no attribute {name!r}")
        home, drawn = _HOMES[name], random.getstate()
        found = import_module(f"outcore.{name}") if home == "outcore" else getattr(import_module(home), name)
        random.setstate(drawn)  # importing rich draws a random number, which would change the user's next one
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


class _Package(ModuleType):
    """Keeps `outcore.limit` the function when the import system binds the module limit.py to that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        public = _HOMES.get(name, "outcore") != "outcore" and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if public else value)


sys.modules[__name__].__class__ = _Package
