"""Lightning under a budget: a callback of a few lines; the module and the Trainer stay as they are.

Needs `pip install lightning`.

    python examples/lightning_callback.py
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import outcore


class Limit(lightning.Callback):
    """Keeps every training step within `memory`."""

    def __init__(self, memory: int | str) -> None:
        self.memory = memory
        self.ooc: outcore.Limited | None = None
        self._step = ExitStack()

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self._step.close()  # a batch whose training_step returned None had no backward
        self.ooc = self.ooc or outcore.limit(module, memory=self.memory)
        self._step.enter_context(self.ooc.step())

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self._step.close()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._step.__exit__(type(exception), exception, exception.__traceback__)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(8)]
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), *layers, nn.Flatten(), nn.Linear(16 * 256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(*callbacks: lightning.Callback) -> Classifier:
    torch.manual_seed(0)
    module, data = Classifier(), TensorDataset(torch.randn(256, 1, 16, 16), torch.randint(0, 10, (256,)))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, callbacks=list(callbacks), enable_model_summary=False, **quiet)
    trainer.fit(module, DataLoader(data, batch_size=64))
    return module


MEMORY = "300MiB" if torch.cuda.is_available() else "12MiB"  # cuBLAS alone takes some 64 MiB


def main(memory: str = MEMORY) -> outcore.Limited:
    limit = Limit(memory)
    train(limit)
    assert limit.ooc is not None
    print(limit.ooc)
    return limit.ooc


if __name__ == "__main__":
    main()
