"""The state that an optimizer keeps, read and written without running the updates that are due: KeptState."""

from __future__ import annotations

from typing import Any

from torch import nn

from outcore.state.optimizers import Optimizer
from outcore.state.watched import WatchedState


class KeptState:
    """`optimizer.state` as updates access it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_new: set[int] = set()  # ids of parameters that this step added

    def of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: Any = self._optimizer.state
        found = state.quiet(parameter) if isinstance(state, WatchedState) else state.get(parameter)
        return found if isinstance(found, dict) else {}

    def keep(self, parameter: nn.Parameter, state: dict[str, Any], made: dict[str, Any]) -> None:
        """Stores the state returned by an update in the optimizer's state."""
        if made is not state:
            state.clear()
            state.update(made)
        if state and parameter not in self._optimizer.state:
            kept: Any = self._optimizer.state
            kept[parameter] = state
            self._is_new.add(id(parameter))

    def put_in_order(self, *, is_whole: bool) -> None:
        """Restores the order of the groups among the entries that a step added, once none of its updates is due."""
        state: Any = self._optimizer.state
        if self._is_new and is_whole:
            groups = self._optimizer.param_groups
            parameters = [p for group in groups for p in group["params"] if id(p) in self._is_new]
            self._is_new.clear()
            for parameter in parameters:
                state[parameter] = state.pop(parameter)
