"""What Inductor writes for a GPU, run without one: the text of a small network for an H200 (PyTorch 2.11), its kernels
shortened to what they load and store, on CPU memory with stubs for kernels.

The network has convolutions, batch normalisation, pooling, products and dropout. The texts were written by Inductor
itself on a machine without a GPU, with the device's properties given.
"""

from __future__ import annotations

import ast
import re
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.select_algorithm import extern_kernels

from outcore.compiled import graphs, inductor, kernel_text
from outcore.limit import Limited, limit
from outcore.planning.trace_index import index_of
from outcore.values import Budget, Plan
from tests.cpu.compiled.stubs import pretend
from tests.cpu.compiled.training import same

GOLDEN = Path(__file__).parents[2] / "golden"
TEXTS = {kind: (GOLDEN / f"compiled_cuda_{kind}.txt").read_text() for kind in ("forward", "backward")}
BATCH = "primals_3"


class Cuda:
    """The part of torch.cuda that the texts use."""

    def __init__(self) -> None:
        self._DeviceGuard = lambda index: nullcontext()
        self.set_device = lambda index: None


class Torch(ModuleType):
    cuda = Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Kernel:
    def __init__(self, name: str, roles: tuple[str, ...]) -> None:
        self.name, self.roles = name, roles

    def run(self, *args: Any, stream: int) -> None:
        pretend(self.name, self.roles, args)


def namespace(text: str) -> dict[str, Any]:
    guards: Any = torch._C._dynamo.guards
    names: dict[str, Any] = {
        "torch": Torch("torch"),
        "aten": torch.ops.aten,
        "extern_kernels": extern_kernels,
        "reinterpret_tensor": guards._reinterpret_tensor,
        "empty_strided_cuda": guards._empty_strided_cpu,
        "get_raw_stream": lambda index: 0,
        "assert_size_stride": lambda *args: None,
        "assert_alignment": lambda *args: None,
    }
    names |= {name: Kernel(name, kernel.roles) for name, kernel in kernel_text.kernels_of(text).items()}
    call = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == "call")
    call.args.args = call.args.args[-1:]  # without self
    exec(ast.unparse(call), names)
    return names


def inputs_of(text: str) -> dict[str, Tensor]:
    """As `get_args` of the text would make them."""
    made = {}
    pattern = r"^    (\w+) = rand_strided\(\((.*?)\), \((.*?)\), device='[^']*', dtype=torch\.(\w+)\)"
    for name, size, stride, dtype in re.findall(pattern, text, re.M):
        sizes, strides = ([int(part) for part in found.split(",") if part.strip()] for found in (size, stride))
        tensor = torch.empty_strided(sizes, strides, dtype=getattr(torch, dtype))
        made[name] = tensor.copy_(0.1 * torch.randn(sizes) if tensor.is_floating_point() else torch.zeros(sizes))
    return made


class CompiledGraph:
    """As much of Inductor's graph as we look at."""

    def __init__(self, kind: str, lasting: list[int]) -> None:
        self.source_code, self.names = TEXTS[kind], namespace(TEXTS[kind])
        self.current_callable: Any = self.names["call"]
        self.compiled_fn_runner = None
        self.fx_kwargs = {"is_backward": kind == "backward", "static_input_idxs": lasting}
        self.device_types = {"cuda"}
        self.inputs_to_check = self.mutated_input_idxs = ()

    def __call__(self, inputs: list[Any]) -> Any:
        graphs._on_call(self, inputs)  # type: ignore[arg-type]
        return self.current_callable(inputs)


class Model(nn.Module):
    """The two texts behind an autograd function, as AOTAutograd puts them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        given = inputs_of(TEXTS["forward"])
        self.place = list(given).index(BATCH)
        self.x = given.pop(BATCH)
        self.parts = nn.ParameterList(nn.Parameter(t, requires_grad=t.is_floating_point()) for t in given.values())
        lasting = [place for place in range(len(given) + 1) if place != self.place]
        first, second = CompiledGraph("forward", lasting), CompiledGraph("backward", [])
        num_saved = sum(not name.startswith("tangents") for name in inputs_of(TEXTS["backward"]))

        class CompiledFunction(torch.autograd.Function):
            compiled_fw = first
            maybe_subclass_metadata = None
            metadata: Any = SimpleNamespace(
                tokens={}, is_rng_op_functionalized=False, tensors_saved_for_backwards_slice=slice(-num_saved, None)
            )

            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                outputs = first(list(args))
                ctx.save_for_backward(*outputs[-num_saved:])
                return outputs[0]

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                return tuple(second([*ctx.saved_tensors, *gradients]))

        self.function: Any = CompiledFunction

    def forward(self, x: Tensor) -> Any:
        parts = list(self.parts)
        return self.function.apply(*parts[: self.place], x, *parts[self.place :])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(inductor, "namespace_of", lambda graph: graph.names)
    return Model()


def step(model: Model, start: dict[str, Tensor], ooc: Limited | None = None) -> list[Tensor]:
    model.load_state_dict(start)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with ooc.step() if ooc is not None else nullcontext():
        loss = model(model.x).square().mean()
        loss.backward()
    gradients = [part.grad.clone() for part in model.parameters() if part.grad is not None]
    return [loss.detach(), *gradients, *(part.detach().clone() for part in model.parameters())]


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_every_statement_is_known(kind: str) -> None:
    program = inductor.read(TEXTS[kind], [True] * len(inputs_of(TEXTS[kind])))
    assert len(program.launches) >= 10
    assert program.guard == "torch.cuda._DeviceGuard(0)"
    assert list(program.streams) == ["stream0"]


@pytest.mark.parametrize("decisions", ["keep", "swap", "recompute", "remake", "swap recompute keep remake"])
def test_any_decision_gives_the_same_bits(model: Model, decisions: str) -> None:
    start = {name: value.clone() for name, value in model.state_dict().items()}
    expected = step(model, start)
    assert same(step(model, start), expected)
    ooc = limit(model, "1GiB")
    assert same(step(model, start, ooc), expected)
    assert ooc.trace is not None
    trace, index = ooc.trace, index_of(ooc.trace)
    ooc.close()
    assert sum(op.name.startswith("triton") for op in trace.ops) >= 8
    assert all(index.recomputable[value] for value in index.evictable)
    kinds = decisions.split()
    chosen: Any = {value: kinds[at % len(kinds)] for at, value in enumerate(index.evictable)}
    plan = Plan(trace.fingerprint, "given", Budget(1 << 40, 0, 1 << 40), chosen, trace.before_bytes)
    ooc = limit(model, "1GiB", plan=plan, measure=True)
    for _ in range(3):
        assert same(step(model, start, ooc), expected)
    assert ooc.timeline is not None
    assert ooc.predicted is not None
    assert ooc.timeline.actions == ooc.predicted.actions
    assert ooc.timeline.peak_bytes <= ooc.predicted.peak_bytes
    ooc.close()
