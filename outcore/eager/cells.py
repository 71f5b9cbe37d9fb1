"""Cells, which represent the values of the running step, and handles, which autograd holds in place of tensors.

`bring` gets the data of a cell whose bytes are elsewhere: it is fetched, or made again from fetched data. This needs no
schedule, so a plan can be left at any point.

Ownership is reference counting. A handle refers to its cell; a dropped cell refers to the recipe of the op that made
it; a recipe refers to the cells it reads. When autograd frees a handle, everything that only it needed is freed. A cell
can therefore be brought back as long as it can be needed, on plan or off it.

A storage carries a mark that names its cell. The mark owns the cell as long as the cell does not hold the storage;
afterwards it is a weak reference, so that the two never keep each other alive. A mark is removed when its storage is
written into, because the cell has the content before the write, and at the end of the step, because a loss or a
gradient that the user keeps must not keep the step's cells alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from outcore.eager.settings import EAGER
from outcore.memory.store import Parcel, Store
from outcore.memory.tensors import PLAIN, as_bytes, data_ptr, source_of, storage_ptr

MARK, _OTHERS = "_outcore_cell", "_outcore_cells"
SMALL_BYTES = EAGER.small_bytes


def address_of(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's storage. It is computed from the tensor, because Python's reference to a
    storage would prevent autograd from adding gradients to it in place."""
    return data_ptr(tensor) - int(tensor.storage_offset()) * tensor.element_size()


Places = dict[int, "weakref.ref[torch.UntypedStorage]"]  # storages by address


def storage_at(places: Places, address: int) -> torch.UntypedStorage | None:
    """Returns the storage noted at an address, if it is still there; the address may have been reused."""
    storage = places[address]() if address in places else None
    return storage if storage is not None and storage_ptr(storage) == address else None


class Marks:
    """The marked storages of a step."""

    __slots__ = ("storages",)

    def __init__(self) -> None:
        self.storages: Places = {}

    def set(self, storage: torch.UntypedStorage, mark: Cell | weakref.ref[Cell]) -> None:
        """Marks the storage itself, because addresses are reused."""
        held = storage.__dict__
        before = cell_on(storage) if MARK in held else None
        held[MARK] = mark
        address = storage_ptr(storage) or -storage._cdata  # the address of all storages without bytes is 0
        self.storages[address] = weakref.ref(storage)
        if before is not None and before.is_saved and before is not cell_on(storage):
            self.note(storage, before)

    def note(self, storage: torch.UntypedStorage, cell: Cell) -> None:
        """Notes a cell whose handles were packed from the storage, which may no longer be marked as the cell's."""
        storage.__dict__.setdefault(_OTHERS, []).append(weakref.ref(cell))

    def find(self, address: int) -> torch.UntypedStorage | None:
        """Returns the marked storage at an address."""
        return storage_at(self.storages, address) if address in self.storages else None

    def clear(self) -> None:
        """Removes the marks from all storages that still exist."""
        for mark in self.storages.values():
            storage = mark()
            if storage is not None:
                unmark(storage)
        self.storages.clear()

    def keep_saved(self) -> None:
        """Removes the marks of cells that autograd does not need, so that their sources can be freed."""
        for mark in self.storages.values():
            storage = mark()
            cell = storage.__dict__.get(MARK) if storage is not None else None
            if storage is not None and isinstance(cell, Cell) and not cell.is_saved:
                del storage.__dict__[MARK]


class MakesAgain(Protocol):
    """The recipe of an op (`outcore.eager.replay`) or of a launch (`outcore.eager.launches`)."""

    made: Sequence[weakref.ref[Cell]]  # the cells of its fresh outputs, in order
    overwrote: Sequence[weakref.ref[Cell]]  # the cells of the next versions of what it wrote into

    @property
    def is_product(self) -> bool: ...
    @property
    def reads(self) -> list[Cell]: ...
    def sources(self) -> list[Cell]: ...
    def run(self, *, in_place: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]: ...


class Cell:
    """A storage version. At least one of `data`, `parcel` and `recipe` is set while it can be needed."""

    __slots__ = (
        "__weakref__",
        "data",
        "fetched",
        "follows",
        "held",
        "is_read",
        "is_saved",
        "lent",
        "num_bytes",
        "parcel",
        "recipe",
        "value",
        "version",
    )

    def __init__(self, value: int, tensor: torch.Tensor, *, overwritten: bool = False) -> None:
        self.value = value
        self.num_bytes = tensor.untyped_storage().nbytes()
        self.version = version_of(tensor) + overwritten  # the counter moves by one after an in-place op returns
        self.data: torch.Tensor | None = None  # any tensor on the storage; holding it holds the storage
        self.parcel: Parcel | None = None
        self.recipe: MakesAgain | None = None
        self.held = (0, 0)  # version and storage of `data` when it was held
        self.follows = False  # it refers to the live memory, not to its earlier content
        self.lent: weakref.ref[torch.UntypedStorage] | None = None  # a storage in which autograd may hold its content
        self.is_saved = False  # whether a handle refers to it
        self.is_read = False  # whether a recipe refers to it
        self.fetched = False  # whether data is being swapped in and was not waited for

    def name(self, tensor: torch.Tensor, marks: Marks) -> None:
        """Marks the storage of `tensor` as this cell's."""
        marks.set(tensor.untyped_storage(), self)

    def hold(self, tensor: torch.Tensor, marks: Marks) -> None:
        data = self.data = alias(tensor)
        storage = data.untyped_storage()
        self.held = version_of(data), storage._cdata
        marks.set(storage, weakref.ref(self))

    def let_go(self) -> None:
        """Releases the device storage, after waiting for a copy into it."""
        if self.fetched:
            self.arrive()
        self.data = None

    def arrive(self) -> None:
        if self.fetched and self.parcel is not None:
            self.parcel.wait_in()
        self.fetched = False

    def swap_out(self, store: Store, tiers: tuple[str, ...] = ("host", "disk")) -> bool:
        """Starts the swap-out; returns False if there is no room, or nothing to swap."""
        assert self.data is not None
        if not self.num_bytes:
            return False
        self.parcel = store.send(as_bytes(self.data), tiers)
        return self.parcel is not None

    def swap_in(self) -> None:
        assert self.parcel is not None
        self.data = self.parcel.store.fetch(self.parcel)
        self.fetched = True

    def __del__(self) -> None:
        if getattr(self, "fetched", False) and self.parcel is not None:
            self.parcel.abandon_in()


def whole(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def cell_of(tensor: torch.Tensor) -> Cell | None:
    """Returns the cell with the storage and version of a tensor, or None."""
    cell = cell_on(tensor.untyped_storage())
    return cell if cell is not None and cell.version == version_of(tensor) else None


def cell_on(storage: torch.UntypedStorage) -> Cell | None:
    """Returns the cell that a storage is marked with, or None."""
    mark = storage.__dict__.get(MARK)
    cell: Cell | None = mark() if isinstance(mark, weakref.ref) else mark
    return cell


def cells_on(storage: torch.UntypedStorage) -> list[Cell]:
    """Returns the cell of a storage, and others that were packed from it before."""
    marks = storage.__dict__.get(_OTHERS)
    cells = [cell_on(storage), *(mark() for mark in marks or ())]
    return [cell for cell in dict.fromkeys(cells) if cell is not None]


def unmark(storage: torch.UntypedStorage) -> None:
    storage.__dict__.pop(MARK, None)
    storage.__dict__.pop(_OTHERS, None)


# -- a cell's data, wherever its bytes are -----------------------------------------------------------------------------


def swap_out_now(cell: Cell, store: Store) -> bool:
    """Swaps out and waits; returns False if there is no room (the cell then keeps its data)."""
    if not cell.swap_out(store):
        return False
    assert cell.parcel is not None
    cell.parcel.wait_out()
    cell.data = None
    return True


def rerun(
    recipe: MakesAgain, values: Sequence[int], *, in_place: bool, see: Callable[[torch.Tensor | None], None]
) -> None:
    """Reruns an op and stores the requested values in their cells."""
    fresh, overwritten = recipe.run(in_place=in_place)
    for marks, tensors in ((recipe.made, fresh), (recipe.overwrote, overwritten)):
        for mark, tensor in zip(marks, tensors):
            see(tensor)
            cell = mark()
            if cell is not None and cell.value in values:
                cell.data = tensor


def bring(cell: Cell, see: Callable[[torch.Tensor | None], None] = lambda tensor: None) -> torch.Tensor:
    """Returns the data of a cell, whatever it takes. Sources that are brought for it are released after their last
    use."""
    if cell.data is None and cell.lent is not None and (storage := cell.lent()) is not None:
        cell.data = whole(storage)
    if cell.data is not None:
        cell.arrive()
        return cell.data
    order = _makers(cell)
    brought = {id(wanted) for wanted in order if wanted.data is None}
    num_readers: dict[int, int] = {}
    for wanted in order:
        for source in _sources(wanted):
            num_readers[id(source)] = num_readers.get(id(source), 0) + 1
    for wanted in order:
        sources = _sources(wanted)
        if wanted.data is None and wanted.parcel is not None:
            wanted.swap_in()
            see(wanted.data)
        elif wanted.data is None:
            _make(wanted, see)
        wanted.arrive()
        for source in sources:
            num_readers[id(source)] -= 1
            if not num_readers[id(source)] and id(source) in brought:
                source.let_go()
    assert cell.data is not None
    return cell.data


def _sources(cell: Cell) -> list[Cell]:
    """Returns the cells that a cell must be made from, if it must be made."""
    must = cell.data is None and cell.parcel is None and cell.recipe is not None
    return cell.recipe.sources() if must and cell.recipe is not None else []


def _makers(cell: Cell) -> list[Cell]:
    """Returns the cells to bring for one, sources first. Not recursive, as a chain may be as long as the network."""
    order: list[Cell] = []
    entered = {id(cell)}
    stack = [(cell, iter(_sources(cell)))]
    while stack:
        wanted, sources = stack[-1]
        for source in sources:
            if id(source) not in entered:
                entered.add(id(source))
                stack.append((source, iter(_sources(source))))
                break
        else:
            order.append(wanted)
            stack.pop()
    return order


def _make(wanted: Cell, see: Callable[[torch.Tensor | None], None]) -> None:
    recipe = wanted.recipe
    assert recipe is not None, "a saved value was lost"
    fresh, overwritten = recipe.run()
    for marks, tensors in ((recipe.made, fresh), (recipe.overwrote, overwritten)):
        for mark, tensor in zip(marks, tensors):
            if mark() is wanted:
                see(tensor)
                wanted.data = tensor


# -- views and handles ---------------------------------------------------------


class View:
    """The layout of a tensor on its storage."""

    __slots__ = ("conj", "dtype", "neg", "offset", "size", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.conj, self.neg = tensor.is_conj(), tensor.is_neg()  # lazy: the bytes are not conjugated
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()

    def key(self) -> Hashable:
        return self.dtype, self.size, self.stride, self.offset, self.conj, self.neg

    @property
    def num_bytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    @property
    def end_bytes(self) -> int:
        """The end of its last element, in bytes from the beginning of the storage."""
        if not self.size.numel():
            return 0
        last = int(self.offset) + sum(step * (length - 1) for step, length in zip(self.stride, self.size))
        return (last + 1) * self.dtype.itemsize

    def lies_like(self, other: View, *, anywhere: bool = False) -> bool:
        """Whether another view has the same shape, strides and (unless `anywhere`) offset, of whatever dtype."""
        return (
            self.size == other.size
            and self.stride == other.stride
            and (anywhere or self.offset == other.offset)
            and not (self.conj or self.neg or other.conj or other.neg)
        )

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """Returns the same view of the storage of `data`. Call it below autograd."""
        if data.dtype is self.dtype and not data.is_conj() and not data.is_neg():
            view = data.as_strided(self.size, self.stride, self.offset)
        else:
            view = torch.empty(0, dtype=self.dtype, device=data.device)
            view.set_(data.untyped_storage(), self.offset, self.size, self.stride)
        if self.conj:
            view = torch._conj(view)
        return torch._neg_view(view) if self.neg else view


class Handle(View):
    """The object that autograd holds in place of a saved tensor: a view of a cell."""

    __slots__ = ("__weakref__", "cell", "home", "pack", "run", "source")

    def __init__(self, cell: Cell, tensor: torch.Tensor, pack: int, run: Any) -> None:
        View.__init__(self, tensor)
        self.source = weakref.ref(tensor)
        self.cell = cell
        cell.is_saved = True
        self.home: weakref.ref[torch.UntypedStorage] | None = None  # its own storage, if several are marked
        self.pack = pack
        self.run = run  # the step that packed it, which unpacks it even after its end


class Kept:
    """The handle of a tensor that stays: parameters, inputs, small tensors."""

    __slots__ = ("__weakref__", "pack", "run", "source", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, pack: int, run: Any) -> None:
        self.source = weakref.ref(tensor)
        self.keep(tensor)
        self.pack = pack
        self.run = run

    def keep(self, tensor: torch.Tensor) -> None:
        self.tensor = alias(tensor)
        self.version = version_of(tensor)

    def find(self) -> torch.Tensor:
        check_unchanged(self.version, self.tensor)
        return self.tensor


class KeptAway(Kept):
    """The handle of a weight that is on the device only while it is read (`outcore.state`)."""

    __slots__ = ("handle",)

    def __init__(self, handle: Any, pack: int, run: Any) -> None:
        self.handle, self.pack, self.run = handle, pack, run

    def find(self) -> torch.Tensor:
        found: torch.Tensor = self.handle.run.unpack(self.handle)
        return found


def kept(tensor: torch.Tensor, pack: int, run: Any) -> Kept:
    """Returns the handle of an external tensor."""
    source = source_of(tensor)
    return Kept(tensor, pack, run) if source is None else KeptAway(source.pack(tensor), pack, run)


def is_packed_from(handle: Handle | Kept, tensor: torch.Tensor) -> bool:
    """Whether autograd saved this very tensor, and not another one on the same memory."""
    source: Any = handle.source()
    if source is not None:
        source._fix_weakref()  # its Python object may have been kept by C++ alone
    return source is tensor


def version_of(tensor: torch.Tensor) -> int:
    """Returns the version counter; tensors made in inference mode have none and cannot be changed."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns version and storage, which tell whether a tensor still has the same bytes (`p.data = ...`)."""
    return version_of(tensor), tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


_COUNTED = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_UNSEEN = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.PythonTLSSnapshot
)

_GUARDS: list[Any] = []  # guards for reuse, because creating one takes longer than the guarded call


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor without its graph, which would hold the step.

    It shares the version counter. Below autograd, where ops are captured, a plain `detach` would create a new counter,
    and changes in place would not be noticed.
    """
    return tensor if tensor.grad_fn is None else detached(tensor)


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor on the same storage, with the same version counter."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.detach()  # the part below Python is not the whole tensor
    guard = _GUARDS.pop() if _GUARDS else torch._C._ForceDispatchKeyGuard(_COUNTED, _UNSEEN)
    with guard:
        alone = tensor.detach()
    _GUARDS.append(guard)
    return alone


def check_unchanged(version: int, tensor: torch.Tensor) -> None:
    """Raises like autograd's check of its own saved tensors, which is skipped if hooks are set."""
    if version_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tensor.dtype} {tuple(tensor.shape)} is at version {version_of(tensor)}; expected version {version}"
        )


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Returns the shape; nested tensors have none."""
    return torch.Size() if tensor.is_nested else tensor.shape
