"""Plans a product: which blocks are held, in which order they are used, and how long it should take.

A C tile is one task. Its full depth k is processed in panels; blocks of A and B pass through two pools of slots, and C
is written back once. One description covers the three classic cases: everything fits (every block has a slot), one
operand fits (its pool holds all of it, the other is streamed), or neither (a band of one operand stays while the other
is streamed past it, or a wide C tile stays while panels of both are streamed). The planner generates tile sides, depth
and a division of the budget, estimates each candidate by its traffic, then simulates the best of them with the
executor's own cache and order, and keeps the fastest.

Follows Hong and Kung / Smith et al. (arXiv 1702.02017) for the traffic bound, BLASX (arXiv 1510.05041) for tasks and
cache. Unlike in BLASX, which has a fixed tile side of 2048 (which would limit bf16 to a few percent here), tile sides
follow from bytes and rates. This file does not use torch, so that a product can be planned for a device of another
machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from outcore.errors import BudgetTooSmall
from outcore.tiling.slots import Entry, SlotCache

MAX_STEPS_SIMULATED = 25_000  # per plan
MAX_STEPS_PLAYED = 40_000  # in all plans of a search; takes a fraction of a second
NUM_SIMULATED = 16
NUM_STREAMING_SLOTS = 2
SLOW_ROW_BYTES = 5400  # rows this short halve a strided copy: 4 KiB of every 128 KiB came at 20 GB/s on an H200
SHORTEST_ROW_BYTES = 4096  # of a strided copy: shorter rows are gathered by the host first
GATHER_SLOWDOWN = 4
ENQUEUE_S = 5e-5  # host time of a block product: slots, two waits, a launch, an event (given, not measured)
MAX_SLOTS = 512  # of one operand; more slots mean small blocks, which cost more than they save
NUM_OPENING_PARTS = (2, 4, 8, 16)
MOST_SHARED_PARTS = 8  # for lanes that begin together; shorter rows would cost more than an earlier start gains


@dataclass(frozen=True)
class Gemm:
    """C[m, n] = A[m, k] B[k, n] for the planner: extents, bytes per element, and where each matrix is."""

    m: int
    n: int
    k: int
    host_element_bytes: int
    slot_element_bytes: int
    out_element_bytes: int
    sum_element_bytes: int
    reads_c: bool = False
    resident: str = ""  # which of "abc" are already on the device and need neither slots nor traffic
    on_disk: str = ""  # which of "abc" are files
    flipped: str = ""  # which of "ab" are stored transposed, which determines the contiguous blocks
    update_element_bytes: int = 0  # bytes read and written, if C is not stored but updates others

    @property
    def num_flop(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def c_read_bytes(self) -> int:
        """Bytes per element of C that are copied to the device before it is complete."""
        return 0 if "c" in self.resident else self.update_element_bytes or self.reads_c * self.out_element_bytes

    @property
    def c_written_bytes(self) -> int:
        """Bytes per element of C that are copied from the device."""
        return 0 if "c" in self.resident else self.update_element_bytes or self.out_element_bytes


@dataclass(frozen=True)
class Rates:
    """The machine's rates per second, measured or given."""

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
    cut: int = 0  # a single lane computes rows [0, cut) first, to store them during the rest

    @property
    def strips(self) -> list[tuple[int, int]]:
        return [(0, self.cut), (self.cut, self.num_rows)] if self.cut else [(0, self.num_rows)]


@dataclass(frozen=True)
class Prediction:
    seconds: float
    compute_s: float
    in_s: float
    out_s: float
    bytes_in: int
    bytes_out: int
    bound: str  # the bottleneck: "compute", "link in", "link out" or "disk"


@dataclass(frozen=True)
class Tiles:
    """The plan, an immutable value. `tasks()` is the order, `panels()` the depth steps of a task."""

    gemm: Gemm
    budget_bytes: int
    num_rows: int
    num_cols: int
    depth: int
    num_a_slots: int
    num_b_slots: int
    num_c_slots: int
    keeps: str = "a"  # the operand with a band that stays while the other is streamed
    band: int = 1  # the number of its block rows (columns) that stay
    ramp: int = 1  # how many of the other's blocks the first band begins with, so that early loads serve many tiles
    opening: int = 1  # parts of each panel of a lane's first pieces; a product begins with the first part
    closing: int = 0  # rows of the last task that are computed while the others are stored
    num_lanes: int = 1
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
        element_bytes = self.gemm.out_element_bytes + self.gemm.update_element_bytes
        return 0 if "c" in self.gemm.resident else self.num_rows * self.num_cols * element_bytes

    @property
    def has_sums(self) -> bool:
        """Whether partial sums are wider than the result and need a tile of their own."""
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
    def square_tiles_bytes(self) -> float:
        """The traffic of square tiles that fill the memory: 2mnk / sqrt(M) words for M words, plus each matrix once. It
        is not a bound: if an operand fits, a plan may move less."""
        gemm = self.gemm
        num_words = max(1.0, self.budget_bytes / gemm.host_element_bytes)
        compulsory_bytes = (gemm.m * gemm.k + gemm.k * gemm.n) * gemm.host_element_bytes
        written_bytes = gemm.update_element_bytes or gemm.out_element_bytes
        compulsory_bytes += gemm.m * gemm.n * written_bytes * (2 if gemm.reads_c or gemm.update_element_bytes else 1)
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
        tasks = [self._task(index, i, j) for index, (i, j) in enumerate(places)]
        if self.closing and tasks[-1].num_rows > self.closing:
            tasks[-1] = replace(tasks[-1], cut=tasks[-1].num_rows - self.closing)
        return tuple(tasks)

    def _task(self, index: int, i: int, j: int) -> Task:
        row, col = i * self.num_rows, j * self.num_cols
        num_rows, num_cols = min(self.num_rows, self.gemm.m - row), min(self.num_cols, self.gemm.n - col)
        return Task(index, row, num_rows, col, num_cols)

    def panels(self, task: Task, first: int = 0) -> list[tuple[int, int]]:
        """Returns the depth ranges of a task's strip; every second one is reversed, as the last panels are cached."""
        panels = [(start, min(start + self.depth, self.gemm.k)) for start in range(0, self.gemm.k, self.depth)]
        return panels[::-1] if (task.index + (first > 0)) % 2 else panels

    def parts(self, turn: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns the steps in which a panel is loaded and multiplied: one, except for a lane's first pieces.

        `turn` counts the lane's pieces. Lanes that share the work claim two each before any block has arrived, and
        load them over a link that others use as well, so both are divided.
        """
        num_opened = 1 if self.num_lanes == 1 else 2
        step = -(-self.depth // self.opening) if turn < num_opened else self.depth
        return [(at, min(at + step, stop)) for at in range(start, stop, step)]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "num_tasks": self.num_tasks, "device_bytes": self.device_bytes, "regime": self.regime}


def visit(num_kept: int, num_streamed: int, band: int, ramp: int) -> Iterator[tuple[int, int]]:
    """Yields grid places (kept, streamed) in order: bands of the kept operand, with the other alternating in direction.

    The first band begins with a growing square over `ramp` streamed blocks. Each load then serves as many tiles as
    possible, which shortens the time until products and not loads are the bottleneck.
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


class _Clocks:
    """Clocks of loads, products and stores: when each is done, and how long it has been busy."""

    def __init__(self) -> None:
        self.done_s = dict.fromkeys(("in", "mm", "out"), 0.0)
        self.busy_s = dict.fromkeys(("in", "mm", "out"), 0.0)
        self.num_bytes = {"in": 0, "out": 0}

    def run(self, name: str, ready_s: float, took_s: float) -> float:
        self.busy_s[name] += took_s
        self.done_s[name] = max(self.done_s[name], ready_s) + took_s
        return self.done_s[name]

    def move(self, name: str, ready_s: float, num_bytes: int, bytes_per_s: float) -> float:
        self.num_bytes[name] += num_bytes
        return self.run(name, ready_s, num_bytes / bytes_per_s)


def simulate(tiles: Tiles, rates: Rates) -> Prediction:
    """Simulates the plan with three clocks (loads, products, stores) and the executor's own cache."""
    gemm, caches = tiles.gemm, {"a": SlotCache(tiles.num_a_slots), "b": SlotCache(tiles.num_b_slots)}
    link, clocks = _link_rates(tiles, rates), _Clocks()
    c_free_s = [0.0] * tiles.num_c_slots
    pieces = [(task, first, stop) for task in tiles.tasks() for first, stop in task.strips]
    for turn, (task, first, stop_row) in enumerate(pieces):
        c_slot = turn % tiles.num_c_slots
        area = (stop_row - first) * task.num_cols
        done_s = read_s = c_free_s[c_slot]
        if gemm.c_read_bytes:
            read_s = clocks.move("in", done_s, area * gemm.c_read_bytes, link["c"])
        if not gemm.update_element_bytes:  # the product adds to C; updated tensors are needed only after it
            done_s = read_s
        for panel in tiles.panels(task, first):
            parts = tiles.parts(turn, *panel)
            done_s = _play_panel(tiles, rates, link, clocks, caches, task, stop_row - first, parts, done_s)
        sums_bytes = gemm.sum_element_bytes + gemm.out_element_bytes if tiles.has_sums else 0
        passes_bytes = sums_bytes + 2 * gemm.update_element_bytes
        if passes_bytes:
            done_s = clocks.run("mm", max(done_s, read_s), area * passes_bytes / rates.memory_bytes_per_s)
        c_bytes = area * gemm.c_written_bytes
        c_free_s[c_slot] = clocks.move("out", done_s, c_bytes, link["out"]) if c_bytes else done_s
    busy_s, moved = clocks.busy_s, clocks.num_bytes
    bound = _bound(gemm, busy_s["mm"], busy_s["in"], busy_s["out"])
    seconds = max(clocks.done_s["mm"], clocks.done_s["out"])
    return Prediction(seconds, busy_s["mm"], busy_s["in"], busy_s["out"], moved["in"], moved["out"], bound)


def _play_panel(
    tiles: Tiles,
    rates: Rates,
    link: dict[str, float],
    clocks: _Clocks,
    caches: dict[str, SlotCache],
    task: Task,
    num_rows: int,
    parts: list[tuple[int, int]],
    ready_s: float,
) -> float:
    """Simulates the loads and products of a panel; returns when the last product is done."""
    held: list[tuple[str, Entry, int, bool]] = []
    for name, place, extent in (("a", task.row, task.num_rows), ("b", task.col, task.num_cols)):
        if name not in tiles.gemm.resident:
            entry, hit = caches[name].acquire((place, parts[0][0]))
            if not hit:
                entry.ready = max([0.0, *caches[name].claim_readers(entry)])
            held.append((name, entry, extent, hit))
    for start, stop in parts:
        for name, entry, extent, hit in held:
            if not hit:
                num_bytes = extent * (stop - start) * tiles.gemm.host_element_bytes
                entry.ready = clocks.move("in", entry.ready, num_bytes, link[name])
            ready_s = max(ready_s, entry.ready)
        ready_s = clocks.run("mm", ready_s, product_s(tiles, rates, num_rows, task.num_cols, stop - start))
    for name, entry, _, _ in held:
        caches[name].release(entry, ready_s)
    return ready_s


def _bound(gemm: Gemm, compute_s: float, in_s: float, out_s: float) -> str:
    _, bound = max((compute_s, "compute"), (in_s, "link in"), (out_s, "link out"))
    if (bound == "link in" and set("ab") & set(gemm.on_disk)) or (bound == "link out" and "c" in gemm.on_disk):
        return "disk"
    return bound


def _link_rates(tiles: Tiles, rates: Rates) -> dict[str, float]:
    """Returns bytes per second of loading A, B and C and of storing C ("out"), reduced for strided blocks."""
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
        slowdown = 1 + (SLOW_ROW_BYTES / run_bytes) ** 2
        if run_bytes < SHORTEST_ROW_BYTES:
            slowdown = max(slowdown, GATHER_SLOWDOWN)
        found[name] = rate if run >= extent else rate / slowdown
    return found


def wave_excess(num_rows: int, num_cols: int, num_sms: int) -> float:
    """Returns the time of a product over that of its arithmetic, due to a partial last wave of 128 x 256 blocks.

    Half of the empty part counts, a guess from one run on an H200; with all of it bf16 was five percent too slow.
    """
    if not num_sms:
        return 1.0
    num_blocks = math.ceil(num_rows / 128) * math.ceil(num_cols / 256)
    return (1 + math.ceil(num_blocks / num_sms) * num_sms / num_blocks) / 2


def product_s(tiles: Tiles, rates: Rates, num_rows: int, num_cols: int, depth: int) -> float:
    """Returns the seconds of one block product: arithmetic in waves, reading its blocks, reading and writing the sums.

    Reading and arithmetic overlap, but not perfectly: their times are combined as the cube root of the sum of cubes,
    which hardly changes square blocks and slows thin ones (256 rows of tf32 on an H200 by a seventh).
    """
    flop_s = 2.0 * num_rows * num_cols * depth / rates.flop_per_s * wave_excess(num_rows, num_cols, rates.num_sms)
    read_s = (num_rows + num_cols) * depth * tiles.gemm.slot_element_bytes / rates.memory_bytes_per_s
    seconds = math.cbrt(flop_s**3 + read_s**3)
    if depth < tiles.gemm.k:
        seconds += 2 * num_rows * num_cols * tiles.gemm.sum_element_bytes / rates.memory_bytes_per_s
    return max(seconds + rates.launch_s, ENQUEUE_S if rates.num_sms else 0.0)


@lru_cache(maxsize=256)
def plan_tiles(gemm: Gemm, rates: Rates, budget_bytes: int, num_lanes: int = 1) -> Tiles:
    """Returns the fastest plan within `budget_bytes` of device memory, by simulation. Raises BudgetTooSmall."""
    candidates = list(_candidates(gemm, budget_bytes, num_lanes, fine=False))
    if not candidates:
        candidates = list(_candidates(gemm, budget_bytes, 1, fine=True))
    if not candidates:
        smallest = _smallest(gemm)
        raise BudgetTooSmall(smallest.device_bytes, budget_bytes, f"a {gemm.m} x {gemm.n} x {gemm.k} product")
    few = [tiles for tiles in candidates if tiles.num_tasks * tiles.num_panels <= MAX_STEPS_SIMULATED]
    if not few:  # a very small budget has too many steps to simulate, so the estimate decides
        best = min(candidates, key=lambda tiles: _score(tiles, _estimate(tiles, rates)))
        return replace(best, prediction=_estimate(best, rates))
    few.sort(key=lambda tiles: _score(tiles, _estimate(tiles, rates)))
    played: list[Tiles] = []
    num_steps = 0
    for tiles in few[:NUM_SIMULATED]:
        for variant in _variants(tiles, rates):
            if num_steps < MAX_STEPS_PLAYED:
                opening = variant.opening if num_lanes == 1 else min(variant.opening, MOST_SHARED_PARTS)
                prediction = simulate(variant, rates)
                played.append(replace(variant, opening=opening, prediction=prediction, num_lanes=num_lanes))
                num_steps += tiles.num_tasks * tiles.num_panels
    return min(played, key=lambda tiles: _score(tiles, tiles.prediction) if tiles.prediction else math.inf)


def _score(tiles: Tiles, prediction: Prediction) -> float:
    """Returns seconds with a penalty for traffic: a plan that moves twice the lower bound must be five percent faster,
    and much faster where others hardly exceed the bound, because the link may be shared with other work."""
    ratio = (prediction.bytes_in + prediction.bytes_out) / tiles.square_tiles_bytes
    return prediction.seconds * (1 + 0.05 * ratio + 0.3 * max(0.0, ratio - 1.1))


def _variants(tiles: Tiles, rates: Rates) -> Iterator[Tiles]:
    """Yields the plan with several ways to begin, each also with its first loads and its last store hidden."""
    most, closing = _most_parts(tiles), _closing(tiles, rates)
    for ramp in range(1, _most_ramp(tiles) + 1):
        if ramp in (1, 2, 4):
            yield replace(tiles, ramp=ramp)
            for opening in sorted({1, *(min(num_parts, most) for num_parts in NUM_OPENING_PARTS)}):
                if opening > 1 or closing:
                    yield replace(tiles, ramp=ramp, opening=opening, closing=closing)


def _most_ramp(tiles: Tiles) -> int:
    kept, streamed = tiles.grid if tiles.keeps == "a" else tiles.grid[::-1]
    num_slots = tiles.num_b_slots if tiles.keeps == "a" else tiles.num_a_slots
    return max(1, min(4, streamed, num_slots // tiles.num_panels)) if min(tiles.band, kept) > 1 else 1


def _most_parts(tiles: Tiles) -> int:
    """Returns into how many parts the first panels may be divided: strided rows need length, half types full depth."""
    gemm = tiles.gemm
    if gemm.on_disk or gemm.sum_element_bytes > gemm.out_element_bytes:
        return 1
    return max(1, min(NUM_OPENING_PARTS[-1], tiles.depth * gemm.host_element_bytes // SHORTEST_ROW_BYTES))


def _closing(tiles: Tiles, rates: Rates) -> int:
    """Returns how many rows to compute last: the fewest that hide the store of the others, in nearly full waves."""
    if "c" in tiles.gemm.resident or tiles.num_c_slots < 2:
        return 0
    task, out_bytes = tiles.tasks()[-1], tiles.gemm.c_written_bytes

    def ends_s(last: int) -> float:
        product = [product_s(tiles, rates, rows, task.num_cols, tiles.gemm.k) for rows in (task.num_rows - last, last)]
        store = [rows * task.num_cols * out_bytes / rates.out_bytes_per_s for rows in (task.num_rows - last, last)]
        return product[0] + max(store[0], product[1]) + store[1]

    return min(range(128, task.num_rows // 2 + 1, 128), key=ends_s, default=0)


def _candidates(gemm: Gemm, budget_bytes: int, num_lanes: int, *, fine: bool) -> Iterator[Tiles]:
    for num_rows in _sides(gemm.m, fine):
        for num_cols in _sides(gemm.n, fine):
            num_tasks = math.ceil(gemm.m / num_rows) * math.ceil(gemm.n / num_cols)
            if num_lanes > 1 and num_tasks < 8 * num_lanes and max(num_rows, num_cols) > 128:
                continue
            for depth in _sides(gemm.k, fine):
                yield from _splits(gemm, budget_bytes, num_rows, num_cols, depth)


def _sides(extent: int, fine: bool) -> list[int]:
    """Returns tile sides to try: the extent in increasing numbers of parts, rounded to multiples that kernels
    prefer."""
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
    """Yields divisions of the budget between the two pools, for each choice of the operand that stays."""
    mt, nt = math.ceil(gemm.m / num_rows), math.ceil(gemm.n / num_cols)
    panels = math.ceil(gemm.k / depth)
    num_all = {"a": mt * panels, "b": nt * panels}
    least = {name: min(num_all[name], NUM_STREAMING_SLOTS) for name in "ab"}
    plain = Tiles(gemm, budget_bytes, num_rows, num_cols, depth, least["a"], least["b"], min(2, mt * nt))
    if plain.device_bytes > budget_bytes:
        plain = replace(plain, num_c_slots=1)  # a wider tile, whose store does not overlap
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
            most = max(least[keeps], min(most, MAX_SLOTS))
            for num_kept in sorted({min(most, num_all[keeps]), *(min(want, most) for want in wants)}):
                yield _with_slots(plain, keeps, int(num_kept), num_streamed, num_all)


def _with_slots(plain: Tiles, keeps: str, num_kept: int, num_streamed: int, num_all: dict[str, int]) -> Tiles:
    """Returns the plan with these slots. A band has as many slabs as fit, less one for the next band's first loads."""
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
    """Estimates traffic and seconds by formula, to choose the plans to simulate."""
    gemm, panels = tiles.gemm, tiles.num_panels
    mt, nt = tiles.grid
    slots = {"a": tiles.num_a_slots, "b": tiles.num_b_slots}
    counts, other = {"a": mt, "b": nt}, "b" if tiles.keeps == "a" else "a"
    reads = {tiles.keeps: 1 if slots[tiles.keeps] >= panels * min(tiles.band, counts[tiles.keeps]) else counts[other]}
    passes = math.ceil(counts[tiles.keeps] / tiles.band) if slots[other] >= panels else counts[tiles.keeps]
    reads[other] = 1 if slots[other] >= panels * counts[other] else passes
    matrix_bytes = {"a": gemm.m * gemm.k * gemm.host_element_bytes, "b": gemm.n * gemm.k * gemm.host_element_bytes}
    moved = {name: 0 if name in gemm.resident else matrix_bytes[name] * reads[name] for name in "ab"}
    c_bytes, c_in_bytes = gemm.m * gemm.n * gemm.c_written_bytes, gemm.m * gemm.n * gemm.c_read_bytes
    bytes_in = moved["a"] + moved["b"] + c_in_bytes
    link = _link_rates(tiles, rates)
    in_s = moved["a"] / link["a"] + moved["b"] / link["b"] + c_in_bytes / link["c"]
    out_s = c_bytes / link["out"]
    step_s = product_s(tiles, rates, tiles.num_rows, tiles.num_cols, tiles.depth)
    compute_s = step_s * (gemm.num_flop / (2.0 * tiles.num_rows * tiles.num_cols * tiles.depth) if gemm.k else 1)
    ends_s = _lag_s(tiles, rates, step_s * panels) + tiles.c_tile_bytes / rates.out_bytes_per_s / (
        4 if tiles.num_c_slots > 1 else 1
    )
    streams = min(tiles.num_a_slots, tiles.num_b_slots) > 1 or tiles.num_tasks * panels == 1
    overlap_s = max(compute_s, in_s, out_s) if streams else compute_s + in_s
    if tiles.num_c_slots == 1 and tiles.num_tasks > 1:
        overlap_s += out_s
    bound = _bound(gemm, compute_s, in_s, out_s)
    return Prediction(overlap_s + ends_s, compute_s, in_s, out_s, bytes_in, c_bytes, bound)


def _lag_s(tiles: Tiles, rates: Rates, task_s: float) -> float:
    """Returns how far products fall behind loads while the first band arrives, a growing square of tiles at a time."""
    gemm, slabs = tiles.gemm, {"a": tiles.num_rows, "b": tiles.num_cols}
    kept, streamed = ("a", "b") if tiles.keeps == "a" else ("b", "a")
    slab_s = {
        name: 0.0 if name in gemm.resident else side * gemm.k * gemm.host_element_bytes / rates.in_bytes_per_s
        for name, side in slabs.items()
    }
    num_parts = tiles.num_panels * _most_parts(tiles)
    first_s = sum(slab_s.values())
    lag_s, num_kept, ramp = max(first_s / num_parts, first_s - task_s * (1 - 1 / num_parts)), 2, _most_ramp(tiles)
    while num_kept <= tiles.band:
        width = min(num_kept, ramp)
        load_s = num_kept * slab_s[kept] + width * slab_s[streamed]
        lag_s = max(lag_s, load_s - (num_kept * width - 1) * task_s)
        num_kept *= 2
    return lag_s


def _smallest(gemm: Gemm) -> Tiles:
    return Tiles(gemm, 1, 1, 1, 1, 1, 1, 1)
