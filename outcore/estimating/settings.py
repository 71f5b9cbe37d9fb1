"""The numbers behind estimates, each with its unit and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EstimateSettings:
    reached_flops_share: float = 0.5  # of a vendor's peak that real ops reach (see benchmarks/estimate.py)
    reached_memory_share: float = 0.8  # of a vendor's bandwidth that real ops reach (see benchmarks/estimate.py)
    num_points: int = 5  # budgets on the curve, from the least that works to all that is needed (guessed)
    point_share: float = 1.02  # the first point lies so far above the least budget, where plans are few (guessed)


SETTINGS = EstimateSettings()
