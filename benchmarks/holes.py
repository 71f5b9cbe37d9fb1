"""Simulates plans with the model of CUDA's allocator (`outcore.planning.allocator.model`), without a GPU.

    python -m benchmarks.holes step.trace.json --memory-gib 16 --room-gib 15.2 --room-gib 14.1
    python -m benchmarks.holes gpt_24 --memory-gib 28 --memory-gib 64 --out holes.json

For plans of several sizes under a cap: how often a step makes the allocator start over, how much it maps, and under
which cap it would never start over, with every value wherever the allocator puts it, with places kept or small
gradients in a pool as after a restart, and after the fragmentation search. A name stands for a recorded step
(`benchmarks.recorded`).

    python -m benchmarks.holes --replay step.memory.json.gz --memory-gib 16

plays the requests of a real step instead, saved by `benchmarks.slowdown --traces`, to compare model and device.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks.recorded import BOLD_GIB, cheaper, h200, load
from benchmarks.slowdown import about
from outcore.planning import plan
from outcore.planning.allocator.fragmentation import search_placement
from outcore.planning.allocator.hints import AllocatorHints
from outcore.planning.allocator.model import (
    NUM_STEPS,
    PAGE_BYTES,
    SMALL_BYTES,
    Device,
    Mapped,
    allocations,
    mapped,
    wanted_bytes,
)
from outcore.planning.allocator.placeholders import arrange
from outcore.planning.preparing import prepare
from outcore.planning.rewrites.gradient_sums import sums_in_place
from outcore.units import GIB
from outcore.values import Budget, Trace

SHARES = (0.98, 0.95, 0.92, 0.88)  # of the cap, for plans


@click.command()
@click.argument("step")
@click.option("--memory-gib", type=float, required=True, multiple=True, help="The cap; several.")
@click.option("--room-gib", type=float, multiple=True, help="What plans may allocate; several.")
@click.option("--reruns", is_flag=True, help="With cheaper reruns, as our own recorder finds them, in a recorded step.")
@click.option("--replay", is_flag=True, help="The step is an allocator's history, not a trace.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the rows here, as JSON.")
def main(
    step: str, memory_gib: tuple[float, ...], room_gib: tuple[float, ...], reruns: bool, replay: bool, out: Path | None
) -> None:
    """Count the allocator's restarts for plans of several sizes under a cap."""
    if replay:
        told = replayed(Path(step), int(memory_gib[0] * GIB))
        print(f"restarts in {NUM_STEPS} steps like this one: {told}")
        return
    if not Path(step).exists() and step not in BOLD_GIB:
        raise click.BadParameter(f"there is no file {step}, and recorded steps are {', '.join(BOLD_GIB)}")
    recorded = Trace.load(Path(step)) if Path(step).exists() else load(step)
    trace = sums_in_place(cheaper(recorded) if reruns else recorded)
    rows = []
    for memory in memory_gib:
        for room in room_gib or tuple(memory * share for share in SHARES):
            print(f"{memory:g} GiB, room {room:6.2f} GiB")
            where = {"network": Path(step).name, "memory_gib": memory, "room_gib": room}
            rows += [{**where, **row} for row in asked(trace, int(memory * GIB), int(room * GIB))]
    if out is not None:
        out.write_text(json.dumps({"question": "holes", **about(), "hardware": "simulated", "rows": rows}, indent=1))


def asked(trace: Trace, memory_bytes: int, room_bytes: int) -> Iterator[dict[str, Any]]:
    made = plan(trace, h200(), Budget(room_bytes, 75 * GIB))
    placed = search_placement(trace, h200(), made, memory_bytes).plan
    for title, told, fragmented in (("as planned", made, False), ("arranged", made, True), ("placed", placed, True)):
        over, prepared = told.predicted_step_s / told.in_core_step_s - 1, prepare(trace, told, h200())
        step, schedule = prepared.trace, prepared.schedule
        hints = arrange(step, schedule, memory_bytes, told.predicted_peak_bytes) if fragmented else AllocatorHints()
        events = list(allocations(step, schedule))
        found, wanted = mapped(step, events, memory_bytes, hints), wanted_bytes(step, events, hints)
        places = f", {len(hints.placeholders)} places kept" if hints.placeholders else ""
        print(
            f"    {title:10s} predicted {100 * over:+.1f} %, {say(found)}, wants {wanted / GIB:.2f}{places}", flush=True
        )
        yield {
            "what": title,
            "predicted_over": over,
            "predicted_peak_gib": told.predicted_peak_bytes / GIB,
            "num_restarts": found.num_restarts if found is not None else None,
            "wanted_gib": wanted / GIB,
            "num_placeholders": len(hints.placeholders),
        }


def say(found: Mapped | None) -> str:
    if found is None:
        return "runs out of memory"
    return f"{found.num_restarts} restarts a step, {found.num_bytes / GIB:.2f} GiB mapped"


def replayed(path: Path, cap_bytes: int) -> str:
    """A step's own requests, several times in a row, from where its weights lay on. Entries: what, address, bytes,
    stream; other streams than the first have pages of their own."""
    events = json.loads(gzip.decompress(path.read_bytes()))
    there = [(address, size) for what, address, size, stream in events if what == "there" and not stream]
    first = min((address for address, _ in there), default=0) // PAGE_BYTES * PAGE_BYTES
    device, restarts = Device(cap_bytes, [(address - first, size) for address, size in there]), []
    for step in range(NUM_STEPS):
        before, owners = device.num_restarts, dict[int, object]()
        for at, (what, address, size, stream) in enumerate(events):
            if what == "alloc" and size > SMALL_BYTES:
                owners[address] = step, at
                device.take((step, at), size, pooled=bool(stream))
            elif what == "free_completed":
                device.give(owners.pop(address, None))
        for owner in owners.values():
            device.give(owner)
        restarts.append(device.num_restarts - before)
    return f"{restarts}, {device.most_bytes / GIB:.2f} GiB mapped at most"


if __name__ == "__main__":
    main()
