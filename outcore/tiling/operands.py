"""The operands of a product: tensors and files, read and written by blocks.

Each operand is kept in the orientation in which it is stored (rows contiguous), with a flag if the product uses its
transpose; a transposed operand is never copied, because the matrix product accepts the flag. Files are read by several
threads with positioned reads (`preadv`, or kvikio if it is installed), which keeps many requests queued at the disk; a
mapping would fault one page at a time.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from outcore.errors import TilingError
from outcore.units import format_bytes

NUM_FILE_THREADS = 8
FILE_CHUNK_BYTES = 8 * 1024**2

Span = tuple[int, int, int, int]  # row, stop row, column, stop column, as stored
_TORCH_DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16}


class Store(Protocol):
    """A stored matrix: rows contiguous, read and written block by block."""

    shape: tuple[int, int]
    dtype: torch.dtype
    place: str  # "host", "disk" or a device such as "cuda:0"

    def read_into(self, target: torch.Tensor, span: Span) -> None: ...

    def write_from(self, source: torch.Tensor, span: Span) -> None: ...


@dataclass(frozen=True)
class Operand:
    """A store, and whether the product uses its transpose."""

    store: Store
    flipped: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.store.shape
        return (cols, rows) if self.flipped else (rows, cols)

    def span(self, row: int, stop_row: int, col: int, stop_col: int) -> Span:
        return (col, stop_col, row, stop_row) if self.flipped else (row, stop_row, col, stop_col)

    def t(self) -> Operand:
        return Operand(self.store, not self.flipped)


class TensorStore:
    """A tensor of any strides. If it is not stored by rows (`is_plain`), it is copied element by element."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape: tuple[int, int] = (tensor.shape[0], tensor.shape[1])
        self.dtype = tensor.dtype
        self.place = "host" if tensor.device.type == "cpu" else str(tensor.device)

    @property
    def is_plain(self) -> bool:
        return self.tensor.stride(1) == 1 and self.tensor.stride(0) >= self.tensor.shape[1]

    def view(self, span: Span) -> torch.Tensor:
        return self.tensor[span[0] : span[1], span[2] : span[3]]

    def read_into(self, target: torch.Tensor, span: Span) -> None:
        target.copy_(self.view(span))

    def write_from(self, source: torch.Tensor, span: Span) -> None:
        self.view(span).copy_(source)


class FileMatrix:
    """A matrix in a file, stored by rows after `offset_bytes`. `.t()` returns its transpose without copying.

    ```python
    import torch

    import outcore

    a = outcore.FileMatrix.save("a.bin", torch.randn(300, 200))  # FileMatrix("a.bin", (300, 200), torch.float32) later
    c = outcore.FileMatrix.create("c.bin", (300, 300), torch.float32)
    outcore.matmul(a, a.t(), out=c, memory="1MiB")
    ```
    """

    def __init__(
        self, path: str | os.PathLike[str], shape: tuple[int, int], dtype: torch.dtype, *, offset_bytes: int = 0
    ) -> None:
        self.path = Path(path)
        self.shape = shape
        self.dtype = dtype
        self.offset_bytes = offset_bytes
        self.place = "disk"
        self.flipped = False
        needed_bytes = offset_bytes + self.num_bytes
        if not self.path.is_file():
            raise TilingError(f"{self.path} is not a file; make one with FileMatrix.create")
        if self.path.stat().st_size < needed_bytes:
            raise TilingError(
                f"{self.path} holds {format_bytes(self.path.stat().st_size)}, a {shape[0]} x {shape[1]} matrix of "
                f"{dtype} needs {format_bytes(needed_bytes)}; check shape, dtype and offset"
            )

    @classmethod
    def create(cls, path: str | os.PathLike[str], shape: tuple[int, int], dtype: torch.dtype) -> FileMatrix:
        """Creates a file of the right length, sparse until written; an existing file is extended if it is too short."""
        with open(path, "ab") as file:
            num_bytes = shape[0] * shape[1] * dtype.itemsize
            if file.tell() < num_bytes:
                file.truncate(num_bytes)
        return cls(path, shape, dtype)

    @classmethod
    def save(cls, path: str | os.PathLike[str], tensor: torch.Tensor) -> FileMatrix:
        """Writes the elements of `tensor` to a file, replacing its previous content."""
        matrix = cls.create(path, (tensor.shape[0], tensor.shape[1]), tensor.dtype)
        matrix.write_from(tensor.detach().contiguous(), (0, tensor.shape[0], 0, tensor.shape[1]))
        matrix.unfinished_path.unlink(missing_ok=True)
        return matrix

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def stop_bytes(self) -> int:
        """The end of the matrix in the file."""
        return self.offset_bytes + self.num_bytes

    @property
    def unfinished_path(self) -> Path:
        """A file that exists while a product is written into the matrix, and remains if that product does not end."""
        return self.path.with_name(self.path.name + ".unfinished")

    @classmethod
    def of_memmap(cls, array: np.memmap[Any, Any]) -> FileMatrix | None:
        """Returns the file behind a mapped array, which many threads can read and write instead of page by page.

        Returns None if the array is not stored by whole rows (or, transposed, by columns), if changes stay in memory
        (mode 'c'), or if the file has been replaced.
        """
        if array.ndim != 2 or array.filename is None or array.dtype.byteorder == ">" or array.mode == "c":
            return None
        dtype = _TORCH_DTYPES.get(array.dtype.name)
        by_columns = array.flags.f_contiguous and not array.flags.c_contiguous
        stored = array.T if by_columns else array
        if dtype is None or not stored.flags.c_contiguous:
            return None
        mapped: Any = array._mmap  # type: ignore[attr-defined]
        start = np.frombuffer(mapped, np.uint8).ctypes.data
        where = _mapping_at(start)
        # The file may have been removed or replaced since; if that cannot be determined, it has not.
        if where is not None and not (os.path.exists(array.filename) and os.stat(array.filename).st_ino == where.inode):
            return None
        first_bytes = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY  # where the mapping begins in the file
        offset_bytes = first_bytes + stored.ctypes.data - start
        matrix = cls(array.filename, (stored.shape[0], stored.shape[1]), dtype, offset_bytes=offset_bytes)
        matrix.flipped = by_columns
        return matrix

    def check_finished(self, name: str) -> None:
        """Raises `TilingError` if a product that was written into the file did not end."""
        if self.unfinished_path.exists():
            raise TilingError(
                f"{name} is {self.path}, into which a product was written that did not end; run that product again "
                f"(or, if the file was written anew since, remove {self.unfinished_path.name} beside it)"
            )

    def t(self) -> FileMatrix:
        other = FileMatrix(self.path, self.shape, self.dtype, offset_bytes=self.offset_bytes)
        other.flipped = not self.flipped
        return other

    def to_tensor(self) -> torch.Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor, (0, self.shape[0], 0, self.shape[1]))
        return tensor.t() if self.flipped else tensor

    def read_into(self, target: torch.Tensor, span: Span) -> None:
        if target.dtype != self.dtype or not target.is_contiguous():
            whole = torch.empty((span[1] - span[0], span[3] - span[2]), dtype=self.dtype)
            self.read_into(whole, span)
            target.copy_(whole)
            return
        if _kvikio() is not None:
            self._read_by_kvikio(target, span)
            return
        with open(self.path, "rb", buffering=0) as file:
            self._each(target, span, lambda part, offset: _read_fully(file.fileno(), part, offset, self.path))

    def write_from(self, source: torch.Tensor, span: Span) -> None:
        source = source.to(self.dtype).contiguous()
        with open(self.path, "r+b", buffering=0) as file:
            self._each(source, span, lambda part, offset: _write_fully(file.fileno(), part, offset))

    def _read_by_kvikio(self, target: torch.Tensor, span: Span) -> None:
        """Reads the same runs of bytes with kvikio's threads, which can also bypass the page cache."""
        memory = memoryview(target.view(-1).view(torch.uint8).numpy().data)
        with _kvikio().CuFile(str(self.path), "r") as file:
            parts = [(np.frombuffer(part, np.uint8), offset) for part, offset in self._parts(memory, span)]
            pending = [(file.pread(part, file_offset=offset), part) for part, offset in parts]
            if any(future.get() != part.nbytes for future, part in pending):
                raise TilingError(f"{self.path} became shorter during the product; write it again")

    def _each(self, tensor: torch.Tensor, span: Span, move: Callable[[memoryview, int], None]) -> None:
        if not tensor.numel():
            return
        memory = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
        parts = list(self._parts(memory, span))
        if len(parts) == 1:
            move(*parts[0])
        else:
            list(_file_threads().map(lambda part: move(*part), parts))

    def _parts(self, memory: memoryview, span: Span) -> Iterable[tuple[memoryview, int]]:
        """Yields pieces of memory with their offsets in the file: whole rows as one run, otherwise row by row."""
        element_bytes, row_bytes = self.dtype.itemsize, self.shape[1] * self.dtype.itemsize
        run_bytes = (span[3] - span[2]) * element_bytes
        start = self.offset_bytes + span[0] * row_bytes + span[2] * element_bytes
        if run_bytes == row_bytes:
            run_bytes, num_runs = run_bytes * (span[1] - span[0]), 1
        else:
            num_runs = span[1] - span[0]
        for run in range(num_runs):
            for part in range(0, run_bytes, FILE_CHUNK_BYTES):
                stop = min(run_bytes, part + FILE_CHUNK_BYTES)
                yield memory[run * run_bytes + part : run * run_bytes + stop], start + run * row_bytes + part


@cache
def _kvikio() -> Any:
    try:
        return import_module("kvikio")
    except ImportError:
        return None


@cache
def _file_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_FILE_THREADS, thread_name_prefix="outcore file")


def _read_fully(file: int, memory: memoryview, offset: int, path: Path) -> None:
    while memory:
        num_bytes = os.preadv(file, [memory], offset)
        if not num_bytes:
            raise TilingError(f"{path} ends at byte {offset}: it became shorter during the product; write it again")
        memory, offset = memory[num_bytes:], offset + num_bytes


def _write_fully(file: int, memory: memoryview, offset: int) -> None:
    while memory:
        num_bytes = os.pwritev(file, [memory], offset)
        memory, offset = memory[num_bytes:], offset + num_bytes


def as_matrix(given: Any, name: str, *, is_written: bool = False) -> torch.Tensor | FileMatrix:
    """Returns an operand: a tensor or `FileMatrix` as given, the file of a mapped array, or the memory of other
    arrays."""
    if isinstance(given, torch.Tensor | FileMatrix):
        return given
    if isinstance(given, np.memmap):
        if is_written and given.mode not in ("r+", "w+"):
            raise TilingError(f"{name} is mapped with mode {given.mode!r}; map it with 'r+' to write into it")
        matrix = FileMatrix.of_memmap(given)
        if matrix is not None:
            if is_written:
                given.flush()
            return matrix
    if isinstance(given, np.ndarray):
        if is_written and not given.flags.writeable:
            raise TilingError(f"{name} is an array that cannot be written; give one that can")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about read-only arrays, which are not written here
            try:
                return torch.from_numpy(given)
            except ValueError:
                raise TilingError(
                    f"{name} is an array of {given.dtype} with strides {given.strides}; a product takes this machine's "
                    "byte order and strides of zero or more: copy it, x.astype(x.dtype.newbyteorder('='), order='C')"
                ) from None
    raise TilingError(f"{name} is a {type(given).__name__}; give a tensor, a FileMatrix or a NumPy array")


def as_operand(matrix: torch.Tensor | FileMatrix, name: str) -> Operand:
    """Returns a 2-D tensor or file matrix as stored; a tensor stored by columns becomes a transposed one by rows."""
    if isinstance(matrix, FileMatrix):
        return Operand(matrix, matrix.flipped)
    if matrix.dim() != 2:
        raise TilingError(
            f"{name} has {matrix.dim()} dimensions; a product takes matrices or vectors: reshape it first"
        )
    if matrix.layout != torch.strided:
        raise TilingError(f"{name} is {matrix.layout}; a product takes dense tensors: call .to_dense() first")
    matrix = matrix.detach()
    if matrix.stride(0) == 1 and matrix.stride(1) != 1:
        return Operand(TensorStore(matrix.t()), flipped=True)
    return Operand(TensorStore(matrix))


def overlaps(one: torch.Tensor | FileMatrix | None, other: torch.Tensor | FileMatrix | None) -> bool:
    if one is None or other is None:
        return False
    if isinstance(one, FileMatrix) or isinstance(other, FileMatrix):
        return _meet(_in_file(one), _in_file(other))
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    return _meet((0, *_addresses(one)), (0, *_addresses(other)))


def _meet(one: tuple[int, int, int] | None, other: tuple[int, int, int] | None) -> bool:
    """Whether two ranges (file, first, stop) have a byte in common."""
    return one is not None and other is not None and one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


def _in_file(matrix: torch.Tensor | FileMatrix) -> tuple[int, int, int] | None:
    """Returns inode and bytes of the file that contains a matrix, also a mapped one; None if there is none."""
    if isinstance(matrix, FileMatrix):
        return matrix.path.stat().st_ino, matrix.offset_bytes, matrix.stop_bytes
    where = _mapping_at(matrix.data_ptr()) if matrix.device.type == "cpu" and matrix.numel() else None
    if where is None or not where.inode:
        return None
    first, stop = (address - where.address + where.offset_bytes for address in _addresses(matrix))
    return where.inode, first, stop


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (extent + 1) * tensor.element_size()


def is_file_mapping(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is a mapped file: locking it would read all of the file into memory."""
    where = _mapping_at(tensor.data_ptr())
    return where is not None and where.inode != 0 and not where.path.startswith(("/dev/shm", "/memfd", "/dev/zero"))


class _Mapping(NamedTuple):
    """A range of this process's memory, and the part of a file that it maps; inode 0 if it maps none."""

    address: int
    offset_bytes: int
    inode: int
    path: str


def _mapping_at(address: int) -> _Mapping | None:
    """Returns the mapping at an address as Linux reports it; None on other systems."""

    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                fields = line.split(maxsplit=5)
                first, _, stop = fields[0].partition("-")
                if int(first, 16) <= address < int(stop, 16):
                    path = fields[5].strip() if len(fields) > 5 else ""
                    return _Mapping(int(first, 16), int(fields[2], 16), int(fields[4]), path)
    except OSError:
        pass
    return None
