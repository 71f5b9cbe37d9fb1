"""Trains a small network plain and under a budget, step by step, and compares every bit of every gradient."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from outcore.errors import BudgetTooSmall
from outcore.limit import Limited, limit

PLANNERS = ("hybrid", "recompute-all", "swap-all", "keep-all")
Loss = Callable[[nn.Module, int], Tensor]


def data(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def steps_of(
    make: Callable[[], nn.Module], loss_of: Loss, ooc_of: Callable[[nn.Module], Limited] | None, num: int
) -> list[list[Tensor]]:
    """The bits of the loss and of all gradients and buffers of each step."""
    torch.manual_seed(0)
    model = make()
    ooc = ooc_of(model) if ooc_of is not None else None
    found = []
    try:
        for step in range(num):
            model.zero_grad()
            with ooc.step() if ooc is not None else nullcontext():
                loss = loss_of(model, step)
                loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found.append([bits(tensor) for tensor in (loss, *gradients, *model.buffers())])
    finally:
        if ooc is not None:
            ooc.close()
    del model, loss
    gc.collect()
    if ooc is not None:
        assert ooc.store.num_parcels == 0
    return found


def bits(tensor: Tensor) -> Tensor:
    """A copy that is equal to another only if every bit is: 0.0 equals -0.0, and no NaN equals any."""
    copy = tensor.detach().clone().contiguous()
    return copy.view(-1).view(torch.uint8) if copy.numel() and not copy.is_complex() else copy


def assert_same_steps(
    make: Callable[[], nn.Module],
    loss_of: Loss,
    *,
    planners: Iterable[str] = PLANNERS,
    shares: Iterable[float] = (1.0, 0.6),
    num_steps: int = 7,
) -> None:
    """Under every planner, with all memory it needs in-core and with less."""
    expected = steps_of(make, loss_of, None, num_steps)
    peak_bytes = in_core_bytes(make, loss_of)
    for planner in planners:
        for share in shares:
            got = _steps_in(make, loss_of, planner, int(peak_bytes * share), num_steps)
            differ = [
                step
                for step, (plain, ours) in enumerate(zip(expected, got, strict=True))
                if len(plain) != len(ours) or not all(torch.equal(a, b) for a, b in zip(plain, ours))
            ]
            assert not differ, f"{planner} at {share:.0%} of in-core: steps {differ} differ"


def _steps_in(
    make: Callable[[], nn.Module], loss_of: Loss, planner: str, memory_bytes: int, num: int
) -> list[list[Tensor]]:
    """In so much memory, or in the least in which it can be planned."""
    while True:
        ooc_of = partial(limit, memory=memory_bytes, planner=planner)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of steps that leave their plan each time
                return steps_of(make, loss_of, ooc_of, num)
        except BudgetTooSmall as error:
            memory_bytes = error.needed_bytes


def in_core_bytes(make: Callable[[], nn.Module], loss_of: Loss) -> int:
    torch.manual_seed(0)
    model = make()
    ooc = limit(model, "100%", planner="keep-all")
    for step in range(3):  # where a compiler is loaded, the first two may be of different kinds
        model.zero_grad()
        with ooc.step():
            loss_of(model, step).backward()
    peak_bytes = max(kind.plan.in_core_peak_bytes for kind in ooc.kinds.values() if kind.plan is not None)
    ooc.close()
    return peak_bytes
