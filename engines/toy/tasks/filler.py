"""Filler of long texts: plain templated sentences, many of them facts that look like the ones that are asked."""

import re
from random import Random

from shoal.engines.toy.tasks.prose import CHARACTERS_PER_TOKEN, sentences
from shoal.engines.toy.tasks.words import ADJECTIVES, CITIES, COLOURS, DAYS, MONTHS, NAMES, NOUNS

# Distractors carry the same names as the needles (half of the time) and other attributes than a code.
DISTRACTORS = (
    "The colour of the {name} is {colour}.", "The weight of the {name} is {number} kilos.",
    "The age of the {name} is {number} years.", "The owner of the {name} is {person}.",
    "The {name} was seen in {city} on {day}.", "The price of the {name} is {number} coins.",
    "The {name} is older than the {other}.", "{person} likes the {name} more than the {other}.",
    "The home of the {name} is {city}.", "The number of the {name} is {number}.",
    "Nobody has seen the {name} since {month}.", "The {name} and the {other} arrived on {day}.",
)  # fmt: skip
PLAIN = (
    "{person} went to the {noun} in the morning and came back with {person2}.",
    "In {month} the {noun} near {city} was {adjective} and {adjective2}.",
    "{person} and {person2} walked to the {noun} on {day}.",
    "There were {number} coins on the table, but {person} did not count them.",
    "On {day} it rained in {city}, and {person} stayed at home.",
    "The {adjective} road from {city} leads to the {adjective2} {noun}.",
    "{person} wrote a letter about the {noun} and sent it to {person2}.",
    "Every {day} the people of {city} meet at the {noun}.",
    "It is said that the {noun} is {adjective}, but {person} does not think so.",
    "{person} asked {person2} whether the {noun} was still {adjective}.",
    "After the summer {person} moved from {city} to the {adjective} house.",
    "The {adjective} wind came over the {noun} and the night was {adjective2}.",
)  # fmt: skip
PROSE_SHARE, DISTRACTOR_SHARE = 0.1, 0.45
# One token for each word, digit (and the space before a number) and mark.
_TOKENS = re.compile(r"[^\W\d_]+|\d| (?=\d)|[^\w\s]|\n+|_")


def token_estimate(text: str) -> int:
    """About how many tokens a text of the tasks' own words has, without tokenising it."""
    return len(_TOKENS.findall(text))


def filler_sentence(dice: Random, names: list[str]) -> tuple[str, int]:
    """One sentence that holds no code, and its tokens, about: a distractor, a plain one, or prose (one in ten)."""
    kind = dice.random()
    if kind < PROSE_SHARE:
        sentence = dice.choice(sentences())
        return sentence, round(len(sentence) / CHARACTERS_PER_TOKEN)
    sentence = distractor(dice, names) if kind < PROSE_SHARE + DISTRACTOR_SHARE else plain_sentence(dice)
    return sentence, token_estimate(sentence)


def distractor(dice: Random, names: list[str]) -> str:
    """A fact that is no code, of one of `names` or of a name that shares a word with one."""
    return dice.choice(DISTRACTORS).format(
        name=_similar(dice, names),
        other=_similar(dice, names),
        colour=dice.choice(COLOURS),
        number=dice.randint(2, 99),
        person=dice.choice(NAMES),
        city=dice.choice(CITIES),
        day=dice.choice(DAYS),
        month=dice.choice(MONTHS),
    )


def _similar(dice: Random, names: list[str]) -> str:
    """A name that is asked, or shares a word with one, or a fresh one."""
    name = dice.choice(names)
    kind = dice.random()
    if kind < 0.4:
        return name
    adjective, noun = name.split(" ")
    if kind < 0.6:
        return f"{adjective} {dice.choice(NOUNS)}"
    if kind < 0.8:
        return f"{dice.choice(ADJECTIVES)} {noun}"
    return f"{dice.choice(ADJECTIVES)} {dice.choice(NOUNS)}"


def plain_sentence(dice: Random) -> str:
    """A sentence of people, places and days."""
    return dice.choice(PLAIN).format(
        person=dice.choice(NAMES),
        person2=dice.choice(NAMES),
        noun=dice.choice(NOUNS),
        adjective=dice.choice(ADJECTIVES),
        adjective2=dice.choice(ADJECTIVES),
        number=dice.randint(2, 99),
        city=dice.choice(CITIES),
        day=dice.choice(DAYS),
        month=dice.choice(MONTHS),
    )
