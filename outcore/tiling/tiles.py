"""Gemm + Rates + budget -> Tiles: which blocks of a product are held, in which order, and how long it should take.

A C tile is one task. Its full depth k is taken in panels; blocks of A and B pass through two pools of slots, C is
written back once. One description covers the three classic cases: everything fits (every block has a slot), one
operand fits (its pool holds all of it, the other streams), neither (a band of one operand stays while the other
streams past it, or a wide C tile stays while panels of both stream). The planner proposes tile sides, depth and
split of the budget, estimates each by its traffic, then plays the best of them through the very cache and order the
executor uses and keeps the fastest.

Follows Hong and Kung / Smith et al. (arXiv 1702.02017) for the traffic bound, BLASX (arXiv 1510.05041) for tasks and
cache. It differs in that tile sides follow from bytes and rates: BLASX compiles in 2048, which caps bf16 at a few
percent here. No torch in this file: a product can be planned for a card that is not in the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from outcore.errors import BudgetTooSmall
from outcore.tiling.slots import SlotCache

MAX_STEPS_SIMULATED = 25_000  # one plan
MAX_STEPS_PLAYED = 40_000  # all plans of a search: a fraction of a second
NUM_SIMULATED = 16
NUM_STREAMING_SLOTS = 2
ROW_OVERHEAD_BYTES = 256  # what the start of each row of a strided copy costs, as bytes on the link
SHORTEST_ROW_BYTES = 4096  # of a strided copy: shorter rows are gathered by the host first
GATHER_SLOWDOWN = 4


@dataclass(frozen=True)
class Gemm:
    """C[m, n] = A[m, k] B[k, n] as the planner sees it: extents, bytes per element, and what lives where."""

    m: int
    n: int
    k: int
    host_element_bytes: int
    slot_element_bytes: int
    out_element_bytes: int
    sum_element_bytes: int
    reads_c: bool = False
    resident: str = ""  # which of "abc" already lie on the device: they cost neither slots nor traffic
    on_disk: str = ""  # which of "abc" are files
    flipped: str = ""  # which of "ab" are stored as their transpose: that decides which blocks are contiguous

    @property
    def num_flop(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True)
class Rates:
    """What the machine does per second, measured or given."""

    flop_per_s: float
    in_bytes_per_s: float
    out_bytes_per_s: float
    memory_bytes_per_s: float = 4e12
    disk_bytes_per_s: float = 2e9
    launch_s: float = 1e-5
    num_sms: int = 0
    origin: str = "given"


@dataclass(frozen=True)
class Task:
    """One C tile: rows [row, row + num_rows), columns [col, col + num_cols)."""

    index: int
    row: int
    num_rows: int
    col: int
    num_cols: int


@dataclass(frozen=True)
class Prediction:
    seconds: float
    compute_s: float
    in_s: float
    out_s: float
    bytes_in: int
    bytes_out: int
    bound: str  # the resource that decides: "compute", "link in", "link out" or "disk"


@dataclass(frozen=True)
class Tiles:
    """The plan: a pure value. `tasks()` is the order, `panels()` the depth steps of a task."""

    gemm: Gemm
    budget_bytes: int
    num_rows: int
    num_cols: int
    depth: int
    num_a_slots: int
    num_b_slots: int
    num_c_slots: int
    keeps: str = "a"  # the operand whose band stays while the other streams
    band: int = 1  # how many block rows (columns) of it stay
    ramp: int = 1  # how many of the other's blocks the first band opens with, so that the first loads feed many tiles
    prediction: Prediction | None = None

    @property
    def num_panels(self) -> int:
        return max(1, math.ceil(self.gemm.k / self.depth))

    @property
    def a_block_bytes(self) -> int:
        return 0 if "a" in self.gemm.resident else self.num_rows * self.depth * self.gemm.slot_element_bytes

    @property
    def b_block_bytes(self) -> int:
        return 0 if "b" in self.gemm.resident else self.num_cols * self.depth * self.gemm.slot_element_bytes

    @property
    def c_tile_bytes(self) -> int:
        return 0 if "c" in self.gemm.resident else self.num_rows * self.num_cols * self.gemm.out_element_bytes

    @property
    def has_sums(self) -> bool:
        """Whether partial sums are wider than the result and so need a tile of their own."""
        wider = self.gemm.sum_element_bytes > self.gemm.out_element_bytes
        return wider and (self.num_panels > 1 or self.gemm.slot_element_bytes > self.gemm.out_element_bytes)

    @property
    def device_bytes(self) -> int:
        sums_bytes = self.num_rows * self.num_cols * self.gemm.sum_element_bytes if self.has_sums else 0
        slots_bytes = self.num_a_slots * self.a_block_bytes + self.num_b_slots * self.b_block_bytes
        return slots_bytes + self.num_c_slots * self.c_tile_bytes + sums_bytes

    @property
    def grid(self) -> tuple[int, int]:
        return math.ceil(self.gemm.m / self.num_rows), math.ceil(self.gemm.n / self.num_cols)

    @property
    def num_tasks(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def lower_bound_bytes(self) -> float:
        """2mnk / sqrt(M) words for M words of device memory, plus each matrix once."""
        gemm = self.gemm
        num_words = max(1.0, self.budget_bytes / gemm.host_element_bytes)
        compulsory_bytes = (gemm.m * gemm.k + gemm.k * gemm.n) * gemm.host_element_bytes
        compulsory_bytes += gemm.m * gemm.n * gemm.out_element_bytes * (2 if gemm.reads_c else 1)
        return max(1.0, gemm.num_flop / math.sqrt(num_words) * gemm.host_element_bytes + compulsory_bytes)

    @property
    def regime(self) -> str:
        mt, nt = self.grid
        a_fits = "a" in self.gemm.resident or self.num_a_slots >= mt * self.num_panels
        b_fits = "b" in self.gemm.resident or self.num_b_slots >= nt * self.num_panels
        if a_fits and b_fits:
            return "everything fits"
        if a_fits or b_fits:
            return f"{'A' if a_fits else 'B'} fits and is kept"
        held = self.num_a_slots if self.keeps == "a" else self.num_b_slots
        if held >= self.num_panels:
            return f"a band of {self.keeps.upper()} is kept, {'B' if self.keeps == 'a' else 'A'} streams past it"
        return "C tiles are kept, panels of A and B stream"

    def tasks(self) -> tuple[Task, ...]:
        mt, nt = self.grid
        if self.keeps == "a":
            places = list(visit(mt, nt, self.band, self.ramp))
        else:
            places = [(i, j) for j, i in visit(nt, mt, self.band, self.ramp)]
        return tuple(self._task(index, i, j) for index, (i, j) in enumerate(places))

    def _task(self, index: int, i: int, j: int) -> Task:
        row, col = i * self.num_rows, j * self.num_cols
        num_rows, num_cols = min(self.num_rows, self.gemm.m - row), min(self.num_cols, self.gemm.n - col)
        return Task(index, row, num_rows, col, num_cols)

    def panels(self, task: Task) -> list[tuple[int, int]]:
        """Depth ranges of a task; every second task runs them backwards: the last panels are still in their slots."""
        panels = [(start, min(start + self.depth, self.gemm.k)) for start in range(0, self.gemm.k, self.depth)]
        return panels[::-1] if task.index % 2 else panels

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "num_tasks": self.num_tasks, "device_bytes": self.device_bytes, "regime": self.regime}


def visit(num_kept: int, num_streamed: int, band: int, ramp: int) -> Iterator[tuple[int, int]]:
    """Grid places (kept, streamed) in order: bands of the kept operand, the other passing to and fro like a serpentine.

    The first band opens with a growing square over `ramp` streamed blocks: each load then serves as many tiles as
    possible, which shortens the time until the products, not the loads, are the slower side.
    """
    for band_index, first in enumerate(range(0, num_kept, band)):
        kept = list(range(first, min(first + band, num_kept)))
        streamed = list(range(num_streamed))
        if band_index % 2:
            streamed.reverse()
        if band_index == 0 and ramp > 1:
            yield from _grow(kept, streamed[:ramp])
            streamed = streamed[ramp:]
        for turn, j in enumerate(streamed):
            for i in reversed(kept) if turn % 2 else kept:
                yield i, j


def _grow(kept: list[int], streamed: list[int]) -> Iterator[tuple[int, int]]:
    for shell in range(max(len(kept), len(streamed))):
        if shell < len(streamed):
            for i in kept[:shell]:
                yield i, streamed[shell]
        if shell < len(kept):
            for j in reversed(streamed[: shell + 1]):
                yield kept[shell], j


def simulate(tiles: Tiles, rates: Rates) -> Prediction:
    """Play the plan with three clocks (loads, products, stores) and the executor's own cache."""
    gemm, caches = tiles.gemm, {"a": SlotCache(tiles.num_a_slots), "b": SlotCache(tiles.num_b_slots)}
    link = _link_rates(tiles, rates)
    in_s = mm_s = out_s = 0.0
    c_free_s = [0.0] * tiles.num_c_slots
    in_busy_s = mm_busy_s = out_busy_s = 0.0
    bytes_in = bytes_out = 0
    for task in tiles.tasks():
        c_slot = task.index % tiles.num_c_slots
        c_bytes = 0 if "c" in gemm.resident else task.num_rows * task.num_cols * gemm.out_element_bytes
        ready_s = c_free_s[c_slot]
        if gemm.reads_c and c_bytes:
            load_s = c_bytes / link["c"]
            in_s = ready_s = max(in_s, ready_s) + load_s
            in_busy_s += load_s
            bytes_in += c_bytes
        for start, stop in tiles.panels(task):
            used = []
            for name, place, extent in (("a", task.row, task.num_rows), ("b", task.col, task.num_cols)):
                if name in gemm.resident:
                    continue
                entry, hit = caches[name].acquire((place, start))
                if not hit:
                    block_bytes = extent * (stop - start) * gemm.host_element_bytes
                    load_s = block_bytes / link[name]
                    in_s = max([in_s, *caches[name].claim_readers(entry)]) + load_s
                    in_busy_s += load_s
                    bytes_in += block_bytes
                    entry.ready = in_s
                used.append((caches[name], entry))
                ready_s = max(ready_s, entry.ready)
            step_s = product_s(tiles, rates, task.num_rows, task.num_cols, stop - start)
            mm_s = max(mm_s, ready_s) + step_s
            mm_busy_s += step_s
            for cache, entry in used:
                cache.release(entry, mm_s)
        if c_bytes:
            store_s = c_bytes / link["out"]
            out_s = c_free_s[c_slot] = max(out_s, mm_s) + store_s
            out_busy_s += store_s
            bytes_out += c_bytes
        else:
            c_free_s[c_slot] = mm_s
    bound = _bound(gemm, mm_busy_s, in_busy_s, out_busy_s)
    return Prediction(max(mm_s, out_s), mm_busy_s, in_busy_s, out_busy_s, bytes_in, bytes_out, bound)


def _bound(gemm: Gemm, compute_s: float, in_s: float, out_s: float) -> str:
    _, bound = max((compute_s, "compute"), (in_s, "link in"), (out_s, "link out"))
    if (bound == "link in" and set("ab") & set(gemm.on_disk)) or (bound == "link out" and "c" in gemm.on_disk):
        return "disk"
    return bound


def _link_rates(tiles: Tiles, rates: Rates) -> dict[str, float]:
    """Bytes a second of loading A, B and C and of storing C ("out"): link or disk, less where a block is strided."""
    gemm = tiles.gemm
    a_run = (tiles.num_rows, gemm.m) if "a" in gemm.flipped else (tiles.depth, gemm.k)
    b_run = (tiles.depth, gemm.k) if "b" in gemm.flipped else (tiles.num_cols, gemm.n)
    runs = {"a": a_run, "b": b_run, "c": (tiles.num_cols, gemm.n), "out": (tiles.num_cols, gemm.n)}
    found = {}
    for name, (run, extent) in runs.items():
        rate = rates.out_bytes_per_s if name == "out" else rates.in_bytes_per_s
        if ("c" if name == "out" else name) in gemm.on_disk:
            rate = min(rate, rates.disk_bytes_per_s)
        run_bytes = run * gemm.host_element_bytes
        slowdown = 1 + ROW_OVERHEAD_BYTES / run_bytes
        if run_bytes < SHORTEST_ROW_BYTES:
            slowdown = max(slowdown, GATHER_SLOWDOWN)
        found[name] = rate if run >= extent else rate / slowdown
    return found


def product_s(tiles: Tiles, rates: Rates, num_rows: int, num_cols: int, depth: int) -> float:
    """Seconds of one block product: arithmetic, a last half-empty wave, the sums read and written again."""
    seconds = 2.0 * num_rows * num_cols * depth / rates.flop_per_s
    if rates.num_sms:
        num_blocks = math.ceil(num_rows / 128) * math.ceil(num_cols / 256)
        seconds *= math.ceil(num_blocks / rates.num_sms) * rates.num_sms / num_blocks
    if tiles.num_panels > 1:
        seconds += 2 * num_rows * num_cols * tiles.gemm.sum_element_bytes / rates.memory_bytes_per_s
    return seconds + rates.launch_s


@lru_cache(maxsize=256)
def plan_tiles(gemm: Gemm, rates: Rates, budget_bytes: int, num_lanes: int = 1) -> Tiles:
    """The fastest plan within `budget_bytes` of device memory, by simulation; raises BudgetTooSmall where none fits."""
    candidates = list(_candidates(gemm, budget_bytes, num_lanes, fine=False))
    if not candidates:
        candidates = list(_candidates(gemm, budget_bytes, 1, fine=True))
    if not candidates:
        smallest = _smallest(gemm)
        raise BudgetTooSmall(smallest.device_bytes, budget_bytes, f"a {gemm.m} x {gemm.n} x {gemm.k} product")
    few = [tiles for tiles in candidates if tiles.num_tasks * tiles.num_panels <= MAX_STEPS_SIMULATED]
    if not few:  # a very small budget: too many steps to play them all, trust the estimate
        best = min(candidates, key=lambda tiles: _score(tiles, _estimate(tiles, rates)))
        return replace(best, prediction=_estimate(best, rates))
    few.sort(key=lambda tiles: _score(tiles, _estimate(tiles, rates)))
    played: list[Tiles] = []
    num_steps = 0
    for tiles in few[:NUM_SIMULATED]:
        if num_steps < MAX_STEPS_PLAYED:
            played += [replace(tiles, prediction=simulate(tiles, rates)), *_ramped(tiles, rates)]
            num_steps += tiles.num_tasks * tiles.num_panels
    return min(played, key=lambda tiles: _score(tiles, tiles.prediction) if tiles.prediction else math.inf)


def _score(tiles: Tiles, prediction: Prediction) -> float:
    """Seconds, with traffic as the tie-break: a plan that moves twice the lower bound must be five percent faster."""
    num_bytes = prediction.bytes_in + prediction.bytes_out
    return prediction.seconds * (1 + 0.05 * num_bytes / tiles.lower_bound_bytes)


def _ramped(tiles: Tiles, rates: Rates) -> Iterator[Tiles]:
    kept, streamed = tiles.grid if tiles.keeps == "a" else tiles.grid[::-1]
    num_slots = tiles.num_b_slots if tiles.keeps == "a" else tiles.num_a_slots
    for ramp in (2, 4):
        if ramp <= streamed and ramp * tiles.num_panels <= num_slots and min(tiles.band, kept) > 1:
            ramped = replace(tiles, ramp=ramp)
            yield replace(ramped, prediction=simulate(ramped, rates))


def _candidates(gemm: Gemm, budget_bytes: int, num_lanes: int, *, fine: bool) -> Iterator[Tiles]:
    for num_rows in _sides(gemm.m, fine):
        for num_cols in _sides(gemm.n, fine):
            num_tasks = math.ceil(gemm.m / num_rows) * math.ceil(gemm.n / num_cols)
            if num_lanes > 1 and num_tasks < 8 * num_lanes and max(num_rows, num_cols) > 128:
                continue
            for depth in _sides(gemm.k, fine):
                yield from _splits(gemm, budget_bytes, num_rows, num_cols, depth)


def _sides(extent: int, fine: bool) -> list[int]:
    """Tile sides to try: the extent in ever more parts, rounded up to what matrix units like."""
    granule = 256 if extent >= 4096 else 64 if extent >= 1024 else 1
    smallest = 1 if fine else min(extent, 256)
    sides: list[int] = []
    num_parts = 1.0
    while True:
        side = math.ceil(extent / int(num_parts))
        if not fine:
            side = math.ceil(side / granule) * granule
        side = max(1, min(side, extent))
        if side < smallest:
            break
        if not sides or side < sides[-1]:
            sides.append(side)
        if side == 1 or num_parts > extent:
            break
        num_parts *= 2 if fine or num_parts >= 16 else (4 / 3 if math.log2(num_parts) % 1 else 1.5)
    return sides


def _splits(gemm: Gemm, budget_bytes: int, num_rows: int, num_cols: int, depth: int) -> Iterator[Tiles]:
    """Ways to divide the budget between the two pools, for each choice of the operand that stays."""
    mt, nt = math.ceil(gemm.m / num_rows), math.ceil(gemm.n / num_cols)
    panels = math.ceil(gemm.k / depth)
    num_all = {"a": mt * panels, "b": nt * panels}
    least = {name: min(num_all[name], NUM_STREAMING_SLOTS) for name in "ab"}
    plain = Tiles(gemm, budget_bytes, num_rows, num_cols, depth, least["a"], least["b"], min(2, mt * nt))
    if plain.device_bytes > budget_bytes:
        plain = replace(plain, num_c_slots=1)  # a wider tile for a store that nothing hides
    if plain.device_bytes > budget_bytes:
        plain = replace(plain, num_a_slots=1, num_b_slots=1)
        if plain.device_bytes <= budget_bytes:
            yield plain
        return
    block_bytes = {"a": plain.a_block_bytes, "b": plain.b_block_bytes}
    for keeps, streams in (("a", "b"), ("b", "a")):
        wants = {num_all[keeps], panels + 1 if panels > 1 else 2, least[keeps]}
        # A streamed block is used once per kept block: with several panels that takes a slab of slots, one to prefetch.
        reserved = {least[streams], min(num_all[streams], panels + 1), min(num_all[streams], 5 * panels)}
        for num_streamed in sorted(reserved):
            spare_bytes = budget_bytes - plain.device_bytes - (num_streamed - least[streams]) * block_bytes[streams]
            if spare_bytes < 0:
                continue
            most = least[keeps] + (spare_bytes // block_bytes[keeps] if block_bytes[keeps] else num_all[keeps])
            for num_kept in sorted({min(most, num_all[keeps]), *(min(want, most) for want in wants)}):
                yield _with_slots(plain, keeps, int(num_kept), num_streamed, num_all)


def _with_slots(plain: Tiles, keeps: str, num_kept: int, num_streamed: int, num_all: dict[str, int]) -> Tiles:
    """A band is as many slabs of the kept operand as have slots, less one for the next band's first loads."""
    panels = plain.num_panels
    num_slabs = num_kept // panels
    holds_slab = num_streamed >= panels
    resident = num_kept >= num_all[keeps]
    band = num_slabs if resident else (max(1, num_slabs - 1) if holds_slab else 1)
    num_a_slots, num_b_slots = (num_kept, num_streamed) if keeps == "a" else (num_streamed, num_kept)
    band = max(1, band) if holds_slab else 1
    return replace(plain, keeps=keeps, band=band, num_a_slots=num_a_slots, num_b_slots=num_b_slots)


@lru_cache(maxsize=65536)
def _estimate(tiles: Tiles, rates: Rates) -> Prediction:
    """Traffic and seconds by formula: good enough to choose which plans to play."""
    gemm, panels = tiles.gemm, tiles.num_panels
    mt, nt = tiles.grid
    slots = {"a": tiles.num_a_slots, "b": tiles.num_b_slots}
    counts, other = {"a": mt, "b": nt}, "b" if tiles.keeps == "a" else "a"
    reads = {tiles.keeps: 1 if slots[tiles.keeps] >= panels * min(tiles.band, counts[tiles.keeps]) else counts[other]}
    passes = math.ceil(counts[tiles.keeps] / tiles.band) if slots[other] >= panels else counts[tiles.keeps]
    reads[other] = 1 if slots[other] >= panels * counts[other] else passes
    matrix_bytes = {"a": gemm.m * gemm.k * gemm.host_element_bytes, "b": gemm.n * gemm.k * gemm.host_element_bytes}
    moved = {name: 0 if name in gemm.resident else matrix_bytes[name] * reads[name] for name in "ab"}
    c_bytes = 0 if "c" in gemm.resident else gemm.m * gemm.n * gemm.out_element_bytes
    bytes_in = moved["a"] + moved["b"] + (c_bytes if gemm.reads_c else 0)
    link = _link_rates(tiles, rates)
    in_s = moved["a"] / link["a"] + moved["b"] / link["b"] + (c_bytes / link["c"] if gemm.reads_c else 0.0)
    out_s = c_bytes / link["out"]
    step_s = product_s(tiles, rates, tiles.num_rows, tiles.num_cols, tiles.depth)
    compute_s = step_s * (gemm.num_flop / (2.0 * tiles.num_rows * tiles.num_cols * tiles.depth) if gemm.k else 1)
    first_bytes = (tiles.a_block_bytes + tiles.b_block_bytes) * gemm.host_element_bytes / gemm.slot_element_bytes
    ends_s = first_bytes / rates.in_bytes_per_s + tiles.c_tile_bytes / rates.out_bytes_per_s
    streams = min(tiles.num_a_slots, tiles.num_b_slots) > 1 or tiles.num_tasks * panels == 1
    overlap_s = max(compute_s, in_s, out_s) if streams else compute_s + in_s
    if tiles.num_c_slots == 1 and tiles.num_tasks > 1:
        overlap_s += out_s
    bound = _bound(gemm, compute_s, in_s, out_s)
    return Prediction(overlap_s + ends_s, compute_s, in_s, out_s, bytes_in, c_bytes, bound)


def _smallest(gemm: Gemm) -> Tiles:
    return Tiles(gemm, 1, 1, 1, 1, 1, 1, 1)
