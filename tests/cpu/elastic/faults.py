"""Real worker processes that learn a small regression, and real signals to hurt them with.

Used by test_faults.py (a handful of fixed cases) and by `benchmarks/elastic.py --soak 50` (random ones).
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from outcore.elastic import wire
from outcore.elastic.place import open_place
from outcore.elastic.settings import Settings
from outcore.elastic.transport import TCPStore
from outcore.elastic.worker import join

from . import forked

LIMIT_S = 2.0
STEP_S = 0.01  # a step takes this long, so that a run lasts long enough to be hurt in the middle
SHARED_BYTES = wire.SHARED_BYTES or 0
FAULTS = ("kill", "stop", "stop_and_wake", "slow", "kill_center", "stop_center", "rejoin")
SYNC_FAULTS = tuple(fault for fault in FAULTS if "center" not in fault)


def teach(folder: Path, rank: int, num_ranks: int, port: int, method: str, run_s: float, ahead: int) -> None:
    """One worker's life: learn for `run_s` seconds of its own clock, write a line per step, end well.

    Where workers may go ahead they do: each rank is slower than the one before.
    """
    # A forked child inherits its parent's intra-op pool size; one thread keeps the shared machine calm.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    # Ballast: enough for the sums to pass through shared memory, whose owner may be the one that dies.
    net.register_buffer("ballast", torch.zeros(SHARED_BYTES // 2))
    period, step_s = 1 if method == "sync-sgd" else 4, STEP_S * (1 + rank if ahead else 1)
    settings = Settings(method=method, period=period, limit_s=LIMIT_S, join_limit_s=30, ahead=ahead)
    place = open_place(rank, num_ranks, ("127.0.0.1", port), "soak", limit_s=10)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    chosen = {name: getattr(settings, name) for name in ("period", "limit_s", "join_limit_s", "ahead")}
    generator = torch.Generator().manual_seed(100 + rank)
    with (folder / f"log-{place.uid}").open("a") as log, join(net, optimizer, method, place=place, **chosen) as worker:
        ends_s = time.monotonic() + run_s
        while time.monotonic() < ends_s or (folder / "somebody is expected").exists():
            x = torch.randn(32, 8, generator=generator)
            loss = nn.functional.mse_loss(net(x), teacher(x).detach())
            loss.backward()
            worker.step()
            log.write(json.dumps([time.monotonic(), loss.item(), worker.stats().num_exchanges]) + "\n")
            log.flush()
            time.sleep(10 * LIMIT_S if (folder / f"slow-{rank}").exists() else step_s)
        center = worker.center_state_dict()
    net.load_state_dict(center)
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(7))
    (folder / f"done-{rank}").write_text(str(nn.functional.mse_loss(net(x), teacher(x)).item()))


@dataclass
class Report:
    """What one hurt run showed; `problems` is empty when all is well."""

    fault: str
    method: str
    victim: int
    ahead: int = 0
    num_survivors_done: int = 0
    longest_gap_s: float = 0.0
    loss_at_fault: float = 0.0
    loss_at_end: float = 0.0
    problems: list[str] = field(default_factory=list)


class Village:
    """Worker processes around one store; the store is here, where no fault reaches."""

    def __init__(self, folder: Path, method: str, num_ranks: int = 3, run_s: float = 6.0, ahead: int = 0) -> None:
        self.folder, self.method, self.num_ranks, self.run_s, self.ahead = folder, method, num_ranks, run_s, ahead
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context = forked.context()
        self.processes: dict[int, BaseProcess] = {}

    def start(self, rank: int) -> None:
        args = (self.folder, rank, self.num_ranks, self.server.port, self.method, self.run_s, self.ahead)
        self.processes[rank] = self._context.Process(target=teach, args=args)
        self.processes[rank].start()

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def centers(self) -> list[psutil.Process]:
        """Centre processes of this village: they carry its port in their arguments."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if "outcore.elastic.center" in line and f'"port": {self.server.port},' in line[-1]:
                found.append(process)
        return found

    def logs(self, rank: int) -> list[list[float]]:
        lines: list[list[float]] = []
        for path in sorted(self.folder.glob(f"log-{rank}.*")):
            lines += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
        return lines

    def wait_for_exchanges(self, limit_s: float = 40.0) -> None:
        """Until every worker has exchanged a few times: a fault should hit a running system."""
        end_s = time.monotonic() + limit_s
        while not all((lines := self.logs(rank)) and lines[-1][2] >= 3 for rank in range(self.num_ranks)):
            assert time.monotonic() < end_s, "the workers did not begin to exchange"
            time.sleep(0.05)

    def end(self) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join(5)
        for center in self.centers():
            center.kill()


def hurt(village: Village, fault: str, victim: int) -> None:
    if fault in ("kill", "rejoin"):
        os.kill(village.pid(victim), signal.SIGKILL)
    elif fault in ("stop", "stop_and_wake"):
        os.kill(village.pid(victim), signal.SIGSTOP)
    elif fault == "slow":
        (village.folder / f"slow-{victim}").touch()
    else:
        for center in village.centers():
            center.send_signal(signal.SIGKILL if fault == "kill_center" else signal.SIGSTOP)


def heal(village: Village, fault: str, victim: int) -> None:
    """What happens to the victim a while later."""
    if fault == "rejoin":
        village.processes[victim].join(5)
        village.start(victim)
        end_s = time.monotonic() + 40
        while not any(path.read_text() for path in village.folder.glob(f"log-{victim}.2")):
            assert time.monotonic() < end_s, "the victim did not come back"
            time.sleep(0.05)
        (village.folder / "somebody is expected").unlink()
    elif fault == "stop_and_wake":
        os.kill(village.pid(victim), signal.SIGCONT)


def run_hurt(
    folder: Path, fault: str, method: str, victim: int, *, seed: int = 0, run_s: float = 6.0, ahead: int = 0
) -> Report:
    """One run: start, hurt at a random moment, let it end, look at everything."""
    chance = random.Random(seed)
    village, report = Village(folder, method, run_s=run_s, ahead=ahead), Report(fault, method, victim, ahead)
    try:
        for rank in range(village.num_ranks):
            village.start(rank)
        village.wait_for_exchanges()
        time.sleep(chance.uniform(0, 0.5))
        at_s = time.monotonic()
        if fault == "rejoin":  # on a busy machine the others would be done before the victim is back
            (folder / "somebody is expected").touch()
        hurt(village, fault, victim)
        time.sleep(1.5 * LIMIT_S if fault == "stop_and_wake" else 1.0)
        heal(village, fault, victim)
        _judge(village, report, at_s)
    finally:
        village.end()
    return report


def _judge(village: Village, report: Report, at_s: float) -> None:
    spared = "center" in report.fault or report.fault in ("rejoin", "stop_and_wake")
    survivors = [rank for rank in range(village.num_ranks) if spared or rank != report.victim]
    ends_s = at_s + village.run_s + 6 * LIMIT_S + 10
    for rank in survivors:
        village.processes[rank].join(max(0.1, ends_s - time.monotonic()))
        if village.processes[rank].is_alive():
            report.problems.append(f"rank {rank} hangs")
        elif village.processes[rank].exitcode != 0 or not (village.folder / f"done-{rank}").exists():
            report.problems.append(f"rank {rank} ended with {village.processes[rank].exitcode}")
        else:
            report.num_survivors_done += 1
    _judge_losses(village, report, at_s, [rank for rank in survivors if rank != report.victim])
    if not spared:
        village.processes[report.victim].kill()  # a stopped or sleeping victim is ours to remove, then all must be gone
        village.processes[report.victim].join(5)
    _judge_leftovers(village, report)


def _judge_losses(village: Village, report: Report, at_s: float, survivors: list[int]) -> None:
    for rank in survivors:
        lines = village.logs(rank)
        first = sum(loss for _, loss, _ in lines[:20]) / 20
        before = [loss for when_s, loss, _ in lines if when_s <= at_s][-20:]
        after = [loss for when_s, loss, _ in lines if when_s > at_s][-20:]
        if len(after) < 20:
            report.problems.append(f"rank {rank} took {len(after)} steps after the fault")
            continue
        report.loss_at_fault, report.loss_at_end = sum(before) / len(before), sum(after) / len(after)
        if report.loss_at_end >= report.loss_at_fault and report.loss_at_end > 0.01 * first:  # not falling, not at 0
            report.problems.append(f"rank {rank}: loss {report.loss_at_fault:.4f} -> {report.loss_at_end:.4f}")
        moments = [when_s for when_s, _, _ in lines]
        gap_s = max(late - early for early, late in pairwise(moments))
        report.longest_gap_s = max(report.longest_gap_s, gap_s)
        # One limit to notice, one to regroup and settle, and slack for a machine that is shared.
        if gap_s > 2 * LIMIT_S + 3:
            report.problems.append(f"rank {rank} stood still for {gap_s:.1f} s")


def _judge_leftovers(village: Village, report: Report) -> None:
    end_s = time.monotonic() + LIMIT_S + 10  # a centre to which nobody said goodbye waits for the limit and 5 s
    while (left := [c for c in village.centers() if c.status() != psutil.STATUS_STOPPED]) and time.monotonic() < end_s:
        time.sleep(0.1)
    if left:
        report.problems.append(f"{len(left)} centre process(es) left behind")


def main() -> None:
    """`python -m tests.cpu.elastic.faults NUM_RUNS`: random faults, a line each."""
    import tempfile

    num_bad = 0
    for seed in range(int(sys.argv[1])):
        with tempfile.TemporaryDirectory() as folder:
            report = random_run(Path(folder), seed)
        num_bad += bool(report.problems)
        print(seed, report, flush=True)
    print(f"{num_bad} of {sys.argv[1]} runs with problems")


def random_run(folder: Path, seed: int, run_s: float = 6.0, only: list[str] | None = None) -> Report:
    """`only`: the methods to draw from. Half of the sync-easgd runs let workers go ahead."""
    chance = random.Random(seed)
    methods: dict[str, Any] = {
        **dict.fromkeys(("sync-easgd", "sync-sgd", "diloco"), SYNC_FAULTS),
        **dict.fromkeys(("async-easgd", "hogwild-easgd", "original-easgd", "eamsgd", "async-sgd"), FAULTS),
    }
    method = chance.choice(only or sorted(methods))
    fault, victim = chance.choice(methods[method]), chance.randrange(3)
    ahead = chance.choice((0, 8)) if method == "sync-easgd" else 0
    return run_hurt(folder, fault, method, victim, seed=seed, run_s=run_s, ahead=ahead)


if __name__ == "__main__":
    main()
