from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from outcore.tiling.lanes import CpuLane
from outcore.tiling.product import WORKSPACE_BYTES, Job, slots_bytes
from outcore.tiling.rates import SUSTAINED_S, settled_s, sustained_s
from outcore.tiling.streams import ThreadStream
from outcore.tiling.tiles import Tiles, simulate
from outcore.units import GIB, MIB
from tests.cpu.tiling.tiling_products import RATES, assert_product, random_matrix


@pytest.mark.parametrize("flips", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("stages", [False, True])
def test_parts_and_a_cut_give_the_product_and_the_predicted_bytes(flips: tuple[bool, bool], stages: bool) -> None:
    """Late copies: a product that did not wait for its part would multiply what was in the slot before."""
    a, b = (random_matrix(90, 130, torch.float32), random_matrix(130, 70, torch.float32))
    a, b = (x.t().contiguous().t() if flip else x for x, flip in zip((a, b), flips))
    lane = CpuLane("slow", copy_in=ThreadStream("late loads", delay_s=0.002), stages=stages)
    job = Job(a, b, memory="1MiB", devices=[lane], rates=RATES)
    tiles = Tiles(job.gemm, job.budget_bytes, 32, 48, 64, 3, 3, 2, opening=5, closing=9)
    job = Job(a, b, memory="1MiB", devices=[lane], rates=RATES, tiles=replace(tiles, prediction=simulate(tiles, RATES)))
    report = job.run()
    lane.close()
    assert_product(job.out, a, b)
    assert report.lanes[0].num_pieces == tiles.num_tasks + 1
    assert (report.bytes_in, report.bytes_out) == (job.prediction.bytes_in, job.prediction.bytes_out)


class Counting(ThreadStream):
    """Counts products."""

    num_products = 0

    def run(self, operation: Callable[[], object], work: float = 0.0) -> None:
        self.num_products += work > 0
        super().run(operation, work)


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
def test_a_lane_begins_in_parts_whichever_tasks_it_gets(num_lanes: int) -> None:
    """One piece of a lane alone, two of lanes that share: so many are claimed before their blocks are there."""
    a, b = random_matrix(256, 64), random_matrix(64, 240)
    counts = [Counting(f"lane {index}") for index in range(num_lanes)]
    lanes = [CpuLane(f"lane {index}", compute=count) for index, count in enumerate(counts)]
    job = Job(a, b, memory="200KB", devices=lanes, rates=RATES)
    tiles = Tiles(job.gemm, job.budget_bytes, 32, 48, 64, 3, 3, 2, opening=4, num_lanes=num_lanes)
    job = Job(a, b, memory="200KB", devices=lanes, rates=RATES, tiles=replace(tiles, prediction=simulate(tiles, RATES)))
    report = job.run()
    for lane, count, done in zip(lanes, counts, report.lanes):
        lane.close()
        assert count.num_products == done.num_pieces + 3 * min(done.num_pieces, 1 if num_lanes == 1 else 2)
    assert_product(job.out, a, b)


def test_the_budget_covers_what_cublas_takes() -> None:
    """Three workspaces of 32 MiB stood beside the slots when the peak was measured: 16.03 GiB of 16 then."""
    assert slots_bytes(16 * GIB) + 3 * 32 * MIB + 64 * MIB <= 16 * GIB
    assert slots_bytes(256 * MIB) + 3 * 32 * MIB <= 256 * MIB
    assert slots_bytes(2 * WORKSPACE_BYTES + 1) > slots_bytes(2 * WORKSPACE_BYTES - 2)


def test_a_link_that_is_busy_at_first_is_measured_again() -> None:
    """Half the rate for the first fifty milliseconds, whichever direction asks."""
    clock_s = 0.0

    def copy_once() -> float:
        nonlocal clock_s
        took_s = 0.010 if clock_s < 0.05 else 0.005
        clock_s += took_s
        return took_s

    assert settled_s(copy_once, copy_once) == (0.005, 0.005)


def test_one_direction_slowed_for_long_is_waited_for_and_a_lopsided_link_believed() -> None:
    loads = iter([0.010] * 20)
    assert settled_s(lambda: next(loads, 0.005), lambda: 0.005) == (0.005, 0.005)
    assert settled_s(lambda: 0.010, lambda: 0.005) == (0.010, 0.005)


def test_the_matrix_rate_is_the_one_that_lasts() -> None:
    """A power limit that answers after a third of the time: 20 % slower from then on."""
    clock_s = 0.0

    def multiply_once() -> float:
        nonlocal clock_s
        took_s = 0.004 if clock_s < SUSTAINED_S / 3 else 0.005
        clock_s += took_s
        return took_s

    assert sustained_s(multiply_once) == 0.005
