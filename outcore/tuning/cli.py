"""`outcore tune`: the batch and the learning rate that train a file's model fastest in some memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

from outcore.errors import BadFile, TuningError

FILE = click.Path(path_type=Path, dir_okay=False)
UNCHECKED_STATUS = 3  # of the process, where nothing but today's setting could be advised


@click.command("tune", short_help="Find the batch and learning rate that train fastest in a budget.")
@click.argument("script", metavar="FILE.py", type=FILE)
@click.option("--memory", required=True, help='Device memory for the whole step: "16GiB", "80%", or bytes.')
@click.option(
    "--batch", type=click.IntRange(min=1), help="The effective batch you train with; it is kept.  [default: any batch]"
)
@click.option("--free", is_flag=True, help="Let --batch change; it is then the reference for learning rate and noise.")
@click.option("--learning-rate", help="The rate that belongs to --batch, or `find`.  [default: the optimizer's]")
@click.option("--rule", default="adascale", show_default=True, help="How the rate follows a freed batch.")
@click.option("--target", help="Also predict the time to a target: val_accuracy=0.97 or val_loss=0.2.")
@click.option(
    "--epochs", "num_epochs", type=float, help="Length of your training: advise what is best at the end of it."
)
@click.option("--train-s", type=float, help="Length of your training in seconds, instead of --epochs.")
@click.option(
    "--trial",
    "trial_s",
    type=click.FloatRange(min=0),
    default=20.0,
    show_default=True,
    help="Seconds of compute that trial trainings scale with: range test, comparison, search, time to --target.",
)
@click.option("--race/--no-race", default=True, show_default=True, help="Compare with today's setting by training.")
@click.option(
    "--search",
    "num_trials",
    type=click.IntRange(min=0),
    default=0,
    help="Number of runs of a search around the advice, for the fastest way to --target.  [default: none]",
)
@click.option("--study", type=FILE, help="File that keeps the search, from which an interrupted one continues.")
@click.option("--largest", type=click.IntRange(min=1), help="The largest micro-batch to consider.")
@click.option("--workers", help="Plan for several devices like this one: 8, or speeds relative to it: 1,1,0.5.")
@click.option(
    "--communication-s", type=click.FloatRange(min=0), help="Seconds per step that --workers need to sum gradients."
)
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Folder for the swap file.")
@click.option("--model", "model_name", default="make_model", show_default=True, help="Name of the function in FILE.py.")
@click.option("--loss", "loss_name", default="loss_fn", show_default=True, help="Name of the function in FILE.py.")
@click.option("--data", "data_name", default="dataset", show_default=True, help="Name of the data set in FILE.py.")
@click.option(
    "--optimizer", "optimizer_name", default="make_optimizer", show_default=True, help="Name of the function."
)
@click.option("--curve", type=FILE, help="Also draw the curve: a file that ends in .svg, .png or .pdf.")
@click.option("-o", "--out", type=FILE, help="Save the advice as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of tables for people.")
def tune_command(script: Path, curve: Path | None, out: Path | None, as_json: bool, **options: Any) -> None:
    """Find the micro-batch, accumulation and learning rate that train fastest in some memory.

    FILE.py is an ordinary script that defines `make_model`, a function that returns the model on its device; `loss_fn`,
    called as loss_fn(model(x), y); `dataset`, a map-style data set or a function batch_size -> (x, y); and
    `make_optimizer`, called with the parameters. If it defines `validation`, --target is evaluated on it. See
    examples/tune_batch.py. A few small batches are recorded, all others are predicted, and the best are confirmed with
    real steps. The command never runs out of memory to find out what fits.

    The example takes about a minute on two cores. Networks with slower steps take longer to record. The time of all
    trial trainings scales with --trial: they take about 1.4 times as many seconds, 2.4 times if the target is nearly
    reached, 1.5 times more with --epochs, and with --search once more for each run and up to six times to check its
    result. Evaluating held-out samples comes on top.

    \b
        outcore tune train.py --memory 16GiB --batch 256
        outcore tune train.py --memory 16GiB --target val_accuracy=0.97 --curve curve.svg
        outcore tune train.py --memory 16GiB --target val_accuracy=0.97 --epochs 30
        outcore tune train.py --memory 16GiB --workers 8 --communication-s 0.02
        torchrun --nproc-per-node 8 -m outcore tune train.py --memory 16GiB

    Under torchrun or `outcore launch` every rank measures its own device, all ranks together measure their
    communication, and rank 0 prints the common advice; --curve, --out and the printed curve are those of rank 0.

    The part of FILE.py under `if __name__ == "__main__":` is not run.

    Exit status 3 means that only today's setting could be advised; the first line of the advice gives the reason.
    """
    from outcore.reporting.progress import progress
    from outcore.script import names_in
    from outcore.tuning.plot import check_picture, draw
    from outcore.tuning.tune import tune

    if curve is not None:
        check_picture(curve)
    wanted = _read(options)
    with _group() as first, progress() if first else nullcontext(_say_nothing) as progress_of:
        progress_of(f"loading {script}", 0.0)
        parts = _names(names_in(script), script, options)
        try:
            advice = tune(**parts, **wanted, progress=progress_of)
        except KeyboardInterrupt:
            study = wanted["effort"].study
            if study is None:
                raise
            raise click.ClickException(
                f"interrupted; {study} keeps the runs that ended: the same command goes on from there"
            ) from None
    if first and curve is not None:
        draw(advice, curve)
    if first and out is not None:
        _save(out, advice.to_json())
    if first and as_json:
        facts = json.loads(advice.to_json()) | {"effective_batch": advice.effective_batch}
        click.echo(json.dumps(facts | {"knee": advice.curve.knee.micro_batch}, indent=1))
    elif first:
        _print(advice)
    if advice.unchecked:
        sys.exit(UNCHECKED_STATUS)


def _read(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the command line's options as arguments of `tune`."""
    rate, target, free = options["learning_rate"], options["target"], options["free"]
    if free and options["batch"] is None:
        raise TuningError("--free frees the batch you train with; name it with --batch, or leave both out")
    if options["num_trials"]:
        if target is None:
            raise TuningError("--search compares runs by a target; give one with --target, such as val_accuracy=0.97")
        if options["num_epochs"] is not None or options["train_s"] is not None:
            raise TuningError("--search looks for what is soonest at --target; leave out --epochs and --train-s, or it")
        if options["workers"] is not None:
            raise TuningError("--search trains on one device; search without --workers, then keep the --batch it found")
    elif options["study"] is not None:
        raise TuningError("--study keeps the runs of a search; say how many with --search")
    from outcore.tuning.options import Batch, Effort, Goal, LearningRate, Memory, Workers

    return {
        "memory": Memory(options["memory"], disk=options["folder"]),
        "batch": Batch(options["batch"], free or options["batch"] is None, options["largest"]),
        "learning_rate": LearningRate(
            rate if rate in (None, "find") else _number(rate, "--learning-rate"), options["rule"]
        ),
        "goal": Goal(_target(target) if target is not None else None, options["num_epochs"], options["train_s"]),
        "effort": Effort(options["trial_s"], options["race"], options["num_trials"], options["study"]),
        "workers": Workers(
            _workers(options["workers"]) if options["workers"] is not None else None, options["communication_s"]
        ),
    }


@contextmanager
def _group() -> Iterator[bool]:
    """Joins the process group if a launcher started several processes; yields True on the one that prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield True
        return
    import torch
    import torch.distributed as dist

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_devices = local_rank < torch.cuda.device_count()
    if on_devices:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_devices else "gloo")
    try:
        yield dist.get_rank() == 0
        dist.barrier()  # rank 0 hosts the store that the others still use
    finally:
        dist.destroy_process_group()


def _say_nothing(what: str, part: float) -> None:
    """Ignores progress; only rank 0 shows it."""


def _workers(text: str) -> int | list[float]:
    if text.isdigit():
        return int(text)
    return [_number(speed, "--workers") for speed in text.split(",")]


def _target(text: str) -> tuple[str, float]:
    metric, equals, value = text.partition("=")
    if not equals:
        raise TuningError(f"{text!r} is no target; write a metric and a value, such as val_accuracy=0.97")
    return metric.strip(), _number(value, "--target")


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise TuningError(f"{text!r} is no number; give {option} one") from None


def _names(names: dict[str, Any], script: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the objects that the script defines, as arguments of `tune`."""

    from outcore.tuning.options import Data

    optimizer = names.get(options["optimizer_name"])
    if options["target"] is not None and optimizer is None:
        raise TuningError(
            f"{script} defines no {options['optimizer_name']!r}, and --target is looked for by training; define it or "
            "name another with --optimizer"
        )
    parts = {}
    for part, option in (("make_model", "model"), ("loss_fn", "loss"), ("dataset", "data")):
        name = options[f"{option}_name"]
        if name not in names:
            raise TuningError(f"{script} defines no {name!r}; define it or name another with --{option}")
        parts[part] = names[name]
    return parts | {"optimizer": optimizer, "dataset": Data(parts["dataset"], names.get("validation"))}


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise BadFile(f"cannot write {path} ({error.strerror or error}); name another file") from None


def _print(advice: Any) -> None:
    from rich.console import Console

    from outcore.reporting.text import WIDTH
    from outcore.tuning.report import advice_table, curve_table

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(advice_table(advice))
    console.print(curve_table(advice))
