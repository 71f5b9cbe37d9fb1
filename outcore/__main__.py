"""`python -m outcore`: the command line."""

from outcore.cli import main

main(prog_name="outcore")
