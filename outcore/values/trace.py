"""Trace: what one training step did, op by op.

A step is a sequence of *slots*, numbered from 0: every slot is one op or one tick. Ticks are the step's clock: `pack`,
when autograd saves a tensor, and `unpack`, when it asks for it back. Lifetimes are given in slots: a storage is alive
during the slots `born` to `dies`, both included.

Identity is the storage and its version. A *value* is (storage, version); an in-place op makes the next version; a view
is no value. A storage's lifetime here is its natural one: how long the program itself holds it, with autograd holding
nothing, because the step was recorded with everything swapped out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

from outcore.values.codec import Saved

# whether an op may run again: never; as it is; or with the state of its generator
Replay = Literal["no", "pure", "random"]


@dataclass(frozen=True)
class Op:
    """One call of a kernel, as the dispatcher saw it."""

    SECONDS: ClassVar[tuple[str, ...]] = ("seconds", "norm_replay_s", "fused_s")

    slot: int
    name: str  # "aten.relu_.default"
    phase: Literal["forward", "backward"]
    seconds: float
    reads: tuple[int, ...]  # values, including those that the op overwrites
    writes: tuple[int, ...]  # values it makes: in new storages, or the next versions of what it overwrote
    workspace_bytes: int = 0  # allocated at the op's peak, beyond all storages that are alive in its slot
    replay: Replay = "no"
    module: str = ""  # "layer1.0.conv2"
    norm_replay: bool = (
        False  # a norm applied again from its saved statistics has the same bits: checked while recording
    )
    norm_replay_s: float = 0.0  # how long that takes
    fused: tuple[int, ...] = ()  # ops that run in the same pass when this one runs again; only it reads their outputs
    fused_s: float = 0.0  # seconds of that pass, this op included
    repeats: int = -1  # an earlier op that called the same operator on the same values, or -1
    is_merged: bool = False  # whether plans use that op's result instead (`outcore.planning.rewrites.common_ops`)
    joins: bool = False  # autograd's sum of two gradients, which is in place unless ops are watched
    host_s: float = 0.0  # seconds that the program and PyTorch need on the host since the op before, without its kernel

    @property
    def rerun_s(self) -> float:
        """Seconds to recompute its outputs."""
        if self.fused:
            return self.fused_s
        return self.norm_replay_s if self.norm_replay else self.seconds

    def at(self, factor: float, *, in_line: bool = False) -> Op:
        """Returns the op with all its seconds multiplied by a factor, those of the host only if `in_line`."""
        names = (*self.SECONDS, "host_s") if in_line else self.SECONDS
        return replace(self, **{name: factor * getattr(self, name) for name in names})


@dataclass(frozen=True)
class Value:
    """One version of one storage."""

    storage: int
    version: int
    producer: int  # index of the op that wrote it; -1 if it existed before the step (parameter, buffer, input)


@dataclass(frozen=True)
class Storage:
    """One block of device memory. `external` ones existed before the step and count in the trace's `before_bytes`."""

    bytes: int  # as the allocator counts it
    born: int
    dies: int
    external: bool = False
    movable: bool = True  # False for subclasses, sparse tensors and others that cannot be swapped or recomputed


@dataclass(frozen=True)
class Tick:
    """Autograd saves a tensor (`pack`) or asks for a saved tensor (`unpack`)."""

    slot: int
    kind: Literal["pack", "unpack"]
    value: int
    pack: int  # the number of the pack, counted from 0; an unpack names the pack it answers
    dies: int  # the last slot in which autograd holds what it got (unpack), or its handle (pack; -1: not known)
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class StateUse:
    """Training state is moved (`outcore.state`): a weight is needed on the device, or a gradient leaves it. `unit` is
    the number of the parameter among those with a home outside the device."""

    slot: int
    kind: Literal["weight", "gradient"]
    unit: int
    storage: int = -1  # of the gradient, if it was made in the step


@dataclass(frozen=True)
class Trace(Saved):
    """One recorded step: its ops, the values they make, and when autograd saves and asks for them.

    ```python
    import outcore

    trace = outcore.Trace.load("step.trace.json")  # written by `outcore record train.py:step`, or `ooc.trace.save(...)`
    for op in trace.ops[:5]:
        print(op.name, op.seconds)
    ```
    """

    KIND: ClassVar[str] = "trace"

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    ticks: tuple[Tick, ...]
    before_bytes: int  # allocated on the device when the step began: parameters, optimizer state, inputs
    asked_late: tuple[int, ...] = ()  # values that autograd asked for after the end of such a step
    state: tuple[StateUse, ...] = ()  # in order
    device: str = ""
    torch: str = ""
    model: str = ""
    recorded_at: str = ""

    @property
    def num_slots(self) -> int:
        return len(self.ops) + len(self.ticks)

    @property
    def is_in_line(self) -> bool:
        """Whether the host computes: its own work then adds to that of the ops. Else it runs ahead of the device."""
        return self.device == "cpu"

    @cached_property
    def has_unseen(self) -> bool:
        """Whether storages were made in it without an op: by compiled code, NumPy, or a data loader's process."""
        return any(value.producer < 0 and not self.storages[value.storage].external for value in self.values)

    @cached_property
    def has_backward(self) -> bool:
        return any(tick.kind == "unpack" for tick in self.ticks) or any(op.phase == "backward" for op in self.ops)

    @cached_property
    def has_merged_ops(self) -> bool:
        return any(op.is_merged for op in self.ops)

    def at(self, factor: float) -> Trace:
        """Returns the step with the seconds of all ops multiplied by a factor."""
        slower = replace(self, ops=tuple(op.at(factor, in_line=self.is_in_line) for op in self.ops))
        vars(slower)["fingerprint"] = self.fingerprint  # a rewritten step keeps its fingerprint, too
        return slower

    def bytes_of(self, value: int) -> int:
        return self.storages[self.values[value].storage].bytes

    @cached_property
    def rerun_reads(self) -> tuple[tuple[int, ...], ...]:
        """Per op, what a rerun of it reads, each value once: its own reads and those of the ops fused with it, less
        what these make."""
        return tuple(self._rerun_reads(op) for op in self.ops)

    def _rerun_reads(self, op: Op) -> tuple[int, ...]:
        inner = [self.ops[index] for index in op.fused]
        made = {value for one in inner for value in one.writes}
        return tuple(dict.fromkeys(read for one in (*inner, op) for read in one.reads if read not in made))

    @cached_property
    def fingerprint(self) -> str:
        """A hash that is equal for steps with the same ops on the same shapes with the same data flow, at any speed."""
        digest = hashlib.sha256()
        for op in self.ops:
            digest.update(f"{op.slot} {op.name} {op.reads} {op.writes}\n".encode())
        for tick in self.ticks:
            digest.update(f"{tick.slot} {tick.kind} {tick.value} {tick.pack} {tick.shape} {tick.dtype}\n".encode())
        for storage in self.storages:
            digest.update(b"%d " % (0 if storage.external else storage.bytes))
        return digest.hexdigest()[:16]
