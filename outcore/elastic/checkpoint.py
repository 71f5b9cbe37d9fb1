"""Checkpoints of the centre, from which a lost centre restarts.

A checkpoint is a NumPy archive without pickle. It is written under another name and renamed, so that an interrupted
write leaves the previous checkpoint intact.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outcore.errors import BadFile

_VERSION = 2  # 1 had neither global_step nor nonce and model


@dataclass(frozen=True)
class CenterState:
    """The state of a centre. `velocity` is empty for methods without momentum at the centre."""

    center: Tensor
    velocity: Tensor
    num_exchanges: int
    global_step: int = 0


def save_center(path: Path, state: CenterState, *, nonce: str = "", model: str = "") -> None:
    """Saves a centre with the run (`nonce`) and the model that it belongs to (see muster.py)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    with draft.open("wb") as file:
        np.savez(
            file,
            version=np.int64(_VERSION),
            num_exchanges=np.int64(state.num_exchanges),
            global_step=np.int64(state.global_step),
            nonce=np.str_(nonce),
            model=np.str_(model),
            center=state.center.numpy(),
            velocity=state.velocity.numpy(),
        )
    draft.replace(path)


def load_center(
    path: Path, num_elements: int, dtype: torch.dtype = torch.float32, *, nonce: str | None = None, model: str = ""
) -> CenterState | None:
    """Returns the saved centre; None if there is no file. With a `nonce`, only a file of that run is loaded."""
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as saved:
            fields = {name: saved[name] for name in saved.files}
            version, num_exchanges = int(fields["version"]), int(fields["num_exchanges"])
            center, velocity = torch.from_numpy(fields["center"]), torch.from_numpy(fields["velocity"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise BadFile(f"{path} is no centre checkpoint ({error}); remove it or name another file") from None
    if version > _VERSION:
        raise BadFile(f"{path} was written by a newer outcore (version {version}, this one reads {_VERSION}); upgrade")
    if nonce is not None and str(fields.get("nonce", "")) != nonce:
        return None
    saved_model = str(fields.get("model", ""))
    if center.numel() != num_elements or (saved_model and model and saved_model != model):
        what = "other tensors than the model" if center.numel() == num_elements else f"{center.numel()} elements"
        raise BadFile(
            f"{path} holds {what}, the model has {num_elements} elements; "
            "it belongs to another model: remove it or name another file"
        )
    return CenterState(center.to(dtype), velocity.to(dtype), num_exchanges, int(fields.get("global_step", 0)))
