"""What surrounds the equations: packing, buffers, optimizers, mixed precision, checkpoints, errors."""

from __future__ import annotations

import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outcore.elastic.checkpoint import CenterState, load_center, save_center
from outcore.elastic.flat import FlatModel
from outcore.elastic.place import poll
from outcore.elastic.settings import Settings
from outcore.elastic.sync import SyncExchange
from outcore.elastic.wire import NUM_LANES
from outcore.elastic.worker import Worker, join
from outcore.errors import BadFile, ElasticError

from .town import Net, Town, center_of, train

pytestmark = pytest.mark.timeout(60)


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


def test_packing_changes_no_number() -> None:
    plain, packed = conv_net(), conv_net()
    first: nn.Conv2d = packed[0]  # type: ignore[assignment]
    first.weight.data = first.weight.data.contiguous(memory_format=torch.channels_last)
    flat = FlatModel(packed)
    assert first.weight.is_contiguous(memory_format=torch.channels_last)
    x = torch.randn(5, 3, 4, 4)
    for net in (plain, packed):
        net(x).square().sum().backward()
    for mine, theirs in zip(plain.parameters(), packed.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert flat.gradient.abs().sum() > 0
    flat.vector.zero_()
    assert all(not tensor.any() for name, tensor in packed.state_dict().items() if "num_batches" not in name)


def test_gradients_find_back_into_the_buffer() -> None:
    net = nn.Linear(2, 2)
    flat = FlatModel(net)
    net.zero_grad()  # sets .grad to None, as optimizers do
    net(torch.ones(1, 2)).sum().backward()
    flat.bind_gradients()
    assert flat.gradient.tolist() == [1.0] * 6
    assert net.weight.grad is not None
    assert net.weight.grad.data_ptr() == flat.gradient.data_ptr()


def test_a_model_of_two_dtypes_is_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ElasticError, match=r"one dtype and device, found torch.float32 on cpu, torch.float64 on cpu"):
        FlatModel(net)


@pytest.mark.parametrize("method", ["sync-easgd", "sync-sgd", "diloco", "async-easgd"])
def test_batchnorm_buffers_are_averaged(method: str) -> None:
    town = Town(2)
    settings = Settings(method=method, period=1, level=2, limit_s=10)
    nets = [conv_net(), conv_net()]

    def act(rank: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        net = nets[rank]
        with town.worker(rank, net, settings, torch.optim.SGD(net.parameters(), lr=0.0)) as worker:
            for step in range(2):
                net(torch.full((4, 3, 4, 4), float(rank + step))).sum().backward()
                if step == 1:
                    seen = net.state_dict()["1.running_mean"].clone()
                worker.step()
            return worker.center_state_dict(), seen

    results = town.together(act)
    if method == "async-easgd":
        return  # the order of arrival decides; the rate is tested by the synchronous ones
    mean = (results[0][1] + results[1][1]) / 2
    torch.testing.assert_close(results[0][0]["1.running_mean"], mean)


class Counting(nn.Module):
    """Counts its forwards in a buffer whose dtype is not the weights'."""

    num_seen: torch.Tensor
    table: torch.Tensor

    def __init__(self, weights: torch.dtype, buffers: torch.dtype, first: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2).to(weights)
        self.register_buffer("num_seen", torch.full((1,), first, dtype=buffers))
        self.register_buffer("table", 10000 ** (-torch.arange(0, 64, 2, dtype=buffers) / 64))

    def forward(self, x: torch.Tensor, num: int = 1) -> torch.Tensor:
        self.num_seen += num
        return self.linear(x.to(self.linear.weight.dtype))  # type: ignore[no-any-return]


def test_a_buffer_of_another_dtype_moves_in_every_step() -> None:
    """It is no view of the vector: what an exchange leaves there must not come back in the steps between."""
    town, net = Town(1), Counting(torch.float32, torch.float64)
    with town.worker(0, net, Settings(method="sync-easgd", period=3, level=2, limit_s=10)) as worker:
        for step in range(1, 8):
            net(torch.ones(1, 2)).sum().backward()
            worker.step()
            assert net.num_seen == step


@pytest.mark.parametrize("method", ["sync-easgd", "diloco", "async-easgd", "async-sgd", "eamsgd"])
def test_a_float32_table_of_a_bfloat16_model_stays_exact(method: str) -> None:
    town, settings = Town(2), Settings(method=method, period=2, limit_s=10, join_limit_s=20)

    def act(rank: int) -> None:
        net = Counting(torch.bfloat16, torch.float32)
        table = net.table.clone()
        assert not torch.equal(table, table.bfloat16().float())
        with town.worker(rank, net, settings) as worker:
            assert torch.equal(net.table, table)
            for _ in range(5):
                net(torch.ones(1, 2)).sum().backward()
                worker.step()
            assert torch.equal(net.table, table)
            assert torch.equal(worker.center_state_dict()["table"], table)

    town.together(act)


def test_a_float32_count_of_a_bfloat16_model_does_not_stop() -> None:
    """bfloat16 knows no number between 1536 and 1544."""
    town, net = Town(1), Counting(torch.bfloat16, torch.float32, first=1537.0)
    with town.worker(0, net, Settings(period=4, limit_s=10)) as worker:
        for _ in range(1537, 1600):
            net(torch.ones(1, 2)).sum().backward()
            worker.step()
    assert net.num_seen == 1600


@pytest.mark.parametrize(
    ("method", "period", "expected"),
    [
        ("diloco", 2, [[1, 3, 4, 6, 7], [2, 3, 5, 6, 8]]),
        ("sync-sgd", 1, [[1.5, 3, 4.5], [1.5, 3, 4.5]]),
        ("sync-easgd", 2, [[1, 2, 3, 4, 5], [2, 4, 6, 8, 10]]),
    ],
)
def test_averages_of_a_buffer_of_another_dtype_reach_the_model(
    method: str, period: int, expected: list[list[float]]
) -> None:
    """One worker counts by one, the other by two. Who joins begins with the first worker's count."""
    town, settings = Town(2), Settings(method=method, period=period, limit_s=10, join_limit_s=20)

    def act(rank: int) -> list[float]:
        net, trail = Counting(torch.float32, torch.float64, first=7.0 * rank), []
        with town.worker(rank, net, settings) as worker:
            assert net.num_seen == 0
            for _ in expected[rank]:
                net(torch.ones(1, 2), 1 + rank).sum().backward()
                worker.step()
                trail.append(float(net.num_seen))
        return trail

    assert town.together(act) == expected


def test_statistics_are_exchanged_as_they_were_before_the_forward_however_late_the_thread_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Level 3: the exchange's thread begins only after the forward has moved BatchNorm's running mean."""
    town, settings = Town(1), Settings(method="sync-easgd", period=1, level=3, limit_s=10)
    moved, fill = threading.Event(), SyncExchange.fill

    def late(self: SyncExchange, *args: Any) -> None:
        assert moved.wait(10)
        fill(self, *args)

    monkeypatch.setattr(SyncExchange, "fill", late)
    net = conv_net()
    with town.worker(0, net, settings, torch.optim.SGD(net.parameters(), lr=0.0)) as worker:
        before = net.state_dict()["1.running_mean"].clone()
        net(torch.full((4, 3, 4, 4), 2.0)).sum().backward()
        assert not torch.equal(net.state_dict()["1.running_mean"], before)
        moved.set()
        worker.step()
        torch.testing.assert_close(worker.center_state_dict()["1.running_mean"], before)


def test_weights_may_be_set_aside_between_steps_however_late_the_thread_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level 3: a user evaluates the centre, or anything else, in the weights' place and puts them back."""
    fill, looked = SyncExchange.fill, threading.Event()

    def late(self: SyncExchange, *args: Any) -> None:
        assert looked.wait(10)
        fill(self, *args)

    def center(*, looks: bool) -> torch.Tensor:
        town, net = Town(1), Net()
        settings = Settings(method="sync-easgd", period=1, level=3, alpha=0.3, limit_s=10)
        with town.worker(0, net, settings, torch.optim.SGD(net.parameters(), lr=0.05)) as worker:
            for step in range(3):
                net.loss(0, step).backward()
                looked.set()
                worker.step()
                if looks:
                    looked.clear()
                    kept = {name: value.clone() for name, value in net.state_dict().items()}
                    with torch.no_grad():
                        for parameter in net.parameters():
                            parameter.zero_()
                    looked.set()
                    time.sleep(0.05)
                    net.load_state_dict(kept)
            return torch.cat([value.reshape(-1) for value in worker.center_state_dict().values()])

    expected = center(looks=False)
    monkeypatch.setattr(SyncExchange, "fill", late)
    assert torch.equal(center(looks=True), expected)


@pytest.mark.parametrize("method", ["sync-easgd", "async-measgd", "async-sgd", "diloco"])
def test_any_optimizer_and_accumulated_gradients_learn(method: str) -> None:
    town, settings = Town(2), Settings(method=method, period=2, limit_s=10)

    def act(rank: int) -> tuple[float, float]:
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
        with town.worker(rank, net, settings, optimizer) as worker:
            first = Net().loss(0, 0).item()  # this one's net may have joined a centre that has learned already
            for _ in range(30):
                for part in (0, 1):
                    (0.5 * net.loss(0, part)).backward()
                worker.step()
            return first, net.loss(0, 0).item()

    for first, last in town.together(act):
        assert last < first


def test_mixed_precision_steps_through_the_scaler() -> None:
    town = Town(1)
    net = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with town.worker(0, net, Settings(method="sync-easgd", limit_s=10)) as worker:
        before = net.vector().detach().clone()
        scaler.scale(net.loss(0, 0)).backward()
        worker.step(scaler)
        scaler.update()
        plain = Net()
        torch.testing.assert_close(before, plain.vector().detach())
        plain.loss(0, 0).backward()
        torch.optim.SGD(plain.parameters(), lr=0.05).step()
        torch.testing.assert_close(net.vector(), plain.vector())


def test_bfloat16_weights_meet_a_float32_centre() -> None:
    town, settings = Town(2), Settings(method="sync-easgd", period=1, limit_s=10)

    def act(rank: int) -> Any:
        net = Net().bfloat16()
        with town.worker(rank, net, settings) as worker:
            for _ in range(3):
                (net.vector().float() - 1).square().sum().backward()
                worker.step()
            return worker.center_state_dict()["matrix"].dtype, worker._averager.read_center().dtype

    assert town.together(act) == [(torch.bfloat16, torch.float32)] * 2


def test_the_checkpoint_brings_the_centre_back(tmp_path: Path) -> None:
    settings = Settings(method="sync-easgd", period=1, level=2, limit_s=10, checkpoint=tmp_path / "center.npz")
    town, net = Town(1), Net()
    with town.worker(0, net, settings) as worker:
        train(worker, net, 0, range(5))
        center = center_of(worker)
    town, again = Town(1), Net()
    with town.worker(0, again, settings) as worker:
        assert (center_of(worker) == center).all()
        assert worker.stats().num_exchanges == 5
        assert (again.vector().detach().double().numpy() == center).all()


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "center.npz"
    assert load_center(path, 3) is None
    save_center(path, CenterState(torch.ones(3), torch.zeros(3), 4))
    with pytest.raises(BadFile, match="holds 3 elements, the model has 5"):
        load_center(path, 5)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(BadFile, match="no centre checkpoint"):
        load_center(path, 3)


def test_a_late_comer_starts_at_the_centre() -> None:
    town, settings = Town(1), Settings(method="async-easgd", period=1, limit_s=10)
    net = Net()
    with town.worker(0, net, settings) as worker:
        train(worker, net, 0, range(6))
        late = Net()
        with town.worker(1, late, settings) as other:
            torch.testing.assert_close(late.vector().detach().double(), torch.from_numpy(center_of(other)))
            assert not torch.equal(late.vector(), Net().vector())


def test_bounded_staleness_keeps_a_fast_worker_near() -> None:
    town, settings = Town(2), Settings(method="async-easgd", period=1, staleness=2, limit_s=5)
    pace: list[int] = [0, 0]
    ahead: list[int] = []
    both_here = threading.Barrier(2)

    def act(rank: int) -> None:
        net = Net()
        with town.worker(rank, net, settings) as worker:
            both_here.wait(10)
            for step in range(12):
                net.loss(rank, step).backward()
                worker.step()
                pace[rank] = step + 1
                ahead.append(pace[0] - pace[1])
                if rank == 1:
                    time.sleep(0.03)

    town.together(act)
    assert max(ahead) <= 2 + 2  # the bound, the exchange under way, and the one already answered


def test_an_alpha_past_the_bound_warns_with_both_numbers() -> None:
    with pytest.warns(UserWarning, match=r"alpha 0.9 is past the stability bound 0.667 of sync-easgd with 2 workers"):
        run_one(2, alpha=0.9)
    with pytest.warns(UserWarning, match=r"bound 0.5 of sync-easgd with 2 workers that may go 8 steps ahead; .* 0.45"):
        run_one(2, alpha=0.6, ahead=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_one(1, alpha=None)
        run_one(2, alpha=0.6)


def run_one(num: int, alpha: float | None, ahead: int = 0) -> None:
    town, settings = Town(num), Settings(method="sync-easgd", alpha=alpha, ahead=ahead, limit_s=10)

    def act(rank: int) -> None:
        with town.worker(rank, Net(), settings):
            pass

    town.together(act)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"method": "easgd"}, "choose one of"),
        ({"period": 0}, "at least 1"),
        ({"method": "sync-sgd"}, "must be 1"),
        ({"staleness": 2}, "bounds asynchronous methods"),
        ({"ahead": -1}, "must be 0 or more"),
        ({"ahead": 2, "level": 2}, "only workers of sync-easgd at level 3"),
        ({"ahead": 2, "method": "diloco"}, "0 for diloco"),
        ({"ahead": 2, "method": "sync-sgd", "period": 1}, "0 for sync-sgd"),
        ({"ahead": 2, "method": "eamsgd"}, "0 for eamsgd"),
        ({"limit_s": 0.0}, "every wait needs a limit"),
        ({"method": "async-easgd", "wire_dtype": torch.bfloat16}, "wire_dtype"),
        ({"method": "async-easgd", "turn": "iteration"}, "belongs to original-easgd"),
        ({"method": "async-easgd", "backend": "nccl"}, "host memory"),
        ({"perod": 2}, "does not know"),
        ({"backend": "nccl"}, "CUDA device"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_sentence(chosen: dict[str, Any], words: str) -> None:
    net = Net()
    with pytest.raises(ElasticError, match=words) as caught:
        join(net, torch.optim.SGD(net.parameters(), lr=0.1), **chosen)
    assert "\n" not in str(caught.value)


def test_without_a_launcher_join_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    net = Net()
    with pytest.raises(ElasticError, match="outcore launch --groups 4"):
        join(net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_a_store_that_ended_is_named() -> None:
    town, net = Town(1), Net()
    worker = town.worker(0, net, Settings(method="sync-easgd", period=1, level=2, limit_s=2))
    del town.server
    net.loss(0, 0).backward()
    with pytest.raises(ElasticError, match=r"rank 0 lost the store at 127.0.0.1:\d+ .* start again"):
        worker.step()
    worker.close()


def test_one_process_can_host_its_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    net = Net()
    worker: Worker
    with join(net, torch.optim.SGD(net.parameters(), lr=0.1), period=1) as worker:
        train(worker, net, 0, range(2))
        assert worker.members() == [0]
        assert worker.stats().num_exchanges == 2


def test_a_centre_leaves_no_file_behind_and_keeps_the_one_it_was_given(tmp_path: Path) -> None:
    for given in (None, tmp_path / "kept.npz"):
        town, net = Town(1), Net()
        settings = Settings(method="async-easgd", period=1, limit_s=5, checkpoint=given, checkpoint_every_s=0.05)
        with town.worker(0, net, settings) as worker:
            train(worker, net, 0, range(3))
            path = Path(town.centers[0].config.checkpoint)
            assert poll(path.exists, 5)
        del town.server  # the launcher ends
        assert poll(lambda path=path, given=given: path.exists() == (given is not None), 5)  # type: ignore[misc]
    assert load_center(tmp_path / "kept.npz", 10) is not None


def test_messages_leave_the_computing_cores_where_some_are_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The overlapped exchange's thread and gloo's on the spare core, the one that computes where it was."""
    before = os.sched_getaffinity(0)
    spare = max(before)
    monkeypatch.setenv("OUTCORE_ALL_CORES", ",".join(str(core) for core in before))
    monkeypatch.setenv("OUTCORE_SPARE_CORES", str(spare))
    town, settings = Town(1), Settings(method="sync-easgd", period=1, level=3, limit_s=10)
    known = set(os.listdir("/proc/self/task"))
    with town.worker(0, Net(), settings):
        made = {int(thread) for thread in set(os.listdir("/proc/self/task")) - known}
        moved = [thread for thread in made if os.sched_getaffinity(thread) == {spare}]
        assert len(moved) >= 1 + NUM_LANES
        assert all(os.sched_getscheduler(thread) == os.SCHED_BATCH for thread in moved)
        assert os.sched_getaffinity(0) == before
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
