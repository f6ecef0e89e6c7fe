"""Greedy acceptance and the rejection rule."""

import torch
from shoal.engines.toy.evaluate.choice import Greedy, Sampled, draw, leading

SEQUENCES = 20_000


def test_greedy_accepts_while_the_model_agrees():
    wanted = torch.tensor([[3, 1, 4], [3, 1, 4], [0, 1, 4]])
    target = torch.nn.functional.one_hot(torch.tensor([[3, 1, 4, 2]] * 3), 6).float()
    accepted, after = Greedy().judge(wanted, target[:, :3], target, torch.arange(3))
    assert accepted.tolist() == [3, 3, 0]
    assert after.tolist() == [2, 2, 3]
    drafts = torch.tensor([[3, 0, 4]])
    accepted, after = Greedy().judge(drafts, target[:1, :3], target[:1], torch.arange(1))
    assert (accepted.tolist(), after.tolist()) == ([1], [1])


def test_leading_stops_at_the_first_false():
    assert leading(torch.tensor([[True, False, True], [False, True, True], [True, True, True]])).tolist() == [1, 0, 3]


def test_draw_follows_the_weights_and_never_takes_a_zero():
    weights = torch.tensor([[0.0, 3.0, 0.0, 1.0]], dtype=torch.float64).expand(5, -1)
    places = torch.tensor([0.0, 0.5, 0.74, 0.76, 0.999], dtype=torch.float64)
    assert draw(weights, places).tolist() == [1, 1, 1, 3, 3]


def test_the_rejection_rule_keeps_the_models_distribution():
    """Whatever was proposed, first and second tokens are distributed as the model's own."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(1, 3, 5, generator=generator)
    proposed = torch.randn(1, 2, 5, generator=generator)
    choice, live = Sampled([(7, i) for i in range(SEQUENCES)]), torch.arange(SEQUENCES)
    logits = proposed.expand(SEQUENCES, -1, -1)
    drafts = torch.stack([choice.token(logits[:, i], live) for i in range(2)], dim=1)
    accepted, after = choice.judge(drafts, logits, target.expand(SEQUENCES, -1, -1), live)
    first = torch.where(accepted > 0, drafts[:, 0], after)
    second = torch.where(accepted > 1, drafts[:, 1], after)[accepted > 0]
    for tokens, row in ((first, 0), (second, 1)):
        found = torch.bincount(tokens, minlength=5) / len(tokens)
        assert torch.allclose(found, torch.softmax(target[0, row], -1), atol=0.015)
    overlap = torch.minimum(torch.softmax(target[0, 0], -1), torch.softmax(proposed[0, 0], -1)).sum()
    assert abs(float((accepted > 0).double().mean() - overlap)) < 0.015


def test_a_sequences_random_numbers_do_not_depend_on_company():
    logits = torch.zeros(3, 50)
    together = Sampled([(1, 0), (1, 1), (1, 2)]).token(logits, torch.arange(3))
    alone = Sampled([(1, 0), (1, 1), (1, 2)]).token(logits[:1], torch.tensor([2]))
    assert together[2] == alone[0]
    assert len(set(Sampled([(1, i) for i in range(20)]).token(torch.zeros(20, 999), torch.arange(20)).tolist())) > 10
