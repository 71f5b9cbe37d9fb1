"""What `dir(outcore)` and `help(outcore)` show, and the example in every public docstring, which runs as it stands."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import outcore

BLOCK = re.compile(r"```python\n(.*?)\n```", flags=re.DOTALL)
INTEGRATIONS = {"hugging_face": ("transformers", "accelerate", "trl"), "lightning": ("lightning",)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `outcore record`, `machine` and `plan` write."""
    folder = tmp_path_factory.mktemp("examples")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    with outcore.limit(model, "2MiB") as ooc:
        for _ in range(2):
            with ooc.step():
                model(torch.randn(256, 64)).square().mean().backward()
            model.zero_grad()
        assert ooc.trace is not None
        assert ooc.plan is not None
        ooc.trace.save(folder / "step.trace.json")
        ooc.plan.save(folder / "step.plan.json")
        ooc.machine.save(folder / "here.machine.json")
    return folder


def run_examples(documented: object, name: str) -> None:
    blocks = BLOCK.findall(inspect.getdoc(documented) or "")
    assert blocks, f"{name} has no example in its docstring"
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks:
            exec(compile(block, name, "exec"), {"__name__": "example"})


@pytest.mark.parametrize("name", outcore.__all__)
def test_the_example_in_a_docstring_runs(name: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # what `outcore launch` does for one worker
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    run_examples(getattr(outcore, name), f"outcore.{name}")


@pytest.mark.parametrize(("library", "packages"), INTEGRATIONS.items())
def test_the_examples_of_the_integrations_run(
    library: str, packages: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    module = import_module(f"outcore.integrations.{library}")
    for name in module.__all__:
        run_examples(getattr(module, name), name)


def test_only_public_names_are_shown() -> None:
    code = "import outcore, outcore.cli, outcore.limit; [getattr(outcore, name) for name in outcore.__all__]"
    told = "print(*(name for name in dir(outcore) if not name.startswith('__')))"
    done = subprocess.run([sys.executable, "-c", f"{code}; {told}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted(outcore.__all__)
    assert [name for name in dir(outcore) if name.startswith("_") and not name.startswith("__")] == []


def test_public_names_are_sorted_and_have_a_home() -> None:
    assert outcore.__all__ == sorted(outcore.__all__)
    assert set(outcore._HOMES) <= set(outcore.__all__)


def test_help_names_every_public_name() -> None:
    told = set(re.findall(r"`(\w+)`", outcore.__doc__ or ""))
    assert set(outcore.__all__) <= told
