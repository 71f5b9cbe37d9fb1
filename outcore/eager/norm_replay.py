"""Compares a batch normalisation that just ran with cheaper ways to make its result again, with and without a
rectifier.

The whole result is compared, and once for each shape and layout also a result with drawn weights: a new network has
ones and zeros, with which every order of multiplication gives the same number until the first update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outcore.eager import fused_replay as fused
from outcore.eager.replay import below_everything, normalise_again
from outcore.eager.settings import EAGER
from outcore.eager.signatures import OpOverload, signature_of
from outcore.memory.clock import Clock

Differences = tuple[torch.Tensor, torch.Tensor | None]  # of the replay, and of the rectified one; not synchronized
Proofs = dict[Any, Differences]  # comparisons with drawn weights, of one recording


class NormReplay:
    """The comparisons of one op, read at the end. Without room for a comparison there is no norm replay."""

    def __init__(
        self,
        func: OpOverload,
        args: Sequence[Any],
        fresh: Sequence[torch.Tensor],
        *,
        piece_bytes: int,
        free_bytes: float,
        proofs: Proofs,
        on_refused: Callable[[], None],
    ) -> None:
        self._func, self._piece_bytes, self._on_refused = func, piece_bytes, on_refused
        self._differ: list[torch.Tensor] = []
        self._fused_differ: list[torch.Tensor] = []
        self._is_exact = self._can_fuse = True
        self._clock, self._fused_clock = (Clock(fresh[0].device, spin=False) for _ in range(2))
        self._num_pieces = 1.0
        try:
            with below_everything():
                self._note(self._compare(args, fresh))
                self._note(self._proof(args, fresh, free_bytes, proofs))
        except torch.OutOfMemoryError:
            self._is_exact = False
            on_refused()
        except (RuntimeError, IndexError, ValueError):  # unsupported dtypes, or no statistics
            self._is_exact = False

    def _note(self, differences: Differences | None) -> None:
        if differences is None:
            self._is_exact = False
            return
        self._differ.append(differences[0])
        if differences[1] is None:
            self._can_fuse = False
        else:
            self._fused_differ.append(differences[1])

    def _proof(
        self, args: Sequence[Any], fresh: Sequence[torch.Tensor], free_bytes: float, proofs: Proofs
    ) -> Differences | None:
        """Runs the op once more with drawn weights and compares. Returns None if there is no room for its result."""
        given = [None if weight is None else (weight.dtype, weight.shape) for weight in args[1:3]]
        key = (self._func, args[0].shape, args[0].stride(), args[0].dtype, *given)
        if key not in proofs and self._is_exact:
            piece_bytes = max(self._piece_bytes, fresh[0].nbytes // max(1, fresh[0].shape[0]))  # at least a row
            if fresh[0].nbytes + EAGER.piece_copies * piece_bytes > free_bytes:
                return None
            drawn = _with_drawn_weights(self._func, args, fresh[1], fresh[2])
            differences = self._compare(drawn, self._func(*drawn))
            if differences is None:
                return None
            proofs[key] = differences
        return proofs.get(key)

    def _compare(self, args: Sequence[Any], made: Sequence[torch.Tensor]) -> Differences | None:
        """Compares in pieces, because recording must not need much more memory than the op."""
        out, mean, deviation = made[:3]
        num_rows = min(out.shape[0], max(1, self._piece_bytes * out.shape[0] // max(out.nbytes, 1)))
        self._num_pieces = out.shape[0] / num_rows
        differs = fused_differs = torch.zeros((), dtype=torch.bool, device=out.device)
        for start in range(0, out.shape[0], num_rows):
            rows = slice(start, start + num_rows)
            started = self._clock.start()
            again = normalise_again(self._func, args, mean, deviation, rows)
            self._clock.stop(started)
            if again is None:
                return None
            differs = differs | (again != out[rows]).any()
            if start == 0:
                self._fuse(args, mean, deviation, rows)  # compiles it
            started = self._fused_clock.start()
            together = self._fuse(args, mean, deviation, rows)
            self._fused_clock.stop(started)
            if together is not None:
                fused_differs = fused_differs | fused.differ(together, again.relu_())
        return differs, fused_differs if self._can_fuse else None

    def _fuse(
        self, args: Sequence[Any], mean: torch.Tensor, deviation: torch.Tensor, rows: slice
    ) -> torch.Tensor | None:
        together = None
        try:
            if self._can_fuse:
                together = normalise_again(self._func, args, mean, deviation, rows, rectified=True)
        except torch.OutOfMemoryError:  # one row may be as large as the op; the norm replay is still possible
            self._on_refused()
        self._can_fuse = together is not None
        return together

    def seconds(self) -> float | None:
        """Returns the seconds of the norm replay; None if it does not give the same bits."""
        if not self._is_exact or any(bool(found) for found in self._differ):
            return None
        return self.seconds_on(self._clock)

    def fused_s(self) -> float:
        """Returns the seconds of the norm replay with a rectifier; infinite if they cannot be fused."""
        differences = [*self._differ, *self._fused_differ]
        if not self._is_exact or not self._can_fuse or any(bool(differs) for differs in differences):
            return math.inf
        return self.seconds_on(self._fused_clock)

    def seconds_on(self, clock: Clock) -> float:
        whole = clock.seconds()[: int(self._num_pieces)]  # the last piece may be a small one
        return min(whole) * self._num_pieces


def _with_drawn_weights(
    func: OpOverload, args: Sequence[Any], mean: torch.Tensor, deviation: torch.Tensor
) -> list[Any]:
    """Returns arguments with weights that use all digits, without a random generator, and temporary running statistics.

    After rounding to half precision, a few thousand results look alike for every order of multiplication. So the bias
    cancels the first element of each channel except for its rounding error, whose digits are all visible."""
    drawn, (_, weight, bias) = list(args), args[:3]
    numbers = torch.arange(1, mean.numel() + 1, device=mean.device, dtype=torch.float32).sin() * EAGER.drawn_scale
    if isinstance(weight, torch.Tensor):
        drawn[1] = numbers = numbers.to(weight.dtype)
    if isinstance(bias, torch.Tensor):
        first = args[0][(0, slice(None), *(0 for _ in args[0].shape[2:]))]
        drawn[2] = (numbers * (first - mean) * deviation).neg().to(bias.dtype)
    for index in signature_of(func).scratch(args):
        if isinstance(args[index], torch.Tensor):
            drawn[index] = torch.empty_like(args[index])
    return drawn
