"""What is being done, and how much of it is done -> a bar on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Shows a bar on stderr. If stderr is no terminal, prints a line for each new piece of work instead."""
    console = Console(stderr=True)
    said: set[str] = set()
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=1.0)

        def tell(what: str, part: float) -> None:
            bar.update(task, description=what, completed=part)
            if not console.is_terminal and what not in said:
                said.add(what)
                click.echo(f"outcore: {what}", err=True)

        yield tell
