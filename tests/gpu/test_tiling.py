"""The CUDA side of the executor: the copies, the streams and the limits that threads cannot show."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from outcore.errors import TilingError
from outcore.tiling.linear import TiledLinear
from outcore.tiling.product import Job
from outcore.units import MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _full_fp32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)


def matrix(rows: int, cols: int, dtype: torch.dtype, *, pinned: bool = True, flipped: bool = False) -> torch.Tensor:
    stored = torch.randn((cols, rows) if flipped else (rows, cols)).to(dtype)
    stored = stored.pin_memory() if pinned else stored
    return stored.t() if flipped else stored


def check(c: object, a: torch.Tensor, b: torch.Tensor) -> None:
    assert isinstance(c, torch.Tensor)
    exact = a.double().cuda() @ b.double().cuda()
    scale = a.double().abs().cuda() @ b.double().abs().cuda()
    error = ((c.cuda().double() - exact).abs() / scale).max().item()
    assert error < TOLERANCES[c.dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("flips", [(False, False), (True, False), (False, True), (True, True)])
def test_products_of_every_type_and_layout(dtype: torch.dtype, pinned: bool, flips: tuple[bool, bool]) -> None:
    a = matrix(3000, 2500, dtype, pinned=pinned, flipped=flips[0])
    b = matrix(2500, 2100, dtype, pinned=pinned, flipped=flips[1])
    for memory in ("20MiB", "300MiB"):
        job = Job(a, b, memory=memory, devices=["cuda:0"])
        job.run()
        check(job.out, a, b)


@pytest.mark.parametrize("pin", [True, False])
def test_locking_in_place_and_staging_agree(pin: bool) -> None:
    a, b = matrix(4096, 2048, torch.float32, pinned=False), matrix(2048, 4096, torch.float32, pinned=False)
    out = torch.empty(4096, 4096)
    job = Job(a, b, out=out, memory="60MiB", devices=["cuda:0"], pin=pin)
    report = job.run()
    check(out, a, b)
    assert report.num_pin_failures == 0
    assert not a.is_pinned()


def test_the_addend_and_the_factors() -> None:
    a, b, add = (matrix(2000, 2000, torch.bfloat16) for _ in range(3))
    job = Job(a, b, add=add, alpha=0.5, beta=-2.0, memory="12MiB", devices=["cuda:0"])
    job.run()
    assert isinstance(job.out, torch.Tensor)
    exact = 0.5 * (a.cuda().double() @ b.cuda().double()) - 2 * add.cuda().double()
    torch.testing.assert_close(job.out.cuda().double(), exact, rtol=0.02, atol=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_panels_of_halves_are_summed_in_fp32(dtype: torch.dtype) -> None:
    a, b = matrix(512, 60000, dtype), matrix(60000, 512, dtype)
    job = Job(a, b, memory="16MiB", devices=["cuda:0"])
    assert job.tiles.num_panels > 1
    job.run()
    check(job.out, a, b)


def test_the_memory_limit_is_the_limit() -> None:
    a, b = matrix(8192, 8192, torch.float32), matrix(8192, 8192, torch.float32)
    out = torch.empty(8192, 8192).pin_memory()
    Job(a[:512], b[:, :512], memory="300MiB", devices=["cuda:0"]).run()  # the cuBLAS workspace is there now
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    job = Job(a, b, out=out, memory="300MiB", devices=["cuda:0"])
    report = job.run()
    assert torch.cuda.max_memory_allocated() - before <= 300 * MIB
    assert torch.cuda.memory_allocated() == before
    check(out[::100], a[::100], b)
    assert (report.bytes_in, report.bytes_out) == (job.prediction.bytes_in, job.prediction.bytes_out)


def test_results_do_not_change_over_many_runs_beside_other_work() -> None:
    """The caller's kernels use the same memory between runs: a missing wait would show as a wrong number."""
    a, b = matrix(2048, 1024, torch.float32), matrix(1024, 2048, torch.float32)
    expected = None
    for _ in range(8):
        noise = [torch.randn(1024, 1024, device="cuda") for _ in range(8)]
        busy = sum(x @ x for x in noise)
        del noise
        job = Job(a, b, memory="24MiB", devices=["cuda:0"])
        job.run()
        assert isinstance(job.out, torch.Tensor)
        expected = job.out if expected is None else expected
        assert torch.equal(job.out, expected)
        assert isinstance(busy, torch.Tensor)
    check(expected, a, b)


def test_two_lanes_on_one_device() -> None:
    from outcore.tiling.lanes import CudaLane

    a, b = matrix(4096, 2048, torch.float32), matrix(2048, 4096, torch.float32)
    lanes = [CudaLane("cuda:0", name="one"), CudaLane("cuda:0", name="two")]
    job = Job(a, b, memory="100MiB", devices=lanes)
    report = job.run()
    check(job.out, a, b)
    assert all(lane.num_pieces for lane in report.lanes)


def test_the_cpu_may_be_a_worker_beside_the_gpu() -> None:
    a, b = matrix(4096, 2048, torch.float32), matrix(2048, 4096, torch.float32)
    job = Job(a, b, memory="100MiB", devices=["cuda:0", "cpu"])
    job.run()
    check(job.out, a, b)


def test_a_lane_without_memory_leaves_its_share_to_the_other() -> None:
    from outcore.tiling.lanes import CpuLane, CudaLane

    class Full(CudaLane):
        def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(2**50, dtype=torch.uint8, device=self.device)

    a, b = matrix(512, 512, torch.float32), matrix(512, 512, torch.float32)
    cpu = CpuLane()
    job = Job(a, b, memory="1MiB", devices=[Full("cuda:0"), cpu])
    report = job.run()
    cpu.close()
    check(job.out, a, b)
    assert report.lanes[0].error is not None


@pytest.mark.parametrize("resident", ["a", "b", "ab"])
def test_operands_on_the_device_stay_there(resident: str) -> None:
    a, b = matrix(1500, 1200, torch.bfloat16), matrix(1200, 1700, torch.bfloat16)
    left, right = a.cuda() if "a" in resident else a, b.cuda() if "b" in resident else b
    job = Job(left, right, memory="4MiB")
    report = job.run()
    assert isinstance(job.out, torch.Tensor)
    assert job.out.is_cuda
    check(job.out, a, b)
    streamed = {"a": b.nbytes, "b": a.nbytes, "ab": 0}[resident]
    assert report.bytes_in >= streamed
    assert report.bytes_out == 0
    with pytest.raises(TilingError, match="just that one"):
        Job(left, right, devices=["cuda:0", "cpu"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_on_device_activations_equals_the_in_core_layer(dtype: torch.dtype) -> None:
    tiled = TiledLinear(1024, 1536, memory="4MiB", dtype=dtype)
    plain = nn.Linear(1024, 1536, dtype=dtype)
    plain.load_state_dict(copy.deepcopy(tiled.state_dict()))
    plain = plain.cuda()
    x = torch.randn(512, 1024, device="cuda", dtype=dtype, requires_grad=True)
    x_plain = x.detach().clone().requires_grad_()
    for _ in range(3):
        tiled(x).square().mean().backward()
        plain(x_plain).square().mean().backward()
    tolerance: Any = {"rtol": 2e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(tiled(x), plain(x_plain), **tolerance)
    torch.testing.assert_close(x.grad, x_plain.grad, **tolerance)
    assert tiled.weight.grad is not None
    assert plain.weight.grad is not None
    torch.testing.assert_close(tiled.weight.grad, plain.weight.grad.cpu(), **tolerance)


def test_a_layers_step_repeats_bit_for_bit_beside_other_work() -> None:
    """Two products at once on the caller's stream: a missing wait between them and the caller would show."""
    layer = TiledLinear(2048, 2048, bias=False, memory="400MiB", dtype=torch.bfloat16)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(6):
            torch.manual_seed(0)
            noise = [torch.randn(2048, 2048, device="cuda") for _ in range(8)]
            busy = sum(x @ x for x in noise)
            del noise
            x = torch.randn(1024, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            layer.weight.grad = None
            layer(x).square().mean().backward()
            assert x.grad is not None
            assert layer.weight.grad is not None
            seen.append((x.grad.cpu(), layer.weight.grad.clone()))
            assert isinstance(busy, torch.Tensor)
    assert [name for name, _ in layer.reports] == ["forward", "backward input", "backward weight"]
    for dx, dw in seen[1:]:
        assert torch.equal(dx, seen[0][0])
        assert torch.equal(dw, seen[0][1])
