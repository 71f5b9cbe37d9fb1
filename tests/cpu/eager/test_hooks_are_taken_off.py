"""What a step sets is taken off again, whatever was set before it, in it, or only halfway."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outcore.eager import intercept
from outcore.eager.intercept import Interception


class Deaf:
    """A listener that only passes on."""

    switches: Any = ()

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def write(self, func: Any, args: Any, kwargs: Any) -> None:
        pass

    def opened(self, storage: torch.UntypedStorage) -> None:
        pass

    def exposed(self, storage: torch.UntypedStorage) -> None:
        pass

    def replacing(self, tensor: Tensor) -> Any:
        return nothing

    def pack(self, tensor: Tensor) -> Any:
        return tensor

    def unpack(self, handle: Any) -> Tensor:
        return torch.as_tensor(handle)


def is_watched() -> bool:
    """Is anything of ours on: the dispatch keys, the doors?"""
    included = torch._C._dispatch_tls_is_dispatch_key_included
    return bool(included(intercept._OPS) or included(intercept._WRITES) or "data" in vars(torch.Tensor))


def top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def same(tensor: Tensor) -> Tensor:
    return tensor


def nothing() -> None:
    pass


def test_stopping_twice_takes_nothing_of_others() -> None:
    interception = Interception()
    with torch.autograd.graph.saved_tensors_hooks(same, same):
        interception.start(nothing)
        interception.listen(Deaf(), ops=True)
        assert is_watched()
        assert top_hooks()[0] == interception.hook
        for _ in range(2):
            interception.stop()
            assert not is_watched()
            assert top_hooks() == (same, same)
    assert top_hooks() is None


def test_what_was_entered_in_the_step_and_not_left_stays() -> None:
    interception = Interception()
    interception.start(nothing)
    interception.listen(Deaf(), ops=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(same, same)
    hooks.__enter__()
    interception.stop()
    assert not is_watched()
    assert top_hooks() == (same, same)
    hooks.__exit__()
    assert top_hooks() is None


def test_a_start_that_was_interrupted_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    interception = Interception()
    monkeypatch.setattr(intercept, "switches", interrupt)  # asked for in the second line of `start`
    with pytest.raises(KeyboardInterrupt):
        interception.start(nothing)
    interception.stop()
    assert top_hooks() is None
    assert not is_watched()
