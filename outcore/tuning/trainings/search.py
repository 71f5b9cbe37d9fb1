"""Searches batches and learning rates for the setting that reaches a target first, and the one with the best metric.

An Optuna study with two objectives: seconds to the target, and the final metric. Training is a generator that yields
`(seconds, metric)` after each evaluation, so that a run can be stopped between two evaluations. Optuna does not prune
studies with several objectives. Here a run is pruned if it is behind in both: it is later than 1.5 times the fastest
run, and its metric is worse than the median of the other runs at the same time. A study with a file can be continued:
the file keeps each run's batch, rate and curve. Seconds to a target are read from the curve, so another session may use
another target or other batches.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from outcore.errors import TuningError
from outcore.tuning.settings import SETTINGS
from outcore.values.codec import Saved

if TYPE_CHECKING:
    import optuna

Train = Callable[[int, float], Iterator[tuple[float, float]]]
SEARCH = SETTINGS.search
STUDY_NAME = "outcore"  # name of the study in its file
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class SearchRun:
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
class SearchResult(Saved):
    """All runs of the study, in order."""

    KIND: ClassVar[str] = "search"

    target: float
    maximise: bool
    runs: tuple[SearchRun, ...]

    @property
    def fastest(self) -> SearchRun | None:
        """The run that reached the target first; None if no run did."""
        reached = [run for run in self.runs if run.to_target_s is not None]
        return min(reached, key=lambda run: run.to_target_s or 0.0, default=None)

    @property
    def best(self) -> SearchRun | None:
        """The complete run with the best final metric."""
        done = [run for run in self.runs if run.metric is not None and run.state == "complete"]
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
    about: Mapping[str, Any] = NOTHING,
    on_run: Callable[[SearchRun, int, int], None] = lambda run, num_done, num_trials: None,
) -> SearchResult:
    """Runs `train(batch, lr)` until the study has `num_trials` finished runs, including those of earlier sessions.

    `start` lists settings to begin with, for example an advice. `storage` names the file that keeps the study; a file
    whose training was described differently (`about`: metric, data ...) is refused. `on_run` is called after each run
    with the run, the number of finished runs and their final number.
    """
    if not batches or not 0 < lrs[0] < lrs[1] or num_trials < 1:
        raise TuningError(
            f"nothing can be searched among batches {list(batches)}, rates {lrs} and {num_trials} trials; name a "
            "batch, a lower and a higher rate, and a trial"
        )
    study = _Study(open_study(storage, maximise, about), train, sorted(set(batches)), lrs, target, maximise)
    if not study.runs:
        study.begin_with(start)
    while len(study.runs) < num_trials:
        on_run(study.run_next(), len(study.runs), num_trials)
    return SearchResult(target, maximise, tuple(study.runs))


def open_study(storage: str | Path | None, maximise: bool, about: Mapping[str, Any] = NOTHING) -> optuna.Study:
    """Returns the study in a file, or a new one. Raises `TuningError` for a file that cannot be used."""
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise TuningError("a search needs optuna; install outcore[tune]") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    directions = ["minimize", "maximize" if maximise else "minimize"]
    try:
        if storage is not None:
            _check_is_study(storage)
        kept = None if storage is None else JournalStorage(JournalFileBackend(str(storage)))
        study = optuna.create_study(storage=kept, study_name=STUDY_NAME, directions=directions, load_if_exists=True)
        before = study.user_attrs.get("about")
        if not before and about:
            study.set_user_attr("about", dict(about))
    except OSError as error:
        raise TuningError(
            f"a study cannot be kept in {storage} ({error.strerror or error}); name a file in a folder that is there "
            "and can be written"
        ) from None
    except Exception:  # Optuna's errors for a file that it did not write
        raise TuningError(
            f"{storage} is no study of a search; name another file, or one that is not there yet"
        ) from None
    if [direction.name.lower() for direction in study.directions] != directions:
        raise TuningError(f"{storage} holds a study with other objectives; name another file")
    for what, is_now in about.items():
        was = (before or {}).get(what, is_now)
        if was != is_now:
            raise TuningError(
                f"{storage} holds runs of another training ({what}: {was} there, {is_now} now); name another file"
            )
    return study


def batches_of(study: optuna.Study) -> list[int]:
    """Returns the batches of the study's runs."""
    return sorted({trial.user_attrs["run"]["batch"] for trial in study.trials if "run" in trial.user_attrs})


def _check_is_study(storage: str | Path) -> None:
    """Raises for a file that is no study, before Optuna appends to it; creates a file that does not exist."""
    with open(storage, "ab+") as file:
        file.seek(0)
        line = file.readline()
        if line and "op_code" not in json.loads(line):
            raise ValueError


class _Study:
    """The runs of one study: those in its file, and new ones.

    The next setting is sampled from a study in memory, in which every run has its seconds to this session's target and
    the index of its batch in this session's list.
    """

    def __init__(
        self,
        kept: optuna.Study,
        train: Train,
        batches: list[int],
        lrs: tuple[float, float],
        target: float,
        maximise: bool,
    ) -> None:
        import optuna
        from optuna.distributions import FloatDistribution, IntDistribution

        self.kept, self.train, self.batches, self.lrs = kept, train, batches, lrs
        self.target, self.sign = target, 1 if maximise else -1
        self.rates = FloatDistribution(*lrs, log=True)
        self.space = {"batch_index": IntDistribution(0, len(batches) - 1), "lr": self.rates}
        self.runs: list[SearchRun] = []
        self.curves: list[list[tuple[float, float]]] = []  # of complete runs
        known = [trial.user_attrs for trial in kept.trials if trial.state.is_finished() and "run" in trial.user_attrs]
        sampler = optuna.samplers.TPESampler(seed=len(known), n_startup_trials=6, multivariate=False)
        self.sampled = optuna.create_study(directions=kept.directions, sampler=sampler)
        for attributes in known:
            run, curve = SearchRun(**attributes["run"]), attributes["curve"]
            self._remember(replace(run, to_target_s=self._to_target_s(curve)), curve)

    def begin_with(self, start: Sequence[tuple[int, float]]) -> None:
        for batch, lr in start:
            near = min(range(len(self.batches)), key=lambda i: abs(math.log(self.batches[i] / batch)))
            self.sampled.enqueue_trial({"batch_index": near, "lr": min(max(lr, self.lrs[0]), self.lrs[1])})

    def run_next(self) -> SearchRun:
        """Runs the next setting. An interrupted run is not stored."""
        trial = self.sampled.ask(self.space)
        batch, lr = self.batches[trial.params["batch_index"]], trial.params["lr"]
        curve: list[tuple[float, float]] = []
        state, error = "failed", ""
        try:
            state = self._follow(self.train(batch, lr), curve)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        run = self._result(len(self.kept.trials), batch, lr, state, curve, error)
        self._save(run, curve)
        self._remember(run, curve, trial)
        return run

    def _save(self, run: SearchRun, curve: list[tuple[float, float]]) -> None:
        from optuna.distributions import IntDistribution
        from optuna.trial import create_trial

        attributes = {"run": vars(run), "curve": curve, "target": self.target}
        space = {"batch": IntDistribution(1, max(self.batches)), "lr": self.rates}
        params = {"batch": run.batch, "lr": run.lr}
        state, values = self._outcome(run)
        self.kept.add_trial(
            create_trial(state=state, values=values, params=params, distributions=space, user_attrs=attributes)
        )

    def _remember(self, run: SearchRun, curve: list[tuple[float, float]], trial: optuna.Trial | None = None) -> None:
        """Adds a run to the study in memory. `trial` is the sampled trial if the run belongs to this session."""

        from optuna.trial import create_trial

        self.runs.append(run)
        if run.state == "complete":
            self.curves.append(curve)
        state, values = self._outcome(run)
        if trial is not None:
            self.sampled.tell(trial, values, state)
        elif run.batch in self.batches and self.lrs[0] <= run.lr <= self.lrs[1]:
            params = {"batch_index": self.batches.index(run.batch), "lr": run.lr}
            self.sampled.add_trial(create_trial(state=state, values=values, params=params, distributions=self.space))

    def _outcome(self, run: SearchRun) -> tuple[optuna.trial.TrialState, list[float] | None]:
        from optuna.trial import TrialState

        if run.state != "complete":
            return (TrialState.PRUNED if run.state == "pruned" else TrialState.FAIL), None
        seconds = run.to_target_s if run.to_target_s is not None else SEARCH.not_reached_factor * run.trained_s
        return TrialState.COMPLETE, [seconds, run.metric or 0.0]

    def _follow(self, training: Iterator[tuple[float, float]], curve: list[tuple[float, float]]) -> str:
        for seconds, metric in training:
            if not math.isfinite(metric):
                return "pruned"
            curve.append((float(seconds), float(metric)))
            if self._to_target_s(curve) is None and self._is_hopeless(curve):
                close = getattr(training, "close", None)
                if close is not None:
                    close()
                return "pruned"
        if not curve:
            raise TuningError("train(batch, lr) yielded nothing; yield (seconds, metric) after each evaluation")
        return "complete"

    def _is_hopeless(self, curve: list[tuple[float, float]]) -> bool:
        reached = [second for other in self.curves if (second := self._to_target_s(other)) is not None]
        if len(self.curves) < SEARCH.num_compared or not reached or curve[-1][0] <= SEARCH.late_factor * min(reached):
            return False
        best = max(self.sign * metric for _, metric in curve)
        return best < statistics.median(self._best_until(other, curve[-1][0]) for other in self.curves)

    def _best_until(self, curve: list[tuple[float, float]], until_s: float) -> float:
        seen = [self.sign * metric for second, metric in curve if second <= until_s]
        return max(seen, default=-math.inf)

    def _to_target_s(self, curve: list[tuple[float, float]]) -> float | None:
        return next((second for second, metric in curve if self.sign * (metric - self.target) >= 0), None)

    def _result(
        self, number: int, batch: int, lr: float, state: str, curve: list[tuple[float, float]], error: str
    ) -> SearchRun:
        trained_s, metric = curve[-1] if curve else (0.0, None)
        return SearchRun(number, batch, lr, state, self._to_target_s(curve), metric, trained_s, error)
