"""Benchmarks of speed that run on a GPU: their sums and rows, with small shapes on a CPU."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.pieces import LAYOUTS, SMALL, Convolution, rows_of, same_bits
from benchmarks.recording import measure


def test_a_convolution_in_pieces_is_compared_bit_by_bit() -> None:
    layout = LAYOUTS["channels first"][4]
    drawn = Convolution.drawn(SMALL["vgg16"], layout, "cpu")
    for made, cut, pieces in drawn.cuts(2):
        whole = drawn.whole()[made]()
        dimensions, found = zip(*pieces())
        together = torch.cat(found, dimensions[0])
        assert torch.allclose(together, whole, atol=1e-4), (made, cut)
        assert same_bits(together, pieces())
        together.view(-1)[-1] += 1
        assert not same_bits(together, pieces())


def test_each_cut_has_a_row() -> None:
    rows = [*rows_of("r3d18", "channels last", "cpu", [2, 4])]
    assert len(rows) == 10
    assert all(row["pieces_s"] > 0 and isinstance(row["same_bits"], bool) for row in rows)


def test_what_recording_takes_is_told_beside_a_step_that_swaps_everything() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    found = measure(model, lambda: model(torch.randn(64, 64)).sum(), "100%")
    assert found["num_ops"] > 6
    assert found["times"] == found["record_s"] / found["swap_all_s"]
    assert any("recorder.py" in function for function, *_ in found["profile"])
