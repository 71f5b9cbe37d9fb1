"""Products small enough for two cores, checked against float64."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outcore.tiling.streams import ThreadStream
from outcore.tiling.tiles import Rates

# A machine whose links and products balance at tiles of a few dozen: small matrices then need many tiles and panels.
RATES = Rates(1e9, 1e9, 1e9, launch_s=2e-5)
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
_GENERATOR = torch.Generator().manual_seed(0)


def random_matrix(rows: int, cols: int, dtype: torch.dtype = torch.float32, *, flipped: bool = False) -> torch.Tensor:
    if flipped:
        return torch.randn(cols, rows, generator=_GENERATOR).to(dtype).t()
    return torch.randn(rows, cols, generator=_GENERATOR).to(dtype)


def assert_product(c: object, a: torch.Tensor, b: torch.Tensor, plus: torch.Tensor | None = None) -> None:
    """Every element within the type's rounding of the float64 answer, on the scale of the sum of magnitudes."""
    assert isinstance(c, torch.Tensor)
    exact = a.double() @ b.double()
    scale = a.double().abs() @ b.double().abs() + 1e-30
    if plus is not None:
        exact, scale = exact + plus.double(), scale + plus.double().abs()
    error = ((c.double() - exact).abs() / scale).max().item() if c.numel() else 0.0
    assert c.shape == exact.shape
    assert error <= TOLERANCES[c.dtype], f"relative error {error}"


class Failing(ThreadStream):
    """A device that is lost after some products."""

    def __init__(self, name: str, num_good: int) -> None:
        super().__init__(name)
        self._num_left = num_good

    def run(self, operation: Callable[[], object], work: float = 0.0) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            super().run(lose, work)
        else:
            super().run(operation, work)


def lose() -> None:
    raise RuntimeError("device lost")
