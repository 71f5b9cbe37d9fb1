"""Are plans, schedules and predicted timelines the same before and after a change? One file per recorded step.

    python -m benchmarks.identity build/before     # before the change
    python -m benchmarks.identity build/after      # after it
    diff -r build/before build/after

Nine recorded steps, each with four planners: the six of `benchmarks/recorded.py` and the three of `tests/golden`. The
search for plans without fragmentation is not part of it, because it ends by the clock. It takes a minute.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.recorded import BOLD_GIB, FOLDER, h200, load
from outcore.errors import OutcoreError
from outcore.planning import lower, plan, simulate, verify
from outcore.planning.rewrites.gradient_sums import sums_in_place
from outcore.units import GIB
from outcore.values import Budget, Machine, Trace

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
GOLDEN_GIB = {"vgg_256": 12, "r3d18_nhwc": 11, "vgg16_nhwc": 12}
PLANNERS = ("hybrid", "pooch", "swap", "swap-all")


def steps(folder: Path) -> Iterator[tuple[str, Trace, Machine, int]]:
    """Name, step, machine and budget in GiB."""
    for name, memory_gib in BOLD_GIB.items():
        yield name, load(name, folder), h200(), max(memory_gib, 12)
    machine = Machine.load(GOLDEN / "h200.machine.json")
    for name, memory_gib in GOLDEN_GIB.items():
        yield f"golden_{name}", sums_in_place(Trace.load(GOLDEN / f"{name}.trace.json")), machine, memory_gib


def described(trace: Trace, machine: Machine, memory_gib: int, planner: str) -> str:
    """Plan, schedule and timeline as text, or why there is none."""
    try:
        made = plan(trace, machine, Budget(memory_gib * GIB, 100 * GIB), planner)
    except OutcoreError as error:
        return f"{type(error).__name__}: {error}"
    schedule = lower(trace, made, machine)
    verify(trace, schedule)
    return "\n".join(map(repr, (made, schedule, simulate(trace, schedule, machine))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--traces", type=Path, default=FOLDER, help="folder of the six recorded steps")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    everything = hashlib.sha256()
    for name, trace, machine, memory_gib in steps(args.traces):
        for planner in PLANNERS:
            text = described(trace, machine, memory_gib, planner)
            (args.out / f"{name}.{planner}.txt").write_text(text)
            everything.update(text.encode())
            print(name, planner, hashlib.sha256(text.encode()).hexdigest()[:16], flush=True)
    print("all", everything.hexdigest())


if __name__ == "__main__":
    main()
