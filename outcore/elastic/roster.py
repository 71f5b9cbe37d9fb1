"""Groups the present workers into generations, each with its own process group.

A generation is a list of workers that exchange with each other. It ends when a member is lost (an exchange fails),
leaves, or when a newcomer waits; all present workers then meet under the next number. The first to arrive leads: it
waits for the expected workers, closes the list and publishes it. It closes the list early, `settle_s` after the old
members began to arrive, if enough workers are present (muster.py). A worker that is too late, or whose leader died,
tries the next number. Every wait has a limit, after which an error names the missing workers.

All-reduce systems (torchrun, DDP) restart all workers instead. Elastic averaging need not, because its state is the
centre.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import cast

from outcore.elastic.muster import Muster, TooFew
from outcore.elastic.place import POLL_S, raise_count, read_count, read_json, write_json
from outcore.elastic.transport import interfaces, listening_address
from outcore.elastic.wire import NUM_LANES, Group, NcclGroup, PeerLost
from outcore.errors import ElasticError

BEAT_S = 0.2  # guessed: heartbeat of a leader that waits


class Roster:
    """This worker's view of the generations."""

    def __init__(self, muster: Muster, limit_s: float, *, nccl: bool = False) -> None:
        self.muster, self.place, self.limit_s = muster, muster.place, limit_s
        self.settle_s = min(limit_s / 3, 5.0)
        self.generation = 0
        self.members: list[str] = []
        self._group_class = NcclGroup if nccl else Group

    @property
    def ranks(self) -> list[int]:
        return [rank_of(uid) for uid in self.members]

    def someone_waits(self) -> bool:
        """Whether a worker has registered for the next generation: a newcomer, or one that was dropped."""
        return read_count(self.place.store, f"gen/{self.generation + 1}/count") > 0

    def leave(self) -> None:
        """Announces that this worker leaves."""
        self.muster.leave()

    def regroup(self) -> Group:
        """Returns the next generation's group. Raises ElasticError if too few members come or they cannot connect."""
        end_s = time.monotonic() + self.muster.join_limit_s
        target, unreached = self._current() + 1, ""
        while True:
            try:
                members = self._meet(target, end_s)
            except TooFew as error:
                raise ElasticError(f"{error}{unreached}") from None
            if members is not None and self.place.uid in members:
                group = self._connect(target, members)
                if group is not None:
                    return group
                unreached = self._unreached(members)
            if time.monotonic() > end_s:
                present = sorted({rank_of(uid) for uid in self._registered(target)})
                raise ElasticError(f"{self.muster.too_few(present)}{unreached}")
            target += 1

    def _current(self) -> int:
        return max(self.generation, read_count(self.place.store, "generation"))

    def _meet(self, target: int, end_s: float) -> list[str] | None:
        """Registers for generation `target`; returns its members once the list is closed, None if its leader died."""
        store, key = self.place.store, f"gen/{target}"
        seat = store.add(f"{key}/count", 1)
        store.set(f"{key}/seat/{seat}", self.place.uid)
        if seat == 1:
            return self._lead(target, end_s)
        self._follow(target, end_s)
        if not store.check([f"{key}/members"]):
            return None
        return cast("list[str]", read_json(store, f"{key}/members", 1.0))

    def _follow(self, target: int, end_s: float) -> None:
        """Waits until the list is closed, the generation is skipped, or its leader is silent for too long."""
        store, key = self.place.store, f"gen/{target}"
        beat, heard_s = -1, time.monotonic()
        while not store.check([f"{key}/members"]) and read_count(store, "generation") <= target:
            now_s, latest = time.monotonic(), read_count(store, f"{key}/beat")
            if latest != beat:
                beat, heard_s = latest, now_s
            if now_s - heard_s > 2 * self.settle_s + 1 or now_s > end_s + self.settle_s:
                return
            time.sleep(POLL_S)

    def _lead(self, target: int, end_s: float) -> list[str]:
        settling_since_s, beat_s, has_warned = None, 0.0, False
        while True:
            old = self._old_members(target - 1)  # read again, because members may leave meanwhile
            here = self._registered(target)
            now_s = time.monotonic()
            if now_s - beat_s > BEAT_S:
                self.place.store.add(f"gen/{target}/beat", 1)
                beat_s = now_s
            if settling_since_s is None and set(here) & set(old):
                settling_since_s = now_s
            if self._complete(here, old):
                break
            settled = settling_since_s is not None and now_s - settling_since_s > self.settle_s
            if (settled and old) or now_s > end_s:
                present, not_finished = sorted({rank_of(uid) for uid in here}), self.muster.not_finished()
                num_required = self.muster.num_required(not_finished) if old else self.muster.num_to_begin
                if len(present) >= num_required:
                    break
                if now_s > end_s:
                    raise self.muster.too_few(present)
                if not has_warned:
                    self.muster.warn_of_too_few(present, not_finished)
                    has_warned = True
            time.sleep(POLL_S)
        members = sorted(here, key=rank_of)
        write_json(self.place.store, f"gen/{target}/members", members)
        raise_count(self.place.store, "generation", target)
        return members

    def _old_members(self, generation: int) -> list[str]:
        """Returns the members of the running generation that have not left."""
        while generation > 0:  # a number may have been skipped because its leader died
            if self.place.store.check([f"gen/{generation}/members"]):
                members = cast("list[str]", read_json(self.place.store, f"gen/{generation}/members", 1.0) or [])
                old = [uid for uid in members if not self.place.store.check([f"left/{uid}"])]
                if not old and self.place.uid not in members:
                    raise self.muster.over()
                return old
            generation -= 1
        return []

    def _complete(self, here: list[str], old: list[str]) -> bool:
        """Whether no worker is missing: of the old members, or of all at the first meeting."""
        if old:
            return set(old) <= set(here) and len(here) >= self.muster.num_required(self.muster.not_finished())
        return {rank_of(uid) for uid in here} >= set(self.muster.not_finished())

    def _registered(self, target: int) -> list[str]:
        store, key = self.place.store, f"gen/{target}"
        seats = range(1, read_count(store, f"{key}/count") + 1)
        return [store.get(f"{key}/seat/{seat}").decode() for seat in seats if store.check([f"{key}/seat/{seat}"])]

    def _connect(self, target: int, members: list[str]) -> Group | None:
        ranks = [rank_of(uid) for uid in members]
        connect_s = max(self.limit_s, 2.0)
        store = self.place.sub_store(f"wire/{target}")
        store.set_timeout(timedelta(seconds=connect_s))
        index = members.index(self.place.uid)
        try:
            address = self._listening_address(members)
            group = self._group_class(store, index, ranks, self.limit_s, num_lanes=NUM_LANES, address=address)
        except PeerLost:
            return None
        self.generation, self.members = target, members
        return group

    def _listening_address(self, members: list[str]) -> str:
        cards = [self.muster.read_card(uid) for uid in members]
        return listening_address(self.place.local, [card.address for card in cards if card is not None])

    def _unreached(self, members: list[str]) -> str:
        """Returns the text for members that met in the store but could not connect to each other."""
        cards = [card for uid in members if (card := self.muster.read_card(uid)) is not None]
        others = ", ".join(card.name for card in cards if card.uid != self.place.uid) or "anybody"
        where = ", ".join(interfaces()) or self._listening_address(members)
        return (
            f"; before that, rank {self.place.rank} did not connect with {others} although all of them reached the "
            f"store: gloo uses {where} here; where that is the reason, set GLOO_SOCKET_IFNAME on every host to an "
            "interface that the others reach"
        )


def rank_of(uid: str) -> int:
    return int(uid.partition(".")[0])
