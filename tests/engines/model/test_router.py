"""The router's weights: renormalised over several experts, the bare score of a single one."""

import torch
from shoal.engines.model.moe import Expert, MoeRules, MoeWeights, route
from shoal.engines.model.numerics import Linear

HIDDEN, EXPERTS, SCALE = 8, 5, 1.5


def router(seed: int) -> MoeWeights:
    random = torch.Generator().manual_seed(seed)
    nothing = Linear(torch.zeros(1, 1))
    unused = Expert(nothing, nothing)
    rows = torch.randn(EXPERTS, HIDDEN, generator=random)
    biases = torch.randn(2, EXPERTS, generator=random)
    return MoeWeights(rows, biases[0], biases[1], (), unused)


def test_several_experts_share_the_scale() -> None:
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    routing = route(x, router(2), torch.zeros(6, dtype=torch.bool), MoeRules(3, SCALE, 10.0))
    assert torch.allclose(routing.weights.sum(-1), torch.full((6,), SCALE))


def test_a_single_expert_keeps_its_unbiased_score() -> None:
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    weights = router(2)
    routing = route(x, weights, torch.zeros(6, dtype=torch.bool), MoeRules(1, SCALE, 10.0))
    scores = torch.nn.functional.softplus(x @ weights.router.T).sqrt()
    assert torch.equal(routing.choice.squeeze(-1), (scores + weights.bias).argmax(-1))
    assert torch.allclose(routing.weights, scores.gather(-1, routing.choice) * SCALE)
    assert routing.weights.std() > 0.01
