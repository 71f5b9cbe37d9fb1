"""Machine: how many bytes each tier of a machine holds, and how fast it copies them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from outcore.values.codec import Saved


@dataclass(frozen=True)
class OpRates:
    """How fast a device computes and accesses its own memory. Each op is assumed to be bound by one of the two."""

    float64_flops_per_s: float
    float32_flops_per_s: float
    tf32_flops_per_s: float  # float32 convolutions, as PyTorch runs them by default; without TF32 the same as float32
    half_flops_per_s: float  # bfloat16 and float16, summed in float32
    memory_bytes_per_s: float
    launch_s: float  # the least time that an op takes

    def op_s(self, num_flops: float, flops_per_s: float, num_bytes: float) -> float:
        """Returns the seconds of an op."""
        return self.launch_s + max(num_flops / flops_per_s, num_bytes / self.memory_bytes_per_s)


@dataclass(frozen=True)
class HostCosts:
    """Seconds of the host for what a plan makes it do, beside kernels and copies. They depend on the host, on the
    device and on the way in which steps are intercepted there, and are measured, never assumed."""

    tick_s: float  # autograd saves a tensor, or asks for it back, that stays where it is
    seen_op_s: float  # an op that the runtime looks at
    captured_op_s: float  # more, for one that is captured to be run again
    rerun_s: float  # a rerun, beyond the seconds of its op
    copy_s: float  # a copy that is begun, in either direction


@dataclass(frozen=True)
class Machine(Saved):
    """Capacities and rates, measured on the machine itself or marked as given.

    The tiers: `device` is where the step computes (a GPU's memory, or RAM when there is no GPU); `host` is pinned RAM
    (zero bytes when the device is the CPU: its next tier is the disk); `disk` is a swap file.

    ```python
    import outcore

    machine = outcore.Machine.load("here.machine.json")  # written by `outcore machine -o here.machine.json`
    print(machine.device, machine.out_s(2**30, "disk"), "seconds to swap 1 GiB out")
    ```
    """

    KIND: ClassVar[str] = "machine"

    device: str  # "cuda NVIDIA H200" or "cpu"
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    swap_out_bytes_per_s: float  # device -> host
    swap_in_bytes_per_s: float  # host -> device
    disk_write_bytes_per_s: float  # device (or host) -> disk
    disk_read_bytes_per_s: float
    duplex_share: float = 1.0  # the share of its rate that each direction keeps while both run
    copy_latency_s: float = 10e-6  # the fixed cost of a copy
    speed: float = 1.0  # the seconds of a trace's ops are divided by this; 1 on the machine that recorded it
    name: str = ""
    measured_at: str = ""  # date, or "" if nothing was measured
    given: tuple[str, ...] = ()  # fields that were given, not measured
    update_bytes_per_s: float = 0.0  # that an optimizer's fused CPU kernels read and write; 0 if not measured
    op_rates: OpRates | None = None  # for estimates of ops that were not run
    host: HostCosts | None = None  # None if the host is taken to need no time

    def out_s(self, num_bytes: int, tier: str) -> float:
        """Returns the seconds to swap `num_bytes` out to `tier`."""
        rate = self.swap_out_bytes_per_s if tier == "host" else self.disk_write_bytes_per_s
        return self.copy_latency_s + num_bytes / rate

    def in_s(self, num_bytes: int, tier: str) -> float:
        """Returns the seconds to swap `num_bytes` in from `tier`."""
        rate = self.swap_in_bytes_per_s if tier == "host" else self.disk_read_bytes_per_s
        return self.copy_latency_s + num_bytes / rate

    def update_s(self, num_bytes: int) -> float:
        """Returns the seconds in which the CPU updates parameters, of which it reads and writes `num_bytes`."""
        return num_bytes / self.update_bytes_per_s if self.update_bytes_per_s else 0.0

    def with_copies_at(self, share: float) -> Self:
        """Returns the machine with copies to and from the host at this share of their rates."""
        out, back = share * self.swap_out_bytes_per_s, share * self.swap_in_bytes_per_s
        return replace(self, swap_out_bytes_per_s=out, swap_in_bytes_per_s=back)
