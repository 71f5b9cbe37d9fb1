"""Elastic averaging over torch.distributed: many workers, few messages, and workers that may fail.

`join` is the public function; `METHODS` lists the methods it supports. Follows arXiv 1708.02983 (You, Buluc, Demmel,
SC17) and arXiv 1412.6651 (Zhang, Choromanska, LeCun); docs/design/005-elastic.md lists the differences. Names are
imported when they are first used, so that launching and simulating do not import torch.

```python
import outcore
import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with outcore.elastic.join(model, optimizer, method="sync-easgd", period=4) as worker:  # every worker does this
    for _ in range(8):
        model(torch.randn(16, 8)).square().mean().backward()
        worker.step()  # replaces optimizer.step() and optimizer.zero_grad()
    model.load_state_dict(worker.center_state_dict())
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outcore.elastic.methods import METHODS, Method
    from outcore.elastic.muster import TrainingOver
    from outcore.elastic.settings import Settings
    from outcore.elastic.worker import Stats, Worker, join

_HOMES = {
    "METHODS": "methods",
    "Method": "methods",
    "Settings": "settings",
    "Stats": "worker",
    "TrainingOver": "muster",
    "Worker": "worker",
    "join": "worker",
}
__all__ = ["METHODS", "Method", "Settings", "Stats", "TrainingOver", "Worker", "join"]

if not TYPE_CHECKING:  # with a __getattr__, type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'outcore.elastic' has no attribute {name!r}")
        return getattr(import_module(f"outcore.elastic.{_HOMES[name]}"), name)
