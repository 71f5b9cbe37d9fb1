"""Measures products larger than the device memory they may use, and alternatives.

    python benchmarks/matmul.py                      # every section, about four minutes on one H200
    python benchmarks/matmul.py --only links,fp32    # some of them
    python benchmarks/matmul.py --small              # small shapes, runs on a CPU too

Peers in the same run: in-core (operands on the device before the clock starts), copy-compute-copy, cublasXt (through
ctypes on the cuBLAS torch has loaded), a naive tile loop. Every section that fails leaves its error in the results
and the next one runs.
"""

from __future__ import annotations

import os

# Locks pinned memory with several threads; has to be set before torch is imported.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "pinned_use_cuda_host_register:True,pinned_num_register_threads:8")

import argparse
import ctypes
import datetime
import json
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outcore.tiling.lanes import CpuLane, CudaLane, copy_pitched, cuda_runtime
from outcore.tiling.linear import TiledLinear
from outcore.tiling.operands import FileMatrix
from outcore.tiling.product import Job, Report
from outcore.tiling.streams import ThreadStream
from outcore.tiling.tiles import Rates
from outcore.units import GIB, MIB, format_bytes

Row = dict[str, Any]
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if CUDA else "cpu")


class Bench:
    """The run: its clock, its rows, and host memory that is locked once and used by every section."""

    def __init__(self, small: bool, limit_s: float, path: Path, peers: bool = True) -> None:
        self.small, self.limit_s, self.path, self.peers = small, limit_s, path, peers
        self.started_s = time.monotonic()
        self.rows: list[Row] = []
        self.notes: list[Row] = []
        self.blocks: list[torch.Tensor] = []

    def left_s(self) -> float:
        return self.limit_s - (time.monotonic() - self.started_s)

    def side(self, full: int) -> int:
        return max(64, full // (64 if CUDA else 128)) if self.small else full

    def memory(self, full: str) -> str:
        if not self.small:
            return full
        return "300MiB" if CUDA else "1MiB"

    def lock_blocks(self) -> None:
        """Three blocks of 16 GiB (or what the host grants), in which all matrices of the run lie."""
        for block_gib in (1 / 64,) if self.small else (16, 8, 4):
            started_s = time.monotonic()
            try:
                num_bytes = int(block_gib * GIB)
                self.blocks = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=CUDA) for _ in range(3)]
                seconds = time.monotonic() - started_s
                self.note("lock", block_gib=block_gib, seconds=seconds)
                return
            except RuntimeError as error:
                self.blocks = []
                self.note("lock", block_gib=block_gib, error=str(error)[:200])
        raise RuntimeError("no host memory could be locked")

    def matrix(self, block: int, rows: int, cols: int, dtype: torch.dtype, *, fill: bool = True) -> torch.Tensor:
        num_bytes = rows * cols * dtype.itemsize
        if num_bytes > self.blocks[block].numel():
            raise RuntimeError(f"{rows} x {cols} {dtype} does not fit the locked block")
        matrix = self.blocks[block][:num_bytes].view(dtype).view(rows, cols)
        if fill:
            step = max(1, 2**28 // cols)
            for row in range(0, rows, step):
                part = matrix[row : row + step]
                part.copy_(torch.randn(part.shape, device=DEVICE, dtype=dtype), non_blocking=True)
            sync()
        return matrix

    def row(self, m: int, n: int, k: int, dtype: str, method: str, seconds: float, **more: Any) -> Row:
        row: Row = {"m": m, "n": n, "k": k, "dtype": dtype, "method": method, "seconds": seconds}
        row["tflops"] = 2.0 * m * n * k / seconds / 1e12
        row |= {"bytes_in": None, "bytes_out": None, "device_peak_gib": None, **more}
        self.rows.append(row)
        peak = "" if row["device_peak_gib"] is None else f"{row['device_peak_gib']:.2f} GiB"
        print(f"  {dtype:8} {m}x{n}x{k} {method:34} {row['tflops']:9.3f} TFLOP/s {seconds:8.3f} s  {peak}", flush=True)
        return row

    def note(self, what: str, **facts: Any) -> None:
        self.notes.append({"what": what, **facts})
        shown = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in facts.items()
        )
        print(f"  {what}: {shown}"[:240], flush=True)

    def attempt(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self.note(name, error=f"{type(error).__name__}: {error}"[:500], trace=traceback.format_exc()[-1500:])

    def save(self) -> None:
        machine = {"torch": torch.__version__, "cuda": torch.version.cuda, "host_cpus": os.cpu_count()}
        machine["device"] = torch.cuda.get_device_name(DEVICE) if CUDA else "cpu"
        found: Row = {"question": "matmul", "date": datetime.date.today().isoformat(), "machine": machine}
        found |= {"small": self.small, "rows": self.rows, "notes": self.notes}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(found, indent=1, default=str) + "\n")


def sync() -> None:
    if CUDA:
        torch.cuda.synchronize(DEVICE)


def fresh_peak() -> None:
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(DEVICE)


def peak_gib() -> float | None:
    return torch.cuda.max_memory_allocated(DEVICE) / GIB if CUDA else None


def timed(action: Callable[[], object], num_times: int = 3) -> list[float]:
    times = []
    for _ in range(num_times):
        sync()
        started_s = time.perf_counter()
        action()
        sync()
        times.append(time.perf_counter() - started_s)
    return times


def relative_error(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, num_rows: int = 4) -> float:
    """Largest error of a few rows against float64, over the rows' largest magnitude."""
    picked = torch.linspace(0, c.shape[0] - 1, num_rows).long()
    exact = torch.zeros(num_rows, c.shape[1], dtype=torch.float64, device=DEVICE)
    left, step = a[picked].to(DEVICE).double(), max(1, 2**27 // b.shape[1])
    for row in range(0, b.shape[0], step):
        exact += left[:, row : row + step] @ b[row : row + step].to(DEVICE).double()
    return ((c[picked].to(DEVICE).double() - exact).abs().max() / exact.abs().max()).item()


def ours(
    bench: Bench, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, dtype: str, memory: str
) -> tuple[Row, Report]:
    """Three runs of the planned product; the first also warms cuBLAS up. Figures of the best, all times kept."""
    fresh_peak()
    jobs = [Job(a, b, out=c, memory=memory, devices=[str(DEVICE)]) for _ in range(3)]
    tiles, prediction = jobs[0].tiles, jobs[0].prediction
    rates = jobs[0].lane_rates[0]
    reports = [job.run() for job in jobs]
    best = min(reports, key=lambda report: report.seconds)
    moved_bytes = best.bytes_in + best.bytes_out
    link_s = max(best.bytes_in / rates.in_bytes_per_s, best.bytes_out / rates.out_bytes_per_s)
    row = bench.row(
        *(a.shape[0], b.shape[1], a.shape[1], dtype, f"outcore {memory}", best.seconds),
        bytes_in=best.bytes_in,
        bytes_out=best.bytes_out,
        device_peak_gib=peak_gib() if CUDA else best.device_bytes / GIB,
        all_seconds=[report.seconds for report in reports],
        predicted_s=prediction.seconds,
        bound=prediction.bound,
        regime=tiles.regime,
        tile=[tiles.num_rows, tiles.num_cols, tiles.depth],
        slots=[tiles.num_a_slots, tiles.num_b_slots, tiles.num_c_slots],
        order=[tiles.keeps, tiles.band, tiles.ramp, tiles.opening, tiles.closing],
        traffic_over_lower_bound=moved_bytes / tiles.square_tiles_bytes,
        link_roofline_tflops=best.num_flop / link_s / 1e12,
        rates=[rates.flop_per_s, rates.in_bytes_per_s, rates.out_bytes_per_s, rates.memory_bytes_per_s],
        relative_error=relative_error(c, a, b),
    )
    return row, best


def in_core(bench: Bench, a: torch.Tensor, b: torch.Tensor, dtype: str) -> Row:
    fresh_peak()
    on_device = a.to(DEVICE), b.to(DEVICE)
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=DEVICE)
    times = timed(lambda: torch.mm(*on_device, out=out))
    return bench.row(a.shape[0], b.shape[1], a.shape[1], dtype, "in-core", min(times), device_peak_gib=peak_gib())


def copy_compute_copy(bench: Bench, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, dtype: str) -> Row:
    fresh_peak()

    def step() -> None:
        product = a.to(DEVICE, non_blocking=True) @ b.to(DEVICE, non_blocking=True)
        c.copy_(product, non_blocking=True)

    times = timed(step, 2)
    facts = {"bytes_in": a.nbytes + b.nbytes, "bytes_out": c.nbytes, "device_peak_gib": peak_gib()}
    return bench.row(a.shape[0], b.shape[1], a.shape[1], dtype, "copy-compute-copy", min(times), **facts)


def naive_loop(bench: Bench, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, dtype: str, tile: int) -> Row:
    """What one writes first: copy a row of A and a column of B, multiply, copy back. Three tiles, scaled up."""
    fresh_peak()
    places = [(i, j) for i in range(0, a.shape[0], tile) for j in range(0, b.shape[1], tile)]
    measured = places[: min(3, len(places))]

    def step() -> None:
        for i, j in measured:
            c[i : i + tile, j : j + tile] = (a[i : i + tile].to(DEVICE) @ b[:, j : j + tile].to(DEVICE)).cpu()

    seconds = timed(step, 1)[0] * len(places) / len(measured)
    moved = 2 * tile * a.shape[1] * a.element_size() * len(places)
    facts = {"bytes_in": moved, "bytes_out": c.nbytes, "device_peak_gib": peak_gib(), "tiles_measured": len(measured)}
    return bench.row(a.shape[0], b.shape[1], a.shape[1], dtype, f"naive tile loop {tile}", seconds, **facts)


class CublasXt:
    """The cuBLAS torch has loaded, through ctypes. Row-major C = A B is column-major C' = B' A'."""

    def __init__(self) -> None:
        major = (torch.version.cuda or "0").partition(".")[0]
        torch.mm(torch.ones(8, 8, device=DEVICE), torch.ones(8, 8, device=DEVICE))
        self._library = ctypes.CDLL(f"libcublas.so.{major}")
        self._handle = ctypes.c_void_p()
        self._call("cublasXtCreate", ctypes.byref(self._handle))
        devices = (ctypes.c_int * 1)(0)
        self._call("cublasXtDeviceSelect", self._handle, ctypes.c_int(1), devices)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} failed with status {status}")

    def multiply(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, block: int) -> None:
        (m, k), n = a.shape, b.shape[1]
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        plain = ctypes.c_int(0)
        self._call("cublasXtSetBlockDim", self._handle, ctypes.c_int(block))
        self._call(
            *("cublasXtSgemm", self._handle, plain, plain, size(n), size(m), size(k), ctypes.byref(one)),
            *(pointer(b.data_ptr()), size(n), pointer(a.data_ptr()), size(k), ctypes.byref(zero)),
            *(pointer(c.data_ptr()), size(n)),
        )

    def close(self) -> None:
        self._call("cublasXtDestroy", self._handle)


def links(bench: Bench) -> None:
    """Rates of contiguous and of pitched copies: whether row slabs are worth a plan of their own."""
    if not CUDA:
        raise RuntimeError("needs a CUDA device")
    num_bytes = (8 if bench.small else 512) * MIB
    host, device = bench.blocks[0][: 2 * num_bytes], torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    plain_s = min(timed(lambda: device.copy_(host[:num_bytes], non_blocking=True)))
    bench.note("link in, contiguous", gb_per_s=num_bytes / plain_s / 1e9)
    out_s = min(timed(lambda: host[:num_bytes].copy_(device, non_blocking=True)))
    bench.note("link out, contiguous", gb_per_s=num_bytes / out_s / 1e9)
    if cuda_runtime() is None:
        raise RuntimeError("the CUDA runtime library was not found by name: strided blocks are staged")
    stream = torch.cuda.current_stream(DEVICE).cuda_stream
    for width in (4096, 8192, 16384, 32768):
        for pitch in (2 * width, 131072):  # near rows, and the rows of a matrix 65536 wide
            wide = bench.blocks[0][: min(bench.blocks[0].numel(), num_bytes * pitch // width) // pitch * pitch]
            source = wide.view(-1, pitch)[:, :width]
            target = device[: source.numel()].view(-1, width)
            seconds = {"in": min(timed(partial(copy_pitched, target, source, 1, stream)))}
            seconds["out"] = min(timed(partial(copy_pitched, source, target, 2, stream)))
            rates = {f"{way}_gb_per_s": source.numel() / took_s / 1e9 for way, took_s in seconds.items()}
            bench.note("pitched copy", row_bytes=width, pitch_bytes=pitch, **rates)


def fp32(bench: Bench) -> None:
    """32768 cubed in 8 GiB: in-core 53.1, cublasXt 51.2 TFLOP/s when last measured."""
    side = bench.side(32768)
    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = bench.matrix(0, side, side, torch.float32), bench.matrix(1, side, side, torch.float32)
    c = bench.matrix(2, side, side, torch.float32, fill=False)
    core = in_core(bench, a, b, "fp32")
    row, _ = ours(bench, a, b, c, "fp32", bench.memory("8GiB"))
    row["share_of_in_core"] = row["tflops"] / core["tflops"]
    if not bench.peers:
        return
    if CUDA:
        bench.attempt("cublasXt", lambda: cublas_xt(bench, a, b, c))
    bench.attempt("copy-compute-copy", lambda: copy_compute_copy(bench, a, b, c, "fp32"))
    bench.attempt("naive tile loop", lambda: naive_loop(bench, a, b, c, "fp32", side // 4))
    bench.attempt("not pinned", lambda: unpinned(bench, side))


def cublas_xt(bench: Bench, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    for block in (a.shape[0] // 8, a.shape[0] // 4):
        fresh_peak()
        c.zero_()
        library = CublasXt()
        free_bytes = torch.cuda.mem_get_info(DEVICE)[0]
        try:
            times = timed(partial(library.multiply, a, b, c, block), 2)
            used_gib = (free_bytes - torch.cuda.mem_get_info(DEVICE)[0]) / GIB  # it keeps its buffers while open
        finally:
            library.close()
        facts = {"device_peak_gib": used_gib, "all_seconds": times, "relative_error": relative_error(c, a, b)}
        bench.row(a.shape[0], b.shape[1], a.shape[1], "fp32", f"cublasXt block {block}", min(times), **facts)


def unpinned(bench: Bench, side: int) -> None:
    """Ordinary memory through staging slabs, which is what matmul chooses by itself for one product."""
    if not CUDA or bench.left_s() < 60:
        return
    side //= 2
    a, b = torch.ones(side, side), torch.ones(side, side)
    job = Job(a, b, memory=bench.memory("4GiB"), devices=[str(DEVICE)], pin=False)
    report = job.run()
    right = bool((job.out == side).all())  # type: ignore[union-attr]
    bench.row(side, side, side, "fp32", "outcore, not pinned, staged", report.seconds, right=right)


def tf32(bench: Bench) -> None:
    _tensor_cores(bench, "tf32", torch.float32, 65536)


def bf16(bench: Bench) -> None:
    _tensor_cores(bench, "bf16", torch.bfloat16, 65536)


def _tensor_cores(bench: Bench, name: str, dtype: torch.dtype, full_side: int) -> None:
    """16 GiB; to reach: 90 % of the lower of the in-core rate and the tiling's link roofline."""
    side = bench.side(full_side)
    while side * side * dtype.itemsize > bench.blocks[0].numel():
        side //= 2
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    try:
        a, b = bench.matrix(0, side, side, dtype), bench.matrix(1, side, side, dtype)
        c = bench.matrix(2, side, side, dtype, fill=False)
        core = in_core(bench, a, b, name)
        fresh_peak()
        row, _ = ours(bench, a, b, c, name, bench.memory("16GiB"))
        ceiling = min(core["tflops"], row["link_roofline_tflops"])
        row |= {"in_core_tflops": core["tflops"], "share_of_ceiling": row["tflops"] / ceiling}
        bench.note(
            f"{name} share of min(in-core, link roofline)",
            share=row["share_of_ceiling"],
            link=row["link_roofline_tflops"],
        )
        if bench.peers:
            bench.attempt("copy-compute-copy", lambda: copy_compute_copy(bench, a, b, c, name))
        if bench.peers and bench.left_s() > 90:
            naive_loop(bench, a, b, c, name, side // 4)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def green_streams(num_sms: int) -> list[tuple[int, Any]]:
    """Two disjoint parts of one GPU: one split, the group and the remainder each with a green context and a stream."""
    from cuda.bindings import driver

    def value(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(f"the driver answered {result[0]}")
        return result[1] if len(result) == 2 else result[1:]

    torch.zeros(1, device=DEVICE)
    device = value(driver.cuDeviceGet(0))
    whole = value(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    groups, _, rest = value(driver.cuDevSmResourceSplitByCount(1, whole, 0, num_sms))
    streams = []
    for resource in (groups[0], rest):
        described = value(driver.cuDevResourceGenerateDesc([resource], 1))
        flag = int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        context = value(driver.cuGreenCtxCreate(described, device, flag))
        nonblocking = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stream = value(driver.cuGreenCtxStreamCreate(context, nonblocking, 0))
        streams.append((int(resource.sm.smCount), torch.cuda.ExternalStream(int(stream), device=DEVICE)))
    return streams


def green(bench: Bench) -> None:
    """Two unequal devices on one GPU, 40 + 92 multiprocessors: together at least 95 % of the sum of each alone."""
    if not CUDA:
        raise RuntimeError("needs a CUDA device")
    side = bench.side(32768)
    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = bench.matrix(0, side, side, torch.float32), bench.matrix(1, side, side, torch.float32)
    c = bench.matrix(2, side, side, torch.float32, fill=False)
    lanes = [CudaLane(DEVICE, compute=stream, num_sms=sms, name=f"{sms} SMs") for sms, stream in green_streams(40)]
    shape = (a.shape[0], b.shape[1], a.shape[1], "fp32")
    memory = bench.memory("6GiB")

    def run(lanes: list[CudaLane], rows: slice = slice(None)) -> Report:
        return Job(a[rows], b, out=c[rows], memory=memory, devices=lanes).run()

    for lane in lanes:  # cuBLAS chooses and loads its kernels
        run([lane], slice(0, side // 16))
    alone = [run([lane]) for lane in lanes]
    for lane, report in zip(lanes, alone):
        bench.row(*shape, f"green context {lane.name} alone", report.seconds)
    both = min((run(lanes) for _ in range(2)), key=lambda report: report.seconds)
    row = bench.row(*shape, "green contexts together", both.seconds, bytes_in=both.bytes_in, bytes_out=both.bytes_out)
    row["share_of_sum"] = row["tflops"] / sum(2 * shape[0] * shape[1] * shape[2] / r.seconds / 1e12 for r in alone)
    row |= {"shares": [lane.share for lane in both.lanes], "balance": both.balance}
    row["bytes_from_peers"] = [lane.bytes_from_peers for lane in both.lanes]
    row["relative_error"] = relative_error(c, a, b)
    bench.note("green contexts", share_of_sum=row["share_of_sum"], shares=str(row["shares"]), balance=both.balance)
    half = side // 2
    halves = [
        threading.Thread(target=run, args=([lane], rows))
        for lane, rows in zip(lanes, (slice(0, half), slice(half, None)))
    ]
    started_s = time.perf_counter()
    for thread in halves:
        thread.start()
    for thread in halves:
        thread.join()
    bench.row(*shape, "green contexts, static halves", time.perf_counter() - started_s)


def simulated(bench: Bench) -> None:
    """2 to 4 simulated devices, speeds 8:4:2:1: to reach 97 % balance with at least 64 tasks. Needs no GPU."""
    side, depth = 1024, 16
    for num_lanes in (2, 3, 4):
        speeds = [8, 4, 2, 1][:num_lanes]
        flop = 2.0 * side * side * depth
        per_unit = flop / sum(speeds) / 3.0  # three seconds of work
        lanes = [
            CpuLane(f"speed {speed}", compute=ThreadStream(f"speed {speed}", rate_per_s=per_unit * speed))
            for speed in speeds
        ]
        a, b = torch.randn(side, depth), torch.randn(depth, side)
        job = Job(a, b, memory="100KiB", devices=lanes, rates=Rates(1e9, 1e9, 1e9, launch_s=2e-5))
        report = job.run()
        for lane in lanes:
            lane.close()
        ideal_s = flop / (per_unit * sum(speeds))
        facts: Row = {"balance": ideal_s / report.seconds, "num_tasks": job.tiles.num_tasks, "num_devices": num_lanes}
        facts |= {"ends_together": report.balance, "shares": [lane.share for lane in report.lanes]}
        facts["largest_error"] = (job.out - a @ b).abs().max().item()  # type: ignore[operator]
        bench.note("simulated devices", **facts)
        bench.row(side, side, depth, "fp32", f"simulated devices {':'.join(map(str, speeds))}", report.seconds, **facts)


def linear(bench: Bench) -> None:
    """A TiledLinear step, activations on the device; beside it in-core, and moving the weight in each step."""
    features, num_tokens = bench.side(65536), bench.side(16384)
    weight = bench.matrix(0, features, features, torch.bfloat16)
    weight.mul_(0.01)
    layer = TiledLinear(1, 1, bias=False, memory=bench.memory("4GiB"), dtype=torch.bfloat16)
    layer.in_features = layer.out_features = features
    layer.weight = torch.nn.Parameter(weight)
    x = torch.randn(num_tokens, features, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    flop = 6.0 * num_tokens * features * features
    shape = (3 * num_tokens, features, features, "bf16")  # the three products of a step

    def step() -> None:
        x.grad = layer.weight.grad = None
        layer(x).backward(dy)

    fresh_peak()
    times = timed(step, 3)
    reports = layer.reports
    predicted_s = sum(report.prediction.seconds for _, report in reports)
    roofline_s = sum(max(r.prediction.compute_s, r.prediction.in_s, r.prediction.out_s) for _, r in reports)
    facts: Row = {"all_seconds": times, "predicted_s": predicted_s, "share_of_roofline": roofline_s / min(times)}
    facts |= {"device_peak_gib": peak_gib(), "bytes_in": sum(r.bytes_in for _, r in reports)}
    facts["bytes_out"] = sum(r.bytes_out for _, r in reports)
    facts["products"] = {name: [r.seconds, r.prediction.seconds] for name, r in reports}  # the last two at once
    bench.row(*shape, "TiledLinear step", min(times), **facts)
    bench.note("TiledLinear", share_of_roofline=facts["share_of_roofline"], tflops=flop / min(times) / 1e12)
    gradient = layer.weight.grad
    assert gradient is not None
    with torch.no_grad():
        rows = torch.linspace(0, features - 1, 8, device=DEVICE).long()
        exact = (dy[:, rows].float().t() @ x.detach().float()).cpu()
        error = (gradient[rows.cpu()].float() - exact).abs().max().item() / exact.abs().max().item()
    bench.note("TiledLinear gradient", relative_error=error)
    bench.attempt("linear peers", lambda: _linear_peers(bench, shape, weight, x, dy))


def _in_core_linear_s(weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> float:
    on_device = weight.to(DEVICE).requires_grad_()

    def step() -> None:
        x.grad = on_device.grad = None
        torch.nn.functional.linear(x, on_device).backward(dy)

    return min(timed(step, 2))


def _linear_peers(
    bench: Bench, shape: tuple[int, int, int, str], weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor
) -> None:
    fresh_peak()
    bench.row(*shape, "in-core linear step", _in_core_linear_s(weight, x, dy), device_peak_gib=peak_gib())
    fresh_peak()
    host_gradient = bench.blocks[2][: weight.nbytes].view(weight.dtype).view(weight.shape)

    def moving_step() -> None:
        moved = weight.to(DEVICE, non_blocking=True).requires_grad_()
        x.grad = None
        torch.nn.functional.linear(x, moved).backward(dy)
        assert moved.grad is not None
        host_gradient.copy_(moved.grad, non_blocking=True)

    bench.row(*shape, "weight moved in, gradient out", min(timed(moving_step, 2)), device_peak_gib=peak_gib())


def files(bench: Bench) -> None:
    """Operands and result in files: bound by the disk (here mostly the page cache, just written)."""
    side = bench.side(16384)
    with tempfile.TemporaryDirectory() as folder:
        a, b = bench.matrix(0, side, side, torch.float32), bench.matrix(1, side, side, torch.float32)
        file_a, file_b = FileMatrix.save(Path(folder) / "a", a), FileMatrix.save(Path(folder) / "b", b)
        out = FileMatrix.create(Path(folder) / "c", (side, side), torch.float32)
        job = Job(file_a, file_b, out=out, memory=bench.memory("2GiB"), devices=[str(DEVICE)])
        report = job.run()
        error = relative_error(out.to_tensor(), a, b)
        facts = {"bytes_in": report.bytes_in, "bytes_out": report.bytes_out, "relative_error": error}
        bench.row(
            side, side, side, "fp32", "outcore, file to file", report.seconds, bound=job.prediction.bound, **facts
        )
        bench.note("files", read_gb_per_s=report.bytes_in / report.seconds / 1e9)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "links": links,
    "fp32": fp32,
    "bf16": bf16,
    "tf32": tf32,
    "green": green,
    "linear": linear,
    "simulated": simulated,
    "files": files,
}


def run_sections(bench: Bench, names: list[str]) -> None:
    for name in names:
        if bench.left_s() < 5:
            bench.note(name, skipped="no time left")
            continue
        print(f"{name} ({bench.left_s():.0f} s left)", flush=True)
        started_s = time.monotonic()
        if not bench.blocks and name != "simulated":
            bench.attempt("lock", bench.lock_blocks)
        bench.attempt(name, partial(SECTIONS[name], bench))
        bench.note(f"{name} took", seconds=time.monotonic() - started_s)
        fresh_peak()
        bench.save()


def table(bench: Bench) -> Table:
    shown = Table("dtype", "m x n x k", "method", "TFLOP/s", "s", "in", "out", "peak GiB")
    for row in bench.rows:
        moved = ["" if row[name] is None else format_bytes(row[name]) for name in ("bytes_in", "bytes_out")]
        peak = "" if row["device_peak_gib"] is None else f"{row['device_peak_gib']:.2f}"
        size = f"{row['m']} x {row['n']} x {row['k']}"
        shown.add_row(row["dtype"], size, row["method"], f"{row['tflops']:.4g}", f"{row['seconds']:.3f}", *moved, peak)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    hardware = torch.cuda.get_device_name(0).split()[-1].lower() if CUDA else "cpu"
    default = Path(__file__).parent / "results" / f"matmul_{hardware}_{datetime.date.today():%Y%m%d}.json"
    parser.add_argument("--out", type=Path, default=default, help="where the JSON goes")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma-separated: " + ", ".join(SECTIONS))
    parser.add_argument("--limit-s", type=float, default=230.0, help="no section starts after this many seconds")
    parser.add_argument("--small", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--no-peers", action="store_true", help="of fp32, bf16 and tf32 only in-core and outcore")
    options = parser.parse_args()
    names = options.only.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    bench = Bench(options.small, options.limit_s, options.out, peers=not options.no_peers)
    run_sections(bench, names)
    bench.save()
    Console(width=140).print(table(bench))
    print(f"results in {options.out}")


if __name__ == "__main__":
    main()
