"""The tunable numbers of estimates, with unit and origin."""

from __future__ import annotations

from dataclasses import dataclass

# Names of optimizers whose state can be counted -> classes of torch.optim; "none" has no state.
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "none": ""}


@dataclass(frozen=True)
class KindCosts:
    """Costs of some kinds of ops, relative to matrix products and to ops that move their bytes once."""

    convolution_share: float  # of the operations per second of products
    channels_last_share: float  # the same with channels last
    attention_share: float  # fused kernels; of a causal one, half of the scores are counted
    norm_passes: float  # times the bytes of its input and output
    norm_backward_passes: float
    pool_passes: float
    pool_backward_passes: float
    softmax_passes: float
    random_passes: float


# From six steps recorded op by op on an H200 (benchmarks/recorded.py); shares of a CPU from the eight small networks of
# benchmarks/estimate.py, one thread.
ON_CUDA = KindCosts(
    convolution_share=0.4,  # with TF32: 0.32 to 0.49
    channels_last_share=0.6,  # steps of VGG-16 and R3D-18 get shorter accordingly
    attention_share=0.5,  # 0.37 to 0.66
    norm_passes=2.7,  # batch 2.2 to 3.6, layer 2.9
    norm_backward_passes=3.8,  # batch 3.0 to 6.5, layer 4.0
    pool_passes=1.7,
    pool_backward_passes=4.0,  # 3.8 to 4.3
    softmax_passes=1.5,  # 1.4 and 1.6
    random_passes=1.0,  # not measured
)
ON_CPU = KindCosts(
    convolution_share=0.25,  # 0.16 to 0.34
    channels_last_share=0.25,  # not measured separately
    attention_share=0.4,  # 0.34 and 0.5
    norm_passes=2.5,  # batch 3.5, layer 0.6
    norm_backward_passes=1.5,  # batch 2.2, layer 0.5
    pool_passes=8.0,  # 4 to 13
    pool_backward_passes=2.0,
    softmax_passes=9.0,
    random_passes=25.0,  # 20 to 30: numbers are drawn one after the other
)


@dataclass(frozen=True)
class EstimateSettings:
    # Of the same steps of an H200, against its vendor's peaks:
    reached_flops_share: float = 0.75  # matrix products of bfloat16 and of float32 reach 0.76 of the peak
    reached_memory_share: float = 0.85  # elementwise ops: 0.70 to 0.94 of the bandwidth
    loop_share: float = 0.01  # of the least budget, for tensors that a loop keeps, such as a sum of losses (guessed)
    # From 25 settled plans on an H200 (benchmarks/results/slowdown_h200_20261118.json), against their budgets:
    reached_budget_share: float = 0.9  # 0.82 to 0.94: the caching allocator cannot use the rest
    point_shares: tuple[float, ...] = (0.0, 0.15, 0.4, 1.0)  # budgets of the curve, as shares of the way from
    # the least budget to the in-core peak; the curve bends near its lower end (guessed)
    point_share: float = 1.02  # times the least budget, for the first point; below it there are few plans (guessed)


SETTINGS = EstimateSettings()
