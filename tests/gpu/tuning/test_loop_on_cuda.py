"""On CUDA: what a training of short steps is counted by are the seconds of a loop, as a user's runs."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from outcore.tuning.data.samples import Samples
from outcore.tuning.throughput.bench import TIMING, Bench
from outcore.tuning.throughput.builder import CurveBuilder
from outcore.tuning.throughput.probes import probe_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
]


def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 3, 32, 32, device="cuda"), torch.zeros(size, dtype=torch.long, device="cuda")


def loop_step_s(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> float:
    (x, y), times = make_batch(batch), []
    for _ in range(7):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(20):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start_s) / 20)
    return statistics.median(times[1:])


def test_short_steps_are_timed_in_a_loop() -> None:
    layers = [
        part
        for width in (3, 64, 64, 64)
        for part in (nn.Conv2d(width, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    plain = {batch: loop_step_s(model, optimizer, batch) for batch in (32, 256)}
    bench = Bench(model, F.cross_entropy, Samples(make_batch, torch.device("cuda")), optimizer, "8GiB")
    family = probe_batches(bench, 512, lambda what, part: None).family
    assert family is not None
    builder = CurveBuilder.start(bench, family)
    for batch, seconds in plain.items():
        builder.predict_fully(batch)
        assert builder.curve.seconds(batch) < TIMING.short_step_s
        builder.time_in_loop(batch)
        assert builder.curve.seconds(batch) == pytest.approx(seconds, rel=0.25)
        assert builder.curve.point(batch).measured_step_s is not None
        assert batch in builder.curve.looped
    bench.close()
