"""Curve and choice -> the sentences that say why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from outcore.tuning.curve import Curve, Point
from outcore.tuning.team import Team, Way
from outcore.units import format_bytes, two_digits

MUCH = 0.2  # of a step, spent on communication
BUSY = 0.2  # of a step: real steps that are further off what was predicted were disturbed by something else


def why_micro_batch(curve: Curve, micro_batch: int, accumulation: int) -> list[str]:
    chosen, best = curve.point(micro_batch), curve.best
    rate, best_rate = curve.rate(micro_batch), curve.rate(best.micro_batch)
    found, off = [], _off(curve)
    if best.micro_batch == micro_batch:
        found.append(f"no other batch that was tried or predicted trains more samples per second than {micro_batch}")
    else:
        memory = f"{format_bytes(chosen.peak_bytes)} instead of {format_bytes(best.peak_bytes)}"
        found.append(
            f"a micro-batch of {micro_batch} gives {100 * rate / best_rate:.{0 if off > BUSY else 1}f} % of the most "
            f"samples per second, which {best.micro_batch} gives, in {memory}"
        )
    found += _why_in_core_ends(curve)
    tried = _listed(point.micro_batch for point in _compared(curve))
    if off > BUSY:
        found.append(
            f"real steps of {tried} samples were up to {two_digits(100 * off)} % off what was predicted: the machine "
            "was too busy for its timings to be trusted; run this again when it has less to do"
        )
    elif tried:
        found.append(f"checked with real steps of {tried} samples: predictions were within {100 * off:.1f} %")
    if curve.looped:
        found.append(
            f"short steps ({_listed(sorted(curve.looped))} samples) count as a loop runs them that never waits"
        )
    if accumulation > 1:
        found.append(f"{accumulation} micro-batches are accumulated, so that an optimizer step sees the whole batch")
    return found


def _off(curve: Curve) -> float:
    """How far predictions were from real steps, at most, as a share of these."""
    return max((abs(1 / point.error - 1) for point in _compared(curve) if point.error), default=0.0)


def _compared(curve: Curve) -> list[Point]:
    """Those of which real steps ran as they were predicted, one by one."""
    return [
        point for point in curve.points if point.measured_step_s is not None and point.micro_batch not in curve.looped
    ]


def _listed(batches: Iterable[int]) -> str:
    return ", ".join(map(str, batches))


def _why_in_core_ends(curve: Curve) -> list[str]:
    inside = [point for point in curve.fitting if point.in_core]
    outside = [point for point in curve.fitting if not point.in_core]
    if not outside:
        return []
    if not inside:
        return ["nothing fits in-core: every batch swaps or recomputes"]
    best_in = max(inside, key=lambda point: curve.rate(point.micro_batch))
    best_out = max(outside, key=lambda point: curve.rate(point.micro_batch))
    change = curve.rate(best_out.micro_batch) / curve.rate(best_in.micro_batch) - 1
    edge = f"beyond {curve.largest_in_core} samples swapping and recomputing begin"
    if _off(curve) > BUSY:  # by how much one is faster is not known
        return [edge]
    if change > 0:
        return [f"{edge}, and a larger batch pays for them: {best_out.micro_batch} is {100 * change:.1f} % faster"]
    return [f"{edge}, and a larger batch does not pay for them: at best {-100 * change:.1f} % slower than in-core"]


def why_ran_out(ran_out: Mapping[int, str]) -> list[str]:
    """That no plan may be wrong about memory unnoticed."""
    return [
        f"a batch of {batch} was predicted to fit and did not: {(error.splitlines() or ['no reason given'])[0]}"
        for batch, error in sorted(ran_out.items())
    ]


def why_loading(curve: Curve, micro_batch: int, load_s: float) -> list[str]:
    """Where one process cannot read samples as fast as they are trained."""
    num_workers = load_s * curve.rate(micro_batch)
    if num_workers < 0.5:
        return []
    num = math.ceil(1.2 * num_workers)
    workers = f"{num} worker" + ("s" if num > 1 else "")
    return [
        f"reading one sample takes {two_digits(1e3 * load_s)} ms: give the loader {workers} or more, or training will "
        "wait for it"
    ]


def why_last_batch(num_samples: int | None, micro_batch: int, normalises: bool) -> list[str]:
    if num_samples is None or not normalises or num_samples % micro_batch != 1:
        return []
    return ["the last batch of an epoch would hold one sample, which BatchNorm cannot train on: use drop_last=True"]


def why_batch_kept(curve: Curve, micro_batch: int, effective: int, *, rate_stays: bool = True) -> list[str]:
    """Where a batch with better divisors would be faster."""
    accumulation = effective // micro_batch
    knee = curve.knee.micro_batch
    lost = curve.rate(knee, max(1, round(effective / knee))) / curve.rate(micro_batch, accumulation) - 1
    said = [_stays(effective, rate_stays=rate_stays)]
    if lost > 0.03 and _off(curve) <= BUSY:
        near = max(1, round(effective / knee)) * knee
        said.append(f"a batch of {near} could be cut into {knee}s and would be {100 * lost:.0f} % faster")
    return said


def _stays(effective: int, *, rate_stays: bool) -> str:
    so = ", so the learning rate need not change" if rate_stays else ""
    return f"the effective batch stays {effective}, as you train today{so}"


def why_team(
    team: Team, way: Way, silent: Way, *, kept: bool, noise: float | None, rate_stays: bool = True
) -> list[str]:
    """`silent` is the way that would be taken if communication took no time."""
    said = [_stays(way.batch, rate_stays=rate_stays)] if kept else []
    if noise is not None:
        said.append(
            f"at a noise scale of about {two_digits(noise)} samples, of all global batches, {way.batch} gets furthest "
            "per second"
        )
    if max(way.sizes) > min(way.sizes) + 1:
        said.append(
            f"workers are not equally fast: with {min(way.shares)} to {max(way.shares)} of {way.batch} samples all "
            "finish at the same time; weight gradients by samples, as outcore.tuning.Shares does"
        )
    share = team.communication_s / team.step_s(way)
    if not kept and silent.batch != way.batch:
        said.append(
            f"communication decides: without it a batch of {silent.batch} would do, with {way.batch} it is "
            f"{100 * share:.0f} % of a step"
        )
    elif share > MUCH:
        said.append(
            f"communication is {100 * share:.0f} % of a step: a larger batch, or fewer workers, would waste less"
        )
    return said
