"""Records a step on fake tensors, without computing or allocating anything.

The model's parameters and buffers are replaced by fake ones while its step runs, and are restored afterwards: weights,
gradients and random state of the real model do not change. The model may also be on `meta`, without any weights.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from outcore.eager.fake_recorder import FakeRecorder, fake_on
from outcore.eager.known_contents import content_of, know_content
from outcore.errors import OutcoreError
from outcore.estimating.as_on_cuda import as_on_cuda, cuda_is_cpu
from outcore.estimating.op_costs import seconds_of_ops
from outcore.estimating.settings import OPTIMIZERS
from outcore.planning.settings import ALLOCATOR
from outcore.values import Machine, OpRates, Trace

Step = Callable[[], Any]
OptimizerLike = torch.optim.Optimizer | type[torch.optim.Optimizer] | str | None


@dataclass(frozen=True)
class Recorded:
    """The trace of a step, and the bytes of the tensors that exist before it."""

    trace: Trace
    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    input_bytes: int


def record_fake(
    model: torch.nn.Module, batch_or_step: Any, optimizer: OptimizerLike, machine: Machine, rates: OpRates
) -> Recorded:
    """Runs one step on fake tensors and returns its trace and sizes."""
    is_cuda, device = machine.device.startswith("cuda"), _device_to_play(model)
    grain_bytes = ALLOCATOR.round_bytes if is_cuda else 1
    mode = _mode_of(model)
    seconds = seconds_of_ops(machine, rates)
    recorder = FakeRecorder(model, mode, device, seconds, grain_bytes=grain_bytes, is_cuda=is_cuda)
    with mode, faked(model, mode, device), contents_are_asked(), cuda_is_cpu(), _as_on(machine, device):
        step = batch_or_step if _is_step(batch_or_step) else step_on(model, faked_batch(batch_or_step, mode, device))
        recorder.know(model)
        with recorder:
            _run(step)
    parameters = _unique(model.parameters())
    sizes = {
        "parameter_bytes": sum(map(_num_bytes, parameters)),
        "gradient_bytes": sum(_num_bytes(parameter) for parameter in parameters if parameter.requires_grad),
        "buffer_bytes": sum(map(_num_bytes, _unique(model.buffers()))),
        "optimizer_bytes": optimizer_bytes(optimizer, parameters),
    }
    model_bytes = sizes["parameter_bytes"] + sizes["buffer_bytes"]
    input_bytes = recorder.input_bytes()
    before_bytes = model_bytes + sizes["optimizer_bytes"] + input_bytes
    trace = recorder.finish(before_bytes, device=machine.device, name=type(model).__name__)
    if not any(tick.kind == "unpack" for tick in trace.ticks):
        raise OutcoreError("the step ran no backward pass; call the model and then backward() on its loss in it")
    return Recorded(trace, input_bytes=input_bytes, **sizes)


def _mode_of(model: torch.nn.Module) -> FakeTensorMode:
    """Returns the mode of a model's fake tensors, or a new one. Fake tensors of two modes cannot be mixed."""
    fakes = (parameter for parameter in model.parameters() if isinstance(parameter, FakeTensor))
    known = next(fakes, None)
    return known.fake_mode if known is not None else FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def without_memory() -> Iterator[None]:
    """A context in which a model is made of fake tensors, which take no memory and have no content."""
    with FakeTensorMode(allow_non_fake_inputs=True), _fake_modules_move(), _initial_values_unread(), cuda_is_cpu():
        yield


@contextmanager
def _fake_modules_move() -> Iterator[None]:
    """Makes `model.to(device)` replace fake parameters: swapping the contents of fake tensors is not supported."""
    own = torch.nn.Module._apply

    def apply(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            child._apply(fn)
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and (moved := fn(parameter)) is not parameter:
                module._parameters[name] = torch.nn.Parameter(moved.detach(), requires_grad=parameter.requires_grad)
        for name, buffer in list(module._buffers.items()):
            module._buffers[name] = None if buffer is None else fn(buffer)
        return module

    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = own  # type: ignore[method-assign]


def _initial_values_unread() -> AbstractContextManager[Any]:
    """Skips `trunc_normal_`, which redraws values out of bounds and would need the tensor's content."""
    return patch.object(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor)


@contextmanager
def contents_are_asked() -> Iterator[None]:
    """Lets Transformers read the contents of fake tensors that are known.

    It takes fake tensors for those of a tracer, whose contents must not be read, and makes masks that no training step
    has.
    """
    utilities: Any = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(utilities, "is_fake_tensor"):
        yield
        return
    with patch.object(utilities, "is_fake_tensor", lambda x: isinstance(x, FakeTensor) and content_of(x) is None):
        yield


def _as_on(machine: Machine, device: torch.device) -> AbstractContextManager[None]:
    return as_on_cuda() if machine.device.startswith("cuda") and device.type == "cpu" else nullcontext()


def _device_to_play(model: torch.nn.Module) -> torch.device:
    """Returns the device of the fake tensors, by which PyTorch chooses its kernels."""
    tensor = next(iter(model.parameters()), None)
    if tensor is None:
        raise OutcoreError("this model has no parameters; give one that has")
    on_gpu = torch.cuda.is_available() and tensor.device.type in ("cuda", "meta")
    return torch.device("cuda", tensor.device.index or 0) if on_gpu else torch.device("cpu")


def _is_step(batch_or_step: Any) -> bool:
    return callable(batch_or_step) and not isinstance(batch_or_step, torch.Tensor | Mapping)


def _run(step: Step) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # it also logs a traceback of exceptions
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        step()
    except DataDependentOutputException as error:
        raise OutcoreError(
            f"the step reads the content of a tensor ({error.func}), and an estimate has no contents; move that out "
            "of the step (a loss.item() for the log, say), or record the step instead: outcore record"
        ) from None
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        said = str(error).strip().partition("\n")[0]
        raise OutcoreError(
            f"the step does not run on tensors without content ({type(error).__name__}: {said}); check that it runs at "
            "all, or record it instead: outcore record"
        ) from error
    finally:
        logger.setLevel(level)


# -- the model and the batch -------------------------------------------------------------------------------------------


@contextmanager
def faked(model: torch.nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Replaces the parameters and buffers of the model by fake ones for a while. A shared tensor stays shared."""
    made: dict[int, torch.Tensor] = {}
    before: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
    try:
        for module in model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                before.append((module, name, tensor))
                if id(tensor) not in made:
                    made[id(tensor)] = _fake_of(tensor, mode, device)
                setattr(module, name, made[id(tensor)])
        yield
    finally:
        for module, name, tensor in before:
            setattr(module, name, tensor)


def _fake_of(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    if torch.nn.parameter.is_lazy(tensor):
        raise OutcoreError("a lazy module has no shapes yet; call the model once before it is estimated")
    fake = fake_on(mode, tensor, device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def faked_batch(batch: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    def faked_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        fake = fake_on(mode, leaf, device)
        know_content(fake, leaf)
        return fake

    return tree_map(faked_leaf, batch)


def step_on(model: torch.nn.Module, batch: Any) -> Step:
    """Returns a step with forward and backward of a batch: `model(**batch)`, `model(*batch)` or `model(batch)`. The
    loss is the model's `loss` output, or else the sum of its first output."""
    by_name = dict(batch) if isinstance(batch, Mapping) else {}
    by_position = () if by_name else tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    try:
        inspect.signature(model.forward).bind(*by_position, **by_name)
    except TypeError as error:
        given = (
            f"the names {', '.join(by_name)}"
            if by_name
            else f"{len(by_position)} argument{'s' * (len(by_position) != 1)}"
        )
        raise OutcoreError(
            f"{type(model).__name__} was called with {given}, because that is in the batch, and does not take them "
            f"({error}); give what the model takes, or a step: lambda: loss_fn(model(x), y).backward()"
        ) from None

    def step() -> None:
        returned = model(*by_position, **by_name)  # as in most loops, what the model returned lives during the backward
        loss_in(returned).backward()

    return step


def loss_in(returned: Any) -> torch.Tensor:
    loss = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not tensors:
        raise OutcoreError("what the model returns has no gradient; put it into training, or give a step instead")
    return tensors[0].sum()


# -- the optimizer -----------------------------------------------------------------------------------------------------


def optimizer_bytes(optimizer: OptimizerLike, parameters: Sequence[torch.nn.Parameter]) -> int:
    """Returns the bytes of the optimizer's state, found by one step of such an optimizer on `meta`."""
    optimizer = _named(optimizer) if isinstance(optimizer, str) else optimizer
    if optimizer is None:
        return 0
    if not isinstance(optimizer, torch.optim.Optimizer | type):
        raise OutcoreError(
            f"optimizer={optimizer!r} is no optimizer; give one of the model, its class, or one of the names "
            f"{', '.join(OPTIMIZERS)}"
        )
    if isinstance(optimizer, type):
        kind: Any = optimizer
        groups = [{"params": [parameter for parameter in parameters if parameter.requires_grad]}]
    else:
        kind = type(optimizer)
        groups = [dict(group) for group in optimizer.param_groups]
    for group in groups:
        group["params"] = [_with_gradient_on_meta(parameter) for parameter in group["params"]]
    try:
        twin = kind(groups) if isinstance(optimizer, type) else _twin(optimizer, groups)
        twin.step()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise OutcoreError(
            f"the state of {kind.__name__} cannot be determined without running it ({error}); leave the optimizer out "
            "and add its state to the memory by hand"
        ) from None
    state = [leaf for kept in twin.state.values() for leaf in tree_leaves(dict(kept))]
    return sum(_num_bytes(leaf) for leaf in state if isinstance(leaf, torch.Tensor))


def _named(name: str) -> type[torch.optim.Optimizer] | None:
    if name.lower() not in OPTIMIZERS:
        raise OutcoreError(f"there is no optimizer {name!r} here; give its class, or one of {', '.join(OPTIMIZERS)}")
    found: type[torch.optim.Optimizer] | None = getattr(torch.optim, OPTIMIZERS[name.lower()], None)
    return found


def _twin(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Copies an optimizer with other parameters. Its constructor, whose arguments are unknown, is not called."""
    twin = copy.copy(optimizer)
    twin.state, twin.param_groups = type(optimizer.state)(optimizer.state.default_factory), groups
    return twin


def _with_gradient_on_meta(parameter: torch.Tensor) -> torch.nn.Parameter:
    empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    twin = torch.nn.Parameter(empty, requires_grad=True)
    twin.grad = torch.empty_like(empty) if parameter.requires_grad else None
    return twin


def _unique(tensors: Iterator[Any]) -> list[Any]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
