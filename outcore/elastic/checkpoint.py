"""Centre <-> file: what a lost centre restarts from.

A NumPy archive without pickle, written beside its final name and renamed, so that a kill in mid-write leaves the
previous checkpoint whole.
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

_VERSION = 1


@dataclass(frozen=True)
class CenterState:
    center: Tensor
    velocity: Tensor
    num_exchanges: int


def save_center(path: Path, state: CenterState) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    with draft.open("wb") as file:
        np.savez(
            file,
            version=np.int64(_VERSION),
            num_exchanges=np.int64(state.num_exchanges),
            center=state.center.numpy(),
            velocity=state.velocity.numpy(),
        )
    draft.replace(path)


def load_center(path: Path, num_elements: int) -> CenterState | None:
    """The saved centre; None where there is no file yet."""
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as saved:
            version, num_exchanges = int(saved["version"]), int(saved["num_exchanges"])
            center, velocity = torch.from_numpy(saved["center"]), torch.from_numpy(saved["velocity"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise BadFile(f"{path} is no centre checkpoint ({error}); remove it or name another file") from None
    if version > _VERSION:
        raise BadFile(f"{path} was written by a newer outcore (version {version}, this one reads {_VERSION}); upgrade")
    if center.numel() != num_elements:
        raise BadFile(
            f"{path} holds {center.numel()} elements, the model has {num_elements}; "
            "it belongs to another model: remove it or name another file"
        )
    return CenterState(center, velocity, num_exchanges)
