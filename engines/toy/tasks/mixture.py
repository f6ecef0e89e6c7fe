"""Mixtures of the tasks to train on, four of them as data, and random sources apart from those of examinations."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from shoal.engines.toy.tasks import arithmetic, chat, copying, dialogue, lexicon, pictures, prose, recall, schema, tools
from shoal.engines.toy.tasks.encoding import Codec, encode
from shoal.engines.toy.tasks.sample import Encoded, Sample

# The least limit of a sample; about a third of them are that short.
TOKENS_MIN = 64
# What the estimate of a recall sample's length may be short of.
RECALL_MARGIN = 0.025
# Least tokens of a recall sample for each of its codes and questions: most of it is to stay filler.
NEEDLE_ROOM, TURN_ROOM = 32, 80


@dataclass(frozen=True, slots=True)
class Mixture:
    """Shares of the tasks (any positive numbers), and the lengths of those that have a choice, in tokens.

    recall_tokens, prose_tokens: (least, most), cut to what a sample may have; recall lengths are drawn so that each
    doubling is as frequent as another when `recall_is_log`, else evenly. recall_needles: (least, most) codes in a
    text; recall_turns_max: questions about them.
    """

    name: str
    weights: Mapping[str, float]
    recall_tokens: tuple[int, int]
    recall_needles: tuple[int, int]
    recall_turns_max: int
    prose_tokens: tuple[int, int]
    recall_is_log: bool = True


# Shares of samples, not of tokens: a recall sample has up to forty times the tokens of another, so where texts are long
# few of them fill most rows. At equal shares the other tasks had 4 % of the tokens at 4,000, and were forgotten.
OTHERS = {
    "copying": 0.15, "lexicon": 0.17, "schema": 0.12, "tools": 0.12, "arithmetic": 0.12, "pictures": 0.17, "chat": 0.09,
    "prose": 0.04,
}  # fmt: skip
# More of what is learned slowest.
HARDER = OTHERS | {"copying": 0.22, "tools": 0.16, "pictures": 0.45}
SHORT = Mixture("short", OTHERS | {"recall": 0.35}, (64, 450), (1, 5), 4, (64, 400))
POLISH = Mixture("polish", HARDER | {"recall": 0.3}, (64, 450), (1, 5), 4, (64, 400))
MEDIUM = Mixture("medium", HARDER | {"pictures": 0.3, "recall": 0.35}, (128, 2000), (2, 10), 8, (64, 800))
LONG = Mixture(
    "long", HARDER | {"pictures": 0.3, "recall": 0.2}, (256, 4000), (4, 16), 10, (64, 1000), recall_is_log=False
)
MIXTURES = {mixture.name: mixture for mixture in (SHORT, POLISH, MEDIUM, LONG)}

GENERATORS: Mapping[str, Callable[[Random], Sample]] = {
    "copying": copying.generate,
    "lexicon": lexicon.generate,
    "schema": schema.generate,
    "tools": tools.generate,
    "arithmetic": arithmetic.generate,
    "pictures": pictures.generate,
    "chat": chat.generate,
}
# Tasks that may follow each other in one conversation, and how often they do; and how often a system turn is added.
_SHORT_TALK = ("copying", "lexicon", "chat")
DIALOGUE_SHARE, SYSTEM_SHARE = 0.15, 0.1
TASKS = ("recall", *GENERATORS, "prose")


def training_random(seed: int, index: int) -> Random:
    """The source of training sample `index`: depends on nothing else, so any worker can draw any sample."""
    return _random(f"shoal toy training {seed} {index}")


def examination_random(seed: int, index: int) -> Random:
    """The source of examination sample `index`: of no training sample, whatever the seeds."""
    return _random(f"shoal toy examination {seed} {index}")


def sample(dice: Random, mixture: Mixture, tokens: int) -> Sample:
    """One sample of the mixture; recall and prose have at most about `tokens` tokens, other tasks what they have."""
    task = dice.choices(tuple(mixture.weights), tuple(mixture.weights.values()))[0]
    if task == "prose":
        return prose.generate(dice, _length(dice, mixture.prose_tokens, tokens, True))
    drawn = _recall(dice, mixture, tokens) if task == "recall" else GENERATORS[task](dice)
    if task in (*_SHORT_TALK, "pictures") and dice.random() < DIALOGUE_SHARE:
        before = [GENERATORS[dice.choice(_SHORT_TALK)](dice) for _ in range(dice.randint(1, 3))]
        drawn = dialogue.in_one_conversation([*before, drawn])
    return dialogue.with_system(dice, drawn) if dice.random() < SYSTEM_SHARE else drawn


def encoded_sample(dice: Random, mixture: Mixture, tokens: int, codec: Codec) -> tuple[Sample, Encoded]:
    """A sample that has at most `tokens` tokens, and its ids; redrawn until it fits.

    Raises ValueError for a limit below 64 tokens, which most tasks never meet.
    """
    if tokens < TOKENS_MIN:
        raise ValueError(f"tokens = {tokens} must be at least {TOKENS_MIN}: few samples are shorter; raise it")
    while True:
        drawn = sample(dice, mixture, tokens)
        encoded = encode(drawn, codec)
        if len(encoded.ids) <= tokens:
            return drawn, encoded


def _recall(dice: Random, mixture: Mixture, tokens: int) -> Sample:
    length = _length(dice, mixture.recall_tokens, round(tokens * (1 - RECALL_MARGIN)), mixture.recall_is_log)
    needles = min(dice.randint(*mixture.recall_needles), max(1, length // NEEDLE_ROOM))
    turns = dice.randint(1, min(needles, mixture.recall_turns_max, max(1, length // TURN_ROOM)))
    return recall.generate(dice, length, needles, turns)


def _length(dice: Random, limits: tuple[int, int], tokens: int, is_log: bool) -> int:
    least, most = min(limits[0], tokens), min(limits[1], tokens)
    share = dice.random()
    return round(least * (most / least) ** share if is_log else least + (most - least) * share)


def _random(name: str) -> Random:
    return Random(int.from_bytes(hashlib.sha256(name.encode()).digest()[:16]))
