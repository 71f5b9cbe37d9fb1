"""On CUDA: homes that kernels can read; training with the state there, bit for bit, also with copies slowed down."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outcore.memory.home import Homes, is_at_home
from outcore.memory.pinning import reads_any_host_memory
from outcore.memory.settings import MEMORY
from outcore.state.optimizers import splitting_of
from outcore.state.state import State
from outcore.units import GIB, KIB, MIB
from tests.cpu.state import test_same_training as loops
from tests.cpu.state import training
from tests.cpu.state.test_spill import small_host  # noqa: F401 (a fixture)
from tests.cpu.state.training import MakeOptimizer, Training, When, plain_loop, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
]
CUDA = torch.device("cuda", 0)
adamw: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-2)


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(training.WHERE, "device", "cuda")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def homes() -> Iterator[Homes]:
    made = Homes(CUDA, GIB)
    yield made
    made.close()


# -- homes -------------------------------------------------------------------------------------------------------------


def test_kernels_read_and_write_tensors_at_home(homes: Homes) -> None:
    before = torch.cuda.memory_allocated()
    source = torch.randn(1000, 999, device=CUDA)
    home = homes.empty_like(source)
    assert home.device == source.device
    assert torch.cuda.memory_allocated() == before + source.untyped_storage().nbytes() // 512 * 512 + 512
    homes.wait(homes.send(source, home))
    assert torch.equal(home, source)
    assert torch.equal(home.clone(), source)
    assert torch.equal(home @ home.t(), source @ source.t())
    home.mul_(2)
    assert torch.equal(home, source * 2)
    back, done = homes.fetch(home)
    homes.wait(done)
    assert torch.equal(back, source * 2)
    assert torch.equal(torch._foreach_norm([home])[0], torch._foreach_norm([source * 2])[0])


def test_tensors_at_home_go_to_the_host_and_come_from_it(homes: Homes) -> None:
    source = torch.randn(300, 200)
    home = homes.empty_like(source)
    home.copy_(source)  # what load_state_dict does
    assert torch.equal(home.cpu(), source)
    assert torch.equal(home.to("cpu", non_blocking=True).clone(), source)
    assert float(home[3, 4].item()) == float(source[3, 4])
    file = io.BytesIO()
    torch.save({"home": home}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["home"].cpu(), source)
    homes.fill(home, source.double() + 1)
    torch.testing.assert_close(home.cpu(), source + 1)
    assert str(home[0, 0]).startswith("tensor(")


def test_memory_goes_when_the_last_tensor_has_gone(homes: Homes) -> None:
    for _ in range(4):
        home = homes.empty(torch.Size([64 * MIB]), (1,), torch.uint8)
        part = home[5:]
        part.fill_(7)
        total = part.float().sum()  # still running when the memory goes
        del home, part
        gc.collect()
        assert homes.used_bytes == 0
        assert float(total) > 0


def test_slow_copies_are_waited_for(homes: Homes) -> None:
    homes.delay_s = 0.01
    home = homes.empty(torch.Size([4 * MIB]), (1,), torch.uint8)
    for number in range(8):
        source = torch.full((4 * MIB,), number, dtype=torch.uint8, device=CUDA)
        done = homes.send(source, home)
        del source  # and its memory is asked for again
        torch.full((4 * MIB,), 99, dtype=torch.uint8, device=CUDA)
        homes.wait(done)
        homes.forget(done)
        back, done = homes.fetch(home)
        homes.wait(done)
        assert int(back.float().mean()) == number


# -- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fused", "foreach", "forloop", "default"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_steps_may_be_divided_by_parameter_and_by_element(name: str, kind: str) -> None:
    if (name, kind) == ("Adagrad", "fused"):
        pytest.skip("there is none on CUDA")
    kinds: dict[str, Any] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "forloop": {"foreach": False}}
    options = kinds.get(kind, {})
    parameters = [nn.Parameter(torch.randn(300, 257, device=CUDA)) for _ in range(3)]
    optimizer = getattr(torch.optim, name)(parameters, lr=1e-2, **options)
    found = splitting_of(optimizer)
    assert found.by_parameter, found.because
    assert found.by_element
    assert found.later


@pytest.mark.parametrize("fused", [False, True])
def test_large_spans_have_the_bits_of_the_whole(fused: bool) -> None:
    """Sizes at which kernels for many tensors divide their work, with unaligned ends."""
    torch.manual_seed(0)
    number = 5 * 65536 * 3 + 17
    start, grads = torch.randn(number, device=CUDA), [torch.randn(number, device=CUDA) for _ in range(3)]
    whole = nn.Parameter(start.clone())
    parts = [nn.Parameter(part.clone()) for part in start.split(4096 * 50)]
    one, many = (torch.optim.AdamW(p, lr=1e-2, fused=fused) for p in ([whole], parts))
    for grad in grads:
        whole.grad = grad
        one.step()
        for part, slice_ in zip(parts, grad.split(4096 * 50)):
            part.grad = slice_.clone()
            many.param_groups[0]["params"] = [part]
            many.step()
    assert torch.equal(whole, torch.cat(list(parts)))


def test_norms_do_not_depend_on_which_gradients_are_taken_together() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(shape, device=CUDA) for shape in ((1000, 1001), (70000,), (3,), (257, 255), (2048, 2048))]
    together = torch._foreach_norm(grads)
    alone = [torch._foreach_norm([grad])[0] for grad in grads]
    assert all(map(torch.equal, together, alone))


# -- training ----------------------------------------------------------------------------------------------------------


def assert_same(loop: training.Loop, make_optimizer: MakeOptimizer = adamw, **options: Any) -> None:
    net = options.get("net", training.Net)
    plain = train(loop, make_optimizer, net=net)
    plain.assert_same(train(loop, make_optimizer, net=net))  # or nothing could be shown
    plain.assert_same(train(loop, make_optimizer, folder=Path(), **options))


@pytest.fixture(params=list(When), ids=["at step", "later", "early"])
def later(request: pytest.FixtureRequest) -> When:
    return When(request.param)


@pytest.mark.parametrize("name", [name for name in loops.OPTIMIZERS if name != "tensor lr"])
def test_every_optimizer(name: str, later: When) -> None:
    assert_same(plain_loop(), loops.OPTIMIZERS[name], later=later)


@pytest.mark.parametrize("delay_s", [0.0, 0.003])
@pytest.mark.parametrize("window_bytes", [300 * KIB, 3000 * KIB])
def test_slow_copies_change_nothing(window_bytes: int, delay_s: float, later: When) -> None:
    assert_same(plain_loop(6), later=later, window_bytes=window_bytes, delay_s=delay_s)


@pytest.mark.parametrize("name", loops.LOOKS)
def test_looking_at_the_state_shows_the_truth(name: str, later: When) -> None:
    assert_same(loops.each_step(loops.LOOKS[name]), later=later, delay_s=0.002)


@pytest.mark.parametrize(
    "touch", [loops.scale_gradients, loops.other_gradients, loops.clip_values, loops.write_weights]
)
def test_writing_before_a_step(touch: Callable[[Training, int], None], later: When) -> None:
    assert_same(loops.between(touch), later=later, delay_s=0.002)


@pytest.mark.parametrize("net", loops.NETS)
def test_every_network(net: Callable[[], nn.Module], later: When) -> None:
    assert_same(plain_loop(), later=later, net=net, delay_s=0.001)


@pytest.mark.parametrize("name", ["momentum", "fused", "foreach", "adagrad"])
def test_clipping_accumulation_and_a_scheduler(name: str, later: When) -> None:
    assert_same(loops.clipped_loop, loops.OPTIMIZERS[name], later=later, delay_s=0.001)


@pytest.mark.parametrize("loop", [plain_loop(6), loops.clipped_loop], ids=["plain", "clipped"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_cpu_updates_what_is_at_home(fused: bool, loop: training.Loop) -> None:
    """It rounds differently. With SGD a difference in the last bits stays one."""
    make_optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=fused)
    ours, plain = train(loop, make_optimizer, folder=Path(), by_cpu=True), train(loop, make_optimizer)
    assert ours.counts["state_by_cpu"] > 0
    for name, weight in plain.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not reads_any_host_memory(CUDA), reason="needs a GPU that can access files")
@pytest.mark.usefixtures("small_host")
@pytest.mark.parametrize("delay_s", [0.0, 0.003])
def test_the_same_numbers_from_host_and_disk(delay_s: float, later: When) -> None:
    assert_same(loops.clipped_loop, later=later, delay_s=delay_s)


def test_the_device_holds_no_more_than_the_window(later: When) -> None:
    """16 layers of 16 MiB with AdamW: 1 GiB of state, of which 128 MiB may be on the device at a time."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16))).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = State(model, optimizer, window_bytes=128 * MIB, home_bytes=2 * GIB, later=bool(later))
    gc.collect()
    torch.cuda.synchronize()
    x = torch.randn(64, 2048, device=CUDA)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        with state.step():
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state.flush()
    torch.cuda.synchronize()
    assert all(is_at_home(p) for p in model.parameters())
    assert torch.cuda.max_memory_allocated() - before < (128 + 64) * MIB  # the window, activations and one gradient
    assert torch.cuda.memory_allocated() - before < MIB
    state.close()
    assert not any(is_at_home(p) for p in model.parameters())


def test_the_host_stays_near_the_device_and_fetches_ahead() -> None:
    """16 layers of 5 ms in a window that holds a few of them: a host that runs ahead sees no room become free."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16))).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = State(model, optimizer, window_bytes=64 * MIB, home_bytes=2 * GIB)
    ahead: list[int] = []
    for layer in model:
        layer.register_forward_hook(lambda *_: torch.cuda._sleep(10_000_000))
        layer.register_forward_pre_hook(lambda *_: ahead.append(len(state.window.ahead)))
    for _ in range(4):
        ahead.clear()
        with state.step():
            model(torch.randn(64, 1024, device=CUDA)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(state.window.homes._uses) <= MEMORY.most_uses_ahead
    assert sum(number > 0 for number in ahead) > len(ahead) / 2
    state.close()
