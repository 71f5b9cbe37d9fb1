"""The efficiency-optimal minibatch of AccUDNN, planned for a card of its time from a step recorded on another."""

from __future__ import annotations

import pytest

from benchmarks import recorded
from benchmarks.tuning_paper import Card, at_batch, caffe_batch, curve, depends_on_batch, resnet152
from outcore.values import Trace
from tests.cpu.tuning.nets import bench_of

HAS_STEP = (recorded.FOLDER / "resnet152_256.json").exists()


def bytes_of(trace: Trace) -> list[int]:
    return [storage.bytes for storage in trace.storages]


@pytest.mark.usefixtures("quick")
def test_a_recorded_step_scales_by_what_depends_on_the_batch(folder: str) -> None:
    """BatchNorm, biases, a linear layer, in-place ReLU: the same bytes as a recording of the other batch."""
    bench = bench_of("convnet", "1GiB", folder)
    bench.warm_up(4)
    small, large = (bench.record(batch).trace for batch in (64, 256))
    bench.close()
    input_bytes = 64 * 16 * 16 * 4
    scaled = at_batch(small, 64, input_bytes, 256)
    grows = depends_on_batch(small, input_bytes)
    assert any(grows)
    assert not all(grows)
    off = [
        (ours, theirs)
        for ours, theirs, before in zip(bytes_of(scaled), bytes_of(large), bytes_of(small))
        if ours != theirs and before > 16 * 1024  # statistics and labels are too small to matter
    ]
    assert not off


@pytest.mark.skipif(not HAS_STEP, reason="the recorded steps are not part of the repository")
def test_on_a_12_gb_card_of_its_time_a_multiple_of_caffes_batch_is_best_and_the_largest_is_not() -> None:
    """4.2 times in the paper. A batch that swaps pays little alone and more where gradients are summed."""
    family, card = resnet152(), Card.load("k40_pcie3")
    theirs = caffe_batch(family)
    caffes, in_core, best, largest = curve(family, card, [theirs, 63, 110, 378])
    assert 25 < theirs < 35
    assert caffes.in_core
    assert in_core.in_core
    assert not best.in_core
    assert 3 < best.micro_batch / theirs < 4.5
    assert best.samples_per_s > in_core.samples_per_s > caffes.samples_per_s > largest.samples_per_s * 0.95
    assert largest.samples_per_s < best.samples_per_s
    together = [point.micro_batch / (point.step_s + card.communication_s) for point in (caffes, best)]
    assert 0.03 < together[1] / together[0] - 1 < 0.1
