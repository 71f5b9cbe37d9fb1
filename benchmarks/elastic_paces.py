"""Does a worker step as fast among n as alone? Pinned workers in one launch, in rounds of short phases.

Virtual cores run at two speeds, and change within a second (a lone worker's step: 20 to 32 ms): trials one after the
other compare cores at different moments, not methods. Here all workers exist from the beginning and a phase is a few
steps of some of them, while the others sleep in a socket: each alone in turn, all without an exchange, all with one.
Ratios are taken within a round of a few seconds, and every other round runs backwards.

A synchronous exchange cannot be faster than the slowest worker, and here a lone step takes 25 ms on one core and 43 on
another, or on the same one a minute later. What the exchange itself costs where every worker has a core like the
others' is asked in two more phases: forward and backward as before, then a pause until EVEN_S have passed, so that all
compute takes as long everywhere; the worker's own step and the exchange come on top.

`scaling` is the section of that name in elastic.py; the workers are `python benchmarks/elastic_paces.py ORDER`, each of
which writes a line of JSON for every phase it had a part in.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.elastic_clock import as_percent, middle, simulate_beyond
from outcore.elastic.compare import RATE
from outcore.elastic.digits import Digits, lenet, load_digits
from outcore.elastic.launch import LaunchPlan, launch
from outcore.elastic.place import connect_store, read_count, take_seat
from outcore.elastic.simulate import replay_sync
from outcore.elastic.trials import Trial, batches_of, meet, warm_up
from outcore.elastic.worker import Worker, join

if TYPE_CHECKING:
    from benchmarks.elastic import Bench
    from benchmarks.elastic_clock import Bars

Row = dict[str, Any]
PERIOD = 4
BATCH = 64
NUM_STEPS = {"lone": 4, "silent": 2 * PERIOD, "elastic": 2 * PERIOD, "even lone": 4, "even": 2 * PERIOD}  # that count
NUM_AWAKENING = {"lone": 2, "silent": 2, "elastic": PERIOD, "even lone": 1, "even": PERIOD}  # before: caches, exchange
EVEN_S = 0.06  # of compute, on every core: more than the slowest takes
NEVER = 1 << 40  # a period
LIMIT_S = 20.0  # of any wait
MAX_ROUNDS, ROUND_S = 40, 13.0  # the longest round, and ending
QUIET = {"RES_OPTIONS": "timeout:1 attempts:1"}  # a host without a resolver must not spend the clock on names
BARS = {
    "efficiency": "weak scaling of level 3",
    "even_efficiency": "the same on cores that are alike",
    "of_no_exchange": "the same over no exchange",
}
TOLD = {
    "efficiency": "weak scaling: the mean lone step of these cores over a step with the exchange",
    "even_efficiency": "the same where all compute takes equally long: a core like the others' for every worker",
    "without_exchange": "the same without any exchange: what the chip itself takes",
    "of_no_exchange": "no exchange over exchange",
    "of_overlapped": "of it: waiting for the slowest, from the steps without exchange (the exchange may last a step)",
    "of_barrier": "the same if all had to meet at once: E[max over workers of a period's steps]",
    "of_slowest_lone": "the slowest core's lone step over a step with the exchange",
    "of_slowest_without": "the slowest worker's step without exchange over a step with it",
    "own_share": "work on the loop's own thread: how long the worker that waited least stood still",
}


@dataclass(frozen=True)
class Phase:
    """Some steps of the workers from `first` on. `kind` is "lone", "silent" (no exchange), "elastic", or with compute
    stretched to EVEN_S "even lone" and "even"."""

    round: int
    kind: str
    num_workers: int  # of the question; a lone phase has one of them at work
    first: int
    num_working: int

    def has(self, rank: int) -> bool:
        return self.first <= rank < self.first + self.num_working


def phases_of(number: int, sizes: list[int]) -> Iterator[Phase]:
    """One round: for every size its workers alone, together, and with exchanges; other workers each time."""
    for num in sizes if number % 2 == 0 else sizes[::-1]:
        first = number * num % max(sizes)
        alone = [Phase(number, "lone", num, first + seat, 1) for seat in range(num)]
        alone.append(Phase(number, "even lone", num, first, 1))
        together = [Phase(number, kind, num, first, num) for kind in ("even", "silent", "elastic")]
        yield from [*alone, *together] if number % 2 == 0 else [*together[::-1], *alone[::-1]]


# --- a worker ------------------------------------------------------------------------------------------------------


class Stepper:
    """A network of its own that takes steps; alone in its group it never exchanges anything."""

    def __init__(self, worker: Worker, net: nn.Module, digits: Digits, batches: Iterator[Tensor]) -> None:
        self.worker, self._net, self._digits, self._batches = worker, net, digits, batches

    def step(self, compute_s: float = 0.0) -> None:
        began_s, chosen, digits = time.perf_counter(), next(self._batches), self._digits
        loss = nn.functional.cross_entropy(self._net(digits.train_images[chosen]), digits.train_labels[chosen])
        loss.backward()
        time.sleep(max(0.0, began_s + compute_s - time.perf_counter()))
        self.worker.step()

    def timed(self, kind: str) -> tuple[list[float], float]:
        """Seconds of each step that counts, and for how many of them this worker stood still to communicate."""
        compute_s = EVEN_S if kind.startswith("even") else 0.0
        for _ in range(NUM_AWAKENING[kind]):
            self.step(compute_s)
        before_s, marks_s = self.worker.stats().wait_s, [time.perf_counter()]
        for _ in range(NUM_STEPS[kind]):
            self.step(compute_s)
            marks_s.append(time.perf_counter())
        return [late - early for early, late in pairwise(marks_s)], self.worker.stats().wait_s - before_s


def make_steppers(client: Store, digits: Digits, rank: int, sizes: list[int]) -> dict[int, Stepper]:
    """By number of workers: a group with these neighbours, and one without any."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    steppers = {}
    for num in [1, *sizes]:
        first = rank // num * num
        torch.manual_seed(0)
        net = lenet(digits.side)
        trial = Trial("paces", "sync-easgd", num, batch=BATCH)
        seat = take_seat(client, rank - first, num, address, f"paces/{num}/{first}")
        worker = join(
            net,
            torch.optim.SGD(net.parameters(), lr=RATE),
            place=seat,
            period=NEVER if num == 1 else PERIOD,
            limit_s=LIMIT_S,
            join_limit_s=LIMIT_S,
        )
        steppers[num] = Stepper(worker, net, digits, batches_of(trial, len(digits.train_labels), rank - first))
    return steppers


def run_phase(phase: Phase, steppers: dict[int, Stepper], store: Store) -> dict[str, Any]:
    stepper = steppers[phase.num_workers if phase.kind in ("elastic", "even") else 1]
    steps_s, wait_s = stepper.timed(phase.kind)
    if phase.kind == "silent":  # nobody counts while another has gone to sleep
        store.add("counted", 1)
        while read_count(store, "counted") < phase.num_working:
            stepper.step()
    return {**asdict(phase), "steps_s": steps_s, "wait_s": wait_s}


def work(order: dict[str, Any]) -> None:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    digits = load_digits(order["data"])
    client = connect_store((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 30)
    warm_up(digits)
    meet(PrefixStore("paces/warm", client), "all", num_ranks, 60)
    steppers = make_steppers(client, digits, rank, order["sizes"])
    with Path(order["folder"], f"{rank}.jsonl").open("w") as lines:
        for number in range(order["num_rounds"]):
            rounds = PrefixStore(f"paces/round/{number}", client)
            if rank == 0:
                rounds.set("goes on", str(int(time.monotonic() < order["last_round_s"])))
            if rounds.get("goes on") == b"0":
                return
            for place, phase in enumerate(phases_of(number, order["sizes"])):
                store = PrefixStore(str(place), rounds)
                meet(store, "begin", num_ranks, LIMIT_S)
                if phase.has(rank):
                    told = {"rank": rank, **run_phase(phase, steppers, store)}
                    lines.write(json.dumps(told) + "\n")
                    lines.flush()


# --- the question --------------------------------------------------------------------------------------------------


def scaling(bench: Bench) -> Any:
    """Weak scaling with a core for every worker, where the rest goes, and the simulator beyond this machine."""
    sizes = [num for num in (2, 4, 8) if num <= bench.num_cores]
    with tempfile.TemporaryDirectory(prefix="outcore-paces-") as folder:
        order: dict[str, Any] = {"data": bench.args.data, "sizes": sizes, "folder": folder}
        order["num_rounds"] = 2 if bench.args.quick else MAX_ROUNDS
        order["last_round_s"] = time.monotonic() + bench.left_s() - ROUND_S  # one clock for all processes of a host
        path = Path(folder, "order.json")
        path.write_text(json.dumps(order))
        command = [sys.executable, str(Path(__file__).resolve()), str(path)]
        num_spare = max(0, bench.num_cores - sizes[-1])
        limits: dict[str, Any] = {"max_restarts": 0, "straggler_limit_s": 5, "limit_s": bench.left_s()}
        launch(LaunchPlan(command, sizes[-1], num_spare_cores=num_spare, env=QUIET, **limits))
        lines = [line for file in sorted(Path(folder).glob("*.jsonl")) for line in file.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    lone_s = [row["steps_s"] for row in rows if row["kind"] == "lone"]
    if not lone_s:
        return {"rows": rows, "error": "no lone worker ended: nothing to compare with"}
    each_s = [statistics.mean(steps_s) for steps_s in lone_s]
    told = [1e3 * value for value in (statistics.median(each_s), min(each_s), max(each_s))]
    print("    a lone worker's step: {:.1f} ms ({:.1f} to {:.1f})".format(*told))
    measured = [found for num in sizes if (found := summarize(rows, num))]
    spread_s = statistics.median([statistics.stdev(steps_s) for steps_s in lone_s])  # of one core at one moment
    simulated = simulate_beyond(bench, statistics.mean(each_s), spread_s, [1, *sizes])
    return {"rows": rows, "measured": measured, "simulated": simulated}


def summarize(rows: list[Row], num: int) -> dict[str, Any] | None:
    """Ratios of every round that all workers ended, their medians, and the spread."""
    rounds = [
        one
        for number in sorted({row["round"] for row in rows})
        if (one := one_round([row for row in rows if (row["round"], row["num_workers"]) == (number, num)], num))
    ]
    if not rounds:
        return None
    found: dict[str, Any] = {"name": "sync-easgd", "num_workers": num, "num_rounds": len(rounds)}
    found |= {key: middle([one[key] for one in rounds]) for key in rounds[0]}
    print(f"    {num} workers, {len(rounds)} rounds, each share the median (least to most):")
    for key, what in TOLD.items():
        print(f"      {as_percent(found[key]):28s} {what}")
    return found


def one_round(rows: list[Row], num: int) -> dict[str, float] | None:
    """Shares of one moment. A step's time is the mean over the workers, except where the slowest is named."""
    steps_s = {
        kind: np.array([row["steps_s"] for row in sorted(rows, key=by_rank) if row["kind"] == kind])
        for kind in NUM_STEPS
    }
    if any(len(steps) != (1 if kind == "even lone" else num) for kind, steps in steps_s.items()):
        return None
    alone, silent, elastic, even_alone, even = (steps_s[kind].mean(axis=1) for kind in NUM_STEPS)
    mean_s, silent_s, elastic_s = float(alone.mean()), float(silent.mean()), float(elastic.mean())
    periods = steps_s["silent"].reshape(num, -1, PERIOD)
    together_s = float(periods.sum(axis=2).max(axis=0).mean()) / PERIOD
    clocks, _ = replay_sync(periods, 0.0, overlaps=True)
    overlapped_s = float(clocks.mean()) / NUM_STEPS["silent"]
    own_s = min(row["wait_s"] for row in rows if row["kind"] == "elastic") / NUM_STEPS["elastic"]
    return {
        "efficiency": mean_s / elastic_s,
        "even_efficiency": float(even_alone.mean() / even.mean()),
        "without_exchange": mean_s / silent_s,
        "of_no_exchange": silent_s / elastic_s,
        "of_slowest_lone": float(alone.max()) / elastic_s,
        "of_slowest_without": float(silent.max()) / elastic_s,
        "of_barrier": silent_s / together_s,
        "of_overlapped": silent_s / overlapped_s,
        "own_share": own_s / elastic_s,
        "lone_step_s": mean_s,
        "elastic_step_s": elastic_s,
    }


def by_rank(row: Row) -> int:
    return int(row["rank"])


def scaling_bars(found: dict[str, Any]) -> Bars:
    for row in found.get("scaling", {}).get("measured", []):
        for key, what in BARS.items():
            percent = 100 * row[key]["median"]
            yield f"{what}, period {PERIOD}, {row['num_workers']} workers: 92 %", percent, percent >= 92


if __name__ == "__main__":
    work(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    os._exit(0)  # groups need no goodbye: all of them end here
