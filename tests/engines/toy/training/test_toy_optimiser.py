"""Muon's directions, AdamW's steps, and what a step without finite gradients leaves alone."""

import torch
from shoal.engines.toy.training.optimiser import Optimiser, orthogonal
from torch import Tensor, nn


def parameters() -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(1)
    shapes = {"attn.wq_a.weight": (2, 32, 64), "attn.wo_a.weight": (1, 64, 32), "norm.weight": (3, 16)}
    return {name: nn.Parameter(torch.randn(shape, generator=random)) for name, shape in shapes.items()}


def test_directions_are_orthogonal() -> None:
    for shape in ((3, 32, 128), (3, 128, 32)):
        matrices = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 1e-3
        found = torch.linalg.svdvals(orthogonal(matrices))
        assert float(found.min()) > 0.5
        assert float(found.max()) < 1.4


def test_every_stack_goes_downhill() -> None:
    own = parameters()
    optimiser = Optimiser(own, groups=4, weight_decay=0.0)
    goals = {name: torch.zeros_like(p) for name, p in own.items()}

    def loss() -> Tensor:
        return sum((((p - goals[n]) ** 2).mean() for n, p in own.items()), torch.zeros(()))

    before = float(loss().detach())
    for _ in range(30):
        loss().backward()
        optimiser.step(torch.tensor(0.05))
    assert float(loss().detach()) < 0.7 * before
    assert all(p.grad is None for p in own.values())


def test_gradients_that_are_not_finite_move_nothing_but_decay() -> None:
    own = parameters()
    optimiser = Optimiser(own, groups=4, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in own.items()}
    for p in own.values():
        p.grad = torch.full_like(p, torch.nan)
    norm = optimiser.step(torch.tensor(0.1))
    assert not bool(torch.isfinite(norm))
    assert all(torch.equal(p, before[name]) for name, p in own.items())


def test_only_the_rate_of_a_named_stack_changes() -> None:
    fast, slow = parameters(), parameters()
    for own, rates in ((fast, {}), (slow, {"norm.weight": 0.5})):
        for p in own.values():
            p.grad = torch.ones_like(p)
        start = own["norm.weight"].detach().clone()
        Optimiser(own, groups=4, rates=rates).step(torch.tensor(0.1))
        own["moved"] = nn.Parameter(own["norm.weight"].detach() - start)
    assert torch.allclose(fast["moved"], 2 * slow["moved"])
    assert torch.equal(fast["attn.wq_a.weight"], slow["attn.wq_a.weight"])
