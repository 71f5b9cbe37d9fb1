"""Launching for real: pinned processes, ranks, restart of one, torchrun's restart of all, the commands, the example."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from outcore.elastic.cli import elastic_command, launch_command
from outcore.elastic.launch import LaunchPlan, launch
from outcore.elastic.place import poll

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(120)


def test_replicas_are_pinned_before_they_start_and_one_restarts_alone(tmp_path: Path) -> None:
    script = tmp_path / "replica.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, os, sys
            names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "OUTCORE_RESTART_COUNT")
            told = {name: os.environ[name] for name in names} | {"cores": sorted(os.sched_getaffinity(0))}
            with open(sys.argv[1], "a") as out:
                out.write(json.dumps(told) + "\\n")
            sys.exit(3 if told["RANK"] == "1" and told["OUTCORE_RESTART_COUNT"] == "0" else 0)
            """
        )
    )
    said: list[str] = []
    outcome = launch(LaunchPlan([sys.executable, str(script), str(tmp_path / "told")], 2), said.append)
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert outcome.statuses == {0: 0, 1: 0}
    assert outcome.num_restarts == 1
    assert sorted(one["RANK"] for one in told) == ["0", "1", "1"]
    cores = {one["RANK"]: one["cores"] for one in told}
    assert all(len(mine) == int(one["OMP_NUM_THREADS"]) for one in told for mine in [one["cores"]])
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(cores["0"]) & set(cores["1"])
    assert any("rank 1 ended with status 3" in line for line in said)


def test_a_replica_beyond_help_is_named_and_a_stopped_one_removed(tmp_path: Path) -> None:
    script = tmp_path / "replica.py"
    script.write_text(
        "import os, signal, sys\n"
        "if os.environ['RANK'] == '0': sys.exit(7)\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    said: list[str] = []
    plan = LaunchPlan([sys.executable, str(script)], 3, max_restarts=1, straggler_limit_s=1.0)
    outcome = launch(plan, said.append)
    assert outcome.lost == [0, 1]
    assert any("rank 0 failed with status 7; no restart left" in line for line in said)
    assert any("rank(s) [1] did not end within 1 s" in line for line in said)


def test_replicas_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "replica.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "(pathlib.Path(sys.argv[1]) / f'pid-{os.environ[\"RANK\"]}').write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    code = "import sys; from outcore.elastic.launch import LaunchPlan, launch; launch(LaunchPlan(sys.argv[1:], 2))"
    command = [sys.executable, "-c", code, sys.executable, str(script), str(tmp_path)]
    launcher = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        assert poll(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in (0, 1)), 40)
        assert poll(lambda: all((tmp_path / f"pid-{rank}").read_text() for rank in (0, 1)), 5)
    finally:
        launcher.kill()
        launcher.wait()
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)]
    assert poll(lambda: not any(psutil.pid_exists(pid) and is_running(pid) for pid in pids), 5)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_limit_ends_everything(tmp_path: Path) -> None:
    said: list[str] = []
    plan = LaunchPlan([sys.executable, "-c", "import time; time.sleep(60)"], 2, limit_s=0.5)
    assert launch(plan, said.append).lost == [0, 1]
    assert said[-1] == "the limit of 0.5 s passed; everything is ended"


def test_the_command_refuses_what_cannot_be_started(tmp_path: Path) -> None:
    result = CliRunner().invoke(launch_command, ["--groups", "2", str(tmp_path / "missing.py")])
    assert result.exit_code == 2
    assert "does not exist" in result.output


def test_the_example_learns_under_launch(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    example = str(ROOT / "examples/elastic_digits.py")
    launch_command.main(["--groups", "2", example, "--epochs", "12"], standalone_mode=False)
    told = capfd.readouterr().out
    found = re.search(r"centre accuracy ([\d.]+) %", told)
    assert found is not None, told
    assert float(found[1]) > 85


def test_torchrun_restarts_recover(tmp_path: Path) -> None:
    """One worker kills itself once; torchrun restarts all, and the new gloo group must not meet the dead addresses."""
    script = tmp_path / "restarting.py"
    script.write_text(restarting_script())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", str(script), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1"}


def restarting_script() -> str:
    return textwrap.dedent(
        """
        import os, signal, sys, torch
        from pathlib import Path
        import outcore

        folder, rank, attempt = Path(sys.argv[1]), os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with outcore.elastic.join(net, optimizer, period=1, limit_s=20, checkpoint=folder / "center.npz") as worker:
            for step in range(30):
                net(torch.ones(2, 4)).square().mean().backward()
                worker.step()
                if attempt == "0" and rank == "1" and step == 10:
                    os.kill(os.getpid(), signal.SIGKILL)
        assert attempt == "1", "nobody was restarted"
        (folder / f"done-{rank}").touch()
        """
    )


def test_compare_prints_json_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "curves.png"
    options = ["compare", "--groups", "2", "--methods", "sync-easgd,ddp", "--epochs", "2", "--json"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = CliRunner().invoke(elastic_command, [*options, "--picture", str(picture)])
    assert done.exit_code == 0, done.stderr
    results = json.loads(done.stdout)
    assert [result["trial"]["method"] for result in results] == ["sync-easgd", "ddp"]
    assert all(result["error"] is None and result["points"] for result in results)
    assert results[0]["sent_bytes"] < results[1]["sent_bytes"]
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_compare_names_the_methods_it_knows() -> None:
    result = CliRunner().invoke(elastic_command, ["compare", "--methods", "gossip"])
    assert result.exit_code == 1
    assert "choose from original-easgd" in result.output
