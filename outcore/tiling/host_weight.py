"""A module whose weight stays in host memory when `.to()`, `.half()` or `.cuda()` are called.

`nn.Module` moves all of its parameters, one after the other, through `_apply`. A weight that exceeds the device's
memory would fail there, or displace everything else. Here the function is first applied to an empty tensor: if the
result is on another device, only the change of dtype is applied to the weight, on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import torch
from torch import nn

from outcore.errors import TilingError
from outcore.tiling.lanes import Pins


class HostWeight(nn.Module):
    """`weight` stays on the host; other parameters move as usual."""

    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self._pins: Pins | None = None
        self._cast: _Cast | None = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        own = (self.weight, self.weight.grad)

        def on_host(tensor: torch.Tensor) -> torch.Tensor:
            if not any(tensor is one for one in own):
                return fn(tensor)
            tried = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if tried.device.type == "cpu":
                return fn(tensor)
            if tensor.is_meta and not tried.is_meta:  # `to_empty`: uninitialized memory on the host
                return torch.empty_like(tensor, dtype=tried.dtype, device="cpu")
            return tensor.to(tried.dtype)

        address = self.weight.data_ptr()
        applied = super()._apply(on_host, recurse)  # type: ignore[no-untyped-call]
        if self.weight.data_ptr() != address:
            self.unlock()
        assert isinstance(applied, type(self))
        return applied

    def bring_home(self) -> None:
        """Moves a weight that is on a device to the host, in place, so that references to the parameter stay valid."""
        if self.weight.is_meta:
            return
        with torch.no_grad():
            self.weight.data = self.weight.data.to("cpu")
            if self.weight.grad is not None:
                self.weight.grad = self.weight.grad.to("cpu")

    def weight_as(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the weight in another dtype, for autocast: a copy on the host, made once for every change of it."""
        weight = self.weight.detach()
        if dtype == weight.dtype:
            return weight
        if self._cast is None or not self._cast.is_of(self.weight, dtype):
            previous = self._cast.copy if self._cast is not None and self._cast.copy.dtype == dtype else None
            self._cast = _Cast(self.weight, dtype, previous)
            if self._pins is not None:
                self._pins.lock(self._cast.copy)
        return self._cast.copy

    def cast_copies(self) -> tuple[torch.Tensor, ...]:
        """Returns copies of the weight in other dtypes, which must be written together with the weight."""
        return () if self._cast is None else (self._cast.copy,)

    def weight_was_written(self, *, copies_too: bool) -> None:
        """Tells autograd that the weight was changed; with `copies_too` its copies were changed as well."""
        torch.autograd.graph.increment_version(self.weight)
        if self._cast is not None and copies_too:
            self._cast.belongs_to(self.weight)

    def lock_weight(self) -> None:
        """Page-locks the weight once, for copies by a device."""
        if self._pins is None and torch.cuda.is_available():
            self._pins = Pins()
            self._pins.lock(self.weight.detach())

    def unlock(self) -> None:
        """Drops locks and copies, because the weight has other memory."""
        if self._pins is not None:
            self._pins.close()
        self._pins = self._cast = None

    def empty_like_weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns host memory of the weight's shape, page-locked for a device: torch keeps freed locked blocks, so that
        only the first step pays for locking."""
        dtype = dtype or self.weight.dtype
        if self._pins is not None:
            with suppress(RuntimeError):
                return torch.empty(self.weight.shape, dtype=dtype, pin_memory=True)
        return torch.empty(self.weight.shape, dtype=dtype)

    def check_on_host(self) -> None:
        if self.weight.device.type != "cpu":
            raise TilingError(
                f"the weight of a {type(self).__name__} is on {self.weight.device}; it stays on the host: call "
                "bring_home(), and move the rest of the network with .to()"
            )

    def __del__(self) -> None:
        pins: Pins | None = self.__dict__.get("_pins")
        if pins is not None:
            pins.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pins": None, "_cast": None}


class _Cast:
    """A copy of a weight in another dtype, with the version of the weight that it was made from."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, memory: torch.Tensor | None) -> None:
        self.copy = torch.empty(weight.shape, dtype=dtype) if memory is None else memory
        self.copy.copy_(weight.detach())
        self.belongs_to(weight)

    def belongs_to(self, weight: torch.Tensor) -> None:
        self._version, self._address = weight._version, weight.data_ptr()

    def is_of(self, weight: torch.Tensor, dtype: torch.dtype) -> bool:
        now = weight._version, weight.data_ptr(), dtype
        return (self._version, self._address, self.copy.dtype) == now


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype of products on this device under autocast; None outside of it."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
