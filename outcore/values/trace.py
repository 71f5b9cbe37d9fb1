"""What one training step did, op by op: Trace.

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

Replay = Literal["no", "pure", "random"]  # may an op be run again: never, as it is, with its generator's state


@dataclass(frozen=True)
class Op:
    """One kernel call as the dispatcher saw it."""

    SECONDS: ClassVar[tuple[str, ...]] = ("seconds", "norm_replay_s", "fused_s")

    slot: int
    name: str  # "aten.relu_.default"
    phase: Literal["forward", "backward"]
    seconds: float
    reads: tuple[int, ...]  # values; a value the op overwrites is among them
    writes: tuple[int, ...]  # values it makes: fresh storages, and next versions of what it overwrote
    workspace_bytes: int = 0  # allocated at the op's peak beyond every storage that lives during its slot
    replay: Replay = "no"
    module: str = ""  # "layer1.0.conv2"
    norm_replay: bool = (
        False  # a norm applied again from its saved statistics has the same bits: checked while recording
    )
    norm_replay_s: float = 0.0  # how long that takes
    fused: tuple[int, ...] = ()  # ops that a rerun of this one does in the same pass: nobody else reads what they make
    fused_s: float = 0.0  # how long that takes, this one included
    repeats: int = -1  # the op before it, if any, that called the same operator on the same values
    is_merged: bool = False  # planned as the result of that op (`outcore.planning.rewrites.common_ops`)
    joins: bool = False  # autograd's own sum where two gradients meet: in place when Python looks at no op

    @property
    def rerun_s(self) -> float:
        """Seconds to make its outputs again."""
        if self.fused:
            return self.fused_s
        return self.norm_replay_s if self.norm_replay else self.seconds

    def at(self, factor: float) -> Op:
        """The same op, slower (or faster) by a factor, whichever way it runs."""
        return replace(self, **{name: factor * getattr(self, name) for name in self.SECONDS})


@dataclass(frozen=True)
class Value:
    """One version of one storage."""

    storage: int
    version: int
    producer: int  # index of the op that wrote it; -1: it was there before the step (parameter, buffer, input)


@dataclass(frozen=True)
class Storage:
    """One block of device memory. What was there before the step (`external`) is in the trace's `before_bytes`."""

    bytes: int  # as the allocator counts it
    born: int
    dies: int
    external: bool = False
    movable: bool = True  # False: a subclass, sparse, or otherwise nothing we may swap or recompute


@dataclass(frozen=True)
class Tick:
    """Autograd saves a tensor (`pack`) or asks for one back (`unpack`)."""

    slot: int
    kind: Literal["pack", "unpack"]
    value: int
    pack: int  # the number of the pack, counted from 0; an unpack names the pack it answers
    dies: int  # the last slot in which autograd holds what it got (unpack), or its handle (pack; -1: not known)
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class StateUse:
    """The training state that lies beside the device moves: a weight is needed on the device, or a gradient leaves it
    (`outcore.state`). `unit` counts the parameters that have a home there."""

    slot: int
    kind: Literal["weight", "gradient"]
    unit: int
    storage: int = -1  # of the gradient, where the step made it


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
    asked_late: tuple[int, ...] = ()  # values that autograd asked for when the step was over, in one like it
    state: tuple[StateUse, ...] = ()  # in order
    device: str = ""
    torch: str = ""
    model: str = ""
    recorded_at: str = ""

    @property
    def num_slots(self) -> int:
        return len(self.ops) + len(self.ticks)

    @cached_property
    def has_unseen(self) -> bool:
        """Something made storages in it without an op: compiled code, NumPy, a loader's other process."""
        return any(value.producer < 0 and not self.storages[value.storage].external for value in self.values)

    @cached_property
    def has_merged_ops(self) -> bool:
        return any(op.is_merged for op in self.ops)

    def at(self, factor: float) -> Trace:
        """The same step with every op slower (or faster) by a factor."""
        slower = replace(self, ops=tuple(op.at(factor) for op in self.ops))
        vars(slower)["fingerprint"] = self.fingerprint  # also of one that was rewritten
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
        """The same for every step that runs the same ops on the same shapes with the same wiring, however fast."""
        digest = hashlib.sha256()
        for op in self.ops:
            digest.update(f"{op.slot} {op.name} {op.reads} {op.writes}\n".encode())
        for tick in self.ticks:
            digest.update(f"{tick.slot} {tick.kind} {tick.value} {tick.pack} {tick.shape} {tick.dtype}\n".encode())
        for storage in self.storages:
            digest.update(b"%d " % (0 if storage.external else storage.bytes))
        return digest.hexdigest()[:16]
