"""Training state that the host has no room for lies on the disk: frozen weights first. On the CPU, `host=` makes a tier
of memory before the disk, so that what a GPU does runs here, too."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
import tests.cpu.state.test_same_training as same
from outcore.errors import StoreError
from outcore.fitting import beside as fitting_beside
from outcore.fitting import preparing
from outcore.memory.home import Homes, tier_of
from outcore.memory.machine import measure_machine
from outcore.memory.pinning import reads_any_host_memory
from outcore.state.state import State
from outcore.units import GIB, KIB, TB
from outcore.values import Budget, Residency
from tests.cpu.state.test_limit import ROOMY, TIGHT
from tests.cpu.state.training import Loop, MakeOptimizer, Net, Result, Training, When, make, plain_loop, train

fused: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-2, fused=True)
HOST = 1000 * KIB  # of 2,400 KiB of training state


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is made without saying so has this host, and the disk below it."""
    make_homes = Homes.__init__

    def small(self: Homes, device: torch.device, limit_bytes: int, folder: Any = None, *, spill_bytes: int = 0) -> None:
        make_homes(self, device, HOST, folder, spill_bytes=spill_bytes or GIB)

    monkeypatch.setattr(Homes, "__init__", small)


LOOPS: dict[str, tuple[Loop, MakeOptimizer, Callable[[], nn.Module]]] = {
    "plain": (plain_loop(5), same.adamw, Net),
    "clipped": (same.clipped_loop, same.OPTIMIZERS["fused"], Net),
    "frozen": (plain_loop(5), same.adamw, same.Frozen),
    "loaded": (same.each_step(same.loaded, 5), same.adamw, Net),
    "saved": (same.each_step(same.saved, 5), same.adamw, Net),
}


@pytest.mark.usefixtures("small_host")
@pytest.mark.parametrize("later", list(When))
@pytest.mark.parametrize("name", LOOPS)
def test_the_same_numbers_from_two_tiers(name: str, later: When, tmp_path: Path) -> None:
    loop, make_optimizer, net = LOOPS[name]
    ours = train(loop, make_optimizer, net=net, folder=tmp_path, later=later, delay_s=0.0005)
    train(loop, make_optimizer, net=net).assert_same(ours)


@pytest.mark.usefixtures("small_host")
def test_the_cpu_updates_on_both_tiers(tmp_path: Path) -> None:
    ours = train(plain_loop(5), fused, folder=tmp_path, by_cpu=True)
    train(plain_loop(5), fused).assert_same(ours)


def spilling(folder: Path, net: Callable[[], nn.Module] = Net, host_bytes: int = HOST, disk_bytes: int = GIB) -> State:
    model = make(net)
    rooms: dict[str, Any] = {"home_bytes": host_bytes, "spill_bytes": disk_bytes, "folder": folder}
    return State(model, same.adamw(model.parameters()), window_bytes=600 * KIB, **rooms)


def test_the_host_takes_what_it_can_and_no_more(tmp_path: Path) -> None:
    state = spilling(tmp_path)
    homes, residency = state.window.homes, state.residency
    assert residency.on_disk
    assert residency.home_bytes_on("host") <= HOST < residency.home_bytes
    plain_loop(3)(Training(state.model, state.optimizer, Result(), state))
    state.flush()
    assert homes.used_on == {"host": residency.home_bytes_on("host"), "disk": residency.home_bytes_on("disk")}
    on_disk = {unit.name for unit in state.units if unit.number in residency.on_disk}
    for unit in state.units:
        tiers = {tier_of(item.home) for item in (unit.weight, *unit.kept.values())}
        assert tiers == {"disk" if unit.name in on_disk else "host"}
    written_bytes = homes.written_bytes
    plain_loop(1)(Training(state.model, state.optimizer, Result(), state))
    state.flush()
    assert homes.written_bytes - written_bytes == residency.home_bytes_on("disk")  # weight, gradient and state, once
    state.close()


def test_frozen_weights_go_first_and_wear_nothing(tmp_path: Path) -> None:
    whole = spilling(tmp_path, same.Frozen, host_bytes=GIB)
    trained_bytes = sum(size.all_bytes for size in whole.sizes if size.gradient_bytes)
    whole.close()
    state = spilling(tmp_path, same.Frozen, host_bytes=trained_bytes + KIB)
    frozen = {unit.number for unit in state.units if not unit.parameter.requires_grad}
    assert state.residency.on_disk
    assert state.residency.on_disk <= frozen
    written_bytes = state.window.homes.written_bytes
    plain_loop(3)(Training(state.model, state.optimizer, Result(), state))
    state.flush()
    assert state.window.homes.written_bytes == written_bytes
    state.close()


def test_what_moves_to_the_device_lets_others_come_back_from_the_disk(tmp_path: Path) -> None:
    state = spilling(tmp_path)
    training = Training(state.model, state.optimizer, Result(), state)
    plain_loop(3)(training)
    before, some = state.residency, frozenset(range(len(state.sizes))) - {2}
    assert 2 not in before.on_disk
    state.place(replace(before, resident=some, on_disk=frozenset({2})))
    assert state.residency.on_disk == {2}
    held = state.model.get_parameter("second.weight").detach()  # somebody holds it: it stays where it is
    state.place(replace(before, resident=some, on_disk=frozenset()))
    assert state.residency.on_disk == {2}
    del held
    plain_loop(1)(training)
    state.place(replace(before, resident=some, on_disk=frozenset()))
    assert not state.residency.on_disk
    gc.collect()
    assert state.window.homes.used_on == {"host": state.sizes[2].all_bytes, "disk": 0}
    plain_loop(2)(training)
    state.place(before)
    assert state.residency.on_disk == before.on_disk
    plain_loop(2)(training)
    state.close()
    plain = Training(model := make(), same.adamw(model.parameters()), Result())
    for count in (3, 1, 2, 2):
        plain_loop(count)(plain)
    for mine, theirs in zip(training.outcome.losses, plain.outcome.losses):
        assert torch.equal(mine, theirs)


def test_too_little_of_both_is_an_error_before_anything_moves(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"the training state needs .* of host and disk memory and 0 B are in use"):
        spilling(tmp_path, host_bytes=300 * KIB, disk_bytes=300 * KIB)
    model = make()
    file = tmp_path / "file"
    file.write_text("")
    rooms: dict[str, Any] = {"home_bytes": HOST, "spill_bytes": GIB, "folder": file / "folder"}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(StoreError, match="name a writable folder"):
        State(model, same.adamw(model.parameters()), window_bytes=600 * KIB, **rooms)
    for name, tensor in model.state_dict().items():
        assert torch.equal(before[name], tensor)


def test_a_gpu_that_cannot_access_files_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, budget = make(), Budget(ROOMY, 300 * KIB, GIB)
    pinned_only = replace(measure_machine(torch.device("cpu"), str(tmp_path)), host_bytes=300 * KIB)
    monkeypatch.setattr(fitting_beside, "room_for_homes", lambda *_: (300 * KIB, 0))
    with pytest.raises(StoreError, match=r"this GPU cannot access files, so disk= holds activations only"):
        fitting_beside.beside(model, same.adamw(model.parameters()), budget, pinned_only, str(tmp_path))
    assert not reads_any_host_memory(torch.device("cuda", 0)) or torch.cuda.is_available()


@pytest.mark.parametrize("memory_bytes", [TIGHT, ROOMY])
def test_host_and_disk_in_one_budget(memory_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = outcore.limit
    monkeypatch.setattr(outcore, "limit", lambda *args, **options: limit(*args, host=HOST, **options))
    ours = train(same.clipped_loop, same.adamw, folder=tmp_path, memory_bytes=memory_bytes)
    train(same.clipped_loop, same.adamw).assert_same(ours)
    assert ours.counts["planned"] >= 1
    assert ours.counts["state_disk_bytes"] < ours.counts["state_streamed_bytes"]


def test_a_user_sees_the_wear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = measure_machine(torch.device("cpu"), str(tmp_path))
    monkeypatch.setattr(importlib.import_module("outcore.limit"), "measure_machine", lambda *_: machine)

    def least(trace: Any, streamed: Residency, *args: Any, **options: Any) -> Residency:
        return streamed

    monkeypatch.setattr(preparing, "choose_residency", least)
    model = make()
    optimizer = same.adamw(model.parameters())
    ooc = outcore.limit(model, 2 * ROOMY, optimizer=optimizer, disk=tmp_path, host=HOST)
    plain_loop(5)(Training(model, optimizer, Result(), ooc))
    assert ooc.state is not None
    stats, on_disk_bytes = ooc.stats(), ooc.state.residency.home_bytes_on("disk")
    assert 0 < on_disk_bytes == stats["state_disk_bytes"]
    assert 0 < stats["state_host_bytes"] == stats["state_streamed_bytes"] - on_disk_bytes <= HOST
    assert stats["state_written_bytes"] == on_disk_bytes
    assert ooc.predicted is not None
    assert ooc.predicted.state_written_bytes == on_disk_bytes
    told = " ".join(str(ooc).split())
    assert "memory for it on the host" in told
    assert "memory for it on the disk" in told
    assert f"({1000 * on_disk_bytes / TB:.3g} TB in 1,000 steps)" in told
    ooc.close()
