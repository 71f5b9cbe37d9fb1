"""On CUDA: state put back from host copies, noise as on the CPU, and adapting without waiting for the device."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from outcore.limit import limit
from outcore.tuning import Adaptive, measure_noise, range_test, untouched
from outcore.units import MIB
from tests.cpu.tuning.digits import digits, draws, exact_moments, small_net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
]


def test_untouched_makes_no_second_copy_on_the_device() -> None:
    net = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 4096, device="cuda")).sum().backward()
    optimizer.step()
    before = [t.clone() for t in (net.weight, *optimizer.state[net.weight].values())]
    chance = torch.cuda.get_rng_state()
    torch.cuda.reset_peak_memory_stats()
    held_bytes = torch.cuda.memory_allocated()
    with untouched(net, optimizer):
        assert torch.cuda.max_memory_allocated() - held_bytes < MIB
        torch.rand(3, device="cuda")
        optimizer.step()
        assert not torch.equal(before[0], net.weight)
    after = (net.weight, *optimizer.state[net.weight].values())
    assert all(torch.equal(one, two) for one, two in zip(before, after))
    assert torch.equal(chance, torch.cuda.get_rng_state())


def test_noise_and_range_are_those_of_the_cpu() -> None:
    data, net = digits(), small_net()
    sqr, var = exact_moments(net, data)
    net.cuda()
    found = measure_noise(net, F.cross_entropy, draws(data, 32, 2048), num_micro=2048)
    assert found.scale == pytest.approx(var / sqr, rel=0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    tested = range_test(net, F.cross_entropy, list(draws(data, 128, 120)), optimizer)
    assert 0.01 < tested.suggested_lr < 1


@pytest.mark.parametrize("limited", [False, True])
def test_adapting_on_the_device(limited: bool) -> None:
    net = small_net().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    ooc = limit(net, "50%") if limited else None
    adaptive = Adaptive(
        net, optimizer, batch=32, micro_batch=64, largest_batch=128, step_s=lambda batch: 1e-3, interval_steps=20
    )
    losses = []
    for x, y in adaptive.batches(draws(digits(), 32, 400)):
        x, y = x.cuda(), y.cuda()
        if ooc is None:
            loss = F.cross_entropy(net(x), y)
            loss.backward()
        else:
            with ooc.step():
                loss = F.cross_entropy(net(x), y)
                loss.backward()
        adaptive.step()
        losses.append(loss.detach())
    if ooc is not None:
        ooc.close()
    assert adaptive.batch == 128
    assert adaptive.noise is not None
    assert float(torch.stack(losses[-10:]).mean()) < 0.5 * float(losses[0])
