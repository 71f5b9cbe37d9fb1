"""Formats an advice as tables: the setting with its reasons, and the curve behind it."""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from outcore.reporting.text import render, rows_table
from outcore.tuning.advice import Advice, Setting
from outcore.tuning.gradients.goodput import goodput
from outcore.units import format_bytes, format_seconds, two_digits

MAX_SHARES = 4  # different shares of workers that a table lists at most


def advice_text(advice: Advice) -> str:
    return render(advice_table(advice)) + "\n\n" + render(curve_table(advice))


def advice_table(advice: Advice) -> Table:
    curve = advice.curve
    point = curve.point(advice.micro_batch)
    how = "in-core" if point.in_core else "swapping and recomputing"
    rows = _unchecked_rows(advice)
    rows += [
        ("micro-batch", f"{advice.micro_batch} ({how}; the largest in-core is {curve.largest_in_core})"),
        (
            "accumulation",
            f"{advice.accumulation} micro-batches per optimizer step" if advice.accumulation > 1 else "none",
        ),
        ("effective batch", str(advice.effective_batch)),
        *_worker_rows(advice),
    ]
    if advice.learning_rate is not None:
        rows.append(("learning rate", f"{advice.learning_rate:.3g}" + _warm_up(advice)))
    if advice.beta2 is not None:
        rows.append(("beta2", f"{advice.beta2:.5g} (as many samples are remembered as before)"))
    if advice.noise is not None:
        rows.append(("gradient noise scale", advice.noise_told or f"about {two_digits(advice.noise)} samples"))
    rows += [
        ("samples per second", f"{advice.samples_per_s:.4g}, a step takes {format_seconds(advice.step_s)}"),
        ("peak memory", f"{format_bytes(advice.peak_bytes)} of {format_bytes(curve.memory_bytes)}"),
    ]
    if advice.num_steps:
        how = "the rate falling to zero over the last third of them: advice.scheduler(optimizer)"
        rows.append(("length", f"{advice.num_steps} steps, {how}"))
    if advice.target:
        reached = "not predicted, see below" if advice.target_s is None else format_seconds(advice.target_s)
        rows.append((f"time to {advice.target}", reached + _with(advice.soonest)))
    rows += [("why" if at == 0 else "", sentence) for at, sentence in enumerate(advice.why)]
    return rows_table(f"outcore tune: advice for {curve.device}, found in {format_seconds(advice.spent_s)}", rows)


def _unchecked_rows(advice: Advice) -> list[tuple[str, str]]:
    if not advice.unchecked:
        return []
    rows = [("not checked", f"{advice.unchecked}; so this is today's setting")]
    if advice.proposal is not None:
        rows.append(("proposed", f"{advice.proposal}, which was not compared with it"))
    return rows


def _worker_rows(advice: Advice) -> list[tuple[str, str]]:
    if advice.workers == 1:
        return []
    counts = Counter(advice.shares)
    shares = [f"{share} samples" + (f" on {num} of them" if len(counts) > 1 else "") for share, num in counts.items()]
    many = len(counts) > MAX_SHARES
    each = f"{min(counts)} to {max(counts)} samples" if many else ", ".join(shares)
    part = advice.communication_s / advice.step_s
    return [
        ("workers", f"{advice.workers}, in each step {each}" + (" each" if len(counts) == 1 else "")),
        ("communication", f"{format_seconds(advice.communication_s)}, {100 * part:.0f} % of a step"),
        ("scaling", f"{100 * advice.scaling:.0f} % of what {advice.workers} workers would do each by itself"),
    ]


def _warm_up(advice: Advice) -> str:
    num = advice.num_warm_up_steps
    return f", reached over {num} step{'s' if num > 1 else ''} of warm-up" if num else ""


def _with(soonest: Setting | None) -> str:
    return "" if soonest is None else f", with {soonest} over {soonest.num_steps} steps instead"


def curve_table(advice: Advice) -> Table:
    """Returns the curve as a table with a bar per batch. Batches that do not fit have no samples per second."""
    curve = advice.curve
    top = max(curve.rate(point.micro_batch) for point in curve.fitting)
    with_goodput = advice.noise is not None and advice.workers == 1  # several workers: of global batches
    headings = ["batch", "peak", "samples/s", "", "swapped", "recomputed", "real steps", "goodput"]
    table = Table(title="samples per second over the micro-batch", title_justify="left")
    for heading in headings if with_goodput else headings[:-1]:
        table.add_column(heading, justify="left" if heading == "" else "right", no_wrap=True)
    for point in curve.points:
        rate = curve.rate(point.micro_batch)
        mark = " <" if point.micro_batch == advice.micro_batch else ""
        bar = "█" * max(1, round(20 * rate / top)) if point.fits else "does not fit"
        cells = [
            f"{point.micro_batch}",
            format_bytes(point.peak_bytes),
            f"{rate:.4g}" if point.fits else "",
            bar + mark,
        ]
        cells += [format_bytes(n) if n else "" for n in (point.swapped_bytes, point.recomputed_bytes)]
        off = "" if point.error is None else f"{100 * (1 / point.error - 1):+.1f} %"
        cells.append("in a loop" if point.micro_batch in curve.looped else off)
        if with_goodput and advice.noise is not None:
            worth = goodput(rate, point.micro_batch, advice.first_batch, advice.noise)
            cells.append(f"{worth:.4g}" if point.fits else "")
        table.add_row(*cells)
    return table
