"""Batch size and learning rate under a memory plan.

`Adaptive` controls the batch and the learning rate of a training loop; `Shares` splits a batch over unequal workers.
`measure_noise` and `range_test` are the measurements that an advice is based on, and `untouched` restores everything
after a trial. `Batch`, `Data`, `Effort`, `Goal`, `LearningRate`, `Memory` and `Workers` are option objects that
`outcore.tune` accepts in place of plain values. Names are imported when they are first used.

```python
import outcore
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(256, 8), torch.randint(0, 4, (256,)))
adaptive = outcore.tuning.Adaptive(model, optimizer, batch=32, micro_batch=32)
for x, y in adaptive.batches(DataLoader(dataset, batch_size=32)):
    torch.nn.functional.cross_entropy(model(x), y).backward()
    adaptive.step()  # replaces optimizer.step() and optimizer.zero_grad()
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outcore.tuning.adaptive import Adaptive, RateRule
    from outcore.tuning.data.restore import untouched
    from outcore.tuning.gradients.noise import Noise, measure_noise
    from outcore.tuning.gradients.range_test import RangeTest, range_test
    from outcore.tuning.options import Batch, Data, Effort, Goal, LearningRate, Memory, Workers
    from outcore.tuning.workers.shares import Shares

_HOMES = {
    "Adaptive": "adaptive",
    "Batch": "options",
    "Data": "options",
    "Effort": "options",
    "Goal": "options",
    "LearningRate": "options",
    "Memory": "options",
    "Noise": "gradients.noise",
    "RangeTest": "gradients.range_test",
    "RateRule": "adaptive",
    "Shares": "workers.shares",
    "Workers": "options",
    "measure_noise": "gradients.noise",
    "range_test": "gradients.range_test",
    "untouched": "data.restore",
}
__all__ = [
    "Adaptive",
    "Batch",
    "Data",
    "Effort",
    "Goal",
    "LearningRate",
    "Memory",
    "Noise",
    "RangeTest",
    "RateRule",
    "Shares",
    "Workers",
    "measure_noise",
    "range_test",
    "untouched",
]

if not TYPE_CHECKING:  # with a __getattr__, type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'outcore.tuning' has no attribute {name!r}")
        return getattr(import_module(f"outcore.tuning.{_HOMES[name]}"), name)
