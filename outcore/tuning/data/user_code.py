"""An exception out of the user's model, loss, data or optimizer -> one sentence that says where.

`tune` calls the user's code in many places and at many batch sizes. A traceback through all of them says little; what
helps is the user's own line and what was being tried.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import torch

import outcore

_OURS = (str(Path(outcore.__file__).parent), str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"])


def sentence_for(error: Exception, stage: str) -> str | None:
    """None where no line of the user's is part of the traceback: then the error is not theirs.

    Library code between the user's line and the error (a shape that does not fit, say) is not named.
    """
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith((*_OURS, "<"))]
    called_by_us = [frame for frame in user_frames if frame is not frames[0]]
    if not called_by_us or not any(frame.filename.startswith(_OURS[0]) for frame in frames):
        return None
    frame = called_by_us[-1]
    words = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
    where = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
    return f"while {stage or 'tuning'}, your code raised {said} ({where}); correct it there and tune again"
