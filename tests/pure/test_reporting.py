"""Explanations, curves, the page and the Perfetto file: they say what the plan and the timeline say."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from outcore.errors import PlanMismatch
from outcore.planning import lower, plan, simulate
from outcore.reporting.curve import curve_of, in_core_curve
from outcore.reporting.explanation import by_module, explain
from outcore.reporting.page import page
from outcore.reporting.perfetto import trace_events
from outcore.reporting.picture import NARROW, Clock
from outcore.reporting.text import report
from outcore.units import MIB, format_bytes
from outcore.values import Budget, Machine, Op, Plan, PreparedStep, Schedule, Storage, Tick, Timeline, Trace, Value

MACHINE = Machine("pretend", 64 * MIB, 64 * MIB, 0, 100.0 * MIB, 100.0 * MIB, 1.0, 1.0, copy_latency_s=0.0)


def small_trace(num_layers: int = 6) -> Trace:
    """A chain of layers: each reads the last output, makes 1 MiB and saves it; backward asks for them newest first."""
    ops: list[Op] = []
    ticks: list[Tick] = []
    slot = 0
    for layer in range(num_layers):
        cheap = layer % 2
        name, seconds = ("aten.relu.default", 0.001) if cheap else ("aten.convolution.default", 0.05)
        ops.append(Op(slot, name, "forward", seconds, (layer,), (layer + 1,), 0, "pure", f"layer{layer}"))
        ticks.append(Tick(slot + 1, "pack", layer + 1, layer, -1, (512, 512), "float32"))
        slot += 2
    born = [0, *(2 * layer for layer in range(num_layers))]
    dies = [0, *(min(2 * layer + 2, slot) for layer in range(num_layers))]
    for layer in reversed(range(num_layers)):
        ticks.append(Tick(slot, "unpack", layer + 1, layer, slot + 1))
        ops.append(Op(slot + 1, "aten.backward<x>.default", "backward", 0.05, (), ()))
        slot += 2
    storages = (Storage(MIB, 0, slot - 1, external=True), *(Storage(MIB, b, d) for b, d in zip(born[1:], dies[1:])))
    values = (Value(0, 0, -1), *(Value(layer + 1, 0, layer) for layer in range(num_layers)))
    return Trace(tuple(ops), values, storages, tuple(ticks), MIB, model="Chain")


def made(memory_bytes: int = 4 * MIB) -> tuple[Trace, Plan, Schedule, Timeline]:
    trace = small_trace()
    decided = plan(trace, MACHINE, Budget(memory_bytes, 64 * MIB))
    schedule = lower(trace, decided, MACHINE)
    return trace, decided, schedule, simulate(trace, schedule, MACHINE, detail=True)


def test_explained_bytes_add_up_to_the_timeline() -> None:
    trace, decided, _, predicted = made()
    explained = explain(trace, decided, MACHINE)
    assert len(explained) == 6
    for decision, num_bytes in (
        ("keep", predicted.kept_bytes),
        ("swap", predicted.swapped_bytes),
        ("recompute", predicted.recomputed_bytes),
    ):
        assert sum(item.bytes for item in explained if item.decision == decision) == num_bytes
    assert predicted.kept_bytes < 6 * MIB  # something was decided at all


def test_explained_seconds_are_reruns_and_copies() -> None:
    trace = small_trace()
    decisions = {1: "keep", 2: "recompute", 3: "swap", 4: "recompute", 5: "keep", 6: "keep"}
    decided = Plan(trace.fingerprint, "by hand", Budget(64 * MIB, 64 * MIB), decisions, MIB)  # type: ignore[arg-type]
    seconds = {item.value: item.seconds for item in explain(trace, decided, MACHINE)}
    assert seconds == pytest.approx({1: 0.0, 2: 0.001, 3: 0.02, 4: 0.001, 5: 0.0, 6: 0.0})
    schedule = lower(trace, decided, MACHINE)
    assert simulate(trace, schedule, MACHINE).recompute_s == pytest.approx(0.002)
    unknown = {item.value: item.seconds for item in explain(trace, decided)}
    assert unknown[3] is None
    shares = {share.module: share for share in by_module(explain(trace, decided, MACHINE))}
    assert shares["layer2"].swapped_bytes == MIB
    assert shares["layer2"].copy_s == pytest.approx(0.02)
    assert shares["layer1"].recompute_s == pytest.approx(0.001)


def test_a_plan_of_another_step_is_refused() -> None:
    _, decided, _, _ = made()
    with pytest.raises(PlanMismatch, match="give the trace"):
        explain(small_trace(5), decided)


def test_the_curve_reaches_the_predicted_peak_and_ends_with_the_step() -> None:
    trace, decided, schedule, predicted = made()
    curve = curve_of(trace, schedule, MACHINE)
    assert max(level for _, level in curve) == predicted.peak_bytes
    assert curve[-1][0] == pytest.approx(predicted.step_s)
    assert [at_s for at_s, _ in curve] == sorted(at_s for at_s, _ in curve)
    assert max(level for _, level in in_core_curve(trace, MACHINE)) == decided.in_core_peak_bytes


class Reader(HTMLParser):
    """Checks that every tag is closed, and collects the text and what would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.foreign: list[str] = []
        self.num_boxes = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.num_boxes += tag == "rect"
        if tag not in ("meta", "line"):
            self.open.append(tag)
        self.foreign += [name for name, _ in attrs if name in ("src", "href", "srcset")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    assert reader.foreign == []
    assert "<script" not in html
    return reader


def test_the_page_stands_alone_and_shows_what_was_planned() -> None:
    trace, decided, schedule, predicted = made()
    reader = read(page(MACHINE, trace, PreparedStep(trace, decided, schedule, predicted)))
    text = " ".join(reader.text)
    assert "Chain in 4.00 MiB" in text
    assert f"in-core {format_bytes(decided.in_core_peak_bytes)}" in text
    assert "layer3" in text
    assert "convolution" in text
    assert reader.num_boxes >= 3 + len({span.stream for span in predicted.spans})
    measured = Timeline(True, 9.5, 3 * MIB, "")
    assert "9.50 s" in " ".join(
        read(page(MACHINE, trace, PreparedStep(trace, decided, schedule, predicted), measured)).text
    )


def test_names_are_escaped_in_the_page() -> None:
    trace, decided, schedule, predicted = made()
    html = page(MACHINE, trace, PreparedStep(trace, decided, schedule, predicted))
    assert "backward&lt;x&gt;" in html
    assert "backward<x>" not in html


def test_perfetto_events_are_the_spans() -> None:
    trace, _, schedule, predicted = made()
    events = json.loads(trace_events([("predicted", predicted, curve_of(trace, schedule, MACHINE))]))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in spans] == [
        (span.what, pytest.approx(span.start_s * 1e6), pytest.approx((span.end_s - span.start_s) * 1e6))
        for span in predicted.spans
    ]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {
        "compute",
        "swap_out",
        "swap_in",
    }
    assert max(event["args"]["bytes"] for event in events if event["ph"] == "C") == predicted.peak_bytes


def test_the_report_names_what_is_missing_and_what_is_there() -> None:
    trace, decided, _, predicted = made()
    budget = decided.budget
    assert "nothing recorded yet" in report(budget, None, None, None, None, where="cpu")
    assert "planned when the next step begins" in report(budget, trace, None, None, None, where="cpu")
    text = report(budget, trace, decided, predicted, None, where="cpu")
    assert "measured" not in text
    text = report(budget, trace, decided, predicted, Timeline(True, 9.5, 3 * MIB, "", reserved_bytes=MIB), where="cpu")
    assert "9.50 s" in text
    assert "reserved by the allocator" in text


@pytest.mark.parametrize("end_s", [0.0001, 0.466, 0.99, 1.01, 3.7, 70.0])
def test_the_clock_has_a_second_mark_on_a_phone_too(end_s: float) -> None:
    assert len(Clock(end_s, NARROW, left=76, right=8).marks_s()) >= 2
