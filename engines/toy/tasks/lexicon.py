"""N-gram lookup: a fixed dictionary from two adjacent words to a third, to be known by heart."""

from functools import cache, partial
from random import Random

from shoal.engines.toy.tasks.sample import Answer, Sample
from shoal.engines.toy.tasks.words import ADJECTIVES, NOUNS

PAIRS = 1500
SEED = 20
QUESTIONS = (
    "In the lexicon, what does {} mean?", "Look up {} in the lexicon.",
    "What do these entries of the lexicon mean: {}?",
    "Lexicon: {}?", "Please translate with the lexicon: {}.", "Tell me what {} means in the lexicon.",
    "I found {} in the lexicon. What does it mean?",
)  # fmt: skip


@cache
def lexicon() -> dict[tuple[str, str], str]:
    """The dictionary (adjective, noun) to word: the same in training and examination."""
    dice = Random(SEED)
    pairs = [(adjective, noun) for adjective in ADJECTIVES for noun in NOUNS]
    return {pair: dice.choice(NOUNS) for pair in sorted(dice.sample(pairs, PAIRS))}


def generate(dice: Random, asked: int = 0) -> Sample:
    """A question for `asked` entries (0: two to four); the answer names each with its meaning."""
    entries = dice.sample(_entries(), asked or dice.randint(2, 4))
    question = dice.choice(QUESTIONS).format(", ".join(f"{a} {n}" for (a, n), _ in entries))
    meanings = tuple((f"{a} {n}", word) for (a, n), word in entries)
    answer = ", ".join(f"{pair} means {word}" for pair, word in meanings) + "."
    wanted = f"In the lexicon, {answer}"
    return Sample("lexicon", ({"role": "user", "content": question},), Answer(wanted), partial(is_entry, wanted))


def is_entry(wanted: str, answer: Answer) -> bool:
    """Whether every entry is given with its meaning, in the order asked."""
    return answer.text.strip() == wanted


def share_right(wanted: Answer, answer: Answer) -> float:
    """The part of the entries of a wanted answer that another answer has right, from 0 to 1."""
    entries = wanted.text.removeprefix("In the lexicon, ").rstrip(".").split(", ")
    given = answer.text.strip().removeprefix("In the lexicon, ").rstrip(".").split(", ")
    return sum(entry in given for entry in entries) / len(entries)


@cache
def _entries() -> tuple[tuple[tuple[str, str], str], ...]:
    return tuple(lexicon().items())
