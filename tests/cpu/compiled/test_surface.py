"""However a model is compiled: the same bits in a budget, one plan for all parts, and nothing compiled twice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters
from torch.nn import functional as F

from outcore.compiled import inductor
from outcore.compiled.program import UnknownStatement
from outcore.errors import BudgetTooSmall
from outcore.limit import Limited, limit
from outcore.values import Trace
from tests.cpu.compiled.stubs import stub_kernels
from tests.cpu.compiled.training import Training, residuals, same


@pytest.fixture(autouse=True)
def stubs() -> Iterator[None]:
    with stub_kernels():
        yield


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def whole(training: Training) -> nn.Module:
    compiled: Any = torch.compile(training.model)
    training.run = compiled
    return compiled  # type: ignore[no-any-return]


def whole_but_limited_inside(training: Training) -> nn.Module:
    training.run = torch.compile(training.model)
    return training.model


def in_place(training: Training) -> nn.Module:
    training.model.compile()
    return training.model


def block_by_block(training: Training) -> nn.Module:
    for block in training.model.children():
        block.compile()
    return training.model


def every_other_block(training: Training) -> nn.Module:
    for block in list(training.model.children())[::2]:
        block.compile()
    return training.model


def with_its_loss(training: Training) -> nn.Module:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(training.model(x), y)

    compiled = torch.compile(loss)
    training.loss = lambda: compiled(training.x, training.y)  # type: ignore[method-assign]
    return training.model


FORMS = [whole, whole_but_limited_inside, in_place, block_by_block, every_other_block, with_its_loss]


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_compilation(form: Callable[[Training], nn.Module]) -> None:
    training = residuals(2)
    model = form(training)
    expected = training.step()
    ooc = limit(model, "1GiB", measure=True)
    for _ in range(3):
        assert same(training.step(ooc), expected)
    compiled = num_graphs()
    in_core = ooc.timeline
    assert in_core is not None
    assert ooc.predicted is not None
    assert in_core.peak_bytes == ooc.predicted.peak_bytes
    assert ooc.trace is not None
    assert any(op.name.startswith("cpp_fused") for op in ooc.trace.ops)
    assert not ooc.trace.has_unseen
    ooc.close()
    budget_bytes = int(0.8 * in_core.peak_bytes)
    ooc = limit(model, budget_bytes, measure=True)
    for _ in range(3):
        assert same(training.step(ooc), expected)
    assert num_graphs() == compiled
    assert ooc.timeline is not None
    assert ooc.predicted is not None
    assert ooc.timeline.peak_bytes == ooc.predicted.peak_bytes <= budget_bytes
    assert ooc.timeline.actions == ooc.predicted.actions
    ooc.close()


def test_compiled_and_recorded_in_one_step() -> None:
    """What the compiler does for itself is not the step's."""
    training = residuals(2)
    model, before = whole(training), num_graphs()
    ooc = limit(model, "1GiB", measure=True)
    first = training.step(ooc)
    compiled = num_graphs()
    for _ in range(2):
        assert same(training.step(ooc), first)
    assert num_graphs() == compiled == before + 1
    assert ooc.kinds
    assert all(kind.num_left == 0 for kind in ooc.kinds.values())
    ooc.close()


def test_the_compiler_does_not_compile_us_where_it_leaves_a_model_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles nothing of a model that has no code but PyTorch's own, and what that calls has the compiler near."""
    like = residuals(1)
    training = Training(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), like.x, like.y)
    training.model.compile()
    expected, compiled = training.step(), list[str]()
    compile_frame = convert_frame._compile

    def note(code: CodeType, *args: Any, **kwargs: Any) -> Any:
        compiled.append(code.co_name)
        return compile_frame(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "_compile", note)
    ooc = limit(training.model, "1GiB", measure=True)
    for _ in range(3):
        assert same(training.step(ooc), expected)
    assert not compiled
    assert [kind.num_left for kind in ooc.kinds] == [0]
    ooc.close()


def trace_of(ooc: Limited) -> Trace:
    assert ooc.trace is not None
    return ooc.trace


def test_an_unknown_statement_is_kept_or_swapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(source: str, is_tensor: object) -> object:
        raise UnknownStatement("a statement of the future")

    monkeypatch.setattr(inductor, "read", read)
    training = residuals(2)
    model = whole(training)
    expected = training.step()
    with caplog.at_level(logging.INFO, "outcore"):
        ooc = limit(model, "1GiB", planner="swap-all")
        for _ in range(3):
            assert same(training.step(ooc), expected)
    told = [record.getMessage() for record in caplog.records if "runs as it is" in record.getMessage()]
    assert len(told) == 2  # the forward and the backward
    assert all("a statement of the future" in line for line in told)
    assert ooc.predicted is not None
    assert ooc.predicted.swapped_bytes > 0
    assert not any(op.name.startswith("cpp_fused") for op in trace_of(ooc).ops)
    ooc.close()


def test_a_budget_that_is_too_small_names_one_that_is_not() -> None:
    training = residuals(3)
    model = whole(training)
    expected = training.step()
    ooc = limit(model, "200KiB")
    training.step(ooc)
    with pytest.raises(BudgetTooSmall) as refused:
        training.step(ooc)
    ooc.close()
    ooc = limit(model, refused.value.needed_bytes, measure=True)
    for _ in range(3):
        assert same(training.step(ooc), expected)
    assert ooc.timeline is not None
    assert ooc.timeline.peak_bytes <= refused.value.needed_bytes
    ooc.close()
