"""DiLoCo in one piece and streamed, and exchanges in 8 bits: equations against references written apart from them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outcore.elastic import compression
from outcore.elastic.compression import BLOCK, LARGEST, compressed_sum, decode, encode, num_code_bytes
from outcore.elastic.settings import Settings
from outcore.elastic.wire import Traffic
from outcore.errors import ElasticError

from . import reference
from .test_methods import assert_same, run_sync
from .test_wire import make_group
from .town import ETA, NUM_WEIGHTS, Array, Net, Town, first_weights, gradient, train, weights_of

pytestmark = pytest.mark.timeout(60)
CODES = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize(
    ("num", "period", "fragments", "delay", "mix"),
    [(2, 4, 2, 1, 0.5), (3, 6, 3, 1, 0.0), (2, 8, 2, 3, 0.25), (2, 4, 4, 0, 0.5), (3, 4, 1, 2, 0.5), (2, 3, 1, 0, 0.0)],
)
def test_streaming_diloco(num: int, period: int, fragments: int, delay: int, mix: float) -> None:
    steps = 2 * period + period // fragments
    chosen: dict[str, Any] = {"period": period, "fragments": fragments, "delay": delay, "mix": mix}
    weights, centers, workers = run_sync(num, steps, method="streaming-diloco", outer_rate=0.7, mu=0.9, **chosen)
    assert_same((weights, centers[0]), reference.streaming_diloco(num, steps, period, fragments, delay, mix, 0.7, 0.9))
    for center in centers[1:]:
        np.testing.assert_array_equal(center, centers[0])
    assert workers[0].stats().num_exchanges == steps // (period // fragments)


def test_one_fragment_without_delay_is_diloco_bit_for_bit() -> None:
    whole = run_sync(3, 7, method="diloco", period=3)
    streamed = run_sync(3, 7, method="streaming-diloco", period=3, fragments=1, delay=0, mix=0.0)
    for mine, theirs in zip([*whole[0], *whole[1]], [*streamed[0], *streamed[1]]):
        np.testing.assert_array_equal(mine, theirs)


def test_the_outer_step_is_torchs_own_nesterov() -> None:
    """torchft steps torch.optim.SGD(nesterov=True) on the pseudo-gradient, puts the result in the place of the weights
    it went on from, and mixes the local ones in by lerp: the same, done with torch's optimizer and by hand."""
    num, period, delay, mix, rate, mu = 2, 3, 1, 0.25, 0.7, 0.9
    center = nn.Parameter(torch.from_numpy(first_weights()))
    outer = torch.optim.SGD([center], lr=rate, momentum=mu, nesterov=True)
    local = [first_weights() for _ in range(num)]
    for t in range(1, 10):
        for rank in range(num):
            local[rank] = local[rank] - ETA * gradient(local[rank], rank, t - 1)
        if (t + delay) % period == 0:
            center.grad = torch.from_numpy(np.mean([center.detach().numpy() - w for w in local], axis=0))
        if t % period == 0:
            outer.step()
            local = [torch.lerp(center.detach(), torch.from_numpy(w), mix).numpy() for w in local]
    chosen: dict[str, Any] = {"period": period, "fragments": 1, "delay": delay, "mix": mix}
    weights, centers, _ = run_sync(num, 9, method="streaming-diloco", outer_rate=rate, mu=mu, **chosen)
    assert_same((weights, centers[0]), (local, center.detach().numpy()))


def test_steps_go_on_while_a_fragment_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange of a fragment is held up until its last step: the steps before it do not wait."""
    from outcore.elastic.sync import SyncExchange

    town, settings = Town(2), Settings(method="streaming-diloco", period=8, fragments=2, delay=2, limit_s=10)
    exchange, released = SyncExchange.run_exchange, threading.Event()

    def held_up(self: SyncExchange, *args: Any) -> None:
        assert released.wait(10)
        exchange(self, *args)

    monkeypatch.setattr(SyncExchange, "run_exchange", held_up)

    def act(rank: int) -> None:
        net = Net()
        with town.worker(rank, net, settings) as worker:
            train(worker, net, rank, range(3))
            assert worker._averager.exchange._running is not None  # type: ignore[attr-defined]
            released.set()
            train(worker, net, rank, range(3, 4))
            assert worker.stats().num_exchanges == 1

    town.together(act)


def test_a_message_is_as_long_as_a_fragment() -> None:
    town, settings = Town(1), Settings(method="streaming-diloco", period=10, fragments=5, limit_s=5)
    net = Net()
    with town.worker(0, net, settings) as worker:
        exchange = worker._averager.exchange  # type: ignore[attr-defined]
        assert exchange._room.numel() == NUM_WEIGHTS // 5 + 2


@pytest.mark.filterwarnings("ignore:this worker's weights are no longer finite")
def test_a_diverged_worker_starts_again_in_all_fragments() -> None:
    town, settings = Town(2), Settings(method="streaming-diloco", period=4, fragments=2, limit_s=10)

    def act(rank: int) -> Array:
        net = Net()
        with town.worker(rank, net, settings) as worker:
            for step in range(8):
                net.loss(rank, step).backward()
                if (rank, step) == (1, 2):
                    assert net.matrix.grad is not None
                    net.matrix.grad.fill_(float("inf"))
                worker.step()
            return weights_of(worker)

    assert np.isfinite(town.together(act)).all()


@pytest.mark.parametrize("method", ["diloco", "streaming-diloco"])
def test_the_outer_state_on_the_host_changes_no_number(method: str) -> None:
    """On a GPU it takes less memory, too: tests/gpu/elastic/test_outer_state.py."""
    plain, on_host = (run_sync(2, 7, method=method, period=4, outer_state=where) for where in ("device", "host"))
    np.testing.assert_array_equal(plain[0], on_host[0])
    np.testing.assert_array_equal(plain[1], on_host[1])


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"fragments": 3, "period": 4}, "the period must be a multiple of the fragments"),
        ({"fragments": 2, "period": 4, "delay": 2}, "the delay less than the steps from one fragment to the next"),
        ({"mix": 1.0}, "mix 1 must be from 0 to below 1"),
        ({"method": "sync-easgd", "outer_state": "host"}, "outer_state='host' is for diloco"),
        ({"wire_dtype": torch.int32}, "wire_dtype torch.int32 cannot travel"),
        ({"wire_dtype": torch.int8, "packed": False, "method": "diloco"}, "travels packed and over gloo"),
        ({"method": "async-easgd", "wire_dtype": torch.int8}, "synchronous methods"),
    ],
)
def test_settings_that_make_no_sense_are_refused(chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(ElasticError, match=words):
        Settings(**{"method": "streaming-diloco", **chosen}).check()


def test_more_fragments_than_parameters_are_refused() -> None:
    settings = Settings(method="streaming-diloco", period=22, fragments=11, limit_s=2)
    with pytest.raises(ElasticError, match="11 fragments are more than the model's 10 parameters"):
        Town(1).worker(0, Net(), settings)


# --- 8 bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("num", [1, BLOCK, 3 * BLOCK + 17, compression._PIECE + 5])
def test_codes_are_within_half_a_step_of_each_block(dtype: torch.dtype, num: int) -> None:
    vector = torch.randn(num, generator=torch.Generator().manual_seed(num)) * torch.logspace(-6, 6, num)
    vector[:: BLOCK + 1] = 0.0
    code, back = torch.empty(num_code_bytes(num), dtype=torch.uint8), torch.empty(num)
    encode(vector, code, dtype)
    decode(code, back, dtype)
    for mine, theirs in zip(vector.split(BLOCK), back.split(BLOCK)):
        largest = float(mine.abs().max())
        # int8: half of 1 / 127 of the largest; fp8 has 3 bits behind the leading one, and its smallest numbers.
        bound = largest / 254 if dtype == torch.int8 else torch.maximum(mine.abs() / 16, torch.tensor(largest / 2e5))
        assert ((mine - theirs).abs() <= bound * 1.0001).all()
    encode(torch.zeros(num), code, dtype)
    decode(code, back, dtype)
    assert not back.any()


def quantized(x: Array, dtype: torch.dtype) -> Array:
    """One block, by hand."""
    scale = np.float32(np.abs(x).max() / LARGEST[dtype])
    if dtype == torch.int8:
        return np.round(x / scale) * float(scale)
    codes = torch.from_numpy(x / scale).to(dtype).double().numpy()
    return codes * float(scale)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("num", [2, 3])
def test_the_sum_is_double_squeeze(dtype: torch.dtype, num: int) -> None:
    """1905.05957 with a share of whole blocks at each member, three rounds, in float64 and by hand."""
    size = num * BLOCK
    chance = np.random.default_rng(0)
    rounds = [[chance.normal(size=size) * 10.0**rank for rank in range(num)] for _ in range(3)]
    town = Town(num)

    def act(rank: int) -> list[Array]:
        group, error, seen = make_group(town, rank), torch.zeros(size, dtype=torch.float64), []
        for vectors in rounds:
            vector = torch.from_numpy(vectors[rank].copy())
            compressed_sum(group, vector, error, dtype)
            seen.append(vector.numpy().copy())
        return seen

    found = town.together(act)
    errors = [np.zeros(size) for _ in range(num)]
    for number, vectors in enumerate(rounds):
        expected = np.zeros(size)
        for owner in range(num):
            share = slice(owner * BLOCK, (owner + 1) * BLOCK)
            total = vectors[owner][share] + errors[owner][share]
            for rank in range(num):
                if rank != owner:
                    x = vectors[rank][share] + errors[rank][share]
                    sent = quantized(x, dtype)
                    errors[rank][share] = x - sent
                    total = total + sent
            expected[share] = quantized(total, dtype)
            errors[owner][share] = total - expected[share]
        for seen in found:
            np.testing.assert_array_equal(seen[number], found[0][number])
            np.testing.assert_allclose(seen[number], expected, rtol=1e-5, atol=1e-5 * 10.0 ** (num - 1))


@pytest.mark.parametrize("dtype", CODES)
def test_what_rounding_loses_comes_later(dtype: torch.dtype) -> None:
    """The same vectors again and again: the mean of the sums tends to the sum, as it cannot without feedback."""
    num, size, num_rounds = 3, 1000, 40
    vectors = [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(num)]
    exact, town = torch.stack(vectors).sum(0), Town(num)

    def act(rank: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        group, error, total = make_group(town, rank), torch.zeros(size), torch.zeros(size)
        first = torch.zeros(0)
        group.traffic = Traffic()
        for _ in range(num_rounds):
            vector = vectors[rank].clone()
            compressed_sum(group, vector, error, dtype)
            first = vector if not len(first) else first
            total += vector
        return first, total / num_rounds, group.traffic.num_bytes

    for first, mean, num_bytes in town.together(act):
        once, often = (first - exact).abs().max(), (mean - exact).abs().max()
        assert 0 < once < 0.5
        assert often < once / 10
        assert num_bytes < num_rounds * 4 * size * 2 * (num - 1) / num / 3  # a third of float32's, scales included


@pytest.mark.parametrize("method", ["sync-easgd", "sync-sgd", "diloco", "streaming-diloco"])
@pytest.mark.parametrize("dtype", CODES)
def test_methods_in_8_bits_stay_near_and_equal_among_members(method: str, dtype: torch.dtype) -> None:
    period = {"sync-sgd": 1, "streaming-diloco": 4}.get(method, 2)
    exact = run_sync(3, 12, method=method, period=period)
    coded = run_sync(3, 12, method=method, period=period, wire_dtype=dtype)
    for center in coded[1]:
        np.testing.assert_array_equal(center, coded[1][0])
    np.testing.assert_allclose(coded[1][0], exact[1][0], atol=0.02)
    assert np.abs(coded[1][0] - exact[1][0]).max() > 0


def test_a_vector_of_fewer_blocks_than_members_is_summed() -> None:
    town = Town(4)

    def act(rank: int) -> float:
        vector = torch.full((5,), float(1 + rank))
        compressed_sum(make_group(town, rank), vector, torch.zeros(5), torch.int8)
        return float(vector.mean())

    assert town.together(act) == pytest.approx([10.0] * 4, rel=1e-2)
