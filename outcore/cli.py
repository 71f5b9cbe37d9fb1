"""The command line: one subcommand per public function, with text for people and `--json` for programs.

Results go to stdout, progress and errors to stderr. Errors that outcore raises on purpose are printed in one sentence,
with exit code 1. `plan` and `explain` do not need torch, because every command imports what it needs when it runs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outcore.errors import BudgetTooSmall, OutcoreError
from outcore.machines import machine_from, machine_names
from outcore.reporting.comparison import predicted_figures
from outcore.reporting.output import OutFile, show, write_file
from outcore.script import file_and_function, names_in, step_in

if TYPE_CHECKING:
    from rich.table import Table

    from outcore.values import Machine, Plan, PreparedStep, Timeline, Trace

# Commands in packages of their own: name -> "module:command", imported when they are called.
ELSEWHERE: dict[str, str] = {
    "estimate": "outcore.estimating.cli:estimate_command",
    "matmul": "outcore.tiling.cli:matmul_command",
    "launch": "outcore.elastic.cli:launch_command",
    "elastic": "outcore.elastic.cli:elastic_command",
    "tune": "outcore.tuning.cli:tune_command",
}

NAMES = ", ".join(machine_names())
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


class Verbs(click.Group):
    """Imports commands of other packages when they are called, and prints errors as one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["demo", "estimate", *(name for name in self.commands if name != "demo"), *list(ELSEWHERE)[1:]]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            close = get_close_matches(args[0], known, 1)
            what = f"did you mean {close[0]}?" if close else "outcore --help lists them"
            raise click.UsageError(f"there is no command {args[0]!r}; {what}", ctx)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in ELSEWHERE:
            module, _, command = ELSEWHERE[cmd_name].partition(":")
            found: click.Command = getattr(import_module(module), command)
            return found
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            raise click.ClickException(_in_a_sentence(error)) from None


def _in_a_sentence(error: Exception) -> str:
    if isinstance(error, OutcoreError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "this command needs torch (plan and explain do not); pip install torch"
    said = str(error).strip().partition("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not {"outcore", "torch", "click"}.intersection(Path(frame.filename).parts)]
    at = (own or list(frames))[-1]
    kind = type(error).__name__
    return f"{kind} at {at.filename}:{at.lineno}: {said}; the traceback: outcore --debug {' '.join(sys.argv[1:])}"


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="outcore")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Train neural networks larger than the memory they are given, with the same numbers.

    Start with `outcore demo`. Then estimate what a step of your own needs, on this machine or another one. To see a
    plan in detail, record the step, measure this machine (or use the file of another one), plan for a budget, and
    see what the plan does:

    \b
        outcore estimate train.py:step --machine a100
        outcore record train.py:step -o step.trace.json
        outcore machine -o here.machine.json
        outcore plan step.trace.json --machine here.machine.json --memory 16GiB -o step.plan.json
        outcore explain step.plan.json --trace step.trace.json
    """


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of tables for people.")
html_option = click.option("--html", type=OutFile(), help="Also write a report page: memory curve, lanes, decisions.")
perfetto_option = click.option("--perfetto", type=OutFile(), help="Also write the lanes for ui.perfetto.dev.")


@main.command(short_help="Measure the capacities and transfer rates of this machine.")
@click.option(
    "--device", default="auto", show_default=True, help="cpu, cuda, cuda:1 ...; auto: the GPU if there is one."
)
@click.option(
    "--folder", type=FOLDER, help="Folder for the swap file, on the disk to measure.  [default: temporary files]"
)
@click.option("-o", "--out", type=OutFile(), help="Save the machine, for `outcore plan --machine`.")
@as_json
def machine(device: str, folder: Path | None, out: Path | None, as_json: bool) -> None:
    """Measure the capacities and transfer rates of this machine.

    Links and disk are measured with real copies, which takes about a second. Capacities are those that this process may
    use, not those that are installed. With a saved machine, `outcore plan` works on any other machine.
    """
    from outcore.reporting.text import machine_table

    with show_progress() as tell:
        tell("measuring links and disk", 0.0)
        found = _measure(device, folder)
    _save(found, out)
    show(json.loads(found.to_json()) if as_json else machine_table(found))


def _measure(device: str, folder: Path | None) -> Machine:
    import tempfile

    import torch

    from outcore.memory.machine import measure_machine
    from outcore.memory.op_rates import measure_op_rates

    if folder is not None and not folder.is_dir():
        raise OutcoreError(f"there is no folder {folder}; make it or name another with --folder")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError:
        raise OutcoreError(f"{device!r} is no device; write cpu, cuda or cuda:1") from None
    if where.type not in ("cpu", "cuda") or (where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count()):
        raise OutcoreError(f"there is no device {device} here ({torch.cuda.device_count()} GPUs); try --device cpu")
    found = measure_machine(where, str(folder or tempfile.gettempdir()))
    return dataclasses.replace(found, op_rates=measure_op_rates(where))


@main.command(short_help="Record one training step of FILE.py, op by op.")
@click.argument("step", metavar="FILE.py:FUNCTION")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS OF FILE.py]")
@click.option("-o", "--out", type=OutFile(), help="Where to save the trace.  [default: FUNCTION.trace.json]")
@click.option("--model", "model_name", default="model", show_default=True, help="The model's name in the file.")
@click.option("--folder", type=FOLDER, help="Folder for the swap file.  [default: temporary files, without a GPU]")
@click.option(
    "--warm-up", default=1, show_default=True, type=click.IntRange(min=0), help="Steps before the recorded one."
)
@as_json
def record(
    step: str,
    arguments: tuple[str, ...],
    out: Path | None,
    model_name: str,
    folder: Path | None,
    warm_up: int,
    as_json: bool,
) -> None:
    """Record one training step, op by op, in the least memory it can run in.

    FILE.py is an ordinary script that defines `model`, the network; FUNCTION, which takes no arguments and runs forward
    and backward, as inside `with ooc.step():` in a training loop; and optionally `optimizer`, which is stepped after
    it, so that its state is counted. See examples/record_me.py:

    \b
        model = MyNetwork().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        def step():
            loss_fn(model(x), y).backward()

    The part of FILE.py under `if __name__ == "__main__":` is not run. Arguments after `--` are passed to it:
    `outcore record train.py:step -- --lr 0.1`.
    """
    path, function_name = file_and_function(step)
    with show_progress() as tell:
        tell(f"loading {path}", 0.0)
        found = _record(path, function_name, arguments, model_name, folder, warm_up, tell)
    out = out or Path(f"{function_name}.trace.json")
    _save(found, out)
    facts = {"trace": str(out), **_facts_of_trace(found)}
    show(facts if as_json else _trace_table(facts))


def _record(
    path: Path,
    function_name: str,
    arguments: tuple[str, ...],
    model_name: str,
    folder: Path | None,
    warm_up: int,
    tell: Callable[[str, float], None],
) -> Trace:
    import torch

    from outcore.limit import limit

    names = names_in(path, arguments)
    model, optimizer = names.get(model_name), names.get("optimizer")
    if not isinstance(model, torch.nn.Module):
        raise OutcoreError(f"{path} defines no torch.nn.Module named {model_name!r}; define it or name it with --model")
    step = step_in(names, path, function_name)
    ooc = limit(model, "100%", disk=folder, cache=False)
    try:
        for index in range(warm_up + 1):
            tell("recording" if index == warm_up else "warming up", index / (warm_up + 1))
            ooc.kinds.clear()  # every step is recorded; the last one has optimizer state and warm kernels
            with ooc.step():
                step()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        if ooc.trace is None or not ooc.trace.ticks:
            raise OutcoreError(
                f"{function_name} saved nothing for a backward pass; it must call the model and backward()"
            )
        if not any(tick.kind == "unpack" for tick in ooc.trace.ticks):
            raise OutcoreError(f"{function_name} ran no backward pass; call backward() on the loss in it")
        return ooc.trace
    finally:
        ooc.close()


def _facts_of_trace(trace: Trace) -> dict[str, Any]:
    from outcore.planning.trace_index import index_of

    trace_index = index_of(trace)
    return {
        "model": trace.model,
        "fingerprint": trace.fingerprint,
        "device": trace.device,
        "num_ops": len(trace.ops),
        "num_saved": len(trace_index.packs),
        "saved_bytes": sum(trace_index.value_bytes[value] for value in trace_index.evictable),
        "before_bytes": trace.before_bytes,
        "step_s": trace_index.total_s,
    }


def _trace_table(facts: dict[str, Any]) -> Table:
    from outcore.reporting.text import rows_table
    from outcore.units import format_bytes, format_seconds

    rows = [
        ("ops", str(facts["num_ops"])),
        (
            "values autograd saves",
            f"{facts['num_saved']}, of which {format_bytes(facts['saved_bytes'])} can be evicted",
        ),
        ("in use before the step", format_bytes(facts["before_bytes"])),
        ("seconds of its ops", format_seconds(facts["step_s"])),
        ("saved as", facts["trace"]),
    ]
    return rows_table(f"outcore: a step of {facts['model']} on {facts['device']}", rows)


@main.command(short_help="Plan a recorded step for a machine and a budget.")
@click.argument("trace", type=FILE)
@click.option("--machine", "machine_name", required=True, help=f"A file from `outcore machine -o`, or {NAMES}.")
@click.option("--memory", required=True, help='Device memory for the whole step: "16GiB", "80%", or bytes.')
@click.option("--host", help="Pinned host memory to swap to.  [default: the machine's]")
@click.option("--disk", help="Disk space to swap to.  [default: the machine's]")
@click.option("--planner", default="hybrid", show_default=True, help="The planner; an unknown name lists all.")
@click.option("-o", "--out", type=OutFile(), help="Save the plan, for `outcore explain` and limit(plan=...).")
@html_option
@perfetto_option
@as_json
def plan(
    trace: Path,
    machine_name: str,
    memory: str,
    host: str | None,
    disk: str | None,
    planner: str,
    out: Path | None,
    html: Path | None,
    perfetto: Path | None,
    as_json: bool,
) -> None:
    """Plan a recorded step for a machine and a budget: what to keep, swap and recompute.

    This needs neither torch nor the machine, only TRACE, from `outcore record`, and a machine file or the name of a
    machine. If no plan fits, the error says how many bytes would suffice.
    """
    from outcore.planning import plan as make_plan
    from outcore.planning.preparing import prepare
    from outcore.reporting.text import plan_table
    from outcore.units import parse_bytes
    from outcore.values import Budget, Trace

    target = machine_from(machine_name)
    budget = Budget(
        parse_bytes(memory, of_bytes=target.device_bytes),
        target.host_bytes if host is None else parse_bytes(host, of_bytes=target.host_bytes),
        target.disk_bytes if disk is None else parse_bytes(disk, of_bytes=target.disk_bytes),
    )
    recorded = Trace.load(trace)
    with show_progress() as tell:
        tell(f"planning ({planner})", 0.0)
        try:
            made = make_plan(recorded, target, budget, planner=planner, progress=tell)
        except BudgetTooSmall as error:
            raise error.on(target.device) from None
        prepared = prepare(recorded, made, target, detail=True)
    predicted = prepared.predicted
    _save(made, out)
    _write_pages(html, perfetto, target, recorded, prepared)
    show(
        _facts_of_plan(made, predicted)
        if as_json
        else plan_table(budget, recorded, made, predicted, where=target.device)
    )


def _facts_of_plan(made: Plan, predicted: Timeline) -> dict[str, Any]:
    return {
        "fingerprint": made.fingerprint,
        "planner": made.planner,
        "budget_bytes": made.budget.device_bytes,
        "predicted_step_s": predicted.step_s,
        "predicted_peak_bytes": predicted.peak_bytes,
        "peak_at": predicted.peak_at,
        "in_core_step_s": made.in_core_step_s,
        "over_in_core": predicted_figures(made, predicted).over_in_core,
        "in_core_peak_bytes": made.in_core_peak_bytes,
        "bound_step_s": made.bound_step_s,
        "stall_s": predicted.stall_s,
        "recompute_s": predicted.recompute_s,
        "kept_bytes": predicted.kept_bytes,
        "swapped_bytes": predicted.swapped_bytes,
        "recomputed_bytes": predicted.recomputed_bytes,
        "host_bytes": predicted.host_peak_bytes,
        "disk_bytes": predicted.disk_peak_bytes,
        "num_kept": made.count("keep"),
        "num_swapped": made.count("swap"),
        "num_recomputed": made.count("recompute", "remake"),
    }


@main.command(short_help="Show what a plan does with every saved value, and why.")
@click.argument("plan_file", metavar="PLAN", type=FILE)
@click.option("--trace", "trace_file", type=FILE, required=True, help="The trace that the plan was made for.")
@click.option("--machine", "machine_name", help="The machine of the plan, as there; adds the seconds of copies.")
@click.option("--top", default=15, show_default=True, type=click.IntRange(min=1), help="Rows per table.")
@html_option
@perfetto_option
@as_json
def explain(
    plan_file: Path,
    trace_file: Path,
    machine_name: str | None,
    top: int,
    html: Path | None,
    perfetto: Path | None,
    as_json: bool,
) -> None:
    """Show what a plan does with every saved value: decision, bytes, seconds and reason, and the sums per module."""
    from outcore.planning.preparing import as_planned, prepare
    from outcore.reporting.explanation import by_module
    from outcore.reporting.explanation import explain as explain_values
    from outcore.reporting.text import module_table, value_table
    from outcore.values import Plan, Trace

    made, recorded = Plan.load(plan_file), Trace.load(trace_file)
    target = machine_from(machine_name) if machine_name is not None else None
    explained = explain_values(as_planned(recorded, made), made, target)
    shares = by_module(explained)
    if html is not None or perfetto is not None:
        if target is None:
            raise OutcoreError("a page needs the seconds of copies; give the machine of the plan with --machine")
        _write_pages(html, perfetto, target, recorded, prepare(recorded, made, target, detail=True))
    if as_json:
        modules = [{**dataclasses.asdict(share), "bytes": share.bytes} for share in shares]
        show({"planner": made.planner, "modules": modules, "values": [dataclasses.asdict(item) for item in explained]})
    else:
        show(module_table(shares, top), value_table(explained, top))


@main.command(short_help="Train in a third of the memory, and compare every bit.")
@click.option("--memory", help='Budget: "100MiB", bytes, or a share of what the step needs.  [default: a third of it]')
@click.option("--steps", type=click.IntRange(min=5), help="Training steps of each run.  [default: 10; 16 on a GPU]")
@click.option("--planner", default="hybrid", show_default=True, help="The planner; an unknown name lists all.")
@click.option("--folder", type=FOLDER, help="Folder for the swap file.  [default: temporary files, without a GPU]")
@html_option
@perfetto_option
@as_json
def demo(
    memory: str | None,
    steps: int | None,
    planner: str,
    folder: Path | None,
    html: Path | None,
    perfetto: Path | None,
    as_json: bool,
) -> None:
    """Train a small ResNet in a third of the memory it needs, and check that every bit is the same.

    Runs on the GPU if there is one, otherwise on the CPU with a swap file. Takes less than a minute on two cores. The
    exit code is not 0 if a bit differs or the budget was exceeded.
    """
    from outcore.demo import run_demo
    from outcore.planning.preparing import Planned, simulate
    from outcore.reporting.text import demo_table

    with show_progress() as tell:
        found = run_demo(memory, num_steps=steps, planner=planner, disk=str(folder) if folder else None, tell=tell)
    if html is not None or perfetto is not None:
        target, recorded, made, schedule, measured = found.values
        planned = Planned(made, schedule, simulate(recorded, schedule, target, detail=True))
        _write_pages(html, perfetto, target, recorded, planned.with_trace(recorded), measured, found.in_core_step_s)
    facts = found.facts()
    show(facts if as_json else demo_table(facts))
    if not found.bitwise_equal:
        raise OutcoreError("loss or gradients differ from plain PyTorch's; this is a bug, please report the table")
    if not found.in_budget:
        raise OutcoreError("the measured peak is over the budget; this is a bug, please report the table")


# --- files, tables, progress ------------------------------------------------------------------------------------------


def _save(value: Any, out: Path | None) -> None:
    if out is not None:
        write_file(out, value.to_json())


def _write_pages(
    html: Path | None,
    perfetto: Path | None,
    target: Machine,
    recorded: Trace,
    prepared: PreparedStep,
    measured: Timeline | None = None,
    in_core_step_s: float = 0.0,
) -> None:
    from outcore.reporting.curve import curve_of
    from outcore.reporting.page import page
    from outcore.reporting.perfetto import trace_events

    if html is not None:
        write_file(html, page(target, recorded, prepared, measured, in_core_step_s))
    if perfetto is not None:
        curve = curve_of(prepared.trace, prepared.schedule, target)
        write_file(perfetto, trace_events([("predicted", prepared.predicted, curve)]))


def show_progress() -> AbstractContextManager[Callable[[str, float], None]]:
    from outcore.reporting.progress import progress

    return progress()
