"""Compares a worker's step rate among n workers with its rate alone: pinned workers, in rounds of short phases.

Virtual cores run at two speeds, and change within a second (a lone worker's step: 20 to 32 ms): trials one after the
other compare cores at different moments, not methods. Here all workers exist from the beginning and a phase is a few
steps of some of them, while the others sleep in a socket: each alone in turn, all without an exchange, all with one.
Ratios are taken within a round of a few seconds, and every other round runs backwards.

A synchronous exchange cannot be faster than the slowest worker, and here a lone step takes 25 ms on one core and 43 on
another, or on the same one a minute later. What the exchange itself costs where every worker has a core like the
others' is asked in two more phases: forward and backward as before, then a pause until EVEN_S have passed, so that all
compute takes as long everywhere; the worker's own step and the exchange come on top.

Workers that need not wait for the slowest (`ahead`) take different numbers of steps, so they are asked another way: all
work for WHILE_S, without an exchange ("apart") and with one, and their steps per second are added up and held against
the sum of their lone paces. A slow exchange would not show there: all would go ahead and exchange less often. So these
shares count only where the slowest worker takes next to no steps ahead. Before they sleep, all end the same exchange.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from outcore.elastic.transport import PrefixStore, Store

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
COUNTED = ("num_steps", "num_ahead", "num_exchanges", "wait_s")  # of a worker's stats
PERIOD = 4
BATCH = 64
NUM_STEPS = {"lone": 8, "silent": 2 * PERIOD, "elastic": 2 * PERIOD, "even lone": 4, "even": 2 * PERIOD}  # that count
# Before: caches, the exchange, and a core that slept (its steps get faster for a while: a lone pace of the first would
# flatter those that work longer). Where compute is stretched, that does not matter.
NUM_AWAKENING = {"lone": 6, "silent": 2, "elastic": PERIOD, "even lone": 1, "even": PERIOD}
EVEN_S = 0.06  # of compute, on every core: more than the slowest takes
AHEAD = 8  # steps: twice what the slowest core needs to be waited for (43 over 25 ms, 4 steps)
WHILE_S = 0.9  # that counts
WHILE_AWAKENING = {"apart": PERIOD, "ahead": PERIOD}
MAX_EXTRA_LEAST = 0.5  # steps ahead per exchange of the worker that took fewest: the slowest one waits for nobody
KINDS = (*NUM_STEPS, *WHILE_AWAKENING)
NEVER = 1 << 40  # a period
LIMIT_S = 20.0  # of any wait
MAX_ROUNDS, END_S = 40, 3.0  # for ending
QUIET = {"RES_OPTIONS": "timeout:1 attempts:1"}  # a host without a resolver must not spend the clock on names
BARS = {
    "efficiency": "weak scaling of level 3",
    "even_efficiency": "the same on cores that are alike",
    "of_no_exchange": "the same over no exchange",
    "ahead_efficiency": f"weak scaling of level 3, ahead {AHEAD}",
    "ahead_of_apart": f"the same, ahead {AHEAD}, over no exchange",
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
    "apart_efficiency": "for a while without any exchange: steps/s of all over the sum of their lone ones",
    "ahead_efficiency": f"the same with exchanges, where a worker may go {AHEAD} steps ahead",
    "ahead_of_apart": "the second over the first",
    "ahead_wait_share": "of it: how long the mean worker stood still",
    "ahead_extra_least": "steps ahead per exchange, over the period: the worker that took fewest",
    "ahead_extra_most": "and the one that took most",
}


@dataclass(frozen=True)
class Phase:
    """Some steps of the workers from `first` on. `kind` is "lone", "silent" (no exchange), "elastic", or with compute
    stretched to EVEN_S "even lone" and "even". For a while and not for some steps: "apart" (no exchange), "ahead"."""

    round: int
    kind: str
    num_workers: int  # of the question; a lone phase has one of them at work
    first: int
    num_working: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.num_working)

    @property
    def group(self) -> tuple[int, int]:
        """Whom the workers exchange with: how many, and how far they may go ahead."""
        if self.kind == "ahead":
            return self.num_workers, AHEAD
        return (self.num_workers, 0) if self.kind in ("elastic", "even") else (1, 0)


def phases_of(number: int, sizes: list[int], kinds: Sequence[str] = KINDS) -> Iterator[Phase]:
    """One round: for every size its workers alone, together, and with exchanges; other workers each time."""
    for num in sizes if number % 2 == 0 else sizes[::-1]:
        first = number * num % max(sizes)
        phases = [Phase(number, "lone", num, first + seat, 1) for seat in range(num)]
        phases.append(Phase(number, "even lone", num, first, 1))
        phases += [Phase(number, kind, num, first, num) for kind in ("even", "silent", "elastic", "apart", "ahead")]
        chosen = [phase for phase in phases if phase.kind in kinds]
        yield from chosen if number % 2 == 0 else chosen[::-1]


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

    def work_a_while(self, kind: str) -> Row:
        """How many steps in how many seconds, and what became of the exchanges."""
        for _ in range(WHILE_AWAKENING[kind]):
            self.step()
        before, began_s = self.worker.stats(), time.perf_counter()
        while (now_s := time.perf_counter()) < began_s + WHILE_S:
            self.step()
        after = self.worker.stats()
        counts = {name: getattr(after, name) - getattr(before, name) for name in COUNTED}
        return {**counts, "took_s": now_s - began_s}


Steppers = dict[tuple[int, int], Stepper]


def make_steppers(client: Store, digits: Digits, rank: int, groups: Iterable[tuple[int, int]]) -> Steppers:
    """By number of workers and how far they may go ahead: a group with these neighbours, and one without any."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    steppers = {}
    for num, ahead in groups:
        first = rank // num * num
        torch.manual_seed(0)
        net = lenet(digits.side)
        trial = Trial("paces", "sync-easgd", num, batch=BATCH)
        seat = take_seat(client, rank - first, num, address, f"paces/{num}/{ahead}/{first}")
        worker = join(
            net,
            torch.optim.SGD(net.parameters(), lr=RATE),
            place=seat,
            period=NEVER if num == 1 else PERIOD,
            ahead=ahead,
            limit_s=LIMIT_S,
            join_limit_s=LIMIT_S,
        )
        steppers[num, ahead] = Stepper(worker, net, digits, batches_of(trial, len(digits.train_labels), rank - first))
    return steppers


def run_phase(phase: Phase, rank: int, steppers: Steppers, store: Store) -> Row:
    stepper, told = steppers[phase.group], {"rank": rank, **asdict(phase)}
    if phase.kind in WHILE_AWAKENING:
        told |= stepper.work_a_while(phase.kind)
    else:
        steps_s, wait_s = stepper.timed(phase.kind)
        told |= {"steps_s": steps_s, "wait_s": wait_s}
    if phase.kind in ("silent", "apart", "ahead"):  # nobody counts while another has gone to sleep
        store.add("counted", 1)
        step_until(lambda: read_count(store, "counted") >= phase.num_working, stepper, f"{phase.num_working} counts")
    if phase.kind == "ahead":
        end_together(stepper, phase, rank, store)
    return told


def end_together(stepper: Stepper, phase: Phase, rank: int, store: Store) -> None:
    """Steps until the second exchange after the last that anybody told of is over: then none is under way.

    One who only waited to be told would hold up whoever stands still for an exchange it has not begun. So all step on
    meanwhile, and may end the next exchange before the last of them tells, but not the second: that one has not begun.
    """
    worker, keys = stepper.worker, [f"exchanges/{other}" for other in phase.ranks]
    store.set(f"exchanges/{rank}", str(worker.stats().num_exchanges))
    step_until(lambda: store.check(keys), stepper, f"the {len(keys)} workers' numbers of exchanges")
    last = 2 + max(int(store.get(key)) for key in keys)
    step_until(lambda: worker.stats().num_exchanges >= last, stepper, f"the end of exchange {last}")


def step_until(reached: Callable[[], bool], stepper: Stepper, awaited: str) -> None:
    ends_s = time.monotonic() + LIMIT_S
    while not reached():
        if time.monotonic() > ends_s:
            raise TimeoutError(f"{awaited} did not come within {LIMIT_S:g} s: a worker died or hangs; see its messages")
        stepper.step()


def work(order: dict[str, Any]) -> None:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    digits = load_digits(order["data"])
    client = connect_store((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 30)
    warm_up(digits)
    meet(PrefixStore("paces/warm", client), "all", num_ranks, 60)
    sizes, kinds, longest_s = order["sizes"], order["kinds"], 0.0
    groups = dict.fromkeys(phase.group for phase in phases_of(0, sizes, kinds))
    steppers = make_steppers(client, digits, rank, groups)
    with Path(order["folder"], f"{rank}.jsonl").open("w") as lines:
        for number in range(order["num_rounds"]):
            rounds = PrefixStore(f"paces/round/{number}", client)
            began_s = time.monotonic()
            if rank == 0:
                rounds.set("goes on", str(int(began_s + longest_s < order["ends_s"])))
            if rounds.get("goes on") == b"0":
                return
            for place, phase in enumerate(phases_of(number, sizes, kinds)):
                store = PrefixStore(str(place), rounds)
                meet(store, "begin", num_ranks, LIMIT_S)
                if rank in phase.ranks:
                    lines.write(json.dumps(run_phase(phase, rank, steppers, store)) + "\n")
                    lines.flush()
            longest_s = max(longest_s, 1.1 * (time.monotonic() - began_s))


# --- the question --------------------------------------------------------------------------------------------------


def scaling(bench: Bench) -> Any:
    """Weak scaling with a core for every worker, where the rest goes, and the simulator beyond this machine."""
    sizes = [num for num in (2, 4, 8) if num <= bench.num_cores]
    kinds = [kind for kind in KINDS if bench.args.paces == "all" or kind in ("lone", *WHILE_AWAKENING)]
    with tempfile.TemporaryDirectory(prefix="outcore-paces-") as folder:
        order: dict[str, Any] = {"data": bench.args.data, "sizes": sizes, "kinds": kinds, "folder": folder}
        order["num_rounds"] = 2 if bench.args.quick else MAX_ROUNDS
        order["ends_s"] = time.monotonic() + bench.left_s() - END_S  # one clock for all processes of a host
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
    measured = [found for num in sizes if (found := summarize(rows, num, kinds))]
    spread_s = statistics.median([statistics.stdev(steps_s) for steps_s in lone_s])  # of one core at one moment
    simulated = simulate_beyond(bench, statistics.mean(each_s), spread_s, [1, *sizes])
    return {"rows": rows, "measured": measured, "simulated": simulated}


def summarize(rows: list[Row], num: int, kinds: Sequence[str]) -> dict[str, Any] | None:
    """Ratios of every round that all workers ended, their medians, and the spread."""
    rounds = [
        one
        for number in sorted({row["round"] for row in rows})
        if (one := one_round([row for row in rows if (row["round"], row["num_workers"]) == (number, num)], num, kinds))
    ]
    if not rounds:
        return None
    found: dict[str, Any] = {"name": "sync-easgd", "num_workers": num, "num_rounds": len(rounds)}
    found |= {key: middle([one[key] for one in rounds]) for key in rounds[0]}
    print(f"    {num} workers, {len(rounds)} rounds, each share the median (least to most):")
    for key, what in TOLD.items():
        if key in found:
            told = as_number(found[key]) if "extra" in key else as_percent(found[key])
            print(f"      {told:28s} {what}")
    return found


def as_number(value: dict[str, Any]) -> str:
    return f"{value['median']:.2f} ({value['least']:.2f} to {value['most']:.2f})"


def one_round(rows: list[Row], num: int, kinds: Sequence[str] = KINDS) -> dict[str, float] | None:
    """Shares of one moment; None where a worker is missing in a phase."""
    by_kind = {kind: sorted([row for row in rows if row["kind"] == kind], key=by_rank) for kind in kinds}
    if any(len(found) != (1 if kind == "even lone" else num) for kind, found in by_kind.items()):
        return None
    lone_s = np.array([row["steps_s"] for row in by_kind["lone"]]).mean(axis=1)
    shares = {"lone_step_s": float(lone_s.mean())}
    if "elastic" in kinds:
        shares |= shares_of_steps(by_kind, num)
    if "ahead" in kinds:
        shares |= shares_of_a_while(by_kind, float((1 / lone_s).sum()))
    return shares


def shares_of_a_while(by_kind: dict[str, list[Row]], lone_per_s: float) -> dict[str, float]:
    """All workers' steps a second over `lone_per_s`, that of all when each was alone."""
    apart, ahead = (sum(row["num_steps"] / row["took_s"] for row in by_kind[kind]) for kind in ("apart", "ahead"))
    extra = [row["num_ahead"] / max(1, row["num_exchanges"]) for row in by_kind["ahead"]]
    return {
        "apart_efficiency": apart / lone_per_s,
        "ahead_efficiency": ahead / lone_per_s,
        "ahead_of_apart": ahead / apart,
        "ahead_wait_share": statistics.mean(row["wait_s"] / row["took_s"] for row in by_kind["ahead"]),
        "ahead_extra_least": min(extra),
        "ahead_extra_most": max(extra),
    }


def shares_of_steps(by_kind: dict[str, list[Row]], num: int) -> dict[str, float]:
    """A step's time is the mean over the workers, except where the slowest is named."""
    steps_s = {kind: np.array([row["steps_s"] for row in by_kind[kind]]) for kind in NUM_STEPS}
    alone, silent, elastic, even_alone, even = (steps_s[kind].mean(axis=1) for kind in NUM_STEPS)
    mean_s, silent_s, elastic_s = float(alone.mean()), float(silent.mean()), float(elastic.mean())
    periods = steps_s["silent"].reshape(num, -1, PERIOD)
    together_s = float(periods.sum(axis=2).max(axis=0).mean()) / PERIOD
    clocks, _ = replay_sync(periods, 0.0, overlaps=True)
    overlapped_s = float(clocks.mean()) / NUM_STEPS["silent"]
    own_s = min(row["wait_s"] for row in by_kind["elastic"]) / NUM_STEPS["elastic"]
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
        "elastic_step_s": elastic_s,
    }


def by_rank(row: Row) -> int:
    return int(row["rank"])


def scaling_bars(found: dict[str, Any]) -> Bars:
    for row in found.get("scaling", {}).get("measured", []):
        for key, what in BARS.items():
            if key not in row:
                continue
            bar, percent = f"{what}, period {PERIOD}, {row['num_workers']} workers: 92 %", 100 * row[key]["median"]
            if not key.startswith("ahead"):
                yield bar, percent, percent >= 92
                continue
            extra = row["ahead_extra_least"]["median"]
            bar += f", at most {MAX_EXTRA_LEAST} steps ahead per exchange of the slowest ({extra:.2f})"
            yield bar, percent, percent >= 92 and extra <= MAX_EXTRA_LEAST


if __name__ == "__main__":
    work(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    os._exit(0)  # groups need no goodbye: all of them end here
