"""The Hugging Face Trainer under a budget: one method is wrapped, everything else stays.

Needs `pip install transformers accelerate`. The model is made from a small config, so nothing is downloaded.

    python examples/hf_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import outcore

SHAPE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}


class LimitedTrainer(Trainer):
    """A Trainer whose steps stay within `memory`."""

    def __init__(self, *args: Any, memory: int | str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ooc = outcore.limit(self.model, memory=memory)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.ooc.step():
            return super().training_step(*args, **kwargs)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(kind: type[Trainer] = LimitedTrainer, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SHAPE))
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=4,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    return kind(model=model, args=arguments, train_dataset=Tokens(), **more)


MEMORY = "300MiB" if torch.cuda.is_available() else "10MiB"  # cuBLAS alone takes some 64 MiB


def main(memory: str = MEMORY) -> outcore.Limited:
    made = trainer(memory=memory)
    made.train()
    print(made.ooc)
    return made.ooc  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
