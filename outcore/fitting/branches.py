"""Steps that nothing tells apart before their first op -> which work is expected next: Branches.

A loop that trains two networks in turn, skips layers at random or routes tokens does different work in steps that are
called alike. Each kind of work that was recorded is a branch with a plan of its own. A step begins with the branch that
mostly came after the same steps as now: loops mostly repeat themselves. Where it turns out to be another branch,
it goes over to that one's program as soon as the two differ (`outcore.eager.branching`); where it turns out to be none
of them, it goes on without a plan from there, and its work is recorded when it is expected again.

There are at most `most_branches`. Beyond that the one that was not seen for longest gives its place to a new one, but
seldom: random depth has more branches than anybody can record, and its steps run planned as far as they agree.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from outcore.fitting.settings import FittingSettings

Kind = TypeVar("Kind")


class Branches(Generic[Kind]):
    """Kinds of steps that are called alike, the first of them the one that was there first."""

    def __init__(self, first: Kind, settings: FittingSettings) -> None:
        self.kinds = [first]
        self._settings = settings
        self._history: deque[Kind | None] = deque(maxlen=settings.num_remembered)  # what came; None: something else
        self._num_steps = 0
        self._num_recorded = 1

    def __iter__(self) -> Iterator[Kind]:
        return iter(self.kinds)

    @property
    def is_single(self) -> bool:
        return len(self.kinds) == 1 and None not in self._history

    def expected(self) -> Kind | None:
        """The branch that comes next; None where that is something to be recorded."""
        if self.is_single:
            return self.kinds[0]
        expected = self._after_the_same()
        if expected is None and self._may_record:
            return None
        if expected is None:
            known = Counter(kind for kind in self._history if kind is not None)
            return known.most_common(1)[0][0] if known else self.kinds[0]
        return expected

    def _after_the_same(self) -> Kind | None:
        """What mostly came after as many steps as possible that were the same as the last ones."""
        past = list(self._history)
        for length in range(min(self._settings.longest_pattern, len(past) - 1), 0, -1):
            recent = past[-length:]
            nexts = [past[at + length] for at in range(len(past) - length) if past[at : at + length] == recent]
            if nexts:
                counts = Counter(nexts)
                return max(counts, key=lambda kind: (counts[kind], kind is not None))
        return next((kind for kind in reversed(past) if kind is not None), self.kinds[0])  # nothing like it: the same

    @property
    def _may_record(self) -> bool:
        settings = self._settings
        return self._num_recorded < settings.most_branches + settings.branch_share * self._num_steps

    def note(self, kind: Kind | None) -> None:
        """What a step turned out to be; None: none of the branches."""
        self._num_steps += 1
        self._history.append(kind)

    def add(self, kind: Kind) -> None:
        """A step was recorded that does other work than all branches."""
        self.kinds.append(kind)
        if len(self.kinds) > self._settings.most_branches:
            self.remove(min(self.kinds[:-1], key=self._last_seen))

    def note_recorded(self) -> None:
        self._num_recorded += 1

    def remove(self, kind: Kind) -> None:
        self.kinds.remove(kind)
        kept = (None if seen is kind else seen for seen in self._history)
        self._history = deque(kept, maxlen=self._history.maxlen)

    def _last_seen(self, kind: Kind) -> int:
        """The position in the history; -1 for one that is not in it."""
        return max((at for at, seen in enumerate(self._history) if seen is kind), default=-1)
