"""Every tunable number of the tuner, with its unit and where it comes from.

A field's comment gives the unit or what the number is a share of, what it decides, and its origin: *measured* (an
experiment of docs/design/006-tuning.md or docs/log.md), *derived* (follows from something else) or *guessed*
(plausible, never varied).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outcore.units import KIB, MIB


@dataclass(frozen=True)
class TimingSettings:
    """How often and for how long real steps are timed."""

    busy_step_s: float = 0.02  # s; shorter steps are mostly overhead and say little about larger batches (guessed)
    min_steps: int = 3  # steps that are timed at least (guessed)
    min_long_steps: int = 2  # the same for steps that take `timed_s` each (guessed)
    timed_s: float = 0.2  # s; for how long steps are timed (measured: 0.15 was too short on an H200)
    short_step_s: float = 0.05  # s; on CUDA a shorter step waits for its host, which is disturbed easily (measured)
    short_timed_s: float = 0.5  # s; for how long such short steps are timed (measured)
    num_loop_windows: int = 9  # windows of a free-running loop, of which the median counts (guessed)
    steps_per_window: int = 12  # steps of one window (guessed)
    num_retiming_rounds: int = 2  # rounds in which recorded batches are timed again on CUDA (guessed)
    min_rounds: int = 4  # interleaved rounds from which one batch is chosen, at least (measured: 160 replayed rounds)
    max_rounds: int = 8  # and at most (measured: 160 replayed rounds)
    short_turn_s: float = 0.04  # s; a turn of short steps in such a round (guessed)
    num_levelling_rounds: int = 3  # interleaved rounds that put recorded batches in proportion (measured)
    min_reference_rounds: int = 3  # rounds of a swapping batch beside an in-core one, at least (measured)
    max_reference_rounds: int = 5  # and at most (guessed)
    agreeing_share: float = 0.03  # of their median; such rounds that differ by less are enough (guessed)
    decided_share: float = 0.01  # of the fastest batch's seconds per sample; closer needs no more (guessed)
    num_cpu_recordings: int = 2  # recordings on a CPU, where the first pays for touching memory (measured)
    settle_s: float = 12.0  # s; for `limit` to find a plan with which the allocator does not start over (guessed)
    max_steps_to_measure: int = 6  # steps until one is measured under its plan (guessed)


@dataclass(frozen=True)
class ProbeSettings:
    """Which few batches are recorded or run so that every other batch follows from them."""

    num_recorded: int = 3  # batches (measured: two left bytes 3 % off on a ViT)
    recording_limit_s: float = 25.0  # s; no further batch is recorded when all would take longer (guessed)
    long_step_s: float = 0.25  # s; after such a step the next batch is twice as large, not four times (guessed)
    stride: int = 4  # factor between probed batches while a step hardly grows (measured, H200)
    far_stride: int = 8  # the same once it does grow (measured: without it caches made 15 % on a CPU)
    flat_gain: float = 1.4  # factor in samples per second per doubling, above which a step is mostly fixed (guessed)
    longest_probe_s: float = 0.3  # s; no longer step is run to find the line (guessed)
    min_stride: float = 1.5  # factor between two batches that a line is drawn through, at least (guessed)
    settled_share: float = 0.03  # of a step; a batch predicted this well ends the probing (guessed)
    max_bends: int = 2  # batches that are run between others where the curve bends (measured, H200)
    max_unlike: int = 3  # batches whose steps do different work before the tuner gives up (guessed)


@dataclass(frozen=True)
class CurveSettings:
    """How the curve is read, corrected and completed."""

    knee_share: float = 0.99  # of the most samples per second; steps are not told apart more finely (measured)
    max_optimizer_share: float = 0.8  # of a step; timed in a slow moment it took longer than a step (measured)
    max_interpolations: int = 8  # bytes looked up on a line before the search halves its interval (guessed)
    swapped_value_bytes: int = 256 * KIB  # bytes a swapped value costs beside its own on a CPU (measured, two networks)
    swap_cost_share: float = 0.03  # of a step; a smaller difference may be the line's error (guessed)
    max_measured: int = 4  # batches that are measured with real steps, at most (guessed)
    num_larger: int = 2  # in-core batches above the picked one that are compared with it (guessed)
    close_share: float = 0.8  # of the most samples per second; noise may hide that such a batch is better (guessed)
    far_factor: int = 4  # times the largest in-core batch; the curve ends there (guessed)
    hopeless_share: float = 0.8  # of the most samples per second; nothing slower is planned beyond in-core (guessed)
    max_divisors: int = 14  # micro-batches that an effective batch is cut into (guessed)
    trusted_error: float = 0.2  # share of a step; predictions that are further off come from a busy machine (guessed)


@dataclass(frozen=True)
class DataSettings:
    """How the user's data is read."""

    num_read: int = 32  # samples that stand for all when steps are timed (guessed)
    kept_bytes: int = 256 * MIB  # bytes of host memory for samples that are evaluated again and again (guessed)
    min_held_out: int = 500  # samples; a tenth of a small data set would tell little (guessed)
    max_held_out: int = 2000  # samples (guessed)
    min_samples: int = 32  # samples; with fewer, noise, rates and comparisons say nothing (guessed)


@dataclass(frozen=True)
class GradientSettings:
    """Gradient noise, and the learning-rate range test."""

    batch: int = 32  # samples of a micro-batch for noise, at most (measured: smaller ones are off by a factor)
    min_micro_batches: int = 64  # micro-batches for noise (measured: up to 73 % off with 64, 7 % with 4,096)
    error: float = 0.1  # share of the noise scale; its standard error when measuring stops (guessed)
    time_share: float = 0.1  # of `trial_s`, for measuring noise at most (guessed)
    unsure_share: float = 0.5  # of the noise scale; with a larger error only its order is known (guessed)
    decay: float = 0.95  # of the running moments per measurement: about the last twenty count (guessed)
    max_descent_steps: int = 60  # steps of training before noise is measured, at most (measured)
    descent_share: float = 0.3  # of the first loss; after it fell by this, gradients no longer all agree (measured)
    range_batch: int = 256  # samples for the range test, at most: a large batch shows the rate, not noise (measured)
    num_range_steps: int = 80  # steps of a range test (guessed)
    num_range_seeds: int = 3  # seeds of a range test, at most (measured: one seed is off by a factor of 3)
    range_time_share: float = 0.3  # of `trial_s`, for the range test (guessed)
    diverged_factor: float = 1.25  # times the first loss; losses beyond it say nothing about training (guessed)
    range_width_decades: float = 0.25  # standard deviation of the weights that a line is fitted with (guessed)
    diverged_margin: float = 3.0  # factor below the rate at which the loss diverged (guessed)
    sure_errors: float = 2.0  # standard errors that a slope must lie below zero (derived: about 95 %)
    num_diverged: int = 3  # losses in a row that are too high: the training does not recover (guessed)
    num_first_losses: int = 5  # steps at rates too low to matter, whose loss is the one to compare with (guessed)


@dataclass(frozen=True)
class TrainingSettings:
    """The learning rate during a training, and predictions of its length."""

    decay_share: float = 1 / 3  # of a training whose end is known; the rate falls to zero over it (guessed)
    round_share: float = 1 / 2  # of the length; a round that follows a missed target (measured on MNIST and digits)
    round_rate_share: float = 1 / 2  # of the rate in such a round (measured on MNIST and digits)
    max_extrapolation: int = 30  # times the samples seen; a target beyond is not predicted (guessed)
    min_slope: float = 0.03  # log error per log samples; below it nothing is learnt any more (guessed)


@dataclass(frozen=True)
class ComparisonSettings:
    """Short trainings of today's setting and others, by the time to the target."""

    time_share: float = 0.5  # of `trial_s`, for the runs before the final, and as much again for the final (guessed)
    max_runs: int = 40  # runs (guessed)
    first_run_share: float = 1 / 32  # of the seconds for all runs; one run of the first round takes it (guessed)
    min_candidates: int = 5  # settings in the first round, however long their steps take (guessed)
    min_steps: int = 16  # steps of the slowest setting; with fewer nothing shows (guessed)
    num_evaluations: int = 8  # evenly over a run (guessed)
    max_epochs: int = 6  # epochs of today's setting; no run is longer (guessed)
    kept_share: float = 1 / 2  # of a round's settings that go on (derived: successive halving)
    clear_loss_share: float = 0.05  # of today's loss; without a target less improvement does not count (guessed)
    clear_time_share: float = 0.1  # of today's time to the target; less does not count (measured on MNIST)
    num_finalists: int = 3  # beside today's setting (guessed)
    num_starts: int = 3  # initial weights and orders of the data in the final (measured: one start tells little)
    not_reached_factor: float = 1.25  # times a run that missed the target; its cost at least (guessed)
    give_up_excess_share: float = 1.0  # of the leader's error; a run beyond it at half time stops (guessed)
    together_share: float = 0.15  # of the time to the target; other starts differ by more (measured on MNIST)
    behind_share: float = 0.15  # of the leader's error; today's setting runs on while it is nearer (guessed)
    max_extrapolation: float = 4  # times the winner's run; a target beyond is not predicted (guessed)
    shorter_factor: float = 1.25  # times the seconds to the target; so long are runs once it was reached (guessed)
    min_length_factor: float = 1.25  # times a run that reached the target; the advised length at least (measured)
    max_length_factor: float = 1.5  # and at most (measured)
    beyond_target_share: float = 0.1  # of the error at the target; the advised length ends below it by this (guessed)
    warm_up_share: float = 0.1  # of an epoch (guessed)
    rate_step: float = 3.0  # factor between rates that are tried; its square root between those (guessed)
    same_rate_factor: float = 1.2  # factor between two rates that are not worth telling apart (guessed)
    extension_factor: float = 2  # times the seconds for all runs, where the target is near (measured on MNIST)
    max_clock_factor: float = 3.0  # times the seconds of compute that the clock may show before runs stop (guessed)
    min_clock_s: float = 20.0  # s; a comparison that is over sooner is not cut by the clock (guessed)
    evaluation_batch: int = 256  # samples at a time, in-core (guessed)


@dataclass(frozen=True)
class FullLengthSettings:
    """Trainings as long as the user's."""

    time_share: float = 1.5  # of `trial_s`, for all of them (guessed)
    max_trainings: int = 6  # trainings where they are long (guessed)
    num_starts: int = 3  # initial weights and orders of the data per setting, where trainings are short (guessed)
    first_start: int = 3  # index; the starts before it ran in the comparison (derived)
    rate_factors: tuple[float, ...] = (1.0, 2.0, 4.0)  # times the rate that is soonest (measured on CIFAR-10)
    rate_step: float = 2.0  # factor between further rates (guessed)
    max_other_batches: int = 2  # batches (guessed)
    little_remaining: float = 0.1  # of the probability; nobody gives up with so little left (measured)
    nearly_factor: float = 1.25  # times the best one's remaining error that still counts as nearly as good (guessed)
    give_up_excess_share: float = 4.0  # of the leader's error at half time: slow starts may end best (measured)


@dataclass(frozen=True)
class SearchSettings:
    """The Optuna study around an advice."""

    late_factor: float = 1.5  # times the fastest run's seconds, after which a run that is behind stops (guessed)
    not_reached_factor: float = 2.0  # times its own seconds; what a run that missed the target counts for (guessed)
    num_compared: int = 3  # finished runs before any is stopped (guessed)
    batch_spread: int = 8  # factor around the advised batch (guessed)
    rate_spread: float = 30  # factor around the advised rate (guessed)


@dataclass(frozen=True)
class TunerSettings:
    """Limits of one call of `tune`."""

    first_batch: int = 32  # samples; the batch that is assumed where none is given (guessed)
    largest_batch: int = 1 << 16  # samples; no larger batch is looked at (guessed)


@dataclass(frozen=True)
class WorkerSettings:
    """Several workers."""

    bucket_bytes: int = 25 * MIB  # bytes of a message of gradients (derived: DistributedDataParallel's default)
    smoothing: float = 0.5  # weight of an earlier speed when a new one is measured (guessed)
    num_bisections: int = 50  # halvings of the seconds in which all have to finish (derived: float precision)
    max_doublings: int = 6  # of the accumulation (guessed)
    num_agreements: int = 3  # times that workers choose together and try their parts (guessed)
    near_share: float = 0.05  # of a micro-batch; a real step so close to it tells enough (guessed)
    much_communication_share: float = 0.2  # of a step, above which it is said (guessed)


@dataclass(frozen=True)
class AdaptiveSettings:
    """The training loop whose batch follows the gradient noise."""

    worth_factor: float = 1.05  # times the present goodput that another batch must promise (guessed)
    min_measurements: int = 5  # measurements before the noise is used (guessed)
    num_settling: int = 5  # steps of another batch that are not timed: recorded, planned, compiled (derived)
    num_tried: int = 8  # timed steps of a new batch before it is decided whether to stay (guessed)
    split_every: int = 4  # steps; a single micro-batch is halved every so many steps, for noise (guessed)


@dataclass(frozen=True)
class Settings:
    """The settings of all parts of the tuner."""

    timing: TimingSettings = field(default_factory=TimingSettings)
    probes: ProbeSettings = field(default_factory=ProbeSettings)
    curve: CurveSettings = field(default_factory=CurveSettings)
    data: DataSettings = field(default_factory=DataSettings)
    gradients: GradientSettings = field(default_factory=GradientSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    comparison: ComparisonSettings = field(default_factory=ComparisonSettings)
    full_length: FullLengthSettings = field(default_factory=FullLengthSettings)
    search: SearchSettings = field(default_factory=SearchSettings)
    tuner: TunerSettings = field(default_factory=TunerSettings)
    workers: WorkerSettings = field(default_factory=WorkerSettings)
    adaptive: AdaptiveSettings = field(default_factory=AdaptiveSettings)


SETTINGS = Settings()
