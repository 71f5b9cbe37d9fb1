"""The sentences that explain an advice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from outcore.tuning.advice import Advice
from outcore.tuning.gradients.goodput import goodput
from outcore.tuning.settings import SETTINGS
from outcore.tuning.throughput.builder import effective_batches
from outcore.tuning.throughput.curve import Curve
from outcore.tuning.workers.split import Split, WorkerGroup
from outcore.units import format_bytes, two_digits

WORKERS = SETTINGS.workers
BUSY = "the machine was too busy for its timings to be trusted; run this again when it has less to do"


def why_micro_batch(curve: Curve, micro_batch: int, accumulation: int) -> list[str]:
    chosen, best = curve.point(micro_batch), curve.best
    tried = _listed(point.micro_batch for point in curve.compared)
    error = 100 * curve.worst_error
    if not curve.is_trusted:
        off = f"real steps of {tried} samples were up to {two_digits(error)} % off what was predicted"
        return [f"{off}: {BUSY}", *_why_in_core_ends(curve), *_why_accumulation(accumulation)]
    if best.micro_batch == micro_batch:
        why = [f"no other batch that was tried or predicted trains more samples per second than {micro_batch}"]
    else:
        share = 100 * curve.rate(micro_batch) / curve.rate(best.micro_batch)
        memory = f"{format_bytes(chosen.peak_bytes)} instead of {format_bytes(best.peak_bytes)}"
        why = [
            f"a micro-batch of {micro_batch} gives {share:.1f} % of the most samples per second, which "
            f"{best.micro_batch} gives, in {memory}"
        ]
    why += _why_in_core_ends(curve)
    if tried:
        why.append(f"checked with real steps of {tried} samples: predictions were within {error:.1f} %")
    if curve.looped:
        why.append(f"short steps ({_listed(sorted(curve.looped))} samples) were timed in a loop that never waits")
    return why + _why_accumulation(accumulation)


def _why_accumulation(accumulation: int) -> list[str]:
    if accumulation == 1:
        return []
    return [f"{accumulation} micro-batches are accumulated, so that an optimizer step sees the whole batch"]


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
    if not curve.is_trusted:  # by how much one is faster is not known
        return [edge]
    if change > 0:
        return [f"{edge}, and a larger batch pays for them: {best_out.micro_batch} is {100 * change:.1f} % faster"]
    return [f"{edge}, and a larger batch does not pay for them: at best {-100 * change:.1f} % slower than in-core"]


def why_goodput(advice: Advice, largest: int) -> list[str]:
    """Returns which batch has the highest goodput, with the curve and noise scale of the table."""
    if advice.noise is None or not advice.curve.is_trusted:
        return []
    curve, noise = advice.curve, advice.noise

    def progress(batch: int, micro_batch: int) -> float:
        return goodput(curve.rate(micro_batch, batch // micro_batch), batch, advice.first_batch, noise)

    worth = {batch: progress(batch, micro_batch) for batch, micro_batch in effective_batches(curve, largest).items()}
    ours = worth[advice.effective_batch] = progress(advice.effective_batch, advice.micro_batch)
    best = max(worth, key=lambda batch: (worth[batch], -batch))
    reason = "larger ones train samples that say little new, smaller ones waste the device"
    if f"{worth[best]:.4g}" == f"{ours:.4g}":
        return [f"at this noise scale, of all batches, {advice.effective_batch} gets furthest per second; {reason}"]
    return [
        f"at this noise scale a batch of {best} would get furthest per second, with {worth[best]:.4g} samples' worth "
        f"of a batch of {advice.first_batch} where {advice.effective_batch} has {ours:.4g}; what is advised goes by "
        + ("today's setting" if advice.unchecked else "the race")
    ]


def why_out_of_memory(errors: Mapping[int, str]) -> list[str]:
    """Returns one sentence for each batch that a plan wrongly said would fit."""
    return [
        f"a batch of {batch} was predicted to fit and did not: {(error.splitlines() or ['no reason given'])[0]}"
        for batch, error in sorted(errors.items())
    ]


def why_loading(curve: Curve, micro_batch: int, load_s: float) -> list[str]:
    """Returns advice on loader workers if one process cannot read samples as fast as they are trained."""
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
    """Returns that the batch is kept, and a batch with better divisors if that would be faster."""
    accumulation = effective // micro_batch
    knee = curve.knee.micro_batch
    lost = curve.rate(knee, max(1, round(effective / knee))) / curve.rate(micro_batch, accumulation) - 1
    why = [_batch_stays(effective, rate_stays=rate_stays)]
    if lost > 0.03 and curve.is_trusted:
        near = max(1, round(effective / knee)) * knee
        why.append(f"a batch of {near} could be cut into {knee}s and would be {100 * lost:.0f} % faster")
    return why


def _batch_stays(effective: int, *, rate_stays: bool) -> str:
    so = ", so the learning rate need not change" if rate_stays else ""
    return f"the effective batch stays {effective}, as you train today{so}"


def why_split(
    group: WorkerGroup, split: Split, silent: Split, *, kept: bool, noise: float | None, rate_stays: bool = True
) -> list[str]:
    """`silent` is the split that would be taken if communication took no time."""
    why = [_batch_stays(split.batch, rate_stays=rate_stays)] if kept else []
    if noise is not None:
        why.append(
            f"at a noise scale of about {two_digits(noise)} samples, of all global batches, {split.batch} gets "
            "furthest per second"
        )
    if max(split.sizes) > min(split.sizes) + 1:
        why.append(
            f"workers are not equally fast: with {min(split.shares)} to {max(split.shares)} of {split.batch} samples "
            "all finish at the same time; weight gradients by samples, as outcore.tuning.Shares does"
        )
    share = group.communication_s / group.step_s(split)
    if not kept and silent.batch != split.batch:
        why.append(
            f"communication decides: without it a batch of {silent.batch} would do, with {split.batch} it is "
            f"{100 * share:.0f} % of a step"
        )
    elif share > WORKERS.much_communication_share:
        why.append(
            f"communication is {100 * share:.0f} % of a step: a larger batch, or fewer workers, would waste less"
        )
    return why
