"""Timeline -> trace-event JSON, for ui.perfetto.dev or chrome://tracing.

One track per stream, one counter for device memory; a second process beside it where there is a second timeline.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from outcore.reporting.curve import Curve
from outcore.values import Timeline

STREAMS = ("compute", "swap_out", "swap_in")


def trace_events(timelines: Iterable[tuple[str, Timeline, Curve]]) -> str:
    """JSON text of (name, timeline with its spans, memory curve), each a process of its own."""
    events: list[dict[str, Any]] = []
    for process, (name, timeline, curve) in enumerate(timelines, start=1):
        events.append(_name(process, 0, "process_name", name))
        events += [_name(process, thread, "thread_name", stream) for thread, stream in enumerate(STREAMS, start=1)]
        events += _spans(process, timeline)
        events += _memory(process, curve)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _name(process: int, thread: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _spans(process: int, timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "pid": process,
            "tid": STREAMS.index(span.stream) + 1,
            "name": span.what,
            "ts": span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
        }
        for span in timeline.spans
    ]


def _memory(process: int, curve: Curve) -> list[dict[str, Any]]:
    return [
        {"ph": "C", "pid": process, "name": "device memory", "ts": at_s * 1e6, "args": {"bytes": num_bytes}}
        for at_s, num_bytes in curve
    ]
