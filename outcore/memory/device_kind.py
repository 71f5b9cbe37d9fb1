"""Device -> DeviceKind: what CUDA and the CPU can do, apart from their memory. One record for each.

No other room of the core compares device types: it asks for the ability that it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class DeviceKind:
    home_tier: Literal["host", "disk"]  # where training state is kept while it is not on the device
    normalises_from_statistics: bool  # batch norm can be recomputed from its saved statistics
    tries_convolutions: bool  # cuDNN's benchmark mode: each thread chooses algorithms by trying them
    updates_alike: bool  # a multi-tensor update picks one implementation, which depends on every tensor
    has_kernels: bool  # Triton kernels run here and round as PyTorch's own do
    computes_on_host: bool  # ops run on the host: they take turns with everything else that it does


_CUDA = DeviceKind(
    home_tier="host",
    normalises_from_statistics=True,
    tries_convolutions=True,
    updates_alike=True,
    has_kernels=torch.version.hip is None,
    computes_on_host=False,
)
_CPU = DeviceKind(
    home_tier="disk",
    normalises_from_statistics=False,
    tries_convolutions=False,
    updates_alike=False,
    has_kernels=False,
    computes_on_host=True,
)


def kind_of(device: torch.device) -> DeviceKind:
    return _CUDA if device.type == "cuda" else _CPU


def default_device() -> torch.device:
    """Returns the current GPU if there is one, else the CPU."""
    return numbered(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def numbered(device: torch.device) -> torch.device:
    """Returns `cuda` with the index of the current GPU; other devices are returned unchanged."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def generator_of(device: torch.device) -> torch.Generator:
    """Returns the default random number generator of the device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[numbered(device).index]
    return torch.default_generator


def wait_for(device: torch.device) -> None:
    """Until it has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def facts_of(device: torch.device) -> tuple[Any, ...]:
    """Returns what must be equal for a measured plan to be valid on another device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = getattr(torch._C, "_cuda_getDriverVersion", int)()
        return properties.name, properties.total_memory, driver
    return "cpu", torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
