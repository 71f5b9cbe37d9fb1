"""Many workers, few messages, none indispensable: elastic averaging over torch.distributed.

`join` is the front door; `METHODS` lists what it can do. Follows arXiv 1708.02983 (You, Buluc, Demmel, SC17) and arXiv
1412.6651 (Zhang, Choromanska, LeCun); see docs/design/005-elastic.md for where it differs. Names are loaded when first
used: launching and simulating need no torch in the process that asks.

```python
import outcore
import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with outcore.elastic.join(model, optimizer, method="sync-easgd", period=4) as worker:  # every worker does this
    for _ in range(8):
        model(torch.randn(16, 8)).square().mean().backward()
        worker.step()  # in the place of the optimizer's step and zero_grad
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

if not TYPE_CHECKING:  # type checkers would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'outcore.elastic' has no attribute {name!r}")
        return getattr(import_module(f"outcore.elastic.{_HOMES[name]}"), name)
