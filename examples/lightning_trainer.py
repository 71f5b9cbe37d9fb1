"""Lightning under a budget: a callback. The module and the rest of the Trainer stay as they are.

Needs `pip install lightning`; `pytorch_lightning` does as well.

    python examples/lightning_trainer.py
"""

from __future__ import annotations

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import outcore
from outcore.integrations.lightning import MemoryLimit

MEMORY = "300MiB" if torch.cuda.is_available() else "12MiB"  # cuBLAS alone takes some 64 MiB


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(8)]
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), *layers, nn.Flatten(), nn.Linear(16 * 256, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main(memory: str = MEMORY) -> outcore.Limited:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 1, 16, 16), torch.randint(0, 10, (256,)))
    limit = MemoryLimit(memory)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, callbacks=[limit], enable_model_summary=False, **quiet)
    trainer.fit(Classifier(), DataLoader(data, batch_size=64))
    print(limit.ooc)
    assert limit.ooc is not None
    return limit.ooc


if __name__ == "__main__":
    main()
