from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.errors import BudgetTooSmall
from outcore.tiling.tiles import Gemm, Rates, Tiles, plan_tiles, product_s, simulate, visit
from outcore.units import GIB, MIB

H200: dict[str, Any] = {
    "in_bytes_per_s": 55.4e9,
    "out_bytes_per_s": 55.3e9,
    "memory_bytes_per_s": 4.2e12,
    "num_sms": 132,
}
EXTENTS = st.integers(1, 3000)


def fp32(m: int, n: int, k: int) -> Gemm:
    return Gemm(m, n, k, 4, 4, 4, 4)


def bf16(m: int, n: int, k: int) -> Gemm:
    return Gemm(m, n, k, 2, 2, 2, 4)


def planned(gemm: Gemm, flop_per_s: float, budget_bytes: int) -> Tiles:
    return plan_tiles(gemm, Rates(flop_per_s, **H200), budget_bytes)


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, outcore.tiling.tiles, outcore.tiling.tasks, outcore.tiling.cli; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@settings(max_examples=25, deadline=None)
@given(EXTENTS, EXTENTS, EXTENTS, st.integers(12, 27), st.sampled_from(["", "a", "bc", "ab"]))
def test_every_plan_covers_c_once_and_keeps_its_budget(m: int, n: int, k: int, log_bytes: int, resident: str) -> None:
    gemm = replace(bf16(m, n, k), resident=resident)
    tiles = plan_tiles(gemm, Rates(1e12, 1e10, 1e10), 2**log_bytes)
    assert tiles.device_bytes <= 2**log_bytes
    tasks = tiles.tasks()
    assert [task.index for task in tasks] == list(range(tiles.num_tasks))
    assert len({(task.row, task.col) for task in tasks}) == tiles.num_tasks
    assert sum(task.num_rows * task.num_cols for task in tasks) == m * n
    for task in (tasks[0], tasks[-1]):
        assert sum(stop - start for start, stop in tiles.panels(task)) == k


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 6))
def test_the_order_visits_each_place_once(num_kept: int, num_streamed: int, band: int, ramp: int) -> None:
    places = list(visit(num_kept, num_streamed, band, ramp))
    assert sorted(places) == [(i, j) for i in range(num_kept) for j in range(num_streamed)]


def test_neighbours_in_the_serpentine_share_a_block() -> None:
    places = list(visit(6, 5, 1, 1))
    assert all(one[0] == other[0] or one[1] == other[1] for one, other in pairwise(places))


def test_the_growing_square_gets_more_tiles_from_the_first_loads() -> None:
    def tiles_after(num_loads: int, ramp: int) -> int:
        seen_i, seen_j, count = set[int](), set[int](), 0
        for i, j in visit(8, 8, 8, ramp):
            seen_i.add(i)
            seen_j.add(j)
            if len(seen_i) + len(seen_j) > num_loads:
                return count
            count += 1
        return count

    assert tiles_after(8, ramp=4) == 16
    assert tiles_after(8, ramp=1) == 7


@pytest.mark.parametrize(
    ("gemm", "flop_per_s", "budget_bytes", "least_share"),
    [
        (fp32(32768, 32768, 32768), 53.1e12, 8 * GIB, 0.97),
        (bf16(65536, 65536, 65536), 699e12, 16 * GIB, 0.92),
        (fp32(65536, 65536, 65536), 341e12, 16 * GIB, 0.92),
        (fp32(65536, 65536, 65536), 315e12, 16 * GIB, 0.94),
    ],
)
def test_the_bars_are_within_reach_of_the_plan(
    gemm: Gemm, flop_per_s: float, budget_bytes: int, least_share: float
) -> None:
    tiles = planned(gemm, flop_per_s, budget_bytes)
    assert tiles.prediction is not None
    assert tiles.prediction.bound == "compute"
    assert gemm.num_flop / tiles.prediction.seconds >= least_share * flop_per_s
    assert tiles.prediction.bytes_in + tiles.prediction.bytes_out <= 1.1 * tiles.square_tiles_bytes


@pytest.mark.parametrize("budget_gib", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("side", [32768, 65536, 131072])
def test_traffic_stays_near_that_of_square_tiles(side: int, budget_gib: int) -> None:
    tiles = planned(fp32(side, side, side), 53.1e12, budget_gib * GIB)
    assert tiles.prediction is not None
    assert tiles.prediction.bytes_in + tiles.prediction.bytes_out <= 1.1 * tiles.square_tiles_bytes


def test_the_three_regimes_have_the_traffic_they_promise() -> None:
    gemm = fp32(8192, 8192, 8192)
    a_bytes = 8192 * 8192 * 4
    everything = planned(gemm, 50e12, 2 * GIB)
    assert everything.prediction is not None
    assert everything.prediction.bytes_in == 2 * a_bytes
    kept = planned(gemm, 50e12, 450 * MIB)
    assert kept.prediction is not None
    assert "fits and is kept" in kept.regime
    assert kept.prediction.bytes_in == 2 * a_bytes
    neither = planned(gemm, 50e12, 100 * MIB)
    assert neither.prediction is not None
    assert neither.prediction.bytes_in > 2 * a_bytes
    assert neither.prediction.bytes_out == a_bytes


def test_a_thin_product_says_that_the_link_binds() -> None:
    tiles = planned(bf16(256, 65536, 65536), 699e12, 4 * GIB)
    assert tiles.prediction is not None
    assert tiles.prediction.bound == "link in"
    assert tiles.prediction.bytes_in == (256 * 65536 + 65536 * 65536) * 2


def test_files_make_the_disk_bind() -> None:
    gemm = replace(fp32(16384, 16384, 16384), on_disk="ab")
    tiles = plan_tiles(gemm, Rates(53e12, 55e9, 55e9, disk_bytes_per_s=2e9), 1 * GIB)
    assert tiles.prediction is not None
    assert tiles.prediction.bound == "disk"


def test_a_longer_link_never_makes_a_plan_quicker() -> None:
    tiles = planned(bf16(32768, 32768, 32768), 699e12, 4 * GIB)
    times_s = [simulate(tiles, Rates(699e12, link, link)).seconds for link in (12e9, 25e9, 55e9, 200e9)]
    assert times_s == sorted(times_s, reverse=True)
    assert simulate(tiles, Rates(699e12, 1e15, 1e15)).seconds < 1.02 * times_s[-1] + 0.01


def test_a_budget_below_one_element_of_each_is_refused_with_both_numbers() -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        planned(fp32(100, 100, 100), 1e12, 11)
    assert caught.value.needed_bytes == 12
    assert "11 B" in str(caught.value)
    assert planned(fp32(100, 100, 100), 1e12, 12).device_bytes == 12


def test_thin_tiles_and_crowds_of_slots_are_not_planned_even_on_half_a_link() -> None:
    """The plan that a wrongly measured link once led to: 256 rows and 2984 slots, at 61 % of the in-core rate."""
    rates = Rates(395e12, 27.2e9, 55.1e9, memory_bytes_per_s=3.5e12, num_sms=132)
    tiles = plan_tiles(fp32(65536, 65536, 65536), rates, 16 * GIB)
    assert min(tiles.num_rows, tiles.num_cols) >= 1024
    assert tiles.num_a_slots + tiles.num_b_slots <= 128


def test_a_thin_block_multiplies_more_slowly() -> None:
    tiles = planned(fp32(65536, 65536, 65536), 315e12, 16 * GIB)
    rates = Rates(315e12, **H200)
    thin_s = 32 * product_s(tiles, rates, 256, 8448, 4096)
    assert thin_s > 1.05 * product_s(tiles, rates, 8192, 8448, 4096)


def test_the_first_loads_and_the_last_store_are_hidden() -> None:
    tiles = planned(fp32(32768, 32768, 32768), 53.58e12, 8 * GIB)
    assert tiles.prediction is not None
    assert tiles.opening > 1
    assert 0 < tiles.closing < tiles.num_rows
    exposed_s = tiles.prediction.seconds - tiles.prediction.compute_s
    bare = simulate(replace(tiles, opening=1, closing=0), Rates(53.58e12, **H200))
    assert exposed_s < 0.3 * (bare.seconds - bare.compute_s)
    assert (tiles.prediction.bytes_in, tiles.prediction.bytes_out) == (bare.bytes_in, bare.bytes_out)


def test_halves_without_sums_of_their_own_are_never_added_up_in_parts() -> None:
    tiles = planned(bf16(65536, 65536, 65536), 699e12, 16 * GIB)
    assert tiles.opening == 1


def test_a_plan_is_a_json_value() -> None:
    import json

    text = json.dumps(planned(fp32(4096, 4096, 4096), 50e12, GIB).to_json())
    assert json.loads(text)["gemm"]["m"] == 4096
