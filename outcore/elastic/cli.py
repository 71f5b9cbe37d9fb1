"""The commands `outcore launch` and `outcore elastic compare`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outcore.elastic.launch import LaunchPlan, launch
from outcore.elastic.methods import METHODS
from outcore.errors import OutcoreError
from outcore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outcore.elastic.trials import Result


@click.command(
    "launch",
    short_help="Start replicas of a script, with ranks, rendezvous and restarts.",
    context_settings={"ignore_unknown_options": True},
)
@click.option("--groups", "num_groups", type=click.IntRange(1), required=True, help="Number of replicas to start.")
@click.option("--max-restarts", default=3, show_default=True, help="Number of restarts per replica.")
@click.option("--spare-cores", default=0, show_default=True, help="Cores for communication only.")
@click.option("--pin/--no-pin", default=True, show_default=True, help="Whether each replica gets its own cores.")
@click.option("--straggler-limit", default=120.0, show_default=True, help="Seconds to wait for the last replicas.")
@click.option("--nnodes", "num_nodes", type=click.IntRange(1), default=1, show_default=True, help="Number of hosts.")
@click.option("--rdzv", "rendezvous", metavar="HOST:PORT", help="Address on one of the hosts where launchers meet.")
@click.option("--node-rank", type=click.IntRange(0), help="Number of this host [default: in order of arrival].")
@click.option("--join-limit", default=300.0, show_default=True, help="Seconds to wait for the other hosts.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch_command(
    num_groups: int,
    max_restarts: int,
    spare_cores: int,
    pin: bool,
    straggler_limit: float,
    num_nodes: int,
    rendezvous: str | None,
    node_rank: int | None,
    join_limit: float,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Starts pinned replicas of SCRIPT, with ranks, rendezvous and restart.

    The cores are split into equal groups inside NUMA nodes; each replica is pinned before Python starts, with as many
    threads as cores. Communicating threads (gloo's, the overlapped exchange, the centre of asynchronous methods) run on
    cores that belong to no group, if there are any, otherwise on any core. Ranks are set as by torchrun (RANK,
    WORLD_SIZE, MASTER_ADDR, MASTER_PORT). A replica that dies is restarted alone, while its elastic partners train on.

    With several hosts, run the same command on each: `outcore launch --nnodes 2 --rdzv host-a:29400 --groups 4
    train.py`. A launcher that died may be restarted, except the one on the host with the rendezvous address, which
    holds the store. The store listens on loopback only, unless --rdzv names another address.
    """
    plan = LaunchPlan(
        command=[sys.executable, "-u", script, *arguments],
        num_groups=num_groups,
        max_restarts=max_restarts,
        num_spare_cores=spare_cores,
        pin=pin,
        straggler_limit_s=straggler_limit,
        num_nodes=num_nodes,
        rendezvous=None if rendezvous is None else _read_address(rendezvous),
        node_rank=node_rank,
        join_limit_s=join_limit,
    )
    try:
        outcome = launch(plan, lambda line: click.echo(f"outcore launch: {line}", err=True))
    except OutcoreError as error:
        raise click.ClickException(str(error)) from None
    if outcome.lost:
        raise click.ClickException(f"rank(s) {outcome.lost} did not end well; see their output above")
    if outcome.lost_nodes:
        raise click.ClickException(f"{', '.join(outcome.lost_nodes)} did not finish; see what was said there")


def _read_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise click.BadParameter(f"{text!r} is not HOST:PORT, such as 10.0.0.1:29400", param_hint="--rdzv")
    return host.strip("[]"), int(port)


@click.group("elastic", short_help="Average the models of many workers, which may come, go and fail.")
def elastic_command() -> None:
    """Elastic averaging: many workers, few messages, and workers that may fail."""


@elastic_command.command("compare")
@click.option(
    "--methods",
    default="sync-easgd,original-easgd,async-easgd,sync-sgd",
    show_default=True,
    help=f"Comma-separated; known: {', '.join(METHODS)}, ddp, periodic-averaging, post-local-sgd.",
)
@click.option("--groups", "num_groups", type=click.IntRange(1), default=None, help="Workers [default: half the cores].")
@click.option(
    "--data", type=click.Path(exists=True, file_okay=False), help="Folder with MNIST [default: small digits]."
)
@click.option("--epochs", default=20.0, show_default=True, help="Passes over the training data, for every method.")
@click.option("--batch", default=32, show_default=True, help="Images per worker and step.")
@click.option("--seed", default=0, show_default=True)
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Where to draw accuracy curves (PNG).")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def compare_command(
    methods: str,
    num_groups: int | None,
    data: str | None,
    epochs: float,
    batch: int,
    seed: int,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Trains a LeNet with several methods under equal conditions and compares them."""
    from outcore.elastic.compare import draw, make_trial, run_trials

    num_workers = num_groups or max(2, (os.cpu_count() or 2) // 2)
    chosen = [name.strip() for name in methods.split(",") if name.strip()]

    def tell(line: str) -> None:
        click.echo(f"outcore elastic compare: {line}", err=True)

    def progress(result: Result) -> None:
        reached = f"{100 * result.final_accuracy:.2f} % in {format_seconds(result.train_s)}"
        tell(f"{result.trial['name']}: {result.error or reached}")

    try:
        trials = [make_trial(name, num_workers, epochs=epochs, batch=batch, seed=seed) for name in chosen]
        results = run_trials(trials, num_groups=num_workers, data=data, on_result=progress, say=tell)
        if picture is not None:
            draw([result for result in results if result.error is None], picture)
    except OutcoreError as error:
        raise click.ClickException(str(error)) from None
    _print(results, as_json)
    if len(results) < len(trials) or any(result.error for result in results):
        raise click.ClickException("not every method finished; see the errors above")


def _print(results: list[Result], as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        click.echo(json.dumps([{**asdict(result), "step_s": None} for result in results], indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "accuracy %", "seconds", "waiting %", "sent by one worker", "messages")
    for result in results:
        if result.error is not None:
            table.add_row(str(result.trial["name"]), "-", "-", "-", "-", result.error)
            continue
        table.add_row(
            str(result.trial["name"]),
            f"{100 * result.final_accuracy:.2f}",
            f"{result.train_s:.2f}",
            f"{100 * result.communication_share:.0f}",
            format_bytes(result.sent_bytes),
            str(result.num_messages),
        )
    Console().print(table)
