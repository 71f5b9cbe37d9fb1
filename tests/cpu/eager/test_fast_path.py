"""Planned steps that are followed in C++: the same objects and numbers, and Python for all that is not ordinary."""

from __future__ import annotations

import gc
import itertools
import logging
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outcore.eager import native
from outcore.eager.cells import Cell, Handle, Kept, View
from outcore.eager.execution import Execution
from outcore.eager.replay import Held, Recipe, Ref
from outcore.errors import BudgetTooSmall
from outcore.limit import Limited, limit
from tests.cpu.eager.training import bits, data
from tests.cpu.fitting.pretended import Pretend
from tests.cpu.training import build as build_from_zoo
from tests.cpu.training import train
from tests.cpu.zoo import ZOO


class Block(nn.Module):
    """Views, lists of tensors, numbers, reductions, dropout drawn out of place: what transformers do."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.narrow = nn.LayerNorm(width), nn.Linear(4 * width, width)
        self.wide, self.scale = nn.Linear(width, 4 * width), 0.5

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norm(x).chunk(2, dim=-1)
        x = x + torch.cat([second, first], dim=-1) * self.scale
        x = torch.add(x, x.mean(-1, keepdim=True), alpha=2)
        out: Tensor = x + self.narrow(F.gelu(self.wide(x))).softmax(-1).to(torch.float64).float()
        return out * torch.bernoulli(torch.full_like(out, 0.9))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.between: Callable[[Tensor, int], Tensor] = lambda x, step: x

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        out: Tensor = self.blocks[1:](self.between(self.blocks[0](x), step))
        return out.sum()


@contextmanager
def settled(model: nn.Module, planner: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Limited]:
    Pretend(monkeypatch).settings(num_measured=0)
    with limit(model, "100%", planner=planner) as ooc:
        yield ooc


def run(model: Model, ooc: Limited | None, step: int, x: Tensor | None = None) -> list[Tensor]:
    """The bits of a step."""
    torch.manual_seed(step)
    model.zero_grad()
    x = data(step, 8, 32) if x is None else x
    if ooc is None:
        loss = model(x, step)
        loss.backward()
    else:
        with ooc.step():
            loss = model(x, step)
            loss.backward()
    return [bits(loss), *(bits(p.grad) for p in model.parameters() if p.grad is not None)]


def build() -> Model:
    torch.manual_seed(0)
    return Model()


# -- what reaches Python -----------------------------------------------------------------------------------------------


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often Python was asked about ops, and about saved tensors."""
    found: Counter[str] = Counter()
    for name in ("op", "pack"):
        really = getattr(Execution, name)

        def counted(self: Execution, *args: Any, _really: Any = really, _name: str = name) -> Any:
            found[_name] += 1
            return _really(self, *args)

        monkeypatch.setattr(Execution, name, counted)
    return found


@pytest.mark.parametrize("planner", ["recompute-all", "swap-all", "keep-all"])
@pytest.mark.usefixtures("in_cpp")
def test_ordinary_ops_and_saved_tensors_never_reach_python(
    planner: str, reached: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    with settled(model, planner, monkeypatch) as ooc:
        for step in range(4):
            run(model, ooc, step)
        reached.clear()
        run(model, ooc, 4)
    assert reached["pack"] == 0
    assert reached["op"] <= 3  # the draws: `bernoulli` takes a generator


# -- the same objects --------------------------------------------------------------------------------------------------


def test_the_same_recipes_cells_and_handles_as_in_python(
    compiled: native.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = []
    for library in (None, compiled):
        monkeypatch.setattr(native, "chosen_library", library or native.Library(None))
        for planner in ("recompute-all", "swap-all"):
            model = build()
            with settled(model, planner, monkeypatch) as ooc:
                for step in range(4):
                    run(model, ooc, step)
                told: list[Any] = []
                torch.manual_seed(9)
                model.zero_grad()
                with ooc.step():
                    loss = model(data(9, 8, 32), 9)
                    plan = one_execution().plan
                    recipes = [(op, mark()) for op, mark in sorted(plan.recipes.items())]
                    told += [(op, told_of(recipe, 0)) for op, recipe in recipes if recipe is not None]
                    told += [(value, told_of(mark(), 1)) for value, mark in sorted(plan.cells.items()) if mark()]
                    told += sorted(map(repr, (told_of(one, 1) for one in of_step((Handle, Kept)))))
                    loss.backward()
            ways.append(told)
    assert len(ways[0]) > 50
    for made_by_cpp, made_by_python in zip(ways[2:], ways[:2], strict=True):
        for ours, theirs in zip(made_by_cpp, made_by_python, strict=True):
            assert ours == theirs


def one_execution() -> Execution:
    (found,) = [one for one in gc.get_objects() if type(one) is Execution and not one.is_over]
    return found


def of_step(kinds: tuple[type, ...]) -> list[Any]:
    return [one for one in gc.get_objects() if type(one) in kinds and not one.run.is_over]


_HIDDEN = {"run", "storage", "state", "switches", "source"}  # other objects, or checked by what is read from them


def told_of(one: Any, depth: int) -> Any:
    """All that an object holds, as text; storages and tensors by how they lie."""
    if isinstance(one, weakref.ref):
        target = one()
        return "weak", told_of(target, 9) if target is not None else None
    if isinstance(one, Tensor):
        return type(one).__name__, one.dtype, tuple(one.shape), one.stride(), one._version, one.grad_fn is None
    if isinstance(one, Cell | Recipe | Held | View | Kept):
        names = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
        if depth > 3:
            return type(one).__name__, getattr(one, "value", None), getattr(one, "op", None)
        held = {name: getattr(one, name) for name in sorted(names) if name[:2] != "__" and name not in _HIDDEN}
        if isinstance(one, Cell):
            held["held"] = one.held[0]
            if one.parcel is not None:
                del held["data"]  # when it leaves the device the plan says, which follows from measured seconds
        return type(one).__name__, [(name, told_of(value, depth + 1)) for name, value in held.items()]
    if isinstance(one, list | tuple):
        return type(one).__name__, [told_of(part, depth + 1) for part in one]
    if isinstance(one, dict):
        return [(name, told_of(value, depth + 1)) for name, value in sorted(one.items())]
    return type(one).__name__, re.sub(" at 0x[0-9a-f]+", "", repr(one))


@pytest.mark.parametrize(
    ("name", "planner"),
    [*itertools.product(ZOO, ["recompute-all", "swap-all"]), ("views", "hybrid"), ("lstm", "hybrid")],
)
@pytest.mark.usefixtures("in_cpp")
def test_the_same_numbers_as_plain_pytorch(name: str, planner: str) -> None:
    expected = train(*build_from_zoo(name), None, 4)
    memory_bytes: int | str = 1024 if planner == "hybrid" else "100%"
    while True:
        model, loss_of = build_from_zoo(name)
        try:
            with limit(model, memory_bytes, planner=planner) as ooc:
                train(model, loss_of, ooc, 4).assert_same(expected)
                assert ooc.stats()["left"] == 0
            return
        except BudgetTooSmall as error:
            memory_bytes = error.needed_bytes


# -- steps that are not what they were ---------------------------------------------------------------------------------


def in_a_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class Watches(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out: Tensor = grads[0] * 2 + 0 * x
        return out


def doubled(x: Tensor) -> Tensor:
    out: Tensor = Doubles.apply(x)  # type: ignore[no-untyped-call]
    return out


class Marked(Tensor):
    pass


def watched(x: Tensor) -> Tensor:
    with Watches():
        out: Tensor = x.sigmoid() * 2
        return out


def in_another_thread(x: Tensor) -> Tensor:
    in_a_thread(lambda: (x.detach() * 3).exp())
    return x * 0.5


def mapped(x: Tensor) -> Tensor:
    out: Tensor = torch.func.vmap(lambda row: row.sigmoid() * 2)(x)
    return out


def differentiated(x: Tensor) -> Tensor:
    gradient: Tensor = torch.func.grad(lambda one: one.square().sum())(x.detach())
    return x * gradient


def inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        (x * 3).exp()
    return x * 0.5


def differentiated_within(x: Tensor) -> Tensor:
    (inner,) = torch.autograd.grad(x.sigmoid().sum(), x, create_graph=True)
    return x * inner


def written_into(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(1)
    y.data.mul_(0.5)
    return y.sigmoid()


CHANGES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "another number each step": lambda x, step: x * (1 + step / 7),
    "a whole number, then another type of number": lambda x, step: x * (2 if step < 5 else 2.0),
    "another op": lambda x, step: x.sigmoid() if step < 5 else x.tanh(),
    "one more op": lambda x, step: x * 2 if step < 5 else (x * 2).cos(),
    "one op fewer": lambda x, step: (x * 2).cos() if step < 5 else x * 2,
    "another type": lambda x, step: x * 2 if step < 5 else (x.double() * 2).float(),
    "another layout": lambda x, step: x * 2 if step < 5 else (x.t().contiguous() * 2).t(),
    "another tensor": lambda x, step: x * x.sin() if step < 5 else x.cos() * x,
    "a subclass": lambda x, step: x * 2 if step < 5 else (x.as_subclass(Marked) * 2).as_subclass(Tensor),
    "a mode": lambda x, step: x.sigmoid() * 2 if step < 5 else watched(x),
    "a thread": lambda x, step: x * 0.5 if step < 5 else in_another_thread(x),
    "a vmap": lambda x, step: x.sigmoid() * 2 if step < 5 else mapped(x),
    "vmaps": lambda x, step: mapped(x),
    "a transform": lambda x, step: differentiated(x),
    "inference": lambda x, step: x * 0.5 if step < 5 else inferred(x),
    "a gradient within": lambda x, step: differentiated_within(x),
    "writes": lambda x, step: written_into(x),
    "a custom function": lambda x, step: x * 2 if step < 5 else doubled(x),
    "custom functions": lambda x, step: doubled(x),
    "no gradient": lambda x, step: x * 2 if step < 5 else x * (x.detach() * 0 + 2),
    "bytes by NumPy": lambda x, step: x * torch.from_numpy((x.detach() * 0 + 2).numpy()),
}


@pytest.mark.parametrize("planner", ["recompute-all", "swap-all", "hybrid"])
@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.filterwarnings("ignore:outcore")
@pytest.mark.usefixtures("in_cpp")
def test_a_step_that_is_another_has_the_numbers_of_plain_pytorch(
    change: str, planner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = build(), build()
    plain.between = ours.between = CHANGES[change]
    with settled(ours, planner, monkeypatch) as ooc:
        for step in range(8):
            expected, got = run(plain, None, step), run(ours, ooc, step)
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), step


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError, Interrupted])
@pytest.mark.filterwarnings("ignore:outcore")
@pytest.mark.usefixtures("in_cpp")
def test_a_step_that_fails_in_the_middle_leaves_nothing_behind(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an op itself (its shapes do not fit), and between two ops."""

    def fails(x: Tensor, step: int) -> Tensor:
        if step == 5 and error is RuntimeError:
            return x * torch.ones(8, 31)  # the op that the plan expects; the kernel refuses it
        if step == 5:
            raise Interrupted
        return x * torch.ones(8, 32)

    plain, ours = build(), build()
    plain.between = ours.between = fails
    with settled(ours, "recompute-all", monkeypatch) as ooc:
        for step in range(8):
            if step == 5:
                with pytest.raises(error):
                    run(ours, ooc, step)
                continue
            expected, got = run(plain, None, step), run(ours, ooc, step)
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), step
        gc.collect()
        assert not of_step((Handle, Kept))


# -- references --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", ["recompute-all", "swap-all"])
@pytest.mark.usefixtures("in_cpp")
def test_thousands_of_steps_hold_nothing(planner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Sigmoid(), nn.LayerNorm(8))
    x = data(0, 4, 8)
    with settled(model, planner, monkeypatch) as ooc:

        def steps(num: int) -> Counter[type]:
            for _ in range(num):
                with ooc.step():
                    model(x).sum().backward()
                model.zero_grad()
            gc.collect()
            return Counter(type(one) for one in gc.get_objects())

        before, bytes_before = steps(20), resident_bytes()
        after = steps(2000)
        # Plans and caches settle meanwhile; what a step holds would be there 2,000 times.
        grown = {kind.__name__: num - before[kind] for kind, num in after.items() if num - before[kind] > 200}
        assert not grown
        assert not any(after[kind] for kind in (Cell, Handle, Kept, Held, Recipe, Ref))
        assert resident_bytes() - bytes_before < 4 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# -- the library -------------------------------------------------------------------------------------------------------


def test_a_library_that_cannot_be_loaded_leaves_steps_to_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "broken.so"
    path.write_text("no library")
    monkeypatch.setattr(native, "chosen_library", native.Library(path))
    plain, ours = build(), build()
    with caplog.at_level(logging.INFO, "outcore"), settled(ours, "recompute-all", monkeypatch) as ooc:
        for step in range(4):
            expected, got = run(plain, None, step), run(ours, ooc, step)
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), step
    said = [record.message for record in caplog.records if "fast path" in record.message]
    assert len(said) == 1
    assert "followed in Python" in said[0]


def test_a_compiler_that_fails_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho it cannot be >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    library = native.Library(native.chosen_path(str(tmp_path)))
    with caplog.at_level(logging.INFO, "outcore"):
        assert library.find(wait=True) is None
        assert library.find(wait=True) is None
    assert [record.message for record in caplog.records if "it cannot be" in record.message] == [
        "planned steps are followed in Python, not by the fast path in C++ (it cannot be)"
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"c++"}


def test_steps_use_python_where_there_is_no_compiler_or_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.chosen_path("off") is None
    assert native.chosen_path("") is None
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert native.chosen_path("on") is None
