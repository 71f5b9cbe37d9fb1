"""What does the CUDA allocator make of a plan? Its model (`outcore.planning.holes`), asked without a GPU.

    python -m benchmarks.holes step.trace.json --memory-gib 16 --room-gib 15.2 --room-gib 14.1

For plans of several sizes under one cap: how often a step makes the allocator start over and how much it maps, with
every value wherever the allocator puts it, with places kept or small gradients aside as in a crowded step, and after
tidying.

    python -m benchmarks.holes --replay step.memory.json.gz --memory-gib 16

plays the requests of a real step instead, saved by `benchmarks.slowdown --traces`, to compare model and device.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import click

from benchmarks.recorded import h200
from outcore.planning import lower, plan
from outcore.planning.crowd import Crowd
from outcore.planning.holes import NUM_STEPS, PAGE_BYTES, SMALL_BYTES, Device, Mapped, allocations, mapped
from outcore.planning.placeholders import arrange
from outcore.planning.sums import sums_in_place
from outcore.planning.tidy import tidy
from outcore.units import GIB
from outcore.values import Budget, Trace


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True))
@click.option("--memory-gib", type=float, required=True, help="The cap.")
@click.option("--room-gib", type=float, multiple=True, help="What plans may allocate; several.")
@click.option("--replay", is_flag=True, help="The file is an allocator's history, not a trace.")
def main(file: Path, memory_gib: float, room_gib: tuple[float, ...], replay: bool) -> None:
    """Count the allocator's restarts for plans of several sizes under one cap."""
    memory_bytes = int(memory_gib * GIB)
    if replay:
        print(f"restarts in {NUM_STEPS} steps like this one: {replayed(file, memory_bytes)}")
        return
    trace = sums_in_place(Trace.load(file))
    for room in room_gib or tuple(memory_gib * share for share in (0.98, 0.95, 0.92, 0.88)):
        made = plan(trace, h200(), Budget(int(room * GIB), 75 * GIB))
        tidied = tidy(trace, h200(), made, memory_bytes).plan
        print(f"room {room:6.2f} GiB")
        for title, told, crowded in (("as planned", made, False), ("arranged", made, True), ("tidied", tidied, True)):
            over, schedule = 100 * (told.predicted_step_s / told.in_core_step_s - 1), lower(trace, told, h200())
            crowd = arrange(trace, schedule, memory_bytes) if crowded else Crowd()
            found = mapped(trace, list(allocations(trace, schedule)), memory_bytes, crowd)
            places = f", {len(crowd.placeholders)} places kept" if crowd.placeholders else ""
            print(f"    {title:18s} predicted +{over:.1f} %, {say(found)}{places}", flush=True)


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
                device.take((step, at), size, aside=bool(stream))
            elif what == "free_completed":
                device.give(owners.pop(address, None))
        for owner in owners.values():
            device.give(owner)
        restarts.append(device.num_restarts - before)
    return f"{restarts}, {device.most_bytes / GIB:.2f} GiB mapped at most"


if __name__ == "__main__":
    main()
