"""The arguments and the state of a model -> Call: what distinguishes kinds of steps before their first op."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from outcore.fitting.kinds import Scalars
from outcore.fitting.settings import FITTING
from outcore.memory.tensors import gradient_of
from outcore.planning.families.sizes import Sizes


@dataclass(frozen=True)
class Call:
    """The first forward of a step. Steps with the same `signature` differ at most in `scalars`: Python numbers and
    strings among the arguments, which may change the work and mostly do not."""

    inputs: tuple[torch.Tensor, ...]
    signature: Hashable
    scalars: Scalars = ()
    structure: Hashable = ()  # the signature without the sizes
    sizes: Sizes = ()  # every dimension of every input


def no_forward(name: str | None, *, seen_from_the_start: bool) -> Call:
    """Returns the call of a step in which a tensor is saved before the model is called, because parts of the model are
    used alone. Its first op is recorded only if ops are watched from the start, as in steps with compiled functions."""
    return Call((), _mark(name, seen_from_the_start))


def _mark(name: str | None, seen_from_the_start: bool) -> Hashable:
    return "no forward", name, seen_from_the_start


class Calls:
    """Reads the calls of one model."""

    def __init__(self, model: torch.nn.Module, device_type: str) -> None:
        self._model, self._device_type = model, device_type
        self._gradient_sets: set[bytes] = set()  # those that tell kinds of steps apart
        self.know_parameters()

    def know_parameters(self) -> None:
        """Collects the parameters once, because iterating over modules takes milliseconds. The references are weak, so
        parameters that the user replaces can be freed."""
        self._parameters = tuple(weakref.ref(parameter) for parameter in self._model.parameters())
        self.gradient_bytes = sum(
            parameter.nbytes
            for parameter in self._model.parameters()
            if parameter.requires_grad and not is_lazy(parameter)
        )

    def of(self, args: Any, kwargs: Any, name: str | None = None) -> Call:
        """Returns the call of a forward with these arguments. `name` is what the user calls such steps."""
        leaves = tree_leaves((args, kwargs))
        inputs = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        scalars = tuple(leaf for leaf in leaves if isinstance(leaf, bool | int | str | type(None)))
        structure = (
            name,
            tuple((tensor.dim(), tensor.dtype, tensor.requires_grad) for tensor in inputs),
            tuple(map(type, scalars)),
            self._model.training,
            torch.is_autocast_enabled(self._device_type) and torch.get_autocast_dtype(self._device_type),
            self._gradients(),
        )
        sizes = tuple(size for tensor in inputs for size in tensor.shape)
        return Call(inputs, (structure, sizes), scalars, structure, sizes)

    def of_parts(self, batch: Any, name: str | None, *, seen_from_the_start: bool) -> Call:
        """Returns the call of a step in which parts of the model are used alone. `batch` is what the user said the step
        works on, or None."""
        if batch is None:
            return no_forward(name, seen_from_the_start=seen_from_the_start)
        mark, call = _mark(name, seen_from_the_start), self.of((batch,), {})
        return replace(call, signature=(mark, call.signature), structure=(mark, call.structure))

    def _gradients(self) -> Hashable:
        """Returns which parameters have gradients: a backward adds to these and makes the others. Once there were many
        different sets of them, as where each batch asks for other experts, the new ones are not told apart."""
        if any(known() is None for known in self._parameters):
            self.know_parameters()
        parameters = (known() for known in self._parameters)
        have = bytes(parameter is not None and gradient_of(parameter) is not None for parameter in parameters)
        if not any(have):
            return False
        if len(self._gradient_sets) < FITTING.most_gradient_sets:
            self._gradient_sets.add(have)
        return have if have in self._gradient_sets else True
