"""Hugging Face trainers with our mixin, against the same trainers without it: every bit of weights and losses."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import outcore
from outcore.errors import BadSize, BudgetTooSmall
from outcore.fitting.hooks import ACTIVE
from outcore.limit import Limited

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer needs it")
import transformers

from outcore.integrations.hugging_face import LimitedTrainer, MemoryLimitMixin

SHAPE = {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2}
Row = dict[str, list[int]]


class Texts(Dataset[Row]):
    """Tokens of one length, or of four."""

    def __init__(self, num: int, *, varying: bool = False) -> None:
        self.num, self.varying = num, varying

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Row:
        length = 24 + 16 * (index // 4 % 4) if self.varying else 64
        tokens = torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(index)).tolist()
        return {"input_ids": tokens, "labels": tokens}


def padded(rows: list[Row]) -> dict[str, Tensor]:
    """Every batch is as long as its longest text."""
    longest = max(len(row["labels"]) for row in rows)
    inputs = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    labels = [row["labels"] + [-100] * (longest - len(row["labels"])) for row in rows]
    return {"input_ids": torch.tensor(inputs), "labels": torch.tensor(labels)}


def language_model(num_layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=128, **SHAPE, num_hidden_layers=num_layers, attention_dropout=0.1)
    return transformers.LlamaForCausalLM(config)


def trainer(kind: type[Any], folder: Path, data: Texts, *, more: dict[str, Any], **options: Any) -> Any:
    options = {"save_strategy": "no", "max_steps": 4, **options}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    evaluated = Texts(4) if "eval_strategy" in options else None
    return kind(
        model=language_model(1 if arguments.torch_compile else 2),
        args=arguments,
        train_dataset=data,
        eval_dataset=evaluated,
        data_collator=padded,
        **more,
    )


def compare(
    folder: Path, data: Texts, memory: str, *, train: dict[str, Any] | None = None, **options: Any
) -> tuple[Limited, Any]:
    """Trains twice, without and with the limit; what the limit showed, and the trainer that was limited."""
    trained = []
    for kind, more in ((transformers.Trainer, {}), (LimitedTrainer, {"memory": memory})):
        one = trainer(kind, folder / kind.__name__, data, more=more, **options)
        one.train(**{key: str(folder / kind.__name__ / value) for key, value in (train or {}).items()})
        trained.append(one)
    assert_same(*trained)
    ooc = trained[1].ooc
    assert ooc.timeline.peak_bytes <= ooc.budget.device_bytes
    assert ooc.stats()["left"] == ooc.stats()["unplanned"] == 0
    return ooc, trained[1]


def assert_same(plain: Any, ours: Any) -> None:
    assert not ACTIVE
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, ours.model.state_dict()[name]), name
    timeless = [
        [
            {key: value for key, value in entry.items() if "runtime" not in key and "per_second" not in key}
            for entry in log
        ]
        for log in (plain.state.log_history, ours.state.log_history)
    ]
    assert timeless[0] == timeless[1]


def test_accumulation_evaluation_saving_and_resuming(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "max_steps": 4,
    }
    saving = {"save_strategy": "steps", "save_steps": 2, **options}
    ooc, ours = compare(tmp_path, Texts(64), "3500KiB", **saving)
    assert ooc.plan is not None
    assert ooc.plan.in_core_peak_bytes > ooc.budget.device_bytes
    assert (ooc.stats()["recorded"], ooc.stats()["planned"]) == (2, 6)
    ooc.close()
    again, resumed = compare(
        tmp_path, Texts(64), "3500KiB", train={"resume_from_checkpoint": "checkpoint-2"}, **options
    )
    assert (again.stats()["recorded"], again.stats()["planned"]) == (2, 2)
    for one, other in zip(ours.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    resumed.model.save_pretrained(tmp_path / "saved")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded.lm_head.weight, resumed.model.lm_head.weight)
    again.close()


def test_dynamic_padding(tmp_path: Path) -> None:
    ooc, _ = compare(tmp_path, Texts(64, varying=True), "4MiB", max_steps=14, train_sampling_strategy="sequential")
    assert ooc.stats()["recorded"] <= 4
    assert ooc.stats()["planned"] >= 10
    ooc.close()


def test_a_compiled_model(tmp_path: Path) -> None:
    """The hooks are not compiled along, which would warn and break the graph into pieces."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(torch.compile|dynamo|recompile)")
        ooc, ours = compare(tmp_path, Texts(64), "8MiB", torch_compile=True, torch_compile_backend="aot_eager")
    assert ours.model_wrapped is not ours.model
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one each
    assert not torch._dynamo.utils.counters["graph_break"]
    ooc.close()
    torch._dynamo.reset()


def test_a_budget_that_is_too_small_leaves_nothing_behind(tmp_path: Path) -> None:
    small = trainer(LimitedTrainer, tmp_path, Texts(64), more={"memory": "1MiB"})
    with pytest.raises(BudgetTooSmall):
        small.train()
    assert not ACTIVE
    if small.ooc is not None:
        small.ooc.close()


def test_supervised_fine_tuning(tmp_path: Path) -> None:
    """With the settings of TRL, which checkpoints activations unless it is told otherwise."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    class LimitedSFTTrainer(MemoryLimitMixin, trl.SFTTrainer):  # type: ignore[name-defined, misc]
        pass

    trained: list[Any] = []
    for kind, more in ((trl.SFTTrainer, {}), (LimitedSFTTrainer, {"memory": "38MiB", "host": "1GiB"})):
        texts = Texts(32, varying=True)
        rows = datasets.Dataset.from_list([{"input_ids": texts[number]["input_ids"]} for number in range(32)])
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path / kind.__name__),
            per_device_train_batch_size=4,
            max_steps=6,
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
        )
        vocabulary = {f"{number}": number for number in range(1, 128)} | {"<pad>": 0}
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_words(vocabulary), pad_token="<pad>")
        one = kind(model=language_model(), args=arguments, train_dataset=rows, processing_class=tokenizer, **more)
        one.train()
        trained.append(one)
    assert_same(*trained)
    ooc = trained[1].ooc
    assert ooc.timeline.peak_bytes <= ooc.budget.device_bytes
    assert ooc.stats()["planned"] >= 4
    assert ooc.stats()["left"] == ooc.stats()["unplanned"] == 0
    ooc.close()


def _words(vocabulary: dict[str, int]) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_budgets_that_an_estimate_names_work_at_the_first_try(share: float, tmp_path: Path) -> None:
    """The least one, too: the trainer has small tensors of its own in a step, which the estimate cannot know."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=128, **shape))
    data = [{"input_ids": torch.randint(0, 128, (64,)), "labels": torch.tensor(at % 2)} for at in range(16)]
    batch = {name: torch.stack([row[name] for row in data[:4]]) for name in data[0]}
    found = outcore.estimate(model, batch, optimizer=torch.optim.AdamW)
    memory = int(found.least_bytes + share * (found.in_core_peak_bytes - found.least_bytes))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        max_steps=4,
    )
    limited = LimitedTrainer(model=model, args=arguments, train_dataset=data, memory=memory)
    limited.train()
    assert limited.ooc is not None
    assert limited.ooc.timeline is not None
    assert limited.ooc.timeline.peak_bytes <= memory


def test_options_of_limit_are_passed_on_and_a_bad_size_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadSize, match="'lots' is not a size"):
        LimitedTrainer(memory="lots")
    kept = trainer(LimitedTrainer, tmp_path, Texts(64), more={"memory": "1GiB", "measure": True, "planner": "swap"})
    ooc = kept._memory_limit.of(kept.model)
    assert (ooc.measure, ooc.planner) == (True, "swap")
    ooc.close()
