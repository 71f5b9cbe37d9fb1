"""Lightning's trainer with our callback, against the same trainer without it: every bit of the module's state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from outcore.errors import BadSize, OutcoreError
from outcore.fitting.hooks import ACTIVE
from outcore.limit import Limited

pytest.importorskip("lightning", reason="run where Lightning is installed")
from outcore.integrations.lightning import MemoryLimit

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval", "ignore:.*GPU available"),
]
MEMORY = "2MiB"  # of 2.4 MiB that a step on sixteen images of 16 x 16 takes in-core


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    names = ("lightning.pytorch", "pytorch_lightning", "lightning.pytorch.utilities.rank_zero")
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    assert not ACTIVE
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Batches of images; `varying`: of four sizes."""

    def __init__(self, num: int, *, varying: bool = False) -> None:
        self.num, self.varying = num, varying

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        side = 8 + 4 * (index % 4) if self.varying else 16
        return torch.randn(16, 1, side, side, generator=generator), torch.randint(0, 10, (16,), generator=generator)


def network() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, 8, 3, padding=1)]
    for _ in range(4):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10))


def module_of(package: str, **own: Callable[..., Any]) -> Any:
    """A LightningModule of `package`, with `own` methods in the place of the usual ones."""

    def training_step(self: Any, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    body = {"training_step": training_step, "configure_optimizers": configure_optimizers, **own}
    kind = type("Module", (import_module(package).LightningModule,), body)
    torch.manual_seed(0)
    module = kind()
    module.network = network()
    module.automatic_optimization = "loop" not in own
    if "loop" in own:
        module.training_step = own["loop"].__get__(module)
    return module


def trainer(package: str, *callbacks: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"max_epochs": 1, "accelerator": "cpu", "enable_checkpointing": False, **quiet, **options}
    return import_module(package).Trainer(callbacks=list(callbacks), **options)


def compare(
    package: str = "lightning.pytorch",
    *,
    data: Images | None = None,
    more: Callable[[], list[Any]] = list,
    memory: str = MEMORY,
    own: dict[str, Callable[..., Any]] | None = None,
    **options: Any,
) -> Limited:
    """Fits twice, without and with the limit; what the limit showed."""
    limit = MemoryLimit(memory)
    states = []
    for callbacks in ([], [limit]):
        module = module_of(package, **(own or {}))
        loader: Any = DataLoader(data or Images(6), batch_size=None)
        trainer(package, *callbacks, *more(), **options).fit(module, loader)
        states.append(module.state_dict())
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    assert limit.ooc is not None
    assert limit.ooc.timeline is not None
    assert limit.ooc.timeline.peak_bytes <= limit.ooc.budget.device_bytes
    assert limit.ooc.stats()["left"] == limit.ooc.stats()["unplanned"] == 0
    return limit.ooc


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_both_packages(package: str) -> None:
    pytest.importorskip(package)
    ooc = compare(package, precision="bf16-mixed", gradient_clip_val=0.5)
    assert ooc.plan is not None
    assert ooc.stats()["planned"] >= 4
    ooc.close()


def test_a_budget_that_needs_a_plan_with_accumulation() -> None:
    ooc = compare(accumulate_grad_batches=2, data=Images(8))
    assert ooc.plan is not None
    assert ooc.plan.in_core_peak_bytes > ooc.budget.device_bytes
    ooc.close()


def test_sizes_that_vary_where_the_module_itself_is_never_called() -> None:
    ooc = compare(data=Images(16, varying=True))
    assert ooc.stats()["recorded"] < 6
    ooc.close()


def several_optimizers(self: Any, batch: tuple[Tensor, Tensor], index: int) -> None:
    for optimizer, factor in zip(self.optimizers(), (1.0, 0.5)):
        loss = F.cross_entropy(self.network(batch[0]), batch[1]) * factor
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def accumulate_by_hand(self: Any, batch: tuple[Tensor, Tensor], index: int) -> None:
    optimizer = self.optimizers()[0]
    self.manual_backward(F.cross_entropy(self.network(batch[0]), batch[1]))
    if index % 2:
        optimizer.step()
        optimizer.zero_grad()


def two_optimizers(self: Any) -> list[torch.optim.Optimizer]:
    parameters = list(self.parameters())
    return [torch.optim.SGD(parameters[:8], lr=0.05), torch.optim.Adam(parameters[8:], lr=0.01)]


@pytest.mark.parametrize("loop", [several_optimizers, accumulate_by_hand])
def test_manual_optimization(loop: Callable[..., Any]) -> None:
    own = {"loop": loop, "configure_optimizers": two_optimizers}
    compare(memory="4MiB", own=own, data=Images(8)).close()


def test_an_optimizer_that_calls_its_closure_several_times() -> None:
    def lbfgs(self: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    compare(memory="4MiB", own={"configure_optimizers": lbfgs}).close()


class Twice(torch.optim.SGD):
    """Looks at the gradient twice, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def test_one_that_nobody_knows_to_do_so_is_told_once() -> None:
    with pytest.warns(UserWarning, match="called its closure a second time"):
        compare(own={"configure_optimizers": lambda self: Twice(self.parameters(), lr=0.05)}, memory="4MiB").close()


def test_averaged_weights() -> None:
    """Stochastic weight averaging ends with an epoch of forwards without a backward."""
    callbacks = import_module("lightning.pytorch.callbacks")
    more = [lambda: callbacks.StochasticWeightAveraging(1e-2), callbacks.EMAWeightAveraging]
    for make in more:
        compare(more=lambda make=make: [make()], max_epochs=3, data=Images(4)).close()  # type: ignore[misc]


def test_batches_without_a_backward_and_epochs_that_are_cut_short() -> None:
    def training_step(self: Any, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        return None if index == 3 else loss

    def on_train_batch_start(self: Any, batch: Any, index: int) -> int | None:
        return -1 if index == 5 else None

    own = {"training_step": training_step, "on_train_batch_start": on_train_batch_start}
    compare(own=own, max_epochs=2, data=Images(7)).close()


def test_fitting_again_follows_the_plans_of_the_first_time() -> None:
    limit, states = MemoryLimit(MEMORY), []
    for callbacks in ([], [limit]):
        module: Any = module_of("lightning.pytorch")
        for _ in range(2):
            loader: Any = DataLoader(Images(5), batch_size=None)
            trainer("lightning.pytorch", *callbacks).fit(module, loader)
        states.append(module.state_dict())
    assert all(map(torch.equal, states[0].values(), states[1].values()))
    first = limit.ooc
    assert first is not None
    assert first.stats()["planned"] >= 7  # of 10; one more is recorded where the compiler was used before
    assert first.stats()["left"] == first.stats()["unplanned"] == 0
    other: Any = module_of("lightning.pytorch")
    trainer("lightning.pytorch", limit).fit(other, DataLoader(Images(2), batch_size=None))
    assert first.closed
    assert limit.ooc is not None
    assert limit.ooc.model is other
    limit.ooc.close()
    trainer("lightning.pytorch", limit).fit(other, DataLoader(Images(2), batch_size=None))
    assert not limit.ooc.closed
    limit.ooc.close()


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_exceptions_of_the_users(error: type[BaseException]) -> None:
    def training_step(self: Any, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        if index == 2:
            raise error("the user's own")
        return loss

    limit, module = MemoryLimit(MEMORY), module_of("lightning.pytorch", training_step=training_step)
    with pytest.raises((error, SystemExit)):  # Lightning leaves with SystemExit when it is interrupted
        trainer("lightning.pytorch", limit).fit(module, DataLoader(Images(4), batch_size=None))
    assert not ACTIVE
    assert limit.ooc is not None
    limit.ooc.close()


def test_options_of_limit_are_passed_on_and_a_bad_size_is_refused_at_once() -> None:
    with pytest.raises(BadSize, match="'lots' is not a size"):
        MemoryLimit("lots")
    with pytest.raises(OutcoreError, match="there is no option 'optimizer' here"):
        MemoryLimit(MEMORY, optimizer=None)
    limit = MemoryLimit("64MiB", measure=True, planner="swap", cache=False)
    trainer("lightning.pytorch", limit).fit(module_of("lightning.pytorch"), DataLoader(Images(2), batch_size=None))
    assert limit.ooc is not None
    assert (limit.ooc.measure, limit.ooc.planner) == (True, "swap")
    limit.ooc.close()
