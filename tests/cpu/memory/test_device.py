"""What is asked of CUDA's allocator, and when: there is none here, so its calls are noted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from outcore.memory import cuda_allocator
from outcore.memory.device import CpuMemory, CudaMemory, Peak, memory_of

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def noted(name: str, result: Any = None) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            found.append(name)
            return result

        return call

    statistics = {"num_alloc_retries": 3, "num_ooms": 0, "allocated_bytes": {"all": {"current": 77}}}
    for name, result in (("empty_cache", None), ("synchronize", None), ("reset_peak_memory_stats", None)):
        monkeypatch.setattr(torch.cuda, name, noted(name, result))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", noted("max_memory_allocated", 100))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", noted("max_memory_reserved", 120))
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda index: statistics, raising=False)
    monkeypatch.setattr(cuda_allocator, "make_ready", noted("make_ready"))
    return found


@pytest.fixture
def memory(calls: list[str]) -> CudaMemory:
    memory = memory_of(nn.Linear(2, 2), CUDA, 1000)
    assert isinstance(memory, CudaMemory)
    assert calls == ["make_ready"]
    calls.clear()
    return memory


def test_a_recorded_step(memory: CudaMemory, calls: list[str]) -> None:
    memory.before_recording()
    assert memory.before_step_bytes((torch.ones(5),)) == 77  # the allocator knows the inputs, too
    assert calls == []
    memory.after_recording()
    assert calls == ["empty_cache"]


def test_the_peak_is_the_allocators(memory: CudaMemory, calls: list[str]) -> None:
    watch = memory.watch_peak(77, (), has_unseen=True)
    assert calls == ["reset_peak_memory_stats"]
    assert watch.meter is None
    assert watch.read() == Peak(100, 120)


def test_starts_over_are_counted_and_a_host_too_far_ahead_waits(
    memory: CudaMemory, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memory.begin_step(fits=False) == memory.num_restarts() == 3
    counts = iter([3, 4, 5])
    monkeypatch.setattr(cuda_allocator, "count_restarts", lambda device: next(counts))
    for _ in range(3):
        memory.begin_step(fits=True)
    assert calls == ["empty_cache", "synchronize", "empty_cache"]
    assert memory.host_waits
    memory.new_headroom()
    assert not memory.host_waits


def test_free_pages_are_given_back(memory: CudaMemory, calls: list[str]) -> None:
    memory.give_back()
    assert calls == ["empty_cache"]


def test_the_gradient_pool_begins_and_ends_with_a_step(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CudaMemory(nn.Linear(2, 2), CUDA, 1000)
    for name in ("begin", "end", "remove"):
        monkeypatch.setattr(memory.gradient_pool, name, lambda name=name: calls.append(name))
    calls.clear()
    memory.begin_gradient_pool()
    memory.end_step()
    memory.close()
    assert calls == ["begin", "end", "remove"]


def test_a_cpu_counts_for_itself() -> None:
    model = nn.Linear(16, 16, bias=False)
    memory = memory_of(model, CPU, 1000)
    assert isinstance(memory, CpuMemory)
    before_bytes = memory.before_step_bytes((torch.ones(4),))
    assert before_bytes == 16 * 16 * 4 + 16
    watch = memory.watch_peak(before_bytes, (), has_unseen=False)
    assert watch.meter is not None
    made = torch.ones(100)
    watch.meter.see(made)
    del made
    assert watch.read() == Peak(before_bytes + 400)
    assert (memory.begin_step(fits=True), memory.num_restarts(), memory.host_waits) == (0, 0, False)
    memory.close()


def test_optimizer_state_counts_on_a_cpu() -> None:
    model = nn.Linear(16, 16, bias=False)
    memory, optimizer = CpuMemory(model, CPU), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    assert memory.before_step_bytes(()) == 3 * 16 * 16 * 4  # weights, gradients, momentum
    memory.close()
