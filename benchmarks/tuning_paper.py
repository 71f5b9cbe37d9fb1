"""Predicts the most efficient minibatch of ResNet-152 with swapping on a 12 GB card of 2017.

    python -m benchmarks.tuning_paper                       # both cards, about two minutes on one core
    python -m benchmarks.tuning_paper --cards titan_xp_pcie3 --out paper.json

The question is AccUDNN's (Guo et al., arXiv 1901.06773): at 12 GB its efficiency-optimal minibatch of ResNet-152 is 4.2
times Caffe's. No such card was available. The step was recorded on an H200 with 256 samples (`benchmarks/recorded.py`),
scaled to any batch by its parts that depend on the batch, and planned for a card whose memory, link and speed are given
in `benchmarks/machines/`. Only the recorded step is measured: the script shows what is worthwhile under these figures,
and how much that depends on them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.recorded import cheaper, load
from outcore.planning.families.scaling import Family, Recorded
from outcore.tuning.gradients.goodput import best_batch
from outcore.tuning.throughput.prediction import BatchPlanner, Point
from outcore.units import GIB, format_bytes
from outcore.values import Budget, Machine, Op, Trace

FOLDER = Path(__file__).parent
RECORDED, RECORDED_BATCH, SMALL_BATCH = "resnet152_256", 256, 4
CARDS = ("titan_xp_pcie3", "k40_pcie3")
MEMORY_BYTES = 12 * 10**9  # "12 GB" of the paper
ALLOCATOR_SHARE = 0.97  # of it that plans use: an allocator leaves holes
SCALAR_BYTES = 512  # of a loss, rounded up as the CUDA allocator does
PARAMETER_BYTES = 60_192_808 * 4  # of ResNet-152
NUM_WORKERS, LINK_BYTES_PER_S = 8, 10e9  # of a ring over PCIe 3, which is what eight such cards had
NOISE_SCALES = (500.0, 5_000.0)  # samples: of ResNets on ImageNet early and late (McCandlish et al., arXiv 1812.06162)
FIRST_BATCH = 32
TIMES = (0.25, 0.5, 0.75, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 4.0, 6.0, 8.0)  # of the in-core edge
Row = dict[str, Any]


# -- one recorded step -> the step of any batch ------------------------------------------------------------------------


def depends_on_batch(trace: Trace, input_bytes: int) -> list[bool]:
    """For each storage, whether its bytes grow with the batch: what is computed from the input does, unless it is a sum
    over the samples (statistics of channels, gradients of parameters)."""
    grows = [storage.external and storage.bytes == input_bytes for storage in trace.storages]
    for op in trace.ops:
        if not any(grows[trace.values[value].storage] for value in op.reads):
            continue
        for place, value in enumerate(op.writes):
            storage = trace.values[value].storage
            if trace.storages[storage].bytes > SCALAR_BYTES and not _sums_over_samples(trace, op, place):
                grows[storage] = True
    return grows


def _sums_over_samples(trace: Trace, op: Op, place: int) -> bool:
    """Statistics of a normalisation and gradients of its parameters follow its first result. A convolution's backward
    gives the gradient of its input first, if at all, then of weight and bias. A product or a sum in the backward that
    reads no parameter is the gradient of a linear layer's."""
    kind = op.name.split(".")[1]
    if "batch_norm" in kind:
        return place > 0
    if op.phase != "backward":
        return False
    if kind == "convolution_backward":
        return place > 0 or len(op.writes) == 1
    reads_parameter = any(trace.storages[trace.values[value].storage].external for value in op.reads)
    return kind in ("mm", "sum") and not reads_parameter


def at_batch(trace: Trace, recorded_batch: int, input_bytes: int, batch: int) -> Trace:
    """The recorded step with another number of samples: bytes and seconds of what grows in proportion to it."""
    grows, share = depends_on_batch(trace, input_bytes), batch / recorded_batch

    def of_op(op: Op) -> Op:
        values = (*op.reads, *op.writes)
        if not any(grows[trace.values[value].storage] for value in values):
            return op
        return replace(op.at(share), workspace_bytes=int(op.workspace_bytes * share))

    storages = tuple(
        replace(storage, bytes=int(storage.bytes * share)) if grow else storage
        for storage, grow in zip(trace.storages, grows)
    )
    before_bytes = trace.before_bytes - input_bytes + int(input_bytes * share)
    return replace(trace, ops=tuple(map(of_op, trace.ops)), storages=storages, before_bytes=before_bytes)


def resnet152() -> Family:
    """The recorded step and a small one made from it, from which every other batch follows."""
    trace = cheaper(load(RECORDED, workspace=False))
    input_bytes = RECORDED_BATCH * 3 * 224 * 224 * 4
    small = at_batch(trace, RECORDED_BATCH, input_bytes, SMALL_BATCH)
    return Family((Recorded(SMALL_BATCH, small), Recorded(RECORDED_BATCH, trace)))


# -- the card ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """A device that is not here, and what a step on it costs besides its ops."""

    machine: Machine
    memory_bytes_per_s: float

    @classmethod
    def load(cls, name: str) -> Card:
        machine = Machine.load(FOLDER / "machines" / f"{name}.machine.json")
        return cls(machine, {"titan_xp_pcie3": 547e9, "k40_pcie3": 288e9}[name])

    @property
    def optimizer_s(self) -> float:
        """SGD with momentum reads three tensors and writes two."""
        return 5 * PARAMETER_BYTES / self.memory_bytes_per_s

    @property
    def communication_s(self) -> float:
        """A ring sums the gradients of all workers, with nothing else beside it."""
        return 2 * (NUM_WORKERS - 1) / NUM_WORKERS * PARAMETER_BYTES / LINK_BYTES_PER_S


def caffe_batch(family: Family) -> int:
    """The largest minibatch of a framework that keeps every blob and a gradient of the same size beside it, as Caffe
    does: in place where this step is (ReLU), and without the workspaces of convolutions."""
    trace, batch = family.recorded[-1].trace, family.largest
    grows = depends_on_batch(trace, batch * 3 * 224 * 224 * 4)
    forward = {trace.values[value].storage for op in trace.ops if op.phase == "forward" for value in op.writes}
    blobs = sum(trace.storages[storage].bytes for storage in forward if grows[storage])
    sample_bytes = (2 * blobs + batch * 3 * 224 * 224 * 4) / batch
    return int((MEMORY_BYTES - 3 * PARAMETER_BYTES) / sample_bytes)


# -- the question ------------------------------------------------------------------------------------------------------


def curve(family: Family, card: Card, batches: Sequence[int]) -> list[Point]:
    """Planned and simulated on the card; the last one is the first that does not fit."""
    budget = Budget(int(ALLOCATOR_SHARE * MEMORY_BYTES), 64 * GIB, 0)
    planner = BatchPlanner(family, card.machine, budget, card.optimizer_s)
    points = []
    for batch in batches:
        points.append(planner.predict(batch).point)
        if not points[-1].fits:
            break
    return points


def rows_of(name: str, family: Family) -> list[Row]:
    card = Card.load(name)
    budget = Budget(int(ALLOCATOR_SHARE * MEMORY_BYTES), 64 * GIB, 0)
    edge = BatchPlanner(family, card.machine, budget, card.optimizer_s).largest_in_core(RECORDED_BATCH)
    theirs = caffe_batch(family)
    batches = sorted({theirs, *(max(1, int(times * edge)) for times in TIMES)})
    rows: list[Row] = []
    for point in curve(family, card, batches):
        group_s = point.step_s + card.communication_s
        rows.append(
            {
                "card": card.machine.name,
                "batch": point.micro_batch,
                "of_caffe": point.micro_batch / theirs,
                "of_in_core": point.micro_batch / edge,
                "fits": point.fits,
                "in_core": point.in_core,
                "peak_bytes": point.peak_bytes,
                "swapped_bytes": point.swapped_bytes,
                "recomputed_bytes": point.recomputed_bytes,
                "samples_per_s": point.samples_per_s,
                "samples_per_s_of_8": NUM_WORKERS * point.micro_batch / group_s,
            }
        )
        print(_line(rows[-1]), flush=True)
    return rows


def _line(row: Row) -> str:
    if not row["fits"]:
        return f"  {row['batch']:5}  does not fit: {format_bytes(row['peak_bytes'])}"
    how = "in-core" if row["in_core"] else f"swaps {format_bytes(row['swapped_bytes'])}"
    return (
        f"  {row['batch']:5}  {row['of_caffe']:5.2f} x Caffe's  {row['samples_per_s']:7.2f} samples/s alone, "
        f"{row['samples_per_s_of_8']:7.1f} with 8 workers  {how}"
    )


def verdict(rows: list[Row]) -> Row:
    """The best batch alone, of eight workers, and what it is worth by the noise of the gradients."""
    fitting = [row for row in rows if row["fits"]]
    alone = max(fitting, key=lambda row: row["samples_per_s"])
    together = max(fitting, key=lambda row: row["samples_per_s_of_8"])
    in_core = max((row for row in fitting if row["in_core"]), key=lambda row: row["batch"])
    step_s = {NUM_WORKERS * row["batch"]: NUM_WORKERS * row["batch"] / row["samples_per_s_of_8"] for row in fitting}
    goodput = {
        f"{noise:.0f}": best_batch(sorted(step_s), lambda batch: step_s[batch], FIRST_BATCH, noise)[0] // NUM_WORKERS
        for noise in NOISE_SCALES
    }
    largest = fitting[-1]
    return {
        "card": rows[0]["card"],
        "caffe_batch": round(alone["batch"] / alone["of_caffe"]),
        "in_core_batch": in_core["batch"],
        "best_alone": alone["batch"],
        "best_alone_of_caffe": alone["of_caffe"],
        "best_of_8": together["batch"],
        "best_of_8_of_caffe": together["of_caffe"],
        "gain_of_8_over_caffe": together["samples_per_s_of_8"] / _at_least_caffe(fitting)["samples_per_s_of_8"] - 1,
        "gain_alone_over_caffe": alone["samples_per_s"] / _at_least_caffe(fitting)["samples_per_s"] - 1,
        "largest_batch": largest["batch"],
        "largest_against_best_alone": largest["samples_per_s"] / alone["samples_per_s"] - 1,
        "best_of_8_by_goodput": goodput,
    }


def _at_least_caffe(rows: list[Row]) -> Row:
    return min(rows, key=lambda row: abs(math.log(row["of_caffe"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = FOLDER / "results" / f"tuning-paper_planned_{datetime.date.today():%Y%m%d}.json"
    parser.add_argument("--cards", default=",".join(CARDS), help="machine files, comma-separated")
    parser.add_argument("--out", type=Path, default=default, help="where the JSON goes")
    options = parser.parse_args()
    family = resnet152()
    results: Row = {"question": "tuning-paper", "date": datetime.date.today().isoformat(), "recorded": RECORDED}
    results |= {"memory_bytes": MEMORY_BYTES, "rows": [], "verdicts": []}
    for name in options.cards.split(","):
        print(name)
        rows = rows_of(name, family)
        results["rows"] += rows
        results["verdicts"].append(verdict(rows))
        print(f"  {json.dumps(results['verdicts'][-1])}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"results in {options.out}")


if __name__ == "__main__":
    main()
