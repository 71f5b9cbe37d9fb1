"""Further initial weights of the same model, for further starts of a comparison."""

from __future__ import annotations

import random
import weakref
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from outcore.tuning.trainings.initial_weights import InitialWeights
from outcore.tuning.trainings.runs import Candidate
from tests.cpu.tuning.nets import convnet, make_sgd, mlp
from tests.cpu.tuning.scripted import comparison_of
from tests.cpu.tuning.test_tune import generators


def test_every_start_has_weights_and_buffers_of_its_own_made_once() -> None:
    torch.manual_seed(7)
    history, num_made = comparison_of(convnet()).history, 0
    trainer = history.trainer

    def make() -> torch.nn.Module:
        nonlocal num_made
        num_made += 1
        model = convnet()
        model.get_buffer("1.running_mean").fill_(num_made)
        return model

    weights = InitialWeights(make, trainer.model, trainer.optimizer, 1 << 30)
    begun: list[list[torch.Tensor]] = []

    def load(start: int) -> bool:
        differ = weights.load(start)
        assert differ == (start > 0)
        begun.append([tensor.clone() for tensor in trainer.model.state_dict().values()])
        return differ

    trainer.load_start = load
    before = deepcopy(trainer.model.state_dict())
    for start in (0, 1, 2, 1):
        history.run(Candidate("one", 32, 0.05, 0.05), 0.2, 60.0, start=start)
    torch.testing.assert_close(trainer.model.state_dict(), before, rtol=0, atol=0)
    assert num_made == 2
    assert all(map(torch.equal, begun[0], before.values()))
    assert all(map(torch.equal, begun[1], begun[3]))
    assert len({float(tensors[0].detach().sum()) for tensors in begun}) == 3
    means = [tensors[[*before].index("1.running_mean")] for tensors in begun]
    assert [float(mean.mean()) for mean in means] == [0, 1, 2, 1]
    assert trainer.starts_differ


def test_the_model_keeps_its_weights_where_no_others_can_be_made() -> None:
    """One model instead of a function, no memory, a function whose models differ, are all the same, or that fails."""
    model = mlp()
    optimizer, before = make_sgd(model.parameters()), deepcopy(model.state_dict())
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def same() -> torch.nn.Module:
        other = mlp()
        other.load_state_dict(before)
        return other

    def fails() -> torch.nn.Module:
        raise RuntimeError("can be called once")

    for make in (model, convnet, same, fails, lambda: model):
        assert not InitialWeights(make, model, optimizer, 1 << 30).load(1)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not InitialWeights(mlp, model, optimizer, 3 * model_bytes - 1).load(1)  # two models, and a copy of one
    assert InitialWeights(mlp, model, optimizer, 3 * model_bytes).load(1)
    assert not torch.equal(model.state_dict()["1.weight"], before["1.weight"])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # momentum is as large as the model, and counts
    assert not InitialWeights(mlp, model, optimizer, 4 * model_bytes - 1).load(2)
    assert InitialWeights(mlp, model, optimizer, 4 * model_bytes).load(2)


def test_making_weights_restores_the_generators_and_leaves_no_model_behind() -> None:
    """A model may refer to itself; Python's and NumPy's generators may have a part in its weights."""
    alive: list[Any] = []

    class Circular(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([random.random(), np.random.rand(), float(torch.rand(1))]))
            self.me = [self]
            alive.append(weakref.ref(self))

    model = Circular()
    weights, before = InitialWeights(Circular, model, make_sgd(model.parameters()), 1 << 30), generators()
    loaded = []
    for start in (1, 2):
        assert weights.load(start)
        loaded.append(model.weight.detach().clone())
    assert (loaded[0] != loaded[1]).all()
    assert [reference() is not None for reference in alive] == [True, False, False]
    assert before == generators()
