"""One lane's share of a product: loads, products and stores enqueued on three streams.

    copy_in   A block, B block ──┐ ready
    compute                      └─ product, product, ... ──┐ tile complete
    copy_out                                                └─ C tile ── done

The host only enqueues. All order is expressed by events: a product waits for its blocks, a load for the last product
that read the slot it overwrites, a product for the store of the C tile whose slot it uses. The host waits in one place
only, for the piece `window` pieces ago, so that a lane does not claim work too early. Blocks that the copy engines
cannot read in place (unlocked memory, files) are first read into a small ring of locked slabs; such operands are stored
by a separate thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from outcore.tiling.lanes import Lane
from outcore.tiling.operands import Operand, Span, Store, TensorStore
from outcore.tiling.slots import Entry, SlotCache
from outcore.tiling.streams import Event, ThreadStream
from outcore.tiling.tasks import Answer, Piece, TaskQueue
from outcore.tiling.tiles import Tiles
from outcore.tiling.update import Update

SLAB_BYTES = 64 * 1024**2
NUM_SLABS = 3


@dataclass(frozen=True)
class Work:
    """The whole product, the same for all lanes: C = alpha A B + beta D."""

    tiles: Tiles
    a: Operand
    b: Operand
    out: Operand
    add: Operand | None
    alpha: float
    beta: float
    update: Update | None = None


@dataclass
class Slab:
    memory: torch.Tensor
    free: Event | None = None


class SlabRing:
    """A few equal pieces of host memory, used in turn; taking one waits until its last user is done."""

    def __init__(self, allocate: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self._allocate = allocate
        self._slabs: deque[Slab] = deque()

    def rows_per_slab(self, num_cols: int, dtype: torch.dtype) -> int:
        return max(1, SLAB_BYTES // max(1, num_cols * dtype.itemsize))

    def take(self, num_rows: int, num_cols: int, dtype: torch.dtype) -> tuple[Slab, torch.Tensor]:
        num_bytes = num_rows * num_cols * dtype.itemsize
        if len(self._slabs) < NUM_SLABS:
            self._slabs.append(Slab(self._allocate(max(num_bytes, SLAB_BYTES), torch.uint8)))
        else:
            self._slabs.rotate(-1)
        slab = self._slabs[-1]
        if slab.free is not None:
            slab.free.synchronize()
        if slab.memory.numel() < num_bytes:
            slab.memory = self._allocate(num_bytes, torch.uint8)
        return slab, slab.memory[:num_bytes].view(dtype).view(num_rows, num_cols)


class Pool:
    """The slots of one operand on one lane: memory, and the cache that tracks its content."""

    def __init__(self, lane: Lane, num_slots: int, num_elements: int, dtype: torch.dtype) -> None:
        self.cache = SlotCache(num_slots)
        self.memory = [lane.allocate(num_elements, dtype) for _ in range(num_slots)]

    def view(self, entry: Entry, span: Span) -> torch.Tensor:
        num_rows, num_cols = span[1] - span[0], span[3] - span[2]
        return self.memory[entry.slot][: num_rows * num_cols].view(num_rows, num_cols)


@dataclass
class Block:
    """A block of A or B on the device in its stored orientation; a resident one has no slot, a `missing` one no
    data."""

    name: str
    operand: Operand
    span: Span
    view: torch.Tensor
    entry: Entry | None = None
    missing: bool = False


class Pipeline:
    """One lane's share of a product. Created in the caller's thread (its stream owns the memory), driven by `run`."""

    def __init__(self, lane: Lane, work: Work, window: int) -> None:
        self.lane, self.work, self.window = lane, work, window
        self.peers: Sequence[Pipeline] = ()
        self.is_open = True
        self.bytes_in = self.bytes_out = self.bytes_from_peers = 0
        tiles, dtype = work.tiles, work.a.store.dtype
        self._slot_dtype = lane.slot_dtype(dtype)
        self.pools: dict[str, Pool] = {}
        for name, num_slots, side in (
            ("a", tiles.num_a_slots, tiles.num_rows),
            ("b", tiles.num_b_slots, tiles.num_cols),
        ):
            if name not in tiles.gemm.resident:
                self.pools[name] = Pool(lane, num_slots, side * tiles.depth, self._slot_dtype)
        tile_elements = tiles.num_rows * tiles.num_cols
        resident, update = "c" in tiles.gemm.resident, work.update
        tile_dtype = dtype if update is None else update.gradient_dtype
        turns = range(0 if resident else tiles.num_c_slots)
        self._c_memory = [lane.allocate(tile_elements, tile_dtype) for _ in turns]
        updated = () if update is None else update.stores
        self._updated_memory = [[lane.allocate(tile_elements, store.dtype) for store in updated] for _ in turns]
        self._c_free: list[Event | None] = [None] * tiles.num_c_slots
        self._sums = lane.allocate(tile_elements, torch.float32) if tiles.has_sums else None
        self._slabs_in = SlabRing(lane.allocate_slab)
        self._slabs_out = SlabRing(lane.allocate_slab)
        self._store_thread: ThreadStream | None = None
        self._in_flight: deque[tuple[Piece, Event]] = deque()
        self._num_submitted = 0
        lane.begin()

    @property
    def device_bytes(self) -> int:
        held = [memory for pool in self.pools.values() for memory in pool.memory] + self._c_memory
        held += [memory for memories in self._updated_memory for memory in memories]
        return sum(memory.nbytes for memory in held) + (0 if self._sums is None else self._sums.nbytes)

    def run(self, queue: TaskQueue, index: int) -> None:
        """Takes, enqueues and confirms pieces until every piece of the product is done, by any lane."""
        while (answer := queue.pull(index, time.monotonic())) is not Answer.FINISHED:
            if isinstance(answer, Piece):
                self._submit(answer)
            if self._in_flight and (answer is Answer.LATER or len(self._in_flight) >= self.window):
                self._confirm(queue, index)
            elif answer is Answer.LATER:
                queue.wait(timeout_s=0.5)

    def _confirm(self, queue: TaskQueue, index: int) -> None:
        piece, done = self._in_flight.popleft()
        done.synchronize()
        queue.done(index, piece, time.monotonic())

    def _submit(self, piece: Piece) -> None:
        tiles, task, compute = self.work.tiles, piece.task, self.lane.compute
        num_before = self._num_submitted
        turn = num_before % tiles.num_c_slots
        self._num_submitted += 1
        row, stop_row = task.row + piece.first, task.row + piece.stop
        span = self.work.out.span(row, stop_row, task.col, task.col + task.num_cols)
        tile = self._tile(turn, span)
        updated, arrived = self._load_updated(span, turn)
        beta = self._load_addend(tile, span, turn)
        target = self._start_sums(tile, beta)
        for start, stop in tiles.panels(task, piece.first):
            a = self._block("a", (task.row, task.row + task.num_rows, start, stop))
            b = self._block("b", (start, stop, task.col, task.col + task.num_cols))
            for at, end in tiles.parts(num_before, start, stop):
                left = self._part(a, (task.row, task.row + task.num_rows, at, end))[piece.first : piece.stop]
                right = self._part(b, (at, end, task.col, task.col + task.num_cols))
                flop = 2.0 * piece.area * (end - at)
                compute.run(_product(self.lane, target, left, right, beta, self.work.alpha), flop)
                beta = 1.0
            used = compute.record()
            self._release(a, used)
            self._release(b, used)
        if target is not tile:
            compute.run(lambda: tile.copy_(target))
        if (update := self.work.update) is not None:
            compute.wait(arrived)
            compute.run(lambda: update.run(tile, updated))
            done = self._store_all(list(zip(updated, update.stores)), span, compute.record())
        else:
            done = self._store_all([(tile, self.work.out.store)], span, compute.record())
        self._c_free[turn] = done
        self._in_flight.append((piece, done))

    def _tile(self, turn: int, span: Span) -> torch.Tensor:
        if not self._c_memory:
            store = self.work.out.store
            assert isinstance(store, TensorStore)
            return store.view(span)
        if (free := self._c_free[turn]) is not None:
            self.lane.compute.wait(free)
        num_rows, num_cols = span[1] - span[0], span[3] - span[2]
        return self._c_memory[turn][: num_rows * num_cols].view(num_rows, num_cols)

    def _load_updated(self, span: Span, turn: int) -> tuple[list[torch.Tensor], Event | None]:
        """Loads the tensors that a tile updates, in parallel with its product; returns an event of their arrival."""
        update, copy_in = self.work.update, self.lane.copy_in
        if update is None:
            return [], None
        if (free := self._c_free[turn]) is not None:
            copy_in.wait(free)
        num_rows, num_cols = span[1] - span[0], span[3] - span[2]
        views = [memory[: num_rows * num_cols].view(num_rows, num_cols) for memory in self._updated_memory[turn]]
        for view, store in zip(views, update.read_stores):
            self._load(view, store, span)
        return views, copy_in.record()

    def _load_addend(self, tile: torch.Tensor, span: Span, turn: int) -> float:
        """Loads D's tile into C's place; returns the factor that the first product must apply to it."""
        add, compute, copy_in = self.work.add, self.lane.compute, self.lane.copy_in
        if add is None:
            return 0.0
        if add.store.place == str(self.lane.device):
            assert isinstance(add.store, TensorStore)
            source = add.store.view(span)
            if source.data_ptr() != tile.data_ptr():
                compute.run(lambda: tile.copy_(source))
            return self.work.beta
        if (free := self._c_free[turn]) is not None and self._c_memory:
            copy_in.wait(free)
        elif not self._c_memory:
            copy_in.wait(compute.record())
        self._load(tile, add.store, span)
        compute.wait(copy_in.record())
        return self.work.beta

    def _start_sums(self, tile: torch.Tensor, beta: float) -> torch.Tensor:
        if self._sums is None:
            return tile
        sums = self._sums[: tile.numel()].view(tile.shape)
        if beta != 0:
            self.lane.compute.run(lambda: sums.copy_(tile))
        return sums

    def _block(self, name: str, place: Span) -> Block:
        """Acquires the block's slot; missing data are loaded part by part, as the products need them."""
        operand = self.work.a if name == "a" else self.work.b
        span = operand.span(*place)
        if name not in self.pools:
            assert isinstance(operand.store, TensorStore)
            return Block(name, operand, span, operand.store.view(span))
        pool = self.pools[name]
        entry, hit = pool.cache.acquire(place)
        block = Block(name, operand, span, pool.view(entry, span), entry)
        if not hit:
            for reader in pool.cache.claim_readers(entry):
                self.lane.copy_in.wait(reader, forgiving=True)
            if self._copy_from_peer(name, place, span, block.view):
                entry.ready = self.lane.copy_in.record()
            else:
                block.missing = True
        if entry.ready is not None:
            self.lane.compute.wait(entry.ready)
        return block

    def _part(self, block: Block, place: Span) -> torch.Tensor:
        """Returns a part of a block for the product, after enqueuing its load. Parts come in order."""
        span, whole = block.operand.span(*place), block.span
        view = block.view[span[0] - whole[0] : span[1] - whole[0], span[2] - whole[2] : span[3] - whole[2]]
        if block.missing:
            assert block.entry is not None
            store = block.operand.store
            in_parts = self.lane.is_direct(store, span)  # copies from a slab need a whole block
            self._load(view if in_parts else block.view, store, span if in_parts else whole)
            loaded = self.lane.copy_in.record()
            self.lane.compute.wait(loaded)
            if not in_parts or (span[1] == whole[1] and span[3] == whole[3]):
                block.entry.ready, block.missing = loaded, False
        return view.t() if block.operand.flipped else view

    def _release(self, block: Block, used: Event) -> None:
        if block.entry is not None:
            self.pools[block.name].cache.release(block.entry, used)

    def _copy_from_peer(self, name: str, place: Span, span: Span, view: torch.Tensor) -> bool:
        """Copies a block from a lane that already has it, if that is possible without the host."""
        for peer in self.peers:
            if not peer.is_open or not self.lane.can_copy_from(peer.lane):
                continue
            if (entry := peer.pools[name].cache.lend(place)) is None:
                continue
            copied = None
            try:
                self.lane.copy_in.run(_copy(view, peer.pools[name].view(entry, span)), view.nbytes)
                copied = self.lane.copy_in.record()
            finally:
                peer.pools[name].cache.give_back(entry, copied)
            self.bytes_from_peers += view.nbytes
            return True
        return False

    def _load(self, view: torch.Tensor, store: Store, span: Span) -> None:
        copy_in, num_bytes = self.lane.copy_in, view.numel() * store.dtype.itemsize
        self.bytes_in += num_bytes
        if self.lane.is_direct(store, span):
            copy_in.run(lambda: self.lane.copy_from_store(view, store, span), num_bytes)
            return
        num_cols = span[3] - span[2]
        step = self._slabs_in.rows_per_slab(num_cols, store.dtype)
        for row in range(0, view.shape[0], step):
            part = view[row : row + step]
            slab, staged = self._slabs_in.take(part.shape[0], num_cols, store.dtype)
            store.read_into(staged, (span[0] + row, span[0] + row + part.shape[0], span[2], span[3]))
            copy_in.run(_copy(part, staged), staged.nbytes)
            slab.free = copy_in.record()

    def _store_all(self, tiles: list[tuple[torch.Tensor, Store]], span: Span, complete: Event) -> Event:
        """Stores tiles where they belong; returns an event after which all are stored."""
        copy_out = self.lane.copy_out
        if not self._c_memory:
            return complete
        self.bytes_out += sum(tile.nbytes for tile, _ in tiles)
        if all(self.lane.is_direct(store, span) for _, store in tiles):
            copy_out.wait(complete)
            for tile, store in tiles:
                copy_out.run(_store_directly(self.lane, tile, store, span), tile.nbytes)
            return copy_out.record()
        if self._store_thread is None:
            self._store_thread = ThreadStream(f"{self.lane.name} store")
        for tile, store in tiles:
            self._store_thread.run(partial(self._store_staged, tile, store, span, complete))
        return self._store_thread.record()

    def _store_staged(self, tile: torch.Tensor, store: Store, span: Span, complete: Event) -> None:
        """Stores strip by strip in the store thread: the device writes one slab while the host empties another."""
        copy_out = self.lane.copy_out
        copy_out.wait(complete)
        step = self._slabs_out.rows_per_slab(tile.shape[1], store.dtype)
        waiting: deque[tuple[Event, torch.Tensor, Span]] = deque()
        for row in range(0, tile.shape[0], step):
            part = tile[row : row + step]
            if len(waiting) == NUM_SLABS - 1:
                _empty(waiting, store)
            _, staged = self._slabs_out.take(part.shape[0], part.shape[1], store.dtype)
            copy_out.run(_copy(staged, part), part.nbytes)
            waiting.append(
                (copy_out.record(), staged, (span[0] + row, span[0] + row + part.shape[0], span[2], span[3]))
            )
        while waiting:
            _empty(waiting, store)

    def close(self) -> None:
        """Waits until nothing is in flight; errors here were already reported where they occurred."""
        self.is_open, self.peers = False, ()
        streams: list[Any] = [self.lane.copy_in, self.lane.compute]
        streams += [self._store_thread] if self._store_thread else []
        for stream in [*streams, self.lane.copy_out]:
            try:
                stream.synchronize()
            except BaseException:
                continue
        if self._store_thread is not None:
            self._store_thread.close()


def _product(
    lane: Lane, target: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float
) -> Callable[[], None]:
    return lambda: lane.multiply(target, a, b, beta, alpha)


def _store_directly(lane: Lane, tile: torch.Tensor, store: Store, span: Span) -> Callable[[], None]:
    return lambda: lane.copy_to_store(tile, store, span)


def _copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


def _empty(waiting: deque[tuple[Event, torch.Tensor, Span]], store: Store) -> None:
    arrived, staged, span = waiting.popleft()
    arrived.synchronize()
    store.write_from(staged, span)
