"""`outcore matmul`: plans a product, predicts its time, runs it and prints both; `--json` for programs."""

from __future__ import annotations

import json
import warnings
from typing import Any

import click

from outcore.errors import OutcoreError
from outcore.tiling.tiles import Gemm, Prediction, Rates, Tiles, plan_tiles
from outcore.units import format_bytes, format_rate, format_seconds, parse_bytes

DTYPES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


@click.command("matmul", short_help="Multiply matrices that need not fit on a device.")
@click.argument("m", type=click.IntRange(min=1))
@click.argument("n", type=click.IntRange(min=1))
@click.argument("k", type=click.IntRange(min=1))
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", show_default=True)
@click.option("--memory", help="Device memory the tiles may use, such as 8GiB. Default: 80 % of what is free.")
@click.option("--device", "devices", multiple=True, help="A device to use, such as cuda:0 or cpu; may be repeated.")
@click.option(
    "--a", "a_path", type=click.Path(exists=True, dir_okay=False), help="File of A (m x k, by rows, no header)."
)
@click.option("--b", "b_path", type=click.Path(exists=True, dir_okay=False), help="File of B (k x n). Default: random.")
@click.option("--out", "out_path", type=click.Path(dir_okay=False), help="File to write C to. Default: host memory.")
@click.option("--explain", is_flag=True, help="Print the plan: bytes, seconds and the bottleneck.")
@click.option("--plan-only", is_flag=True, help="Only plan. With --tflops and --link no device is needed.")
@click.option("--tflops", type=float, help="Plan for a device with this many TFLOP/s (with --link).")
@click.option("--link", help="Plan for a link with this many bytes per second each way, such as 55GB.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def matmul_command(**options: Any) -> None:
    """Multiply an M x K by a K x N matrix that need not fit on a device, and print the measured results."""
    try:
        given = _given_rates(options["tflops"], options["link"])
        if options["plan_only"] and given is not None:
            _print_plan(_plan_for(given, options), options["as_json"])
        else:
            _run(given, options)
    except OutcoreError as error:
        raise click.ClickException(str(error)) from error


def _given_rates(tflops: float | None, link: str | None) -> Rates | None:
    if tflops is None and link is None:
        return None
    if tflops is None or link is None:
        raise click.UsageError("give --tflops and --link together")
    link_bytes_per_s = float(parse_bytes(link))
    return Rates(tflops * 1e12, link_bytes_per_s, link_bytes_per_s)


def _plan_for(rates: Rates, options: dict[str, Any]) -> Tiles:
    if options["memory"] is None:
        raise click.UsageError("to plan for a card that is not here, give its --memory")
    element_bytes = DTYPES[options["dtype"]]
    on_disk = "".join(name for name in "ab" if options[f"{name}_path"]) + ("c" if options["out_path"] else "")
    m, n, k = options["m"], options["n"], options["k"]
    gemm = Gemm(m, n, k, element_bytes, element_bytes, element_bytes, max(4, element_bytes), on_disk=on_disk)
    return plan_tiles(gemm, rates, parse_bytes(options["memory"]))


def _print_plan(tiles: Tiles, as_json: bool) -> None:
    assert tiles.prediction is not None
    if as_json:
        click.echo(json.dumps(tiles.to_json()))
    else:
        click.echo("\n".join(describe(tiles, tiles.prediction)))


def _run(rates: Rates | None, options: dict[str, Any]) -> None:
    import torch

    from outcore.tiling.operands import FileMatrix
    from outcore.tiling.product import Job, TilingWarning

    dtype = getattr(torch, options["dtype"])
    m, n, k = options["m"], options["n"], options["k"]

    def operand(path: str | None, rows: int, cols: int) -> Any:
        if path is not None:
            return FileMatrix(path, (rows, cols), dtype)
        try:
            return torch.randn(rows, cols).to(dtype)
        except RuntimeError:  # PyTorch's error for a host without memory
            num_bytes = rows * cols * DTYPES["float32"]
            raise OutcoreError(
                f"a matrix of {rows} x {cols} takes {format_bytes(num_bytes)} of host memory to make, more than there "
                "is; give files with --a, --b and --out, or take a smaller product"
            ) from None

    a, b = operand(options["a_path"], m, k), operand(options["b_path"], k, n)
    out = None if options["out_path"] is None else FileMatrix.create(options["out_path"], (m, n), dtype)
    job = Job(a, b, out=out, memory=options["memory"], devices=options["devices"] or None, rates=rates)
    if options["plan_only"]:
        _print_plan(job.tiles, options["as_json"])
        return
    if (message := job.long_message) is not None:
        click.echo(f"Warning: {message}", err=True)
    if options["explain"] and not options["as_json"]:
        click.echo("\n".join(describe(job.tiles, job.prediction)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TilingWarning)  # it was printed above
        report = job.run(progress=False if options["as_json"] else None)
    if options["as_json"]:
        click.echo(json.dumps({"plan": job.tiles.to_json(), "measured": report.to_json()}))
        return
    click.echo(
        f"measured   {format_seconds(report.seconds)}, {report.flop_per_s / 1e12:.3g} TFLOP/s, "
        f"{format_bytes(report.bytes_in)} in, {format_bytes(report.bytes_out)} out"
        + (f", {format_seconds(report.pin_s)} to lock memory before" if report.pin_s else "")
    )
    for lane in report.lanes if len(report.lanes) > 1 else ():
        failed = f", failed: {lane.error}" if lane.error else ""
        click.echo(f"  {lane.name:<10} {lane.share:.1%} of the product in {lane.num_pieces} pieces{failed}")


def describe(tiles: Tiles, prediction: Prediction) -> list[str]:
    """Returns the plan as a few lines of text."""
    gemm = tiles.gemm
    moved_bytes = prediction.bytes_in + prediction.bytes_out
    share = moved_bytes / tiles.square_tiles_bytes
    flop_per_s = gemm.num_flop / prediction.seconds if prediction.seconds else 0.0
    in_rate = prediction.bytes_in / prediction.in_s if prediction.in_s else 0.0
    return [
        f"product    {gemm.m} x {gemm.n} x {gemm.k}, {gemm.num_flop / 1e12:.3g} Tflop",
        f"plan       {tiles.regime}",
        f"tiles      {tiles.num_rows} x {tiles.num_cols}, depth {tiles.depth}: {tiles.num_tasks} tasks",
        f"memory     {format_bytes(tiles.device_bytes)} of {format_bytes(tiles.budget_bytes)} on the device",
        f"traffic    {format_bytes(prediction.bytes_in)} in at {format_rate(in_rate)}, "
        f"{format_bytes(prediction.bytes_out)} out ({share:.2f} of what square tiles move)",
        f"predicted  {format_seconds(prediction.seconds)}, {flop_per_s / 1e12:.3g} TFLOP/s, "
        f"bound by {prediction.bound} (compute {format_seconds(prediction.compute_s)}, "
        f"in {format_seconds(prediction.in_s)}, out {format_seconds(prediction.out_s)})",
    ]
