"""NumPy arrays and mapped files as operands; files that a product left unfinished; products that take hours."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import outcore
from outcore.cli import main
from outcore.errors import TilingError
from outcore.tiling.operands import FileMatrix, as_matrix
from outcore.tiling.product import Job, TilingWarning
from outcore.tiling.tiles import Rates

SLOW = Rates(1e3, 1e9, 1e9)


def mapped(path: Path, array: np.ndarray[Any, Any], **options: Any) -> np.memmap[Any, Any]:
    out: np.memmap[Any, Any] = np.memmap(path, array.dtype, "w+", shape=array.shape, **options)
    out[:] = array
    return out


def numbers(rows: int, cols: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.random.default_rng(rows * cols).standard_normal((rows, cols)).astype(dtype)


def multiply(a: Any, b: Any, **options: Any) -> Any:
    return outcore.matmul(a, b, memory="8KB", devices=["cpu"], **options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("offset", [0, 64, 5000])
def test_a_mapped_array_is_read_and_written_through_its_file(tmp_path: Path, dtype: str, offset: int) -> None:
    a, b = numbers(40, 30, dtype), numbers(30, 50, dtype)
    left, right = mapped(tmp_path / "a", a, offset=offset), mapped(tmp_path / "b", b)
    out: np.memmap[Any, Any] = np.memmap(tmp_path / "c", dtype, "w+", shape=(40, 50), offset=offset)
    operand = as_matrix(left, "a")
    assert isinstance(operand, FileMatrix)
    assert operand.offset_bytes == offset
    assert multiply(left, right, out=out) is out
    np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-4)
    again: np.memmap[Any, Any] = np.memmap(tmp_path / "c", dtype, "r", shape=(40, 50), offset=offset)
    np.testing.assert_array_equal(again, out)
    assert not (tmp_path / "c.unfinished").exists()


def test_transposed_and_sliced_arrays_are_what_they_show(tmp_path: Path) -> None:
    a = numbers(40, 30)
    whole = mapped(tmp_path / "a", a)
    rows = as_matrix(whole[8:24], "a")
    assert isinstance(rows, FileMatrix)
    assert rows.offset_bytes == 8 * 30 * 4
    assert isinstance(as_matrix(whole.T, "a"), FileMatrix)
    assert isinstance(as_matrix(whole[:, 3:9], "a"), torch.Tensor)  # rows with gaps: through the mapping
    for part in (whole[8:24], whole.T, whole.T[4:20], whole[:, 3:9], whole[::2]):
        b = numbers(part.shape[1], 10)
        np.testing.assert_allclose(multiply(part, b).numpy(), np.asarray(part) @ b, rtol=1e-4, atol=1e-4)


def test_sums_go_into_the_array_that_is_added(tmp_path: Path) -> None:
    a, b = numbers(20, 30), numbers(30, 20)
    out = mapped(tmp_path / "c", numbers(20, 20))
    expected = a @ b + 0.5 * np.asarray(out)
    multiply(a, b, out=out, add=out, beta=0.5)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_two_parts_of_one_file_are_apart(tmp_path: Path) -> None:
    file = mapped(tmp_path / "all", np.vstack([numbers(24, 24), numbers(24, 24), np.zeros((24, 24), "float32")]))
    multiply(file[:24], file[24:48], out=file[48:])
    np.testing.assert_allclose(file[48:], file[:24] @ file[24:48], rtol=1e-4, atol=1e-4)
    with pytest.raises(TilingError, match="out shares memory with an operand"):
        multiply(file[:24], file[24:48], out=file[40:64])
    with pytest.raises(TilingError, match="out shares memory with an operand"):  # `a` has gaps: through the mapping
        multiply(file[:24, :8], numbers(8, 24), out=file[16:40])


def test_arrays_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    a = numbers(8, 8)
    mapped(tmp_path / "a", a).flush()
    for mode in ("r", "c"):
        with pytest.raises(TilingError, match=rf"mapped with mode '{mode}'; map it with 'r\+'"):
            multiply(a, a, out=np.memmap(tmp_path / "a", "float32", mode, shape=(8, 8)))
    frozen = numbers(8, 8)
    frozen.flags.writeable = False
    with pytest.raises(TilingError, match="cannot be written"):
        multiply(a, a, out=frozen)
    assert multiply(frozen, a).shape == (8, 8)  # but read
    with pytest.raises(TilingError, match="a is a list; give a tensor, a FileMatrix or a NumPy array"):
        multiply([[1.0]], a)
    for unusual in (a[::-1], a.astype(">f4")):
        with pytest.raises(TilingError, match="byte order and strides of zero or more: copy it"):
            multiply(unusual, a)
    with pytest.raises(TilingError, match="products are of float32"):
        multiply(a.astype("int32"), a.astype("int32"))


def test_an_array_is_not_read_from_a_file_that_holds_other_numbers(tmp_path: Path) -> None:
    """Changed in memory only, removed, and replaced by another file of that name."""
    a, b = numbers(12, 10), numbers(10, 8)
    mapped(tmp_path / "a", a).flush()
    private: np.memmap[Any, Any] = np.memmap(tmp_path / "a", "float32", "c", shape=(12, 10))
    private[0] = 7.0
    np.testing.assert_allclose(multiply(private, b).numpy(), np.asarray(private) @ b, rtol=1e-4, atol=1e-4)
    whole = mapped(tmp_path / "b", a)
    (tmp_path / "b").unlink()
    np.testing.assert_allclose(multiply(whole, b).numpy(), a @ b, rtol=1e-4, atol=1e-4)
    (tmp_path / "b").write_bytes(bytes(a.nbytes))
    np.testing.assert_allclose(multiply(whole, b).numpy(), a @ b, rtol=1e-4, atol=1e-4)


def test_a_file_that_a_product_left_unfinished_is_refused(tmp_path: Path) -> None:
    matrix = FileMatrix.save(tmp_path / "c", torch.randn(8, 8))
    array: np.memmap[Any, Any] = np.memmap(tmp_path / "c", "float32", "r+", shape=(8, 8))
    other = torch.randn(8, 8)
    matrix.unfinished_path.touch()
    for name, operands in (("a", (matrix, other)), ("b", (other, matrix)), ("a", (array, other))):
        with pytest.raises(TilingError, match=rf"{name} is .*c, into which a product was written that did not end"):
            multiply(*operands)
    with pytest.raises(TilingError, match=r"add is .*did not end"):
        multiply(other, other, add=matrix)
    multiply(other, other, out=matrix)  # written anew, it is whole again
    torch.testing.assert_close(multiply(matrix, other), other @ other @ other)
    matrix.unfinished_path.touch()
    saved = outcore.FileMatrix.save(matrix.path, other)
    torch.testing.assert_close(multiply(saved, other), other @ other)


def test_a_product_that_takes_hours_says_so_before_it_begins() -> None:
    """By its prediction: the device is said to be slow."""
    a = torch.randn(512, 16)
    with pytest.warns(TilingWarning, match=r"512 x 512 x 16 product is predicted to take 2\.\d hours, bound by comp"):
        Job(a, a.t(), memory="40KB", devices=["cpu"], rates=SLOW).run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Job(a, a.t(), memory="40KB", devices=["cpu"]).run()


def test_the_command_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outcore.tiling.product.LONG_S", 0.0)
    result = CliRunner().invoke(main, ["matmul", "64", "64", "64", "--device", "cpu", "--memory", "40KB"])
    assert result.exit_code == 0, result.output
    assert "Warning: this 64 x 64 x 64 product is predicted to take 0.0 hours" in result.stderr
    assert result.stderr.count("Warning") == 1
