"""A way to train + ranges of batch and rate -> what real runs find: the fastest to the target, the best in the end.

An Optuna study with two objectives, seconds to the target and the final metric. Training is a generator that yields
`(seconds, metric)` after each evaluation, so that a run can be stopped between two of them. Optuna prunes no study of
several objectives; here a run is given up when it is hopeless in both: later than the fastest run by half, and behind
the median of the other runs at the same moment. A study that was given a file goes on where it stopped, whoever
stopped it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from outcore.errors import TuningError
from outcore.values.codec import Saved

if TYPE_CHECKING:
    import optuna

Train = Callable[[int, float], Iterator[tuple[float, float]]]
LATE = 1.5  # times the fastest run's seconds, after which a run that is also behind is given up
NOT_REACHED = 2.0  # times its own seconds: what a run that never reached the target is held to have taken
NUM_COMPARED = 3  # finished runs before any is given up


@dataclass(frozen=True)
class Tried:
    """One run. `state` is "complete", "pruned" or "failed"; `to_target_s` is None where the target was not reached."""

    number: int
    batch: int
    lr: float
    state: str
    to_target_s: float | None
    metric: float | None
    trained_s: float
    error: str


@dataclass(frozen=True)
class Found(Saved):
    """All runs of the study, in their order."""

    KIND: ClassVar[str] = "search"

    target: float
    maximise: bool
    tried: tuple[Tried, ...]

    @property
    def fastest(self) -> Tried | None:
        """The first to the target; None where no run reached it."""
        reached = [run for run in self.tried if run.to_target_s is not None]
        return min(reached, key=lambda run: run.to_target_s or 0.0, default=None)

    @property
    def best(self) -> Tried | None:
        """The best metric in the end."""
        done = [run for run in self.tried if run.metric is not None and run.state == "complete"]
        sign = 1 if self.maximise else -1
        return max(done, key=lambda run: sign * (run.metric or 0.0), default=None)


def search(
    train: Train,
    *,
    batches: Sequence[int],
    lrs: tuple[float, float],
    target: float,
    maximise: bool = True,
    num_trials: int = 20,
    start: Sequence[tuple[int, float]] = (),
    storage: str | Path | None = None,
    name: str = "outcore",
    seed: int = 0,
    tell: Callable[[Tried, int, int], None] = lambda run, num_done, num_trials: None,
) -> Found:
    """Runs `train(batch, lr)` until the study holds `num_trials` finished runs, counting those of an earlier session.

    `start` are runs to begin with, an advice for example. `storage` names the file that keeps the study. `tell` is
    called after each run with it, how many are done and how many there will be.
    """
    if not batches or not 0 < lrs[0] < lrs[1] or num_trials < 1:
        raise TuningError(
            f"nothing can be searched among batches {list(batches)}, rates {lrs} and {num_trials} trials; name a "
            "batch, a lower and a higher rate, and a trial"
        )
    study = _open(storage, name, maximise, seed)
    ordered = sorted(set(batches))
    if not study.trials:
        for batch, lr in start:
            near = min(range(len(ordered)), key=lambda i: abs(math.log(ordered[i] / batch)))
            study.enqueue_trial({"batch_index": near, "lr": min(max(lr, lrs[0]), lrs[1])})
    runs = _Runs(study, train, ordered, lrs, target, maximise)
    while len(runs.done()) < num_trials:
        tell(runs.run_one(), len(runs.done()), num_trials)
    return Found(target, maximise, tuple(runs.done()))


def _open(storage: str | Path | None, name: str, maximise: bool, seed: int) -> optuna.Study:
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise TuningError("a search needs optuna; install outcore[tune]") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kept = None if storage is None else JournalStorage(JournalFileBackend(str(storage)))
    directions = ["minimize", "maximize" if maximise else "minimize"]
    study = optuna.create_study(
        storage=kept, study_name=name, directions=directions, load_if_exists=True, sampler=_sampler(seed)
    )
    if [direction.name.lower() for direction in study.directions] != directions:
        raise TuningError(f"{storage} holds a study {name!r} with other objectives; name another file or study")
    return study


def _sampler(seed: int) -> Any:
    from optuna.samplers import TPESampler

    return TPESampler(seed=seed, n_startup_trials=6, multivariate=False)


class _Runs:
    """The runs of one study."""

    def __init__(
        self,
        study: optuna.Study,
        train: Train,
        batches: list[int],
        lrs: tuple[float, float],
        target: float,
        maximise: bool,
    ) -> None:
        from optuna.distributions import FloatDistribution, IntDistribution

        self.study, self.train, self.batches = study, train, batches
        self.target, self.sign = target, 1 if maximise else -1
        self.space = {"batch_index": IntDistribution(0, len(batches) - 1), "lr": FloatDistribution(*lrs, log=True)}

    def done(self) -> list[Tried]:
        finished = [trial for trial in self.study.trials if trial.state.is_finished()]
        return [Tried(**trial.user_attrs["run"]) for trial in finished if "run" in trial.user_attrs]

    def run_one(self) -> Tried:
        from optuna.trial import TrialState

        trial = self.study.ask(self.space)
        batch, lr = self.batches[trial.params["batch_index"]], trial.params["lr"]
        curve: list[tuple[float, float]] = []
        state, error = "failed", "interrupted"
        try:
            state, error = self._follow(self.train(batch, lr), curve), ""
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        finally:  # also when interrupted: the study knows then that this run will not go on
            run = self._result(trial.number, batch, lr, state, curve, error)
            trial.set_user_attr("curve", curve)
            if error != "interrupted":
                trial.set_user_attr("run", vars(run))
            if state == "complete":
                seconds = run.to_target_s if run.to_target_s is not None else NOT_REACHED * run.trained_s
                self.study.tell(trial, [seconds, run.metric or 0.0])
            else:
                self.study.tell(trial, state=TrialState.PRUNED if state == "pruned" else TrialState.FAIL)
        return run

    def _follow(self, training: Iterator[tuple[float, float]], curve: list[tuple[float, float]]) -> str:
        others = [trial.user_attrs["curve"] for trial in self.study.trials if trial.state.name == "COMPLETE"]
        for seconds, metric in training:
            if not math.isfinite(metric):
                return "pruned"
            curve.append((float(seconds), float(metric)))
            if self._to_target_s(curve) is None and self._is_hopeless(curve, others):
                close = getattr(training, "close", None)
                if close is not None:
                    close()
                return "pruned"
        if not curve:
            raise TuningError("train(batch, lr) yielded nothing; yield (seconds, metric) after each evaluation")
        return "complete"

    def _is_hopeless(self, curve: list[tuple[float, float]], others: list[list[tuple[float, float]]]) -> bool:
        reached = [second for other in others if (second := self._to_target_s(other)) is not None]
        if len(others) < NUM_COMPARED or not reached or curve[-1][0] <= LATE * min(reached):
            return False
        best = max(self.sign * metric for _, metric in curve)
        return best < statistics.median(self._best_until(other, curve[-1][0]) for other in others)

    def _best_until(self, curve: list[tuple[float, float]], until_s: float) -> float:
        seen = [self.sign * metric for second, metric in curve if second <= until_s]
        return max(seen, default=-math.inf)

    def _to_target_s(self, curve: list[tuple[float, float]]) -> float | None:
        return next((second for second, metric in curve if self.sign * (metric - self.target) >= 0), None)

    def _result(
        self, number: int, batch: int, lr: float, state: str, curve: list[tuple[float, float]], error: str
    ) -> Tried:
        trained_s, metric = curve[-1] if curve else (0.0, None)
        return Tried(number, batch, lr, state, self._to_target_s(curve), metric, trained_s, error)
