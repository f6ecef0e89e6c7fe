"""Copying: reverse a list, spell a word, repeat words or letters, continue a pattern; all answers are exact."""

import string
from functools import partial
from random import Random

from shoal.engines.toy.tasks.sample import Answer, Sample
from shoal.engines.toy.tasks.words import ADJECTIVES, CITIES, COLOURS, NOUNS

WORDS = tuple(sorted({*ADJECTIVES, *NOUNS, *COLOURS}))
REVERSE = (
    "Reverse this list: {}.", "Put these words in reverse order: {}.", "Write this list backwards: {}.",
    "Say these words in reverse: {}.",
)  # fmt: skip
SPELL = (
    "Spell the word {}.", "Spell {} letter by letter.", "How do you spell {}?", "Please spell the word {} for me.",
)  # fmt: skip
REPEAT = (
    "Repeat exactly: {}", "Repeat this: {}", "Copy this text: {}", "Write the same again: {}",
    "Say this word for word: {}",
)  # fmt: skip
CONTINUE = (
    "Continue the pattern with {} more words: {}", "What are the next {} words? {}", "Give the next {} words of: {}",
)  # fmt: skip


def generate(dice: Random) -> Sample:
    """One of the four exercises, in equal shares."""
    exercise = dice.choice((reverse, spell, repeat, proceed))
    question, answer = exercise(dice)
    return Sample("copying", ({"role": "user", "content": question},), Answer(answer), partial(is_exactly, answer))


def is_exactly(wanted: str, answer: Answer) -> bool:
    """Whether the text is the wanted one, white space at its ends aside."""
    return answer.text.strip() == wanted


def reverse(dice: Random) -> tuple[str, str]:
    """Three to seven different words, asked backwards."""
    words = dice.sample(WORDS, dice.randint(3, 7))
    return dice.choice(REVERSE).format(", ".join(words)), f"In reverse: {', '.join(reversed(words))}."


def spell(dice: Random) -> tuple[str, str]:
    """A word letter by letter."""
    word = dice.choice(WORDS + CITIES)
    return dice.choice(SPELL).format(word), f"The word {word} is spelled {'-'.join(word.upper())}."


def repeat(dice: Random) -> tuple[str, str]:
    """Words with repetitions, letters or digits, to be said again."""
    kind = dice.random()
    if kind < 0.6:
        text = " ".join(dice.choices(WORDS, k=dice.randint(4, 14)))
    elif kind < 0.8:
        text = " ".join(dice.choices(string.ascii_uppercase, k=dice.randint(5, 14)))
    else:
        text = "".join(dice.choices(string.digits, k=dice.randint(5, 12)))
    return dice.choice(REPEAT).format(text), text


def proceed(dice: Random) -> tuple[str, str]:
    """A pattern of two to four words, shown at least twice and cut anywhere, to be continued."""
    pattern = dice.sample(WORDS, dice.randint(2, 4))
    shown = dice.randint(2 * len(pattern), 3 * len(pattern) + 1)
    more = dice.randint(3, 6)
    words = [pattern[i % len(pattern)] for i in range(shown + more)]
    return dice.choice(CONTINUE).format(more, " ".join(words[:shown])), " ".join(words[shown:])
