"""`outcore tune` and its example, called as a user calls them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from outcore.cli import main
from outcore.tuning.advice import Advice

pytestmark = pytest.mark.usefixtures("quick")

EXAMPLE = Path(__file__).parents[3] / "examples" / "tune_batch.py"


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["tune", *(str(arg) for arg in args)])


def test_json_for_programs_and_a_picture(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture is drawn with it")
    picture, saved = tmp_path / "curve.svg", tmp_path / "advice.json"
    arguments: list[str | Path] = [
        "--memory",
        "12MiB",
        "--batch",
        "64",
        "--folder",
        folder,
        "--curve",
        picture,
        "-o",
        saved,
        "--json",
    ]
    result = call(EXAMPLE, *arguments)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["effective_batch"] == 64
    advice = Advice.load(saved)
    assert (advice.micro_batch, advice.learning_rate) == (facts["micro_batch"], facts["learning_rate"])
    assert picture.read_text().count("<path") > 20
    assert "recording a batch of 2" in result.stderr


def test_tables_for_people(folder: str) -> None:
    quickly: list[str | Path] = ["--largest", "16", "--learning-rate", "0.002", "--no-race", "--folder", folder]
    result = call(EXAMPLE, "--memory", "12MiB", *quickly)
    assert result.exit_code == 3, result.output  # nothing was compared
    assert "samples per second over the micro-batch" in result.stdout
    assert "gradient noise scale" in result.stdout
    assert "\N{FULL BLOCK}" in result.stdout
    said = " ".join(word for word in result.stdout.split() if word != "\N{BOX DRAWINGS LIGHT VERTICAL}")
    assert "not checked nothing was trained to compare it with, as race=False asks; so this is today's setting" in said
    assert "learning rate 0.002 gradient" in said


FAILING = """
from tests.cpu.tuning.nets import make_sgd as make_optimizer, mlp as make_model, stripes
dataset = stripes()
def loss_fn(out, y):
    raise ValueError("labels of 4 classes\\nand more")
"""


def test_an_exception_in_the_script_ends_in_one_sentence(tmp_path: Path, folder: str) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    result = call(script, "--memory", "16MiB", "--folder", folder)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "Error: while recording a batch of 2, your code raised ValueError: labels of 4 classes (failing.py, line 5, in "
        "loss_fn); correct it there and tune again"
    )


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    advice = runpy.run_path(str(EXAMPLE), run_name="tune_batch")["main"]()
    assert advice.effective_batch == 128
    assert advice.target_s is not None
    assert advice.peak_bytes <= advice.curve.memory_bytes
    assert "outcore tune: advice for cpu" in capsys.readouterr().out


def test_what_cannot_be_done_ends_in_one_sentence(tmp_path: Path) -> None:
    bad, empty, lacking = tmp_path / "bad.py", tmp_path / "empty.py", tmp_path / "lacking.py"
    lacking.write_text("import os\nimport not_installed\n")
    bad.write_text("def make_model(:\n")
    empty.write_text("make_model = 3\n")
    memory, search = ["--memory", "12MiB"], ["--search", "3", "--target", "val_accuracy=0.9"]
    wrong: list[tuple[list[str | Path], str]] = [
        ([tmp_path / "none.py", *memory], "cannot read"),
        ([bad, *memory], "is no Python"),
        ([lacking, *memory], "lacking.py, line 2: ModuleNotFoundError: No module named 'not_installed'; correct it"),
        ([empty, *memory], "defines no 'loss_fn'; define it or name another with --loss"),
        ([EXAMPLE, *memory, "--target", "0.97"], "'0.97' is no target"),
        ([EXAMPLE, *memory, "--target", "val_accuracy=much"], "'much' is no number"),
        ([EXAMPLE, *memory, "--learning-rate", "high"], "'high' is no number"),
        ([EXAMPLE, *memory, "--free"], "--free frees the batch you train with"),
        ([EXAMPLE, *memory, "--curve", tmp_path / "curve.doc"], "names no kind of picture"),
        ([EXAMPLE, *memory, "--curve", tmp_path / "no" / "curve.svg"], "there is no folder"),
        ([EXAMPLE, "--memory", "lots"], "'lots' is not a size"),
        ([EXAMPLE, *memory, "--epochs", "3", "--no-race"], "leave race on"),
        ([EXAMPLE, *memory, "--epochs", "3", "--train-s", "9"], "a training has one length"),
        ([EXAMPLE, *memory, "--batch", "4096"], "fewer than the batch of 4096"),
        ([EXAMPLE, *memory, "--search", "3"], "give one with --target, such as val_accuracy=0.97"),
        ([EXAMPLE, *memory, "--study", tmp_path / "study.log"], "say how many with --search"),
        ([EXAMPLE, *memory, *search, "--epochs", "3"], "leave out --epochs and --train-s"),
        ([EXAMPLE, *memory, *search, "--workers", "2"], "search without --workers"),
        ([EXAMPLE, *memory, *search, "--optimizer", "none"], "defines no 'none', and --target is looked for"),
        ([EXAMPLE, *memory, *search, "--study", bad], "is no study of a search; name another file"),
        ([EXAMPLE, *memory, *search, "--study", tmp_path / "no" / "study"], "in a folder that is there"),
        ([EXAMPLE, *memory, "--learning-rate", "-1"], "-1.0 is no learning rate; give a number above zero"),
    ]
    for args, says in wrong:
        result = call(*args)
        assert result.exit_code == 1, (args, result.output)
        said = result.stderr.splitlines()[-1]
        assert said.startswith("Error: "), said
        assert says in said, said
        assert result.stdout == ""
        assert "recording" not in result.stderr  # before anything was paid for
    for option in ("--search", "--trial"):
        assert "is not in the range x>=0" in call(EXAMPLE, *memory, option, "-3").stderr
    assert bad.read_text() == "def make_model(:\n"
    assert len(call("--help").stdout.split()) > 100


INTERRUPTED = """
from pathlib import Path
import torch
from tests.cpu.tuning.nets import make_sgd as make_optimizer, mlp as make_model, stripes
dataset, study = stripes(), Path(__file__).with_name("study.log")
def loss_fn(out, y):
    if study.exists() and "trained_s" in study.read_text():  # Ctrl-C in the second run of the search
        raise KeyboardInterrupt
    return torch.nn.functional.cross_entropy(out, y)
"""


def test_an_interrupted_search_says_how_it_goes_on(tmp_path: Path, folder: str) -> None:
    pytest.importorskip("optuna", reason="the search is an Optuna study")
    script, study = tmp_path / "interrupted.py", tmp_path / "study.log"
    script.write_text(INTERRUPTED)
    quickly: list[str | Path] = ["--memory", "16MiB", "--batch", "32", "--trial", "0.2", "--folder", folder]
    result = call(script, *quickly, "--search", "3", "--target", "val_accuracy=0.9", "--study", study)
    assert result.exit_code == 1
    said = f"Error: interrupted; {study} keeps the runs that ended: the same command goes on from there"
    assert result.stderr.splitlines()[-1] == said
