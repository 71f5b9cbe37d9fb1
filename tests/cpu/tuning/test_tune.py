"""tune(), called as a user calls it: what it advises, what it leaves alone, and what it refuses in one sentence."""

from __future__ import annotations

import inspect
import operator
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import outcore
from outcore import tuning
from outcore.errors import OutcoreError, TuningError
from outcore.tuning.advice import Advice
from outcore.tuning.data import samples as samples_module
from outcore.tuning.data.restore import made_optimizer
from outcore.tuning.data.samples import Samples
from outcore.tuning.options import Batch, Data, Memory, Request
from outcore.tuning.throughput.builder import CurveBuilder, divisors, free_batches
from outcore.tuning.trainings.search import search
from outcore.tuning.trainings.target import Target, predict_target_s
from outcore.tuning.trainings.trial import right_class_probability
from outcore.tuning.tune import MOVED
from outcore.units import MIB
from tests.cpu.tuning.flat import tune
from tests.cpu.tuning.nets import CPU, bench_of, convnet, make_sgd, mlp, stripes
from tests.cpu.tuning.test_prediction import small_family

pytestmark = pytest.mark.usefixtures("quick")

DATA = stripes()


def everything_of(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    grads = [parameter.grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    return [[t.detach().clone() for t in tensors], [None if g is None else g.clone() for g in grads], modes, hooks]


def assert_same(before: list[Any], after: list[Any]) -> None:
    for one, other in zip(before[0] + before[1], after[0] + after[1], strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert before[2:] == after[2:]


def generators() -> list[Any]:
    return [random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()]


def test_a_kept_batch_is_cut_into_micro_batches_and_nothing_else_changes(folder: str) -> None:
    torch.manual_seed(1)
    model = convnet()
    next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d)).eval()  # a mode of its own
    F.cross_entropy(model(DATA.tensors[0][:8]), DATA.tensors[1][:8]).backward()
    before, numbers = everything_of(model), generators()
    advice = tune(model, F.cross_entropy, DATA, optimizer=make_sgd, memory=12 * MIB, batch=96, disk=folder)
    assert_same(before, everything_of(model))
    assert generators() == numbers
    assert advice.effective_batch == 96
    assert advice.learning_rate == 0.05
    assert advice.beta2 is None
    assert set(advice.curve.batches) <= set(divisors(96, 2))
    measured = [point for point in advice.curve.points if point.measured_peak_bytes is not None]
    assert measured
    assert advice.micro_batch in advice.curve.batches
    for point in advice.curve.fitting:
        assert point.peak_bytes <= 12 * MIB
    for point in measured:  # real steps ran in the memory they were promised to run in
        assert point.measured_peak_bytes is not None
        assert point.measured_peak_bytes <= 12 * MIB
        assert abs(point.peak_bytes / point.measured_peak_bytes - 1) < 0.03
    assert advice.peak_bytes <= 12 * MIB
    assert Advice.from_json(advice.to_json()) == advice


def test_a_free_batch_follows_noise_and_the_rate_follows_the_batch(folder: str) -> None:
    numbers = generators()
    advice = tune(
        mlp,
        F.cross_entropy,
        DATA,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        memory="16MiB",
        batch=64,
        free=True,
        target=("val_accuracy", 0.8),
        trial_s=5.0,
        race=False,  # the rule's rate, not the one that won
        disk=folder,
    )
    proposal = advice.proposal
    assert proposal is not None
    assert generators() == numbers
    assert advice.noise is not None
    assert advice.noise > 0
    assert advice.noise_told.startswith(("about ", "at least ", "very roughly "))
    assert any(why.endswith(f"show a noise scale of {advice.noise_told}") for why in advice.why)
    assert proposal.effective_batch != 64
    grown = proposal.effective_batch > 64
    assert (proposal.learning_rate or 0) > 1e-3 if grown else (proposal.learning_rate or 1) < 1e-3
    assert proposal.beta2 == pytest.approx(0.999 ** (proposal.effective_batch / 64))
    assert (advice.effective_batch, advice.learning_rate, advice.beta2) == (64, 1e-3, None)
    assert advice.target_s is not None
    assert 0 < advice.target_s < 60
    text = str(advice)
    for words in ("gradient noise scale", "time to val_accuracy >= 0.8", "effective batch", "real steps", "goodput"):
        assert words in text


def test_without_an_optimizer_only_the_batch_is_advised(folder: str) -> None:
    """And data may be a function, and a batch a dictionary."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = mlp()

        def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.inside(image), label)

    def make_batch(size: int) -> dict[str, torch.Tensor]:
        return {"image": torch.randn(size, 1, 16, 16), "label": torch.zeros(size, dtype=torch.int64)}

    advice = tune(Named, lambda loss, batch: loss, make_batch, memory="8MiB", largest=64, disk=folder)
    assert advice.learning_rate is None
    assert advice.noise is None
    assert advice.accumulation == 1
    assert max(advice.curve.batches) <= 64


searched = partial(
    tune,
    mlp,
    F.cross_entropy,
    optimizer=make_sgd,
    memory="16MiB",
    batch=32,
    target=("val_loss", 1.0),
    trial_s=0.4,
)


def test_a_search_begins_at_the_advice_and_goes_on_where_it_stopped(folder: str, tmp_path: Any) -> None:
    pytest.importorskip("optuna", reason="the search is an Optuna study")
    told: list[str] = []
    tell = partial(searched, study=tmp_path / "study.log", disk=folder, progress=lambda what, part: told.append(what))
    for num_trials in (2, 3):
        assert "of a search" in " ".join(tell(DATA, num_trials=num_trials).why)
    runs = [what for what in told if what.startswith("searching: run")]
    assert [what.split(":")[1] for what in runs] == [" run 1 of 2", " run 2 of 2", " run 3 of 3"]
    assert runs[0].startswith("searching: run 1 of 2: batch 32, rate 0.05: ")
    before = len(told)
    with pytest.raises(TuningError, match=r"another training \(samples: 512 there, 256 now\); name another file"):
        tell(stripes(256), num_trials=4)
    assert len(told) == before  # nothing was paid for


def test_a_study_goes_on_with_batches_that_are_not_on_the_curve(folder: str, tmp_path: Any) -> None:
    """A kept batch is cut into its divisors, and 24 is none of 32."""
    pytest.importorskip("optuna", reason="the search is an Optuna study")
    study = tmp_path / "study.log"
    asked: dict[str, Any] = {"lrs": (0.04, 0.05), "target": 1.0, "maximise": False, "num_trials": 1, "storage": study}
    search(lambda batch, lr: iter([(0.001, 0.5)]), batches=[24], **asked)
    advice = searched(DATA, num_trials=1, study=study, disk=folder)
    assert 24 in advice.curve.batches
    assert "of 1 run of a search a batch of 24" in " ".join(advice.why)


class Streaming(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield 1


class Counting(nn.Module):
    """Does other work at every batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inside(x.flatten(1))
        for _ in range(len(x)):
            out = out.sin()
        return out


def norms() -> nn.Module:
    """One value per channel and sample: BatchNorm needs two samples."""
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def wide_norms() -> nn.Module:
    """The same, with inputs that weigh more than its parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(64)
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "small data": ({"batch": 513}, "the data set has 512 samples, fewer than the batch of 513; lower the batch"),
    "BatchNorm": ({"make_model": norms, "batch": 1}, "cannot train on a batch of 1: its BatchNorm needs more than one"),
    "one kept": ({"make_model": norms, "batch": 1}, "a batch of 1 is to be kept, and this model cannot train on"),
    "one allowed": ({"make_model": norms, "largest": 1}, "the largest batch allowed is 1, and this model cannot"),
    "one there": ({"make_model": norms, "dataset": stripes(1)}, "the data set has one sample, and this model cannot"),
    "one left": (
        {"make_model": norms, "dataset": stripes(2), "target": ("val_loss", 0.1)},
        "of the data set's 2 samples one is left when others are held out, and this model cannot",
    ),
    "one fits": ({"make_model": wide_norms, "memory": "250KiB"}, "where memory is 250.00 KiB, and this model cannot"),
    "memory": ({"memory": "300KiB"}, "even one sample needs 5"),
    "accuracy": ({"target": ("val_accuracy", 97)}, "an accuracy of 97 cannot be reached"),
    "loss": ({"target": ("val_loss", -1)}, "a loss of -1 cannot be reached"),
    "metric": ({"target": ("beauty", 1)}, "there is no metric 'beauty'; take one of val_accuracy"),
    "target": ({"target": 0.97}, "0.97 is no target; write a metric and a value"),
    "infinite": ({"target": ("val_loss", float("nan"))}, "give a finite number"),
    "size": ({"memory": "lots"}, "'lots' is not a size"),
    "batch": ({"batch": 0}, "a batch of 0 cannot be trained"),
    "part of a batch": ({"batch": 3.5}, "a batch of 3.5 cannot be trained; give a whole number above zero"),
    "largest": ({"largest": 0}, "no batch is as small as largest=0; give a whole number above zero"),
    "negative rate": ({"learning_rate": -1}, "-1 is no learning rate; give a number above zero"),
    "no rate": ({"learning_rate": float("nan")}, "nan is no learning rate; give a number above zero"),
    "runs": ({"num_trials": -3, "target": ("val_loss", 1)}, "a search cannot have num_trials=-3 runs; give a whole"),
    "trial": ({"trial_s": "20"}, "a trial of '20' seconds cannot be run"),
    "kept": ({"free": False}, "no batch was given to keep"),
    "rule": ({"rule": "cubic"}, "there is no learning-rate rule 'cubic'"),
    "rate": ({"learning_rate": "high"}, "'high' is no learning rate"),
    "no optimizer": ({"optimizer": None, "learning_rate": 0.1}, "a learning rate belongs to an optimizer"),
    "search": ({"num_trials": 3}, "a search needs target="),
    "stream": ({"dataset": Streaming()}, "a Streaming cannot be asked for a batch of a given size"),
    "empty": ({"dataset": []}, "the data set is empty"),
    "no model": ({"make_model": dict}, "make_model() returned a dict"),
    "nothing": ({"make_model": nn.Identity}, "this model has no parameters"),
    "changing": ({"make_model": Counting}, "do different work, so neither tells about the other"),
    "closure": ({"optimizer": torch.optim.LBFGS}, "LBFGS computes the loss several times in a step"),
    "no backward": (
        {"loss_fn": lambda out, y: torch.zeros(1, requires_grad=True).sum()},
        "the backward pass never came to the model",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_tuned_is_refused_in_a_sentence(name: str, folder: str) -> None:
    changed, says = WRONG[name]
    numbers = generators()
    asked: dict[str, Any] = {"make_model": mlp, "loss_fn": F.cross_entropy, "dataset": DATA, "optimizer": make_sgd}
    with pytest.raises(OutcoreError) as caught:
        tune(**asked | {"memory": "8MiB", "disk": folder} | changed)
    assert says in str(caught.value)
    assert generators() == numbers


def test_a_target_out_of_reach_is_said_with_what_to_change() -> None:
    target = Target.read(("val_accuracy", 0.9))
    flat = [(100 * 2**at, 0.1 * 2**at, 0.5) for at in range(6)]
    assert predict_target_s(target, flat)[0] is None
    assert "out of reach at this setting; lower the target" in predict_target_s(target, flat)[1]
    learning = [(100 * 2**at, 0.1 * 2**at, 1 - 0.8 / 2 ** (at / 2)) for at in range(5)]  # error ~ samples ** -0.5
    seconds, why = predict_target_s(target, learning)
    assert seconds == pytest.approx(0.1 * (0.8 / 0.1) ** 2)
    assert "rough guess" in why
    far = Target.read(("val_accuracy", 0.999))
    assert "too far to predict" in predict_target_s(far, learning)[1]
    assert predict_target_s(target, [*learning, (9999, 5.0, 0.95)])[0] == 5.0
    assert "too few evaluations" in predict_target_s(target, learning[:1])[1]
    mine = Target.read((lambda model: 0.5, 0.9))
    assert "only known for val_accuracy" in predict_target_s(mine, flat)[1]


def test_batches_to_time_are_read_once_and_spread_over_the_data() -> None:
    class Counted(Dataset[Any]):
        def __init__(self) -> None:
            self.asked: list[int] = []

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> torch.Tensor:
            self.asked.append(index)
            return torch.tensor([float(index)])

    data = Counted()
    samples = Samples(data, CPU)
    assert samples.any_batch(600).shape == (600, 1)
    assert samples.any_batch(4).shape == (4, 1)
    assert len(data.asked) == 32
    assert max(data.asked) > 900
    epoch = torch.cat([next(batches) for batches in [samples.shuffled(100)] for _ in range(10)])
    assert sorted(epoch.flatten().tolist()) == list(range(1000))
    with pytest.raises(TuningError, match="fewer than one batch of 2000"):
        next(samples.shuffled(2000))


def test_what_is_evaluated_again_is_read_once_while_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Counted(Dataset[Any]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> torch.Tensor:
            asked.append(index)
            return torch.tensor([float(index)])

    samples = Samples(Counted(), CPU)
    looks = [samples.kept_batch_of(rows).flatten().tolist() for rows in ([1, 2], [3], [1, 2], [3])]
    assert looks == [[1, 2], [3], [1, 2], [3]]
    assert asked == [1, 2, 3]
    monkeypatch.setattr(samples_module, "DATA", replace(samples_module.DATA, kept_bytes=8))  # two samples of four bytes
    samples = Samples(Counted(), CPU)
    for rows in ([1, 2], [3], [1, 2], [3]):
        samples.kept_batch_of(rows)
    assert asked[3:] == [1, 2, 3, 3]


def test_a_free_batch_leaves_samples_to_look_at(folder: str) -> None:
    """Of 60 samples 15 are held out: a batch of 60, the fastest, could not be trained to the target."""
    few = torch.utils.data.Subset(DATA, range(60))
    options: dict[str, Any] = {"optimizer": make_sgd, "memory": "16MiB", "disk": folder, "trial_s": 0.2}
    advice = tune(mlp, F.cross_entropy, few, target=("val_loss", 0.1), **options)
    assert advice.effective_batch <= 45


def test_an_optimizer_that_was_there_before_is_put_back(folder: str) -> None:
    model = mlp()
    mine = make_sgd(model.parameters())
    F.cross_entropy(model(DATA.tensors[0][:8]), DATA.tensors[1][:8]).backward()
    mine.step()
    momentum = [mine.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    copies, options = [buffer.clone() for buffer in momentum], dict(mine.param_groups[0])
    target: dict[str, Any] = {"target": ("val_loss", 1e-9), "trial_s": 0.2, "learning_rate": 0.7, "batch": 32}
    tune(model, F.cross_entropy, DATA, optimizer=lambda _: mine, memory="16MiB", disk=folder, **target)
    assert mine.param_groups[0] == options
    for parameter, buffer, copy in zip(model.parameters(), momentum, copies):
        assert mine.state[parameter]["momentum_buffer"] is buffer
        assert torch.equal(buffer, copy)


def test_candidates_are_geometric_and_know_where_in_core_ends(folder: str) -> None:
    assert divisors(96, 1) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]
    assert divisors(97, 2) == [97]
    assert len(divisors(5040, 1)) == 14
    bench = bench_of("convnet", 6 * MIB, folder)
    builder = CurveBuilder.start(bench, small_family(bench))
    batches = free_batches(builder, 512, 2)
    edge = builder.curve.largest_in_core
    bench.close()
    assert {2, 4, 8, 16, edge} <= set(batches)
    assert builder.planner.in_core_bytes(edge) <= 6 * MIB < builder.planner.in_core_bytes(edge + 1)
    assert max(batches) <= 4 * edge


def test_an_evaluation_that_writes_into_its_samples_spoils_no_other() -> None:
    samples = Samples(stripes(8), CPU)
    first = samples.kept_batch_of([1, 2])
    before = first[0].clone()
    first[0].zero_()
    second = samples.kept_batch_of([1, 2])
    assert torch.equal(second[0], before)
    second[0].zero_()
    assert torch.equal(samples.kept_batch_of([1, 2])[0], before)


def test_arrays_count_against_what_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "DATA", replace(samples_module.DATA, kept_bytes=1000))
    samples = Samples(stripes(8), CPU, collate=lambda rows: (torch.zeros(1), np.zeros(500)))
    samples.kept_batch_of([1])
    assert not samples._kept


def test_labels_that_are_none_get_no_probability() -> None:
    out, labels = torch.zeros(4, 2), torch.tensor([0, 1, -100, 255])
    assert right_class_probability(out, labels).tolist() == [0.5, 0.5, 0.0, 0.0]


def test_a_model_that_the_function_only_hands_out_is_put_back() -> None:
    model = mlp()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    request = Request(lambda: model, F.cross_entropy, make_sgd, Data(DATA), Memory("16MiB"), Batch(8))
    with request.model() as same:
        assert same is model
        with torch.no_grad():
            for parameter in same.parameters():
                parameter.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_optimizer_of_another_model_is_refused() -> None:
    mine = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(TuningError, match="another model"), made_optimizer(lambda _: mine, mlp().parameters()):
        pass


@pytest.mark.parametrize("length", ["3", [3]])
def test_a_length_is_a_number(length: Any) -> None:
    with pytest.raises(TuningError, match="give a number"):
        tune(mlp, F.cross_entropy, stripes(), optimizer=make_sgd, memory="16MiB", num_epochs=length)


def test_what_lies_on_the_device_needs_no_loader() -> None:
    class Reading(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(4)

    loads = []
    for data in (stripes(8), torch.utils.data.Subset(stripes(8), [1, 2, 3]), Reading()):
        samples = Samples(data, CPU)
        samples.any_batch(2)
        loads.append(samples.load_s > 0)
    assert loads == [False, False, True]


def raising(*_: Any) -> Any:
    raise KeyError("label")


class Raising(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return raising()


USER_CODE: dict[str, dict[str, Any]] = {
    "making the model": {"make_model": raising},
    "making the optimizer": {"optimizer": raising},
    "recording a batch of 2": {"loss_fn": raising},
    "recording a batch of 2, data": {"dataset": Raising()},
    "recording a batch of 2, collate": {"collate": raising},
    "training towards raising >= 0.5": {"target": (raising, 0.5), "batch": 32},
}


@pytest.mark.parametrize("name", USER_CODE)
def test_an_exception_of_the_users_code_becomes_a_sentence_with_its_line(name: str, folder: str) -> None:
    asked: dict[str, Any] = {"make_model": mlp, "loss_fn": F.cross_entropy, "dataset": DATA, "optimizer": make_sgd}
    with pytest.raises(TuningError) as caught:
        tune(**asked | {"memory": "16MiB", "disk": folder, "trial_s": 0.5} | USER_CODE[name])
    stage = name.partition(",")[0]
    line = raising.__code__.co_firstlineno + 1
    said = f"while {stage}, your code raised KeyError: 'label' (test_tune.py, line {line}, in raising)"
    assert str(caught.value).startswith(said)
    assert isinstance(caught.value.__cause__, KeyError)


TORCHS_OWN: dict[str, tuple[dict[str, Any], str]] = {
    "labels": (
        {"dataset": TensorDataset(DATA.tensors[0], torch.full((len(DATA),), 99))},
        r"^while recording a batch of 2, your model or loss raised IndexError: Target 99 is out of bounds. "
        r"\(torch.nn's functional.py, in cross_entropy\); correct it",
    ),
    "shapes": (
        {"make_model": lambda: nn.Linear(3, 4)},
        "your model or loss raised RuntimeError: .*torch.nn's linear.py, in forward",
    ),
    "loss": (
        {"loss_fn": partial(F.cross_entropy, reduction="none")},
        r"^loss_fn returned a tensor of \[2\]; return a tensor with one element",
    ),
    "optimizer": ({"optimizer": lambda parameters: 7}, "makes the optimizer returned a int; return an optimizer"),
    "exit": ({"make_model": lambda: sys.exit(3)}, r"^while making the model, your code called sys.exit\(3\)"),
}


@pytest.mark.parametrize("name", TORCHS_OWN)
def test_what_is_wrong_with_torchs_own_parts_is_one_sentence_too(name: str, folder: str) -> None:
    """The user's line is in no traceback: their model and loss are torch's."""
    changed, words = TORCHS_OWN[name]
    asked: dict[str, Any] = {"make_model": mlp, "loss_fn": F.cross_entropy, "dataset": DATA, "optimizer": make_sgd}
    with pytest.raises(TuningError, match=words) as caught:
        tune(**asked | {"memory": "16MiB", "disk": folder} | changed)
    assert "\n" not in str(caught.value)


def test_an_error_of_ours_is_not_taken_for_the_users(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setattr("outcore.tuning.tuner.probe_batches", operator.truediv)
    with pytest.raises(TypeError, match="expected 2 arguments, got 4"):
        tune(mlp, F.cross_entropy, DATA, memory="16MiB", disk=folder)


@pytest.mark.parametrize("name", MOVED)
def test_an_old_keyword_says_what_to_write_instead(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        outcore.tune(mlp, F.cross_entropy, DATA, memory="16MiB", **{name: 1})  # type: ignore[arg-type]
    assert str(caught.value) == f"tune() no longer takes {name}=...; write {MOVED[name]} (from outcore.tuning)"
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        outcore.tune(mlp, F.cross_entropy, DATA, memory="16MiB", colour=1)  # type: ignore[arg-type]


def test_no_public_function_of_tuning_takes_more_than_eleven_parameters() -> None:
    public = [outcore.tune, *(getattr(tuning, name) for name in tuning.__all__), search]
    for function in public:
        names = [name for name in inspect.signature(function).parameters if name != "moved"]
        assert len(names) <= 11, function
