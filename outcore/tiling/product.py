"""The public function `outcore.matmul`: products of matrices that do not fit on a device.

    matmul ─ Job ─ plan_tiles ─▶ Tiles ─ one Pipeline per device, one TaskQueue ─▶ Report

Follows arXiv 1511.04348 and its full version BLASX (1510.05041) on products larger than a device, over unequal devices.
Unlike there, the plan is made and its time predicted first, half types and files can be operands, and a device may
fail: the others redo its unfinished work.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import psutil
import torch

from outcore.errors import TilingError
from outcore.tiling.lanes import CudaLane, Lane, Pins, make_lane
from outcore.tiling.operands import FileMatrix, Operand, TensorStore, as_matrix, as_operand, is_file_mapping, overlaps
from outcore.tiling.pipeline import Pipeline, Work
from outcore.tiling.rates import measure_rates
from outcore.tiling.tasks import Piece, TaskQueue
from outcore.tiling.tiles import Gemm, Prediction, Rates, Tiles, plan_tiles
from outcore.tiling.update import Update
from outcore.units import MIB, parse_bytes

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PIN_BYTES_PER_S = 2.3e9
STAGED_BYTES_PER_S = 15e9
# Memory besides the slots: cuBLAS's 32 MiB for every thread and stream that multiplies (the caller's, the
# measuring one, the lane's own), and a 64 MiB strip if half products cannot be added to fp32 sums in place.
WORKSPACE_BYTES = 160 * MIB
PROGRESS_FROM_S = 2.0
ALONE_WINDOW = 64  # pieces in flight; without other lanes, loads may run far ahead
SHARED_WINDOW = 2  # one computes, one loads; more would be claimed too early

LONG_S = 3600.0  # s; a product that is predicted to take longer warns before it begins (guessed)

Matrix = torch.Tensor | FileMatrix
Given = Matrix | np.ndarray[Any, Any]  # NumPy's mapped arrays are read and written through their file


class TilingWarning(UserWarning):
    """Warns of a product that will take very long."""


class UnfinishedProduct(TilingError):
    """No device is left. `missing` names the rows and columns of `out` that were not written."""

    def __init__(self, missing: list[Piece], errors: Sequence[BaseException]) -> None:
        self.missing = missing
        self.errors = list(errors)
        area = sum(piece.area for piece in missing)
        super().__init__(
            f"every device failed and {area} elements of out are unwritten in {len(missing)} pieces "
            f"(last error: {errors[-1] if errors else 'none'}); out is unfinished: free a device and run it again"
        )


@dataclass(frozen=True)
class LaneReport:
    name: str
    share: float
    num_pieces: int
    seconds: float
    bytes_in: int
    bytes_out: int
    bytes_from_peers: int
    error: str | None


@dataclass(frozen=True)
class Report:
    """Measured and predicted results of a product."""

    seconds: float
    num_flop: float
    prediction: Prediction
    lanes: tuple[LaneReport, ...]
    pin_s: float = 0.0
    num_pin_failures: int = 0
    device_bytes: int = 0  # of slots, tiles and sums, on the lane with the most

    @property
    def bytes_in(self) -> int:
        return sum(lane.bytes_in for lane in self.lanes)

    @property
    def bytes_out(self) -> int:
        return sum(lane.bytes_out for lane in self.lanes)

    @property
    def flop_per_s(self) -> float:
        return self.num_flop / self.seconds if self.seconds else 0.0

    @property
    def balance(self) -> float:
        """Mean busy time over the longest; 1 if all lanes end together."""
        spans = [lane.seconds for lane in self.lanes if lane.num_pieces]
        return sum(spans) / len(spans) / max(spans) if spans and max(spans) > 0 else 1.0

    def to_json(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("bytes_in", "bytes_out", "flop_per_s", "balance")}
        return {**asdict(self), **derived}


def matmul(
    a: Given,
    b: Given,
    *,
    out: Given | None = None,
    add: Given | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    memory: int | str | None = None,
    devices: Sequence[str | torch.device | Lane] | None = None,
    pin: bool | None = None,
    progress: bool | None = None,
) -> Given:
    """Computes `alpha * a @ b + beta * add` by blocks, with at most `memory` of each device; returns `out` or a tensor.

    `a`, `b`, `out`, `add` are host tensors (pinned or not, transposed or not, mapped or not), `FileMatrix` objects,
    NumPy arrays (`np.memmap` is read and written through its file), or tensors of the one device used. `out` may be
    `add` itself, but must not share memory with anything else. A file with an unfinished product is refused as an
    operand. `pin=True` page-locks unpinned operands in place for this call, `pin=False` copies them through pinned
    slabs, and None uses the one that is predicted to be faster. A product that is predicted to take hours warns before
    it begins. `matmul` has no gradient; use `TiledLinear` for training.

    ```python
    import outcore
    import torch

    a, b = torch.randn(300, 200), torch.randn(200, 100)
    c = outcore.matmul(a, b, memory="1MiB")  # (300, 100)
    ```
    """
    a, b = as_matrix(a, "a"), as_matrix(b, "b")
    written = None if out is None else as_matrix(out, "out", is_written=True)
    added = written if add is out else None if add is None else as_matrix(add, "add")
    if a.shape and b.shape and (_dim(a) == 1 or _dim(b) == 1):
        if out is not None or add is not None:
            raise TilingError("a vector product takes neither out nor add; give matrices of one row or column")
        options: dict[str, Any] = {"alpha": alpha, "memory": memory, "devices": devices, "pin": pin}
        return _multiply_vectors(a, b, options)
    job = Job(a, b, out=written, add=added, alpha=alpha, beta=beta, memory=memory, devices=devices, pin=pin)
    job.run(progress=progress)
    return job.out if out is None else out


def _dim(matrix: Matrix) -> int:
    return len(matrix.shape)


def _multiply_vectors(a: Matrix, b: Matrix, options: dict[str, Any]) -> Matrix:
    left = a.unsqueeze(0) if isinstance(a, torch.Tensor) and a.dim() == 1 else a
    right = b.unsqueeze(1) if isinstance(b, torch.Tensor) and b.dim() == 1 else b
    result = matmul(left, right, **options)
    assert isinstance(result, torch.Tensor)
    if _dim(b) == 1:
        result = result.squeeze(1)
    return result.squeeze(0) if _dim(a) == 1 else result


class Job:
    """A planned product. `tiles` and `prediction` are available before `run`.

    Jobs that run side by side each get a `share` of the memory, and one may be `urgent` (see `run_side_by_side`).
    """

    def __init__(
        self,
        a: Matrix,
        b: Matrix,
        *,
        out: Matrix | None = None,
        add: Matrix | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        memory: int | str | None = None,
        devices: Sequence[str | torch.device | Lane] | None = None,
        pin: bool | None = None,
        rates: Rates | None = None,
        tiles: Tiles | None = None,
        share: float = 1.0,
        urgent: bool = False,
        update: Update | None = None,
    ) -> None:
        self.update = update
        self._check(a, b, out, add)
        if update is not None:
            out = _checked_update(update, a, b)
        self._own_lanes: list[Lane] = []
        self.lanes = self._make_lanes(a, b, out, devices, urgent)
        if update is not None:
            del self.lanes[1:]  # an update must not be repeated by another device
        operands = [as_operand(a, "a"), as_operand(b, "b")]
        m, k, n = operands[0].shape[0], operands[0].shape[1], operands[1].shape[1]
        self.out: Matrix = self._empty_out(a, b, m, n) if out is None else out
        target = as_operand(self.out, "out")
        addend = None if add is None or beta == 0 else as_operand(add, "add")
        if target.flipped:  # C' = B'A': the result's rows are then contiguous
            operands, target = [operands[1].t(), operands[0].t()], target.t()
            addend = None if addend is None else addend.t()
            m, n = n, m
        if addend is not None and addend.flipped:
            addend = _by_rows(addend)
        self._pin = pin
        self._add = addend
        self._operands, self._target = operands, target
        self._factors = (alpha, beta)
        self.gemm = self._describe(m, n, k)
        self.budget_bytes = _budget(memory, self.lanes, share)
        self.lane_rates = [
            rates or measure_rates(lane, operands[0].store.dtype, self.budget_bytes) for lane in self.lanes
        ]
        self.pins = self._choose_pinning()
        self.tiles = tiles or self._plan(self._rates())

    @staticmethod
    def _check(a: Matrix, b: Matrix, out: Matrix | None, add: Matrix | None) -> None:
        for name, matrix in (("a", a), ("b", b), ("out", out), ("add", add)):
            if matrix is None:
                continue
            if matrix.dtype not in DTYPES:
                raise TilingError(f"{name} is {matrix.dtype}; products are of float32, float64, bfloat16 or float16")
            if matrix.dtype != a.dtype:
                raise TilingError(f"a is {a.dtype} and {name} is {matrix.dtype}; convert one of them first")
            if _dim(matrix) != 2:
                raise TilingError(f"{name} has {_dim(matrix)} dimensions; a product takes matrices: reshape it first")
        for name, matrix in (("a", a), ("b", b), ("add", add)):
            if isinstance(matrix, FileMatrix):
                matrix.check_finished(name)
        (m, k), (rows, n) = _logical_shape(a), _logical_shape(b)
        if k != rows:
            raise TilingError(f"a is {m} x {k} and b is {rows} x {n}: a needs as many columns as b has rows")
        for name, matrix in (("out", out), ("add", add)):
            if matrix is not None and _logical_shape(matrix) != (m, n):
                shape = _logical_shape(matrix)
                raise TilingError(f"{name} is {shape[0]} x {shape[1]}, the product is {m} x {n}; give it that shape")
        if overlaps(out, a) or overlaps(out, b) or (out is not add and overlaps(out, add)):
            raise TilingError("out shares memory with an operand; give it memory (or a file) of its own")
        if isinstance(out, torch.Tensor) and 0 in out.stride() and out.numel() > 1:
            raise TilingError("out is an expanded tensor, several of its elements are one; give it memory of its own")

    def _make_lanes(
        self,
        a: Matrix,
        b: Matrix,
        out: Matrix | None,
        devices: Sequence[str | torch.device | Lane] | None,
        urgent: bool,
    ) -> list[Lane]:
        places = {m.device for m in (a, b, out) if isinstance(m, torch.Tensor) and m.device.type != "cpu"}
        if devices is None:
            devices = list(places) or _default_devices()
        if not devices:
            raise TilingError("devices is empty; name at least one, such as 'cuda:0' or 'cpu'")
        lanes = [make_lane(device, urgent=urgent) for device in devices]
        self._own_lanes = [lane for lane, device in zip(lanes, devices) if lane is not device]
        if places and (len(lanes) > 1 or places != {lanes[0].device}):
            raise TilingError(
                "an operand lies on a device; then devices must be just that one (or move it to the host)"
            )
        return lanes

    def _empty_out(self, a: Matrix, b: Matrix, m: int, n: int) -> torch.Tensor:
        on_device = [x.device for x in (a, b) if isinstance(x, torch.Tensor) and x.device.type != "cpu"]
        if on_device:
            return torch.empty(m, n, dtype=a.dtype, device=on_device[0])
        return torch.empty(m, n, dtype=a.dtype)

    def _describe(self, m: int, n: int, k: int) -> Gemm:
        dtype = self._operands[0].store.dtype
        named = {"a": self._operands[0], "b": self._operands[1], "c": self._target}
        slot_bytes = max(lane.slot_dtype(dtype).itemsize for lane in self.lanes)
        return Gemm(
            m,
            n,
            k,
            host_element_bytes=dtype.itemsize,
            slot_element_bytes=slot_bytes,
            out_element_bytes=dtype.itemsize if self.update is None else self.update.gradient_dtype.itemsize,
            sum_element_bytes=max(4, dtype.itemsize),
            reads_c=self._add is not None,
            update_element_bytes=0 if self.update is None else self.update.element_bytes,
            resident="".join(name for name, operand in named.items() if operand.store.place not in ("host", "disk")),
            on_disk="".join(name for name, operand in named.items() if operand.store.place == "disk"),
            flipped="".join(name for name in "ab" if named[name].flipped),
        )

    def _rates(self) -> Rates:
        """Returns the fastest lane's rates, which need the largest tiles; unlocked operands pass slabs more slowly."""
        rates = max(self.lane_rates, key=lambda rates: rates.flop_per_s)
        if self.pins is None and any(isinstance(lane, CudaLane) for lane in self.lanes) and self._unlocked():
            staged = STAGED_BYTES_PER_S
            return replace(rates, in_bytes_per_s=staged, out_bytes_per_s=staged)
        return rates

    def _plan(self, rates: Rates) -> Tiles:
        return plan_tiles(self.gemm, rates, self.budget_bytes, len(self.lanes))

    def _unlocked(self) -> list[torch.Tensor]:
        operands = [*self._operands, self._target, *([self._add] if self._add else [])]
        tensors = [operand.store.tensor for operand in operands if isinstance(operand.store, TensorStore)]
        tensors += [store.tensor for store in self.update.stores] if self.update is not None else []
        return [
            t for t in tensors if t.device.type == "cpu" and t.numel() and not t.is_pinned() and not is_file_mapping(t)
        ]

    def _choose_pinning(self) -> Pins | None:
        """Returns the locks to use. Locking takes about half a second per GiB, so it pays only if staging costs
        more."""
        if self._pin is False or not any(isinstance(lane, CudaLane) for lane in self.lanes):
            return None
        unlocked = self._unlocked()
        if not unlocked or self._pin:
            return Pins() if unlocked else None
        fast = max(self.lane_rates, key=lambda rates: rates.flop_per_s)
        slow = replace(fast, in_bytes_per_s=STAGED_BYTES_PER_S, out_bytes_per_s=STAGED_BYTES_PER_S)
        pin_s = sum(tensor.untyped_storage().nbytes() for tensor in unlocked) / PIN_BYTES_PER_S
        return Pins() if _predicted_s(self._plan(fast)) + pin_s < _predicted_s(self._plan(slow)) else None

    @property
    def prediction(self) -> Prediction:
        """The prediction. With several lanes, products are divided by speed, and the links take the time of one."""
        assert self.tiles.prediction is not None
        one = self.tiles.prediction
        if len(self.lanes) == 1:
            return one
        compute_s = self.gemm.num_flop / sum(rates.flop_per_s for rates in self.lane_rates)
        ends_s = max(0.0, one.seconds - max(one.compute_s, one.in_s, one.out_s))
        return replace(one, compute_s=compute_s, seconds=max(compute_s, one.in_s, one.out_s) + ends_s)

    @property
    def long_message(self) -> str | None:
        """The warning for a product that is predicted to take hours; None for others."""
        seconds, bound = self.prediction.seconds, self.prediction.bound
        if seconds < LONG_S:
            return None
        change = {
            "compute": "use more or faster devices, or a smaller type",
            "disk": "put the files on a faster disk, or the operands into host memory",
        }.get(bound, "give it more device memory, so that less is moved")
        gemm = self.gemm
        return (
            f"this {gemm.m} x {gemm.n} x {gemm.k} product is predicted to take {seconds / 3600:.1f} hours, bound by "
            f"{bound}; to make it shorter, {change}"
        )

    def run(self, *, progress: bool | None = None) -> Report:
        if (message := self.long_message) is not None:
            warnings.warn(message, TilingWarning, stacklevel=3)
        started_s = time.monotonic()
        with self._unfinished_mark(), self._locked() as pin_s, self._lanes_open():
            if not self.gemm.m or not self.gemm.n or not self.gemm.k:
                self._fill_degenerate()
                return self._report(time.monotonic() - started_s, pin_s, [], TaskQueue([], []))
            begun_s = time.monotonic()
            pipelines, queue = self._run_lanes(progress)
            return self._report(time.monotonic() - begun_s, pin_s, pipelines, queue)

    def _fill_degenerate(self) -> None:
        """Computes a product without depth: C is beta D or zero."""
        rows, cols = self._target.store.shape
        if not rows or not cols:
            return
        tile = torch.zeros(rows, cols, dtype=self._target.store.dtype)
        if self._add is not None:
            self._add.store.read_into(tile, (0, rows, 0, cols))
            tile.mul_(self._factors[1])
        self._target.store.write_from(tile, (0, rows, 0, cols))

    def _run_lanes(self, progress: bool | None) -> tuple[list[Pipeline | None], TaskQueue]:
        alpha, beta = self._factors
        a, b = self._operands
        work = Work(self.tiles, a, b, self._target, self._add, alpha, beta, self.update)
        hints = [rates.flop_per_s for rates in self.lane_rates]
        measured = all(rates.origin.startswith("measured on") for rates in self.lane_rates)  # on devices, not the host
        queue = TaskQueue(self.tiles.tasks(), hints, trusted=measured)
        window = ALONE_WINDOW if len(self.lanes) == 1 else SHARED_WINDOW
        pipelines = [self._open(lane, index, work, window, queue) for index, lane in enumerate(self.lanes)]
        live = [pipeline for pipeline in pipelines if pipeline is not None]
        for pipeline in live:
            pipeline.peers = [other for other in live if other is not pipeline]
        threads = [
            threading.Thread(target=_drive, args=(pipeline, queue, index), name=f"outcore {pipeline.lane.name}")
            for index, pipeline in enumerate(pipelines)
            if pipeline is not None
        ]
        for thread in threads:
            thread.start()
        try:
            _watch(queue, threads, progress, self.prediction.seconds)
        finally:
            queue.cancel()
            for thread in threads:
                thread.join()
            for pipeline in live:
                pipeline.close()
        errors = [state.error for state in queue.lanes if state.error is not None]
        missing = queue.missing()
        if missing and self.update is not None:
            raise TilingError(
                f"the device failed while a weight was updated ({errors[-1] if errors else 'no error'}); part of it is "
                "updated and part is not: load the last checkpoint"
            ) from (errors[-1] if errors else None)
        if missing:
            raise UnfinishedProduct(missing, errors) from (errors[-1] if errors else None)
        return pipelines, queue

    def _open(self, lane: Lane, index: int, work: Work, window: int, queue: TaskQueue) -> Pipeline | None:
        try:
            return Pipeline(lane, work, window)
        except RuntimeError as error:  # no memory, or the device is lost; the others do its work
            queue.fail(index, error)
            return None

    def _report(self, seconds: float, pin_s: float, pipelines: list[Pipeline | None], queue: TaskQueue) -> Report:
        lanes: list[LaneReport] = []
        for pipeline, state in zip(pipelines, queue.lanes):
            span_s = state.last_done_s - state.started_s if state.started_s is not None and state.num_pieces else 0.0
            share = state.done_area / queue.total_area
            moved = (pipeline.bytes_in, pipeline.bytes_out, pipeline.bytes_from_peers) if pipeline else (0, 0, 0)
            error = None if state.error is None else f"{type(state.error).__name__}: {state.error}"
            lanes.append(LaneReport(self.lanes[len(lanes)].name, share, state.num_pieces, span_s, *moved, error))
        failures = self.pins.num_failed if self.pins else 0
        device_bytes = max((pipeline.device_bytes for pipeline in pipelines if pipeline), default=0)
        return Report(seconds, self.gemm.num_flop, self.prediction, tuple(lanes), pin_s, failures, device_bytes)

    @contextmanager
    def _unfinished_mark(self) -> Iterator[None]:
        """Marks a file as unfinished while a product is written into it."""
        if not isinstance(self.out, FileMatrix):
            yield
            return
        self.out.unfinished_path.touch()
        yield
        self.out.unfinished_path.unlink()

    @contextmanager
    def _locked(self) -> Iterator[float]:
        started_s = time.monotonic()
        if self.pins is None:
            yield 0.0
            return
        with self.pins:
            for tensor in self._unlocked():
                self.pins.lock(tensor)
            yield time.monotonic() - started_s

    @contextmanager
    def _lanes_open(self) -> Iterator[None]:
        try:
            yield
        finally:
            for lane in self._own_lanes:
                lane.close()


def run_side_by_side(jobs: Sequence[Job]) -> list[Report]:
    """Runs all jobs in parallel, so that one multiplies while another waits for its link; urgent products go first.

    Each runs in a thread with the caller's streams. When all have ended, returns their reports or raises the error of
    the first that failed.
    """
    devices = {lane.device for job in jobs for lane in job.lanes if lane.device.type == "cuda"}
    streams = [torch.cuda.current_stream(device) for device in devices]

    def run(job: Job) -> Report:
        with ExitStack() as entered:
            for stream in streams:
                entered.enter_context(torch.cuda.stream(stream))
            return job.run(progress=None if job is jobs[0] else False)  # one bar at most

    with ThreadPoolExecutor(len(jobs), thread_name_prefix="outcore product") as threads:
        return list(threads.map(run, jobs))


def _drive(pipeline: Pipeline, queue: TaskQueue, index: int) -> None:
    """Runs a lane in its thread. After an error its pieces return to the queue, once nothing of it can write."""
    try:
        pipeline.lane.enter_thread()
        pipeline.run(queue, index)
    except BaseException as error:
        pipeline.close()
        queue.fail(index, error)


def _watch(queue: TaskQueue, threads: list[threading.Thread], progress: bool | None, predicted_s: float) -> None:
    """Waits for the lanes, with a progress bar on a terminal if the product takes longer than a moment."""
    if progress is None:
        import sys

        progress = predicted_s > PROGRESS_FROM_S and sys.stderr.isatty()
    if not progress:
        for thread in threads:
            thread.join()
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        shown = bar.add_task("matmul", total=queue.total_area)
        while any(thread.is_alive() for thread in threads):
            queue.wait(timeout_s=0.2)
            bar.update(shown, completed=queue.done_area)


def _checked_update(update: Update, a: Matrix, b: Matrix) -> torch.Tensor:
    """Returns the tensor whose tiles are updated, after checking shapes and places."""
    shape = _logical_shape(a)[0], _logical_shape(b)[1]
    for tensor in (*update.updated, *update.copies):
        if tuple(tensor.shape) != shape or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise TilingError(
                f"what a product updates has to be a contiguous host tensor of {shape[0]} x {shape[1]}; one is "
                f"{'x'.join(map(str, tensor.shape))} on {tensor.device}"
            )
    if not _logical_shape(a)[1]:
        raise TilingError("a product without depth updates nothing; leave it out")
    return update.updated[0]


def _logical_shape(matrix: Matrix) -> tuple[int, int]:
    rows, cols = matrix.shape
    return (cols, rows) if isinstance(matrix, FileMatrix) and matrix.flipped else (rows, cols)


def _by_rows(operand: Operand) -> Operand:
    """Returns D in C's orientation. Tensors of any strides are read through a view; files have one orientation."""
    if isinstance(operand.store, TensorStore):
        return Operand(TensorStore(operand.store.tensor.t()))
    raise TilingError("add is a transposed file and out is not; store both in one orientation")


def _default_devices() -> list[str]:
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]


def _budget(memory: int | str | None, lanes: Sequence[Lane], share: float) -> int:
    """Returns the bytes for slots on each lane: this job's share of `memory`, by default 80 % of what is free.

    On the CPU the default is a quarter of the available memory.
    """
    free = []
    for lane in lanes:
        if lane.device.type == "cuda":
            free.append(int(torch.cuda.mem_get_info(lane.device)[0] * 0.8))
        else:
            free.append(psutil.virtual_memory().available // 4)
    if memory is None:
        return int(min(free) * share)
    budget_bytes = int(parse_bytes(memory, of_bytes=min(free)) * share)
    return slots_bytes(budget_bytes) if any(isinstance(lane, CudaLane) for lane in lanes) else budget_bytes


def slots_bytes(budget_bytes: int) -> int:
    """Returns the part of a CUDA budget for slots and tiles: all but the workspaces, or half of a small budget."""
    return budget_bytes - min(WORKSPACE_BYTES, budget_bytes // 2)


def _predicted_s(tiles: Tiles) -> float:
    assert tiles.prediction is not None
    return tiles.prediction.seconds
