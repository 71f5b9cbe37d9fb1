"""Hugging Face trainers whose training steps stay within a memory budget: LimitedTrainer, MemoryLimitMixin.

This cannot be a `TrainerCallback`. A step must begin before the forward and end after the backward of one micro-batch,
even if one of them raises. Callbacks are called once for all micro-batches of an update (`on_step_begin`), after the
gradients were clipped (`on_pre_optimizer_step`), and not at all after an exception. `training_step` is exactly one
forward and backward, so the mixin wraps it.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from outcore.integrations.model_limit import OPTIONS, ModelLimit
from outcore.limit import Limited

__all__ = ["LimitedTrainer", "MemoryLimitMixin"]


class MemoryLimitMixin:
    """Keeps the training steps of a Hugging Face trainer within `memory`. It must be the first base class:

    ```python
    from outcore.integrations.hugging_face import MemoryLimitMixin
    from trl import SFTTrainer

    class LimitedSFTTrainer(MemoryLimitMixin, SFTTrainer):
        pass
    ```

    The trainer accepts further keyword arguments, with the meaning they have for `outcore.limit`: `memory`, `host`,
    `disk`, `planner`, `plan`, `measure` and `cache`. In data-parallel training they apply to each process.
    """

    def __init__(self, *args: Any, memory: int | str = "auto", **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        self._memory_limit = ModelLimit(memory, **options)
        super().__init__(*args, **kwargs)

    @property
    def ooc(self) -> Limited | None:
        """The limit of the model, for example for `print(trainer.ooc)`; None before the first training step."""
        return self._memory_limit.ooc

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with self._memory_limit.of(self.model).step(batch=inputs):  # type: ignore[attr-defined]
            return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]


class LimitedTrainer(MemoryLimitMixin, Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` whose training steps stay within `memory`, with the same numbers.

    ```python
    import torch
    from outcore.integrations.hugging_face import LimitedTrainer
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=2))
    tokens = torch.randint(0, 128, (16, 32))
    dataset = [{"input_ids": each, "labels": each} for each in tokens]
    arguments = TrainingArguments(output_dir="out", max_steps=3, per_device_train_batch_size=4, report_to=[])
    trainer = LimitedTrainer(model=model, args=arguments, train_dataset=dataset, memory="8MiB")
    trainer.train()
    print(trainer.ooc)  # what was planned and what was measured
    ```

    On a GPU a larger budget is needed: cuBLAS alone takes about 64 MiB.
    """
