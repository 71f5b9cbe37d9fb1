"""Makes sure that the workers of a training train the same thing, and that enough of them are present.

Every worker publishes a card in the store: its host, its address, and a fingerprint of its training (names, shapes and
dtypes of the model, the method and its settings). A training begins when every rank's card is there and all
fingerprints agree; a late worker compares its card with that of the first one. Models that differ are refused in one
sentence before any tensor is sent, because gloo aborts the process when it receives a message of another size.

The training gets a random nonce that only its members know. Connections are checked against it, and a saved centre that
was not requested by name is loaded only if it contains it.

By default (`min_members`) all workers are required at the start, and a majority of those that have not finished
afterwards, so that two halves that cannot reach each other do not both continue.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from outcore.elastic.place import Place, poll, read_count, read_json, write_json
from outcore.errors import ElasticError


class TrainingOver(ElasticError):
    """All other workers have finished this training and left; there is nothing left to do for a late one."""


class TooFew(ElasticError):
    """Fewer workers than `min_members` are present after the limit."""


@dataclass(frozen=True)
class Fingerprint:
    """What all workers must have in common: `model` lists its tensors, `settings` are those of `join`."""

    model: list[str]
    settings: dict[str, Any]

    @property
    def model_digest(self) -> str:
        return hashlib.sha256("\n".join(self.model).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Card:
    """The first thing that a worker publishes about itself."""

    rank: int
    uid: str
    host: str
    address: str
    settings: dict[str, Any]
    model_digest: str

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"


class Muster:
    """This worker's view of the training's members."""

    def __init__(self, place: Place, fingerprint: Fingerprint, *, min_members: int | None, join_limit_s: float) -> None:
        self.place, self.join_limit_s = place, join_limit_s
        self._min_members = min_members
        self._store = place.store
        self._store.compare_set("nonce", "", secrets.token_hex(8))
        self.nonce = self._store.get("nonce").decode()
        settings = json.loads(json.dumps(fingerprint.settings, default=str))  # as the others will read it
        self.card = Card(place.rank, place.uid, socket.gethostname(), place.local, settings, fingerprint.model_digest)
        self._model = fingerprint.model
        self.leads = self.is_late = False  # whether training starts with its weights, or before it

    @property
    def digest(self) -> float:
        """Fingerprint and nonce as a number that float64 represents exactly; connections compare it."""
        told = json.dumps([self.card.settings, self.card.model_digest, self.nonce], sort_keys=True)
        return float(int(hashlib.sha256(told.encode()).hexdigest()[:13], 16))

    def enter(self) -> None:
        """Publishes the card and waits for the others, unless the training has begun."""
        write_json(self._store, f"model/{self.place.uid}", self._model)
        write_json(self._store, f"card/{self.place.uid}", asdict(self.card))
        self._store.add("cards", 1)
        if not self._store.check(["begun"]):
            ranks = self._wait_for_all()
            cards = [card for rank in ranks if (card := self.read_card(self.latest_uid(rank))) is not None]
            for card in cards[1:]:
                self._compare(cards[0], card)
            # The first writer decides, in case a worker was restarted meanwhile.
            self._store.compare_set("begun", "", json.dumps([card.uid for card in cards]))
        began: Any = read_json(self._store, "begun", 1.0)
        self.leads, self.is_late = began[0] == self.place.uid, self.place.uid not in began
        if self.is_late:
            self._enter_late(began[0])

    def leave(self) -> None:
        """Publishes that this worker has finished, so that the others no longer expect it."""
        with suppress(RuntimeError):  # the store may have ended first; then nobody is left to tell
            self._store.set(f"left/{self.place.uid}", "1")

    def latest_uid(self, rank: int) -> str:
        return f"{rank}.{read_count(self._store, f'born/{rank}')}"

    def read_card(self, uid: str) -> Card | None:
        key = f"card/{uid}"
        return Card(**json.loads(self._store.get(key).decode())) if self._store.check([key]) else None

    def not_finished(self) -> list[int]:
        """Returns the ranks that have not finished, dead or alive."""
        return [
            rank for rank in range(self.place.num_ranks) if not self._store.check([f"left/{self.latest_uid(rank)}"])
        ]

    def num_required(self, not_finished: list[int]) -> int:
        """Returns how many members must be present for a running training to continue."""
        if self._min_members is not None:
            return min(self._min_members, len(not_finished))
        return len(not_finished) // 2 + 1

    @property
    def num_to_begin(self) -> int:
        return self.place.num_ranks if self._min_members is None else self._min_members

    def too_few(self, present: list[int]) -> TooFew:
        """Returns the error for too few members after the limit."""
        missing = [rank for rank in self.not_finished() if rank not in present]
        return TooFew(
            f"rank {self.place.rank} on {self.card.host} waited {self.join_limit_s:g} s for {self._describe(missing)}: "
            f"only {len(present)} of {self.place.num_ranks} workers are here; see whether the others run and can reach "
            f"{self.place.address[0]}:{self.place.address[1]}, raise join_limit_s, or set min_members={len(present)} "
            "to train without them"
        )

    def warn_of_too_few(self, present: list[int], not_finished: list[int]) -> None:
        missing = [rank for rank in not_finished if rank not in present]
        warnings.warn(
            f"rank {self.place.rank} waits for {self._describe(missing)}, at most {self.join_limit_s:g} s: "
            f"{len(present)} of {len(not_finished)} workers are fewer than the {self.num_required(not_finished)} that "
            "min_members asks for",
            stacklevel=2,
        )

    def _describe(self, ranks: list[int]) -> str:
        """Returns `rank(s) [2, 3] (host-b)`; hosts are known for ranks that were present once."""
        hosts = {card.host for rank in ranks if (card := self.read_card(self.latest_uid(rank))) is not None}
        return f"rank(s) {ranks}" + (f" ({', '.join(sorted(hosts))})" if hosts else "")

    def _wait_for_all(self) -> list[int]:
        """Returns the ranks whose cards are there: all, or at least `num_to_begin` after the limit."""

        def present() -> list[int]:
            return [
                rank for rank in range(self.place.num_ranks) if self._store.check([f"card/{self.latest_uid(rank)}"])
            ]

        def all_are_here() -> bool:
            num_cards = read_count(self._store, "cards")  # a single request while most are missing
            return num_cards >= self.place.num_ranks and (
                len(present()) == self.place.num_ranks or self._store.check(["begun"])
            )

        if poll(all_are_here, self.join_limit_s):
            return present()
        ranks = present()
        if len(ranks) < self.num_to_begin:
            raise self.too_few(ranks)
        missing = sorted(set(range(self.place.num_ranks)) - set(ranks))
        warnings.warn(
            f"rank(s) {missing} did not come within {self.join_limit_s:g} s; begun without them", stacklevel=2
        )
        return ranks

    def _enter_late(self, first_uid: str) -> None:
        first = self.read_card(first_uid)
        if first is not None:
            self._compare(first, self.card)
        others = [rank for rank in self.not_finished() if rank != self.place.rank]
        if not others and (self.place.num_ranks > 1 or self._was_finished_by_predecessor()):
            raise self.over()

    def over(self) -> TrainingOver:
        return TrainingOver(
            f"rank {self.place.rank} came when all other workers had finished this training and left; nothing is left "
            "to do: load what they saved, or start all of them again"
        )

    def _was_finished_by_predecessor(self) -> bool:
        birth = int(self.place.uid.partition(".")[2])
        return self._store.check([f"left/{self.place.rank}.{birth - 1}"])

    def _compare(self, first: Card, other: Card) -> None:
        """Raises ElasticError with one sentence if two workers do not train the same thing."""
        differs = next(
            (
                f"{name} is {theirs} at {other.name} and {first.settings.get(name)} at {first.name}"
                for name, theirs in other.settings.items()
                if first.settings.get(name) != theirs
            ),
            None,
        )
        if differs is None and first.model_digest != other.model_digest:
            differs = self._how_models_differ(first, other)
        if differs is not None:
            raise ElasticError(
                f"these workers do not train the same thing: {differs}; give all of them the same model and settings, "
                "or give each training a name of its own: join(..., name=...)"
            )

    def _how_models_differ(self, first: Card, other: Card) -> str:
        ours, theirs = (read_json(self._store, f"model/{card.uid}", 5.0) for card in (first, other))
        if not isinstance(ours, list) or not isinstance(theirs, list) or len(ours) != len(theirs):
            counts = [len(model) if isinstance(model, list) else "unknown" for model in (ours, theirs)]
            return f"the model has {counts[1]} tensors at {other.name} and {counts[0]} at {first.name}"
        mine, others = next((pair for pair in zip(ours, theirs) if pair[0] != pair[1]), ("other", "tensors"))
        return f"the model has {others} at {other.name} and {mine} at {first.name}"
