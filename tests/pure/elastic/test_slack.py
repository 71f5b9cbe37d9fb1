"""Rules of benchmarks/elastic_slack.py, played on steps whose answer is known."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.elastic_slack import read_recording, replay, replay_ahead, replay_slack, run_all, sets_of

ROOT = Path(__file__).parents[3]
SLEEPS = [sys.executable, "-c", "import time; time.sleep(30)"]


@pytest.mark.parametrize("slack", [1, 4, 16])
def test_a_core_that_stays_slow_sets_the_pace_whatever_the_slack(slack: int) -> None:
    steps_s = [[1.0] * 400, [1.0] * 400, [2.0] * 400]
    assert replay_slack(steps_s, slack) == pytest.approx(3 / 2.0)


def test_slack_evens_out_a_step_that_is_late_now_and_then() -> None:
    """Each is late by 4 once in 16 steps, in another period than the other: in step they wait for both."""
    one, other = [[1.0] * 3 + [5.0] + [1.0] * 12, [1.0] * 11 + [5.0] + [1.0] * 4]
    steps_s = [one * 50, other * 50]
    assert replay_slack(steps_s, 0) == pytest.approx(2 * 16 / 24.0)
    assert replay_slack(steps_s, 16) == pytest.approx(2 * 16 / 20.0, rel=0.01)


def test_who_may_go_ahead_loses_nothing_and_who_may_not_far_enough_waits() -> None:
    """A core three times as fast takes 12 steps where the other takes 4: eight ahead."""
    steps_s = [[1.0] * 1200, [3.0] * 400]
    assert replay_ahead(steps_s, 8) == pytest.approx(1 + 1 / 3, rel=0.01)
    assert replay_ahead(steps_s, 2) == pytest.approx((6 + 4) / 12, rel=0.02)
    assert replay_ahead(steps_s, 0) == pytest.approx(replay_slack(steps_s, 1), rel=0.02)


def test_efficiencies_are_over_what_each_core_did_alone() -> None:
    def row(number: int, core: int, who: list[int], step_s: float) -> dict[str, object]:
        return {"set": number, "core": core, "who": who, "marks": [step_s * mark for mark in range(101)]}

    rows = [row(0, 0, [0], 1.0), row(1, 1, [1], 1.0), row(2, 0, [0, 1], 1.0), row(2, 1, [0, 1], 2.0)]
    found = replay(rows)
    (size,) = found["by_size"]
    assert found["lone_step_s"] == 1.0
    assert size["apart"]["median"] == pytest.approx(0.75)
    assert size["slowest"]["median"] == size["slack 8"]["median"] == pytest.approx(0.5)
    assert size["ahead 8"]["median"] == pytest.approx(0.75, rel=0.02)


@pytest.mark.parametrize("num_cores", [1, 2, 4, 16])
def test_every_core_is_alone_first_and_last(num_cores: int) -> None:
    cores = list(range(num_cores))
    sets = [who for who, _ in sets_of(cores)]
    assert sets[:num_cores] == sets[-num_cores:] == [[core] for core in cores]
    assert cores in sets


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        ({"core 0": SLEEPS}, r"core 0 did not end within 0 s: .* quieter machine"),
        ({"core 0": [sys.executable, "-c", "raise SystemExit(3)"], "core 1": SLEEPS}, r"core 0 ended with code 3: .*"),
    ],
)
def test_when_one_does_not_end_well_none_is_left_and_a_sentence_says_who(
    commands: dict[str, list[str]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def remember(command: list[str]) -> subprocess.Popen[bytes]:
        started.append(popen(command))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", remember)
    began_s = time.monotonic()
    with pytest.raises(SystemExit, match=words):
        run_all(commands, 0.3 if len(commands) == 1 else 20)
    assert time.monotonic() - began_s < 10
    assert len(started) == len(commands)
    assert all(process.returncode is not None for process in started)


def test_those_who_end_well_are_waited_for(tmp_path: Path) -> None:
    run_all({name: [sys.executable, "-c", f"open({str(tmp_path / name)!r}, 'w')"] for name in ("a", "b")}, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_the_results_are_those_of_the_recording_they_name(tmp_path: Path) -> None:
    results = json.loads((ROOT / "benchmarks/results/elastic-slack_x86_64-16cpu_20261116.json").read_text())
    recording = ROOT / "benchmarks/results" / results["recording"].partition(":")[0]
    found = json.loads(json.dumps(replay(read_recording(recording))))
    assert found["by_size"] == results["by_size"]
    plain = tmp_path / "plain.json"
    plain.write_bytes(gzip.decompress(recording.read_bytes()))
    assert read_recording(plain) == read_recording(recording)
