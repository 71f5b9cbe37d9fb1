"""Turns an exception in the user's model, loss, data or optimizer into one sentence with its location.

`tune` calls the user's code in many places and at many batch sizes, so a full traceback is of little use; the user's
own line and the current activity are.
"""

from __future__ import annotations

import sysconfig
import traceback
from itertools import takewhile
from pathlib import Path

import torch

import outcore

_HINT = "correct it there and tune again"
_CALLER = str(Path(__file__).with_name("batches.py"))  # its loss_of calls model and loss
_NN = str(Path(torch.nn.__file__).parent)
_OURS = (str(Path(outcore.__file__).parent), str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"])


def sentence_for(error: Exception, stage: str) -> str | None:
    """Returns a sentence for an error in the user's code, model or loss; None if the error is elsewhere.

    Library code between the user's line and the error (for example for a shape mismatch) is not named.
    """
    words = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
    raised = _where_raised(error)
    return None if raised is None else f"while {stage or 'tuning'}, {raised[0]} raised {said} ({raised[1]}); {_HINT}"


def _where_raised(error: Exception) -> tuple[str, str] | None:
    """Returns whose code raised the error, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = [number for number, frame in enumerate(frames) if (frame.filename, frame.name) == (_CALLER, "loss_of")]
    inside = frames[calls[-1] + 1 :] if calls else frames[1:]
    users = [frame for frame in inside if not frame.filename.startswith((*_OURS, "<"))]
    users = [frame for frame in users if not frame.name.startswith("__torch_")]  # dispatch modes forward calls
    if users and any(frame.filename.startswith(_OURS[0]) for frame in frames):
        return "your code", f"{Path(users[-1].filename).name}, line {users[-1].lineno}, in {users[-1].name}"
    # A model and a loss may be torch's own, and the line that chose them is not in the traceback.
    torchs = takewhile(lambda frame: frame.filename.startswith(_OURS[1]), inside if calls else ())
    named = [frame for frame in torchs if frame.filename.startswith(_NN) and not frame.name.startswith("_")]
    if not named:
        return None
    return "your model or loss", f"torch.nn's {Path(named[-1].filename).name}, in {named[-1].name}"
