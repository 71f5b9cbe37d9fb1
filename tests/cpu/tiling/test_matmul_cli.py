from __future__ import annotations

import json
from pathlib import Path

import torch
from click.testing import CliRunner

from outcore.tiling.cli import matmul_command
from outcore.tiling.operands import FileMatrix
from tests.cpu.tiling.tiling_products import assert_product, random_matrix


def call(*arguments: str) -> str:
    result = CliRunner().invoke(matmul_command, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_explain_prints_prediction_then_measurement() -> None:
    text = call("200", "300", "100", "--memory", "100KB", "--device", "cpu", "--explain")
    lines = [line.split()[0] for line in text.splitlines()]
    assert lines == ["product", "plan", "tiles", "memory", "traffic", "predicted", "measured"]
    assert "bound by" in text


def test_a_plan_for_a_card_that_is_not_here() -> None:
    card = ["--dtype", "bfloat16", "--memory", "16GiB", "--tflops", "699", "--link", "55GB"]
    assert "bound by compute" in call("65536", "65536", "65536", "--plan-only", *card)
    assert "bound by link in" in call("256", "65536", "65536", "--plan-only", *card)


def test_json_is_one_object() -> None:
    found = json.loads(call("64", "64", "64", "--memory", "20KB", "--device", "cpu", "--device", "cpu", "--json"))
    assert found["plan"]["gemm"]["m"] == 64
    assert [lane["error"] for lane in found["measured"]["lanes"]] == [None, None]
    assert found["measured"]["bytes_out"] == 64 * 64 * 4


def test_files_in_and_out(tmp_path: Path) -> None:
    a, b = random_matrix(50, 40), random_matrix(40, 30)
    FileMatrix.save(tmp_path / "a", a)
    FileMatrix.save(tmp_path / "b", b)
    files = ["--a", str(tmp_path / "a"), "--b", str(tmp_path / "b"), "--out", str(tmp_path / "c")]
    call("50", "30", "40", "--memory", "8KB", "--device", "cpu", *files)
    assert_product(FileMatrix(tmp_path / "c", (50, 30), torch.float32).to_tensor(), a, b)


def test_mistakes_end_in_one_sentence(tmp_path: Path) -> None:
    runner = CliRunner()
    (tmp_path / "a").write_bytes(b"short")
    cases = [
        ["64", "64", "64", "--memory", "lots"],
        ["64", "64", "64", "--memory", "4"],
        ["64", "64", "64", "--a", str(tmp_path / "a")],
        ["64", "64", "64", "--device", "tpu"],
        ["64", "64", "64", "--tflops", "5"],
    ]
    for arguments in cases:
        result = runner.invoke(matmul_command, arguments)
        assert result.exit_code != 0, arguments
        assert "Traceback" not in result.output
        assert result.output.count("Error:") == 1, result.output
