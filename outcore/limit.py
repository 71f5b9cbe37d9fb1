"""The public function: limit(model, memory=...) -> Limited, the object that a training loop holds.

The first step of a kind is recorded with the leanest schedule. When a step of that kind comes again, it is planned, and
all later ones follow the plan or a better one. `outcore.fitting` runs the steps; this file is the public interface.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from outcore.errors import BudgetTooSmall, OutcoreError
from outcore.fitting.beside import beside, check_update
from outcore.fitting.cache import folder_of
from outcore.fitting.hooks import ACTIVE as _ACTIVE  # noqa: F401 (empty, unless a step is running)
from outcore.fitting.loop import Loop, give_way, open_loops
from outcore.fitting.settings import FittingSettings
from outcore.fitting.view import LoopView
from outcore.memory.device import memory_of
from outcore.memory.machine import device_of, granted_bytes, measure_machine, tiers_below, weight_bytes
from outcore.memory.op_rates import measure_update_rate
from outcore.memory.store import Store
from outcore.planning import check_planner
from outcore.values import Budget, Plan, Trace

__all__ = ["Limited", "limit"]


def limit(
    model: torch.nn.Module,
    memory: int | str = "auto",
    *,
    host: int | str = "auto",
    disk: str | Path | None = None,
    planner: str = "hybrid",
    plan: Plan | str | Path | None = None,
    measure: bool = False,
    cache: bool | str | Path = True,
    optimizer: torch.optim.Optimizer | None = None,
    update: str = "device",
) -> Limited:
    """Makes the training steps of `model` fit into `memory` bytes of its device, with the same numbers.

    `memory` is the peak of allocated bytes over the whole step, including parameters, gradients and optimizer state:
    `"16GiB"`, a number of bytes, `"80%"` of the device, or `"auto"`, which is 90 % of the memory that is free now, plus
    what the model already uses. `outcore.estimate` shows which budgets work, and what each costs. `host` limits pinned
    host memory. `disk` names an existing folder for a swap file that is used when the host's share is full; on the CPU
    it is the only place to swap to, and defaults to the folder for temporary files. `planner` decides what is kept,
    swapped and recomputed: `hybrid`, `priced`, `swap`, `pooch`, `exact`, `keep-all`, `swap-all` or `recompute-all`.
    `plan`, a Plan or the file of one, is used instead of planning if it was made for the same step. With `measure`,
    every step is measured; otherwise only the first planned steps are. `cache` is the folder in which recorded steps
    and their plans are kept for later runs of the same training; True means `$OUTCORE_CACHE` or the user's cache
    folder, and False disables it. With `optimizer`, the optimizer of the loop, weights, gradients and optimizer state
    may leave the device, too: the part that stays is planned with the rest, and the other part is brought when it is
    used. State that does not fit into `host` is kept in `disk`, if the GPU can access files; on the CPU all of it is,
    except `host` bytes. The cache is not used then. With `update="cpu"`, PyTorch's fused CPU kernels update the
    parameters whose state is not on the device (SGD, Adam, AdamW, Adagrad): fewer bytes are copied, and results differ
    in their last bits from those of the device's kernels.

    A model has one limit at a time; an earlier one is closed.

    ```python
    import outcore
    import torch

    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)))
    ooc = outcore.limit(model, memory="4MiB")
    for _ in range(3):
        with ooc.step():
            model(torch.randn(1024, 64)).square().mean().backward()
        model.zero_grad()
    print(ooc)  # what was planned and what was measured
    ooc.close()
    ```
    """
    earlier = open_loops(model) if isinstance(model, torch.nn.Module) else []
    if any(loop.is_running for loop in earlier):
        raise OutcoreError("limit() was called inside a step of the same model; leave the step first")
    options: dict[str, Any] = {"planner": planner, "plan": plan, "measure": measure, "cache": folder_of(cache)}
    for loop in [loop for loop in earlier if loop.beside is not None]:
        loop.retire()  # two limits cannot fetch the same weights
    limited = Limited(model, memory, host=host, disk=disk, optimizer=optimizer, update=update, **options)
    if optimizer is None and limited.budget.device_bytes < (there_bytes := weight_bytes(model)):
        limited.close()
        raise BudgetTooSmall.for_model(there_bytes, limited.budget.device_bytes, where=str(limited.device))
    give_way(earlier, limited.budget)
    limited._loop.warns_outside = True
    return limited


class Limited(LoopView):
    """A model under a memory budget. Wrap each training step in `with ooc.step(): ...`. Call `close()` at the end, or
    use it as a context manager: `with outcore.limit(...) as ooc:`.

    ```python
    import outcore
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    with outcore.limit(model, memory="2MiB") as ooc:
        for _ in range(3):
            with ooc.step():
                model(torch.randn(1024, 64)).square().mean().backward()
            model.zero_grad()
        print(ooc.stats(), ooc.plan.predicted_peak_bytes, ooc.timeline.peak_bytes)
    ```
    """

    def __init__(
        self,
        model: torch.nn.Module,
        memory: int | str,
        *,
        host: int | str = "auto",
        disk: str | Path | None = None,
        planner: str = "hybrid",
        plan: Plan | str | Path | None = None,
        measure: bool = False,
        cache: Path | None = None,
        settings: FittingSettings | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        update: str = "device",
    ) -> None:
        check_update(update, optimizer)
        check_planner(planner)
        given = Plan.load(plan) if isinstance(plan, str | Path) else plan
        if not isinstance(model, torch.nn.Module):
            raise OutcoreError(f"limit() takes a torch.nn.Module, not {type(model).__name__}; give it the model itself")
        device = device_of(model)
        memory_bytes = granted_bytes(model, device, memory)
        host_bytes, folder = tiers_below(device, host, disk)
        machine = measure_machine(device, folder)
        budget = Budget(memory_bytes, host_bytes, machine.disk_bytes)
        state, budget = beside(model, optimizer, budget, machine, folder, host=host, by_cpu=update == "cpu")
        if update == "cpu":
            machine = replace(machine, update_bytes_per_s=measure_update_rate())
        self.model, self.device, self.planner, self.budget, self.state = model, device, planner, budget, state
        self.store = Store(device, budget.host_bytes, budget.disk_bytes, folder)
        self.device_memory = memory_of(model, device, memory_bytes)
        options: dict[str, Any] = {} if settings is None else {"settings": settings}
        # the cache holds only plans of steps whose training state stays on the device
        remembers = cache if state is None else None
        options |= {"planner": planner, "given": given, "measure": measure, "state": state, "cache": remembers}
        self._loop = Loop(model, self.device_memory, self.store, machine, budget, **options)

    def step(self, name: str | None = None, *, batch: Any = None) -> AbstractContextManager[Limited]:
        """Returns a context for one training step with any number of forwards and backwards. The optimizer may step
        inside or after it.

        Steps that do different work, such as those of a generator and of a critic, get plans of their own immediately
        if they have names: `with ooc.step("critic"): ...`. Without names they are told apart during the first steps.

        Steps with other shapes get other plans, too. Shapes are taken from the arguments of the model. If only parts of
        the model are called, as in `model.encoder(x)`, pass the inputs of the step as `batch`: a tensor, or tensors in
        lists and dictionaries.
        """
        if name is not None and not isinstance(name, str):
            raise OutcoreError(f"the name of a step is a string, not {type(name).__name__}; did you mean batch=...?")
        return self._loop.step(self, name, batch)

    def expect(self, trace: Trace) -> None:
        """Plans the next step of a new kind from `trace`, without recording it first.

        A step that does other work leaves the plan safely, like any other step, and is recorded when it comes again.
        """
        self._loop.expect(trace)

    def close(self) -> None:
        """Removes the hooks from the model and frees host memory and the swap file."""
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
