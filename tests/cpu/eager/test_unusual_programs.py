"""Programs that once got wrong gradients without a word: odd tensors, modes, left plans, noise, exchanged weights."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from outcore.eager import replay
from outcore.errors import BudgetTooSmall, OutcoreError
from outcore.limit import limit
from tests.cpu.eager.training import assert_same_steps

pytestmark = pytest.mark.usefixtures("both_ways")


def gradients(model: nn.Module, loss_of: Callable[[int], Tensor], ooc: Any, num_steps: int = 4) -> list[Tensor]:
    found = []
    for step in range(num_steps):
        model.zero_grad()
        if ooc is None:
            loss_of(step).backward()
        else:
            with ooc.step():
                loss_of(step).backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def assert_same(
    model: nn.Module, loss_of: Callable[[int], Tensor], planner: str = "swap-all", memory: Any = "100%"
) -> None:
    plain = gradients(model, loss_of, None)
    ooc = limit(model, memory, planner=planner)
    got = gradients(model, loss_of, ooc)
    assert len(plain) == len(got)
    assert all(torch.equal(a, b) for a, b in zip(plain, got))
    gc.collect()
    assert ooc.store.num_parcels == 0
    ooc.close()


def data(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


class Correlate(nn.Module):
    """A lazily conjugated view is saved: its bytes are not conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(x).conj() * torch.fft.fft(self.weight)
        out: Tensor = torch.fft.ifft(spectrum * spectrum.conj()).imag
        return out


@pytest.mark.parametrize("planner", ["swap-all", "recompute-all", "keep-all"])
def test_conjugated_views(planner: str) -> None:
    model = Correlate()
    assert_same(model, lambda step: model(data(step, 8, 1024)).square().sum(), planner)


class Foreign(torch.autograd.Function):
    """Fills a tensor by something that is no op, as Triton and C++ kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        out = make(x)
        out.detach().numpy()[...] = x.detach().numpy() ** 2
        ctx.save_for_backward(out)
        return out * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        grad: Tensor = grads[0] * out.sqrt() * 2
        return grad, None


@pytest.mark.parametrize("make", [torch.empty_like, torch.zeros_like, lambda x: x.new_zeros(x.shape), torch.exp])
@pytest.mark.parametrize("planner", ["recompute-all", "hybrid"])
def test_a_tensor_that_no_op_filled_is_not_recomputed(planner: str, make: Callable[[Tensor], Tensor]) -> None:
    """Not even where an op has made something of it before: Liger's kernels write into contiguous copies."""
    model = nn.Linear(32, 256)

    def loss_of(step: int) -> Tensor:
        out: Tensor = Foreign.apply(model(data(step, 64, 32)).abs(), make)  # type: ignore[no-untyped-call]
        return out.sum()

    assert_same(model, loss_of, planner)


def test_a_recorded_step_does_not_drop_what_was_written_by_out() -> None:
    """No room to swap: what can be made again is dropped, as it always is on a GPU."""
    model = nn.Linear(32, 256)

    def loss_of(step: int) -> Tensor:
        out = model(data(step, 64, 32))
        gate = out.detach().abs()
        torch.mul(gate, 2, out=gate)
        return torch.tanh(out * gate).sum()

    plain = gradients(model, loss_of, None)
    ooc = limit(model, "100%", planner="recompute-all")
    ooc.store.disk_bytes = 0
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model, loss_of, ooc), strict=True))
    ooc.close()


def test_leaving_the_plan_after_an_in_place_op() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64))

    def loss_of(step: int) -> Tensor:
        skip = torch.tanh(model[0](data(step, 64, 32)))
        h = model[1](skip)
        h += skip
        if step == 3:
            h *= 2
        return torch.tanh(h * h).sum()

    ooc = limit(model, "100%", planner="recompute-all")
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, loss_of, None), gradients(model, loss_of, ooc)))
    ooc.close()


def test_two_budgets_do_not_nest() -> None:
    outer, inner = limit(nn.Linear(2, 2), "1GiB"), limit(nn.Linear(2, 2), "1GiB")
    with outer.step(), pytest.raises(OutcoreError, match="inside"), inner.step():
        pass
    with inner.step():
        pass
    outer.close()
    inner.close()


def test_a_parameter_exchanged_before_the_backward() -> None:
    """Reruns read what it was. Autograd sees the new one where it saved the parameter itself, as a convolution does."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        loss: Tensor = model(data(step, 16, 1, 8, 8)).sum()
        for parameter in model.parameters() if step >= 3 else ():
            parameter.data = parameter.data.round()
        return loss

    def make() -> nn.Module:
        first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten())
        return nn.Sequential(first, nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8), nn.Tanh())

    assert_same_steps(make, loss_of)


@pytest.mark.parametrize("what", ["weight", "view", "input"])
def test_what_a_rerun_reads_through_a_view_or_a_graph_may_change(what: str) -> None:
    """A linear layer reads its weight through a view, and an input may have a graph of its own. Plain PyTorch needs
    neither again here, and does not mind: what a rerun would make of them is another thing."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scales = nn.Linear(32, 64), nn.Parameter(torch.ones(2, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x * 2) + self.scales[0])

    def loss_of(model: Any, step: int) -> Tensor:
        x = data(step, 64, 32).requires_grad_(what == "input") + 1
        loss: Tensor = model(x).square().sum()
        if step >= 3:
            with torch.no_grad():
                {"weight": model.linear.weight, "view": model.scales}.get(what, x).add_(1)
        return loss

    assert_same_steps(First, loss_of)


def test_unplanned_steps_swap_what_has_no_gradient_too() -> None:
    """The indices of a pooling layer are saved without a graph of their own."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2))
    ooc = limit(model, "100%")
    ooc.kinds.clear()
    x = data(0, 8, 1, 64, 64)
    with ooc.step():
        model(x).sum().backward()
    for kind in ooc.kinds.values():
        kind.give_up("the test says so")
    model.zero_grad()
    with ooc.step():
        loss = model(x).sum()
        assert ooc.store.used_bytes("disk") >= 8 * 4 * 32 * 32 * 8  # the indices are there
        loss.backward()
    ooc.close()


def test_a_mode_of_the_users_own() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))
    counted = []

    def loss_of(step: int) -> Tensor:
        with FlopCounterMode(display=False) as counter:
            out = model(data(step, 64, 32))
        counted.append(counter.get_total_flops())
        return F.cross_entropy(out, torch.zeros(64, dtype=torch.long))

    assert_same(model, loss_of)
    assert len(set(counted)) == 1
    assert torch._C._len_torch_dispatch_stack() == 0


def test_inference_tensors_and_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(50, 64, sparse=True), nn.Linear(64, 64), nn.Tanh())
    with torch.inference_mode():
        target = torch.randn(16, 8, 64)

    def loss_of(step: int) -> Tensor:
        tokens = torch.randint(0, 50, (16, 8), generator=torch.Generator().manual_seed(step))
        out: Tensor = (model(tokens) * target.clone()).square().mean()
        return out

    plain = gradients(model, loss_of, None)
    ooc = limit(model, "100%", planner="swap-all")
    got = gradients(model, loss_of, ooc)
    assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(plain, got))
    ooc.close()


def test_a_given_plan_must_fit_the_budget() -> None:
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())

    def loss_of(step: int) -> Tensor:
        out: Tensor = model(data(step, 512, 32)).sum()
        return out

    ooc = limit(model, "100%", planner="keep-all")
    gradients(model, loss_of, ooc, 2)
    plan = ooc.plan
    assert plan is not None
    ooc.close()
    ooc = limit(model, plan.predicted_peak_bytes // 2, plan=plan)
    with pytest.raises(BudgetTooSmall):
        gradients(model, loss_of, ooc, 2)
    ooc.close()


@pytest.mark.parametrize("line", range(1, 9))
def test_an_interrupt_below_everything_leaves_autograd_on(line: int) -> None:
    """Ctrl-C may come between any two lines of ours, and a notebook goes on after it."""
    lines_left = [line]

    def interrupt(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != replay.__file__:
            return None
        if event == "line":
            lines_left[0] -= 1
            if not lines_left[0]:
                raise KeyboardInterrupt
        return interrupt

    sys.settrace(interrupt)
    try:
        with replay.below_everything():
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    assert (2 * torch.ones(3, requires_grad=True)).requires_grad


def test_an_argument_that_may_be_written_may_also_be_missing() -> None:
    library = torch.library.Library("outcore_test", "DEF")
    library.define("scaled(Tensor x, Tensor(a!)? count, float by) -> Tensor")
    library.impl("scaled", lambda x, count, by: x * by, "CPU")

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            found: Tensor = torch.ops.outcore_test.scaled(x, None, 2.0)
            return found

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    linear = nn.Linear(256, 256)

    def loss_of(step: int) -> Tensor:
        hidden = torch.relu(linear(data(step, 512, 256)))
        loss: Tensor = linear(Scaled.apply(hidden)).sum()  # type: ignore[no-untyped-call]
        return loss

    assert_same(linear, loss_of)


@pytest.mark.parametrize("planner", ["keep-all", "swap-all", "recompute-all", "unplanned"])
def test_noise_that_is_saved_before_it_is_drawn(planner: str) -> None:
    """RReLU hands autograd an empty tensor, and then fills it: put away at once, it would come back empty."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.RReLU(), nn.Linear(64, 64))

    def train(ooc: Any) -> list[Tensor]:
        torch.manual_seed(1)
        found = []
        for step in range(3):
            model.zero_grad()
            if ooc is not None and planner == "unplanned":
                for kind in ooc.kinds.values():
                    kind.give_up("the test says so")
            with ooc.step() if ooc is not None else torch.enable_grad():
                model(data(step, 256, 64)).square().sum().backward()
            found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        return found

    ooc = limit(model, "100%", planner="swap-all" if planner == "unplanned" else planner)
    for plain, got in zip(train(None), train(ooc), strict=True):
        assert torch.equal(plain, got)
    ooc.close()


@pytest.mark.parametrize("through_data", [False, True])
def test_many_written_at_once_and_one_of_them_put_away(through_data: bool) -> None:
    """What a captured op writes and nobody has to bring back must not be taken for what was there before."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.one(x) * 2, self.other(x) * 3
            torch._foreach_tanh_([a.data, b.data] if through_data else [a, b])
            out: Tensor = (a * a) * b.sin()
            return out

    torch.manual_seed(0)
    model, x = Both(), data(0, 256, 64)

    def gradients_of(ooc: Any) -> list[Tensor]:
        model.zero_grad()
        with ooc.step() if ooc is not None else torch.enable_grad():
            model(x).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    ooc = limit(model, "100%", planner="keep-all")
    gradients_of(ooc)
    gradients_of(ooc)
    assert ooc.trace is not None
    assert ooc.plan is not None
    first, second = next(op for op in ooc.trace.ops if op.name == "aten._foreach_tanh_.default").writes
    plan = replace(ooc.plan, decisions={first: "keep", second: "recompute"})
    ooc.close()
    ooc = limit(model, "100%", plan=plan)
    gradients_of(ooc)
    for plain, got in zip(gradients_of(None), gradients_of(ooc), strict=True):
        assert torch.equal(plain, got)
    ooc.close()
