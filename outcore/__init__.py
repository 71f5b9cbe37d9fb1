"""Train neural networks larger than the memory they are given, with the same numbers.

`limit(model, memory="16GiB")` is the front door. Names are loaded when first used, so that planning for another
machine needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from outcore.errors import BadFile, BadSize, BudgetTooSmall, OutcoreError, PlanMismatch

__version__ = "0.1.0"

_HOMES: dict[str, str] = {"elastic": "outcore.elastic"}

__all__ = ["BadFile", "BadSize", "BudgetTooSmall", "OutcoreError", "PlanMismatch", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outcore' has no attribute {name!r}")
    module = import_module(_HOMES[name])
    return getattr(module, name) if name != _HOMES[name].rpartition(".")[2] else module
