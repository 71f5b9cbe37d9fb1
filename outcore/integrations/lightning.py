"""A Lightning callback that keeps training steps within a memory budget: MemoryLimit.

With automatic optimization a step lasts from `on_train_batch_start` to `on_after_backward`. With manual optimization,
and with optimizers that call their closure several times, a batch has several forwards and backwards, and the step
lasts until `on_train_batch_end`. A batch may also end without a backward (`training_step` returned None, or stochastic
weight averaging only updates batch normalization), without `on_train_batch_end` (`on_train_batch_start` of the module
returned -1) or with an exception. In these cases the next hook that is called ends the step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from outcore.errors import warn
from outcore.integrations.model_limit import ModelLimit
from outcore.limit import Limited

__all__ = ["MemoryLimit"]

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:

    def _callback_of_all() -> type:
        """Returns a class that inherits from the `Callback` of every installed package; Lightning has two packages."""
        found = []
        for name in ("lightning.pytorch", "pytorch_lightning"):
            with suppress(ModuleNotFoundError):
                found.append(import_module(name).Callback)
        if not found:
            raise ModuleNotFoundError("outcore.integrations.lightning needs Lightning: pip install lightning")
        return type("Callback", tuple(found), {})

    Callback = _callback_of_all()


class MemoryLimit(Callback):  # type: ignore[misc]
    """Keeps every training step of a LightningModule within `memory`, with the same numbers.

    ```python
    import lightning
    import torch
    from outcore.integrations.lightning import MemoryLimit

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    limit = MemoryLimit("2MiB")
    trainer = lightning.Trainer(callbacks=[limit], max_epochs=1, logger=False, enable_checkpointing=False)
    trainer.fit(Regression(), torch.utils.data.DataLoader(torch.randn(4096, 64), batch_size=1024))
    print(limit.ooc)  # what was planned and what was measured
    ```

    `memory`, and as keyword arguments `host`, `disk`, `planner`, `plan`, `measure` and `cache`, have the meaning they
    have for `outcore.limit`, and apply to each process.
    """

    def __init__(self, memory: int | str = "auto", **options: Any) -> None:
        super().__init__()
        self._limit = ModelLimit(memory, **options)
        self._step: AbstractContextManager[Limited] | None = None
        self._calls_closure_again = False

    @property
    def ooc(self) -> Limited | None:
        """The limit of the module that was trained last; None before the first training step."""
        return self._limit.ooc

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._close()
        self._calls_closure_again |= any(isinstance(known, torch.optim.LBFGS) for known in trainer.optimizers)
        step = self._limit.of(pl_module).step(batch=batch)
        step.__enter__()
        self._step = step

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self._step is None and not self._calls_closure_again:
            self._calls_closure_again = True
            warn(
                "the optimizer called its closure a second time, and that forward was not limited; from the next batch "
                "on all calls for a batch are limited as one step"
            )

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if pl_module.automatic_optimization and not self._calls_closure_again:
            self._close()

    def on_train_batch_end(self, *args: Any) -> None:
        self._close()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()

    def _close(self, error: BaseException | None = None) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(type(error) if error is not None else None, error, error.__traceback__ if error else None)
