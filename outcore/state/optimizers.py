"""Finds out how an optimizer's step may be divided without changing a bit, and steps some of its parameters.

Stepping parameter by parameter is bitwise equal to one step over all of them if the optimizer treats each parameter
independently and changes nothing that the next one reads, neither its groups nor a random generator. This is not
derived from the optimizer's name but tested: small parameters are stepped three times, together and one by one, and all
bits of weights, state and groups are compared. Spans of one parameter are stepped separately only for torch's own
elementwise optimizers, and only if that gave the same bits too.

The user's own implementation runs: a `Substep` has an object of the user's class with the same settings, the groups as
they were when `optimizer.step()` was called, and only the parameters of one part.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _default_to_fused_or_foreach  # chooses an optimizer's implementation by default

from outcore.state.settings import STATE

Optimizer = torch.optim.Optimizer

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
)
_HOOKS = "_optimizer_"  # prefix of the names of the dictionaries of hooks


@dataclass(frozen=True)
class Splitting:
    """How the step of an optimizer may be divided."""

    by_parameter: bool
    by_element: bool = False
    later: bool = False  # may run after `step()` has returned, as it changes neither groups nor optimizer
    keeps_gradients: bool = False  # does not write into gradients
    state_dtypes: tuple[torch.dtype | None, ...] = ()  # of its state per element; None: the parameter's dtype
    because: str = ""  # the reason why it may not be divided

    def state_bytes(self, parameter: torch.Tensor) -> int:
        """Returns the bytes of a parameter's future optimizer state, without small tensors."""
        return sum(parameter.numel() * (dtype or parameter.dtype).itemsize for dtype in self.state_dtypes)


def unwrapped(optimizer: Any) -> Optimizer:
    """Returns the optimizer inside a wrapper (Accelerate's)."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    found: Optimizer = optimizer
    return found


class Substep:
    """A recorded call of an optimizer's step, which can be run for some parameters at a time."""

    device: torch.device | None = None  # where it runs; None: where the parameters are

    def __init__(self, optimizer: Optimizer, *, deep: bool = False) -> None:
        rest = _rest(optimizer)
        self.twin: Any = object.__new__(type(optimizer))
        self.twin.__dict__.update(copy.deepcopy(rest) if deep else {name: _as_now(v) for name, v in rest.items()})
        self.twin.__dict__.update({name: OrderedDict() for name in optimizer.__dict__ if name.startswith(_HOOKS)})
        self.groups = [_settings(group) for group in optimizer.param_groups]
        self.rest = _rest(self.twin)  # before it runs, because a run may change attributes of the twin
        self.left: dict[int, dict[str, Any]] = {}  # group -> its settings after the last part

    def run(self, parts: Iterable[tuple[int, nn.Parameter, dict[str, Any]]]) -> list[dict[str, Any]]:
        """Steps parameters with gradients, each with its group's number and its state; returns their new state."""
        parts = list(parts)
        groups: dict[int, list[nn.Parameter]] = {}
        state: defaultdict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
        for group, parameter, known in parts:
            groups.setdefault(group, []).append(parameter)
            if known:
                state[parameter] = known
        self.twin.state = state
        self.twin.param_groups = [
            {"params": parameters, **{name: _as_now(setting) for name, setting in self.groups[group].items()}}
            for group, parameters in sorted(groups.items())
        ]
        bare_step(type(self.twin))(self.twin)
        for number, group in zip(sorted(groups), self.twin.param_groups):
            self.left[number] = {name: setting for name, setting in group.items() if name != "params"}
        self.twin.state, self.twin.param_groups = defaultdict(dict), []
        return [state[parameter] for _, parameter, _ in parts]


def foreseen(optimizer: Optimizer, last: Substep) -> Substep:
    """Returns the expected next call of `step()` with the present settings. Its implementation depends on which
    parameters will have gradients, so that of the last call is assumed."""
    found = Substep(optimizer)
    for group, now, before in zip(optimizer.param_groups, found.groups, last.groups):
        if "foreach" in group:
            now["foreach"] = group["foreach"] if group.get("fused") else before.get("foreach")
    return found


def same_settings(one: Substep, other: Substep) -> bool:
    """Whether two calls of `step()` do the same."""
    return _same([one.groups, one.rest], [other.groups, other.rest])


def bare_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Returns the class's own step, without the hooks that every call of `step()` runs."""
    step: Any = kind.step
    bare: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return bare


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a group's present settings without its parameters. The implementation chosen for all of its parameters is
    fixed, because it depends on their types, and a part might choose another one."""
    settings = {name: _as_now(setting) for name, setting in group.items() if name != "params"}
    unsaid = settings.get("foreach", False) is None and settings.get("fused") is None
    if unsaid and not settings.get("differentiable", False):
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not _default_to_fused_or_foreach(parameters, False, use_fused=False)[1]:
            settings["foreach"] = False
    return settings


def _as_now(setting: Any) -> Any:
    """Copies a setting, so that later changes do not affect it: schedulers and scalers write into tensors."""
    if isinstance(setting, torch.Tensor) and not isinstance(setting, nn.Parameter) and setting.numel() <= 1:
        return setting.detach().clone()
    return copy.copy(setting) if isinstance(setting, list | dict) else setting


# -- what may be divided -----------------------------------------------------------------------------------------------


def splitting_of(optimizer: Optimizer) -> Splitting:
    """Returns how the step of this optimizer, with these groups, may be divided. Draws no random numbers."""
    name = type(optimizer).__name__
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return Splitting(False, because=f"{name} is differentiable")
    try:
        whole, by_parameter = _tried(optimizer, _together), _tried(optimizer, _one_by_one)
    except Exception as error:
        return Splitting(False, because=f"{name}.step() cannot be tried on a few parameters ({error})")
    if whole.drew_random:
        return Splitting(False, because=f"{name}.step() draws random numbers")
    if whole.changed_itself and not type(optimizer).__module__.startswith(
        "torch.optim."
    ):  # those note what they checked
        return Splitting(False, because=f"{name}.step() changes more than weights, state and groups")
    if not whole.is_same(by_parameter):
        return Splitting(False, because=f"{name}.step() depends on which parameters are stepped together")
    by_element = type(optimizer) in ELEMENTWISE and whole.is_same(_tried(optimizer, _in_spans))
    keeps_gradients = not by_parameter.changed_gradients
    return Splitting(True, by_element, not whole.changed_groups, keeps_gradients, whole.state_dtypes)


@dataclass
class _Trial:
    """The results of a few steps of small parameters."""

    parameters: list[nn.Parameter]
    states: list[dict[str, Any]]
    settings: list[dict[str, Any]]
    changed_groups: bool
    changed_itself: bool  # other attributes of the optimizer than state and groups
    drew_random: bool
    changed_gradients: bool

    def is_same(self, other: _Trial) -> bool:
        return _same([self.parameters, self.states, self.settings], [other.parameters, other.states, other.settings])

    @property
    def state_dtypes(self) -> tuple[torch.dtype | None, ...]:
        """The dtypes of the parameter with the most state."""
        found = [
            tuple(
                None if kept.dtype == parameter.dtype else kept.dtype
                for kept in state.values()
                if isinstance(kept, torch.Tensor) and kept.numel() == parameter.numel()
            )
            for parameter, state in zip(self.parameters, self.states)
        ]
        return max(found, key=len, default=())


_Step = Callable[["_Rehearsal"], None]


class _Rehearsal:
    """Small parameters in groups like the optimizer's, to test its step."""

    def __init__(self, optimizer: Optimizer, substep: Substep) -> None:
        self.substep = substep
        self.parts: list[tuple[int, nn.Parameter]] = []
        self.states: list[dict[str, Any]] = []
        self.changed_gradients = False
        for number, group in enumerate(optimizer.param_groups):
            examples = {(len(parameter.shape), parameter.dtype): parameter for parameter in group["params"]}
            for example in list(examples.values())[: STATE.num_examples]:
                for scale in STATE.tried_scales:
                    numbers = _numbers(STATE.tried_sides[: example.dim()], scale)
                    small = nn.Parameter(numbers.to(substep.device or example.device, example.dtype))
                    self.parts.append((number, small))
                    self.states.append(_like(optimizer.state.get(example) or {}, example, small))

    def give_gradients(self, step: int) -> None:
        for at, (_, parameter) in enumerate(self.parts):
            parameter.grad = _numbers(
                parameter.shape, STATE.gradient_scale * (at + 1) * (step - STATE.num_tried_steps / 2)
            ).to(parameter)

    def run(self, chosen: Sequence[int]) -> None:
        before = [_copy_of(self.parts[at][1].grad) for at in chosen]
        done = self.substep.run([(*self.parts[at], self.states[at]) for at in chosen])
        self.changed_gradients |= not _same(before, [self.parts[at][1].grad for at in chosen])
        for at, state in zip(chosen, done):
            self.states[at] = state


def _like(state: dict[str, Any], example: torch.Tensor, small: torch.Tensor) -> dict[str, Any]:
    """Returns state for a small parameter like that of an example; some optimizers create it before their first
    step."""
    found: dict[str, Any] = {}
    for name, kept in state.items():
        if not isinstance(kept, torch.Tensor) or kept.numel() == 1:
            found[name] = copy.deepcopy(kept)
        elif kept.shape == example.shape:
            found[name] = kept.flatten()[:1].to(small.device).expand(small.numel()).reshape(small.shape).clone()
        else:
            return {}
    return found


def try_out(optimizer: Optimizer, substep: Substep) -> None:
    """Raises what `substep` raises when it runs for small parameters like the optimizer's. `substep` is a deep one."""
    _tried(optimizer, _together, substep)


def _tried(optimizer: Optimizer, step: _Step, substep: Substep | None = None) -> _Trial:
    generators = _generators()
    with torch.no_grad():
        substep = Substep(optimizer, deep=True) if substep is None else substep
        rehearsal = _Rehearsal(optimizer, substep)
        rest, groups = copy.deepcopy(_rest(substep.twin)), copy.deepcopy(substep.groups)
        try:
            for number in range(STATE.num_tried_steps):
                rehearsal.give_gradients(number)
                step(rehearsal)
                for at, settings in substep.left.items():  # the settings of the next step
                    substep.groups[at] = settings
        finally:
            drew_random = not _same(generators, _generators())
            _set_generators(generators)
    return _Trial(
        [parameter for _, parameter in rehearsal.parts],
        rehearsal.states,
        substep.groups,
        changed_groups=not _same(groups, substep.groups),
        changed_itself=not _same(rest, _rest(substep.twin)),
        drew_random=drew_random,
        changed_gradients=rehearsal.changed_gradients,
    )


def _together(rehearsal: _Rehearsal) -> None:
    rehearsal.run(range(len(rehearsal.parts)))


def _one_by_one(rehearsal: _Rehearsal) -> None:
    for at in reversed(range(len(rehearsal.parts))):
        rehearsal.run([at])


def _in_spans(rehearsal: _Rehearsal) -> None:
    """Steps each parameter in two spans of unequal length."""
    for at, (group, parameter) in enumerate(rehearsal.parts):
        cut = (2 * parameter.numel() + 2) // 3
        states = []
        for span in (slice(0, cut), slice(cut, None)):
            part = nn.Parameter(parameter.data.view(-1)[span])
            assert parameter.grad is not None
            part.grad = parameter.grad.view(-1)[span]
            if part.numel():
                known = {name: _span_of(kept, parameter, span) for name, kept in rehearsal.states[at].items()}
                states += rehearsal.substep.run([(group, part, known)])
        rehearsal.states[at] = {name: _joined(parameter, [s[name] for s in states]) for name in states[0]}


def _span_of(kept: Any, parameter: torch.Tensor, span: slice) -> Any:
    if isinstance(kept, torch.Tensor):
        return kept.view(-1)[span] if kept.shape == parameter.shape and kept.dim() else kept.clone()
    return copy.copy(kept)


def _joined(parameter: torch.Tensor, parts: list[Any]) -> Any:
    if isinstance(parts[0], torch.Tensor) and sum(part.numel() for part in parts) == parameter.numel():
        return torch.cat([part.reshape(-1) for part in parts]).view(parameter.shape)
    return parts[-1]


def _rest(optimizer: Any) -> dict[str, Any]:
    """Returns the attributes of an optimizer other than its state, its groups and its hooks."""
    own = ("state", "param_groups", "step")
    return {name: v for name, v in optimizer.__dict__.items() if name not in own and not name.startswith(_HOOKS)}


def _copy_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def _numbers(shape: Sequence[int], scale: float) -> torch.Tensor:
    count = 1
    for side in shape:
        count *= side
    return (torch.arange(1, count + 1, dtype=torch.float64) * STATE.number_step).sin().mul(scale).reshape(tuple(shape))


def _generators() -> list[Any]:
    states: list[Any] = [torch.get_rng_state(), random.getstate()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states


def _set_generators(states: list[Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if len(states) > 2:
        torch.cuda.set_rng_state_all(states[2:])


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one.detach().reshape(-1).view(torch.uint8), other.detach().reshape(-1).view(torch.uint8))
        )
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one is other or one == other)
