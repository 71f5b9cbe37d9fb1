from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import outcore
from outcore.errors import TilingError
from outcore.tiling.product import Job
from tests.cpu.tiling.tiling_products import RATES, assert_product, random_matrix

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@settings(max_examples=18, deadline=None)
@given(
    m=st.integers(1, 90),
    n=st.integers(1, 90),
    k=st.integers(1, 90),
    dtype=st.sampled_from(DTYPES),
    flips=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    budget_bytes=st.sampled_from([1000, 4000, 20_000, 10**6]),
    factors=st.sampled_from([(1.0, None), (0.5, None), (2.0, -1.5), (1.0, 1.0)]),
)
def test_any_product_equals_float64s(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    flips: tuple[bool, bool, bool],
    budget_bytes: int,
    factors: tuple[float, float | None],
) -> None:
    a, b = random_matrix(m, k, dtype, flipped=flips[0]), random_matrix(k, n, dtype, flipped=flips[1])
    out, add = random_matrix(m, n, dtype, flipped=flips[2]), random_matrix(m, n, dtype)
    alpha, beta = factors
    addend = None if beta is None else add
    job = Job(a, b, out=out, add=addend, alpha=alpha, beta=beta or 0.0, memory=budget_bytes, rates=RATES)
    assert job.tiles.device_bytes <= budget_bytes
    report = job.run()
    assert report.device_bytes <= job.tiles.device_bytes
    assert_product(out, alpha * a.double(), b, None if beta is None else beta * add.double())
    assert report.bytes_out == m * n * dtype.itemsize
    assert (report.bytes_in, report.bytes_out) == (job.prediction.bytes_in, job.prediction.bytes_out)


def test_the_readme_call() -> None:
    a, b = random_matrix(300, 200), random_matrix(200, 100)
    assert_product(outcore.matmul(a, b, memory="1MiB", devices=["cpu"]), a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """4096 ones summed in bf16 would stop at 256; across 64 panels the sum is exact."""
    ones = torch.ones(4, 4096, dtype=dtype)
    job = Job(ones, ones.t(), memory=4096, rates=RATES)
    assert job.tiles.num_panels > 4
    job.run()
    assert isinstance(job.out, torch.Tensor)
    assert (job.out.double() == 4096).all()


def test_vectors_follow_torch() -> None:
    matrix, left, right = random_matrix(7, 5), torch.randn(7), torch.randn(5)
    for a, b in ((left, matrix), (matrix, right), (right, right)):
        c = outcore.matmul(a, b, memory="1KiB")
        assert isinstance(c, torch.Tensor)
        assert c.shape == torch.matmul(a, b).shape
        assert torch.allclose(c, torch.matmul(a, b), atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_empty_shapes(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b, add = torch.randn(m, k), torch.randn(k, n), torch.randn(m, n)
    assert_product(outcore.matmul(a, b, memory="1KiB"), a, b)
    assert_product(outcore.matmul(a, b, add=add, beta=2.0, memory="1KiB"), a, b, 2 * add)


def test_any_strides_are_taken() -> None:
    a = torch.randn(40, 60)[::2, ::3]
    b = torch.randn(20, 1).expand(20, 30)
    out = torch.zeros(60, 60)[::3, ::2]
    assert outcore.matmul(a, b, out=out, memory="2KiB") is out
    assert_product(out, a, b)


def test_neither_operand_nor_neighbour_is_touched() -> None:
    a, b, around = random_matrix(33, 44), random_matrix(44, 55), torch.full((40, 70), 7.0)
    kept = a.clone(), b.clone()
    outcore.matmul(a, b, out=around[3:36, 5:60], memory="3KiB")
    assert_product(around[3:36, 5:60], a, b)
    around[3:36, 5:60] = 7.0
    assert (around == 7.0).all()
    assert torch.equal(a, kept[0])
    assert torch.equal(b, kept[1])


def test_out_may_be_the_addend() -> None:
    a, b, c = random_matrix(50, 40), random_matrix(40, 60), random_matrix(50, 60)
    before = c.clone()
    outcore.matmul(a, b, out=c, add=c, memory="4KiB")
    assert_product(c, a, b, before)


def test_nan_in_out_is_not_carried_over() -> None:
    a, b = random_matrix(20, 20), random_matrix(20, 20)
    out = torch.full((20, 20), float("nan"))
    assert_product(outcore.matmul(a, b, out=out, memory="2KiB"), a, b)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((torch.ones(2, 3), torch.ones(4, 5), {}), "as many columns"),
        ((torch.ones(2, 3), torch.ones(3, 5).double(), {}), "convert one"),
        ((torch.ones(2, 3).long(), torch.ones(3, 5).long(), {}), "float32, float64, bfloat16 or float16"),
        ((torch.ones(2, 2, 3), torch.ones(3, 5), {}), "reshape"),
        ((torch.ones(2, 3), torch.ones(3, 5), {"out": torch.ones(5, 2)}), "give it that shape"),
        ((torch.ones(2, 3), torch.ones(3, 5), {"out": torch.ones(1, 5).expand(2, 5)}), "memory of its own"),
        ((torch.ones(2, 3), torch.ones(3, 5), {"devices": []}), "at least one"),
        ((torch.ones(2, 3), torch.ones(3, 5), {"devices": ["meta"]}), "cannot take part"),
        ((torch.ones(2, 3).to_sparse(), torch.ones(3, 5), {}), "to_dense"),
        ((torch.ones(3), torch.ones(3, 5), {"out": torch.ones(5)}), "one row or column"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(
    arguments: tuple[torch.Tensor, torch.Tensor, dict[str, Any]], sentence: str
) -> None:
    a, b, options = arguments
    with pytest.raises(TilingError, match=sentence) as caught:
        outcore.matmul(a, b, **options)
    assert "\n" not in str(caught.value)


def test_out_may_alias_nothing() -> None:
    a = random_matrix(20, 20)
    for out in (a, a[:, :], a.t()):
        with pytest.raises(TilingError, match="shares memory"):
            outcore.matmul(a, random_matrix(20, 20), out=out)
    both = torch.randn(30, 20)
    with pytest.raises(TilingError, match="shares memory"):
        outcore.matmul(random_matrix(20, 20), random_matrix(20, 20), out=both[:20], add=both[10:])


def test_a_missing_cuda_device_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(TilingError, match="no CUDA device"):
        outcore.matmul(random_matrix(2, 2), random_matrix(2, 2), devices=["cuda:0"])


@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    """Offsets beyond 32 bits: the last row of a matrix of 2^31 + 2^16 elements, most of it memory never touched."""
    a, b = torch.empty(2**15 + 1, 2**16, dtype=torch.bfloat16), torch.ones(2**16, 1, dtype=torch.bfloat16)
    a[0, 0], a[-1, -1], a[2**15 - 1, 7] = 1.0, 3.0, 2.0
    if a[1:100].any():
        pytest.skip("this allocator does not return zeroed memory")
    c = outcore.matmul(a, b, memory="64MiB", devices=["cpu"])
    assert isinstance(c, torch.Tensor)
    assert {int(row): float(c[row, 0]) for row in c[:, 0].nonzero()} == {0: 1.0, 2**15 - 1: 2.0, 2**15: 3.0}


def test_the_memory_limit_is_the_limit() -> None:
    """The resident memory of a process that multiplies 80 MiB with a 2 MiB budget grows by little more."""
    code = """
import resource, torch, outcore
torch.set_num_threads(1)
a, b, out = torch.ones(4096, 4096), torch.ones(4096, 128), torch.ones(4096, 128)
outcore.matmul(a[:64, :64], b[:64, :64], memory="2MiB", devices=["cpu"])
before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
outcore.matmul(a, b, out=out, memory="2MiB", devices=["cpu"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib, out.sum().item() == 4096.0 * 4096 * 128)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    grown_kib, right = done.stdout.split()
    assert right == "True"
    assert int(grown_kib) < 24 * 1024
