"""Launches a script as pinned replicas on each host, with ranks, rendezvous and restart.

torchrun does not pin on a CPU and restarts all workers after one death; xeon.run_cpu pins but has no ranks. Here every
replica gets its group of cores before Python starts, as many threads as cores, and torchrun's environment (so that
`init_process_group` works too). The store is in the launcher and outlives all replicas. A replica that dies is
restarted alone: its elastic partners train on, and it continues from the centre. With several hosts, each runs a
launcher (nodes.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outcore.elastic.cores import read_cores, split_cores
from outcore.errors import ElasticError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outcore.elastic.nodes import Seat

POLL_S = 0.05
# Asks the kernel to end the replica with its launcher, even one that was killed, then becomes the replica.
_BOUND_TO_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class LaunchPlan:
    """The command, the number of restarts, and the limits of a launch."""

    command: list[str]
    num_groups: int
    max_restarts: int = 3
    num_spare_cores: int = 0
    pin: bool = True
    straggler_limit_s: float = 120.0
    limit_s: float | None = None
    env: dict[str, str] = field(default_factory=dict)
    num_nodes: int = 1
    rendezvous: tuple[str, int] | None = None  # address at which the launchers of several hosts meet, on one of them
    node_rank: int | None = None
    join_limit_s: float = 300.0


@dataclass
class Replica:
    rank: int
    cores: list[int]
    process: subprocess.Popen[bytes] | None = None
    num_restarts: int = 0
    status: int | None = None  # the exit status, if it will not be restarted


@dataclass(frozen=True)
class Outcome:
    statuses: dict[int, int]
    num_restarts: int
    lost_nodes: list[str] = field(default_factory=list)

    @property
    def lost(self) -> list[int]:
        return [rank for rank, status in self.statuses.items() if status != 0]


def launch(plan: LaunchPlan, say: Callable[[str], None] = lambda line: None) -> Outcome:
    """Runs this host's replicas to their end; never leaves a process behind."""
    from outcore.elastic.nodes import Nodes

    by_node = read_cores()
    groups = split_cores(by_node, plan.num_groups, plan.num_spare_cores)
    all_cores = [core for node in by_node for core in node]
    if plan.num_groups > len(all_cores):
        say(f"{plan.num_groups} groups share {len(all_cores)} core(s): expect no speed-up from this partition")
    say(f"{len(groups)} groups of {len(groups[0])} core(s): " + " | ".join(_short(group) for group in groups))
    if plan.num_nodes > 1 and plan.rendezvous is None:
        raise ElasticError(f"{plan.num_nodes} nodes need an address to meet at: give --rdzv HOST:PORT on every host")
    nodes = Nodes(plan.rendezvous or ("127.0.0.1", 0), plan.num_nodes, plan.num_groups, plan.join_limit_s)
    replicas: list[Replica] = []
    lost_nodes: list[str] = []
    try:
        with _terminated_by_signal():
            seat = nodes.take_seat(plan.node_rank)
            if plan.num_nodes > 1:
                last = seat.first_rank + plan.num_groups - 1
                say(f"node {seat.node} of {plan.num_nodes}: ranks {seat.first_rank} to {last} of {seat.num_ranks}")
            used = {core for group in groups for core in group}
            spare = [core for core in all_cores if core not in used]
            env = _environment(plan, seat, nodes.address, all_cores, spare)
            replicas += [Replica(seat.first_rank + number, cores) for number, cores in enumerate(groups)]
            _watch(replicas, plan, env, say, nodes.lost_store)
            well = all(replica.status == 0 for replica in replicas)
            lost_nodes = [nodes.name(node) for node in nodes.finish(well=well, limit_s=plan.straggler_limit_s)]
    finally:
        _end(replicas)
        nodes.close()
    return Outcome(
        {r.rank: r.status if r.status is not None else -1 for r in replicas}, _restarts(replicas), lost_nodes
    )


def _restarts(replicas: list[Replica]) -> int:
    return sum(replica.num_restarts for replica in replicas)


def _environment(
    plan: LaunchPlan, seat: Seat, address: tuple[str, int], all_cores: list[int], spare: list[int]
) -> dict[str, str]:
    return {
        **os.environ,
        **plan.env,
        "WORLD_SIZE": str(seat.num_ranks),
        "LOCAL_WORLD_SIZE": str(plan.num_groups),
        "GROUP_RANK": str(seat.node),
        "GROUP_WORLD_SIZE": str(plan.num_nodes),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # tells torch that the launcher hosts the store
        "TORCHELASTIC_RUN_ID": f"outcore-{seat.run}",
        "OUTCORE_FIRST_RANK": str(seat.first_rank),
        "OUTCORE_NUM_LAUNCHERS_BEFORE": str(seat.num_before),
        "TORCHELASTIC_RESTART_COUNT": "0",  # a lone restart joins the running store keys; uids tell it apart
        "OUTCORE_ALL_CORES": ",".join(str(core) for core in all_cores),
        "OUTCORE_SPARE_CORES": ",".join(str(core) for core in spare),
    }


def _start(replica: Replica, plan: LaunchPlan, env: dict[str, str]) -> None:
    threads = str(len(replica.cores)) if plan.pin else env.get("OMP_NUM_THREADS", str(len(replica.cores)))
    mine = {
        **env,
        "RANK": str(replica.rank),
        "LOCAL_RANK": str(replica.rank - int(env["OUTCORE_FIRST_RANK"])),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OUTCORE_RESTART_COUNT": str(replica.num_restarts + int(env["OUTCORE_NUM_LAUNCHERS_BEFORE"])),
    }
    # Affinity belongs to a thread and is inherited: pin this one, start the child, unpin. So the child is pinned
    # before its first instruction, and every page it touches is near its cores.
    before = os.sched_getaffinity(0)
    try:
        if plan.pin:
            os.sched_setaffinity(0, replica.cores)
        bound = [sys.executable, "-I", "-S", "-c", _BOUND_TO_LAUNCHER, str(os.getpid())]
        replica.process = subprocess.Popen([*bound, *plan.command], env=mine)
    except OSError as error:
        raise ElasticError(f"cannot start {plan.command[0]}: {error}") from None
    finally:
        os.sched_setaffinity(0, before)


def _watch(
    replicas: list[Replica],
    plan: LaunchPlan,
    env: dict[str, str],
    say: Callable[[str], None],
    lost_store: threading.Event,
) -> None:
    for replica in replicas:
        _start(replica, plan, env)
    last_end_s, ends_s = None, None if plan.limit_s is None else time.monotonic() + plan.limit_s
    while any(replica.status is None for replica in replicas):
        time.sleep(POLL_S)
        for replica in replicas:
            if replica.status is None and _ended(replica, plan, env, say):
                last_end_s = time.monotonic()
        if ends_s is not None and time.monotonic() > ends_s:
            say(f"the limit of {plan.limit_s:g} s passed; everything is ended")
            return
        if lost_store.is_set():
            say(f"the store at {env['MASTER_ADDR']}:{env['MASTER_PORT']} is out of reach: all replicas here are ended")
            return
        some_done = any(replica.status == 0 for replica in replicas)
        if some_done and last_end_s is not None and time.monotonic() - last_end_s > plan.straggler_limit_s:
            late = [replica.rank for replica in replicas if replica.status is None]
            say(f"rank(s) {late} did not end within {plan.straggler_limit_s:g} s of the others; ended by force")
            return


def _ended(replica: Replica, plan: LaunchPlan, env: dict[str, str], say: Callable[[str], None]) -> bool:
    """Whether this replica has ended for good; a failed one is restarted while restarts are left."""
    assert replica.process is not None
    status = replica.process.poll()
    if status is None:
        return False
    if status == 0 or replica.num_restarts >= plan.max_restarts:
        replica.status = status
        if status != 0:
            say(f"rank {replica.rank} failed with status {status}; no restart left, the others go on")
        return True
    replica.num_restarts += 1
    say(f"rank {replica.rank} ended with status {status}; start {replica.num_restarts} of {plan.max_restarts} again")
    _start(replica, plan, env)
    return False


def _end(replicas: list[Replica]) -> None:
    running = [r.process for r in replicas if r.process is not None and r.process.poll() is None]
    for process in running:
        process.terminate()
        process.send_signal(signal.SIGCONT)  # a stopped process hears SIGTERM when it is woken
    end_s = time.monotonic() + 5
    for process in running:
        try:
            process.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _terminated_by_signal() -> Iterator[None]:
    """Makes SIGTERM end the replicas like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _short(cores: list[int]) -> str:
    contiguous = len(cores) > 2 and cores == list(range(cores[0], cores[0] + len(cores)))
    return f"{cores[0]}-{cores[-1]}" if contiguous else ",".join(str(core) for core in cores)
