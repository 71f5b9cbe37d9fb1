"""The Hugging Face Trainer under a budget: `LimitedTrainer` in the place of `Trainer`, and `memory=`.

Other trainers, such as TRL's, take a mixin: `class LimitedSFTTrainer(MemoryLimitMixin, SFTTrainer): pass`.

Needs `pip install transformers accelerate`. The model is made from a small config, so nothing is downloaded.

    python examples/hf_trainer.py
"""

from __future__ import annotations

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import outcore
from outcore.integrations.hugging_face import LimitedTrainer

SHAPE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
MEMORY = "300MiB" if torch.cuda.is_available() else "10MiB"  # cuBLAS alone takes some 64 MiB


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main(memory: str = MEMORY) -> outcore.Limited:
    torch.manual_seed(0)
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
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SHAPE))
    trainer = LimitedTrainer(model=model, args=arguments, train_dataset=Tokens(), memory=memory)
    trainer.train()
    print(trainer.ooc)
    assert trainer.ooc is not None
    return trainer.ooc


if __name__ == "__main__":
    main()
