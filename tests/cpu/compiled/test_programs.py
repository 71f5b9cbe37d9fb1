"""Programs of many kinds, compiled: in three budgets each, with the bits of the same program compiled in-core."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outcore.errors import BudgetTooSmall
from outcore.limit import limit
from tests.cpu.compiled.stubs import stub_kernels
from tests.cpu.compiled.training import Convolutions, Training, quick_compilation, residuals, same


def budgets(training: Training, before_bytes: int, in_core_bytes: int) -> tuple[int, int, int]:
    """Nearly what the step needs in-core, what it needs at least, and halfway."""
    ooc = limit(training.model, before_bytes + 1024)
    training.step(ooc)
    with pytest.raises(BudgetTooSmall) as refused:
        training.step(ooc)
    ooc.close()
    least_bytes = refused.value.needed_bytes
    assert least_bytes < 0.95 * in_core_bytes
    return int(0.98 * in_core_bytes), (least_bytes + in_core_bytes) // 2, least_bytes


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Stubs. `OUTCORE_REAL_KERNELS=1` takes what Inductor and a C++ compiler make, which takes minutes."""
    with quick_compilation() if os.environ.get("OUTCORE_REAL_KERNELS") else stub_kernels():
        yield


@torch.library.custom_op("outcore_tests::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _scaled_backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
    return scaled(gradient, ctx.factor), None  # type: ignore[attr-defined]


def _scaled_setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.factor = inputs[1]  # type: ignore[attr-defined]


scaled.register_autograd(_scaled_backward, setup_context=_scaled_setup)


@torch.library.custom_op("outcore_tests::count", mutates_args=("counts",))
def count(x: Tensor, counts: Tensor) -> None:
    counts += (x > 0).sum()


@count.register_fake
def _(x: Tensor, counts: Tensor) -> None:
    return None


class WithCustomOps(nn.Module):
    """An operator of the user's, and one that writes into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.register_buffer("counts", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(scaled(F.gelu(self.up(x)), 0.5))
        count(inner.detach(), self.counts)
        out: Tensor = x + torch.sigmoid(self.down(inner))
        return out


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class WithFunction(nn.Module):
    """A custom autograd function inside what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        square: Any = Square.apply
        out: Tensor = x + self.down(square(torch.tanh(self.up(x))))
        return out


def layers(kind: Callable[[], nn.Module], depth: int = 3) -> Training:
    like = residuals(1)
    return Training(nn.Sequential(*[kind() for _ in range(depth)]), like.x, like.y)


def custom_ops() -> Training:
    return layers(WithCustomOps)


def custom_functions() -> Training:
    return layers(WithFunction)


def channels_last() -> Training:
    torch.manual_seed(0)
    model = Convolutions(8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(8, 3, 16, 16).to(memory_format=torch.channels_last)
    return Training(model, x, torch.randint(0, 10, (8,)))


def autocast_and_norms() -> Training:
    torch.manual_seed(0)
    training = Training(Convolutions(8, 3), torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,)))
    inner = training.loss

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner()

    training.loss = loss  # type: ignore[method-assign]
    return training


class Language(nn.Module):
    """Tied weights and a loss over many classes, where the logits are the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 32)
        self.blocks = nn.Sequential(*residuals(2, width=32).model.children())

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = F.linear(self.blocks(self.table(tokens)), self.table.weight)
        return out


def language() -> Training:
    torch.manual_seed(0)
    tokens = torch.randint(0, 512, (256,))
    training = Training(Language(), tokens, tokens)

    def loss(tokens: Tensor) -> Tensor:
        return F.cross_entropy(training.model(tokens).float(), tokens)

    compiled = torch.compile(loss)
    training.loss = lambda: compiled(tokens)  # type: ignore[method-assign]
    return training


def hugging_face() -> Training:
    """GPT-2 with dropout, under autocast."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=512, n_positions=64)
    tokens = torch.randint(0, 512, (8, 64))
    training = Training(transformers.GPT2LMHeadModel(config).train(), tokens, tokens)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found: Tensor = training.model(input_ids=tokens, labels=tokens).loss
            return found

    training.loss = loss  # type: ignore[method-assign]
    return training


PROGRAMS = [custom_ops, custom_functions, channels_last, autocast_and_norms, language, hugging_face]


@pytest.mark.parametrize("program", PROGRAMS)
def test_bits_in_three_budgets(program: Callable[[], Training]) -> None:
    training = program()
    if program is not language:
        training.model.compile()
    expected = training.step()
    assert same(training.step(), expected), "the program does not repeat itself"
    ooc = limit(training.model, "1GiB", measure=True)
    for _ in range(3):
        assert same(training.step(ooc), expected)
    assert ooc.timeline is not None
    assert ooc.trace is not None
    assert any(op.name.startswith("cpp_fused") for op in ooc.trace.ops)
    before_bytes, in_core_bytes = ooc.trace.before_bytes, ooc.timeline.peak_bytes
    ooc.close()
    for budget_bytes in budgets(training, before_bytes, in_core_bytes):
        ooc = limit(training.model, budget_bytes, measure=True)
        for _ in range(3):
            assert same(training.step(ooc), expected)
        assert ooc.timeline is not None
        assert ooc.timeline.peak_bytes <= budget_bytes
        assert all(kind.num_left == 0 for kind in ooc.kinds.values())
        assert ooc.store.num_parcels == 0
        ooc.close()
