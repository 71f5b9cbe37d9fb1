"""An estimate against the real thing: eight networks that are first estimated and then trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import outcore
from benchmarks.small_networks import NETWORKS
from outcore.errors import BudgetTooSmall, OutcoreError
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
