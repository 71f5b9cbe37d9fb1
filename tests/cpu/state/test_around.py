"""What stands around the training: DistributedDataParallel, checkpoints, adapters, generation."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.state.state import State
from outcore.units import GIB, KIB, MIB
from tests.cpu.state.training import WIDTH, Result, Training, assert_equal, batch, make, plain_loop

WORKER = """
import sys
from pathlib import Path
import torch
from torch import nn
from outcore.state.state import State
from tests.cpu.state.training import GIB, KIB, batch, make

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=sys.argv[3])
for how in ("plain", "beside"):
    model = make()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = None
    if how == "beside":
        state = State(model, optimizer, window_bytes=900 * KIB, home_bytes=GIB, folder=folder / str(rank))
        state.update_early(range(len(state.sizes)))
    for step in range(4):
        x, y = batch(2 * step + rank)
        with state.step() if state is not None else torch.enable_grad():
            nn.functional.cross_entropy(wrapped(x).flatten(0, 1), y.flatten()).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{how}{rank}.pt")
    if state is not None:
        state.close()
torch.distributed.destroy_process_group()
"""


def test_two_processes_under_ddp_train_as_without_us(tmp_path: Path) -> None:
    """Gradients that collectives write into stay on the device; weights and optimizer state do not."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{found.getsockname()[1]}"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(tmp_path), address],
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        for rank in range(2)
    ]
    assert [worker.wait(timeout=240) for worker in workers] == [0, 0]
    for rank in range(2):
        plain, ours = (torch.load(tmp_path / f"{how}{rank}.pt") for how in ("plain", "beside"))
        assert_equal(plain, ours)


SAVE = """
import sys
from pathlib import Path
import torch
from torch import nn
import outcore
from outcore.state.state import State

model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(12)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = State(model, optimizer, window_bytes=40 * 2**20, home_bytes=2**30, folder=sys.argv[1])
import psutil, threading, time
most, stop = 0, False
def look():
    global most
    while not stop:
        most = max(most, psutil.Process().memory_info().rss - psutil.Process().memory_info().shared)
        time.sleep(0.001)
look_once = psutil.Process().memory_info()
before = look_once.rss - look_once.shared
thread = threading.Thread(target=look); thread.start()
outcore.save(model, Path(sys.argv[1]) / "saved.safetensors")
stop = True; thread.join()
print(most - before)
state.close()
"""


def test_saving_makes_no_second_copy_in_memory(tmp_path: Path) -> None:
    """192 MiB of weights, written from where they lie."""
    done = subprocess.run(
        [sys.executable, "-c", SAVE, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert (tmp_path / "saved.safetensors").stat().st_size > 192 * MIB
    assert int(done.stdout) < 48 * MIB


class Adapted(nn.Module):
    """A frozen network with low-rank additions that train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in range(4))
        self.head = nn.Linear(WIDTH, 100, bias=False)
        for module in (self.embed, self.frozen, self.head):
            module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for frozen, down, up in zip(self.frozen, self.down, self.up):
            x = x + torch.tanh(frozen(x) + up(down(x)))
        logits: Tensor = self.head(x)
        return logits


def test_frozen_weights_stream_in_and_never_back(tmp_path: Path) -> None:
    model, plain = make(Adapted), make(Adapted)
    optimizers = [
        torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2) for one in (model, plain)
    ]
    state = State(model, optimizers[0], window_bytes=450 * KIB, home_bytes=GIB, folder=tmp_path)
    state.window.homes.copied_bytes["out"] = 0  # that moving them home took
    plain_loop(4)(Training(model, optimizers[0], Result(), state))
    plain_loop(4)(Training(plain, optimizers[1], Result()))
    assert state.window.homes.copied_bytes["in"] > 4 * 4 * WIDTH * WIDTH * 4
    assert state.window.homes.copied_bytes["out"] == 0
    state.close()
    assert_equal(dict(plain.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_generation_between_steps(mode: type, tmp_path: Path) -> None:
    """Token by token, with updates due and weights that stream."""

    def generated(training: Training) -> Tensor:
        training.model.eval()
        tokens = batch(7)[0][:1, :2]
        with mode():
            for _ in range(5):
                tokens = torch.cat([tokens, training.model(tokens)[:, -1:].argmax(-1)], 1)
        training.model.train()
        return tokens

    found = []
    for ours in (False, True):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ooc = outcore.limit(model, 2000 * KIB, optimizer=optimizer, disk=tmp_path) if ours else None
        training = Training(model, optimizer, Result(), ooc)
        tokens = []
        for _ in range(3):
            plain_loop(2)(training)
            tokens.append(generated(training))
        found.append((tokens, training.outcome.losses))
        if ooc is not None:
            ooc.close()
    assert_equal(*found)


def test_host_memory_is_counted_before_anything_moves(tmp_path: Path) -> None:
    """What homes will need is known exactly, and not rounded up."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = State(model, optimizer, window_bytes=900 * KIB, home_bytes=GIB, folder=tmp_path)
    plain_loop(3)(Training(model, optimizer, Result(), state))
    assert state.window.homes.peak_bytes == state.residency.home_bytes
    state.close()
