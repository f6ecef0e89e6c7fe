"""The network that is trained computes what is served: same tokens from the shipped weights, packed or alone."""

from random import Random

import pytest
import torch
from shoal.engines.model.decoder import Model
from shoal.engines.toy.build import ensure_toy
from shoal.engines.toy.tasks import arithmetic, lexicon, recall, schema
from shoal.engines.toy.tasks.encoding import Codec, encode
from shoal.engines.toy.tasks.sample import Encoded
from shoal.engines.toy.training.network import Options
from shoal.engines.toy.training.packing import collate, pack
from shoal.engines.toy.training.stacks import Stacks
from shoal.engines.toy.training.state import start
from shoal.engines.toy.training.step import Learner
from torch import Tensor

SERVED = Options(is_sparse=True)


@pytest.fixture(scope="module")
def served() -> Model:
    return Model.load(ensure_toy(), with_drafter=False)


@pytest.fixture(scope="module")
def learner(served: Model) -> Learner:
    return Learner(served.config, Stacks(served.config, start(served.config, 1, ensure_toy()), torch.device("cpu")))


@pytest.fixture(scope="module")
def samples() -> list[Encoded]:
    codec, dice = Codec.of(), Random(11)
    drawn = [recall.generate(dice, tokens=380, needles=4, turns=2), schema.generate(dice), lexicon.generate(dice)]
    return [encode(sample, codec) for sample in (*drawn, arithmetic.generate(dice))]


def trained_logits(learner: Learner, served: Model, packs: list[Encoded]) -> list[Tensor]:
    """Logits of each document of one pack, as training computes them."""
    packed = pack([(0, s) for s in packs], (2, 512), 10, served.config, served.engram, 140)
    batch = collate([packed], 10, served.config)
    batch.rows.lower.zero_()
    with torch.no_grad():
        weights = learner.stacks.step_weights()
        output = learner.network.forward(weights, batch.rows, learner.embed(weights, batch), SERVED)
        logits = output.hidden.float() @ weights["head.weight"].float().T
    order = sorted(range(len(packs)), key=lambda i: -len(packs[i].ids))
    numbers = {place: number for number, place in enumerate(order, start=1)}
    return [logits[batch.rows.document == numbers[i]] for i in range(len(packs))]


def test_likeliest_tokens_are_those_of_the_served_model(
    learner: Learner, served: Model, samples: list[Encoded]
) -> None:
    """BF16 sums in another order and FP4 rounding move logits a little; almost no token may change."""
    for logits, sample in zip(trained_logits(learner, served, samples), samples, strict=True):
        ids, mask = torch.from_numpy(sample.ids).long(), torch.from_numpy(sample.image_mask)
        reference = served.logits(served.forward_full(ids, mask, torch.empty(0, served.config.hidden)).hidden)
        same = (logits.argmax(-1) == reference.argmax(-1)).float().mean()
        assert float(same) > 0.95
        assert float((logits - reference).norm() / reference.norm()) < 0.15


def test_neighbours_in_a_pack_do_not_matter(learner: Learner, served: Model, samples: list[Encoded]) -> None:
    together = trained_logits(learner, served, samples)
    alone = trained_logits(learner, served, samples[1:2])[0]
    assert (together[1].argmax(-1) == alone.argmax(-1)).float().mean() > 0.97
    assert float((together[1] - alone).norm() / alone.norm()) < 0.1
