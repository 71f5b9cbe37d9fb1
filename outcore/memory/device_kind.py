"""A device -> what its kind can do apart from its memory: one record for CUDA, one for the CPU.

What a step may rely on differs between the two, and only this room knows which of them a device is: everybody else
asks for the ability that they need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class DeviceKind:
    home_tier: Literal["host", "disk"]  # where training state lies while it is not on the device
    normalises_from_statistics: bool  # batch normalisation can be made again from what it saved
    tries_convolutions: bool  # with `torch.backends.cudnn.benchmark`, every thread chooses its algorithms anew
    updates_alike: bool  # implementations for many tensors update all of them one way, which depends on each
    has_kernels: bool  # Triton's kernels run here, and round as PyTorch's own do


_CUDA = DeviceKind(
    home_tier="host",
    normalises_from_statistics=True,
    tries_convolutions=True,
    updates_alike=True,
    has_kernels=torch.version.hip is None,
)
_CPU = DeviceKind(
    home_tier="disk",
    normalises_from_statistics=False,
    tries_convolutions=False,
    updates_alike=False,
    has_kernels=False,
)


def kind_of(device: torch.device) -> DeviceKind:
    return _CUDA if device.type == "cuda" else _CPU


def default_device() -> torch.device:
    """The current GPU where there is one."""
    return numbered(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def numbered(device: torch.device) -> torch.device:
    """`cuda` as the GPU that it means at the moment."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def generator_of(device: torch.device) -> torch.Generator:
    """The one that ops on the device draw from unless they are given another."""
    if device.type == "cuda":
        return torch.cuda.default_generators[numbered(device).index]
    return torch.default_generator


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def facts_of(device: torch.device) -> tuple[Any, ...]:
    """What a plan that was measured on the device holds for."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = getattr(torch._C, "_cuda_getDriverVersion", int)()
        return properties.name, properties.total_memory, driver
    return "cpu", torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
