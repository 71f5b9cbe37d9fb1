from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import outcore
from outcore.errors import TilingError
from outcore.tiling.lanes import CpuLane
from outcore.tiling.operands import FileMatrix, is_file_mapping
from outcore.tiling.product import Job, UnfinishedProduct
from tests.cpu.tiling.tiling_products import RATES, Failing, assert_product, random_matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("flips", [(False, False), (True, False), (False, True)])
def test_a_product_from_file_to_file(
    tmp_path: Path, dtype: torch.dtype, stages: bool, flips: tuple[bool, bool]
) -> None:
    a, b = random_matrix(130, 90, dtype), random_matrix(90, 110, dtype)
    file_a = FileMatrix.save(tmp_path / "a", a.t() if flips[0] else a)
    file_b = FileMatrix.save(tmp_path / "b", b.t() if flips[1] else b)
    out = FileMatrix.create(tmp_path / "c", (130, 110), dtype)
    lane = CpuLane(stages=stages)
    job = Job(
        file_a.t() if flips[0] else file_a,
        file_b.t() if flips[1] else file_b,
        out=out,
        memory="20KB",
        devices=[lane],
        rates=RATES,
    )
    job.run()
    lane.close()
    assert_product(out.to_tensor(), a, b)
    assert job.prediction.bound == "disk" or job.gemm.on_disk == "abc"
    assert not out.unfinished_path.exists()


def test_a_transposed_result_and_an_offset(tmp_path: Path) -> None:
    a, b = random_matrix(40, 30), random_matrix(30, 20)
    path = tmp_path / "a"
    path.write_bytes(b"a header of 24 bytes....")
    with open(path, "ab") as file:
        file.write(a.numpy().tobytes())
    out = FileMatrix.create(tmp_path / "c", (20, 40), torch.float32).t()
    outcore.matmul(FileMatrix(path, (40, 30), torch.float32, offset_bytes=24), b, out=out, memory="2KB")
    assert_product(out.to_tensor(), a, b)


def test_mapped_tensors_are_operands_and_results(tmp_path: Path) -> None:
    a, b = random_matrix(60, 50), random_matrix(50, 40)
    mapped_a = torch.from_file(str(tmp_path / "a"), shared=True, size=3000).view(60, 50)
    mapped_a.copy_(a)
    mapped_b = torch.from_numpy(np.memmap(tmp_path / "b", dtype=np.float32, mode="w+", shape=(50, 40)))
    mapped_b.copy_(b)
    out = torch.from_file(str(tmp_path / "c"), shared=True, size=2400).view(60, 40)
    assert is_file_mapping(mapped_a)
    assert is_file_mapping(mapped_b)
    outcore.matmul(mapped_a, mapped_b, out=out, memory="4KB")
    assert_product(torch.from_numpy(np.fromfile(tmp_path / "c", dtype=np.float32)).view(60, 40), a, b)


def test_a_file_of_more_than_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outcore.tiling.operands.FILE_CHUNK_BYTES", 1000)
    tensor = random_matrix(77, 33)
    matrix = FileMatrix.save(tmp_path / "a", tensor)
    assert torch.equal(matrix.to_tensor(), tensor)
    part = torch.empty(5, 7)
    matrix.read_into(part, (10, 15, 20, 27))
    assert torch.equal(part, tensor[10:15, 20:27])


def test_a_file_that_is_too_short_is_refused_with_both_sizes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    with pytest.raises(TilingError, match=r"holds 100 B.*needs 400 B"):
        FileMatrix(tmp_path / "a", (10, 10), torch.float32)
    with pytest.raises(TilingError, match="not a file"):
        FileMatrix(tmp_path / "none", (10, 10), torch.float32)


def test_a_file_that_shrinks_in_mid_product_ends_it(tmp_path: Path) -> None:
    a = FileMatrix.create(tmp_path / "a", (100, 100), torch.float32)
    job = Job(a, random_matrix(100, 100), memory="10KB", rates=RATES)
    (tmp_path / "a").write_bytes(bytes(100))
    with pytest.raises(UnfinishedProduct, match="became shorter"):
        job.run()


def test_an_unfinished_file_keeps_its_mark(tmp_path: Path) -> None:
    out = FileMatrix.create(tmp_path / "c", (200, 200), torch.float32)
    a, b = random_matrix(200, 50), random_matrix(50, 200)
    lane = CpuLane("lost", compute=Failing("lost", 2))
    with pytest.raises(UnfinishedProduct):
        outcore.matmul(a, b, out=out, memory="20KB", devices=[lane])
    lane.close()
    assert out.unfinished_path.exists()
    outcore.matmul(a, b, out=out, memory="20KB")
    assert not out.unfinished_path.exists()
    assert_product(out.to_tensor(), a, b)


def test_out_may_not_be_an_operands_file(tmp_path: Path) -> None:
    a = FileMatrix.save(tmp_path / "a", random_matrix(20, 20))
    with pytest.raises(TilingError, match="shares memory"):
        outcore.matmul(a, random_matrix(20, 20), out=FileMatrix(tmp_path / "a", (20, 20), torch.float32))


def test_kvikio_reads_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with kvikio's calls (the real one is not here): the same bytes arrive, a short read is an error."""

    class CuFile:
        def __init__(self, path: str, flags: str) -> None:
            assert flags == "r"
            self._content = Path(path).read_bytes()

        def __enter__(self) -> CuFile:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def pread(self, memory: Any, file_offset: int) -> Any:
            part = np.frombuffer(self._content, np.uint8)[file_offset : file_offset + memory.nbytes]
            memory[: part.nbytes] = part
            return SimpleNamespace(get=lambda: part.nbytes)

    tensor = random_matrix(50, 30)
    matrix = FileMatrix.save(tmp_path / "a", tensor)
    monkeypatch.setattr("outcore.tiling.operands._kvikio", lambda: SimpleNamespace(CuFile=CuFile))
    assert torch.equal(matrix.to_tensor(), tensor)
    (tmp_path / "a").write_bytes(bytes(100))
    with pytest.raises(TilingError, match="became shorter"):
        matrix.to_tensor()
