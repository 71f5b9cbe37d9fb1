"""Loop + cache on disk -> Remembering: the plans on which an earlier run settled.

The key of an entry holds everything that a plan depends on: the network's modules with their settings, code and
parameters, the arguments of the step, the device with its driver, versions, process-wide switches, planner and budget.
The first step of a kind is recorded in every run, because a recording also proves that running ops again gives the same
bits. If it equals the recording of the earlier run, the second step follows the plan of that run, and nothing is timed,
searched for or tried. Otherwise the kind is planned anew and the entry is replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from outcore.eager.switches import switches
from outcore.fitting.cache import Remembered, StepCache, key_of
from outcore.memory.device_kind import facts_of
from outcore.values import Budget, Op, Trace


class Remembering:
    """Loads and saves the plans of one model."""

    def __init__(self, cache: StepCache, model: torch.nn.Module, device: torch.device, budget: Budget, planner: str):
        self._cache, self._model, self._device = cache, model, device
        self._budget, self._planner = budget, planner

    def find(self, key: str) -> Remembered | None:
        """Returns the entry of an earlier run, or None."""
        return self._cache.load(key)

    def save(self, key: str, remembered: Remembered) -> None:
        """Saves an entry in a thread, because compressing a trace takes longer than a small step."""
        threading.Thread(target=self._cache.save, args=(key, remembered), name="outcore-cache").start()

    def forget(self, key: str) -> None:
        self._cache.remove(key)

    def key_of(self, step: Hashable) -> str:
        """Returns the key of a kind. `step` is what distinguishes the kind from others of the same model."""
        budget = self._budget
        facts = {
            "step": repr(step),
            "model": list(_facts_of(self._model)),
            "device": facts_of(self._device),
            "versions": (import_module("outcore").__version__, torch.__version__, torch.version.cuda),
            "switches": repr(switches()),
            "planner": self._planner,
            "budget": (budget.device_bytes, budget.host_bytes > 0, budget.disk_bytes > 0),
        }
        return key_of(facts)


def _facts_of(model: torch.nn.Module) -> Iterator[tuple[Any, ...]]:
    for name, module in model.named_modules():
        code = getattr(getattr(type(module), "forward", None), "__code__", None)
        yield name, type(module).__qualname__, module.extra_repr(), code and (code.co_code.hex(), code.co_names)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        shape = None if torch.nn.parameter.is_lazy(tensor) else tuple(tensor.shape)
        yield name, shape, str(tensor.dtype), tensor.requires_grad


def rests_on_the_same(earlier: Trace, recorded: Trace) -> bool:
    """Whether two recordings are equal except for times, and everything that the earlier one proved was proved
    again."""
    if _untimed(earlier) != _untimed(recorded):
        return False
    return all(
        before.fused in ((), now.fused) and before.norm_replay <= now.norm_replay
        for before, now in zip(earlier.ops, recorded.ops, strict=True)
    )


def _untimed(trace: Trace) -> Trace:
    unknown: dict[str, Any] = {"norm_replay": False, "fused": (), "workspace_bytes": 0}
    unknown |= dict.fromkeys((*Op.SECONDS, "host_s"), 0.0)
    ops = tuple(replace(op, **unknown) for op in trace.ops)
    return replace(trace, ops=ops, before_bytes=0, recorded_at="")
