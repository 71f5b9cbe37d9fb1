"""PlanningProcess -> Search: planning in parts, without stopping training.

Planning one step takes several requests, one after the other: plans of some sizes, similar plans with less
fragmentation, and the schedule of the best one. Each is a part that the planning process answers. In every training
step the planning function is called from its beginning again: answered parts return at once, and the first unanswered
part raises StillSearching.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

from outcore.fitting.planning_process import PlanningProcess

T = TypeVar("T")


class StillSearching(Exception):
    """Raised while a part of the planning is not answered yet."""


class Search:
    """The parts of planning one step, by name."""

    def __init__(self, process: PlanningProcess) -> None:
        self._process = process
        self._parts: dict[Hashable, Future[Any]] = {}
        self._made: dict[Hashable, Any] = {}

    def ask(self, part: Hashable, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Returns `function(*args, **kwargs)`, which the planning process computes when this part is first asked for.
        Raises StillSearching until it is done, and what `function` raises."""
        return self.answer(part, lambda: self._process.submit(function, *args, **kwargs))

    def answer(self, part: Hashable, start: Callable[[], Future[T]]) -> T:
        """Returns the result of the future that `start` returned when this part was first asked for. Raises
        StillSearching until it is done."""
        if part not in self._parts:
            self._parts[part] = start()
        if not self._parts[part].done():
            raise StillSearching
        found: T = self._parts[part].result()
        return found

    def once(self, part: Hashable, make: Callable[[], T]) -> T:
        """Returns what `make` returned at the first call for this part."""
        if part not in self._made:
            self._made[part] = make()
        made: T = self._made[part]
        return made
