"""The front door: tune(make_model, loss_fn, dataset, memory=...) -> Advice.

Which batch and which learning rate train fastest in the memory there is? A few small batches are recorded; every other
one is predicted by scaling their traces, planning and simulating; the best few are confirmed with real steps. The
micro-batch is the knee of that curve. The effective batch is kept by accumulation or, where it is free, chosen by
goodput: samples per second times what a sample is worth at that batch, by the measured noise of the gradients. Whatever
would change what is trained is first compared with today's setting, by training both.

After Guo et al. (AccUDNN, arXiv 1901.06773), who look for the efficiency-optimal minibatch once swapping has removed
the memory wall; the statistics are those of Pollux and AdaScale (see `gradients.goodput`). Nothing is found by running
out of memory, and nothing of the user's training is changed: not the model, not the random generators, not the data's
order.
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

MOVED = {  # keywords of version 0.1 and what is written instead
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

    `make_model()` makes the model on its device (a model itself will do, and is not changed). `dataset` is a map-style
    data set, a function batch_size -> batch, or a `Data` object. A batch of `(x, y)` is trained by
    `loss_fn(model(x), y)`, a dictionary by `loss_fn(model(**batch), batch)`: any other step can be written as a model
    whose forward is that step. `optimizer(parameters)` makes the optimizer, for example
    `partial(torch.optim.AdamW, lr=1e-3)`; without it its state is not counted and no learning rate is advised.

    `batch` is the effective batch you train with today: it is kept by accumulation, unless `Batch(256, free=True)`.
    Without it the batch is free. `learning_rate` is the rate that belongs to `batch` (the optimizer's, if not given),
    or "find" for a range test, which is the default where no batch is given. Before the rate or the batch is changed,
    settings race from the same starts: what is soonest at the target on held-out samples (without one, or with a
    function for its metric: at the least loss), in the mean over up to three starts (further models, as `make_model()`
    makes them), is the advice. What could not be compared, or rests on timings of a busy machine, is not advised:
    `advice.unchecked` then says why, and the advice is today's setting.

    `goal` is what the training is for: a target such as `("val_accuracy", 0.97)`, whose time is then predicted, or a
    `Goal` with a length. With a length the advice is what is best at the end of such a training (as long as
    `num_epochs` take with the batch that won the race), and what is soonest at the target is in its `soonest`. With a
    target of val_accuracy ends are compared by the probability of the right class, else by the loss.

    `effort` bounds what is tried: `Effort(trial_s=20)` seconds of compute by which all go that train. All that training
    takes about 1.4 `trial_s` at most (2.3 where the target is near but not reached, 1.5 more with a length); reading
    the data and evaluating held-out samples come on top. `Effort(num_trials=20)` adds an Optuna study around the
    advice, which replaces the advice by what is sooner from three further starts.

    Where several workers train together, batches are global ones, and the advice says how many samples each worker
    takes. In a process group of torch.distributed all ranks call this alike, with the model itself (not wrapped in
    DistributedDataParallel): each measures its own device, and all return the same advice, each with its own
    micro-batch and curve. Outside, `workers=Workers(8, communication_s=0.02)`, or speeds relative to this device such
    as `Workers([1, 1, 0.5], ...)`, plans for workers that are not here; the advice's micro-batch is then the first
    one's. `progress(what, part)` is called with what is being done.

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
    """One call of `tune`; remembers what is being done, for an error's sentence."""

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
        except SystemExit as error:  # a status of the user's would be taken for one of ours
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
        """One that is ready to advise, for this device or for all ranks."""
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
    """Batches that a study ran, and what a search has to know of the training. A study that cannot be continued is
    refused before any work."""
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
    """With the batches that a study ran on the curve too. And the micro-batch that larger ones are cut into while
    gradients are accumulated, where it fits."""
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
    """Rank 0 trains the global batch alone; the group takes the same steps, each in the time predicted for it."""
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
