"""Draws the curve of an advice: samples per second, goodput and memory over the micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outcore.errors import BadFile, TuningError
from outcore.tuning.advice import Advice
from outcore.tuning.gradients.goodput import goodput
from outcore.tuning.throughput.prediction import Point
from outcore.units import GIB, MIB

SUFFIXES = (".svg", ".png", ".pdf")
KEPT, SWAPPED, RECOMPUTED, INK, GOOD = "#9db4c0", "#c97b63", "#e0b05c", "#253237", "#4f8a5b"


def check_picture(path: Path) -> None:
    """Raises if the picture cannot be written, before any time is spent."""
    if path.suffix not in SUFFIXES:
        raise BadFile(f"{path} names no kind of picture; end it in {', '.join(SUFFIXES)}")
    if not path.resolve().parent.is_dir():
        raise BadFile(f"cannot write {path} (there is no folder {path.parent}); name another file")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise TuningError(
            "a picture needs matplotlib (the same curve is printed as text without it); pip install 'outcore[plot]'"
        ) from None


def draw(advice: Advice, path: Path) -> None:
    """Draws speed above memory, over one axis of batches, and writes the picture to `path`."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8.5, 7), layout="constrained")
    speed, memory = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_speed(speed, advice)
    _draw_memory(memory, advice)
    _mark(speed, memory, advice)
    memory.set_xscale("log", base=2)
    batches = advice.curve.batches
    memory.set_xticks(batches, [str(batch) for batch in batches], rotation=45, fontsize=10)
    memory.minorticks_off()
    memory.set_xlabel("micro-batch (samples)")
    figure.suptitle(
        f"{advice.curve.device}: train {advice.accumulation} x {advice.micro_batch} samples per step"
        + (f", learning rate {advice.learning_rate:.3g}" if advice.learning_rate is not None else "")
    )
    try:
        figure.savefig(path)
    except OSError as error:
        raise BadFile(f"cannot write {path} ({error.strerror or error}); name another file") from None


def _draw_speed(axes: Any, advice: Advice) -> None:
    curve, points = advice.curve, advice.curve.fitting
    batches = [point.micro_batch for point in points]
    axes.plot(batches, [curve.rate(batch) for batch in batches], color=INK, marker=".", label="samples/s")
    axes.plot(batches, [point.samples_per_s for point in points], ":", color=INK, alpha=0.6, label="as first predicted")
    measured = [(p.micro_batch, p.micro_batch / p.measured_step_s) for p in points if p.measured_step_s is not None]
    if measured:
        axes.plot(*zip(*measured), "o", color=INK, markersize=8, fillstyle="none", label="measured")
    if advice.noise is not None:
        good = [goodput(curve.rate(batch), batch, advice.first_batch, advice.noise) for batch in batches]
        axes.plot(batches, good, "--", color=GOOD, label=f"goodput (against a batch of {advice.first_batch})")
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])  # leaves space for the names of batches above the curves
    axes.set_ylabel("samples per second")
    axes.legend(loc="best", fontsize=10)


def _draw_memory(axes: Any, advice: Advice) -> None:
    unit, name = (GIB, "GiB") if advice.curve.memory_bytes >= GIB else (MIB, "MiB")
    points = advice.curve.fitting
    batches = [point.micro_batch for point in points]

    def sizes(pick: Any) -> list[float]:
        return [pick(point) / unit for point in points]

    parts = [sizes(lambda p: p.kept_bytes), sizes(lambda p: p.swapped_bytes), sizes(lambda p: p.recomputed_bytes)]
    labels = ["saved for backward: kept", "swapped", "recomputed"]
    if len(batches) > 1:
        axes.stackplot(batches, *parts, colors=[KEPT, SWAPPED, RECOMPUTED], labels=labels)
    axes.plot(batches, sizes(_peak_bytes), color=INK, marker=".", label="peak of the step")
    axes.axhline(advice.curve.memory_bytes / unit, color=INK, linestyle=":", label="budget")
    axes.set_ylim(0, 1.6 * advice.curve.memory_bytes / unit)  # leaves space for the legend above the budget
    axes.set_ylabel(f"device memory, {name}")
    axes.legend(loc="upper left", fontsize=10, ncols=3)


def _peak_bytes(point: Point) -> int:
    return point.measured_peak_bytes or point.peak_bytes


def _mark(speed: Any, memory: Any, advice: Advice) -> None:
    """Draws lines at the batches that matter through both pictures, with their names in the upper one."""
    top = speed.get_ylim()[1]
    marks: dict[int, list[str]] = {advice.micro_batch: ["advised"]}
    marks.setdefault(advice.curve.knee.micro_batch, []).append("knee")
    if advice.curve.largest_in_core in advice.curve.batches:
        marks.setdefault(advice.curve.largest_in_core, []).append("in-core ends")
    for at, (batch, names) in enumerate(sorted(marks.items())):
        for axes in (speed, memory):
            axes.axvline(batch, color=INK, alpha=0.4, linewidth=1)
        side = "right" if batch == max(advice.curve.batches) else "left"
        speed.text(batch, top * (0.98 - 0.06 * at), f" {', '.join(names)} ", fontsize=10, va="top", ha=side)
