"""A device -> what the host needs for the steps that run there: HostCosts, and what recording hides.

A chain of small ops runs forward and backward in several ways, with the very hooks and programs that steps of a user
run with: untouched; with hooks that only pass on; under programs that keep, run again or copy. What one way takes
longer than another is the cost of what it does more often. That takes some hundredths of a second, once a process.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from outcore.eager.execution import Execution
from outcore.eager.intercept import Interception
from outcore.eager.program import Program
from outcore.eager.signatures import signature_of
from outcore.eager.switches import Switches, switches
from outcore.errors import StoreError
from outcore.fitting.preparing import Preparer
from outcore.fitting.settings import FITTING
from outcore.memory.clock import Looks
from outcore.memory.device_kind import kind_of, wait_for
from outcore.memory.store import Store
from outcore.planning.program.lower import as_schedule, lean_of
from outcore.planning.program.simulate import Step
from outcore.planning.trace_index import index_of
from outcore.units import MIB
from outcore.values import Budget, Decision, HostCosts, Op, Storage, Tick, Trace, Value

NUM_PAIRS, NUM_ELEMENTS, NUM_REPEATS = FITTING.host_pairs, FITTING.host_elements, FITTING.host_repeats


@dataclass(frozen=True)
class HostPath:
    """What steps cost the host, and what is no part of the program's own seconds where a recording reads them."""

    costs: HostCosts
    looks: Looks


@dataclass(frozen=True)
class _Took:
    forward_s: float
    backward_s: float
    waited_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return self.forward_s + self.backward_s - self.waited_s


def know_host(preparer: Preparer) -> Looks:
    """Tells the planners what the host needs for the steps that run here, unless modes of somebody's see what is
    measured. Returns what looking at ops and saved tensors costs."""
    if not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack():
        path = host_path(preparer.memory.device, preparer.store.folder)
        preparer.looks = path.looks
        if preparer.machine.host is None:
            preparer.machine = replace(preparer.machine, host=path.costs)
    return preparer.looks


@cache
def host_path(device: torch.device, folder: str | None) -> HostPath:
    """Measured once a process. `folder`: where the swap file is, if there is one."""
    in_line = kind_of(device).computes_on_host
    store = Store(device, 0 if in_line else MIB, MIB if in_line else 0, folder)
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            return _measured(_Chain(device, store))
    finally:
        store.close()


def _measured(chain: _Chain) -> HostPath:
    pairs, ops = NUM_PAIRS, 2 * NUM_PAIRS
    plain, hooked, passed = chain.plain(), chain.passing(ops=False), chain.passing(ops=True)
    kept, seen = chain.following(), chain.following({ops: "recompute"})
    rerun = chain.following(dict.fromkeys(range(2, ops + 1, 2), "recompute"))
    copied = kept
    if chain.can_copy:
        with suppress(StoreError):  # a disk that is full says so in the step that swaps to it
            copied = chain.following(dict.fromkeys(range(2, ops + 1, 2), "swap"))
    seen_s = max(0.0, seen.forward_s - kept.forward_s) / ops
    backward_ops_s = chain.op_s
    costs = HostCosts(
        tick_s=max(0.0, kept.busy_s - plain.busy_s) / (2 * ops),
        seen_op_s=seen_s,
        captured_op_s=max(0.0, rerun.forward_s - seen.forward_s) / pairs,
        rerun_s=max(0.0, (rerun.backward_s - kept.backward_s) / pairs - backward_ops_s),
        copy_s=max(0.0, copied.busy_s - kept.busy_s) / (2 * pairs),
    )
    tick_s = max(0.0, hooked.busy_s - plain.busy_s) / (2 * ops)
    return HostPath(costs, Looks(max(0.0, passed.busy_s - hooked.busy_s) / (2 * ops), tick_s, chain.in_line))


class _Chain:
    """Sigmoid and hyperbolic tangent in turns, each of which saves what it makes."""

    def __init__(self, device: torch.device, store: Store) -> None:
        self._x = torch.zeros(NUM_ELEMENTS, device=device, requires_grad=True)
        self._ones = torch.ones(NUM_ELEMENTS, device=device)
        self._store, self._trace = store, _trace_of_chain()
        self.in_line = kind_of(device).computes_on_host
        self.can_copy = bool(store.host_bytes or store.folder)
        self._interception = Interception()
        self.op_s = self._best(self._op_alone).forward_s / NUM_PAIRS

    def plain(self) -> _Took:
        return self._best(self._run)

    def passing(self, *, ops: bool) -> _Took:
        return self._best(partial(self._listened, _PassingOn, ops=ops))

    def following(self, decided: dict[int, Decision] | None = None) -> _Took:
        """Under the program of these decisions; what is not decided stays."""
        decisions: dict[int, Decision] = dict.fromkeys(range(1, 2 * NUM_PAIRS + 1), "keep")
        decisions |= decided or {}
        trace_index = index_of(self._trace)
        budget = Budget(0, self._store.host_bytes, self._store.disk_bytes)
        steps = lean_of(trace_index, decisions, budget).steps
        program = Program(self._trace, as_schedule(self._trace, decisions, _waiting_late(steps)))
        log: list[str] | None = [] if self.in_line else None  # where waits are the host's, and can be read
        make = partial(Execution, program, self._store, log=log)
        return self._best(partial(self._listened, make, ops=program.last_watched >= 0))

    def _best(self, run: Callable[[], _Took]) -> _Took:
        """Of some, the least in each of its parts: whatever else the host does only ever adds."""
        collects = gc.isenabled()
        gc.disable()
        try:
            took = [run() for _ in range(NUM_REPEATS)]
        finally:
            if collects:
                gc.enable()
        best = min(took, key=lambda one: one.busy_s)
        return _Took(min(one.forward_s for one in took), best.backward_s, best.waited_s)

    def _listened(self, make: Callable[[], Any], *, ops: bool) -> _Took:
        listener = make()
        self._interception.start(lambda: None)
        try:
            self._interception.listen(listener, ops=ops)
            if isinstance(listener, Execution):
                listener.look_away()
            took = self._run()
        finally:
            self._interception.stop()
            if isinstance(listener, Execution):
                listener.close()
        waited_s = listener.actions.times.seconds()[0] if isinstance(listener, Execution) and self.in_line else 0.0
        return _Took(took.forward_s, took.backward_s, waited_s)

    def _run(self) -> _Took:
        wait_for(self._store.device)
        began_s = time.perf_counter()
        y = self._x
        for _ in range(NUM_PAIRS):
            y = torch.tanh(torch.sigmoid(y))
        turned_s = time.perf_counter()
        torch.autograd.grad(y, self._x, self._ones)
        return _Took(turned_s - began_s, time.perf_counter() - turned_s)

    def _op_alone(self) -> _Took:
        if not self.in_line:  # an op's seconds are the device's then
            return _Took(0.0, 0.0)
        began_s = time.perf_counter()
        for _ in range(NUM_PAIRS):
            torch.tanh(self._ones)
        return _Took(time.perf_counter() - began_s, 0.0)


def _waiting_late(steps: Sequence[Step]) -> list[Step]:
    """The same program, where copies out are waited for when all of them are on their way."""
    out = [step for step in steps if step[1] in ("swap_out", "wait_out")]
    last = max((step[0] for step in out), default=0)
    swapped = {step[2] for step in out}
    begun = [step for step in steps if step[0] <= last and not (step[1] in ("wait_out", "free") and step[2] in swapped)]
    ended = [(last, kind, step[2], "", (), False) for step in out if step[1] == "swap_out" for kind in _ENDS]
    return [*begun, *ended, *(step for step in steps if step[0] > last)]


_ENDS = ("wait_out", "free")


def _trace_of_chain() -> Trace:
    num_ops, num_bytes = 2 * NUM_PAIRS, torch.float32.itemsize * NUM_ELEMENTS
    ops = [
        Op(2 * at, f"aten.{name}.default", "forward", 1e-6, (at,), (at + 1,), replay="pure")
        for at, name in enumerate(("sigmoid", "tanh") * NUM_PAIRS)
    ]
    storages = [Storage(num_bytes, 0, 2 * (num_ops + num_ops), external=True)]
    storages += [Storage(num_bytes, 2 * at, min(2 * at + 2, 2 * num_ops - 1)) for at in range(num_ops)]
    packs = [Tick(2 * at + 1, "pack", at + 1, at, -1, (NUM_ELEMENTS,), "float32") for at in range(num_ops)]
    unpacks = [
        Tick(2 * num_ops + back, "unpack", at + 1, at, 2 * num_ops + back, (NUM_ELEMENTS,), "float32")
        for back, at in enumerate(reversed(range(num_ops)))
    ]
    values = [Value(at, 0, at - 1) for at in range(num_ops + 1)]
    return Trace(tuple(ops), tuple(values), tuple(storages), (*packs, *unpacks), num_bytes, device="cpu")


class _PassingOn:
    """A listener that does nothing."""

    switches: Switches

    def __init__(self) -> None:
        self.switches = switches()

    def op(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return signature_of(func).call(*args, **kwargs)

    def write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        pass

    def pack(self, tensor: torch.Tensor) -> Any:
        return _Handed(tensor, self)

    def unpack(self, handle: Any) -> torch.Tensor:
        tensor: torch.Tensor = handle.tensor
        return tensor

    def opened(self, storage: torch.UntypedStorage) -> None:
        pass

    def exposed(self, storage: torch.UntypedStorage) -> None:
        pass

    def replacing(self, tensor: torch.Tensor) -> Callable[[], None]:
        return lambda: None


class _Handed:
    """What autograd holds in the place of a saved tensor."""

    __slots__ = ("run", "tensor")

    def __init__(self, tensor: torch.Tensor, run: _PassingOn) -> None:
        self.tensor, self.run = tensor.detach(), run
