"""Steps for a GPU, estimated where there is none; and steps that ask what is in a tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import outcore
from outcore.cli import main
from outcore.errors import OutcoreError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")

SCRIPT = """
import torch
from torch import nn

device = torch.device("cuda", 0)
model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 256)).cuda()
nn.init.trunc_normal_(model[0].weight)
x = torch.randn(4096, 256, device=device)


def step():
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x.to("cuda")).square().mean()
    loss.backward()
"""


def saved_bytes(model: nn.Module, step: object) -> int:
    return outcore.estimate(model, step, machine="a100").activation_bytes


def test_a_script_for_a_gpu_is_estimated_without_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = CliRunner().invoke(main, ["estimate", f"{tmp_path / 'train.py'}:step", "--machine", "a100", "--json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    halves, floats = 4096 * 256 * 2, 4096 * 256 * 4
    # the input and what the norm returns as bfloat16, the norm's input as float32 (on CUDA it runs in that), and
    # its output as float32 for the square
    assert found["activation_bytes"] == pytest.approx(2 * halves + 2 * floats, rel=0.05)


def test_a_script_that_reads_values_is_told_that_all_of_it_runs_without_content(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n" + "lengths = torch.ones(3).tolist()\n" + SCRIPT)
    run = CliRunner().invoke(main, ["estimate", f"{tmp_path / 'train.py'}:step", "--machine", "a100"])
    assert run.exit_code == 1
    said = run.stderr.splitlines()[-1]
    assert "train.py, line 2: DataDependentOutputException" in said
    assert "an estimate runs all of train.py on tensors without content" in said
    assert "use outcore record, which runs the real thing" in said
    (tmp_path / "broken.py").write_text("nothing\n")
    run = CliRunner().invoke(main, ["estimate", f"{tmp_path / 'broken.py'}:step", "--machine", "a100"])
    assert "correct it, so that it runs by itself" in run.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_saves_booleans(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)).to(dtype)
    x = torch.randn(8192, 64, dtype=dtype)
    assert saved_bytes(model, lambda: model(x).sum().backward()) == 8192 * 64


def test_attention_with_dropout_saves_no_scores() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.1, batch_first=True)
    x = torch.randn(4, 512, 64)
    scores_bytes = 4 * 4 * 512 * 512 * 4
    assert saved_bytes(layer, lambda: layer(x).sum().backward()) < scores_bytes


class Masked(nn.Module):
    """Hides what lies behind padding, and looks first whether there is any."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        seen = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        x = self.layer(x)
        return x if bool(seen.all()) else x * seen[..., None]


def test_a_step_may_ask_what_follows_from_its_batch() -> None:
    model, x = Masked(), torch.randn(16, 32, 64)
    for lengths, is_masked in ((torch.full((16,), 32), False), (torch.arange(16), True)):
        found = saved_bytes(model, lambda lengths=lengths: model(x, lengths).sum().backward())
        assert (found > 0) == is_masked
        as_batch = outcore.estimate(model, {"x": x, "lengths": lengths}, machine="a100")
        assert (as_batch.activation_bytes > 0) == is_masked


def test_what_was_written_into_is_not_known_any_more() -> None:
    model, x, lengths = Masked(), torch.randn(16, 32, 64), torch.full((16,), 32)

    def step() -> None:
        changed = torch.zeros(16, dtype=torch.long).add_(x[:, 0, 0].abs().long())
        model(x, lengths + changed).sum().backward()

    with pytest.raises(OutcoreError, match="reads the content of a tensor"):
        outcore.estimate(model, step, machine="a100")
    assert lengths.tolist() == [32] * 16


def test_a_language_model_is_estimated_with_the_masks_it_trains_with() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, **sizes))
    tokens = torch.randint(0, 128, (4, 256))

    def step() -> None:
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss.backward()

    found = outcore.estimate(model, step)
    with outcore.limit(model, "100%", planner="keep-all", cache=False) as ooc:
        for _ in range(2):
            with ooc.step():
                step()
            model.zero_grad()
        assert ooc.timeline is not None
        assert found.in_core_peak_bytes == pytest.approx(ooc.timeline.peak_bytes, rel=0.02)


def test_autocast_of_other_tensors_stays_as_it_is() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    others: list[torch.dtype] = []

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(x).square().mean().backward()

    outcore.estimate(model, step, machine="a100")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        others.append(F.layer_norm(x.bfloat16(), (8,)).dtype)
    assert others == [torch.bfloat16]


def test_fake_tensors_that_are_estimated_twice_are_the_same_estimate() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(32, 64)
        first, second = (outcore.estimate(model, lambda: model(x).sum().backward(), machine="a100") for _ in range(2))
    assert first == second
