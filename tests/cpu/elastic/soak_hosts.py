"""Two hosts with a launcher each, and random deaths: of replicas, of the centre, of a whole host.

    python -m tests.cpu.elastic.soak_hosts --kills 10 --methods sync-easgd,async-easgd --out soak.json

Nobody may hang or train apart. A death is one SIGKILL: of a replica, of the centre's process (asynchronous methods), or
of the second host's launcher, whose replicas die with it and which is started again (the first host's holds the store).
After each, all four ranks must exchange again within a limit. Every line of every log names the members: fewer than a
majority is a silent split, and so are final centres that differ. A replica that comes back goes on with a later step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from .hosts import PORT, Host, run_lab, why_not

NUM_RANKS = 4
RETURN_S = (
    60.0  # within which all ranks must exchange again after a death: two limits, a start of Python, a busy machine
)
QUIET = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
METHODS = (
    "sync-easgd", "async-easgd", "diloco", "streaming-diloco", "sync-sgd", "hogwild-easgd", "original-easgd",
)  # fmt: skip


class PlainSgd:
    """What elastic averaging needs of an optimizer; torch's own import for two seconds when the first one is made."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.param_groups: list[dict[str, Any]] = [{"params": self.parameters, "lr": 0.01}]
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.sub_(parameter.grad, alpha=0.01)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


def replica(folder: Path, method: str) -> None:
    """One rank's life under `outcore launch`, until the file `stop` is there."""
    import torch
    from torch import nn

    from outcore.elastic.place import poll, read_count
    from outcore.elastic.worker import join

    rank = os.environ["RANK"]
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = PlainSgd(net.parameters())
    period = {"sync-sgd": 1, "streaming-diloco": 4}.get(method, 2)
    chosen: dict[str, Any] = {"period": period, "limit_s": 4, "join_limit_s": RETURN_S}
    with join(net, optimizer, method, **chosen) as worker:  # type: ignore[arg-type]
        with (folder / f"log-{rank}").open("a", buffering=1) as log:
            # All stop after the same step: an exchange is for everybody, or for those who have not finished.
            stop = folder / "stop"
            while not stop.exists() or worker.global_step < int(stop.read_text() or 1 << 60):
                x = torch.randn(8, 8)
                (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
                worker.step()
                told = [time.monotonic(), os.getpid(), worker.global_step, worker.stats().num_exchanges]
                log.write(json.dumps([*told, worker.members()]) + "\n")
                time.sleep(0.02)
        store = worker.place.store
        store.add("stopped", 1)
        assert poll(lambda: read_count(store, "stopped") >= NUM_RANKS, RETURN_S)
        center = torch.cat([value.reshape(-1) for value in worker.center_state_dict().values()])
        store.add("read", 1)
        assert poll(lambda: read_count(store, "read") >= NUM_RANKS, RETURN_S)
    (folder / f"center-{rank}").write_text(hashlib.sha256(center.numpy().tobytes()).hexdigest())


def start_launcher(host: Host, folder: Path, method: str, number: int) -> subprocess.Popen[bytes]:
    """`outcore launch`, as a user of that host starts it."""
    script = folder / "train.py"
    script.write_text("from tests.cpu.elastic.soak_hosts import main\nmain()\n")
    command = ["nsenter", "-t", str(host.pid), "-n", "-u", sys.executable, "-m", "outcore", "launch", "--no-pin"]
    command += ["--groups", "2", "--nnodes", "2", "--rdzv", f"10.77.0.1:{PORT}", "--max-restarts", "100"]
    command += [str(script), "--replica", str(folder), "--methods", method]
    with (folder / f"said-{host.name}-{number}").open("w") as said:
        return subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env={**os.environ, **QUIET})


class Soak:
    """One training over two hosts, and what becomes of it."""

    def __init__(self, hosts: list[Host], folder: Path, method: str, seed: int, kinds: list[str] | None) -> None:
        self.hosts, self.folder, self.method, self.chance, self.kinds = (
            hosts,
            folder,
            method,
            random.Random(seed),
            kinds,
        )
        self.launchers = [start_launcher(host, folder, method, 0) for host in hosts]
        self.deaths: list[dict[str, Any]] = []
        self.problems: list[str] = []

    def log(self, rank: int) -> list[list[Any]]:
        path = self.folder / f"log-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("]]")]

    def wait_for_exchanges(self, since_s: float) -> bool:
        """Whether every rank has exchanged twice, with all others, after `since_s`."""
        end_s = time.monotonic() + RETURN_S
        while time.monotonic() < end_s:
            later = [[line for line in self.log(rank) if line[0] > since_s] for rank in range(NUM_RANKS)]
            whole = [[line for line in lines if len(line[4]) == NUM_RANKS] for lines in later]
            if all(lines and lines[-1][3] >= lines[0][3] + 2 for lines in whole):
                return True
            time.sleep(0.1)
        return False

    def kill(self) -> None:
        """One random death."""
        kinds = self.kinds or ["replica", "replica", "replica", "host"] + (["center"] if self.centers() else [])
        kind, at_s = self.chance.choice(kinds), time.monotonic()
        victim = self.chance.randrange(NUM_RANKS)
        if kind == "replica":
            os.kill(self.log(victim)[-1][1], signal.SIGKILL)
        elif kind == "center":
            for center in self.centers():
                center.kill()
        else:
            self.launchers[1].kill()
            self.launchers[1].wait()
            self.launchers[1] = start_launcher(self.hosts[1], self.folder, self.method, len(self.deaths) + 1)
        well = self.wait_for_exchanges(at_s + 0.2)
        self.deaths.append({"kind": kind, "victim": victim, "back_s": round(time.monotonic() - at_s, 1)})
        if not well:
            self.problems.append(f"after death {len(self.deaths)} ({kind}) not everybody came back in {RETURN_S:g} s")

    def centers(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter(["cmdline"]) if "outcore.elastic.center" in (p.info["cmdline"] or [])]

    def end(self) -> None:
        """Everybody stops after a common step; statuses, centres and logs are judged."""
        (self.folder / "draft").write_text(str(max(self.log(rank)[-1][2] for rank in range(NUM_RANKS)) + 20))
        (self.folder / "draft").rename(self.folder / "stop")
        for number, launcher in enumerate(self.launchers):
            try:
                status = launcher.wait(RETURN_S)
            except subprocess.TimeoutExpired:
                launcher.kill()
                self.problems.append(f"launcher {number} hangs")
            else:
                self.problems += [f"launcher {number} ended with {status}"] if status else []
        centers = {path.read_text() for path in self.folder.glob("center-*")}
        if len(centers) != 1 or len(list(self.folder.glob("center-*"))) != NUM_RANKS:
            self.problems.append(f"{len(list(self.folder.glob('center-*')))} ranks ended with {len(centers)} centres")
        for rank in range(NUM_RANKS):
            steps = [line[2] for line in self.log(rank)]
            if any(late <= early for early, late in pairwise(steps)):
                self.problems.append(f"rank {rank} went back in its steps")
        few = [line[4] for rank in range(NUM_RANKS) for line in self.log(rank) if 0 < len(line[4]) <= NUM_RANKS // 2]
        if few and not self.is_allowed(few):
            self.problems.append(f"{len(few)} steps among {few[0]}: no majority")

    def is_allowed(self, few: list[list[int]]) -> bool:
        """The asynchronous workers look every half second whether they are enough."""
        return "async" in self.method or "hogwild" in self.method or "original" in self.method


def soak(hosts: list[Host], method: str, kills: int, seed: int, kinds: list[str] | None = None) -> dict[str, Any]:
    """The scenario of one training; `kinds` of deaths are drawn from, all of them unless given."""
    with tempfile.TemporaryDirectory() as name:
        run = Soak(hosts, Path(name), method, seed, kinds)
        if not run.wait_for_exchanges(0.0):
            run.problems.append("the training did not begin")
        while len(run.deaths) < kills and not run.problems:
            time.sleep(run.chance.uniform(0.0, 1.0))
            run.kill()
        run.end()
        said = (
            {path.name: path.read_text()[-1500:] for path in sorted(Path(name).glob("said-*"))} if run.problems else {}
        )
        return {"method": method, "seed": seed, "deaths": run.deaths, "problems": run.problems, "said": said}


def told_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What goes into the results file."""
    return {
        "question": "elastic-soak",
        "hardware": f"{platform.machine()}-{len(os.sched_getaffinity(0))}cpu",
        "date": date.today().isoformat(),
        "hosts": "two network namespaces, two ranks each, a launcher on each",
        "command": " ".join(["python -m tests.cpu.elastic.soak_hosts", *sys.argv[1:]]),
        "num_deaths": sum(len(run["deaths"]) for run in runs),
        "num_problems": sum(len(run["problems"]) for run in runs),
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="deaths in each training")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replica", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.replica:
        replica(args.replica, args.methods)
        return
    if why_not() is not None:
        sys.exit(why_not())
    found = []
    for number, method in enumerate(args.methods.split(",")):
        limit_s = 60 + args.kills * (RETURN_S + 5)
        one = run_lab(
            "tests.cpu.elastic.soak_hosts:soak", limit_s, method=method, kills=args.kills, seed=args.seed + number
        )
        found.append(one)
        print(f"{method}: {len(one['deaths'])} deaths, {one['problems'] or 'well'}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(told_of(found), indent=1))
    sys.exit(any(one["problems"] for one in found))


if __name__ == "__main__":
    main()
