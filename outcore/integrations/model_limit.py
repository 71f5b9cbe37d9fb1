"""The limit of the model that a library trains."""

from __future__ import annotations

from typing import Any

import torch

from outcore.errors import OutcoreError
from outcore.limit import Limited, limit
from outcore.planning import check_planner
from outcore.units import ENDLESS_BYTES, parse_bytes

OPTIONS = ("host", "disk", "planner", "plan", "measure", "cache")  # of `outcore.limit`, that integrations pass on


class ModelLimit:
    """Creates the limit when the first training step begins, because libraries move the model to its device late. The
    limit stays as long as the same model is trained, so that a second training uses the plans of the first.

    Sizes and names that cannot be right are refused at once, before a library has loaded its data."""

    def __init__(self, memory: int | str, **options: Any) -> None:
        for name in options:
            if name not in OPTIONS:
                raise OutcoreError(f"there is no option {name!r} here; choose from memory, {', '.join(OPTIONS)}")
        for size in (memory, options.get("host", "auto")):
            if size != "auto":
                parse_bytes(size, of_bytes=ENDLESS_BYTES)
        check_planner(options.get("planner", "hybrid"))
        self._memory, self._options = memory, options
        self.ooc: Limited | None = None

    def of(self, model: torch.nn.Module) -> Limited:
        if self.ooc is not None and self.ooc.model is model and not self.ooc.closed:
            return self.ooc
        if self.ooc is not None:
            self.ooc.close()
        self.ooc = limit(model, self._memory, **self._options)
        return self.ooc
