"""The command line, called as a user calls it: files in, tables and JSON out, one sentence when it cannot be done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import outcore
from outcore.cli import main
from outcore.values import Machine, Plan, Trace

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "record_me.py"


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def call_json(*args: str | Path) -> Any:
    result = call(*args) if "--json" in args else call(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A step really recorded and this machine really measured."""
    folder = tmp_path_factory.mktemp("cli")
    found = {name: folder / f"{name}.json" for name in ("trace", "machine", "plan")}
    recorded = call_json("record", f"{EXAMPLE}:step", "-o", found["trace"], "--folder", folder)
    assert recorded["num_ops"] == len(Trace.load(found["trace"]).ops)
    measured = call_json("machine", "--device", "cpu", "--folder", folder, "-o", found["machine"])
    assert Machine.load(found["machine"]).disk_write_bytes_per_s == measured["disk_write_bytes_per_s"] > 1
    return found


def plan_args(files: dict[str, Path], memory: str = "20MiB") -> list[str | Path]:
    return ["plan", files["trace"], "--machine", files["machine"], "--memory", memory]


def test_a_recorded_step_has_its_optimizer_state(files: dict[str, Path]) -> None:
    trace = Trace.load(files["trace"])
    parameter_bytes = 4 * (6 * (256 * 256 + 3 * 256) + 10 * 257)
    inputs_bytes = 4 * 2048 * 256
    assert trace.before_bytes >= 3 * parameter_bytes + inputs_bytes  # AdamW keeps two numbers per parameter
    assert {op.module for op in trace.ops} >= {"0", "1", "2", "18"}


def test_plan_then_explain(files: dict[str, Path]) -> None:
    facts = call_json(*plan_args(files), "-o", files["plan"])
    assert facts["predicted_peak_bytes"] <= 20 * 1024**2 < facts["in_core_peak_bytes"]
    plan = Plan.load(files["plan"])
    assert plan.predicted_step_s == facts["predicted_step_s"]
    explained = call_json("explain", files["plan"], "--trace", files["trace"], "--machine", files["machine"])
    by_decision = {"keep": 0, "swap": 0, "recompute": 0}
    for item in explained["values"]:
        by_decision[item["decision"]] += item["bytes"]
    assert list(by_decision.values()) == [facts["kept_bytes"], facts["swapped_bytes"], facts["recomputed_bytes"]]
    assert sum(share["bytes"] for share in explained["modules"]) == sum(by_decision.values())
    text = call("explain", files["plan"], "--trace", files["trace"], "--top", "3").stdout
    assert "3 of" in text
    assert "native_layer_norm" in text or "addmm" in text


def test_a_saved_plan_can_be_followed(files: dict[str, Path], tmp_path: Path) -> None:
    assert call(*plan_args(files), "-o", files["plan"]).exit_code == 0
    names: dict[str, Any] = {}
    exec(compile(EXAMPLE.read_text(), "record_me", "exec"), names)
    plan = Plan.load(files["plan"])
    ooc = outcore.limit(names["model"], memory="20MiB", plan=plan, disk=tmp_path)
    for _ in range(3):
        with ooc.step():
            names["step"]()
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    assert ooc.plan == plan
    assert ooc.timeline is not None
    assert ooc.timeline.peak_bytes <= 20 * 1024**2
    ooc.close()


def test_pages_are_written(files: dict[str, Path], tmp_path: Path) -> None:
    html, perfetto = tmp_path / "page.html", tmp_path / "events.json"
    assert call(*plan_args(files), "--html", html, "--perfetto", perfetto).exit_code == 0
    assert "Sequential in 20.00 MiB" in html.read_text()
    assert len(json.loads(perfetto.read_text())["traceEvents"]) > 100


def test_tables_for_people(files: dict[str, Path]) -> None:
    planned = call(*plan_args(files, "80%"), "--planner", "keep-all")
    assert planned.exit_code == 0
    assert "peak memory" in planned.stdout
    assert "planning (keep-all)" in planned.stderr
    assert "planning" not in planned.stdout


def wrong_calls(files: dict[str, Path], folder: Path) -> list[tuple[list[str | Path], str]]:
    broken, future, script = folder / "broken.json", folder / "future.json", folder / "script.py"
    broken.write_text('{"outcore": "trace", "version": 1, "ops": ')
    future.write_text(json.dumps({**json.loads(files["machine"].read_text()), "version": 99}))
    script.write_text("model = 3\ndef step(): pass\n")
    (folder / "bad.py").write_text("def step(:\n")
    (folder / "idle.py").write_text("import torch\nmodel = torch.nn.Linear(2, 2)\ndef step(): pass\n")
    return [
        (plan_args(files, "lots"), "'lots' is not a size"),
        (plan_args(files, "-1"), "'-1' is not a size"),
        (plan_args(files, "1KiB"), "raise the budget"),
        ([*plan_args(files), "--planner", "magic"], "there is no planner 'magic'; choose one of keep-all"),
        (["plan", folder / "none.json", "--machine", files["machine"], "--memory", "1GiB"], "cannot read"),
        (["plan", broken, "--machine", files["machine"], "--memory", "1GiB"], "broken.json: this is no JSON"),
        (["plan", files["trace"], "--machine", future, "--memory", "1GiB"], "version 99"),
        (["plan", files["machine"], "--machine", files["machine"], "--memory", "1GiB"], "this is a machine file"),
        ([*plan_args(files), "-o", folder / "no" / "such" / "folder.json"], "cannot write"),
        (["explain", files["trace"], "--trace", files["trace"]], "a plan file is expected"),
        (["record", script], "names no function"),
        (["record", f"{script}:step"], "no torch.nn.Module named 'model'"),
        (["record", f"{folder / 'bad.py'}:step"], "is no Python"),
        (["record", f"{folder / 'idle.py'}:walk"], "no function 'walk'"),
        (["record", f"{folder / 'idle.py'}:step"], "saved nothing"),
        (["record", f"{folder / 'none.py'}:step"], "cannot read"),
        ([*plan_args(files, "8MiB"), "--planner", "keep-all"], "use planner='hybrid', or raise the budget"),
        (["machine", "--folder", folder / "nowhere"], "there is no folder"),
        (["machine", "--device", "abacus"], "is no device"),
        (["demo", "--planner", "magic"], "there is no planner 'magic'"),
        (["estimate", f"{folder / 'bad.py'}:step", "--memory", "lots"], "'lots' is not a size"),
        (["plan", files["trace"], "--machine", "a1000", "--memory", "1GiB"], "no machine file a1000; name a file or"),
    ]


def test_what_cannot_be_done_ends_in_one_sentence(files: dict[str, Path], tmp_path: Path) -> None:
    for args, says in wrong_calls(files, tmp_path):
        result = call(*args)
        assert result.exit_code == 1, (args, result.output)
        said = result.stderr.splitlines()[-1]
        assert said.startswith("Error: "), (args, said)
        assert says in said, (args, said)
        assert "Traceback" not in result.output
        assert result.stdout == ""


def test_arguments_of_a_script_and_whatever_it_raises(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse, torch\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--width', type=int, required=True)\n"
        "width = parser.parse_args().width\n"
        "model = torch.nn.Linear(width, width).to('cpu')\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "x = torch.randn(64, width)\n"
        "def step(): model(x).square().sum().backward()\n"
        "def walk(far): pass\n"
        "def rest(): model(x)\n"
        "def fall(): return {}['nothing']\n"
    )
    before, width = sys.argv, ["--", "--width", "32"]
    recorded = call_json("record", "-o", tmp_path / "t.json", "--folder", tmp_path, "--json", f"{script}:step", *width)
    assert recorded["num_ops"] > 5
    svg = tmp_path / "picture.svg"
    args: list[str | Path] = [
        "estimate",
        "--machine",
        "a100",
        "--json",
        "--svg",
        svg,
        "--memory",
        "1MiB",
        f"{script}:step",
        *width,
    ]
    estimated = json.loads(call(*args).stdout)
    assert estimated["parameter_bytes"] == 4 * (32 * 32 + 32)
    assert estimated["optimizer_bytes"] == 2 * estimated["parameter_bytes"] + 2 * 4
    assert estimated["in_core_step_s"] > 0
    assert "slowdown against budget" in svg.read_text()
    assert sys.argv is before
    refused: list[tuple[list[str | Path], str]] = [
        (["record", f"{script}:step"], "give its arguments after --"),
        (["record", f"{script}:walk", *width], "walk(far) in"),
        (["record", f"{script}:rest", *width], "rest ran no backward pass"),
        (["record", f"{script}:fall", *width], f"KeyError at {script}:11: 'nothing'; the traceback: outcore --debug"),
    ]
    for args, says in refused:
        result = call(*args)
        assert result.exit_code == 1, args
        assert says in result.stderr.splitlines()[-1], result.stderr
        assert "Traceback" not in result.output
    debugged = call("--debug", "record", f"{script}:fall", *width)
    assert isinstance(debugged.exception, KeyError)


def test_a_plan_for_a_machine_that_comes_with_the_package(files: dict[str, Path], tmp_path: Path) -> None:
    plan = tmp_path / "p.json"
    facts = call_json("plan", files["trace"], "--machine", "a100", "--memory", "20MiB", "-o", plan)
    assert facts["predicted_peak_bytes"] <= 20 * 1024**2
    explained = call_json("explain", plan, "--trace", files["trace"], "--machine", "a100")
    assert explained["values"]


def test_a_misspelt_verb_is_recognised() -> None:
    for verb, says in (("estiamte", "did you mean estimate?"), ("zzz", "outcore --help lists them")):
        result = call(verb, "--json")
        assert result.exit_code == 2
        assert f"there is no command '{verb}'; {says}" in result.stderr


def test_every_verb_teaches() -> None:
    listed = call("--help").stdout
    assert "outcore estimate train.py:step" in listed
    assert "..." not in listed.partition("Commands:")[2]
    for verb in main.list_commands(click.Context(main)):
        summary = next(line for line in listed.splitlines() if line.startswith(f"  {verb} "))
        assert summary.endswith(".")
        help_text = call(verb, "--help").stdout
        assert len(help_text.split()) > 30, f"{verb} --help says too little"


def test_the_public_names_are_there_in_a_fresh_process() -> None:
    code = (
        "import outcore.limit, outcore\n"
        "assert all(getattr(outcore, name) is not None for name in outcore.__all__)\n"
        "assert callable(outcore.limit) and set(outcore._HOMES) <= set(outcore.__all__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
