"""Operator -> how its gradients differ under a budget: a sweep over PyTorch's own database of operators and samples.

Each sample is one training step of one operator: its inputs are made inside the step, so that they can be swapped and
made again, and a weighted sum of its outputs is differentiated. The step runs twice in plain PyTorch, then is recorded
and planned under a limit. `python -m tests.fuzz.operators --jobs 2 --out operators.json` runs every sample.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import outcore
from outcore.eager import recorded_saves, unplanned
from tests.fuzz.explore import explore

PLANNERS = ("recompute-all", "swap-all")
NUM_STEPS = 3  # recorded, planned and measured, planned and not measured: fewer ops are seen there
NUM_REPEATS = 60  # of a sample that differs, in plain PyTorch
# Operators whose samples cannot be steps, each with the reason. None may stand here because outcore fails on it.
NO_STEP = {
    "empty_like": "its numbers are whatever lies in memory",
    "new_empty": "its numbers are whatever lies in memory",
    "new_empty_strided": "its numbers are whatever lies in memory",
    "empty": "its numbers are whatever lies in memory",
    "empty_strided": "its numbers are whatever lies in memory",
    "empty_permuted": "its numbers are whatever lies in memory",
}
Bits = list[bytes]


@lru_cache(maxsize=1)
def operators() -> dict[str, Any]:
    """The differentiable ones, by name."""
    with patch.object(torch.backends, "disable_global_flags"):  # forbids the whole process to set a switch
        from torch.testing._internal.common_methods_invocations import op_db

    chosen = [op for op in op_db if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")]
    names = [f"{op.name}.{op.variant_test_name}".rstrip(".") for op in chosen]
    return {name: op for name, op in zip(names, chosen, strict=True) if op.name not in NO_STEP}


class Sample(nn.Module):
    """One call of one operator, as a network."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))  # what a limit takes the device from

    def forward(self, leaves: Any, call: Callable[[Any], Any]) -> Tensor:
        inputs = tree_map(lambda item: item * self.scale if _is_differentiable(item) else item, leaves)
        outputs = [item for item in tree_flatten(call(inputs))[0] if _is_differentiable(item)]
        parts = [torch.view_as_real(item) if item.is_complex() else item for item in outputs]
        return torch.stack([(part * _weights(part)).sum().double() for part in parts]).sum()


def _is_differentiable(item: Any) -> bool:
    return isinstance(item, Tensor) and item.requires_grad


def _weights(like: Tensor) -> Tensor:
    """So that no gradient is lost in a sum of equal parts."""
    if like.layout is not torch.strided or like.is_nested:
        return torch.ones((), dtype=like.dtype)
    steps = torch.arange(like.numel(), dtype=torch.float32).sin() + 1.5
    return steps.reshape(like.shape).to(like.dtype)


def bits(tensor: Tensor) -> bytes:
    tensor = tensor.detach()
    if tensor.is_nested:
        return b"".join(bits(part) for part in tensor.unbind())
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    dense = dense.resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


class Steps:
    """One sample, run again and again from the same state."""

    def __init__(self, op: Any, sample: Any) -> None:
        self._tensors, self._spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        self._op = op

    def run(self, model: nn.Module, limited: Callable[[], AbstractContextManager[Any]]) -> Bits:
        leaves = [_copy(item) for item in self._tensors]
        model.zero_grad()
        torch.manual_seed(0)
        with limited():
            loss = model(leaves, self._call)
            loss.backward()
        gradients = [item.grad for item in leaves if _is_differentiable(item)]
        return [bits(loss), *(bits(gradient) if gradient is not None else b"none" for gradient in gradients)]

    def _call(self, leaves: list[Any]) -> Any:
        given, args, kwargs = torch.utils._pytree.tree_unflatten(leaves, self._spec)
        return self._op(given, *args, **kwargs)


def _copy(item: Any) -> Any:
    if not isinstance(item, Tensor):
        return item
    return item.detach().clone().requires_grad_(item.requires_grad)


@contextmanager
def everything_moves() -> Iterator[None]:
    """Samples are a few bytes long, and would be kept."""
    with patch.object(recorded_saves, "SMALL_BYTES", 1), patch.object(unplanned, "SMALL_BYTES", 1):
        yield


def check_operator(name: str, most_samples: int | None = None) -> dict[str, Any]:
    """What became of its samples, and the first few that differ."""
    op, counts, wrong = operators()[name], Counter[str](), list[str]()
    with warnings.catch_warnings(), everything_moves(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        limits = [stack.enter_context(outcore.limit(Sample(), "1GiB", planner=planner)) for planner in PLANNERS]
        samples = op.sample_inputs("cpu", torch.float32, requires_grad=True)
        for number, sample in enumerate(islice(samples, most_samples)):
            for planner, outcome in _check_sample(Steps(op, sample), limits):
                counts[outcome.partition(":")[0]] += 1
                if outcome.partition(":")[0] in ("differs", "raises"):
                    wrong.append(f"{name}, sample {number}, {planner}: {outcome}")
    return {"outcome": "wrong" if wrong else "same", "counts": dict(counts), "wrong": wrong[:5]}


def _check_sample(steps: Steps, limits: Sequence[outcore.Limited]) -> Iterator[tuple[str, str]]:
    model = Sample()
    try:
        expected = [steps.run(model, nullcontext) for _ in range(2)]
    except Exception:  # whatever plain PyTorch does not differentiate
        yield "plain", "plain fails"
        return
    if expected[0] != expected[1]:
        yield "plain", "plain differs"
        return
    for ooc in limits:
        outcome = _check_limited(steps, expected[0], ooc)
        yield ooc.planner, "plain differs" if outcome.startswith("differs") and _varies(steps) else outcome


def _varies(steps: Steps) -> bool:
    """Some libraries' results depend on where their memory lies: least squares' do, about every tenth time."""
    model, seen = Sample(), set()
    for number in range(NUM_REPEATS):
        held = [torch.full((7 * size + 3,), float(number)) for size in range(number)]
        seen.add(tuple(steps.run(model, nullcontext)))
        del held
    return len(seen) > 1


def _check_limited(steps: Steps, expected: Bits, ooc: outcore.Limited) -> str:
    before = ooc.stats()
    try:
        for number in range(NUM_STEPS):
            if number == NUM_STEPS - 1:
                for kind in ooc.kinds.values():
                    kind.stop_measuring()
            if steps.run(ooc.model, ooc.step) != expected:
                return f"differs: in step {number}"
    except Exception as error:
        return f"raises: {type(error).__name__}: {str(error)[:200]}"
    return "same" if ooc.stats()["planned"] > before["planned"] else "same, unplanned"


def summary_of(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total = Counter[str]()
    for answer in answers:
        total.update(answer.get("counts", {answer["outcome"]: 1}))
    wrong = [line for answer in answers for line in answer.get("wrong", [f"{answer['task']}: {answer['outcome']}"])]
    return {"operators": len(answers), "runs": dict(total), "wrong": wrong}


def names_of(chosen: Iterable[str]) -> list[str]:
    return [name for name in operators() if not chosen or name in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.operators", description=__doc__)
    parser.add_argument("names", nargs="*", help="operators; none: all of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("operators.json"))
    arguments = parser.parse_args()
    from tests.fuzz.operators import check_operator as work  # by a name that worker processes can import

    answers = explore(names_of(arguments.names), work, arguments.jobs, arguments.out, summary_of)
    for key, value in summary_of(answers).items():
        print(key, value, sep=": ")


if __name__ == "__main__":
    main()
