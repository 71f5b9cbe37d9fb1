"""A step takes what was predicted, and no more than the budget: programs that once took more, without a word.

Each is run under several planners and budgets. Where a budget is too small the error names one that is not, and that
one is tried: the promise holds for it too.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Container
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.errors import BudgetTooSmall
from outcore.limit import Limited, limit
from outcore.memory.disk import DiskLane
from outcore.memory.store import Store

Step = Callable[[nn.Module, Limited], None]
PLANNERS = ("hybrid", "pooch", "swap-all", "recompute-all")
NUM_STEPS = 4


def in_core_bytes(model: nn.Module, step: Step, folder: Path) -> int:
    ooc = limit(model, "100%", planner="keep-all", disk=folder)
    for _ in range(3):
        step(model, ooc)
    plan = ooc.plan
    ooc.close()
    assert plan is not None
    return plan.in_core_peak_bytes


def assert_within(
    model: nn.Module, step: Step, memory_bytes: int, planner: str, folder: Path, write_bytes_per_s: float = 0.0
) -> Limited:
    """Runs some steps and compares what they took with what was promised. Returns the limit, closed. A budget that is
    too small is raised once to what the error names."""
    try:
        ooc = run_steps(model, step, memory_bytes, planner, folder, write_bytes_per_s)
    except BudgetTooSmall as error:
        memory_bytes = error.needed_bytes
        ooc = run_steps(model, step, memory_bytes, planner, folder, write_bytes_per_s)
    measured, predicted = ooc.timeline, ooc.predicted
    assert measured is not None
    assert predicted is not None
    assert measured.peak_bytes <= memory_bytes
    assert measured.peak_bytes <= predicted.peak_bytes <= 1.01 * measured.peak_bytes
    assert [kind.num_left for kind in ooc.kinds.values()] == [0] * len(ooc.kinds)
    return ooc


def run_steps(
    model: nn.Module, step: Step, memory_bytes: int, planner: str, folder: Path, write_bytes_per_s: float
) -> Limited:
    ooc = limit(model, memory_bytes, planner=planner, measure=True, disk=folder)
    if write_bytes_per_s:
        ooc.machine = replace(ooc.machine, disk_write_bytes_per_s=write_bytes_per_s)
    try:
        for _ in range(NUM_STEPS):
            step(model, ooc)
    finally:
        ooc.close()
    return ooc


def chain(depth: int = 8, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.Tanh())))


def one_backward(model: nn.Module, ooc: Limited) -> None:
    x = torch.linspace(-1, 1, 512 * 64).view(512, 64)
    model.zero_grad()
    with ooc.step():
        out: Tensor = model(x)
        out.square().mean().backward()


@pytest.mark.parametrize("batch", [16, 32])
def test_what_is_freed_and_brought_back_in_one_tick_is_there_once(batch: int, tmp_path: Path) -> None:
    """A swap-out that ends when its value is asked for: the old storage must not be held through the swap-in."""
    torch.manual_seed(0)
    model = nn.LSTM(32, 48, 2)
    x, state = torch.randn(12, batch, 32), (torch.zeros(2, batch, 48), torch.zeros(2, batch, 48))

    def step(model: nn.Module, ooc: Limited) -> None:
        model.zero_grad()
        with ooc.step():
            model(x, state)[0].square().mean().backward()

    in_core = in_core_bytes(model, step, tmp_path)
    ooc = assert_within(model, step, int(0.7 * in_core), "swap-all", tmp_path, write_bytes_per_s=1e8)
    kinds: dict[tuple[int, int], list[str]] = {}
    assert ooc.schedule is not None
    for action in ooc.schedule.actions:
        kinds.setdefault((action.tick, action.value), []).append(action.kind)
    assert any("free" in found[: found.index("swap_in")] for found in kinds.values() if "swap_in" in found)


def test_a_lane_lets_go_before_it_says_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the lane's thread is slow to go on after a copy."""

    def work(self: Any) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            time.sleep(0.003)
            del job

    model = chain()
    in_core = in_core_bytes(model, one_backward, tmp_path)
    monkeypatch.setattr(DiskLane, "work", work)
    assert_within(model, one_backward, in_core // 2, "swap-all", tmp_path)


class EarlyNodes(nn.Module):
    """`argsort` saves its input in a node that dies at once; `gather` saves the same value for good."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            x = x.gather(1, h.argsort(1)) + h
        return x


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_value_outlives_the_first_node_that_saves_it(planner: str, tmp_path: Path) -> None:
    model = EarlyNodes()
    assert_within(model, one_backward, in_core_bytes(model, one_backward, tmp_path) // 2, planner, tmp_path)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head, self.other = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = aux = torch.tanh(self.trunk(x))
        for _ in range(8):
            aux = torch.tanh(self.other(aux))
        return self.head(h), aux


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("outlives", [True, False])
def test_an_output_that_nobody_uses_takes_no_room(planner: str, outlives: bool, tmp_path: Path) -> None:
    """Neither where its graph is still there when the step ends, nor where it goes before."""
    model, logged = TwoHeads(), list[Tensor]()

    def step(model: nn.Module, ooc: Limited) -> None:
        x = torch.linspace(-1, 1, 512 * 64).view(512, 64)
        model.zero_grad()
        with ooc.step():
            y, aux = model(x)
            logged[:] = [aux]
            if not outlives:
                logged.clear()
                del aux
            y.square().mean().backward()
        logged.clear()

    in_core = in_core_bytes(model, step, tmp_path)
    ooc = assert_within(model, step, in_core // 2 if outlives else int(0.6 * in_core), planner, tmp_path)
    assert ooc.plan is not None
    if planner == "recompute-all":
        assert ooc.plan.count("swap" if outlives else "recompute") >= 7  # what can still be asked for is not made again


class OwnMeter(TorchDispatchMode):
    """Bytes of all storages that ops make, and of those that are brought back; whether a step runs or not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = self.peak_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.see(tensor)
        return result

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if "_seen" not in storage.__dict__:
            storage.__dict__["_seen"] = True
            number, num_bytes = len(self._known), storage.nbytes()
            self.now_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)

            def died(_: object) -> None:
                self.now_bytes -= num_bytes

            self._known[number] = weakref.ref(storage, died)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_backward_after_the_step_stays_within_the_budget_too(
    planner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = chain(depth=12), torch.linspace(-1, 1, 512 * 64).view(512, 64)
    before_bytes = sum(parameter.nbytes for parameter in model.parameters()) + x.nbytes
    meter, fetch = OwnMeter(), Store.fetch

    def step(model: nn.Module, ooc: Limited) -> None:
        model.zero_grad()
        with ooc.step():
            loss = model(x).square().mean()
        loss.backward()

    def fetch_seen(store: Store, parcel: Any) -> Tensor:
        target = fetch(store, parcel)
        meter.see(target)
        return target

    in_core = in_core_bytes(model, step, tmp_path)
    monkeypatch.setattr(Store, "fetch", fetch_seen)
    for tensor in (*model.parameters(), x):
        tensor.untyped_storage().__dict__["_seen"] = True
    with meter:
        torch.ones(1)  # the first op under a mode imports a compiler, whose frames hold what it is called on
    with meter, pytest.warns(UserWarning, match="a step ended without a backward"):
        ooc = assert_within(model, step, in_core // 2, planner, tmp_path)
    assert before_bytes + meter.peak_bytes <= ooc.budget.device_bytes
    assert meter.peak_bytes > 2 * x.nbytes


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_backward_in_the_next_step_brings_nothing_ahead(planner: str, tmp_path: Path) -> None:
    """Every second step runs the backward of the one before, too. The plan of that one brought values ahead of their
    use, of which the plan of the running step does not know."""
    torch.manual_seed(0)
    model, kept = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()), list[Tensor]()
    x = torch.linspace(-1, 1, 512 * 64).view(512, 64)

    def step(model: nn.Module, ooc: Limited) -> None:
        if not kept:
            model.zero_grad()
        with ooc.step():
            h = model(x)
            loss = torch.minimum(h, h).square().mean()
            if kept:
                (loss + kept.pop()).backward()
            else:
                kept.append(loss)

    def peaks(memory: int | str, planner: str) -> list[tuple[int, int]]:
        """Measured and predicted ones, once both kinds of steps were recorded."""
        found: list[tuple[int, int]] = []
        ooc = limit(model, memory, planner=planner, measure=True, disk=tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first step with a backward is another one than was recorded
            try:
                for _ in range(8):
                    step(model, ooc)
                    if ooc.timeline is not None and ooc.predicted is not None:
                        found.append((ooc.timeline.peak_bytes, ooc.predicted.peak_bytes))
            finally:
                kept.clear()
                ooc.close()
        return found[-4:]

    memory_bytes = int(0.8 * max(peaks("100%", "keep-all"))[0])
    try:
        found = peaks(memory_bytes, planner)
    except BudgetTooSmall as error:
        memory_bytes = error.needed_bytes
        found = peaks(memory_bytes, planner)
    assert all(measured <= predicted <= memory_bytes for measured, predicted in found)


@pytest.mark.parametrize("spare_bytes", [0, 2**20])
def test_what_the_optimizer_keeps_from_step_to_step_counts(spare_bytes: int, tmp_path: Path) -> None:
    """LBFGS remembers some more at every step, in lists. A plan that bears it stays, or the budget is refused."""
    model, x = chain(depth=4), torch.linspace(-1, 1, 512 * 64).view(512, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=4)
    peaks: list[tuple[int, int]] = []

    def closure() -> float:
        optimizer.zero_grad()
        with ooc.step():
            loss = model(x).square().mean()
            loss.backward()
        if ooc.timeline is not None and ooc.predicted is not None:
            peaks.append((ooc.timeline.peak_bytes, ooc.predicted.peak_bytes))
        return float(loss.detach())

    memory_bytes = in_core_bytes(model, one_backward, tmp_path) + spare_bytes
    ooc = limit(model, memory_bytes, planner="keep-all", measure=True, disk=tmp_path)
    try:
        for _ in range(5):
            optimizer.step(closure)
    except BudgetTooSmall:
        assert spare_bytes == 0
    finally:
        ooc.close()
    assert all(measured == predicted <= memory_bytes for measured, predicted in peaks)
    assert len(set(peaks)) > 3 or spare_bytes == 0


class GivesWhatItSaved(torch.autograd.Function):
    """The gradient of a parameter is a tensor that was saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x.t() @ torch.tanh(x), weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        saved, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), saved


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 20) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(GivesWhatItSaved.apply(x, weight))  # type: ignore[no-untyped-call]
        return x


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_saved_tensor_that_becomes_a_gradient_stays_until_the_step_ends(planner: str, tmp_path: Path) -> None:
    model, x = Given(), torch.linspace(-1, 1, 64 * 64).view(64, 64)

    def step(model: nn.Module, ooc: Limited) -> None:
        model.zero_grad()
        with ooc.step():
            model(x).square().mean().backward()

    assert_within(model, step, in_core_bytes(model, step, tmp_path) // 2, planner, tmp_path)


@pytest.mark.parametrize("planner", ["hybrid", "swap-all"])
def test_a_graph_that_crosses_two_limits_stays_within_both(planner: str, tmp_path: Path) -> None:
    """The second one's backward asks for what the first one's step saved, and both measure it."""
    first, x = chain(), torch.linspace(-1, 1, 512 * 64).view(512, 64)
    second = chain()
    both = limit(first, "100%", planner=planner, measure=True, disk=tmp_path)

    def step(model: nn.Module, ooc: Limited) -> None:
        first.zero_grad()
        model.zero_grad()
        with both.step():
            h = first(x)
        with ooc.step():
            model(h).square().mean().backward()

    with pytest.warns(UserWarning, match="a step ended without a backward"):
        in_core = in_core_bytes(second, step, tmp_path)
    assert_within(second, step, int(0.6 * in_core), planner, tmp_path)
    both.close()
    assert both.plan is not None
    assert both.timeline is not None
    assert both.predicted is not None
    assert both.plan.count("keep") == 0
    assert both.timeline.peak_bytes == both.predicted.peak_bytes


class Changing(nn.Module):
    """In its fifth step it does what no step did before."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.change, self.t = change, 0

    def forward(self, x: Tensor) -> Tensor:
        self.t += 1
        change = self.change if self.t == 5 else ""
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if change == "in the middle" and number == 4:
                x = torch.sin(x) * torch.cos(x)
        for _ in range(8 if change == "at the end" else 0):
            x = torch.sin(x) * torch.cos(x)
        return x


@pytest.mark.parametrize("change", ["in the middle", "at the end"])
@pytest.mark.parametrize(("planner", "share"), [("hybrid", 0.7), ("pooch", 0.7), ("hybrid", 1.0), ("keep-all", 1.0)])
def test_a_step_that_leaves_its_plan_stays_within_the_budget(
    change: str, planner: str, share: float, tmp_path: Path
) -> None:
    """What the plan kept is put away, too, as far as the step has no room for it. A step over its budget warns."""

    def step(model: nn.Module, ooc: Limited | None) -> Tensor:
        model.zero_grad()
        with ooc.step() if ooc is not None else nullcontext():
            loss: Tensor = model(torch.ones(1024, 64) * 0.3).square().mean()
            loss.backward()
        return loss

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Changing(change)

    memory_bytes = int(share * in_core_bytes(made(), lambda model, ooc: (step(model, ooc), None)[1], tmp_path))
    plain, model = made(), made()
    ooc = limit(model, memory_bytes, planner=planner, measure=True, disk=tmp_path)
    for _ in range(6):
        step(plain, None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, ooc)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters()))  # type: ignore[arg-type]
    assert ooc.stats()["left"] == 1
    ooc.close()
    assert ooc.store.num_parcels == 0


class _ReturnsSaved(torch.autograd.Function):
    """The gradient of `p` is what was saved, itself."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(g)
        return (p * g).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


class Scaled(nn.Module):
    """A hook scales the gradient of `p` in place, and others saved what that gradient is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.p = nn.Linear(64, 64), nn.Parameter(torch.ones(128, 64))
        self.p.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])

    def forward(self, x: Tensor) -> Tensor:
        g = torch.tanh(self.layer(x))
        total = torch.sin(torch.sin(g)).sum()
        returned: Tensor = _ReturnsSaved.apply(self.p, g)  # type: ignore[no-untyped-call]
        return total + returned


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("share", [1.0, 0.7])
def test_the_copy_of_a_saved_tensor_that_became_a_gradient_is_planned(
    planner: str, share: float, tmp_path: Path
) -> None:
    def step(model: nn.Module, ooc: Limited) -> None:
        model.zero_grad()
        with ooc.step():
            model(torch.ones(128, 64) * 0.3).backward()

    memory_bytes = int(share * in_core_bytes(Scaled(), step, tmp_path))
    assert_within(Scaled(), step, memory_bytes, planner, tmp_path)


@pytest.mark.parametrize(("change", "said"), [("", "a step took"), ("at the end", "a step that left its plan took")])
def test_a_step_that_takes_more_than_its_budget_warns(change: str, said: str, tmp_path: Path) -> None:
    """What the program itself holds cannot be put away."""

    def step(model: nn.Module, ooc: Limited) -> None:
        model.zero_grad()
        with ooc.step():
            model(torch.ones(1024, 64) * 0.3).square().mean().backward()
            held = torch.ones(2**20) if getattr(model, "t", 0) == 5 else None
        del held
        ooc.stats()  # reads what the step measured

    memory_bytes = int(0.7 * in_core_bytes(Changing(change), step, tmp_path))
    model = Changing(change)
    ooc = limit(model, memory_bytes, measure=True, disk=tmp_path)
    for _ in range(4):
        step(model, ooc)
    with pytest.warns(UserWarning, match=said):
        step(model, ooc)
    ooc.close()


class Bag(nn.Module):
    """The gradient of its table is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.EmbeddingBag(500, 64, mode="mean", sparse=True), Changing("")

    def forward(self, indices: Tensor) -> Tensor:
        out: Tensor = self.layers(self.table(indices))
        return out


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_parts_of_a_sparse_gradient_count_once(planner: str, tmp_path: Path) -> None:
    indices = torch.arange(256 * 6).view(256, 6) % 500

    def step(model: nn.Module, ooc: Limited) -> None:
        model.zero_grad()
        with ooc.step():
            model(indices).square().mean().backward()

    model = Bag()
    assert_within(model, step, int(0.8 * in_core_bytes(model, step, tmp_path)), planner, tmp_path)


class Nested(nn.Module):
    """Some of its tensors are nested."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        nested = torch.nested.as_nested_tensor([h[:16], h[16:]]) * 0.5
        out: Tensor = torch.nested.to_padded_tensor(nested, 0.0).reshape(-1, 32)[: h.shape[0]] + h
        return out


@pytest.mark.parametrize("planner", PLANNERS)
def test_nested_tensors_count(planner: str, tmp_path: Path) -> None:
    x = torch.ones(64, 32)

    def step(model: nn.Module, ooc: Limited) -> None:
        model.zero_grad()
        with ooc.step():
            model(x).square().mean().backward()

    model = Nested()
    assert_within(model, step, in_core_bytes(model, step, tmp_path), planner, tmp_path)


class Exchanging(nn.Module):
    """Before the backwards of some steps, a weight gets other memory, while autograd holds what it saved."""

    def __init__(self, steps: Container[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.steps, self.t = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))), steps, 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def exchange(model: nn.Module, ooc: Limited) -> None:
    assert isinstance(model, Exchanging)
    model.zero_grad()
    with ooc.step():
        loss = model(torch.ones(128, 128) * 0.3).square().mean()
        if model.t in model.steps:
            weight = model.get_parameter("layers.2.weight")
            weight.data = weight.data * 0.9
        loss.backward()
    model.t += 1
    ooc.stats()  # reads what the step measured


def least_bytes(model: nn.Module, folder: Path) -> int:
    with pytest.raises(BudgetTooSmall) as told:
        run_steps(model, exchange, 2**19, "hybrid", folder, 0.0)
    return told.value.needed_bytes


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("spare_bytes", [0, 2**17])
def test_a_weight_that_only_some_steps_exchange_is_said_once(measure: bool, spare_bytes: int, tmp_path: Path) -> None:
    """The program itself holds both. Later plans leave that much free; where none can, it is not said every time."""
    memory_bytes = least_bytes(Exchanging(()), tmp_path) + spare_bytes
    model = Exchanging((6, 8))
    ooc = limit(model, memory_bytes, measure=measure, disk=tmp_path)
    for _ in range(6):
        exchange(model, ooc)
    with pytest.warns(UserWarning, match="a step took"):
        exchange(model, ooc)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            exchange(model, ooc)
            assert ooc.timeline is not None
            assert spare_bytes == 0 or ooc.timeline.peak_bytes <= memory_bytes
    ooc.close()


@pytest.mark.parametrize("measure", [True, False])
def test_a_weight_that_every_step_exchanges_is_planned(measure: bool, tmp_path: Path) -> None:
    memory_bytes = least_bytes(Exchanging(range(9)), tmp_path)
    model = Exchanging(range(9))
    ooc = limit(model, memory_bytes, measure=measure, disk=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            exchange(model, ooc)
            assert ooc.timeline is None or ooc.timeline.peak_bytes <= memory_bytes
    ooc.close()


@pytest.mark.parametrize("planner", ["hybrid", "swap-all"])
def test_gradients_of_which_some_are_none_and_some_zero_are_predicted(planner: str, tmp_path: Path) -> None:
    """Every second parameter has one before the step, in turns: a backward adds to these and makes the others."""
    model, x = chain(), torch.linspace(-1, 1, 512 * 64).view(512, 64)
    in_core = in_core_bytes(model, one_backward, tmp_path)
    ooc = limit(model, int(0.7 * in_core), planner=planner, measure=True, disk=tmp_path)
    for turn in range(8):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.zeros_like(parameter) if (number + turn) % 2 else None
        with ooc.step():
            model(x).square().mean().backward()
        measured, predicted = ooc.timeline, ooc.predicted
        if measured is not None and predicted is not None:
            assert measured.peak_bytes <= predicted.peak_bytes <= 1.01 * measured.peak_bytes
    assert ooc.stats()["planned"] == 6
    ooc.close()
