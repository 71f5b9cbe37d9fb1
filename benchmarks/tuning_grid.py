"""Trains with given settings, without tuning, to find what can be gained and which settings end better.

    python -m benchmarks.tuning_grid --only grid --data .carry/mnist --num-train 4000 --targets 0.93,0.95
    python -m benchmarks.tuning_grid --only grid --data .carry/mnist --num-train 4000 --settings 32:0.01,32:0.02:0.25
    python -m benchmarks.tuning_grid --only pairs --of benchmarks/results/tuning-accuracy_cpu2_20261115.json
    python -m benchmarks.tuning_grid --only ends --settings 32:0.02,32:0.04,32:0.08,64:0.04,64:0.08,128:0.08,128:0.16

`grid`   every batch with every rate, without and with a warm-up of a quarter of an epoch: seconds to each target and
         the accuracy in the end. It says whether a setting exists that beats today's clearly, whoever looks for it.
         Seconds are epochs to the target times the least seconds an epoch of that batch took: a step takes as long
         whatever its rate, and a busy machine decides nothing.
`pairs`  the settings that `benchmarks/tuning_accuracy.py` found, on new splits of the data and new seeds, in pairs: the
         difference of their accuracy in the end with its 95 % interval. One split of digits has 360 test images, one of
         which is 0.28 points: three seeds on it cannot tell 0.2 points, sixty splits can.
`ends`   which figure of one training, taken on the samples that `outcore.tune` would hold out, tells best how accurate
         its setting is on test samples from other starts? Its correlation with that, over the settings, and the points
         that are lost by taking the best setting by it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.slowdown import hardware  # noqa: E402
from benchmarks.tuning_cases import OPTIMIZERS, Case, Row, Setting, load_case, run  # noqa: E402
from outcore.elastic.digits import accuracy as accuracy_of  # noqa: E402
from outcore.tuning.data.samples import Samples  # noqa: E402
from outcore.tuning.settings import SETTINGS  # noqa: E402
from outcore.tuning.trainings.target import METRICS, PROBABILITY, Target  # noqa: E402
from outcore.tuning.trainings.trial import Trial, TrialSetting  # noqa: E402

TIMES = (0.5, 1.0, 2.0, 3.0, 6.0)  # the usual rate
WARMED = 2.0  # times the usual rate, from which on a warm-up may help
WARM_UP_EPOCHS = 0.25
MEASURES = (*METRICS, PROBABILITY)  # of ends
T95 = {2: 12.7, 3: 4.3, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 15: 2.14, 30: 2.05}  # Student's, by the pairs


def case_of(settings: argparse.Namespace, optimizer: str) -> Case:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = load_case(settings.data, optimizer, device, settings.num_train, settings.num_epochs)
    case.same = settings.same
    return case


def grid(settings: argparse.Namespace) -> Iterator[Row]:
    """One row per run, seeds outside, so that a cut leaves every setting as many."""
    case, end_s = case_of(settings, settings.optimizer), time.monotonic() + settings.limit_s
    targets = [float(target) for target in settings.targets.split(",")]
    for seed in range(settings.first_seed, settings.first_seed + settings.num_seeds):
        for batch, lr, epochs in asked_settings(settings):
            if time.monotonic() > end_s:
                continue
            found = run(case, Setting(batch, lr, int(epochs * case.num_train / batch)), seed)
            row = {"data": case.name, "optimizer": case.optimizer, "batch": batch, "lr": lr, "warm_up_epochs": epochs}
            row |= {"seed": seed, "to_target_epochs": {str(target): reached(found, target) for target in targets}}
            row |= {"final_accuracy": found["final_accuracy"], "trained_s": found["trained_s"]}
            yield row | {"epoch_s": found["trained_s"] / found["num_epochs"]}


def asked_settings(settings: argparse.Namespace) -> list[tuple[int, float, float]]:
    """Batch, rate and epochs of warm-up: those that were named, or all of the grid."""
    if settings.settings:
        parts = [named.split(":") for named in settings.settings.split(",")]
        return [(int(part[0]), float(part[1]), float(part[2]) if part[2:] else 0.0) for part in parts]
    batches, usual_lr = map(int, settings.batches.split(",")), OPTIMIZERS[settings.optimizer][1]
    whole = product(batches, TIMES, (0.0, WARM_UP_EPOCHS))
    return [(batch, times * usual_lr, epochs) for batch, times, epochs in whole if not epochs or times >= WARMED]


def reached(found: Row, target: float) -> float | None:
    """Epochs to the target; a look comes as often in each run."""
    apart = found["num_epochs"] / len(found["curve"])
    return next((at * apart for at, (_, got) in enumerate(found["curve"], 1) if got >= target), None)


def of_grid(rows: list[Row]) -> list[Row]:
    """One row per setting: medians over the seeds, the fastest to the last target first; never reached counts last."""
    named: dict[tuple[int, float, float], list[Row]] = {}
    for row in rows:
        named.setdefault((row["batch"], row["lr"], row["warm_up_epochs"]), []).append(row)
    found = []
    for (batch, lr, epochs), runs in named.items():
        epoch_s = min(row["epoch_s"] for row in rows if row["batch"] == batch)
        summed: Row = {"batch": batch, "lr": lr, "warm_up_epochs": epochs, "num_seeds": len(runs), "epoch_s": epoch_s}
        for target in runs[0]["to_target_epochs"]:
            needed = [math.inf if (e := one["to_target_epochs"][target]) is None else e for one in runs]
            median = epoch_s * statistics.median(needed)
            summed[f"to_{target}_s"] = median if math.isfinite(median) else None
            summed[f"num_at_{target}"] = sum(map(math.isfinite, needed))
        found.append(summed | {"mean_final_accuracy": statistics.fmean(one["final_accuracy"] for one in runs)})
    last = f"to_{list(rows[0]['to_target_epochs'])[-1]}_s"
    return sorted(found, key=lambda row: math.inf if row[last] is None else row[last])


def pairs(settings: argparse.Namespace) -> Iterator[Row]:
    """The advice, the search's best and today's setting on the same splits, from the same seeds."""
    end_s = time.monotonic() + settings.limit_s
    rows = json.loads(settings.of.read_text())["sections"]["accuracy"]["rows"]
    for optimizer in settings.optimizer.split(","):
        case = case_of(settings, optimizer)
        chosen = {
            row["method"]: Setting(row["batch"], row["lr"], row["num_warm_up_steps"], beta2=row["beta2"])
            for row in rows
            if (row["data"], row["optimizer"]) == (case.name, optimizer)
            and row["method"] in settings.methods.split(";")
        }
        for seed in range(settings.first_seed, settings.first_seed + settings.num_seeds):
            for name, setting in chosen.items():
                if time.monotonic() < end_s:
                    found = run(split_anew(case, seed), setting, seed)
                    row = {"data": case.name, "optimizer": optimizer, "method": name, "seed": seed}
                    row |= {"batch": setting.batch, "lr": setting.lr, "to_target_s": found["to_target_s"]}
                    yield row | {"final_accuracy": found["final_accuracy"]}


def split_anew(case: Case, seed: int) -> Case:
    """Which samples are trained on and which tested is drawn again."""
    x, y = torch.cat([case.train_x, case.test_x]), torch.cat([case.train_y, case.test_y])
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)
    train, test = order[: case.num_train], order[case.num_train :]
    return replace(case, train_x=x[train], train_y=y[train], test_x=x[test], test_y=y[test])


def of_pairs(rows: list[Row], ours: str = "outcore") -> list[Row]:
    """Ours against each other method: the mean difference in points, its standard error and interval."""
    found = []
    for optimizer, name in sorted({(row["optimizer"], row["method"]) for row in rows if row["method"] != ours}):
        ends = {(row["method"], row["seed"]): row["final_accuracy"] for row in rows if row["optimizer"] == optimizer}
        seeds = [seed for method, seed in ends if method == ours and (name, seed) in ends]
        points = [100 * (ends[ours, seed] - ends[name, seed]) for seed in seeds]
        if len(points) < 2:
            continue
        mean, error = statistics.fmean(points), statistics.stdev(points) / math.sqrt(len(points))
        row: Row = {"optimizer": optimizer, "ours": ours, "against": name, "num_pairs": len(points)}
        row |= {"mean_points": mean, "standard_error_points": error}
        wide = T95[max(num for num in T95 if num <= len(points))] * error
        found.append(row | {"low_points": mean - wide, "high_points": mean + wide})
    return found


def ends(settings: argparse.Namespace) -> Iterator[Row]:
    """Every setting for the time of all, with other samples held out for every seed; one row per run."""
    case, end_s = case_of(settings, settings.optimizer), time.monotonic() + settings.limit_s
    for seed in range(settings.first_seed, settings.first_seed + settings.num_seeds):
        for batch, lr, epochs in asked_settings(settings):
            if time.monotonic() > end_s:
                return
            net = case.net(seed)
            optimizer, num_steps = case.make_optimizer(net.parameters(), lr), case.num_samples(batch) // batch
            how = TrialSetting(
                batch, 1, int(max(epochs, SETTINGS.comparison.warm_up_share) * case.num_train / batch), num_steps
            )
            samples = Samples(TensorDataset(case.train_x, case.train_y), torch.device(case.device))
            target = Target("val_accuracy", 1.0)
            trial = Trial(
                net, F.cross_entropy, samples, optimizer, how, target, evaluation_batch=256, start=seed, split=seed
            )
            for _ in range(num_steps):
                trial.step(nullcontext)
            found = {}
            for metric in MEASURES:
                trial.target = Target(metric, 1.0)
                found[metric] = trial.evaluate()
            row = {"data": case.name, "optimizer": case.optimizer, "batch": batch, "lr": lr, "seed": seed}
            yield row | found | {"test_accuracy": accuracy_of(net, case.test_x, case.test_y)}


def of_ends(rows: list[Row]) -> list[Row]:
    """By measure, in the mean over seeds. Settings that failed with any seed are left out: all measures see that."""
    seeds, settings = sorted({row["seed"] for row in rows}), sorted({(row["batch"], row["lr"]) for row in rows})
    at = {(row["batch"], row["lr"], row["seed"]): row for row in rows if math.isfinite(row["val_loss"])}
    seeds = [seed for seed in seeds if any((*setting, seed) in at for setting in settings)]
    learnt = [s for s in settings if all((*s, seed) in at and at[*s, seed]["test_accuracy"] > 0.3 for seed in seeds)]
    found = []
    for metric in MEASURES if len(seeds) > 1 and len(learnt) > 1 else ():
        alike, lost = [], []
        for seed in seeds:
            others = [other for other in seeds if other != seed]
            true = [statistics.fmean(at[*s, other]["test_accuracy"] for other in others) for s in learnt]
            seen = [(-1 if metric == "val_loss" else 1) * at[*s, seed][metric] for s in learnt]
            alike.append(statistics.correlation(seen, true) if len(set(seen)) > 1 else 0.0)
            lost.append(100 * (max(true) - true[seen.index(max(seen))]))
        row: Row = {"measure": metric, "num_settings": len(learnt), "num_seeds": len(seeds)}
        found.append(row | {"correlation": statistics.fmean(alike), "lost_points": statistics.fmean(lost)})
    return found


SECTIONS: dict[str, tuple[Callable[[Any], Iterator[Row]], Callable[[list[Row]], list[Row]]]] = {
    "grid": (grid, of_grid),
    "pairs": (pairs, of_pairs),
    "ends": (ends, of_ends),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="grid", help=f"comma-separated sections of {', '.join(SECTIONS)}")
    parser.add_argument("--data", default="digits", help="'digits', a folder with MNIST, or a packed CIFAR-10")
    parser.add_argument("--optimizer", default="sgd", help="sgd or adam; for `pairs` also both, with a comma")
    parser.add_argument("--num-train", type=int, help="train on the first so many samples")
    parser.add_argument("--num-epochs", type=float)
    parser.add_argument("--same", choices=("seconds", "epochs"), default="epochs", help="for all settings [epochs]")
    parser.add_argument("--batches", default="16,32,64,128")
    parser.add_argument("--settings", help="batch:rate or batch:rate:epochs of warm-up, with commas, instead of a grid")
    parser.add_argument("--targets", default="0.95", help="accuracies; the grid is sorted by the last one")
    parser.add_argument("--num-seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--of", type=Path, help="results of benchmarks/tuning_accuracy.py, for `pairs`")
    parser.add_argument("--methods", default="outcore;search, best;default", help="of those results")
    parser.add_argument("--limit-s", type=float, default=600.0, help="no run is begun after this, per section")
    parser.add_argument("--out", type=Path, help="results file")
    settings = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    out = settings.out or ROOT / f"benchmarks/results/tuning-grid_{hardware()}_{date.today():%Y%m%d}.json"
    results: Row = {"question": "tuning-grid", "hardware": hardware(), "date": date.today().isoformat()}
    results |= {"torch": torch.__version__, "python": platform.python_version(), "sections": {}}
    for name in settings.only.split(","):
        run_section(name, settings, results, out)
    print(f"wrote {out}")


def run_section(name: str, settings: argparse.Namespace, results: Row, out: Path) -> None:
    rows, (section, summed) = [], SECTIONS[name]
    found: Row = results["sections"].setdefault(name, {})
    try:
        for row in section(settings):
            rows.append(row)
            found["rows"] = rows
            out.write_text(json.dumps(results, indent=1))
    except Exception as error:
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {error}"
    found["summed"] = summed(rows) if rows else []
    for row in found["summed"]:
        print(
            "   ", ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True
        )
    out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
