"""On CUDA: the climb reaches batches at which the device decides, with its own seconds of each op."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from outcore.tuning.data.samples import Samples
from outcore.tuning.throughput.bench import Bench
from outcore.tuning.throughput.limited_steps import UNTIMED_S
from outcore.tuning.throughput.probes import probe_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
]


def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 16, 64, 64, device="cuda"), torch.zeros(size, dtype=torch.long, device="cuda")


def test_real_steps_give_each_op_its_seconds() -> None:
    layers = [nn.Conv2d(16, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 16, 3, padding=1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bench = Bench(model, F.cross_entropy, Samples(make_batch, torch.device("cuda")), optimizer, "8GiB")
    found = probe_batches(bench, 2048, lambda what, part: None)
    family = found.family
    assert family is not None
    assert found.measured[-1].batch > 32  # beyond what was recorded
    last = family.recorded[-1]
    assert last.total_s == pytest.approx(found.measured[-1].step_s - bench.optimizer_s, rel=1e-3)
    assert all(0 < op.seconds < UNTIMED_S for op in last.trace.ops)
    share = dict.fromkeys(("convolution", "relu"), 0.0)
    for op in last.trace.ops:
        for name in share:
            share[name] += op.seconds / last.total_s * (name in op.name)
    assert share["convolution"] > share["relu"] > 0
    predicted = bench.planner(family).predict(last.batch * 3 // 4)
    assert predicted.point.in_core
    assert bench.run_planned(predicted).step_s == pytest.approx(predicted.point.step_s, rel=0.1)
    bench.close()
