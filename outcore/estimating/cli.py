"""`outcore estimate`: what a step needs and what less memory would cost, before anything is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from outcore.errors import BadFile, OutcoreError
from outcore.estimating.settings import OPTIMIZERS
from outcore.reporting.output import OutFile, show, write_file
from outcore.reporting.progress import progress
from outcore.script import file_and_function, names_in, step_in
from outcore.units import ENDLESS_BYTES, parse_bytes


@click.command("estimate", short_help="Say what a step needs and what less memory costs; nothing is run.")
@click.argument("target", metavar="FILE.py:FUNCTION|MODEL")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS OF FILE.py]")
@click.option("--memory", help='A further budget to plan for: "16GiB", "80%", or bytes.')
@click.option("--machine", help="A machine file, or a100, h100, h200, rtx3060, rtx4090, v100.  [default: this one]")
@click.option("--model", "model_name", default="model", show_default=True, help="The model's name in FILE.py.")
@click.option(
    "--optimizer",
    type=click.Choice(list(OPTIMIZERS)),
    help="The optimizer whose state is counted.  [default: `optimizer` in FILE.py; adamw for MODEL]",
)
@click.option(
    "--batch", default=1, show_default=True, type=click.IntRange(min=1), help="Samples of a batch, for MODEL."
)
@click.option(
    "--tokens", default=1024, show_default=True, type=click.IntRange(min=1), help="Tokens per sample, for MODEL."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="The dtype of the weights, for MODEL.",
)
@click.option("--html", type=OutFile(), help="Also write a page with a figure of the slowdown over the budget.")
@click.option("--svg", type=OutFile(), help="Also write the figure alone.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of a table for people.")
def estimate_command(
    target: str, arguments: tuple[str, ...], html: Path | None, svg: Path | None, as_json: bool, **options: Any
) -> None:
    """Say what a training step needs and how much slower it would be in less memory, without running it.

    The target is a step of a script, as in `outcore record`, or a Hugging Face model: its id, or a folder with its
    config.json. Weights are not read, and neither the memory nor a GPU is needed. Seconds are estimated from the
    machine's rates. Arguments after `--` are passed to FILE.py:

    \b
        outcore estimate train.py:step --machine a100 -- --lr 0.1
        outcore estimate Qwen/Qwen3-8B --dtype bfloat16 --batch 4 --tokens 4096 --machine h100 --memory 40GiB
    """
    from outcore.estimating.estimate import estimate
    from outcore.reporting.estimates import estimate_table

    if options["memory"] is not None:
        parse_bytes(options["memory"], of_bytes=ENDLESS_BYTES)  # refuses nonsense before time is spent
    with progress() as tell:
        tell(f"loading {target}", 0.0)
        is_file = ".py:" in target or target.endswith(".py")
        model, batch_or_step, optimizer = (
            _from_file(target, arguments, options) if is_file else _from_hugging_face(target, options)
        )
        found = estimate(
            model, batch_or_step, options["memory"], optimizer=optimizer, machine=options["machine"], progress=tell
        )
    if html is not None:
        write_file(html, found.to_html())
    if svg is not None:
        write_file(svg, found.to_svg())
    show(found.as_dict() if as_json else estimate_table(found.as_dict()))


def _from_hugging_face(name: str, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    from outcore.estimating.hugging_face import model_and_batch

    model, batch = model_and_batch(name, options["batch"], options["tokens"], options["dtype"])
    return model, batch, options["optimizer"] or "adamw"


def _from_file(target: str, arguments: tuple[str, ...], options: dict[str, Any]) -> tuple[Any, Any, Any]:
    import torch

    from outcore.estimating.fake_step import without_memory

    path, function_name = file_and_function(target)
    try:
        with without_memory():
            names = names_in(path, arguments)
    except BadFile as error:
        if not isinstance(error.__cause__, RuntimeError | TypeError | NotImplementedError):  # it does not run at all
            raise
        raise OutcoreError(
            f"{str(error).partition('; correct it')[0]}; an estimate runs all of {path.name} on tensors without "
            "content: read no values outside of functions, or use outcore record, which runs the real thing"
        ) from error
    model = names.get(options["model_name"])
    if not isinstance(model, torch.nn.Module):
        raise OutcoreError(
            f"{path} defines no torch.nn.Module named {options['model_name']!r}; define it or name it with --model"
        )
    return model, step_in(names, path, function_name), options["optimizer"] or names.get("optimizer")
