"""Steps with equal arguments that do different work -> Branches: which work is expected next.

A loop may train two networks in turn, skip layers at random or route tokens: its steps do different work although they
look alike before their first op. Each kind of work that was recorded is a branch with its own plan. A step begins with
the branch that most often followed the same recent steps, because loops mostly repeat themselves. If it turns out to be
another branch, it continues with that branch's program where the two begin to differ (`outcore.eager.branching`). If it
is none of them, it continues without a plan, and its work is recorded when such a step is expected again.

There are at most `most_branches`. Beyond that, a new branch replaces the one that was not seen for longest. This
happens rarely: with random depth there are too many branches to record, and its steps follow a plan as far as they
agree with it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from outcore.fitting.settings import FittingSettings

Kind = TypeVar("Kind")


class Branches(Generic[Kind]):
    """The kinds of steps that share a key, in the order in which they were recorded."""

    def __init__(self, first: Kind, settings: FittingSettings) -> None:
        self.kinds = [first]
        self._settings = settings
        # the branches of the last steps; None stands for unknown work
        self._history: deque[Kind | None] = deque(maxlen=settings.num_remembered)
        self._num_steps = 0
        self._num_recorded = 1

    def __iter__(self) -> Iterator[Kind]:
        return iter(self.kinds)

    @property
    def is_single(self) -> bool:
        return len(self.kinds) == 1 and None not in self._history

    def expected(self) -> Kind | None:
        """Returns the branch that is expected next, or None if the next step should be recorded."""
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
        """Returns what most often followed the last steps, comparing as many of them as possible."""
        past = list(self._history)
        for length in range(min(self._settings.longest_pattern, len(past) - 1), 0, -1):
            recent = past[-length:]
            nexts = [past[at + length] for at in range(len(past) - length) if past[at : at + length] == recent]
            if nexts:
                counts = Counter(nexts)
                return max(counts, key=lambda kind: (counts[kind], kind is not None))
        # no pattern: expect the last branch again
        return next((kind for kind in reversed(past) if kind is not None), self.kinds[0])

    @property
    def _may_record(self) -> bool:
        settings = self._settings
        return self._num_recorded < settings.most_branches + settings.branch_share * self._num_steps

    def note(self, kind: Kind | None) -> None:
        """Notes which branch a step turned out to be; None if it was none of them."""
        self._num_steps += 1
        self._history.append(kind)

    def add(self, kind: Kind) -> None:
        """Adds a branch for a recorded step that does other work than all known ones."""
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
        """Returns the last position of a kind in the history, or -1 if it does not occur."""
        return max((at for at, seen in enumerate(self._history) if seen is kind), default=-1)
