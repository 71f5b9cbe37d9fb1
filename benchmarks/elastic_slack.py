"""Simulates synchronous exchanges that may be late, by replaying recorded steps of workers that do not communicate.

    python benchmarks/elastic_slack.py                                # records here (about 50 s on 16 cores), replays
    python benchmarks/elastic_slack.py --recording FILE --told WHERE  # replays a .json or .json.gz

Pinned processes take LeNet steps of batch 64, alone and in sets of a quarter, a half and all of the cores, and write
down when each step ended. They do not communicate, so the recording depends on the cores only. Two rules are then
simulated on it, with exchanges that cost nothing:

slack d   every worker takes exactly PERIOD steps per exchange, whose result may come d steps late; then all wait.
ahead N   a worker that would wait takes up to N local steps instead, with fewer exchanges (`join(ahead=N)`).

All efficiencies are steps a second of all workers over the sum of what each core did alone. Slack compensates for
single late steps, but not for a core that is slow for a second.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

Row = dict[str, Any]
PERIOD = 4
SLACKS = (1, 2, 4, 8, 16)
AHEADS = (2, 4, 8, 16)
LONE_S, PAUSE_S, START_S = 0.35, 0.05, 14.0


# --- recording -----------------------------------------------------------------------------------------------------


def sets_of(cores: list[int]) -> Iterator[tuple[list[int], float]]:
    """Which cores work together, and for how many seconds: each alone first and last, halves for long, random sets."""
    chance, half = random.Random(3), len(cores) // 2
    yield from (([core], LONE_S) for core in cores)
    if half > 1:
        yield from ((cores[0::2], 4.0), (cores[:half], 4.0), (cores[half:], 3.0), (cores[1::2], 3.0))
        yield from ((sorted(chance.sample(cores, half)), 1.0) for _ in range(14))
    if half > 3:
        yield from ((sorted(chance.sample(cores, half // 2)), 1.0) for _ in range(6))
    yield cores, 2.0
    yield from (([core], LONE_S) for core in cores)


def record() -> list[Row]:
    """One process for every core; all know the timetable, so none has to ask."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="outcore-slack-") as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
        told = [folder, str(time.monotonic() + START_S), json.dumps(cores)]  # one clock for all processes of a host
        limit_s = START_S + 60 + sum(took_s + PAUSE_S for _, took_s in sets_of(cores))
        run_all({f"core {core}": [*command, str(core), *told] for core in cores}, limit_s)
        return [json.loads(line) for file in Path(folder).glob("*.jsonl") for line in file.read_text().splitlines()]


def run_all(commands: dict[str, list[str]], limit_s: float) -> None:
    """Side by side until all have ended well; otherwise none is left running, and a sentence says who did not."""
    ends_s = time.monotonic() + limit_s
    workers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            workers[name] = subprocess.Popen(command)
        for name, worker in workers.items():
            code = worker.wait(max(0.0, ends_s - time.monotonic()))
            if code:
                raise SystemExit(
                    f"the worker of {name} ended with code {code}: see its message above, then record again"
                )
    except subprocess.TimeoutExpired:
        raise SystemExit(
            f"the worker of {name} did not end within {limit_s:.0f} s: record on a quieter machine"
        ) from None
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()


def read_recording(path: Path) -> list[Row]:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows: list[Row] = json.loads(raw)["rows"]
    return rows


def work(core: int, folder: str, begins_s: float, cores: list[int]) -> None:
    os.sched_setaffinity(0, {core})
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from outcore.elastic.digits import lenet

    torch.set_num_threads(1)
    net = lenet(28)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    images, labels = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()

    for _ in range(3):
        step()
    with Path(folder, f"{core}.jsonl").open("w") as lines:
        for number, (who, took_s) in enumerate(sets_of(cores)):
            if core in who:
                time.sleep(max(0.0, begins_s - time.monotonic()))
                marks_s = [time.monotonic()]
                while marks_s[-1] < begins_s + took_s:
                    step()
                    marks_s.append(time.monotonic())
                marks = [round(mark_s - begins_s, 5) for mark_s in marks_s]
                lines.write(json.dumps({"core": core, "set": number, "who": who, "marks": marks}) + "\n")
            begins_s += took_s + PAUSE_S


# --- replaying -----------------------------------------------------------------------------------------------------


def replay_slack(steps_s: list[list[float]], slack: int, period: int = PERIOD) -> float:
    """Steps a second of all workers, when the exchange after every `period` steps is waited for `slack` steps later.

    By the clock of the last to end: the lead that others have then is within the slack, and is gained only once.
    """
    num_steps = min(map(len, steps_s))
    clocks_s, ended_s = [0.0] * len(steps_s), {}
    for number in range(num_steps):
        clocks_s = [clock_s + steps[number] for clock_s, steps in zip(clocks_s, steps_s)]
        if number % period == period - 1:
            ended_s[number] = max(clocks_s)
        late_s = ended_s.get(number - slack, 0.0)
        clocks_s = [max(clock_s, late_s) for clock_s in clocks_s]
    return len(steps_s) * num_steps / max(clocks_s)


def replay_ahead(steps_s: list[list[float]], ahead: int, period: int = PERIOD) -> float:
    """Steps a second of all workers, when each takes up to `ahead` steps instead of waiting, until one's record ends.

    Counted when all have ended the same exchange, each by its own clock: they are less than a step apart.
    """
    num = len(steps_s)
    clocks_s, taken, left = [0.0] * num, [0] * num, [iter(steps) for steps in steps_s]
    paces = [0.0] * num
    while True:
        for _ in range(period - 1):
            if not _all_step(range(num), clocks_s, taken, left):
                return sum(paces)
        ends_s, standing = max(clocks_s), set(range(num))
        for number in range(ahead + 1):
            if not _all_step(standing, clocks_s, taken, left):
                return sum(paces)
            standing = {worker for worker in standing if clocks_s[worker] < ends_s}
            if number == ahead:
                for worker in standing:
                    clocks_s[worker] = ends_s
        paces = [count / clock_s for count, clock_s in zip(taken, clocks_s)]


def _all_step(who: Any, clocks_s: list[float], taken: list[int], left: list[Iterator[float]]) -> bool:
    for worker in who:
        step_s = next(left[worker], None)
        if step_s is None:
            return False
        clocks_s[worker] += step_s
        taken[worker] += 1
    return True


def replay(rows: list[Row]) -> dict[str, Any]:
    steps_s = {(row["set"], row["core"]): [b - a for a, b in pairwise(row["marks"])] for row in rows}
    alone: dict[int, list[float]] = {}
    for row in rows:
        if len(row["who"]) == 1:
            alone.setdefault(row["core"], []).append(statistics.median(steps_s[row["set"], row["core"]]))
    lone_s = {core: statistics.mean(values) for core, values in alone.items()}
    sets = {row["set"]: row["who"] for row in rows if len(row["who"]) > 1}
    found = [replay_set([steps_s[number, core] for core in who], who, lone_s) for number, who in sorted(sets.items())]
    sizes = sorted({one["num_workers"] for one in found})
    summary = [summarize([one for one in found if one["num_workers"] == size], size) for size in sizes]
    lone = {"lone_step_s": statistics.mean(lone_s.values()), "lone_step_s_by_core": lone_s}
    return {**lone, "by_size": summary, "sets": found}


def replay_set(steps_s: list[list[float]], who: list[int], lone_s: dict[int, float]) -> dict[str, Any]:
    lone_per_s, paces = sum(1 / lone_s[core] for core in who), [len(steps) / sum(steps) for steps in steps_s]
    return {
        "cores": who,
        "num_workers": len(who),
        "num_steps": min(map(len, steps_s)),
        "step_s": [1 / pace for pace in paces],
        "apart": sum(paces) / lone_per_s,
        "slowest": len(who) * min(paces) / lone_per_s,
        **{f"slack {slack}": replay_slack(steps_s, slack) / lone_per_s for slack in SLACKS},
        **{f"ahead {ahead}": replay_ahead(steps_s, ahead) / lone_per_s for ahead in AHEADS},
    }


def summarize(found: list[dict[str, Any]], size: int) -> dict[str, Any]:
    rules = [key for key in found[0] if key.startswith(("apart", "slowest", "slack", "ahead"))]
    summary: dict[str, Any] = {"num_workers": size, "num_sets": len(found)}
    print(f"{size} workers, {len(found)} sets, efficiency: median (least to most)")
    for rule in rules:
        values = [one[rule] for one in found]
        summary[rule] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
        print("  {:10s} {:5.1f} % ({:.1f} to {:.1f})".format(rule, *(100 * value for value in summary[rule].values())))
    return summary


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        core, folder, begins_s, cores = sys.argv[2:]
        work(int(core), folder, float(begins_s), json.loads(cores))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recording", type=Path, help="replay this file instead of recording here")
    parser.add_argument("--told", default="recorded elsewhere", help="where the recording comes from")
    parser.add_argument("--out", type=Path, help="results file")
    args = parser.parse_args()
    rows = read_recording(args.recording) if args.recording else record()
    name = f"{platform.machine()}-{len({row['core'] for row in rows})}cpu"
    results: dict[str, Any] = {"question": "elastic-slack", "hardware": name, "date": date.today().isoformat()}
    told = f"{args.recording.name}: {args.told}" if args.recording else "recorded here, just before"
    results |= {"recording": told, "period": PERIOD, **replay(rows)}
    out = args.out or ROOT / f"benchmarks/results/elastic-slack_{name}_{date.today():%Y%m%d}.json"
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {out.name}")


if __name__ == "__main__":
    main()
