"""Store + address -> connected processes: the only file that uses torch's private process-group interface.

`torch.distributed.init_process_group` knows one default group per process. Elastic averaging needs a group per
generation of members, or one per worker, beside whatever group the user has, so it builds ProcessGroupGloo (or NCCL)
itself, on a prefixed store. What is private in that: `ProcessGroupGloo._Options` with `_timeout`, `_devices` and
`_threads`, and `create_device`. tests/cpu/elastic/test_transport.py fails where a release of torch changes one of them
(run with 2.11 and 2.13).

gloo's default device is whatever the host's own name resolves to, which on many hosts is loopback: members on two
hosts then never connect. Here gloo listens on the address from which this host reaches the rendezvous address (the
kernel's routing table says which), unless GLOO_SOCKET_IFNAME names interfaces.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import closing
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Public as torch.distributed.TCPStore and so on, but not to a type checker.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

__all__ = ["LOOPBACK", "PrefixStore", "Store", "TCPStore", "interfaces", "is_loopback", "limit_silence", "listen"]
__all__ += ["listening_address", "local_address", "open_gloo", "open_nccl", "resolve"]
LOOPBACK = "127.0.0.1"


def open_gloo(store: Store, index: int, size: int, limit_s: float, *, num_lanes: int, address: str) -> Any:
    """Member `index` of a gloo group of `size`, listening on `address`; RuntimeError where one cannot be reached.

    gloo gives tag t to device t modulo their number, and every device has a thread of its own: `num_lanes` devices
    move blocks side by side.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=limit_s)
    names = interfaces()
    if names:
        devices = [gloo.create_device(interface=names[lane % len(names)]) for lane in range(max(num_lanes, len(names)))]
    else:
        devices = [gloo.create_device(hostname=address) for _ in range(num_lanes)]
    options._devices, options._threads = devices, 2 * len(devices)
    return gloo(store, index, size, options)


def open_nccl(store: Store, index: int, size: int, limit_s: float) -> Any:
    """Member `index` of an NCCL group. A CPU build of torch has no such class."""
    nccl: Any = dist
    return nccl.ProcessGroupNCCL(store, index, size, timedelta(seconds=limit_s))


def interfaces() -> list[str]:
    """The interfaces that GLOO_SOCKET_IFNAME asks for; usually none."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def local_address(towards: str) -> str:
    """The address of this host from which it reaches `towards`; loopback where no route leads there."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind)) as probe:
            probe.connect(target)  # a datagram socket sends nothing: this asks the routing table only
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK


def resolve(host: str) -> str:
    """The address that a name stands for; OSError where nobody knows it."""
    return str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listening_address(mine: str, others: list[str]) -> str:
    """Where this member of a group must listen for the others to reach it.

    A host that holds the store often reaches it over loopback, because its own name resolves to that. Where another
    member has a real address, this host's address towards that member is the one to use.
    """
    if not is_loopback(mine):
        return mine
    return next((local_address(other) for other in others if not is_loopback(other)), mine)


def limit_silence(port: int, limit_s: float) -> None:
    """Connections of this process to `port` fail when the other side has been silent for `limit_s`.

    A store's client waits for its answers without a limit: behind a cable that was cut it would wait for a quarter of
    an hour, until the kernel gives up. The kernel is told to give up earlier. The client does not tell its sockets, so
    they are found among the open files by whom they are connected to.
    """
    options = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): max(1, int(limit_s / 3)),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): max(1, int(limit_s / 3)),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): int(1000 * limit_s),
    }
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            mine = socket.socket(fileno=int(name))
        except OSError:  # no socket, or closed by now
            continue
        try:
            if mine.family in (socket.AF_INET, socket.AF_INET6) and mine.getpeername()[1] == port:
                for (level, option), value in options.items():
                    mine.setsockopt(level, option, value)
        except OSError:  # it is connected to nobody
            pass
        finally:
            mine.detach()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that accepts connections to `host` only ("" for every interface)."""
    family, kind, _, _, target = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    server = socket.socket(family, kind)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(target)
        server.listen(512)
    except OSError:
        server.close()
        raise
    return server
