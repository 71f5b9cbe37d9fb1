"""Two hosts on one machine: network namespaces with host names of their own, joined by a virtual cable.

`run_lab(scenario)` starts this file as a program inside fresh namespaces (nothing of it is seen from outside, and all
of its processes end with it). A scenario is a function of this module or another one, named "module:function"; it is
given the two hosts and returns what the test looks at, as JSON. Ranks are forked from a process that has imported torch
already, so that a scenario takes as long as what it does.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]
CABLE = "10.77.0"  # addresses exist inside the namespaces only
PORT = 29400
_NEW_NET, _NEW_UTS = 0x40000000, 0x04000000


def why_not() -> str | None:
    """Why this machine cannot make network namespaces; None where it can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install iproute2 util-linux)"
    tried = subprocess.run([*_enter(), "ip", "link", "add", "oc0", "type", "veth"], capture_output=True, check=False)
    return f"namespaces are not allowed here: {tried.stderr.decode().strip()}" if tried.returncode else None


def run_lab(scenario: str, limit_s: float = 60.0, **arguments: Any) -> Any:
    """What `scenario` returned; its output is shown where it fails."""
    command = [*_enter(), sys.executable, "-m", "tests.cpu.elastic.hosts", scenario, json.dumps(arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s, check=False)
    last = done.stdout.strip().rpartition("\n")[2]
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return json.loads(last)["found"]


def _enter() -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *as_root, "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


@dataclass
class Host:
    """A process in namespaces of its own, from which everything on this host is forked."""

    name: str
    address: str
    pid: int = 0
    children: dict[int, Path] = field(default_factory=dict)

    def ip(self, command: str) -> None:
        subprocess.run(["nsenter", "-t", str(self.pid), "-n", "ip", *command.split()], check=True)

    def enter(self) -> None:
        """This process moves to the host for good."""
        libc = ctypes.CDLL(None, use_errno=True)
        for kind, name in ((_NEW_NET, "net"), (_NEW_UTS, "uts")):
            with open(f"/proc/{self.pid}/ns/{name}") as place:
                if libc.setns(place.fileno(), kind) != 0:
                    raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")

    def start(self, act: Callable[[], Any], out: Path) -> int:
        """Forks a process of this host that writes what `act` returns, or its error, to `out`."""
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            self.children[pid] = out
            return pid
        status = 1
        try:
            self.enter()
            try:
                told = {"value": act()}
                status = 0
            except BaseException as error:
                told = {"error": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            draft = out.with_suffix(".draft")
            draft.write_text(json.dumps(told))
            draft.replace(out)
        finally:
            sys.stderr.flush()
            os._exit(status)


def make_hosts() -> list[Host]:
    """Two hosts, a cable between them."""
    hosts = [Host("host-a", f"{CABLE}.1"), Host("host-b", f"{CABLE}.2")]
    libc = ctypes.CDLL(None, use_errno=True)
    for host in hosts:
        ready, tell = os.pipe()
        host.pid = os.fork()
        if host.pid == 0:
            if libc.unshare(_NEW_NET | _NEW_UTS) == 0:
                socket.sethostname(host.name)
                os.write(tell, b"1")
            signal.pause()
            os._exit(0)
        assert os.read(ready, 1) == b"1"
    subprocess.run(["ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1"], check=True)
    for number, host in enumerate(hosts):
        subprocess.run(f"ip link set cable{number} netns {host.pid}".split(), check=True)
        for command in (
            "link set lo up",
            f"addr add {host.address}/24 dev cable{number}",
            f"link set cable{number} up",
        ):
            host.ip(command)
    return hosts


def serve_store(host: Host, folder: Path, port: int = PORT) -> int:
    """A store on `host`, in a process of its own: no rank's end ends it."""

    def serve() -> None:
        from outcore.elastic.transport import TCPStore

        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
        (folder / "store").touch()
        signal.pause()
        del store

    pid = host.start(serve, folder / "store.json")
    while not (folder / "store").exists():
        time.sleep(0.01)
    return pid


def gather(hosts: list[Host], limit_s: float) -> dict[str, Any]:
    """What every process has written by the time it ended, by file name; who takes longer is told to hang."""
    ends_s, told = time.monotonic() + limit_s, {}
    for host in hosts:
        for pid, out in list(host.children.items()):
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > ends_s:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    told[out.stem] = {"error": "hangs"}
                    break
                time.sleep(0.01)
            del host.children[pid]
            if out.exists():
                told[out.stem] = json.loads(out.read_text())
            told.setdefault(out.stem, {"error": "ended without a word"})
    return told


def main() -> None:
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()  # the first optimizer imports for two seconds
    # Names are asked for of nobody: a question that gets no answer would take seconds.
    subprocess.run(["mount", "--bind", "/dev/null", "/etc/resolv.conf"], check=False)
    module, _, function = sys.argv[1].partition(":")
    scenario = getattr(importlib.import_module(module), function)
    found = scenario(make_hosts(), **json.loads(sys.argv[2]))
    print(json.dumps({"found": found}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
