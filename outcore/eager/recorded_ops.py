"""The ops of a recorded step: seconds, workspace, module, and how they can be rerun."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from outcore.eager import fused_replay as fused
from outcore.eager.cells import View
from outcore.eager.module_names import ModuleNames
from outcore.eager.norm_replay import NormReplay, Proofs
from outcore.eager.recorded_storages import RecordedStorages
from outcore.eager.replay import Recipe, has_norm_replay
from outcore.eager.settings import EAGER
from outcore.eager.signatures import CAST, PRODUCT, RECTIFIERS, OpOverload
from outcore.memory.clock import Clock, HostGaps, Looks
from outcore.memory.device import DeviceMemory
from outcore.values import Op, Replay, Value

Pass = tuple[tuple[int, ...], float]  # the ops before its last one, and the seconds of all of them


@dataclass(slots=True)
class RecordedOp:
    """An op being recorded: the fields of `outcore.values.Op` except its seconds."""

    slot: int
    name: str
    phase: Literal["forward", "backward"]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    workspace_bytes: int
    replay: Replay
    module: str
    norm_replay_s: float | None = None
    fused: tuple[int, ...] = ()
    fused_s: float = 0.0
    repeats: int = -1
    joins: bool = False
    gap: tuple[float, int] = (0.0, 0)  # the host's seconds before it, and the number of saved tensors observed in them

    def finish(self, seconds: float, looks: Looks) -> Op:
        host_s, seconds = looks.apart(self.gap, seconds)
        return Op(
            self.slot,
            self.name,
            self.phase,
            seconds,
            self.reads,
            self.writes,
            workspace_bytes=self.workspace_bytes,
            replay=self.replay,
            module=self.module,
            norm_replay=self.norm_replay_s is not None,
            norm_replay_s=self.norm_replay_s or 0.0,
            fused=self.fused,
            fused_s=self.fused_s,
            repeats=self.repeats,
            joins=self.joins,
            host_s=host_s,
        )


class Running(NamedTuple):
    """An op that is running."""

    live_bytes: int  # in known storages when it began
    unseen_bytes: int  # workspace of code other than ops since the previous op
    started: Any


class RecordedOps:
    """The ops of one recorded step, in the order in which they ran."""

    def __init__(
        self,
        model: torch.nn.Module,
        storages: RecordedStorages,
        memory: DeviceMemory,
        before_bytes: int,
        budget_bytes: int,
    ) -> None:
        self.ops: list[RecordedOp] = []
        self.workspaces = memory.workspaces(before_bytes)
        self.repeats = Repeats()
        self.gaps = HostGaps()
        self.sums = EngineSums()
        self._modules = ModuleNames(model)
        self._storages = storages
        self._clock = Clock(memory.device)
        self._memory = memory
        self._passes = Passes(memory.device, memory.refusals.excuse)
        self._norm_replays: dict[int, NormReplay] = {}
        self._proofs: Proofs = {}
        self._budget_bytes = budget_bytes
        self.reset_peak()

    @property
    def module(self) -> str:
        """The name of the running module."""
        return self._modules.current

    def reset_peak(self) -> None:
        """Excludes memory that the recorder itself allocated since the last op."""
        self.workspaces.reset(self._storages.live_bytes)

    def start(self) -> Running:
        live_bytes = self._storages.live_bytes
        return Running(live_bytes, self.workspaces.read_unseen(live_bytes), self._clock.start())

    def stop(self, running: Running) -> None:
        self._clock.stop(running.started)

    def workspace_bytes(self, running: Running, fresh: Sequence[torch.Tensor]) -> int:
        """Returns the bytes that the op allocated beyond every storage. `fresh`: the tensors that it made."""
        live_bytes = self._storages.live_bytes
        made_bytes = sum(self._storages.count_bytes(tensor) for tensor in fresh)
        return self.workspaces.read(max(running.live_bytes, live_bytes) + made_bytes, live_bytes)

    def add_results(self, fresh: Sequence[torch.Tensor], overwritten: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Returns the values that the last op made: new storages, then next versions."""
        storages, index = self._storages, len(self.ops)
        writes = [storages.add_made(tensor, index) for tensor in fresh]
        writes += [storages.add_version(tensor, index) for tensor in overwritten]
        self.workspaces.made(storages.live_bytes)
        return tuple(writes)

    def try_norm_replay(self, func: OpOverload, args: Sequence[Any], fresh: list[torch.Tensor]) -> None:
        """If the last op is a norm, compares it with the same norm applied from its saved statistics."""
        if not has_norm_replay(func, args):
            return
        self._norm_replays[len(self.ops)] = NormReplay(
            func,
            args,
            fresh,
            piece_bytes=self._budget_bytes // EAGER.num_pieces,
            free_bytes=self._budget_bytes - self._memory.allocated_bytes(),
            proofs=self._proofs,
            on_refused=self._memory.refusals.excuse,
        )
        self.reset_peak()

    def see_for_passes(self, recipe: Recipe, args: Sequence[Any], made: torch.Tensor) -> None:
        """Considers the last op as a part of a pass."""
        index = len(self.ops)
        self._passes.see(index, recipe, args, made, is_norm=index in self._norm_replays)

    def close(self) -> None:
        self._modules.close()

    def finish(
        self,
        saved: set[int],
        written_into: set[int],
        is_lost: Callable[[Sequence[int], Sequence[int]], bool],
        lost: Iterable[int] = (),
        looks: Looks | None = None,
    ) -> tuple[Op, ...]:
        """Returns the ops. `saved`: the values that autograd saved. `written_into`: those that custom functions may
        write into. `is_lost`: whether an op with these reads and writes must never be rerun, as those in `lost`."""
        seconds = self._clock.seconds()
        for index, norm_replay in self._norm_replays.items():
            self.ops[index].norm_replay_s = norm_replay.seconds()
        for index in lost:
            self.ops[index].replay, self.ops[index].repeats = "no", -1
        for op in self.ops:
            if is_lost(op.reads, op.writes):
                op.replay, op.repeats = "no", -1
        passes = self._passes.find(self.ops, self._storages.values, saved, seconds, self._norm_replays)
        for index, (inner, took_s) in passes.items():
            self.ops[index].fused, self.ops[index].fused_s = inner, took_s
        self.repeats.forget(self.ops, written_into)
        looks = looks or Looks()
        return tuple(op.finish(took_s, looks) for took_s, op in zip(seconds, self.ops, strict=True))


class Repeats:
    """Finds ops that call the same operator on the same values as an op before them."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, int] = {}  # operator and values of a call -> the first op with it

    def first(self, index: int, recipe: Recipe, made: torch.Tensor) -> int:
        """Returns the op that made the same call first; -1 if there is none, or if it is unknown. The result's layout
        is compared, too, because it may depend on more than the call, such as the default dtype."""
        try:
            first = self._calls.setdefault((recipe.call(), View(made).key()), index)
        except TypeError:  # an argument is not hashable
            return -1
        return first if first != index else -1

    def forget(self, ops: Sequence[RecordedOp], written_into: set[int]) -> None:
        """Excludes ops whose result a custom (or compiled) backward may use as memory from being merged."""
        for op in ops:
            if op.repeats >= 0 and not written_into.isdisjoint((op.writes[0], ops[op.repeats].writes[0])):
                op.repeats = -1


class EngineSums:
    """Finds the additions with which autograd's engine accumulates the gradients of a value that is used repeatedly."""

    def __init__(self) -> None:
        self._node = -1  # number of the node of autograd's graph whose ops run
        self._node_values: set[int] = set()  # the values that they read and made

    def joins(self, func: OpOverload, args: Sequence[Any], reads: Sequence[int], writes: Sequence[int]) -> bool:
        """Whether this op is an addition of the engine, given that no Python code of a formula or a hook called it.

        The engine adds after its node is done: the first gradient comes from another node, and this node's formula has
        not read it. Without observation, the engine adds in place, but never into a view, whose base shares the
        storage.
        """
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        if number != self._node:
            self._node, self._node_values = number, set()
        joins = func is torch.ops.aten.add.Tensor and len(reads) == 2 and reads[0] not in self._node_values
        self._node_values.update(reads, writes)
        return joins and not args[0]._is_view()


@dataclass(frozen=True)
class _Part:
    """An op that may be part of a pass: its arguments, and the one tensor that it made."""

    kind: str  # norm, sum, product, cast, rectifier
    given: tuple[View | None, ...]
    made: View
    writes_into: bool
    folded: bool


class Passes:
    """Finds the ops that a rerun does in one pass with the op that reads what they make.

    Each where the bits are the same: a batch normalisation with a norm replay, rectified; a sum, rectified, along with
    such a normalisation before it; a product, cast. What lies in between is saved by nobody, and read by the next op of
    the pass only (or by several casts): so nobody wants it alone, and a plan knows only the last op of a pass.
    """

    def __init__(self, device: torch.device, on_refused: Callable[[], None]) -> None:
        self._device, self._on_refused = device, on_refused
        self._parts: dict[int, _Part] = {}

    def see(self, index: int, recipe: Recipe, args: Sequence[Any], made: torch.Tensor, *, is_norm: bool) -> None:
        """An op that can be run again made a tensor, or wrote into one. Only what has a storage to itself counts."""
        kind = "norm" if is_norm else _kind_of(recipe, args)
        view = View(made)
        if kind and view.offset == 0 and view.num_bytes == made.untyped_storage().nbytes():
            given = tuple(View(arg) if isinstance(arg, torch.Tensor) else None for arg in args)
            folded = is_norm and fused.is_folded(recipe.func, args[0])
            self._parts[index] = _Part(kind, given, view, bool(recipe.signature.written), folded)

    def find(
        self,
        ops: Sequence[RecordedOp],
        values: Sequence[Value],
        saved: set[int],
        seconds: Sequence[float],
        norm_replays: Mapping[int, NormReplay],
    ) -> dict[int, Pass]:
        """By the last op of each. A pass takes as long as the one of its ops that moves as many bytes."""
        readers: dict[int, list[int]] = {}
        for index, op in enumerate(ops):
            for value in op.reads:
                readers.setdefault(value, []).append(index)

        def maker_of(reader: int, position: int = 0) -> int:
            """The op that made what a part reads, for it alone, or for casts alone; -1: there is none."""
            value, view = ops[reader].reads[position], self._parts[reader].given[position]
            maker = values[value].producer
            made = self._parts[maker].made if maker in self._parts else None
            if made is None or view is None or value in saved or ops[maker].writes[0] != value:
                return -1
            alone = len(readers[value]) == 1 or all(self._is("cast", other) for other in readers[value])
            return maker if alone and view.dtype is made.dtype and view.lies_like(made) else -1

        passes: dict[int, Pass] = {}
        for index, part in self._parts.items():
            maker = maker_of(index) if part.kind in ("cast", "rectifier") else -1
            if part.kind == "cast" and self._can_multiply(maker, part):
                passes[index] = (maker,), seconds[index]
            elif part.kind == "rectifier" and self._can_add(maker):
                places = (0,) if self._parts[maker].writes_into else (0, 1)
                norms = [norm for norm in (maker_of(maker, place) for place in places) if self._can_add_to(norm)]
                norms = [norm for norm in norms if _pays(norm_replays[norm], seconds[index])]
                passes[index] = (*norms[:1], maker), seconds[maker]
            elif part.kind == "rectifier" and self._is("norm", maker) and _pays(norm_replays[maker], seconds[index]):
                passes[index] = (maker,), norm_replays[maker].fused_s()
        return passes

    def _is(self, kind: str, index: int) -> bool:
        return index in self._parts and self._parts[index].kind == kind

    def _can_add(self, index: int) -> bool:
        return self._is("sum", index) and self._asks(fused.is_ready, self._device, self._parts[index].made.dtype)

    def _can_add_to(self, index: int) -> bool:
        part = self._parts.get(index)
        if part is None or part.kind != "norm":
            return False
        return self._asks(fused.adds_to_norms_alike, self._device, part.made.dtype, part.folded)

    def _can_multiply(self, index: int, cast: _Part) -> bool:
        if not self._is("product", index):
            return False
        types = [view.dtype for view in self._parts[index].given if view is not None]
        return self._asks(fused.multiplies_alike, self._device, *types, cast.made.dtype)

    def _asks(self, question: Callable[..., bool], *about: Any) -> bool:
        try:
            return question(*about)
        except torch.OutOfMemoryError:
            self._on_refused()
            return False


def _kind_of(recipe: Recipe, args: Sequence[Any]) -> str:
    name = recipe.signature.name
    if name in RECTIFIERS:
        return "rectifier"
    if name == CAST:
        return "cast" if recipe.kwargs.keys() == {"dtype"} else ""
    if recipe.is_plain_sum:
        return "sum" if fused.lie_alike(args[0], args[1]) else ""
    return "product" if name == PRODUCT and fused.as_factors(args[0], args[1]) is not None else ""


def _pays(norm_replay: NormReplay, rectifying_s: float) -> bool:
    alone_s = norm_replay.seconds()
    return alone_s is not None and norm_replay.fused_s() < alone_s + rectifying_s
