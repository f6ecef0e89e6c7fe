"""Pictures: colour, shape, count and place of drawn things, in one or two pictures of a prompt."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

from shoal.engines.toy.tasks.chat import plural, says
from shoal.engines.toy.tasks.drawing import SHAPES, Picture, Thing, draw_picture
from shoal.engines.toy.tasks.sample import Answer, Sample
from shoal.engines.toy.tasks.words import COLOURS, article, joined

TWO_SHARE = 0.25
NUMBERS = ("no", "one", "two", "three", "four")
PICTURES = ("the first picture", "the second picture")
Exchange = tuple[str, str]
Question = Callable[[Random, Picture, str], Exchange]


def generate(dice: Random, images: int = 0, turns: int = 0) -> Sample:
    """`images` pictures (0: one, sometimes two) and `turns` questions about them (0: one to three).

    All answers are whole sentences with one right text; the last is judged.
    """
    images = images or (2 if dice.random() < TWO_SHARE else 1)
    pictures = [draw_picture(dice) for _ in range(images)]
    names = PICTURES if images == 2 else ("the picture",)
    asked = []
    for _ in range(turns or dice.choice((1, 1, 2, 3))):
        which = dice.randrange(images)
        asked.append(_ask(dice, pictures[which], names[which]))
    parts: list[Mapping[str, Any]] = [{"type": "image"}] * images
    parts.insert(dice.choice((0, images)), {"type": "text", "text": asked[0][0]})
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": parts}]
    for (_, answer), (question, _) in pairwise(asked):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    wanted = asked[-1][1]
    pixels = tuple(picture.pixels for picture in pictures)
    return Sample("pictures", tuple(messages), Answer(wanted), partial(says, wanted), images=pixels)


def _ask(dice: Random, picture: Picture, name: str) -> Exchange:
    questions: tuple[Question, ...] = (_colour, _shape, _place, _what_is_at, _count, _count_of_kind, _describe)
    return dice.choice(questions)(dice, picture, name)


def _colour(dice: Random, picture: Picture, name: str) -> Exchange:
    """The colour of a shape that is there once; without such a shape, the whole picture."""
    thing = _unique(dice, picture, lambda thing: thing.shape)
    if thing is None:
        return _describe(dice, picture, name)
    question = dice.choice(("What colour is the {} in {}?", "What is the colour of the {} in {}?"))
    return question.format(thing.shape, name), f"The {thing.shape} in {name} is {thing.colour}."


def _shape(dice: Random, picture: Picture, name: str) -> Exchange:
    thing = _unique(dice, picture, lambda thing: thing.colour)
    if thing is None:
        return _describe(dice, picture, name)
    question = dice.choice(("What shape is the {} object in {}?", "Which shape does the {} object in {} have?"))
    return question.format(thing.colour, name), f"The {thing.colour} object in {name} is {article(thing.shape)}."


def _place(dice: Random, picture: Picture, name: str) -> Exchange:
    thing = dice.choice(picture.things)
    question = dice.choice(("Where is the {} in {}?", "Where can I see the {} in {}?", "Find the {} in {}."))
    return question.format(thing.name, name), f"The {thing.name} in {name} is at the {thing.place}."


def _what_is_at(dice: Random, picture: Picture, name: str) -> Exchange:
    thing = dice.choice(picture.things)
    question = dice.choice(("What is at the {} of {}?", "What do you see at the {} of {}?"))
    return question.format(thing.place, name), f"At the {thing.place} of {name} is {article(thing.name)}."


def _count(dice: Random, picture: Picture, name: str) -> Exchange:
    question = dice.choice(
        ("How many objects are in {}?", "How many shapes do you see in {}?", "Count the objects in {}.")
    )
    return question.format(name), _there_are(len(picture.things), "object", name)


def _count_of_kind(dice: Random, picture: Picture, name: str) -> Exchange:
    """How many things have a colour or a shape; one that is there, mostly."""
    thing = dice.choice(picture.things)
    is_there = dice.random() < 0.8
    if dice.random() < 0.5:
        colour = thing.colour if is_there else dice.choice(COLOURS)
        number = sum(thing.colour == colour for thing in picture.things)
        return f"How many {colour} objects are in {name}?", _there_are(number, f"{colour} object", name)
    shape = thing.shape if is_there else dice.choice(SHAPES)
    number = sum(thing.shape == shape for thing in picture.things)
    return f"How many {plural(shape)} are in {name}?", _there_are(number, shape, name)


def _describe(dice: Random, picture: Picture, name: str) -> Exchange:
    question = dice.choice(("What is in {}?", "Describe {}.", "What do you see in {}?", "Tell me what {} shows."))
    things = [f"{article(thing.name)} at the {thing.place}" for thing in picture.things]
    answer = f"{name} shows {joined(things)}."
    return question.format(name), answer[0].upper() + answer[1:]


def _there_are(number: int, what: str, name: str) -> str:
    verb, noun = ("is", what) if number == 1 else ("are", plural(what))
    return f"There {verb} {NUMBERS[number]} {noun} in {name}."


def _unique(dice: Random, picture: Picture, key: Callable[[Thing], str]) -> Thing | None:
    keys = [key(thing) for thing in picture.things]
    alone = [thing for thing in picture.things if keys.count(key(thing)) == 1]
    return dice.choice(alone) if alone else None
