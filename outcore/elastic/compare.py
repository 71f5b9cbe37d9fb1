"""Compares methods by one training run of each, and draws their accuracy over seconds and bytes.

All runs have the same data, shards, number of epochs and pinned processes; only the method differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outcore.elastic.launch import LaunchPlan, launch
from outcore.elastic.methods import METHODS
from outcore.errors import ElasticError

if TYPE_CHECKING:
    from outcore.elastic.trials import Result, Trial

# One effective rate for all: 0.1 for a step that is averaged over the workers. At 0.2 plain SGD itself diverges on this
# LeNet for one order of batches in four, whatever the method.
RATE = 0.1
PEERS = ("ddp", "periodic-averaging", "post-local-sgd")
EVERY_STEP = ("sync-sgd", "ddp", "async-sgd", "async-msgd", "hogwild-sgd", "original-easgd")


def rate_for(method: str, num_workers: int) -> float:
    """Returns the local rate with the effective step of `RATE`.

    Momentum multiplies a step by 1 / (1 - mu); steps added to a common centre count once per worker; DiLoCo's outer
    step is effectively about four times as long. An exchange does not change sum_i W_i + C, so P workers' gradients
    move P + 1 vectors, and an elastic centre moves by P / (P + 1) of a worker's step. The compensation is limited to
    1.5, beyond which a single worker's own SGD diverges.
    """
    known = METHODS.get(method)
    if known is None:
        return RATE
    if known.momentum == "outer":
        return RATE / 4
    own = RATE * (1 - known.mu)
    if known.sends == "steps":
        return own / num_workers
    return own * min(1.5, (num_workers + 1) / num_workers) if known.is_elastic else own


def make_trial(method: str, num_workers: int, **chosen: Any) -> Trial:
    """Returns a trial with the usual rate and period of its method; `chosen` overrides them."""
    from outcore.elastic.trials import Trial

    if method not in METHODS and method not in PEERS:
        raise ElasticError(f"{method!r} cannot be compared; choose from {', '.join([*METHODS, *PEERS])}")
    settings = {"period": 1 if method in EVERY_STEP else 4, **chosen.pop("join", {})}
    fields: dict[str, Any] = {"name": method, "rate": rate_for(method, num_workers), **chosen}
    return Trial(method=method, num_workers=num_workers, join=settings, **fields)


def run_trials(
    trials: list[Trial],
    *,
    num_groups: int,
    data: str | None = None,
    num_spare_cores: int = 0,
    limit_s: float | None = None,
    on_result: Callable[[Result], None] = lambda result: None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Result]:
    """Runs the trials one after the other in the same `num_groups` pinned processes; reports each result at once."""
    with tempfile.TemporaryDirectory(prefix="outcore-trials-") as folder:
        order, out = Path(folder) / "order.json", Path(folder) / "results.jsonl"
        out.touch()
        order.write_text(json.dumps({"data": data, "out": str(out), "trials": [asdict(trial) for trial in trials]}))
        command = [sys.executable, "-m", "outcore.elastic.trials", str(order)]
        env = {"RES_OPTIONS": "timeout:1 attempts:1"}  # a host without a resolver must not spend the clock on names
        plan = LaunchPlan(
            command, num_groups, max_restarts=0, num_spare_cores=num_spare_cores, limit_s=limit_s, env=env
        )
        results: list[Result] = []
        ended = threading.Event()
        # The launcher stays in this thread, where signals arrive; results are told from another as they come.
        follower = threading.Thread(target=_follow, args=(out, ended, results, on_result), daemon=True)
        follower.start()
        try:
            launch(plan, say)
        finally:
            ended.set()
            follower.join()
    return results


def _follow(out: Path, ended: threading.Event, results: list[Result], on_result: Callable[[Result], None]) -> None:
    from outcore.elastic.trials import Result

    is_last_look = False
    while not is_last_look:
        is_last_look = ended.wait(0.2)
        for line in out.read_text().split("\n")[len(results) : -1]:
            results.append(Result(**json.loads(line)))
            on_result(results[-1])


def draw(results: list[Result], path: Path) -> None:
    """Draws the centre's accuracy over seconds, and over the bytes that one worker sent."""
    try:
        import matplotlib
    except ImportError:
        raise ElasticError("the picture needs matplotlib: install outcore[plot], or give --json only") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_time, by_bytes) = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for result in results:
        accuracies = [100 * point["accuracy"] for point in result.points]
        by_time.plot([point["at_s"] for point in result.points], accuracies, marker=".", label=result.trial["name"])
        by_bytes.plot([point["sent_bytes"] / 2**20 for point in result.points], accuracies, marker=".")
    by_time.set(xlabel="seconds", ylabel="test accuracy of the centre, %")
    by_bytes.set(xlabel="MiB sent by one worker", xscale="symlog")
    for axis in (by_time, by_bytes):
        axis.grid(alpha=0.3)
    by_time.legend(fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
