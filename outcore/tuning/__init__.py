"""Batch size and learning rate under a memory plan.

`Adaptive` holds a training loop's batch and learning rate, `Shares` splits a batch over unequal workers,
`measure_noise`, `range_test` and `search.search` are what advice is made of, `untouched` is how they leave no trace.
Names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outcore.tuning.adaptive import Adaptive
    from outcore.tuning.noise import Noise, measure_noise
    from outcore.tuning.ranges import RangeTest, range_test
    from outcore.tuning.shares import Shares
    from outcore.tuning.state import untouched

_HOMES = {
    "Adaptive": "adaptive",
    "Noise": "noise",
    "RangeTest": "ranges",
    "Shares": "shares",
    "measure_noise": "noise",
    "range_test": "ranges",
    "untouched": "state",
}
__all__ = ["Adaptive", "Noise", "RangeTest", "Shares", "measure_noise", "range_test", "untouched"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outcore.tuning' has no attribute {name!r}")
    return getattr(import_module(f"outcore.tuning.{_HOMES[name]}"), name)
