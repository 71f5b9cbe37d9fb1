"""An estimate against the real thing: eight networks that are first estimated and then trained."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import nn

import outcore
from benchmarks.small_networks import NETWORKS
from outcore.errors import BadSize, BudgetTooSmall, OutcoreError
from outcore.estimating.hugging_face import model_and_batch
from outcore.machines import machine_from, machine_names
from outcore.planning import plan
from outcore.values import Budget, Machine, Trace

MACHINE = replace(machine_from("a100"), device="cpu", host_bytes=0, disk_bytes=1 << 40)  # counts as the CPU does


def least_of(trace: Trace, machine: Machine) -> int:
    with pytest.raises(BudgetTooSmall) as refused:
        plan(trace, machine, Budget(1, machine.host_bytes, machine.disk_bytes))
    return refused.value.needed_bytes


@pytest.mark.parametrize("name", NETWORKS)
def test_peak_and_least_budget_are_those_of_the_real_step(name: str) -> None:
    model, loss = NETWORKS[name](1)
    optimizer = torch.optim.AdamW(model.parameters())
    weights, rng = [parameter.clone() for parameter in model.parameters()], torch.get_rng_state()

    def step() -> None:
        loss().backward()

    found = outcore.estimate(model, step, optimizer=optimizer, machine=MACHINE)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    assert not optimizer.state
    with outcore.limit(model, "100%", planner="keep-all") as ooc:
        for _ in range(3):
            with ooc.step():
                step()
            optimizer.step()
            optimizer.zero_grad()
        assert ooc.trace is not None
        assert ooc.timeline is not None
        assert found.in_core_peak_bytes == pytest.approx(ooc.timeline.peak_bytes, rel=0.05)
        assert found.least_bytes == pytest.approx(least_of(ooc.trace, MACHINE), rel=0.05)
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert found.parameter_bytes == found.gradient_bytes == parameter_bytes
    assert 2 * parameter_bytes <= found.optimizer_bytes < 2.1 * parameter_bytes + 1000
    assert found.budgets[-1].over_in_core == 0.0


def test_a_model_without_weights_on_a_machine_that_is_not_here() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8192, 8192), nn.ReLU())])
        batch = torch.empty(65536, 8192)
    found = outcore.estimate(model, (batch,), "8GiB", optimizer=torch.optim.SGD, machine="rtx4090")
    assert found.parameter_bytes > 1 << 30
    assert found.in_core_peak_bytes > 6 * batch.nbytes
    assert found.least_bytes > 8 << 30
    (wanted,) = [point for point in found.budgets if point.budget_bytes == 8 << 30]
    assert not wanted.fits
    costs = [point.over_in_core for point in found.budgets if point.fits]
    assert costs[0] > costs[-1]
    assert outcore.Estimate.from_json(found.to_json()) == found
    text = str(found)
    assert "nothing was run" in text
    assert "estimated from given rates" in text
    assert "no plan fits" in text


def test_every_machine_that_ships_says_that_it_was_not_measured() -> None:
    assert machine_names() == ["a100", "h100", "h200", "rtx3060", "rtx4090", "v100"]
    for name in machine_names():
        machine = machine_from(name)
        assert "op_rates" in machine.given
        assert machine.measured_at == ""


def test_what_cannot_be_estimated_is_said_in_a_sentence() -> None:
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with pytest.raises(OutcoreError, match=r"reads the content of a tensor .* outcore record"):
        outcore.estimate(model, lambda: print(model(x).sum().item()), machine=MACHINE)
    with pytest.raises(OutcoreError, match="ran no backward pass"):
        outcore.estimate(model, lambda: model(x), machine=MACHINE)
    with pytest.raises(OutcoreError, match="does not run on tensors without content"):
        outcore.estimate(model, (torch.randn(2, 5),), machine=MACHINE)
    with pytest.raises(OutcoreError, match=r"takes a torch\.nn\.Module, not str"):
        outcore.estimate("bert", x, machine=MACHINE)  # type: ignore[arg-type]
    with pytest.raises(OutcoreError, match="no rates of ops; measure it again"):
        outcore.estimate(model, x, machine=replace(MACHINE, op_rates=None))
    with pytest.raises(OutcoreError, match=r"no machine file abacus; name a file or one of a100, h100"):
        outcore.estimate(model, x, machine="abacus")
    assert type(model.weight) is nn.Parameter


def test_a_batch_that_the_model_does_not_take_is_said_to_be_one() -> None:
    """A loader's batch has labels, which the model does not take."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(OutcoreError, match=r"Linear was called with 2 arguments, because .* or a step: lambda"):
        outcore.estimate(model, (x, torch.zeros(2)), machine=MACHINE)
    with pytest.raises(OutcoreError, match="Linear was called with the names x, labels"):
        outcore.estimate(model, {"x": x, "labels": x}, machine=MACHINE)


@pytest.mark.parametrize(("name", "numbers"), [("AdamW", 2), ("adam", 2), ("sgd", 0), ("none", 0)])
def test_optimizers_have_the_names_of_the_command(name: str, numbers: int) -> None:
    found = outcore.estimate(nn.Linear(64, 64), torch.randn(2, 64), optimizer=name, machine=MACHINE)
    steps_bytes = 8 if numbers else 0
    assert found.optimizer_bytes == numbers * found.parameter_bytes + steps_bytes


def test_what_is_no_optimizer_is_refused() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(OutcoreError, match="no optimizer 'adamz' here; give its class, or one of adamw, adam, sgd"):
        outcore.estimate(model, x, optimizer="adamz", machine=MACHINE)
    with pytest.raises(OutcoreError, match="optimizer=3 is no optimizer"):
        outcore.estimate(model, x, optimizer=3, machine=MACHINE)  # type: ignore[arg-type]


@pytest.mark.parametrize("machine", ["a100", MACHINE])
def test_the_least_budget_is_never_above_the_in_core_peak(machine: object) -> None:
    found = outcore.estimate(nn.Linear(64, 64), torch.randn(32, 64), machine=machine)  # type: ignore[arg-type]
    assert found.least_bytes <= found.in_core_peak_bytes
    assert found.budgets[-1].fits


def test_the_last_budget_of_a_gpu_keeps_everything() -> None:
    """At the in-core peak itself a plan leaves some room to the allocator, as the note says."""
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(512, 512), nn.GELU())))
    found = outcore.estimate(model, torch.randn(4096, 512), machine="a100")
    last = found.budgets[-1]
    assert last.budget_bytes > found.in_core_peak_bytes
    assert last.swapped_bytes == last.recomputed_bytes == 0
    assert any("at the in-core peak some values are still swapped" in note for note in found.notes)


def test_a_bad_budget_is_refused_before_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    room = import_module("outcore.estimating.estimate")
    monkeypatch.setattr(room, "measure_machine", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(BadSize, match="'lots' is not a size"):
        outcore.estimate(nn.Linear(4, 4), torch.randn(2, 4), "lots")


def test_a_name_of_hugging_face_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")

    def fail(name: str) -> object:
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nCheck it.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    with pytest.raises(OutcoreError, match=r"there is no network .*; give a folder with its config\.json"):
        model_and_batch("Qwen/Qwen3-8B", 1, 8, "float32")
