"""Connects processes. This is the only file that uses torch's private process-group interface.

`torch.distributed.init_process_group` supports one default group per process. Elastic averaging needs a group per
generation of members, or one per worker, besides any group of the user, so it creates ProcessGroupGloo (or NCCL) on a
prefixed store itself. The private parts are `ProcessGroupGloo._Options` with `_timeout`, `_devices` and `_threads`, and
`create_device`. tests/cpu/elastic/test_transport.py fails if a release of torch changes one of them (run with 2.11 and
2.13).

gloo's default device is the address that the host's own name resolves to, which is loopback on many hosts, so that
members on two hosts never connect. Here gloo listens on the address from which this host reaches the rendezvous address
(according to the kernel's routing table), unless GLOO_SOCKET_IFNAME names interfaces.
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
    """Returns member `index` of a gloo group of `size`, listening on `address`. Raises RuntimeError if it cannot
    connect.

    gloo assigns tag t to device t modulo their number, and every device has a thread, so `num_lanes` devices transfer
    blocks in parallel.
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
    """Returns member `index` of an NCCL group. CPU builds of torch do not have this class."""
    nccl: Any = dist
    return nccl.ProcessGroupNCCL(store, index, size, timedelta(seconds=limit_s))


def interfaces() -> list[str]:
    """Returns the interfaces in GLOO_SOCKET_IFNAME, usually none."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def local_address(towards: str) -> str:
    """Returns this host's address towards another host; loopback if there is no route."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind)) as probe:
            probe.connect(target)  # sends nothing, but reads the routing table
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK


def resolve(host: str) -> str:
    """Returns the address of a name. Raises OSError if it is unknown."""
    return str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listening_address(mine: str, others: list[str]) -> str:
    """Returns the address on which this member must listen so that the others reach it.

    The host of the store often reaches it over loopback, because its own name resolves to that. If another member has a
    real address, this host's address towards that member is used.
    """
    if not is_loopback(mine):
        return mine
    return next((local_address(other) for other in others if not is_loopback(other)), mine)


def limit_silence(port: int, limit_s: float) -> None:
    """Makes this process's connections to `port` fail if the other side is silent for `limit_s`.

    A store's client waits for answers without a limit; after a network failure it would wait for a quarter of an hour,
    until the kernel gives up. This makes the kernel give up earlier. The client does not expose its sockets, so they
    are found among the open files by their peer.
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
        except OSError:  # not a socket, or closed already
            continue
        try:
            if mine.family in (socket.AF_INET, socket.AF_INET6) and mine.getpeername()[1] == port:
                for (level, option), value in options.items():
                    mine.setsockopt(level, option, value)
        except OSError:  # not connected
            pass
        finally:
            mine.detach()


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket for connections to `host` ("" for every interface)."""

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
