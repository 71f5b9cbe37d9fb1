"""Plans of a compiled step: ResNet-50 with 640 images, as Inductor writes it for an H200.

The step is Inductor's text for 16 images (PyTorch 2.13, written without a GPU), run through the compiled front end with
stubs for kernels. Activations are scaled to 640 images; an op's seconds are its bytes at 4.2 TB/s, and convolutions
have what is left of the 0.162 s that the step was measured to take in-core.
"""

from __future__ import annotations

import functools
import gzip
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from outcore.errors import BudgetTooSmall
from outcore.planning import plans
from outcore.planning.allocator.fragmentation import has_room
from outcore.planning.planners import hybrid
from outcore.planning.settings import HYBRID
from outcore.units import GIB
from outcore.values import Budget, Machine, Plan, Trace

MACHINE = Machine("cuda", 139 * GIB, 100 * GIB, 0, 50e9, 50e9, 1e9, 1e9, duplex_share=0.85)
NUM_BUDGETS = 8
NOISE = 0.02  # of a step's time: searches do not end equally far from the best


@functools.cache
def step() -> Trace:
    path = Path(__file__).parents[2] / "golden/compiled_resnet50.trace.json.gz"
    return Trace.from_json(gzip.decompress(path.read_bytes()).decode())


def planned(size_bytes: int, planner: str) -> Plan:
    return plans(step(), MACHINE, Budget(size_bytes, 100 * GIB, 0), planner=planner, most=1)[0]


def budgets() -> list[int]:
    """From in-core down to the least there is a plan for."""
    most_bytes = planned(1 << 40, "priced").predicted_peak_bytes
    with pytest.raises(BudgetTooSmall) as refused:
        planned(1 << 20, "priced")
    least_bytes = refused.value.needed_bytes
    assert least_bytes < 0.32 * most_bytes
    return [most_bytes - (most_bytes - least_bytes) * at // (NUM_BUDGETS - 1) for at in range(NUM_BUDGETS)]


@pytest.mark.parametrize("planner", ["priced", "hybrid"])
def test_less_memory_never_takes_less_time(planner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "HYBRID", replace(HYBRID, max_flips=300))  # a shorter search is the harder case
    made = [planned(size_bytes, planner) for size_bytes in budgets()]
    assert all(plan.predicted_peak_bytes <= plan.budget.device_bytes for plan in made)
    for more, less in itertools.pairwise(made):
        assert less.predicted_step_s >= (1 - NOISE) * more.predicted_step_s
        assert less.predicted_peak_bytes <= more.budget.device_bytes
    assert made[0].predicted_step_s == made[0].in_core_step_s


def test_a_third_of_its_memory_takes_a_fifth_more_time() -> None:
    """16 GiB of 49."""
    plan = planned(16 * GIB, "hybrid")
    assert plan.predicted_step_s < 1.2 * plan.in_core_step_s


def test_what_runs_out_of_memory_is_known_before() -> None:
    plan = planned(24 * GIB, "priced")
    assert has_room(step(), MACHINE, plan, 25 * GIB)
    assert not has_room(step(), MACHINE, plan, plan.predicted_peak_bytes - GIB)
