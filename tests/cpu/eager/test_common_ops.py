"""Ops that repeat others on the same values: what they make is planned as one value, with the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from outcore.eager.replay import Call
from outcore.errors import ScheduleError
from outcore.limit import Limited, limit
from outcore.planning import lower, simulate, verify
from outcore.planning.preparing import prepare
from outcore.planning.program.verify import verify as verify_planned
from outcore.planning.rewrites import common_ops
from outcore.planning.rewrites.common_ops import merged
from outcore.planning.settings import LOWERING
from outcore.planning.trace_index import index_of
from outcore.reporting.explanation import explain
from outcore.values import Budget, Decision, Plan, Schedule, Trace
from tests.cpu.blocks import RootMeanSquare
from tests.cpu.eager.test_fused import MUL_CAST, Kernels, kernels, sequences, step_of
from tests.cpu.training import train
from tests.cpu.zoo import Step

pytestmark = pytest.mark.usefixtures("both_ways")

__all__ = ["kernels"]  # the fixture
X = torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(0))
HALF = torch.bfloat16
CLONE = torch.ops.aten.clone.default


class Attention(nn.Module):
    """Under autocast each of the three layers casts what it reads for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.query, self.key, self.value, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = x + self.out(scaled_dot_product_attention(self.query(y), self.key(y), self.value(y)))
        return out


class Fickle(Attention):
    """Reads something else now and then: another tensor, or the same one, changed in between."""

    how = ""

    def forward(self, x: Tensor) -> Tensor:
        y, other, aside = self.norm(x), torch.tanh(x), torch.ones_like(x)
        for layer in (self.query, self.key, self.value):
            if layer is self.key and self.how == "changed":
                with torch.no_grad():
                    y.mul_(1.5)
            if layer is self.key:  # the same ops in every step
                (y if self.how == "data" else aside).data.mul_(1.5)
            x = x + layer(other if layer is self.key and self.how == "other" else y)
        return x + other


def tame(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, (64,))


class Plain(nn.Module):
    """No autocast: tanh of the same thing, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return tame(self.second(torch.tanh(y)) * torch.tanh(y))


class MadeBeforeSaved(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        one, other = y.to(HALF), y.to(HALF)
        return tame((one * one).float() + (other * other).float() + self.second(y))


class ReadAgain(Plain):
    """An op that is rerun reads the repeated value."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        one = y.to(HALF).square()
        other = y.to(HALF)
        return tame((one + other.square() + torch.tanh(other * 2)).float() + self.second(y))


class Overwritten(Plain):
    """The repeated value is written into."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        one, other = y.to(HALF), y.to(HALF)
        return tame((one * one).float() + torch.tanh_(other).float() + self.second(y))


class UsesWhatItSaved(torch.autograd.Function):
    """Takes what it saved for memory of its own, behind the dispatcher, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad: Tensor = 2 * x * grads[0]
        x.view(torch.int16).numpy().fill(7)
        return grad


class WrittenInto(Plain):
    """The last of three casts is asked for first, and written into."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        one, other = y.to(HALF), y.to(HALF)
        squares = one * one, other * other, UsesWhatItSaved.apply(y.to(HALF))  # type: ignore[no-untyped-call]
        return tame(sum(square.float() for square in squares) + self.second(y))


class OtherArguments(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return tame(torch.softmax(y, 1) * torch.softmax(y, 2) + torch.tanh(y[:4]).mean() * torch.tanh(y[4:]).mean())


class OtherType(Plain):
    """The same call, of which the default type makes two."""

    def forward(self, x: Tensor) -> Tensor:
        y, signs = self.first(x), (x > 0).int()
        one = torch.sigmoid(signs)
        torch.set_default_dtype(torch.float64)
        try:
            other = torch.sigmoid(signs)
        finally:
            torch.set_default_dtype(torch.float32)
        return tame(y * one + (self.second(y) * other).float())


class Statistics(Plain):
    """Batch normalisation writes into what is cast before and after it, and no version says so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2048)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        assert self.norm.running_mean is not None
        one = self.norm.running_mean.to(HALF)
        z = self.norm(y.view(8, 2048))
        other = self.norm.running_mean.to(HALF)
        return tame((z * one + torch.tanh(z) * other).view_as(y) + y)


class OtherZero(Plain):
    """Equal numbers, and yet not the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 32, 64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        positive, behind = y > 0, -self.weight.abs()
        zero, other = y.masked_fill(positive, 0.0), y.masked_fill(positive, -0.0)
        return tame(torch.atan2(zero, behind) + torch.atan2(other, behind) + y)


class Drawn(Plain):
    """Not the same twice."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return tame(nn.functional.dropout(y) * nn.functional.dropout(y))


def net(kind: type[nn.Module], num: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(num)), nn.Linear(64, 4))


def autocast(model: nn.Module, step: int) -> Tensor:
    with torch.autocast("cpu", HALF):
        out: Tensor = model(X + 0.1 * step)
    return out.float().square().mean()


def plain(model: nn.Module, step: int) -> Tensor:
    out: Tensor = model(X + 0.1 * step).float().square().mean()
    return out


@contextmanager
def limited(model: nn.Module, memory: Any, planner: str = "hybrid") -> Iterator[Limited]:
    ooc = limit(model, memory, planner=planner, measure=True)
    try:
        yield ooc
    finally:
        ooc.close()


def recorded(kind: type[nn.Module], step: Step, num: int = 3) -> tuple[Trace, int]:
    """And what it needs in-core."""
    model = net(kind, num)
    with limited(model, "1GiB") as ooc:
        train(model, step, ooc, num_steps=2)
        assert ooc.trace is not None
        assert ooc.plan is not None
        assert not ooc.plan.merges_ops  # there is room for everything: nobody looks at ops
        return ooc.trace, ooc.plan.in_core_peak_bytes


def num_merged(trace: Trace) -> int:
    return sum(op.is_merged for op in merged(trace).ops)


CASES = [
    (Attention, autocast, 6),
    (Fickle, autocast, 6),
    (Plain, plain, 3),
    (MadeBeforeSaved, plain, 3),
    (ReadAgain, plain, 3),
    (Overwritten, plain, 0),
    (WrittenInto, plain, 3),
    (OtherArguments, plain, 0),
    (OtherZero, plain, 0),
    (Statistics, plain, 0),
    (Drawn, plain, 0),
]


@pytest.mark.parametrize(("planner", "share"), [("hybrid", 0.9), ("hybrid", 0.75), ("swap", 0.75)])
@pytest.mark.parametrize(("kind", "step", "num"), CASES)
def test_repeated_ops_are_one_value_with_the_same_numbers(
    kind: type[nn.Module], step: Step, num: int, planner: str, share: float
) -> None:
    wanted, model = train(net(kind), step), net(kind)
    trace, in_core_bytes = recorded(kind, step)
    assert num_merged(trace) == num
    with limited(model, int(share * in_core_bytes) - 1, planner) as ooc:
        train(model, step, ooc).assert_same(wanted)
        assert ooc.plan is not None
        assert ooc.predicted is not None
        assert ooc.timeline is not None
        assert ooc.plan.merges_ops == (num > 0 and planner == "hybrid")  # swap takes nothing for anything else
        assert ooc.timeline.peak_bytes == ooc.predicted.peak_bytes
        assert not any(left.num_left for left in ooc.kinds.values())


def decided(trace: Trace, decision: Decision) -> Plan:
    """The same for all values, with merged ops; kept where they cannot be recomputed."""
    trace_index = index_of(merged(trace))
    decisions: dict[int, Decision] = {
        value: decision if decision != "recompute" or trace_index.recomputable[value] else "keep"
        for value in trace_index.evictable
    }
    has_merged_ops, budget = merged(trace).has_merged_ops, Budget(2**30, 0, 2**30)
    return Plan(trace.fingerprint, "hybrid", budget, decisions, trace.before_bytes, merges_ops=has_merged_ops)


@pytest.mark.parametrize(("kind", "step", "num"), CASES)
def test_merged_ops_are_recomputed_once(kind: type[nn.Module], step: Step, num: int) -> None:
    """A plan that was given: on a CPU no planner would."""
    wanted, model = train(net(kind), step), net(kind)
    trace, _ = recorded(kind, step)
    ooc = limit(model, "1GiB", plan=decided(trace, "recompute"), measure=True)
    try:
        train(model, step, ooc).assert_same(wanted)
        assert ooc.timeline is not None
        assert ooc.predicted is not None
        assert ooc.schedule is not None
        assert ooc.timeline.peak_bytes == ooc.predicted.peak_bytes
        assert ooc.timeline.actions == ooc.predicted.actions
        assert not any(left.num_left for left in ooc.kinds.values())
        reruns = [action.op for action in ooc.schedule.actions if action.kind == "rerun"]
        assert not {index for index, op in enumerate(merged(trace).ops) if op.is_merged} & set(reruns)
    finally:
        ooc.close()


def test_a_repeated_pass_is_merged(kernels: Kernels) -> None:
    """A product that three layers cast for themselves is multiplied and cast once."""
    wanted, model = train(net_of_norms(), step_of), net_of_norms()
    with limited(model, "1GiB") as ooc:
        train(model, step_of, ooc, num_steps=2)
        trace = ooc.trace
    assert trace is not None
    trace_index = index_of(merged(trace))
    casts = [index for index, op in enumerate(merged(trace).ops) if op.fused and not op.is_merged]
    decisions: dict[int, Decision] = dict.fromkeys(trace_index.evictable, "keep")
    decisions |= {trace.ops[index].writes[0]: "recompute" for index in casts}
    made = Plan(trace.fingerprint, "hybrid", Budget(2**30), decisions, trace.before_bytes, merges_ops=True)
    ooc = limit(model := net_of_norms(), "1GiB", plan=made)
    try:
        train(model, step_of, ooc).assert_same(wanted)
        kernels.done.clear()
        train(model, step_of, ooc, num_steps=1)
        assert kernels.done == {MUL_CAST: 2}
    finally:
        ooc.close()


def net_of_norms() -> nn.Module:
    return sequences(RootMeanSquare)


def test_what_is_kept_is_kept_once() -> None:
    """A little less than everything needs, and nothing is swapped or recomputed."""
    wanted, model = train(net(Attention), autocast), net(Attention)
    trace, in_core_bytes = recorded(Attention, autocast)
    copies_bytes = sum(trace.bytes_of(op.writes[0]) for op in merged(trace).ops if op.is_merged)
    with limited(model, in_core_bytes - copies_bytes // 2) as ooc:
        train(model, autocast, ooc).assert_same(wanted)
        assert ooc.plan is not None
        assert ooc.plan.count("keep") == len(ooc.plan.decisions)
        assert ooc.timeline is not None
        assert ooc.timeline.peak_bytes <= in_core_bytes - copies_bytes // 2
        assert ooc.plan.in_core_peak_bytes == in_core_bytes  # as plain PyTorch


@pytest.mark.parametrize("how", ["other", "changed", "data"])
@pytest.mark.parametrize("decision", ["swap", "recompute", "keep"])
def test_a_step_that_no_longer_repeats_ops_leaves_the_plan(how: str, decision: Decision) -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        for block in model.children():
            if isinstance(block, Fickle):
                block.how = how if number == 3 else ""
        return autocast(model, number)

    wanted, model = train(net(Fickle), step, num_steps=7), net(Fickle)
    ooc = limit(model, "1GiB", plan=decided(recorded(Fickle, autocast)[0], decision))
    try:
        train(model, step, ooc, num_steps=7).assert_same(wanted)
        assert [kind.num_left for kind in ooc.kinds.values()] == [1]
        assert ooc.plan is not None
        assert ooc.plan.merges_ops
    finally:
        ooc.close()


def test_repeated_ops_that_are_asked_for_far_apart_are_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, _ = recorded(Attention, autocast)
    trace_index = index_of(trace)
    pairs = [(trace.ops[op.repeats].writes[0], op.writes[0]) for op in trace.ops if op.repeats >= 0]
    slots = [[trace_index.tick_slots[trace_index.unpacks[value][0]] for value in pair] for pair in pairs]
    near = min(abs(one - other) for one, other in slots)
    for limit_slots, num in ((near - 1, 0), (near, 3)):
        monkeypatch.setattr(common_ops, "LOWERING", replace(LOWERING, near_slots=limit_slots, near_share=0.0))
        assert num_merged(replace(trace)) == num
    monkeypatch.setattr(common_ops, "LOWERING", replace(LOWERING, near_share=1.0))
    assert num_merged(replace(trace)) == 6


def test_a_plan_with_merged_ops_is_saved_and_explained(tmp_path: Path) -> None:
    trace, in_core_bytes = recorded(Attention, autocast)
    model = net(Attention)
    with limited(model, int(0.7 * in_core_bytes)) as ooc:
        train(model, autocast, ooc, num_steps=3)
        made, machine = ooc.plan, ooc.machine
    assert made is not None
    made.save(tmp_path / "plan.json")
    trace.save(tmp_path / "trace.json")
    plan, step = Plan.load(tmp_path / "plan.json"), Trace.load(tmp_path / "trace.json")
    assert plan == made
    assert step.fingerprint == merged(step).fingerprint == plan.fingerprint
    schedule = lower(step, plan, machine)
    assert Schedule.from_json(schedule.to_json()) == schedule
    verify(step, schedule)
    prepared = prepare(step, plan, machine)
    assert prepared.schedule == schedule
    assert prepared.trace == merged(step) != step
    assert simulate(step, schedule, machine) == prepared.predicted
    assert prepared.predicted.peak_bytes == plan.predicted_peak_bytes
    with pytest.raises(ScheduleError, match="which ops are merged"):  # the step as it was recorded, past the front door
        verify_planned(step, schedule)
    explained = explain(prepared.trace, plan, machine)
    assert len(explained) + num_merged(trace) == len(explain(step, replace(plan, merges_ops=False, decisions={})))
    wanted, model = train(net(Attention), autocast), net(Attention)
    ooc = limit(model, int(0.7 * in_core_bytes), plan=plan)
    try:
        train(model, autocast, ooc).assert_same(wanted)
        assert not any(left.num_left for left in ooc.kinds.values())
    finally:
        ooc.close()


def test_calls_are_the_same_on_the_same_tensors_unchanged() -> None:
    one, other = torch.ones(4, 4), torch.ones(4, 4)
    call = Call(CLONE, (one, 2), {"dtype": HALF})
    assert call.is_same((one, 2), {"dtype": HALF})
    assert call.is_same((one[:], 2), {"dtype": HALF})
    for args, kwargs in (
        ((other, 2), {"dtype": HALF}),
        ((one.T, 2), {"dtype": HALF}),
        ((one[:2], 2), {"dtype": HALF}),
        ((one.view(torch.int32), 2), {"dtype": HALF}),
        ((one, 2.0), {"dtype": HALF}),
        ((one, True), {"dtype": HALF}),
        ((one, 2), {"dtype": torch.float32}),
        ((one, 2), {}),
        ((one.to_sparse(), 2), {"dtype": HALF}),
    ):
        assert not call.is_same(args, kwargs)
    assert not Call(CLONE, (one, 0.0), {}).is_same((one, -0.0), {})
    assert not Call(CLONE, (one, 0j), {}).is_same((one, -0j), {})
    one.add_(1)
    assert not call.is_same((one, 2), {"dtype": HALF})


def test_a_storage_that_is_gone_may_have_left_its_address_to_another() -> None:
    one = torch.ones(4, 4)
    call, address = Call(CLONE, (one, 2), {}), one.untyped_storage()._cdata
    del one
    held = [torch.ones(4, 4) for _ in range(64)]
    other = next((tensor for tensor in held if tensor.untyped_storage()._cdata == address), held[0])
    assert not call.is_same((other, 2), {})
    assert call.storages[0]() is None


class Held(Plain):
    """The program holds the repeated value until the backward is over, in which the step needs the most."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.first(x)] * 8, -1).sin().view(8, 32, 64, 8).sum(-1)
        one, self.kept = y.to(HALF), y.to(HALF)
        return tame((one * one).float() + (self.kept * self.kept).float())


class SavedFirst(Plain):
    """The repeated value is saved, and gone, before the first is; in between the step needs the most."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        one, other = y.to(HALF), y.to(HALF)
        del y
        out = (other * other).float()
        del other
        with torch.no_grad():
            many = torch.cat([out] * 20).sum()
        return tame((one * one).float() + out + many)


@pytest.mark.parametrize("decision", ["keep", "swap"])
@pytest.mark.parametrize("kind", [Held, SavedFirst])
def test_a_repeated_op_that_saves_no_memory_is_not_merged(kind: type[nn.Module], decision: Decision) -> None:
    wanted, model = train(net(kind, 1), plain), net(kind, 1)
    trace, _ = recorded(kind, plain, 1)
    assert [op.name for op in trace.ops if op.repeats >= 0] == ["aten._to_copy.default"]
    ooc = limit(model, "1GiB", plan=decided(trace, decision), measure=True)
    try:
        train(model, plain, ooc).assert_same(wanted)
        assert ooc.timeline is not None
        assert ooc.predicted is not None
        assert ooc.timeline.peak_bytes == ooc.predicted.peak_bytes
    finally:
        ooc.close()


def test_what_the_default_type_makes_another_is_not_merged() -> None:
    wanted, model = train(net(OtherType), plain), net(OtherType)
    trace, in_core_bytes = recorded(OtherType, plain)
    assert num_merged(trace) == 0
    with limited(model, in_core_bytes - 1, "swap") as ooc:
        train(model, plain, ooc).assert_same(wanted)


def test_what_is_saved_after_the_first_was_asked_for_is_not_merged() -> None:
    def twice(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", HALF):
            model(X).float().square().mean().backward()
            out: Tensor = model(X).float().square().mean()
        return out

    trace, _ = recorded(Plain, twice, 0)
    assert any(op.repeats >= 0 and op.name == "aten._to_copy.default" for op in trace.ops)
    assert num_merged(trace) == 0
