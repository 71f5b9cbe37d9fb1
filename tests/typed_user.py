"""A user's program, for type checkers: `make package` checks it against the installed wheel.

An `ignore` that is not needed is an error. So the two lines below fail where the types of outcore are not found.
"""

from __future__ import annotations

import torch

import outcore

model = torch.nn.Linear(8, 8)
ooc: outcore.Limited = outcore.limit(model, memory="1GiB")
plan: outcore.Plan | None = ooc.plan
worker: type[outcore.elastic.Worker] = outcore.elastic.Worker
adaptive: type[outcore.tuning.Adaptive] = outcore.tuning.Adaptive
outcore.limit(model, memory=1.5)  # type: ignore[arg-type]
outcore.limmit(model, memory=1)  # type: ignore[attr-defined]
