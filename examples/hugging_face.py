"""A Hugging Face language model in a loop of one's own: nothing is special about it.

The model is made from a small config, so nothing is downloaded.

    python examples/hugging_face.py
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import outcore

SHAPE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}


def make() -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SHAPE)).train()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def main(memory: str = "10MiB", num_steps: int = 4) -> outcore.Limited:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ooc = outcore.limit(model, memory=memory)
    for step in range(num_steps):
        tokens = torch.randint(0, 256, (8, 64), device=model.device)
        with ooc.step():
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
    print(ooc)
    return ooc


if __name__ == "__main__":
    main()
