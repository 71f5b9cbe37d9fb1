"""Benchmarks of speed that run on a GPU: their sums and rows, with small shapes on a CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import networks, slowdown
from benchmarks.pieces import LAYOUTS, SMALL, Convolution, rows_of, same_bits
from benchmarks.recording import measure
from outcore.units import GIB


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


class Event:
    """A mark in the stream of a GPU that is as fast as its host."""

    def __init__(self, *, enable_timing: bool) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at_s - self.at_s)


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What benchmarks ask of CUDA, answered: tensors lie on the CPU."""
    answers: dict[str, Any] = {
        "get_device_properties": SimpleNamespace(total_memory=GIB),
        "set_per_process_memory_fraction": None,
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "memory_stats": {"num_alloc_retries": 0},
        "max_memory_allocated": GIB // 64,
        "max_memory_reserved": GIB // 32,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "Event", Event)


def tiny(name: str, batch: int) -> networks.Network:
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model, x = nn.Sequential(*blocks), torch.randn(batch, 64)
    return networks.Network(name, batch, model, lambda: model(x).square().mean(), list(blocks))


def test_every_method_of_slowdown_has_a_whole_row(
    pretended_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(networks._BUILDERS, "tiny", tiny)
    monkeypatch.setitem(networks.BATCHES, "tiny", 512)
    monkeypatch.setattr(networks, "build", lambda name, batch: tiny(name, batch))
    slowdown.run_network("tiny", ["in-core", "checkpoint", "hybrid"], (), 3, None)
    rows = [json.loads(line[4:]) for line in capsys.readouterr().out.splitlines() if line.startswith("ROW ")]
    assert [row["method"] for row in rows] == ["in-core", "checkpoint", "hybrid"]
    for row in rows:
        assert "error" not in row
        assert row["step_s"] > row["forward_host_s"] > 0
        assert row["memory_gib"] <= 1 / 64
    assert rows[2]["predicted_step_s"] >= rows[2]["bound_step_s"] > 0
    assert len(rows[2]["first_steps_s"]) >= 5


def test_rows_are_saved_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that is cut short by whoever has the machine leaves what it found."""
    out = tmp_path / "found.json"

    def one_row(name: str, *given: Any) -> None:
        if name == "second":
            raise RuntimeError
        next(one for one in given if callable(one))({**dict.fromkeys(slowdown.FIELDS), "network": name, "error": "cut"})

    monkeypatch.setattr(slowdown, "run_in_process_of_its_own", one_row)
    with pytest.raises(RuntimeError):
        slowdown.main(["--networks", "first,second", "--out", str(out)], standalone_mode=False)
    assert [row["network"] for row in json.loads(out.read_text())["rows"]] == ["first"]
