"""The limit of the model that a library trains."""

from __future__ import annotations

from pathlib import Path

import torch

from outcore.limit import Limited, limit


class ModelLimit:
    """Creates the limit when the first training step begins, because libraries move the model to its device late. The
    limit stays as long as the same model is trained, so that a second training uses the plans of the first."""

    def __init__(self, memory: int | str, *, host: int | str, disk: str | Path | None) -> None:
        self._memory, self._host, self._disk = memory, host, disk
        self.ooc: Limited | None = None

    def of(self, model: torch.nn.Module) -> Limited:
        if self.ooc is not None and self.ooc.model is model and not self.ooc.closed:
            return self.ooc
        if self.ooc is not None:
            self.ooc.close()
        self.ooc = limit(model, self._memory, host=self._host, disk=self._disk)
        return self.ooc
