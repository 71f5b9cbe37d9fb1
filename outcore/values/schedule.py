"""A plan as a program: the ordered actions that simulator and runtime both execute.

Actions are pinned to ticks (index into `Trace.ticks`). All actions of a tick run, in the order of the list, when the
tick happens: for a pack, right after the pack itself; for an unpack, before autograd gets its tensor (a free of that
very tensor ends our hold only: autograd has its own). Device memory
belongs to the compute stream and is allocated and freed in program order, so the peak does not depend on timing.

| kind     | stream   | what it does |
|----------|----------|---|
| drop     | compute  | at its pack, `value` is not held; it will be rerun |
| swap_out | swap_out | starts copying `value` to `tier`; the device storage is held from here on |
| wait_out | compute  | the compute stream waits until that copy is done |
| free     | compute  | ends our hold on the device storage of `value`; what the program or autograd holds lives on |
| swap_in  | swap_in  | allocates `value` on the device and starts copying it back |
| wait_in  | compute  | the compute stream waits until that copy is done |
| rerun    | compute  | runs `op` again from the values it read; of what it writes, `values` are held |

A kept value needs no action: its handle holds it. A value that an op rerun reads is there because it is kept, external,
swapped in and waited for, or rerun before; recipes hold what they need, see docs/tour.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from outcore.values.codec import Saved

ActionKind = Literal["drop", "swap_out", "wait_out", "free", "swap_in", "wait_in", "rerun"]


@dataclass(frozen=True)
class Action:
    tick: int
    kind: ActionKind
    value: int = -1  # of all kinds except rerun
    op: int = -1  # rerun
    tier: Literal["", "host", "disk"] = ""  # swap_out, swap_in
    values: tuple[int, ...] = ()  # of a rerun: the outputs to hold
    in_place: bool = False  # a rerun of an in-place op may overwrite its input, which is not needed again

    @property
    def stream(self) -> Literal["compute", "swap_out", "swap_in"]:
        return self.kind if self.kind in ("swap_out", "swap_in") else "compute"


@dataclass(frozen=True)
class Schedule(Saved):
    """What happens in a step besides its own ops, in order: copies, waits, reruns and frees, each at its tick.

    ```python
    import outcore

    trace = outcore.Trace.load("step.trace.json")
    schedule = outcore.lower(trace, outcore.Plan.load("step.plan.json"), outcore.Machine.load("here.machine.json"))
    for action in schedule.actions[:5]:
        print(action)
    ```
    """

    KIND: ClassVar[str] = "schedule"

    fingerprint: str
    actions: tuple[Action, ...]  # ordered by tick
    decisions: dict[int, str]  # the plan's, for the pack hook
    merges_ops: bool = False  # the plan's
