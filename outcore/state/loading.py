"""Loads a model on `meta` from safetensors files with its weights at home, and saves it into a file.

A model that does not fit the device is built without content (`with torch.device("meta")`) and loaded from its files
directly into memory outside the device. Names, shapes and room are checked before anything is read. Saving writes one
tensor after the other from its present place. Neither makes a second copy of the model.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.errors import BadFile, OutcoreError, StoreError
from outcore.memory.device_kind import default_device, numbered
from outcore.memory.home import Homes, host_view
from outcore.memory.machine import host_bytes_granted, room_for_homes
from outcore.state.unit import SMALL_BYTES
from outcore.units import ENDLESS_BYTES, format_bytes, parse_bytes
from outcore.values import Budget

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def load(
    model: nn.Module,
    folder: str | Path,
    *,
    device: str | torch.device | None = None,
    host: int | str = "auto",
    disk: str | Path | None = None,
) -> nn.Module:
    """Gives a model on `meta` the weights of the safetensors files in `folder`, with a home outside `device`.

    Large weights are in pinned host memory, at most `host` bytes, or, without a GPU, in files in the folder `disk`;
    small ones are on the device. The model can be called at once, and runs fast when `outcore.state.state.State` brings
    its weights. Weights are cast to the model's own dtypes.

    ```python
    import outcore
    import torch

    outcore.save(torch.nn.Linear(64, 64), "linear.safetensors")
    with torch.device("meta"):
        model = torch.nn.Linear(64, 64)  # takes no memory
    outcore.load(model, "linear.safetensors")
    out = model(torch.randn(8, 64))
    ```
    """
    where = default_device() if device is None else numbered(torch.device(device))
    files = _files_of(Path(folder))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    _check(model, tensors, files, Path(folder))
    limit_bytes = host_bytes_granted() if host == "auto" else parse_bytes(host, of_bytes=host_bytes_granted())
    home_bytes, spill_bytes = room_for_homes(where, host, Budget(0, limit_bytes, ENDLESS_BYTES), disk)
    homes = Homes(where, home_bytes, disk, spill_bytes=spill_bytes)
    large = {name: tensor for name, tensor in tensors.items() if _num_bytes(tensor) >= SMALL_BYTES}
    homes.check_room(sum(map(_num_bytes, large.values())), "this model")
    loaded: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        with _open(files[name]) if name in files else _Nothing() as file:
            content = file.get_tensor(name) if name in files else tensor
            loaded[id(tensor)] = _placed(homes, tensor, content, at_home=name in large)
    _put(model, loaded)
    homes.close()
    return model


def save(model: nn.Module, file: str | Path) -> None:
    """Writes the model's state dictionary into one safetensors file, tensor by tensor. Weights that share memory are
    written once, under their first name, as `safetensors.torch.save_model` does.

    ```python
    import outcore
    import torch

    outcore.save(torch.nn.Linear(64, 64), "linear.safetensors")
    ```
    """
    state: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        key = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.size()
        if key not in seen:
            state[name] = tensor
            seen.add(key)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in state.items():
        if tensor.dtype not in _NAMES:
            raise OutcoreError(f"{name} is of type {tensor.dtype}, which safetensors files do not hold; cast it first")
        end = at + _num_bytes(tensor)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = Path(f"{file}.part")  # the old file stays until the new one is complete
    try:
        with part.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for tensor in state.values():
                view = host_view(tensor) if tensor.is_contiguous() else None
                content = view if view is not None else tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
                out.write(content.numpy().data)
        os.replace(part, file)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise StoreError(
            f"cannot write {format_bytes(8 + len(text) + at)} to {file} ({error.strerror}); free some space, or name "
            "another file"
        ) from None


class _Nothing:
    def __enter__(self) -> Any:
        return None

    def __exit__(self, *args: object) -> None:
        pass


def _open(file: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise OutcoreError("loading needs the package safetensors; install it with pip install safetensors") from None
    try:
        return safe_open(file, framework="pt", device="cpu")
    except Exception as error:  # safetensors has exceptions of its own
        raise BadFile(f"{file} is no whole safetensors file ({error}); fetch it again") from None


def _files_of(folder: Path) -> dict[str, Path]:
    """Returns the file of each tensor, by the tensor's name."""
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadFile(f"there is no safetensors file in {folder}; name the folder or the file that holds the weights")
    found: dict[str, Path] = {}
    for file in files:
        with _open(file) as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


def _check(model: nn.Module, tensors: dict[str, torch.Tensor], files: dict[str, Path], folder: Path) -> None:
    missing = [name for name, tensor in tensors.items() if name not in files and tensor.is_meta]
    kept = set(model.state_dict())
    if unkept := [name for name in missing if name not in kept]:
        raise OutcoreError(
            f"{_some(unkept)} has no content on meta and is in no file; build the model so that only parameters are on "
            "meta, as accelerate.init_empty_weights(include_buffers=False) does"
        )
    if missing:
        raise BadFile(f"{folder} has no {_some(missing)}; it holds the weights of another model")
    for name, tensor in tensors.items():
        if name in files:
            with _open(files[name]) as file:
                shape = tuple(file.get_slice(name).get_shape())
            if shape != tuple(tensor.shape):
                raise BadFile(
                    f"{name} has shape {shape} in {files[name]} and {tuple(tensor.shape)} in the model; it holds the "
                    "weights of another model"
                )


def _some(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} (and {len(others)} more)" if others else first


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _placed(homes: Homes, tensor: torch.Tensor, content: torch.Tensor, *, at_home: bool) -> torch.Tensor:
    if at_home:
        home = homes.empty(tensor.size(), torch.empty(tensor.shape, device="meta").stride(), tensor.dtype)
        homes.fill(home, content)
        return home
    return content.detach().to(homes.device, tensor.dtype, copy=True)


def _put(model: nn.Module, loaded: dict[int, torch.Tensor]) -> None:
    """Puts the loaded tensors in place of those on meta, also where modules share them."""
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made = nn.Parameter(loaded[id(parameter)], parameter.requires_grad)
                module._parameters[name] = parameters.setdefault(id(parameter), made)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = loaded[id(buffer)]
