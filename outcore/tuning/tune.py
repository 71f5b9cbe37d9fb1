"""The public function: tune(make_model, loss_fn, dataset, memory=...) -> Advice.

Finds the batch and the learning rate that train fastest in the given memory. A few small batches are recorded. Every
other batch is predicted: their traces are scaled, planned and simulated. The best few predictions are confirmed with
real steps. The micro-batch is the knee of that curve. The effective batch is kept by accumulation or, if it may change,
chosen by goodput: samples per second times what a sample is worth at that batch, given the measured gradient noise.
Anything that would change the training is first compared with today's setting by training with both.

The method follows Guo et al. (AccUDNN, arXiv 1901.06773), who look for the efficiency-optimal minibatch once swapping
has removed the memory wall; the statistics are those of Pollux and AdaScale (see `gradients.goodput`). No limit is
found by running out of memory. The user's model, random generators and order of the data are left as they were.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Never

import torch

from outcore.errors import OutcoreError, TuningError
from outcore.tuning.advice import Advice, on_one_device
from outcore.tuning.data.batches import LossFn
from outcore.tuning.data.restore import keep_generators, made_optimizer, untouched
from outcore.tuning.data.samples import Samples
from outcore.tuning.data.user_code import sentence_for
from outcore.tuning.options import Batch, Data, Effort, Goal, LearningRate, MakeOptimizer, Memory, Request, Workers
from outcore.tuning.parts import Parts, check_data
from outcore.tuning.settings import SETTINGS
from outcore.tuning.team_tuner import TeamTuner
from outcore.tuning.throughput.bench import Bench, Progress
from outcore.tuning.throughput.builder import effective_batches
from outcore.tuning.trainings.initial_weights import MakeModel
from outcore.tuning.trainings.search import batches_of, open_study
from outcore.tuning.trainings.to_target import FreshTrainings, SearchFacts
from outcore.tuning.tuner import Tuner
from outcore.tuning.workers.ranks import Ranks, check_alike
from outcore.units import format_seconds

MOVED = {  # keywords of version 0.1, and their replacements
    "free": "batch=Batch(256, free=True)",
    "largest": "batch=Batch(largest=4096)",
    "rule": "learning_rate=LearningRate(rule='sqrt')",
    "validation": "dataset=Data(train, validation=...)",
    "collate": "dataset=Data(train, collate=...)",
    "host": "memory=Memory('16GiB', host=...)",
    "disk": "memory=Memory('16GiB', disk=...)",
    "target": "goal=Goal(target=('val_accuracy', 0.97))",
    "num_epochs": "goal=Goal(num_epochs=...)",
    "train_s": "goal=Goal(train_s=...)",
    "trial_s": "effort=Effort(trial_s=...)",
    "race": "effort=Effort(race=False)",
    "num_trials": "effort=Effort(num_trials=...)",
    "study": "effort=Effort(num_trials=..., study=...)",
    "communication_s": "workers=Workers(8, communication_s=...)",
}


def tune(
    make_model: MakeModel,
    loss_fn: LossFn,
    dataset: Any,
    *,
    memory: int | str | Memory,
    optimizer: MakeOptimizer | None = None,
    batch: int | Batch | None = None,
    learning_rate: float | str | LearningRate | None = None,
    goal: Goal | tuple[Any, float] | None = None,
    effort: Effort | None = None,
    workers: int | Sequence[float] | Workers | None = None,
    progress: Progress | None = None,
    **moved: Never,
) -> Advice:
    """Advises micro-batch, accumulation and learning rate for training in `memory` bytes of the model's device.

    `make_model()` returns the model on its device (a model is accepted too, and is not changed). `dataset` is a
    map-style data set, a function batch_size -> batch, or a `Data` object. The loss of a batch `(x, y)` is
    `loss_fn(model(x), y)`, that of a dictionary is `loss_fn(model(**batch), batch)`; any other step can be written as a
    model whose forward is that step. `optimizer(parameters)` returns the optimizer, for example
    `partial(torch.optim.AdamW, lr=1e-3)`. Without it, optimizer state is not counted and no learning rate is advised.

    `batch` is the effective batch you train with today. It is kept by accumulation, unless `Batch(256, free=True)` is
    given; without `batch` any batch may be chosen. `learning_rate` is the rate that belongs to `batch` (by default the
    optimizer's), or "find" for a range test, which is the default if no batch is given. Before the rate or the batch is
    changed, settings are compared by training from the same starts. The advice is the setting that reaches the target
    on held-out samples first, in the mean over up to three starts (further models that `make_model()` makes). Without a
    target, or if its metric is a function, the setting with the lowest loss wins. A setting that could not be compared,
    or that rests on timings of a busy machine, is not advised: then the advice is today's setting, and
    `advice.unchecked` gives the reason.

    `goal` is the purpose of the training: a target such as `("val_accuracy", 0.97)`, the time to which is then
    predicted, or a `Goal` with a length. With a length, the advice is the setting that is best at the end of a training
    of that length (`num_epochs` are converted to seconds with the batch that won the comparison), and the setting that
    reaches the target first is in `advice.soonest`. With a target of val_accuracy, trainings are compared at their end
    by the probability of the right class, otherwise by the loss.

    `effort` bounds the work: the time of all trial trainings scales with `Effort(trial_s=20)`, in seconds of compute.
    They take about 1.4 `trial_s` at most (2.3 if the target is nearly reached, 1.5 more with a length); reading the
    data and evaluating held-out samples come on top. `Effort(num_trials=20)` adds an Optuna study around the advice,
    whose result replaces the advice if it reaches the target sooner from three further starts.

    If several workers train together, batches are global batches, and the advice lists the samples of each worker. In a
    process group of torch.distributed, every rank calls this function with the same arguments and with the model itself
    (not wrapped in DistributedDataParallel). Each rank measures its own device; all return the same advice, each with
    its own micro-batch and curve. Outside a process group, `workers=Workers(8, communication_s=0.02)`, or speeds
    relative to this device such as `Workers([1, 1, 0.5], ...)`, plans for workers that are not available yet; the
    advice's micro-batch is then that of the first worker. `progress(what, part)` is called with the current activity
    and the share that is done.

    ```python
    import outcore
    import torch
    from torch.utils.data import TensorDataset

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    dataset = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    advice = outcore.tune(model, torch.nn.functional.cross_entropy, dataset, memory="16MiB")
    print(advice)
    ```
    """
    if moved:
        name = next(iter(moved))
        if name not in MOVED:
            raise TypeError(f"tune() got an unexpected keyword argument {name!r}")
        raise TypeError(f"tune() no longer takes {name}=...; write {MOVED[name]} (from outcore.tuning)")
    request = Request(
        make_model,
        loss_fn,
        optimizer,
        Data.read(dataset),
        Memory.read(memory),
        Batch.read(batch),
        LearningRate.read(learning_rate),
        Goal.read(goal),
        effort or Effort(),
        Workers.read(workers),
    )
    request.effort.check()
    return _Call(request, progress or (lambda what, part: None)).run()


class _Call:
    """One call of `tune`; remembers the current activity for error messages."""

    def __init__(self, request: Request, progress: Progress) -> None:
        self.request, self._progress, self._stage = request, progress, ""

    def progress(self, what: str, part: float) -> None:
        self._stage = what
        self._progress(what, part)

    def run(self) -> Advice:
        began_s, restore_generators = time.perf_counter(), keep_generators()
        try:
            return replace(self._advise(), spent_s=time.perf_counter() - began_s)
        except (OutcoreError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            sentence = sentence_for(error, self._stage)
            if sentence is None:
                raise
            raise TuningError(sentence) from error
        except SystemExit as error:  # the user's exit status would be mistaken for one of this command's
            raise TuningError(
                f"while {self._stage or 'tuning'}, your code called sys.exit({error.code}); let it return instead"
            ) from error
        finally:
            restore_generators()

    def _advise(self) -> Advice:
        request = self.request
        check_alike(request.facts)
        ranks = Ranks.read(request.workers)
        request.check(alone=ranks is None)
        with self._tuner(ranks) as tuner:
            parts, facts, known = tuner.parts, SearchFacts(), list[int]()
            if request.effort.num_trials:
                known, facts = _search_facts(parts)
            advice = tuner.advise()
            if request.effort.num_trials:
                advice, facts = _with_search_batches(tuner, advice, known, facts)
        if request.target is None or request.make_optimizer is None:
            return advice
        trainings = FreshTrainings(request, parts.samples, parts.validation, self.progress, facts)
        advice = trainings.search(advice) if request.effort.num_trials else advice
        if advice.target_s is not None:  # it was reached in the race, or by what a search found
            return advice
        return trainings.with_target_time(advice) if ranks is None else _target_time_of_group(trainings, advice, ranks)

    @contextmanager
    def _tuner(self, ranks: Ranks | None) -> Iterator[Tuner]:
        """Yields a tuner that is ready to advise, for this device or for all ranks."""
        request = self.request
        with ExitStack() as stack:
            with nullcontext() if ranks is None else ranks.all_or_none():
                self._stage = "making the model"
                model, is_new = request.make()
                stack.enter_context(nullcontext() if is_new else untouched(model))
                model.train()
                device, data = _device_of(model), request.data
                samples = Samples(data.samples, device, data.collate)
                validation = None if data.validation is None else Samples(data.validation, device, data.collate)
                check_data(request, samples)
                make, optimizer = request.make_optimizer, None
                if make is not None:
                    self._stage = "making the optimizer"
                    optimizer = stack.enter_context(made_optimizer(make, model.parameters()))
                has_state = optimizer is not None and bool(optimizer.state)
            communication_s = 0.0 if ranks is None else ranks.communicating_s(model)
            with nullcontext() if ranks is None else ranks.all_or_none():
                bench = Bench(model, request.loss_fn, samples, optimizer, **request.memory.limits)
                stack.callback(bench.close)
            parts = Parts(
                request, model, is_new, optimizer, samples, validation, self.progress, bench, has_state=has_state
            )
            if ranks is None:
                yield Tuner(parts)
                return
            tuner = TeamTuner(parts)
            tuner.join(ranks, communication_s)
            yield tuner


def _search_facts(parts: Parts) -> tuple[list[int], SearchFacts]:
    """Returns the batches that a study ran, and the facts of the training that a search needs.

    A study that cannot be continued is refused before any work is done.
    """
    target, optimizer = parts.request.target, parts.optimizer
    assert optimizer is not None
    assert target is not None
    about = {
        "metric": target.metric_name,
        "samples": parts.samples.num,
        "parameters": sum(parameter.numel() for parameter in parts.model.parameters()),
        "optimizer": type(optimizer).__name__,
    }
    known = batches_of(open_study(parts.request.effort.study, target.grows, about))
    betas = optimizer.param_groups[0].get("betas")
    return known, SearchFacts(about, parts.is_new, parts.normalises, betas[1] if betas is not None else None)


def _with_search_batches(
    tuner: Tuner, advice: Advice, known: list[int], facts: SearchFacts
) -> tuple[Advice, SearchFacts]:
    """Adds the batches that a study ran to the curve, and the micro-batch into which larger batches are split under
    accumulation, if it fits."""
    curves, largest = tuner.curves, tuner.request.batch.largest
    if curves is None:
        return advice, facts
    curves.predict([batch for batch in known if largest is None or batch <= largest], tuner.parts.progress)
    advice = replace(advice, curve=curves.curve)
    batches = effective_batches(advice.curve, SETTINGS.tuner.largest_batch)
    cut = next((size for batch, size in batches.items() if batch != size), 0)
    if not cut:
        return advice, facts
    predicted = tuner.parts.bench.planner(curves.planner.family, accumulating=True).predict(cut)
    return advice, replace(facts, accumulating=predicted.point if predicted.plan is not None else None)


def _target_time_of_group(trainings: FreshTrainings, advice: Advice, ranks: Ranks) -> Advice:
    """Returns the advice with the time to the target: rank 0 trains the global batch alone, and each of its steps is
    counted with the seconds that are predicted for the group."""
    alone = advice
    with ranks.all_or_none():
        if ranks.rank == 0:
            alone = trainings.with_target_time(on_one_device(advice))
    alone = ranks.first(alone)
    target_s = None if alone.target_s is None else alone.target_s * advice.step_s / alone.step_s
    said = alone.why[-1] + f"; that was one device, and {advice.workers} workers take the same steps"
    if target_s is not None:
        said += f" in {format_seconds(target_s)}"
    return replace(advice, target=alone.target, target_s=target_s, why=(*advice.why, said))


def _device_of(model: torch.nn.Module) -> torch.device:
    for parameter in model.parameters():
        return parameter.device
    raise TuningError("this model has no parameters, so there is nothing to train")
