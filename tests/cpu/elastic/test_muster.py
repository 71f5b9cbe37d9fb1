"""Who trains what with whom: workers that would train different things, or apart, are told so."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outcore.elastic import TrainingOver
from outcore.elastic.checkpoint import CenterState, load_center, save_center
from outcore.elastic.launch import LaunchPlan, launch
from outcore.elastic.place import poll
from outcore.elastic.settings import Settings
from outcore.elastic.worker import Worker, join
from outcore.errors import BadFile, ElasticError

from . import reference
from .town import ETA, Net, Town, center_of, first_weights, train, weights_of

pytestmark = pytest.mark.timeout(60)


def errors_of(town: Town, act: Any) -> list[str]:
    """What every rank's `act` raised."""
    told = [""] * town.num_ranks

    def tell(rank: int) -> None:
        try:
            act(rank)
        except ElasticError as error:
            told[rank] = f"{type(error).__name__}: {error}"

    town.together(tell)
    return told


# --- the same thing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"method": "diloco"}, r"method is diloco at rank 1 \(\S+\) and sync-easgd at rank 0"),
        ({"method": "async-easgd"}, "method is async-easgd at rank 1"),
        ({"period": 3}, "period is 3 at rank 1"),
        ({"level": 1}, "level is 1 at rank 1"),
        ({"min_members": 1}, "min_members is 1 at rank 1"),
    ],
)
def test_workers_with_other_settings_are_refused_by_all(chosen: dict[str, Any], words: str) -> None:
    town = Town(2)
    base: dict[str, Any] = {"method": "sync-easgd", "period": 2, "limit_s": 5, "join_limit_s": 10}

    def act(rank: int) -> None:
        with town.worker(rank, Net(), Settings(**base | (chosen if rank else {}))):
            pass

    told = errors_of(town, act)
    assert told[0] == told[1]
    assert "\n" not in told[0]
    with pytest.raises(ElasticError, match=words):
        raise ElasticError(told[0])
    assert "give each training a name of its own" in told[0]


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: nn.Linear(4, 3), "the model has parameter weight float32 [3, 4] at rank 1"),
        (lambda: nn.Linear(4, 2).double(), "the model has parameter weight float64 [2, 4] at rank 1"),
        (lambda: nn.Linear(4, 2, bias=False), "the model has 1 tensors at rank 1"),
        (lambda: nn.Linear(4, 2).requires_grad_(False), "the model has frozen parameter weight"),
    ],
)
def test_workers_with_another_model_are_refused_by_all(method: str, other: Any, words: str) -> None:
    """gloo would answer a message of another size by aborting the process."""
    town, settings = Town(2), Settings(method=method, period=1, limit_s=5, join_limit_s=10)

    def act(rank: int) -> None:
        net = other() if rank else nn.Linear(4, 2)
        net.register_parameter("extra", nn.Parameter(torch.ones(1))) if words.startswith("the model has frozen") else 0
        with town.worker(rank, net, settings):
            pass

    told = errors_of(town, act)
    assert told[0] == told[1]
    assert words in told[0]


def test_a_late_comer_with_another_model_is_refused_and_the_others_train_on() -> None:
    town = Town(2)
    settings = Settings(method="sync-easgd", period=1, limit_s=5, join_limit_s=10, min_members=1)
    came = threading.Barrier(2)

    def act(rank: int) -> None:
        net = Net()
        with town.worker(rank, net, settings) as worker:
            came.wait(10)
            if rank == 1:
                return
            town.place(1)  # a successor of rank 1 is born
            with pytest.raises(ElasticError, match="the model has parameter weight"):
                town.worker(1, nn.Linear(2, 2), settings)
            train(worker, net, 0, range(3))

    town.together(act)


# --- enough of them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_a_training_does_not_begin_without_all(method: str) -> None:
    town = Town(3)
    settings = Settings(method=method, limit_s=1, join_limit_s=0.5)
    told = errors_of(Town(1), lambda rank: town.worker(0, Net(), settings))
    assert "TooFew: rank 0 on" in told[0]
    assert "waited 0.5 s for rank(s) [1, 2]: only 1 of 3 workers are here" in told[0]
    assert "raise join_limit_s, or set min_members=1 to train without them" in told[0]


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_a_training_begins_without_all_where_that_is_wanted(method: str) -> None:
    town, net = Town(2), Net()
    settings = Settings(method=method, period=1, limit_s=2, join_limit_s=0.3, min_members=1)
    with pytest.warns(UserWarning, match=r"rank\(s\) \[1\] did not come within 0.3 s; begun without them"):
        worker = town.worker(0, net, settings)
    with worker:
        train(worker, net, 0, range(3))
        assert worker.members() == [0]


class _Crash(Exception):
    pass


@pytest.mark.parametrize("method", ["sync-easgd", "diloco", "async-easgd"])
def test_who_is_left_alone_by_a_failure_says_so(method: str) -> None:
    """One of two is no majority: what the other's exception ends is the training of both."""
    town = Town(2)
    settings = Settings(method=method, period=1, limit_s=1, join_limit_s=1)

    def act(rank: int) -> None:
        net = Net()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with town.worker(rank, net, settings) as worker:
                    for step in range(2000):
                        net.loss(rank, step).backward()
                        worker.step()
                        if rank == 1 and step == 4:
                            raise _Crash
            except _Crash:
                pass

    told = errors_of(town, act)
    assert "waited 1 s for rank(s) [1]" in told[0], told
    assert told[1] == ""


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_who_is_left_alone_because_the_others_have_finished_goes_on(method: str) -> None:
    town = Town(2)
    settings = Settings(method=method, period=1, level=2, limit_s=5, join_limit_s=5)

    def act(rank: int) -> int:
        net = Net()
        with town.worker(rank, net, settings) as worker:
            train(worker, net, rank, range(3 if rank else 9))
            return worker.global_step

    assert town.together(act) == [9, 3]


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_who_comes_back_after_the_others_have_finished_is_told_so(method: str) -> None:
    """Today's rank 0 would train alone from its first weights, and save that over what the others have learned."""
    town = Town(2)
    settings = Settings(method=method, period=1, limit_s=2, join_limit_s=5)

    def act(rank: int) -> None:
        net = Net()
        with town.worker(rank, net, settings) as worker:
            train(worker, net, rank, range(3))

    town.together(act)
    with pytest.raises(TrainingOver, match="rank 0 came when all other workers had finished this training"):
        town.worker(0, Net(), settings)


# --- two trainings of one launch ------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Town:
    """This process as the only rank of a launch."""
    town = Town(1)
    told = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": town.server.port}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": f"run {town.server.port}"}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("outcore.elastic.link.start_center_process", town.start_center)
    return town


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
@pytest.mark.usefixtures("launched")
def test_a_second_model_needs_a_name_and_has_weights_of_its_own(method: str) -> None:
    nets = [Net(), Net()]
    with torch.no_grad():
        nets[1].matrix.add_(7.0)
    optimizers = [torch.optim.SGD(net.parameters(), lr=ETA) for net in nets]
    before = nets[1].vector().detach().clone()
    with join(nets[0], optimizers[0], method, period=2, limit_s=5) as first:
        with pytest.raises(ElasticError, match="takes part in the training 'default' already"):
            join(nets[1], optimizers[1], method, limit_s=5)
        with join(nets[1], optimizers[1], method, name="second", period=2, limit_s=5) as second:
            assert torch.equal(nets[1].vector(), before)
            train(first, nets[0], 0, range(3))
            np.testing.assert_array_equal(center_of(second), before.double().numpy())
    again = Net()
    with join(again, torch.optim.SGD(again.parameters(), lr=ETA), method, period=2, limit_s=5):  # a training of its own
        assert torch.equal(again.vector(), Net().vector())


@pytest.mark.parametrize("method", ["sync-easgd", "original-easgd"])
def test_two_models_at_once_have_the_numbers_of_each_alone(method: str) -> None:
    """As in a GAN: two ranks, two trainings, steps in turn. The round robin's centre keeps the order itself."""
    towns = [Town(2, "generator"), Town(2, "discriminator")]
    settings = Settings(method=method, period=2, alpha=0.3, limit_s=10, join_limit_s=20)

    def act(rank: int) -> list[Any]:
        nets = [Net(), Net()]
        workers = [town.worker(rank, net, settings) for town, net in zip(towns, nets)]
        for step in range(4):
            for number in (0, 1):  # the second one's targets are those of other ranks
                nets[number].loss(rank + 2 * number, step).backward()
                workers[number].step()
        found = [weights_of(worker) for worker in workers]
        for worker in workers:
            worker.close()
        return found

    found = towns[0].together(act)
    expected = {
        "sync-easgd": reference.elastic_sync(2, 4, 2, 0.3),
        "original-easgd": reference.elastic_one_by_one([0, 1] * 4, 2, 2, 0.3),
    }
    np.testing.assert_allclose([mine[0] for mine in found], expected[method][0], rtol=2e-5, atol=2e-6)
    assert np.abs(np.array([mine[1] for mine in found]) - expected[method][0]).max() > 1e-3


# --- nothing stale --------------------------------------------------------------------------------------------------


def test_a_centre_somebody_left_in_the_temporary_folder_is_not_loaded() -> None:
    town, net = Town(1), Net()
    stale = Path(tempfile.gettempdir()) / f"outcore-center-{town.server.port}-town.npz"
    save_center(stale, CenterState(torch.full((10,), 99.0), torch.zeros(10), 1000))
    try:
        with town.worker(0, net, Settings(method="async-easgd", period=1, limit_s=5)) as worker:
            np.testing.assert_array_equal(center_of(worker), first_weights())
            train(worker, net, 0, range(3))
            folder = Path(town.centers[0].config.checkpoint).parent
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert folder.stat().st_uid == os.getuid()
    finally:
        stale.unlink(missing_ok=True)
    del town.server
    assert poll(lambda: not folder.exists(), 5)


def test_the_file_of_another_run_or_model_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "center.npz"
    save_center(path, CenterState(torch.ones(3), torch.zeros(0), 4, 17), nonce="ours", model="a model")
    assert load_center(path, 3, nonce="another run's") is None
    saved = load_center(path, 3, nonce="ours", model="a model")
    assert saved is not None
    assert (saved.num_exchanges, saved.global_step) == (4, 17)
    assert load_center(path, 3) is not None  # asked for by name
    with pytest.raises(BadFile, match="holds other tensors than the model"):
        load_center(path, 3, model="another model")


# --- what no step moves ---------------------------------------------------------------------------------------------


class Partly(nn.Module):
    """A frozen layer, a trained one, and buffers of several kinds; what does not learn differs from rank to rank."""

    num_seen: torch.Tensor
    mask: torch.Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.frozen = nn.Linear(3, 3).bfloat16().requires_grad_(False)
        self.trained = nn.Linear(3, 1)
        self.register_buffer("num_seen", torch.tensor(10 + rank))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("ids", torch.tensor([rank]).expand(4))  # one element of memory
        self.register_buffer("empty", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x.bfloat16()).float())  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["sync-easgd", "sync-sgd", "diloco", "async-easgd", "async-sgd"])
def test_frozen_parameters_and_integer_buffers_are_the_first_ranks_and_a_late_comers(method: str) -> None:
    town = Town(2)
    settings = Settings(method=method, period=1, limit_s=5, join_limit_s=10, min_members=1)
    first = {name: value.clone() for name, value in Partly(0).state_dict().items()}
    leaves, is_back = threading.Barrier(2), threading.Event()
    nets, late = [Partly(0), Partly(1)], Partly(7)

    def act(rank: int) -> None:
        net = nets[rank]
        with town.worker(rank, net, settings, torch.optim.SGD(net.parameters(), lr=0.0)) as worker:
            for name, value in net.state_dict().items():
                assert torch.equal(value, first[name]), name
            net.num_seen += 5 + rank  # from now on each one's own
            net(torch.ones(1, 3)).sum().backward()
            worker.step()
            leaves.wait(10)
            while rank == 0 and not is_back.is_set():
                net(torch.ones(1, 3)).sum().backward()
                worker.step()
            assert net.num_seen == 15 + rank
        if rank == 1:
            with town.worker(1, late, settings):
                is_back.set()
                assert late.num_seen == (10 if "async" in method else 15)  # a centre keeps what it was brought first
                for name in ("frozen.weight", "mask", "phase"):
                    assert torch.equal(late.state_dict()[name], first[name]), name

    town.together(act)


# --- where a late comer begins --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sync-easgd", "sync-sgd", "async-easgd"])
def test_a_restarted_rank_goes_on_with_its_shard(method: str) -> None:
    """Rank 1 fails after its 8th step and comes back. With one of two left, rank 0 waits for it. (With real processes:
    soak_hosts.py.)"""
    town = Town(2)
    period = 1 if method == "sync-sgd" else 2
    settings = Settings(method=method, period=period, limit_s=2, join_limit_s=20)
    steps: list[list[int]] = [[], []]

    def go_on(worker: Worker, net: Net, rank: int, until: int) -> None:
        for step in range(worker.global_step, until):
            steps[rank].append(step)
            net.loss(rank, step).backward()
            worker.step()
            assert worker.global_step == step + 1
            time.sleep(0.05 if "async" in method else 0.0)  # these look every half second whether they are enough

    def act(rank: int) -> None:
        net = Net()
        worker = town.worker(rank, net, settings)
        go_on(worker, net, rank, 8 if rank else 30)
        worker.close(finished=rank == 0)
        if rank == 1:
            again = Net()
            with town.worker(rank, again, settings) as worker:
                go_on(worker, again, rank, 30)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        town.together(act)
    assert steps[0] == list(range(30))
    resumed = steps[1][8]
    assert steps[1] == [*range(8), *range(resumed, 30)]
    if "async" in method:
        assert 8 <= resumed <= 25
    else:  # the step after the exchange in which rank 0 missed the old one and let the new one in
        assert resumed == 8 + period


def test_the_checkpoint_knows_the_step(tmp_path: Path) -> None:
    for method in ("sync-easgd", "async-easgd"):
        settings = Settings(method=method, period=1, level=2, limit_s=5, checkpoint=tmp_path / f"{method}.npz")
        town, net = Town(1), Net()
        with town.worker(0, net, settings) as worker:
            train(worker, net, 0, range(4))
        del town.server
        assert poll((tmp_path / f"{method}.npz").exists, 5)
        town, again = Town(1), Net()
        with town.worker(0, again, settings) as worker:
            assert worker.global_step == 4


# --- details --------------------------------------------------------------------------------------------------------


def test_the_launchers_store_listens_on_loopback_only(tmp_path: Path) -> None:
    script = "import os, sys; open(sys.argv[1], 'w').write(os.environ['MASTER_PORT'] + open('/proc/net/tcp').read() + "
    script += "open('/proc/net/tcp6').read())"
    launch(LaunchPlan([sys.executable, "-c", script, str(tmp_path / "told")], 1))
    port, *lines = (tmp_path / "told").read_text().splitlines()
    number = f"{int(port.split()[0]):04X}"
    listening = [line.split()[1] for line in lines if len(line.split()) > 3 and line.split()[3] == "0A"]
    assert [address for address in listening if address.endswith(f":{number}")] == [f"0100007F:{number}"]


def test_no_method_keeps_a_velocity_it_does_not_use() -> None:
    for method, num in (("sync-easgd", 0), ("sync-sgd", 0), ("diloco", 10), ("async-easgd", 0), ("async-msgd", 10)):
        town, net = Town(1), Net()
        with town.worker(0, net, Settings(method=method, period=1, limit_s=5)) as worker:
            owner: Any = town.centers[0] if town.centers else worker._averager
            assert owner.velocity.numel() == num, method


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_a_float64_model_has_a_float64_centre(method: str) -> None:
    town, net = Town(1), Net().double()
    settings = Settings(method=method, period=2, alpha=0.5, limit_s=5)
    with town.worker(0, net, settings) as worker:
        for step in range(4):
            loss = net.vector() - torch.from_numpy(np.sin(np.arange(10) + 0.3 * step))
            (0.5 * torch.from_numpy(np.linspace(0.5, 2.0, 10)) * loss * loss).sum().backward()
            worker.step()
        weights, center = reference.elastic_sync(1, 4, 2, 0.5)
        np.testing.assert_allclose(weights_of(worker), weights[0], rtol=1e-13)
        np.testing.assert_allclose(center_of(worker), center, rtol=1e-13)


def test_momentum_given_twice_warns() -> None:
    for method, optimizer in (("async-measgd", "SGD"), ("eamsgd", "AdamW"), ("async-msgd", "SGD")):
        town, net = Town(1), Net()
        chosen = {"lr": 0.01, "momentum": 0.9} if optimizer == "SGD" else {"lr": 0.01}
        made = getattr(torch.optim, optimizer)(net.parameters(), **chosen)
        with pytest.warns(UserWarning, match=rf"{method} has a momentum of 0.9 and so has {optimizer} \(0.9\)"):
            town.worker(0, net, Settings(method=method, period=1, limit_s=5), made).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        town, net = Town(1), Net()
        made = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        town.worker(0, net, Settings(method="eamsgd", mu=0.0, period=1, limit_s=5), made).close()


def test_reading_the_centre_takes_nothing_from_the_others_steps() -> None:
    """Async SGD sends the steps since its last answer; the centre others have moved since is not the place to count
    them from."""
    town, settings = Town(2), Settings(method="async-sgd", period=2, limit_s=5)
    turn = threading.Barrier(2)

    def act(rank: int) -> Any:
        net = Net()
        with town.worker(rank, net, settings) as worker:
            turn.wait(10)
            if rank == 0:
                train(worker, net, 0, range(1))
            turn.wait(10)
            if rank == 1:
                train(worker, net, 1, range(2))
            turn.wait(10)
            if rank == 0:
                seen = center_of(worker)
                before = weights_of(worker)
                train(worker, net, 0, range(1, 2))
                steps = before - first_weights() - ETA * np.linspace(0.5, 2.0, 10) * (before - target_of_step_1())
                np.testing.assert_allclose(weights_of(worker), seen + steps, rtol=2e-5, atol=2e-6)
            turn.wait(10)

    town.together(act)


def target_of_step_1() -> Any:
    return np.sin(np.arange(10) + 0.3)
