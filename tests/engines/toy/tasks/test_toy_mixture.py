"""Mixtures: every task appears, lengths stay within the limit, and training never meets an examination."""

from collections import Counter
from random import Random

import pytest
from shoal.engines.toy.tasks import arithmetic, copying, dialogue, lexicon, pictures
from shoal.engines.toy.tasks.encoding import Codec, encode
from shoal.engines.toy.tasks.mixture import (
    LONG,
    MEDIUM,
    MIXTURES,
    POLISH,
    SHORT,
    TASKS,
    Mixture,
    encoded_sample,
    examination_random,
    sample,
    training_random,
)


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec.of()


@pytest.mark.parametrize(
    ("mixture", "tokens"),
    [(SHORT, 512), (POLISH, 512), (MEDIUM, 1024), (LONG, 4096)],
    ids=lambda value: str(value)[:16],
)
def test_samples_fit_and_all_tasks_appear(mixture: Mixture, tokens: int, codec: Codec) -> None:
    lengths: dict[str, list[int]] = {task: [] for task in TASKS}
    for i in range(200):
        drawn, encoded = encoded_sample(training_random(1, i), mixture, tokens, codec)
        lengths[drawn.task].append(len(encoded.ids))
    assert all(lengths.values())
    assert max(map(max, lengths.values())) <= tokens
    least, most = mixture.recall_tokens[0], min(tokens, mixture.recall_tokens[1])
    assert max(lengths["recall"]) > 0.75 * most
    assert min(lengths["recall"]) < least + 0.2 * (most - least)


def test_the_shares_are_the_weights(codec: Codec) -> None:
    counts = Counter(sample(Random(i), SHORT, 512).task for i in range(2000))
    total = sum(SHORT.weights.values())
    for task, weight in SHORT.weights.items():
        assert abs(counts[task] / 2000 - weight / total) < 0.04
    assert all(set(mixture.weights) == set(TASKS) for mixture in MIXTURES.values())


def test_a_sample_depends_on_seed_and_number_only(codec: Codec) -> None:
    first, again = (encoded_sample(training_random(7, 12345), LONG, 2048, codec)[1] for _ in range(2))
    assert first.ids.tolist() == again.ids.tolist()


def test_training_and_examination_do_not_meet() -> None:
    draws = {
        source(seed, i).getrandbits(64)
        for source in (training_random, examination_random)
        for seed in range(4)
        for i in range(500)
    }
    assert len(draws) == 4000


def test_recall_texts_of_examinations_are_new() -> None:
    texts = []
    for source in (training_random, examination_random):
        drawn = [sample(source(0, i), MEDIUM, 512) for i in range(150)]
        texts.append({repr(one.messages) for one in drawn if one.task == "recall"})
    assert texts[0]
    assert not texts[0] & texts[1]


def test_conversations_go_on_with_other_tasks(codec: Codec) -> None:
    """Answers of all tasks are marked; the last one is judged."""
    samples = [copying.generate(Random(1)), pictures.generate(Random(2), 2, 1), lexicon.generate(Random(3))]
    mixed = dialogue.in_one_conversation(samples)
    encoded = encode(mixed, codec)
    assert (mixed.task, len(encoded.canvases)) == ("lexicon", 2)
    assert mixed.is_right(samples[-1].wanted)
    said = codec.tokenizer.decode(encoded.ids[encoded.answer].tolist())
    assert said == "".join(sample.wanted.text for sample in samples)
    with pytest.raises(ValueError, match=r"samples\[0\] is of arithmetic and stands alone"):
        dialogue.in_one_conversation([arithmetic.generate(Random(1)), *samples])


def test_a_system_turn_is_added_once() -> None:
    sample = dialogue.with_system(Random(1), arithmetic.generate(Random(1)))
    assert [message["role"] for message in sample.messages] == ["system", "user"]
    assert dialogue.with_system(Random(2), sample) == sample


def test_a_limit_that_hardly_anything_fits_is_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match="tokens = 63 must be at least 64"):
        encoded_sample(Random(0), SHORT, 63, codec)
    assert len(encoded_sample(Random(0), SHORT, 64, codec)[1].ids) <= 64
