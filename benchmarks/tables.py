"""Generates the tables of the README and of docs/results.md, and the plot, from benchmarks/results/*.json.

The newest file of each question and hardware is used. `make tables` writes; `--check` only tests whether the README
agrees with the results. `python -m benchmarks.tables --help`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from statistics import median

import click

from benchmarks import claim_tables
from benchmarks import headline as readme_picture
from benchmarks.markdown import NONE_YET, Result, Row, markdown
from benchmarks.plot import plot as drawn_plot
from benchmarks.prediction import judged
from outcore.units import format_bytes, format_seconds

ROOT = Path(__file__).parents[1]
OURS = ("hybrid", "swap", "pooch", "swap-all", "exact")


@click.command()
@click.option("--results", type=click.Path(path_type=Path), default=ROOT / "benchmarks" / "results")
@click.option("--readme", type=click.Path(path_type=Path), default=ROOT / "README.md")
@click.option("--plot", type=click.Path(path_type=Path), default=ROOT / "docs" / "results.svg")
@click.option("--picture", type=click.Path(path_type=Path), default=ROOT / "docs" / "headline.svg")
@click.option("--figures", type=click.Path(path_type=Path), default=ROOT / "docs" / "results.md")
@click.option("--advice", type=click.Path(path_type=Path), default=ROOT / "docs" / "is-it-for-you.md")
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 if the README is not up to date.")
def main(results: Path, readme: Path, plot: Path, picture: Path, figures: Path, advice: Path, check: bool) -> None:
    """Fill the marked sections of the README and of docs/results.md from the results, and draw the pictures."""
    found, more = newest(results, TABLES), newest(results, FIGURES)
    before = {path: path.read_text() if path.exists() else "" for path in (readme, figures, advice, picture, plot)}
    after = dict(before)
    after[readme] = fill(fill(before[readme], "headline", headline(found)), "summary", summary(found))
    slowdowns = _slowdowns(found)
    after[picture] = readme_picture.picture(slowdowns) if slowdowns else ""
    after[plot] = drawn_plot(slowdowns) if slowdowns else ""
    compared = (
        f"{markdown(*readme_picture.comparison(slowdowns))}\n\n{conditions(slowdowns)}" if slowdowns else NONE_YET
    )
    after[advice] = fill(before[advice], "comparison", compared)
    after[figures] = fill(before[figures], "results", tables(found, plot, figures))
    for name, (question, table) in SECTIONS.items():
        shown = [(table(result), result) for result in more if result["question"] == question]
        parts = [f"{text}\n\n{conditions(result)}" for text, result in shown if text]
        after[figures] = fill(after[figures], name, "\n\n".join(parts) or NONE_YET)
    after[figures] = fill(after[figures], "accuracy", accuracy_tables(results))
    for name, (file, table) in claim_tables.NAMED.items():
        after[figures] = fill(after[figures], name, claim_tables.of_file(results / file, table))
    if check:
        stale = [path.name for path in before if before[path] != after[path]]
        sys.exit(f"{' and '.join(stale)} is not what the results say; run `make tables`" if stale else 0)
    for path, text in after.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(f"{readme.name}: {len(found)} results")


def newest(folder: Path, questions: Collection[str]) -> list[Result]:
    """The newest result of each of these questions and hardware, with its file's name, in the order of questions."""
    found: dict[tuple[str, str], Result] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem.rpartition("_")[2]):
        result = json.loads(path.read_text())
        question = result.setdefault("question", path.stem.partition("_")[0])
        if question in questions:
            found[question, "_".join(path.stem.split("_")[1:-1])] = {**result, "file": path.name}
    return sorted(found.values(), key=lambda result: list(questions).index(result["question"]))


def fill(text: str, name: str, content: str) -> str:
    """Replaces what stands between <!-- name --> and <!-- /name -->."""
    opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(opening)
    _, closed, after = rest.partition(closing)
    if not found or not closed:
        raise click.ClickException(f"the page has no {opening} ... {closing}; put them where the text belongs")
    return f"{before}{opening}\n{content}\n{closing}{after}"


def headline(found: list[Result]) -> str:
    """One measured number with its conditions: the first network of the first result that has ours."""
    for result in found:
        if result["question"] == "slowdown":
            for row in measured(result):
                if row["method"] in OURS:
                    return _slowdown_headline(result, row)
        if result["question"] == "demo":
            return (
                f"A ResNet that needs {format_bytes(result['in_core_peak_bytes'])} in-core trains in "
                f"**{format_bytes(result['peak_bytes'])}**, every loss and gradient "
                f"{'bitwise equal' if result['bitwise_equal'] else 'DIFFERENT'} ({conditions(result)})."
            )
    return NONE_YET


def _slowdown_headline(result: Result, row: Row) -> str:
    in_core = [
        other for other in measured(result) if (other["network"], other["method"]) == (row["network"], "in-core")
    ]
    needs = f" instead of {in_core[0]['peak_gib']:.1f} GiB" if in_core else ""
    name = readme_picture.TITLES.get(row["network"], row["network"])
    where = str(result.get("hardware", "")).upper()
    return (
        f"**{name}, batch {row['batch']}, trains in {row['memory_gib']:g} GiB{needs}, and a step takes "
        f"{100 * row['slowdown']:.1f} % longer** on one {where}."
    )


def conditions(result: Result) -> str:
    machine = result.get("machine") if isinstance(result.get("machine"), dict) else {}
    facts = [result.get("hardware") or result.get("device") or (machine or {}).get("device", "")]
    facts += [f"{result['num_threads']} threads"] if "num_threads" in result else []
    facts += [f"torch {result.get('torch') or (machine or {}).get('torch', '?')}", result.get("date", "")]
    facts += [f"`benchmarks/results/{result['file']}`"]
    return ", ".join(fact for fact in facts if fact and fact != "torch ?")


def measured(result: Result) -> list[Row]:
    return [row for row in result["rows"] if row.get("step_s") is not None]


NOT_WAITING = (
    "`step` waits for the device after every step, as a loop does that logs each loss; `not waiting` is the same "
    "figure for a loop that does not wait (older rows have none). `compile` runs other kernels in another layout and "
    "gives other numbers; its own in-core is the row `compile`. `compile-budget` was asked for the budget's share of "
    "the activations (`:0`: for none), and keeps the budget for VGG-16 only. `accumulate:4` gives other numbers where "
    "there is batch normalization, which sees a quarter of the batch; where that is all right, it is the cheapest way "
    "out. The plot joins outcore's budgets ([with their figures](#time-against-budget-measured)), which may be of an "
    "earlier run than the table's rows. Times are medians of ten steps, or of three where a step takes longer than "
    "1.5 s or, for peers, is not waited for. What does not run has its error in the last column but one: Llama saves "
    "more than 80 GiB, and 74 GiB of the host's 125 GiB can be pinned, so that nothing which only offloads can hold "
    "it."
)


def summary(found: list[Result]) -> str:
    """The headline networks in one line each: in-core, the default planner in its budget, checkpointing."""
    result = _slowdowns(found)
    if result is None:
        return NONE_YET
    headings = ("training step", "plain PyTorch needs", "with outcore", "checkpointing every block")
    return f"{markdown(headings, readme_picture.lines(result))}\n\n{conditions(result)}"


def _slowdowns(found: list[Result]) -> Result | None:
    return next((result for result in found if result["question"] == "slowdown" and measured(result)), None)


def tables(found: list[Result], plot: Path, page: Path) -> str:
    if not found:
        return NONE_YET
    parts = [f"{TABLES[result['question']](result)}\n\n{conditions(result)}" for result in found]
    if any(result["question"] == "slowdown" and measured(result) for result in found):
        link = plot.resolve().relative_to(page.resolve().parent).as_posix()
        parts.insert(0, f"![step time against memory]({link})")
    return "\n\n".join(parts)


def _slowdown(result: Result) -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for row in result["rows"]:
            ours = row.get("method") in OURS
            name = f"**outcore, {row['method']}**" if ours else str(row.get("method", ""))
            budget = f"{row['memory_gib']:g}" if ours else "none"
            commit = row.get("commit") or result.get("commit", "")
            if row.get("step_s") is None:
                error = str(row.get("error", "")).partition(". ")[0][:100].replace("|", "/")
                yield row["network"], name, budget, "does not run", "", "", error, commit
                continue
            over, in_loop = (f"{100 * row[key]:+.1f} %" if key in row else "" for key in ("slowdown", "loop_slowdown"))
            step, peak = format_seconds(row["step_s"]), f"{row['peak_gib']:.1f}"
            yield row["network"], name, budget, step, over, in_loop, peak, commit

    headings = ("network", "method", "budget GiB", "step", "over in-core", "not waiting", "peak GiB", "commit")
    return f"{markdown(headings, rows())}\n\n{NOT_WAITING}"


def _matmul(result: Result) -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for row in result["rows"]:
            if not row.get("tflops"):
                continue
            pretend = row["method"].startswith("simulated")  # they sleep instead of multiplying: only balance is real
            rate = "" if pretend else f"{row['tflops']:.3g}"
            balance = f"{100 * row['balance']:.1f} %" if row.get("balance") else ""
            peak = f"{row['device_peak_gib']:.1f}" if row.get("device_peak_gib") else ""
            yield f"{row['m']} x {row['n']} x {row['k']}", row["dtype"], row["method"], rate, balance, peak

    return markdown(("product", "type", "method", "TFLOP/s", "balance", "device GiB"), rows())


def _demo(result: Result) -> str:
    row = (
        format_bytes(result["in_core_peak_bytes"]),
        format_bytes(result["budget_bytes"]),
        format_bytes(result["peak_bytes"]),
        "yes" if result["bitwise_equal"] else "NO",
    )
    headings = ("`outcore demo`: in-core peak", "budget", "measured peak", "bitwise equal")
    return markdown(headings, iter([row]))


TABLES: dict[str, Callable[[Result], str]] = {"slowdown": _slowdown, "matmul": _matmul, "demo": _demo}


def _over(row: Row) -> str:
    if row.get("over_in_core") is not None:
        return f"{100 * row['over_in_core']:+.1f} %"
    return f"does not fit: {row['needed_gib']:.1f} GiB" if row.get("needed_gib") else "does not fit"


def _mix(row: Row) -> tuple[str, str, str]:
    kept, swapped, recomputed = (row.get(f"{name}_gib") for name in ("kept", "swapped", "recomputed"))
    return tuple("" if size is None else f"{size:.1f}" for size in (kept, swapped, recomputed))  # type: ignore[return-value]


def _machines(result: Result) -> str:
    rows = (
        (f"{row['network']} {row['batch']}", row["machine"], row["method"], _over(row), *_mix(row))
        for row in result["rows"]
        if row["section"] == "machines"
    )
    headings = ("step", "machine", "planner", "over in-core", "kept GiB", "swapped GiB", "recomputed GiB")
    return markdown(headings, rows)


def _gap(result: Result) -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for row in result["rows"]:
            if row["section"] == "gap" and "ideal" in row:
                step = f"{row['network']} {row['batch']}"
                bound = f"{100 * row['bound_over_in_core']:+.1f} %" if "bound_over_in_core" in row else ""
                ideal = f"{100 * row['ideal']:+.1f} %" if row["ideal"] is not None else ""
                solve = format_seconds(row["solve_s"]) if row.get("over_in_core") is not None else ""
                yield step, f"{row['memory_gib']:g}", row["method"], _over(row), bound, ideal, solve

    return markdown(("step", "budget GiB", "planner", "over in-core", "bound", "ideal", "planning took"), rows())


def _cheaper(result: Result) -> str:
    """One row a step and budget, one column for each kind of rerun."""
    renamed = {"twins": "norm replays", "and echoes": "and common ops"}  # what files until 2026-11-18 call them
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in result["rows"]:
        if row["section"] == "cheaper":
            step = f"{row['network']} {row['batch']}", f"{row['memory_gib']:g}"
            found.setdefault(step, {})[renamed.get(row["reruns"], row["reruns"])] = _over(row)
    if not found:
        return ""
    kinds = tuple(next(iter(found.values())))
    return markdown(("step", "budget GiB", *kinds), ((*step, *cells.values()) for step, cells in found.items()))


def _growth(result: Result) -> str:
    rows = (
        (f"{row['num_ops']}", format_seconds(row["solve_s"]), _over(row), f"{100 * row['bound_over_in_core']:+.1f} %")
        for row in result["rows"]
        if row["section"] == "growth"
    )
    return markdown(("ops", "planning took", "over in-core", "bound"), rows)


def _overhead(result: Result) -> str:
    rows = (
        (row["network"], *(format_seconds(row[name]) for name in ("in_core_step_s", "step_s")), _slower(row))
        for row in measured(result)
    )
    return markdown(("network", "plain", "with outcore", "over"), rows)


def _slower(row: Row) -> str:
    return f"{100 * row['slowdown']:+.1f} %" if "slowdown" in row else ""


def _prediction(result: Result) -> str:
    rows = (
        (
            f"{row['network']}, {row['memory_gib']:g} GiB",
            row["method"],
            *(format_seconds(row[name]) for name in ("predicted_step_s", "step_s")),
            *(f"{100 * row[name]:+.1f} %" for name in ("step_error", "peak_error")),
            row.get("commit") or result.get("commit", ""),
        )
        for row in map(judged, measured(result))
        if "step_error" in row
    )
    return markdown(("network", "planner", "predicted step", "measured", "step off by", "peak off by", "commit"), rows)


def _budgets(result: Result) -> str:
    """The runs at several budgets, and the README's row where such a run was cut before that row's budget."""
    curves = result.get("curves", [])
    there = {(row["network"], row["memory_gib"]) for row in curves}
    networks = list(dict.fromkeys(row["network"] for row in curves))
    rows = [row for row in curves if row["method"] in ("hybrid", "checkpoint")]
    rows += [
        row
        for row in measured(result)
        if row["method"] == "hybrid" and row["network"] in networks and (row["network"], row["memory_gib"]) not in there
    ]
    rows.sort(key=lambda row: (networks.index(row["network"]), row["method"] not in OURS, -row["memory_gib"]))
    headings = ("network", "method", "budget GiB", "over in-core", "not waiting", "step off by", "peak GiB")
    return markdown((*headings, "allocator started over", "run", "commit"), map(_at_budget, rows)) if rows else ""


def _at_budget(row: Row) -> tuple[str, ...]:
    ours = row["method"] in OURS
    name = row["network"], row["method"], f"{row['memory_gib']:g}" if ours else "none"
    origin = row.get("run", ""), row.get("commit", "")
    if row.get("step_s") is None:
        error = str(row.get("error", "")).partition(":")[0].replace("|", "/")
        return (*name, f"failed: {error}", "", "", "", "", *origin)
    over, in_loop = (f"{100 * row[key]:+.1f} %" if key in row else "" for key in ("slowdown", "loop_slowdown"))
    off = f"{100 * judged(row)['step_error']:+.1f} %" if ours else ""
    # It is counted over the steps with a wait after each, and over as many without.
    restarts = f"{row['num_alloc_retries']} times in {2 * row['num_steps']} steps" if row["num_alloc_retries"] else ""
    return (*name, over, in_loop, off, f"{row['peak_gib']:.1f}", restarts, *origin)


def _fit(result: Result) -> str:
    rows = (
        (
            row["question"],
            f"{row['memory_gib']:g}",
            row["method"],
            f"{'' if row.get('complete', True) else 'at least '}{row['largest']}",
            f"{row['samples_per_s'] or 0:.0f}",
        )
        for row in result["rows"]
    )
    return markdown(("largest", "budget GiB", "method", "found", "samples/s there"), rows)


def _exactness(result: Result) -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for row in result["rows"]:
            ours, passes = row["ours"], sum(row["ours"].get("num_fused", {}).values())
            peaks = tuple(f"{side['peak_gib']:.1f}" for side in (row["in_core"], ours))
            same = "yes" if row["bitwise_equal"] else f"NO: {', '.join(row.get('differs', []))}"
            counts = str(row["num_steps"]), str(ours["num_digests"]), f"{ours['num_twins']} and {passes}"
            yield row["network"], f"{row['memory_gib']:g}", *counts, *peaks, same

    headings = ("network", "budget GiB", "steps", "tensors compared", "norms re-applied, ops in one pass")
    return markdown((*headings, "in-core GiB", "ours GiB", "bitwise equal"), rows())


def _recording(result: Result) -> str:
    """Seconds of recorded steps beside those of the step that swaps all, and of an offloading peer's first step."""
    swap_all_s = {row["network"]: row["step_s"] for row in measured(result) if row["method"] == "swap-all"}
    peers_s: dict[str, float] = {}
    for row in measured(result):
        if row["method"] in ("trl-offload", "save_on_cpu") and row.get("first_steps_s"):
            first_s = row["first_steps_s"][0]
            peers_s[row["network"]] = min(first_s, peers_s.get(row["network"], first_s))

    def rows() -> Iterator[tuple[str, ...]]:
        for row in measured(result):
            if row["method"] == "hybrid" and row.get("record_s") and row["network"] in swap_all_s:
                whole_s = swap_all_s[row["network"]]
                pinning = format_seconds(row["pinning_s"]) if row.get("pinning_s") else ""
                peer = format_seconds(peers_s[row["network"]]) if row["network"] in peers_s else ""
                first, later = format_seconds(row["first_record_s"]), format_seconds(row["record_s"])
                times = f"{row['record_s'] / whole_s:.1f}"
                yield row["network"], first, pinning, peer, later, format_seconds(whole_s), times

    headings = ("network", "first step", "of it pinning", "a peer's first step", "recorded later", "swap-all step")
    made = [*rows()]
    return markdown((*headings, "times that"), iter(made)) if made else ""


def _floors(result: Result) -> str:
    """The largest cap under which a forward did not run, and the least under which it did."""
    found: dict[str, dict[bool, Row]] = {}
    for row in result["rows"]:
        found.setdefault(row["network"], {})[row["runs"]] = row
    rows = (
        (name, *(f"{row['memory_gib']:g}" for row in (tried[False], tried[True])), f"{tried[True]['peak_gib']:.2f}")
        for name, tried in found.items()
        if len(tried) == 2
    )
    return markdown(("network", "does not run in GiB", "runs in GiB", "and holds GiB"), rows)


def _host(result: Result) -> str:
    """Steps whose forward the host queued in time, and those in which the device waited for it."""

    def rows() -> Iterator[tuple[str, ...]]:
        for name, method in dict.fromkeys((row["network"], row["method"]) for row in result["rows"]):
            steps = [row for row in result["rows"] if (row["network"], row["method"]) == (name, method)]
            least_s = min(row["forward_device_s"] for row in steps)
            for who, behind in (("ahead", False), ("behind", True)):
                found = [row for row in steps if (row["forward_host_s"] > least_s) is behind]
                keys = ("forward_host_s", "forward_device_s", "step_s")
                if found:
                    medians = (format_seconds(median(row[key] for row in found)) for key in keys)
                    yield name, method, who, str(len(found)), *medians

    headings = ("network", "method", "the host is", "steps", "forward on the host", "on the device", "step")
    return markdown(headings, rows())


ACCURACY = (  # the newest of each data set
    "tuning-accuracy-alone-digits_cpu2_20261117.json",
    "tuning-accuracy-pairs-mnist_cpu2_20261117.json",
    "tuning-accuracy-alone-cifar10_h200_20261117.json",
)


def accuracy_tables(folder: Path) -> str:
    """Seconds to a target of every method, seed by seed, and how ends compare."""

    def rows() -> Iterator[tuple[str, ...]]:
        for name in ACCURACY:
            found = (
                json.loads((folder / name).read_text())["sections"]["accuracy"]["rows"]
                if (folder / name).exists()
                else []
            )
            ends = {(row["data"], row["optimizer"]): row for row in found if row["method"] == "ends"}
            for row in found:
                if row["method"] not in ("ends", "search, fastest") and (row["runs"] or "error" in row):
                    yield _accuracy(row, ends.get((row["data"], row["optimizer"])))

    headings = (
        "data",
        "optimizer",
        "method",
        "setting",
        "target",
        "seconds to it",
        "in the end",
        "against the search's best",
    )
    made = [*rows()]
    files = ", ".join(f"`benchmarks/results/{name}`" for name in ACCURACY)
    return f"{markdown(headings, iter(made))}\n\n{files}" if made else NONE_YET


def _accuracy(row: Row, ends: Row | None) -> tuple[str, ...]:
    head = (
        row["data"],
        row["optimizer"],
        f"**{row['method']}**" if row["method"].startswith("outcore") else row["method"],
    )
    if "batch" not in row:
        error = row["error"].partition(":")[0]
        return (*head, "", "", {"ModuleNotFoundError": "not installed there"}.get(error, error), "", "")
    runs = [run["to_target_s"] for run in row["runs"]][:3]
    seconds = ", ".join("never" if second is None else f"{second:.2f}" for second in runs)
    final = f"{100 * row['mean_final_accuracy']:.1f} %" if row.get("mean_final_accuracy") else ""
    compared = ""
    if row["method"] == "outcore" and ends is not None:
        low, high = ends["low_points"], ends["high_points"]
        compared = f"{ends['mean_points']:+.2f} points ({low:+.2f} to {high:+.2f}, {ends['num_pairs']} pairs)"
    return (*head, f"{row['batch']} at {row['lr']:.2g}", f"{100 * row['target']:g} %", seconds, final, compared)


# What stands on docs/results.md: section -> the question whose results fill it, and how.
def _off(figures: dict[str, float], against: str = "measured") -> str:
    if against not in figures:
        return ""
    return f"{100 * (figures['estimated'] / figures[against] - 1):+.1f} %"


def _estimates(result: Result) -> str:
    rows = (
        (
            row["network"],
            format_bytes(row["budget_bytes"]) if "budget_bytes" in row else f"{row['memory_gib']:g} GiB",
            _off(row["in_core_peak_bytes"]),
            _off(row["least_bytes"], "recorded"),
            _off(row["in_core_step_s"]),
            *(f"{100 * row['over_in_core'][name]:+.1f} %" for name in ("estimated", "measured")),
        )
        for row in result["rows"]
    )
    headings = ("network", "budget", "in-core peak", "least budget", "in-core step", "slowdown, estimated", "measured")
    return markdown(headings, rows)


SECTIONS: dict[str, tuple[str, Callable[[Result], str]]] = {
    "machines": ("planners", _machines),
    "gap": ("planners", _gap),
    "cheaper": ("planners", _cheaper),
    "growth": ("planners", _growth),
    "overhead": ("overhead", _overhead),
    "budgets": ("slowdown", _budgets),
    "prediction": ("prediction", _prediction),
    "recording": ("slowdown", _recording),
    "floors": ("floors", _floors),
    "host": ("host", _host),
    "fit": ("fit", _fit),
    "exactness": ("exactness", _exactness),
    "estimates": ("estimate", _estimates),
    **claim_tables.SECTIONS,
}
FIGURES = tuple(dict.fromkeys(question for question, _ in SECTIONS.values()))


if __name__ == "__main__":
    main()
