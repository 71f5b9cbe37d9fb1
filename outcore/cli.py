"""The command line: one subcommand per public verb; text for people, `--json` for programs."""

from __future__ import annotations

import click


@click.group()
@click.version_option(package_name="outcore")
def main() -> None:
    """Train neural networks larger than the memory they are given."""
