"""The README's table of what outcore works with: every row is a test, or says that it is not supported."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = "| with | how |"
TESTED = {  # what a row names -> the test
    "a PyTorch loop": "cpu/test_real_loops.py::test_the_loop_gives_the_same_numbers",
    "accumulation": "cpu/test_real_loops.py::accumulation",
    "AMP with `GradScaler`": "cpu/test_real_loops.py::mixed_precision",
    "several forwards or backwards per step": "cpu/test_real_loops.py::several_forwards",
    "loops that call only parts of a model": "cpu/test_real_loops.py::parts_called_directly",
    "inputs of changing sizes": (
        "cpu/fitting/test_families.py::test_a_step_is_told_what_it_works_on_where_only_parts_of_the_model_are_called"
    ),
    "Hugging Face `Trainer`": (
        "cpu/integrations/test_hugging_face.py::test_accumulation_evaluation_saving_and_resuming"
    ),
    "TRL's `SFTTrainer`": "cpu/integrations/test_hugging_face.py::test_supervised_fine_tuning",
    "Lightning": "cpu/integrations/test_lightning.py::test_both_packages",
    "Accelerate": "cpu/integrations/test_distributed.py::_train_accelerated",
    "DistributedDataParallel": "cpu/integrations/test_distributed.py::_train",
    "FSDP2": "cpu/integrations/test_distributed.py::_train_sharded",
    "`torch.compile`": "cpu/compiled/test_surface.py::test_forms_of_compilation",
    "`torch.func` transforms": "cpu/eager/test_transforms.py::test_a_transform_inside_a_step",
}


def rows() -> list[tuple[str, str]]:
    """(what, how) of each row."""
    table = (ROOT / "README.md").read_text().partition(HEADER)[2].partition("\n\n")[0]
    return [(cells[1].strip(), cells[2].strip()) for line in table.splitlines()[2:] if (cells := line.split("|"))]


@pytest.mark.parametrize(("what", "how"), rows(), ids=[what for what, _ in rows()])
def test_a_row_is_a_test_or_says_that_it_is_not_supported(what: str, how: str) -> None:
    if how == "not supported":
        return
    for part in re.split(r", ", what):
        assert part in TESTED, f"name the test for {part!r} here, or say in the README that it is not supported"


@pytest.mark.parametrize("test", TESTED.values())
def test_the_test_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text())
    assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


def test_there_is_a_table() -> None:
    assert len(rows()) >= 5
