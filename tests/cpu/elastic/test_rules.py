"""The rules as pure functions: invariants of A6 that need no network."""

from __future__ import annotations

import torch

from outcore.elastic import rules
from outcore.elastic.wire import pieces


def exchange(
    workers: list[torch.Tensor], center: torch.Tensor, alpha: float
) -> tuple[list[torch.Tensor], torch.Tensor]:
    differences = [rules.difference(w, center) for w in workers]
    moved = [rules.worker_elastic(w, d, alpha) for w, d in zip(workers, differences)]
    return moved, rules.center_elastic(center, torch.stack(differences).sum(0), alpha)


def test_without_gradients_the_sum_is_conserved_and_all_meet_at_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    workers = [torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(4)]
    center = torch.randn(50, generator=generator, dtype=torch.float64)
    total = sum(workers, center.clone())
    for _ in range(400):
        workers, center = exchange(workers, center, 0.9 / 4)
        torch.testing.assert_close(sum(workers, center.clone()), total)
    for vector in (*workers, center):
        torch.testing.assert_close(vector, total / 5, atol=1e-9, rtol=0)


def test_past_the_bound_they_part() -> None:
    generator = torch.Generator().manual_seed(0)
    workers = [torch.randn(5, generator=generator) for _ in range(4)]
    center = torch.zeros(5)
    for _ in range(100):
        workers, center = exchange(workers, center, 0.5)
    assert center.abs().max() > 1e3


def test_rules_are_pure_without_out_and_in_place_with_it() -> None:
    weights, center = torch.arange(4.0), torch.ones(4)
    result = rules.worker_elastic(weights, rules.difference(weights, center), 0.25)
    assert weights.tolist() == [0, 1, 2, 3]
    same = rules.worker_elastic(weights, rules.difference(weights, center), 0.25, out=weights)
    assert same is weights
    torch.testing.assert_close(weights, result)


def test_momentum_and_look_ahead() -> None:
    velocity = rules.momentum(torch.tensor([2.0]), torch.tensor([-0.5]), 0.9)
    assert velocity.item() == 1.2999999523162842
    assert rules.look_ahead(torch.tensor([1.0]), torch.tensor([2.0]), 0.5).item() == 2.0


def test_the_outer_step_without_momentum_is_the_sync_centre_step() -> None:
    center, mean = torch.randn(9), torch.randn(9)
    moved, velocity = rules.outer_nesterov(center, torch.zeros(9), mean, rate=0.9, mu=0.0)
    torch.testing.assert_close(moved, rules.center_elastic(center, 4 * mean, 0.9 / 4))
    torch.testing.assert_close(velocity, -mean)


def test_a_rule_gives_the_same_bits_piece_by_piece_whatever_the_number_of_threads() -> None:
    generator, num_threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    center, total = (torch.randn(300_017, generator=generator) for _ in range(2))
    try:
        for num in (1, 2):
            torch.set_num_threads(num)
            moved = torch.empty_like(center)
            num_pieces = 0
            for old, difference, new in pieces(center, total, moved):
                rules.center_elastic(old, difference, 0.3, out=new)
                num_pieces += 1
            assert num_pieces > 2
            assert torch.equal(moved, rules.center_elastic(center, total, 0.3))
    finally:
        torch.set_num_threads(num_threads)
