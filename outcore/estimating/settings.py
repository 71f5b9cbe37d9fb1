"""The numbers behind estimates, each with its unit and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EstimateSettings:
    reached_flops_share: float = 0.5  # of a vendor's peak that real ops reach (see benchmarks/estimate.py)
    reached_memory_share: float = 0.8  # of a vendor's bandwidth that real ops reach (see benchmarks/estimate.py)
    point_shares: tuple[float, ...] = (0.0, 0.15, 0.4, 1.0)  # budgets on the curve, of the way from the least that
    # works to all that is needed: the curve bends near its lower end (guessed)
    point_share: float = 1.02  # the first point lies so far above the least budget, where plans are few (guessed)


SETTINGS = EstimateSettings()
