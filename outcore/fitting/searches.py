"""A search for a plan that does not stop the loop.

Planning one step asks for several things, one after the other: plans of some sizes, neighbours of these that leave few
holes, the schedule of the best. Each is a part that the planning process works out. In every step of the loop the
planning is begun anew; the parts that are answered are at hand at once, and it stops at the first one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

from outcore.fitting.planning_process import PlanningProcess

T = TypeVar("T")


class StillSearching(Exception):
    """A part of the planning is not answered yet."""


class Search:
    """The parts of one planning, by name."""

    def __init__(self, process: PlanningProcess) -> None:
        self._process = process
        self._parts: dict[Hashable, Future[Any]] = {}
        self._made: dict[Hashable, Any] = {}

    def ask(self, part: Hashable, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`function(*args, **kwargs)`, as it was when this part was first asked for. Raises StillSearching as long as
        it is not known, and whatever `function` raised."""
        return self.answer(part, lambda: self._process.submit(function, *args, **kwargs))

    def answer(self, part: Hashable, start: Callable[[], Future[T]]) -> T:
        """The same for what is started in another way."""
        if part not in self._parts:
            self._parts[part] = start()
        if not self._parts[part].done():
            raise StillSearching
        found: T = self._parts[part].result()
        return found

    def once(self, part: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned the first time."""
        if part not in self._made:
            self._made[part] = make()
        made: T = self._made[part]
        return made
