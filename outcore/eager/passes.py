"""The ops of a recorded step -> which of them a rerun does in one pass with the op that reads what they make.

Each where the bits are the same: a batch normalisation with a norm replay, rectified; a sum, rectified, along with
such a normalisation before it; a product, cast. What lies in between is saved by nobody, and read by the next op of the
pass only (or by several casts): so nobody wants it alone, and a plan knows only the last op of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outcore.eager import fused_replay as fused
from outcore.eager.cells import View
from outcore.eager.norm_replay import NormReplay
from outcore.eager.replay import Recipe
from outcore.eager.signatures import CAST, PRODUCT, RECTIFIERS
from outcore.values import Value

Pass = tuple[tuple[int, ...], float]  # the ops before its last one, and how long all of them take


class ReadsAndWrites(Protocol):
    """An op, as far as passes are concerned."""

    @property
    def reads(self) -> tuple[int, ...]: ...
    @property
    def writes(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class _Part:
    """An op that may be part of a pass, as it was recorded: what it was given, and the one tensor that it made."""

    kind: str  # norm, sum, product, cast, rectifier
    given: tuple[View | None, ...]
    made: View
    writes_into: bool
    folded: bool


class Passes:
    """Looks at a step's ops, and says at the end which of them make passes."""

    def __init__(self, device: torch.device, on_refused: Callable[[], None]) -> None:
        self._device, self._on_refused = device, on_refused
        self._parts: dict[int, _Part] = {}

    def see(self, index: int, recipe: Recipe, args: Sequence[Any], made: torch.Tensor, *, is_norm: bool) -> None:
        """An op that can be run again made a tensor, or wrote into one. Only what has a storage to itself counts."""
        kind = "norm" if is_norm else _kind_of(recipe, args)
        view = View(made)
        if kind and view.offset == 0 and view.num_bytes == made.untyped_storage().nbytes():
            given = tuple(View(arg) if isinstance(arg, torch.Tensor) else None for arg in args)
            folded = is_norm and fused.is_folded(recipe.func, args[0])
            self._parts[index] = _Part(kind, given, view, bool(recipe.signature.written), folded)

    def find(
        self,
        ops: Sequence[ReadsAndWrites],
        values: Sequence[Value],
        saved: set[int],
        seconds: Sequence[float],
        norm_replays: Mapping[int, NormReplay],
    ) -> dict[int, Pass]:
        """By the last op of each. A pass takes as long as the one of its ops that moves as many bytes."""
        readers: dict[int, list[int]] = {}
        for index, op in enumerate(ops):
            for value in op.reads:
                readers.setdefault(value, []).append(index)

        def maker_of(reader: int, position: int = 0) -> int:
            """The op that made what a part reads, for it alone, or for casts alone; -1: there is none."""
            value, view = ops[reader].reads[position], self._parts[reader].given[position]
            maker = values[value].producer
            made = self._parts[maker].made if maker in self._parts else None
            if made is None or view is None or value in saved or ops[maker].writes[0] != value:
                return -1
            alone = len(readers[value]) == 1 or all(self._is("cast", other) for other in readers[value])
            return maker if alone and view.dtype is made.dtype and view.lies_like(made) else -1

        passes: dict[int, Pass] = {}
        for index, part in self._parts.items():
            maker = maker_of(index) if part.kind in ("cast", "rectifier") else -1
            if part.kind == "cast" and self._can_multiply(maker, part):
                passes[index] = (maker,), seconds[index]
            elif part.kind == "rectifier" and self._can_add(maker):
                places = (0,) if self._parts[maker].writes_into else (0, 1)
                norms = [norm for norm in (maker_of(maker, place) for place in places) if self._can_add_to(norm)]
                norms = [norm for norm in norms if _pays(norm_replays[norm], seconds[index])]
                passes[index] = (*norms[:1], maker), seconds[maker]
            elif part.kind == "rectifier" and self._is("norm", maker) and _pays(norm_replays[maker], seconds[index]):
                passes[index] = (maker,), norm_replays[maker].fused_s()
        return passes

    def _is(self, kind: str, index: int) -> bool:
        return index in self._parts and self._parts[index].kind == kind

    def _can_add(self, index: int) -> bool:
        return self._is("sum", index) and self._asks(fused.is_ready, self._device, self._parts[index].made.dtype)

    def _can_add_to(self, index: int) -> bool:
        part = self._parts.get(index)
        if part is None or part.kind != "norm":
            return False
        return self._asks(fused.adds_to_norms_alike, self._device, part.made.dtype, part.folded)

    def _can_multiply(self, index: int, cast: _Part) -> bool:
        if not self._is("product", index):
            return False
        types = [view.dtype for view in self._parts[index].given if view is not None]
        return self._asks(fused.multiplies_alike, self._device, *types, cast.made.dtype)

    def _asks(self, question: Callable[..., bool], *about: Any) -> bool:
        try:
            return question(*about)
        except torch.OutOfMemoryError:
            self._on_refused()
            return False


def _kind_of(recipe: Recipe, args: Sequence[Any]) -> str:
    name = recipe.signature.name
    if name in RECTIFIERS:
        return "rectifier"
    if name == CAST:
        return "cast" if recipe.kwargs.keys() == {"dtype"} else ""
    if recipe.is_plain_sum:
        return "sum" if fused.lie_alike(args[0], args[1]) else ""
    return "product" if name == PRODUCT and fused.as_factors(args[0], args[1]) is not None else ""


def _pays(norm_replay: NormReplay, rectifying_s: float) -> bool:
    alone_s = norm_replay.seconds()
    return alone_s is not None and norm_replay.fused_s() < alone_s + rectifying_s
