from __future__ import annotations

from dataclasses import replace

import pytest

from outcore.errors import BadFile
from outcore.values import Action, Budget, Machine, Op, Plan, Schedule, Span, Storage, Tick, Timeline, Trace, Value
from outcore.values.codec import RENAMED

TRACE = Trace(
    ops=(Op(0, "aten.exp.default", "forward", 1e-3, (0,), (1,), replay="pure"),),
    values=(Value(0, 0, -1), Value(1, 0, 0)),
    storages=(Storage(64, 0, 2, external=True), Storage(64, 0, 1)),
    ticks=(Tick(1, "pack", 1, 0, -1, (4, 4), "float32"), Tick(2, "unpack", 1, 0, 2)),
    before_bytes=64,
)
SAMPLES = [
    TRACE,
    Machine("cpu", 1, 0, 1, 1.0, 1.0, 2.0, 2.0, given=("disk_bytes",)),
    Plan("abc", "swap", Budget(5), {1: "swap", 3: "recompute"}, 64, reasons={1: "cheap"}),
    Schedule("abc", (Action(0, "swap_out", 1, tier="host"), Action(1, "rerun", op=3, values=(1, 2))), {1: "swap"}),
    Timeline(True, 1.5, 7, "op 3", spans=(Span("compute", 0.0, 1.0, "x"),), memory=((0.0, 5), (1.0, 6))),
]


@pytest.mark.parametrize("value", SAMPLES, ids=lambda value: value.KIND)
def test_saved_and_read_back_is_the_same(value: Trace) -> None:
    assert type(value).from_json(value.to_json()) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ("[1, 2]", "not written by outcore"),
        (SAMPLES[1].to_json(), "this is a machine file; a trace file is expected"),
        (TRACE.to_json().replace('"version":2', '"version":99'), "version 99"),
        (TRACE.to_json().replace('"before_bytes":64', '"before_bytes":"x"'), "damaged"),
        (TRACE.to_json().replace('"kind"', '"kin"'), "damaged"),
        (TRACE.to_json().replace('"pack",', '"peck",', 1), "damaged"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(BadFile) as caught:
        Trace.from_json(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_fingerprint_knows_the_work_but_not_the_clock() -> None:
    slower = Trace.from_json(TRACE.to_json().replace("0.001", "0.9"))
    assert slower != TRACE
    assert slower.fingerprint == TRACE.fingerprint
    assert Trace.from_json(TRACE.to_json().replace("exp", "log")).fingerprint != TRACE.fingerprint
    assert Trace.from_json(TRACE.to_json().replace("float32", "float16")).fingerprint != TRACE.fingerprint


def test_files_of_version_1_are_read_with_their_old_names() -> None:
    norm = Op(0, "norm", "forward", 1.0, (0,), (1,), norm_replay=True, norm_replay_s=0.5, is_merged=True)
    trace = replace(TRACE, ops=(norm,))
    plan = Plan(trace.fingerprint, "hybrid", Budget(1), {}, 0, merges_ops=True)
    for made in (trace, plan, Schedule(trace.fingerprint, (), {}, merges_ops=True)):
        text = made.to_json().replace('"version":2', '"version":1')
        for old, new in RENAMED.items():
            text = text.replace(f'"{new}"', f'"{old}"')
        assert "norm_replay" not in text
        assert "merge" not in text
        assert type(made).from_json(text) == made
