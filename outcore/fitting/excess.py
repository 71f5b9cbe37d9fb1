"""What steps take beyond the budget although they follow their plan -> one warning, and room in later plans.

Such a step allocates memory that the recorded one did not, outside the ops that a plan checks: a tensor that only some
steps hold, or a parameter that only some steps give another storage.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.errors import warn
from outcore.units import format_bytes


@dataclass
class Excess:
    """The excess of the steps of one kind."""

    free_bytes: int = 0  # that plans leave free for it
    replaced_bytes: int | None = None  # held after tensors got other storages in the recorded step; None: not known
    _said_bytes: int = 0  # the highest peak that a warning named

    def give_up(self) -> None:
        """No plan leaves that much free."""
        self.free_bytes = 0

    def note_peak(self, peak_bytes: int, budget_bytes: int) -> None:
        """Warns if a step exceeded the budget, and leaves that much free in later plans. Where no plan can, the same is
        not said at every such step."""
        if peak_bytes <= budget_bytes:
            return
        is_said = not self.free_bytes and peak_bytes <= self._said_bytes
        self._said_bytes = max(self._said_bytes, peak_bytes)
        self.free_bytes += peak_bytes - budget_bytes
        if not is_said:
            warn(
                f"a step took {format_bytes(peak_bytes)} of a budget of {format_bytes(budget_bytes)}: it did more than "
                f"the step that was recorded; the next ones are planned with {format_bytes(self.free_bytes)} left "
                "free, if there is such a plan (do what only some steps do outside of ooc.step())"
            )

    def note_replaced(self, replaced_bytes: int, predicted_bytes: int, budget_bytes: int) -> None:
        """The same for a step whose memory was not measured: tensors got other storages while autograd still held the
        ones they had, which takes at most that much more than what was predicted."""
        if self.replaced_bytes is not None and replaced_bytes > self.replaced_bytes:
            more_bytes = replaced_bytes - self.replaced_bytes
            self.note_peak(predicted_bytes - self.free_bytes + more_bytes, budget_bytes)


def warn_if_over(peak_bytes: int, budget_bytes: int) -> None:
    """A step that left its plan keeps only what it has room for, but it may hold more than that itself."""
    if peak_bytes > budget_bytes:
        warn(
            f"a step that left its plan took {format_bytes(peak_bytes)} of a budget of "
            f"{format_bytes(budget_bytes)}: it held more at once than the step that was recorded, with everything "
            "put away that could be (raise the budget, or give steps that differ names)"
        )
