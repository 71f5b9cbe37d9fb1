"""A Hugging Face model without weights, made from its configuration, and a batch for it."""

from __future__ import annotations

from typing import Any

import torch

from outcore.errors import OutcoreError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def model_and_batch(name: str, num_samples: int, num_tokens: int, dtype: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Returns a model on `meta` and a batch. `name` is a folder with a `config.json`, or the id of a model."""
    try:
        import transformers
    except ImportError:
        raise OutcoreError(
            f"{name} names no FILE.py:FUNCTION, and to read it as a model of Hugging Face needs transformers; pip "
            "install transformers, or write FILE.py:FUNCTION"
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        said = str(error).strip().partition("\n")[0]
        if "connect" in said or "offline" in said:
            raise OutcoreError(
                f"{name} is no folder here, and there is no network to look for it; give a folder with its config.json"
            ) from None
        raise OutcoreError(
            f"{name} is neither FILE.py:FUNCTION nor a model of Hugging Face ({said}); check the name or the folder"
        ) from None
    kind = _class_of(transformers, config)
    with torch.device("meta"):
        model = kind._from_config(config, torch_dtype=_DTYPES[dtype]) if dtype != "float32" else kind(config)
        return model.train(), _batch(model, config, num_samples, num_tokens, _DTYPES[dtype])


def _class_of(transformers: Any, config: Any) -> Any:
    """Returns the class that the checkpoint was saved from, or one that generates text if the config names none."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    try:
        return transformers.AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise OutcoreError(
            f"the configuration names no architecture that this transformers ({transformers.__version__}) has; upgrade "
            "it, or write a step of your own and give it as FILE.py:FUNCTION"
        ) from None


def _batch(model: Any, config: Any, num_samples: int, num_tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns the arguments of the model, with labels if it computes a loss."""
    name = type(model).__name__
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        side = getattr(config, "image_size", 224)
        sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
        pixels = torch.empty(num_samples, getattr(config, "num_channels", 3), *sides, dtype=dtype)
        labels = {"labels": torch.zeros(num_samples, dtype=torch.long)} if "Classification" in name else {}
        return {"pixel_values": pixels, **labels}
    most_tokens = int(getattr(config, "max_position_embeddings", None) or num_tokens)
    tokens = torch.zeros(num_samples, min(num_tokens, most_tokens), dtype=torch.long)
    batch = {"input_ids": tokens}
    if "SequenceClassification" in name:
        batch["labels"] = torch.zeros(num_samples, dtype=torch.long)
    elif any(part in name for part in ("LM", "ConditionalGeneration", "TokenClassification")):
        batch["labels"] = tokens
    return batch
