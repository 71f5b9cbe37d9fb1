"""Workers that come, go and vanish -> a sequence of agreed generations, each with its own group.

A generation is a list of workers that exchange together. It ends when a member is lost (an exchange fails), leaves, or
when someone waits to be let in; everybody present then meets under the next number. The first to arrive leads: it waits
for those expected, at most `settle_s` after the old members began to arrive, closes the list and publishes it. Who
comes too late, or whose leader died, tries the number after. No wait is without a limit.

All-reduce systems restart everybody instead (torchrun, DDP): elastic averaging need not, for the state is the centre.
"""

from __future__ import annotations

import time
import warnings
from contextlib import suppress
from datetime import timedelta
from typing import cast

from outcore.elastic.place import POLL_S, Place, poll, raise_count, read_count, read_json, write_json
from outcore.elastic.wire import NUM_LANES, Group, NcclGroup, PeerLost
from outcore.errors import ElasticError


class Roster:
    """This worker's view of the generations."""

    def __init__(self, place: Place, limit_s: float, join_limit_s: float, *, nccl: bool = False) -> None:
        self.place, self.limit_s, self.join_limit_s = place, limit_s, join_limit_s
        self.settle_s = min(limit_s / 3, 5.0)
        self.generation = 0
        self.members: list[str] = []
        self._group_class = NcclGroup if nccl else Group

    @property
    def ranks(self) -> list[int]:
        return [rank_of(uid) for uid in self.members]

    def someone_waits(self) -> bool:
        """Whether a worker has registered for the next generation (a newcomer, or one that was dropped)."""
        return read_count(self.place.store, f"gen/{self.generation + 1}/count") > 0

    def leave(self) -> None:
        """Says goodbye, so that the others need not find out."""
        with suppress(RuntimeError):  # the store may have ended first; then nobody is left to tell
            self.place.store.set(f"left/{self.place.uid}", "1")

    def regroup(self) -> Group:
        """The next generation's group; raises ElasticError naming the missing ranks when there is none in time."""
        end_s = time.monotonic() + self.join_limit_s
        target = self._current() + 1
        while True:
            members = self._meet(target, end_s)
            if members is not None and self.place.uid in members:
                group = self._connect(target, members)
                if group is not None:
                    return group
            if time.monotonic() > end_s:
                missing = sorted(set(range(self.place.num_ranks)) - {rank_of(uid) for uid in members or []})
                raise ElasticError(
                    f"rank {self.place.rank} found no group within {self.join_limit_s:g} s; missing rank(s) {missing}: "
                    "see whether they run, or raise join_limit_s"
                )
            target += 1

    def _current(self) -> int:
        return max(self.generation, read_count(self.place.store, "generation"))

    def _meet(self, target: int, end_s: float) -> list[str] | None:
        """Registers for generation `target`; returns its members once the list is closed."""
        store, key = self.place.store, f"gen/{target}"
        seat = store.add(f"{key}/count", 1)
        store.set(f"{key}/seat/{seat}", self.place.uid)
        if seat == 1:
            return self._lead(target, end_s)
        # Once an old member is here the leader closes within settle_s; a leader that died costs this much and no more.
        in_a_hurry = self.generation > 0
        patience_s = 2 * self.settle_s + 1 if in_a_hurry else max(self.settle_s, end_s - time.monotonic())
        poll(lambda: store.check([f"{key}/members"]) or read_count(store, "generation") > target, patience_s)
        if not store.check([f"{key}/members"]):
            return None
        return cast("list[str]", read_json(store, f"{key}/members", 1.0))

    def _lead(self, target: int, end_s: float) -> list[str]:
        settling_since_s: float | None = None
        while True:
            old = self._old_members(target - 1)  # read again: members may say goodbye while this one waits
            here = self._registered(target)
            now_s = time.monotonic()
            if settling_since_s is None and set(here) & set(old):
                settling_since_s = now_s
            if self._complete(here, old) or now_s > end_s:
                break
            if settling_since_s is not None and now_s - settling_since_s > self.settle_s:
                break
            time.sleep(POLL_S)
        members = sorted(here, key=rank_of)
        write_json(self.place.store, f"gen/{target}/members", members)
        raise_count(self.place.store, "generation", target)
        return members

    def _old_members(self, generation: int) -> list[str]:
        """Members of the running generation that have not said goodbye."""
        while generation > 0:  # a number may have been skipped because its leader died
            if self.place.store.check([f"gen/{generation}/members"]):
                members = cast("list[str]", read_json(self.place.store, f"gen/{generation}/members", 1.0) or [])
                return [uid for uid in members if not self.place.store.check([f"left/{uid}"])]
            generation -= 1
        return []

    def _complete(self, here: list[str], old: list[str]) -> bool:
        if not old:  # the first meeting of all, or everyone else has finished
            first = read_count(self.place.store, "generation") == 0
            return len(here) >= (self.place.num_ranks if first else 1)
        return set(old) <= set(here)

    def _registered(self, target: int) -> list[str]:
        store, key = self.place.store, f"gen/{target}"
        seats = range(1, read_count(store, f"{key}/count") + 1)
        return [store.get(f"{key}/seat/{seat}").decode() for seat in seats if store.check([f"{key}/seat/{seat}"])]

    def _connect(self, target: int, members: list[str]) -> Group | None:
        ranks = [rank_of(uid) for uid in members]
        connect_s = max(self.limit_s, 2.0)
        store = self.place.sub_store(f"wire/{target}")
        store.set_timeout(timedelta(seconds=connect_s))
        try:
            index, host = members.index(self.place.uid), self.place.address[0]
            group = self._group_class(store, index, ranks, self.limit_s, num_lanes=NUM_LANES, host=host)
        except PeerLost:
            return None
        if self.generation == 0 and target == 1 and len(members) < self.place.num_ranks:
            missing = sorted(set(range(self.place.num_ranks)) - set(ranks))
            warnings.warn(
                f"rank(s) {missing} did not come within {self.join_limit_s:g} s; begun without them", stacklevel=2
            )
        self.generation, self.members = target, members
        return group


def rank_of(uid: str) -> int:
    return int(uid.partition(".")[0])
