"""Models on `meta` get their weights tensor by tensor, and are saved the same way."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

import outcore
from outcore.errors import BadFile, OutcoreError, StoreError
from outcore.memory.home import is_at_home
from outcore.state.state import State
from outcore.units import GIB, KIB
from tests.cpu.state.training import Net, batch, make


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, block: Any) -> list[float]:
    losses = []
    for step in range(3):
        x, y = batch(step)
        with block():
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_model_on_meta_is_loaded_trained_and_saved(tmp_path: Path) -> None:
    plain = make()
    save_model(plain, str(tmp_path / "model.safetensors"))
    model = outcore.load(on_meta(), tmp_path, disk=tmp_path / "homes")
    assert is_at_home(model.get_parameter("first.weight"))
    assert not is_at_home(model.get_parameter("first.bias"))
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    optimizer = adamw(model.parameters())
    state = State(model, optimizer, window_bytes=600 * KIB, home_bytes=GIB, folder=tmp_path / "homes")
    assert len(state.units) == 4
    assert steps(plain, adamw(plain.parameters()), torch.enable_grad) == steps(model, optimizer, state.step)
    outcore.save(model, tmp_path / "after.safetensors")  # with updates still due
    state.close()
    saved = load_file(tmp_path / "after.safetensors")
    assert "head.weight" not in saved  # it is the embedding
    for name, tensor in plain.state_dict().items():
        assert name == "head.weight" or torch.equal(saved[name], tensor)
    again = outcore.load(on_meta(), tmp_path / "after.safetensors")
    assert all(map(torch.equal, plain.parameters(), again.parameters()))


def test_weights_are_cast_to_the_model_s_type(tmp_path: Path) -> None:
    plain = make()
    save_model(plain, str(tmp_path / "model.safetensors"))
    model = outcore.load(on_meta().to(torch.bfloat16), tmp_path)
    assert torch.equal(model.get_parameter("first.weight"), plain.get_parameter("first.weight").bfloat16())
    outcore.save(model, tmp_path / "half.safetensors")
    assert load_file(tmp_path / "half.safetensors")["first.weight"].dtype == torch.bfloat16


def test_bad_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="there is no safetensors file"):
        outcore.load(on_meta(), tmp_path)
    file = tmp_path / "model.safetensors"
    save_model(make(), str(file))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadFile, match="is no whole safetensors file"):
        outcore.load(on_meta(), tmp_path)
    save_model(nn.Linear(3, 3), str(file))
    model = on_meta()
    with pytest.raises(BadFile, match=r"has no embed.weight \(and 7 more\)"):
        outcore.load(model, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())
    save_model(Net(96), str(file))
    with pytest.raises(BadFile, match=r"embed.weight has shape \(100, 96\)"):
        outcore.load(model, tmp_path)


def test_buffers_without_content_are_named(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
        model.register_buffer("table", torch.zeros(3), persistent=False)
    save_model(nn.Sequential(nn.Linear(4, 4)), str(tmp_path / "model.safetensors"))
    with pytest.raises(OutcoreError, match="table has no content on meta"):
        outcore.load(model, tmp_path)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    outcore.save(make(), file)
    before = file.read_bytes()
    broken = make()
    broken.register_buffer("odd", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(OutcoreError, match="which safetensors files do not hold"):
        outcore.save(broken, file)
    assert file.read_bytes() == before

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(StoreError, match=r"cannot write .* to .*model.safetensors \(.*\); free some space"):
            outcore.save(make(), file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(StoreError, match="No such file or directory"):
        outcore.save(make(), tmp_path / "no folder" / "model.safetensors")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    model = on_meta()
    with pytest.raises(StoreError, match="has no room for"):
        outcore.load(model, file)
    assert all(parameter.is_meta for parameter in model.parameters())
