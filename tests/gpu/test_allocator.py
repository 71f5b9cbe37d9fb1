"""On CUDA: what is done for the allocator changes no number, also where the host is far ahead of the device."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outcore.errors import BudgetTooSmall
from outcore.fitting import preparing
from outcore.fitting.headroom import Headroom, Trouble
from outcore.limit import Limited, limit
from outcore.memory import cuda_allocator as allocator
from outcore.memory.clock import Clock
from outcore.memory.device import CudaMemory
from outcore.memory.pinning import pin
from outcore.planning.allocator import fragmentation, placeholders
from outcore.planning.settings import FRAGMENTATION
from outcore.units import MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
]
NUM_STEPS = 16


@pytest.fixture(autouse=True)
def _fragmented(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From the first plan on as if the allocator had had to start over; bits that repeat, and NaNs in fresh memory."""
    monkeypatch.setattr(preparing, "Headroom", functools.partial(Headroom, trouble=Trouble.STARTED_OVER))
    monkeypatch.setattr(fragmentation, "FRAGMENTATION", replace(FRAGMENTATION, most_s=0.3))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def network() -> tuple[nn.Module, Tensor, Tensor]:
    """Many activations of 8 MiB, and a loss that asks for 64 MiB several times."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(24)]
    model = nn.Sequential(*layers, nn.Linear(1024, 4096)).cuda()
    return model, torch.randn(4096, 1024, device="cuda"), torch.randint(0, 4096, (4096,), device="cuda")


def train(memory: int | None, num_steps: int = NUM_STEPS) -> tuple[list[Tensor], Limited | None]:
    """Gradients after some steps, and what held the budget."""
    model, x, y = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ooc = limit(model, memory) if memory else None
    for _ in range(num_steps):
        optimizer.zero_grad()
        torch.cuda._sleep(50_000_000)  # the host is ahead: what it gives back is still in use
        with ooc.step() if ooc is not None else torch.enable_grad():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
        optimizer.step()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], ooc


def tight_bytes() -> int:
    """A little more than the least."""
    with pytest.raises(BudgetTooSmall) as caught:
        train(1, 2)
    needed_bytes: int = caught.value.needed_bytes
    del caught
    gc.collect()  # what the failed run held would count as somebody else's
    return int(1.15 * needed_bytes)


def num_pooled(tensors: list[Tensor]) -> int:
    """How many of them lie in blocks of another stream."""
    streams = {
        block["address"]: segment["stream"] for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]
    }
    return sum(streams[tensor.untyped_storage().data_ptr()] != 0 for tensor in tensors)


def assert_same(expected: list[Tensor], got: list[Tensor]) -> None:
    assert len(expected) == len(got)
    for one, other in zip(expected, got):
        assert torch.equal(one, other)


def test_pooled_gradients_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placeholders, "best_share", lambda *asked: None)
    expected, _ = train(None)
    got, ooc = train(tight_bytes())
    assert num_pooled(got) > 0
    check(ooc, expected, got)


def test_places_kept_change_no_number_and_take_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placeholders, "best_share", lambda *asked: 0.1)
    expected, _ = train(None)
    got, ooc = train(tight_bytes())
    assert ooc is not None
    ready = next(iter(ooc.kinds)).phase.ready
    assert ready is not None
    assert len(ready.program.placeholders) > 10
    assert ooc.timeline is not None
    assert ooc.predicted is not None
    assert ooc.timeline.peak_bytes <= ooc.predicted.peak_bytes + 4 * MIB
    check(ooc, expected, got)


def test_a_block_goes_where_its_place_was_kept() -> None:
    """What placeholders count on: of PyTorch's allocator, with segments that grow."""
    gc.collect()
    torch.cuda.empty_cache()
    device, sizes = torch.device("cuda", 0), [(30 + 7 * (at % 5)) * MIB for at in range(12)]
    allocator.make_ready(device)
    places = [torch.UntypedStorage(size, device=device) for size in sizes]
    addresses, made = [place.data_ptr() for place in places], []
    for at, size in enumerate(sizes):
        passing = [torch.empty((17 + 11 * at) * MIB, dtype=torch.uint8, device=device) for _ in range(3)]
        places[at] = torch.UntypedStorage(0)
        del passing[1]  # a hole elsewhere, of another size
        made.append(torch.empty(size, dtype=torch.uint8, device=device))
        del passing
    assert [one.data_ptr() for one in made] == addresses


def check(ooc: Limited | None, expected: list[Tensor], got: list[Tensor]) -> None:
    assert ooc is not None
    assert ooc.predicted is not None
    assert ooc.timeline is not None
    assert ooc.predicted.swapped_bytes + ooc.predicted.recomputed_bytes > 0
    assert ooc.timeline.peak_bytes <= ooc.budget.device_bytes
    assert_same(expected, got)
    ooc.close()


def test_memory_pinned_by_a_run_nobody_closed_is_let_go() -> None:
    """Or the next run finds its host memory taken, and every kernel after that stumbles over the refusal."""
    for _ in range(3):
        tight_bytes()
    train(tight_bytes(), 2)
    torch.cuda.synchronize()


def test_memory_that_is_pinned_already_is_refused_without_a_trace() -> None:
    host = torch.zeros(1 << 20, dtype=torch.uint8).pin_memory()
    assert not pin(host.data_ptr(), host.nbytes)
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.fixture
def _capped() -> Iterator[None]:
    gc.collect()  # what earlier tests left would count as somebody else's
    torch.cuda.set_per_process_memory_fraction(0.2)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


class Asking(nn.Module):
    """A step in which something asks for more than there is and goes on without: what cuDNN does for its workspaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)))
        self.num_bytes = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.num_bytes:
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.UntypedStorage(self.num_bytes, device="cuda")
        return torch.sum(self.layers(x))


@pytest.mark.usefixtures("_capped")
@pytest.mark.parametrize("at", [0, 6], ids=["recorded", "planned"])
def test_an_op_that_goes_on_with_less_memory_is_told_of_once(at: int) -> None:
    model, x = Asking().cuda(), torch.randn(4096, 1024, device="cuda")
    too_much = torch.cuda.get_device_properties(0).total_memory // 2
    ooc = limit(model, "400MiB")
    told = []
    for step in range(at + 3):
        model.num_bytes = too_much if step >= at else 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with ooc.step():
                model(x).backward()
        told.append(sum("asked for more memory than there is" in str(one.message) for one in caught))
    ooc.close()
    assert told == [0] * at + [1, 0, 0]


@pytest.mark.usefixtures("_capped")
def test_what_is_not_pooled_for_want_of_memory_changed_no_op() -> None:
    model, x, _ = network()
    ooc = limit(model, "500MiB")
    kept = torch.ones(1 << 26, device="cuda")
    failures = torch.cuda.memory_stats()["num_ooms"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ooc.step():
            loss = model(x).sum()
            torch.cuda.empty_cache()
            there = torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(there)
            assert isinstance(ooc.device_memory, CudaMemory)
            assert ooc.device_memory.gradient_pool.move(kept) is kept
            torch.cuda.set_per_process_memory_fraction(0.2)
            loss.backward()
    ooc.close()
    assert torch.cuda.memory_stats()["num_ooms"] == failures + 1


def test_an_op_is_timed_without_its_wait_for_memory() -> None:
    """Free blocks of other sizes, up to a cap: for the next one the allocator gives them back and waits."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows = torch.randn(4096, 256, device=device)
    rows @ rows.T
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_bytes = 1000 * MIB
    share = (torch.cuda.memory_reserved(device) + free_bytes) / torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(share, device)
    found = []
    try:
        for asks in ({0: (64 * MIB,)}, None):
            walls = [torch.empty(48 * MIB, dtype=torch.uint8, device=device) for _ in range(20)]
            num_before = allocator.count_restarts(device)
            clock = Clock(device, asks=asks)
            del walls[::2]
            started = clock.start()
            product = rows @ rows.T
            clock.stop(started)
            found += clock.seconds()
            assert allocator.count_restarts(device) > num_before
            del product, walls
            torch.cuda.empty_cache()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert 2 * found[0] < found[1]
