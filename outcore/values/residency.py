"""Where the training state lies: Residency, over the StateUnits of a model.

A unit is one parameter with its gradient and what the optimizer keeps of it. A resident unit stays on the device, as
without outcore. A streamed one has a home beside it and comes when it is read (`outcore.state`); of all streamed units
no more than the window is on the device at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from outcore.values.plan import Budget


@dataclass(frozen=True)
class StateUnit:
    """Bytes of one parameter."""

    name: str
    weight_bytes: int
    gradient_bytes: int = 0  # 0 for a frozen parameter
    kept_bytes: int = 0  # of optimizer state

    @property
    def all_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.kept_bytes

    @property
    def update_bytes(self) -> int:
        """That its update reads and writes."""
        return 2 * (self.weight_bytes + self.kept_bytes) + self.gradient_bytes


@dataclass(frozen=True)
class Residency:
    """Which units stay on the device, and how much of the device the others may use at a time."""

    units: tuple[StateUnit, ...]
    resident: frozenset[int] = field(default_factory=frozenset)  # positions in `units`
    window_bytes: int = 0
    is_late: bool = True  # updates run when their weight is read next, else all of them inside `optimizer.step()`
    early: frozenset[int] = field(default_factory=frozenset)  # streamed ones that are updated in the backward
    by_cpu: bool = False  # streamed ones are updated at home, by the CPU: their optimizer state never comes
    tier: str = "host"  # where streamed units are kept
    on_disk: frozenset[int] = field(default_factory=frozenset)  # streamed units that are kept on the disk instead
    spills: bool = False  # the disk may hold what `tier` has no room for
    link_share: float = 1.0  # of the links' seconds, that the state leaves to activations

    @property
    def resident_bytes(self) -> int:
        return bytes_of(self.units, self.resident)

    @property
    def resident_gradient_bytes(self) -> int:
        return sum(self.units[number].gradient_bytes for number in self.resident)

    @property
    def streamed_bytes(self) -> int:
        return sum(unit.all_bytes for unit in self.units) - self.resident_bytes

    @property
    def num_by_cpu(self) -> int:
        """Units that the CPU updates."""
        streamed = (unit for number, unit in enumerate(self.units) if number not in self.resident)
        return sum(unit.gradient_bytes > 0 for unit in streamed) if self.by_cpu else 0

    @property
    def home_bytes(self) -> int:
        """Beside the device. What an update in the backward makes has a home of its own until it is asked for."""
        return sum(self.home_bytes_on(tier) for tier in {self.tier, "disk"})

    def tier_of(self, number: int) -> str:
        """Where a streamed unit is kept."""
        return "disk" if number in self.on_disk else self.tier

    def home_bytes_on(self, tier: str) -> int:
        """Of `home_bytes`, those on one tier."""
        return sum(
            unit.all_bytes + (unit.weight_bytes + unit.kept_bytes if number in self.early else 0)
            for number, unit in enumerate(self.units)
            if number not in self.resident and self.tier_of(number) == tier
        )

    def home_room(self, budget: Budget) -> int:
        """Of a budget, what the tier has."""
        return budget.host_bytes if self.tier == "host" else budget.disk_bytes

    def fits_home(self, budget: Budget) -> bool:
        fits = self.home_bytes_on(self.tier) <= self.home_room(budget)
        return fits and self.home_bytes_on("disk") <= budget.disk_bytes

    @property
    def device_bytes(self) -> int:
        """Of the device's memory."""
        return self.resident_bytes + self.window_bytes


def bytes_of(units: Sequence[StateUnit], chosen: Collection[int]) -> int:
    return sum(units[number].all_bytes for number in chosen)
