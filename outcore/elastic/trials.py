"""The program that compared workers run: a list of trials, with the accuracy of each over seconds and bytes.

It is started by `outcore launch` (or torchrun) as `python -m outcore.elastic.trials FILE`. The processes stay for all
trials of the file, so that all start on the same warm machine. A trial's clock starts at a barrier; snapshots of the
centre are taken at fixed steps and evaluated after the clock has stopped. Methods of torch itself (DDP, the periodic
averager, post-local SGD) are trials like the others.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outcore.elastic.compare import PEERS
from outcore.elastic.cores import all_cores
from outcore.elastic.digits import Digits, accuracy, load_digits, network_for
from outcore.elastic.place import Place, connect_store, read_count, take_seat, write_json
from outcore.elastic.transport import PrefixStore, Store
from outcore.elastic.wire import giving_way
from outcore.elastic.worker import join

# When the last reference to a DDP group is dropped, torch joins gloo's thread while holding the GIL, for which that
# thread may be waiting (torch 2.13, twice in some hundred DDP trials). So references are kept until the process ends.
_NEVER_FREED: list[Any] = []


@dataclass(frozen=True)
class Trial:
    """One training run. Every method sees the same shards, batches and number of epochs."""

    name: str
    method: str
    num_workers: int
    epochs: float = 1.0
    batch: int = 64
    rate: float = 0.05
    anneals: bool = False  # the rate falls to nothing by the last step
    momentum: float = 0.0
    seed: int = 0
    num_snapshots: int = 12
    snapshots_from: float = 0.0  # share of the steps before the first snapshot
    num_judged: int | None = None  # test images for every snapshot [a fifth, and all of them for the last]
    max_steps: int | None = None
    slowed: float = 1.0  # the last worker takes this many times as long for a step, and sleeps for the rest
    shares_steps: bool = False  # whoever is free takes the next step, until all have taken as many as they would
    first_rank: int = 0  # the workers are this process and those after it
    limit_s: float = 60.0
    device: str = "cpu"
    join: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """The centre's accuracy at one time, with the steps, and the bytes that one worker has sent."""

    step: int
    at_s: float
    sent_bytes: int
    accuracy: float


@dataclass(frozen=True)
class Result:
    trial: dict[str, Any]
    data: str
    num_steps: int = 0
    train_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)  # by rank: how long its loop stood still to communicate
    paces_s: list[float] = field(default_factory=list)  # by rank: the mean step, the first ones left out
    steps_taken: list[int] = field(default_factory=list)  # by rank
    first_waits_s: list[float] = field(default_factory=list)  # by rank: waiting in the first tenth of its steps
    last_waits_s: list[float] = field(default_factory=list)  # and in the last
    first_s: float = 0.0  # how long the first tenth of rank 0's steps took
    last_s: float = 0.0
    sent_bytes: int = 0
    num_messages: int = 0
    final_accuracy: float = 0.0
    points: list[dict[str, float]] = field(default_factory=list)
    error: str | None = None

    @property
    def communication_share(self) -> float:
        """The share of time for communication. For parallel workers it is their mean, including waits for slower ones.
        If only one works at a time (turns that cover the gradient), all exchanges are sequential, and it is their sum,
        limited to 1 (they overlap while connections are made)."""
        return self._share(self.waits_s, self.train_s)

    @property
    def first_share(self) -> float:
        """The same share in the first tenth of the steps, when nothing is warm."""
        return self._share(self.first_waits_s, self.first_s)

    @property
    def last_share(self) -> float:
        return self._share(self.last_waits_s, self.last_s)

    def _share(self, waits_s: list[float], took_s: float) -> float:
        if not waits_s or not took_s:
            return 0.0
        at_once = 1 if self.trial.get("join", {}).get("turn") == "iteration" else len(waits_s)
        return min(1.0, sum(waits_s) / at_once / took_s)

    @property
    def least_share(self) -> float:
        """The share of the worker that waited least, which is nearly all communication and not a slower partner."""
        return min(self.waits_s, default=0.0) / self.train_s if self.train_s else 0.0

    def seconds_to(self, wanted: float) -> float | None:
        """Returns when the centre first reached the accuracy `wanted`."""
        return next((point["at_s"] for point in self.points if point["accuracy"] >= wanted), None)


Snapshot = tuple[int, float, int, dict[str, Tensor]]  # step, seconds, bytes sent, the centre


@dataclass(frozen=True)
class Trainer:
    """The interface of a method for the loop: forward, step, averaged weights, and (wait_s, bytes, messages)."""

    forward: nn.Module
    step: Callable[[], None]
    optimizer: torch.optim.Optimizer
    center: Callable[[], dict[str, Tensor]]
    costs: Callable[[], tuple[float, int, int]]
    close: Callable[[], None]


def run_trial(trial: Trial, digits: Digits, place: Place) -> Result:
    """Runs this rank's part of one trial; the result is complete on rank 0."""
    torch.manual_seed(trial.seed)
    net = network_for(digits).to(trial.device)
    digits = digits.to(trial.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=trial.rate, momentum=trial.momentum)
    per_worker = int(trial.epochs * (len(digits.train_labels) // trial.num_workers))
    num_steps = trial.max_steps or max(1, per_worker // trial.batch)
    make = _make_peer if trial.method in PEERS else _make_elastic
    trainer = make(trial, net, optimizer, place)
    batches = batches_of(trial, len(digits.train_labels), place.rank)
    try:
        meet(place.store, "ready", trial.num_workers, trial.limit_s)
        snapshots, steps_s, waits_s, train_s = _train(trainer, trial, digits, batches, num_steps, place)
        costs = trainer.costs()
        tenth = max(1, len(steps_s) // 10)
        ends = [[sum(times[:tenth]), sum(times[-tenth:])] for times in (waits_s, steps_s)]
        write_json(place.store, f"told/{place.rank}", [costs[0], _pace_s(steps_s), len(steps_s), ends[0]])
        if not trial.shares_steps:
            meet(place.store, "trained", trial.num_workers, trial.limit_s)
        snapshots.append((num_steps, train_s, costs[1], trainer.center()))
    finally:
        trainer.close()
    if trial.shares_steps:  # they end at different times: who stayed a member until all have would hold the others up
        meet(place.store, "trained", trial.num_workers, trial.limit_s)
    if place.rank != 0:
        return Result(asdict(trial), digits.name)
    told = [json.loads(place.store.get(f"told/{rank}")) for rank in range(trial.num_workers)]
    points, final_accuracy = _judge_all(net, snapshots, digits, trial.num_judged)
    return Result(
        trial=asdict(trial),
        data=digits.name,
        num_steps=num_steps,
        train_s=train_s,
        step_s=steps_s,
        waits_s=[one[0] for one in told],
        paces_s=[one[1] for one in told],
        steps_taken=[one[2] for one in told],
        first_waits_s=[one[3][0] for one in told],
        last_waits_s=[one[3][1] for one in told],
        first_s=ends[1][0],
        last_s=ends[1][1],
        sent_bytes=costs[1],
        num_messages=costs[2],
        final_accuracy=final_accuracy,
        points=[asdict(point) for point in points],
    )


def _train(
    trainer: Trainer, trial: Trial, digits: Digits, batches: Iterator[Tensor], num_steps: int, place: Place
) -> tuple[list[Snapshot], list[float], list[float], float]:
    """Returns snapshots of the centre, seconds of each step and of its waits, and all seconds without snapshots."""
    first = int(trial.snapshots_from * num_steps)
    every = max(1, (num_steps - first) // max(1, trial.num_snapshots))
    watch = place.rank == 0 and trial.num_snapshots > 0
    slowed = trial.slowed if place.rank == trial.num_workers - 1 else 1.0
    snapshots: list[Snapshot] = []
    marks_s, paused_s = [time.perf_counter()], 0.0
    began_s, waits_s = marks_s[0], [trainer.costs()[0]]
    for step, share_done in _turns(trial, num_steps, place.store):
        chosen = next(batches)
        loss = nn.functional.cross_entropy(trainer.forward(digits.train_images[chosen]), digits.train_labels[chosen])
        loss.backward()
        if trial.anneals:
            for group in trainer.optimizer.param_groups:
                group["lr"] = trial.rate * (1 - share_done)
        if slowed > 1:
            time.sleep((slowed - 1) * (time.perf_counter() - marks_s[-1]))
        trainer.step()
        marks_s.append(time.perf_counter())
        waits_s.append(trainer.costs()[0])
        if marks_s[-1] - began_s > trial.limit_s:
            told = f"{num_steps * trial.num_workers} shared" if trial.shares_steps else f"{num_steps}"
            raise TimeoutError(f"stopped after {step} of {told} steps: the limit of {trial.limit_s:g} s passed")
        if watch and first < step < num_steps and (step - first) % every == 0:
            snapshots.append((step, marks_s[-1] - began_s - paused_s, trainer.costs()[1], trainer.center()))
            paused_s += time.perf_counter() - marks_s[-1]
    steps_s, waited_s = ([late - early for early, late in pairwise(times)] for times in (marks_s, waits_s))
    return snapshots, steps_s, waited_s, marks_s[-1] - began_s - paused_s


def _turns(trial: Trial, num_steps: int, store: Store) -> Iterator[tuple[int, float]]:
    """Yields a worker's steps, each with the share of the training that is done."""
    total = num_steps * trial.num_workers
    for step in count(1):
        num_before = store.add("steps", 1) - 1 if trial.shares_steps else (step - 1) * trial.num_workers
        if num_before >= total:
            return
        yield step, num_before / total


def _pace_s(steps_s: list[float]) -> float:
    settled = steps_s[min(4, len(steps_s) // 4) :]
    return sum(settled) / len(settled)


def batches_of(trial: Trial, num_samples: int, rank: int) -> Iterator[Tensor]:
    """Yields the batches of a rank: its shard in random order, repeatedly."""
    shard = torch.arange(rank, num_samples, trial.num_workers)
    chance = torch.Generator().manual_seed(1000 * trial.seed + rank)
    while True:
        order = shard[torch.randperm(len(shard), generator=chance)]
        for batch in torch.split(order, trial.batch):
            if len(batch) == trial.batch or len(shard) < trial.batch:
                yield batch


def _judge_all(
    net: nn.Module, snapshots: list[Snapshot], digits: Digits, num_judged: int | None
) -> tuple[list[Point], float]:
    """Returns the accuracy of every snapshot on the first test images, and of the last one on all unless limited.

    The clock has stopped and the other workers are idle, so this one uses all cores of the partition.
    """
    few = num_judged or len(digits.test_labels) // 5
    points = []
    with _all_cores():
        for step, at_s, sent_bytes, state in snapshots:
            net.load_state_dict(state)
            how_good = accuracy(net, digits.test_images[:few], digits.test_labels[:few])
            points.append(Point(step, at_s, sent_bytes, how_good))
        if num_judged is not None:
            return points, points[-1].accuracy
        return points, accuracy(net, digits.test_images, digits.test_labels)


@contextmanager
def _all_cores() -> Iterator[None]:
    cores = all_cores()
    pinned, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    if cores:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        os.sched_setaffinity(0, pinned)


def meet(store: Store, name: str, count: int, limit_s: float) -> None:
    """A barrier without polling, which would disturb the measurements of other workers."""
    if store.add(f"meet/{name}", 1) >= count:
        store.set(f"open/{name}", "1")
    try:
        store.wait([f"open/{name}"], timedelta(seconds=limit_s))
    except RuntimeError:
        came = read_count(store, f"meet/{name}")
        raise TimeoutError(f"{came} of {count} workers came to {name!r} within {limit_s:g} s") from None


def _make_elastic(trial: Trial, net: nn.Module, optimizer: torch.optim.Optimizer, place: Place) -> Trainer:
    settings = {"limit_s": 20.0, "join_limit_s": trial.limit_s, **trial.join}
    worker = join(net, optimizer, trial.method, place=place, **settings)

    def costs() -> tuple[float, int, int]:
        stats = worker.stats()
        return stats.wait_s, stats.sent_bytes, stats.num_messages

    return Trainer(net, worker.step, optimizer, worker.center_state_dict, costs, worker.close)


class Peer:
    """torch's own data parallelism, as its documentation describes it."""

    def __init__(self, trial: Trial, net: nn.Module, optimizer: torch.optim.Optimizer, place: Place) -> None:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.nn.parallel import DistributedDataParallel

        self.net, self.optimizer, self.method = net, optimizer, trial.method
        self.num_steps, self.wait_s = 0, 0.0
        limit = timedelta(seconds=trial.limit_s)
        store, size = place.sub_store("peer"), trial.num_workers
        with giving_way():  # the same cores for everybody's messages
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=size, timeout=limit)
        _NEVER_FREED.append((self, dist.group.WORLD))
        self.period = 1 if trial.method == "ddp" else int(trial.join.get("period", 4))
        # A ring all-reduce sends 2 (P - 1) / P of the buffer; torch does not count for us.
        self.exchange_bytes = sum(p.nbytes for p in net.parameters()) * 2 * (size - 1) // size
        if trial.method == "periodic-averaging":
            self.forward: nn.Module = net
            self._step = self._average_after(PeriodicModelAverager(self.period, warmup_steps=0))
        else:
            self.forward = DistributedDataParallel(net)
            self._step = optimizer.step
        if trial.method == "post-local-sgd":
            self._step = self._post_local(PeriodicModelAverager(self.period, warmup_steps=0))

    def _average_after(self, averager: Any) -> Callable[[], Any]:
        def step() -> None:
            self.optimizer.step()
            averager.average_parameters(self.net.parameters())

        return step

    def _post_local(self, averager: Any) -> Callable[[], Any]:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
        from torch.distributed.optim import PostLocalSGDOptimizer

        hook: Any = post_local
        state = hook.PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
        self.forward.register_comm_hook(state, post_local.post_localSGD_hook)  # type: ignore[operator]
        return PostLocalSGDOptimizer(self.optimizer, averager).step

    def step(self) -> None:
        began_s = time.perf_counter()
        self._step()
        if self.method != "ddp":  # DDP waits inside backward, where this clock does not see it
            self.wait_s += time.perf_counter() - began_s
        self.optimizer.zero_grad()
        self.num_steps += 1

    def costs(self) -> tuple[float, int, int]:
        num_exchanges = self.num_steps // self.period
        return self.wait_s, num_exchanges * self.exchange_bytes, num_exchanges


def _make_peer(trial: Trial, net: nn.Module, optimizer: torch.optim.Optimizer, place: Place) -> Trainer:
    peer = Peer(trial, net, optimizer, place)
    with torch.no_grad():
        for parameter in net.parameters():
            dist.broadcast(parameter.data, 0)
    center = partial(_copied, net)
    return Trainer(peer.forward, peer.step, optimizer, center, peer.costs, dist.destroy_process_group)


def _copied(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def warm_up(digits: Digits) -> None:
    """Pays torch's one-time costs before the trials: imports of two seconds by the first optimizer, first kernels."""
    net, chosen = network_for(digits), slice(0, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    nn.functional.cross_entropy(net(digits.train_images[chosen]), digits.train_labels[chosen]).backward()
    optimizer.step()


def main() -> None:
    """Runs the trials of FILE: {"data": folder or null, "out": path, "trials": [...]}; adds a line to `out` for
    each."""
    order = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    digits = load_digits(order["data"])
    client = connect_store(address, 30)
    warm_up(digits)
    meet(PrefixStore("trials/warm", client), "all", int(os.environ["WORLD_SIZE"]), 60)
    for number, fields in enumerate(order["trials"]):
        trial = Trial(**fields)
        prefix = f"trials/{os.environ.get('TORCHELASTIC_RUN_ID', 'run')}/{number}"
        gate = PrefixStore(f"{prefix}/gate", client)
        seat = rank - trial.first_rank
        if 0 <= seat < trial.num_workers:
            try:
                result = run_trial(trial, digits, take_seat(client, seat, trial.num_workers, address, prefix))
            except Exception as error:  # a trial that fails is a result; the next one still runs
                result = Result(asdict(trial), digits.name, error=f"{type(error).__name__}: {error}"[:500])
            if seat == 0:
                with Path(order["out"]).open("a") as lines:
                    lines.write(json.dumps(asdict(result)) + "\n")
        meet(gate, "next", int(os.environ["WORLD_SIZE"]), 4 * trial.limit_s)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # see _NEVER_FREED
