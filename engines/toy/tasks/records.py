"""Records that sentences tell of: kinds with fields, each field with a JSON type, drawn values and a clause."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from shoal.engines.toy.tasks.words import ADJECTIVES, ANIMALS, CITIES, COLOURS, DAYS, MONTHS, NAMES, THINGS

JOBS = ("baker", "doctor", "driver", "farmer", "gardener", "painter", "pilot", "sailor", "singer", "teacher", "writer")
ROOMS = ("kitchen", "bedroom", "office", "garage", "hall", "library", "cellar")
SIZES = ("small", "medium", "large")


@dataclass(frozen=True, slots=True)
class Field:
    """One field: possible names in a schema, its JSON type, how a value is drawn, and what a sentence says of it.

    clause holds {} for the value; for a boolean it is a pair, said when it is false and when it is true. A field with
    `options` is an enumeration of some of them.
    """

    names: tuple[str, ...]
    type: str
    draw: Callable[[Random], Any]
    clause: str | tuple[str, str]
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of record: its schema name, how its sentences begin, and its fields."""

    name: str
    subject: str
    fields: tuple[Field, ...]


def _one_of(*words: str) -> Callable[[Random], str]:
    return lambda dice: dice.choice(words)


def _between(low: int, high: int) -> Callable[[Random], int]:
    return lambda dice: dice.randint(low, high)


def _yes_no(dice: Random) -> bool:
    return dice.random() < 0.5


KINDS = (
    Kind("person", "This person", (
        Field(("name", "first_name"), "string", _one_of(*NAMES), "is called {}"),
        Field(("age", "years"), "integer", _between(4, 99), "is {} years old"),
        Field(("city", "home", "town"), "string", _one_of(*CITIES), "lives in {}"),
        Field(("job", "work"), "string", _one_of(*JOBS), "works as a {}", JOBS),
        Field(("married",), "boolean", _yes_no, ("is not married", "is married")),
        Field(("children",), "integer", _between(0, 9), "has {} children"),
    )),
    Kind("order", "The order", (
        Field(("customer", "buyer", "name"), "string", _one_of(*NAMES), "comes from {}"),
        Field(("item", "thing", "product"), "string", _one_of(*THINGS), "is for the article {}"),
        Field(("count", "quantity", "pieces"), "integer", _between(1, 60), "has {} pieces"),
        Field(("colour",), "string", _one_of(*COLOURS), "asks for the colour {}", COLOURS),
        Field(("size",), "string", _one_of(*SIZES), "says that the size is {}", SIZES),
        Field(("paid",), "boolean", _yes_no, ("is not paid yet", "is already paid")),
        Field(("price", "cost"), "integer", _between(2, 999), "costs {} coins"),
    )),
    Kind("animal", "The animal", (
        Field(("species", "animal"), "string", _one_of(*ANIMALS), "is a kind of {}"),
        Field(("name",), "string", _one_of(*NAMES), "is called {}"),
        Field(("age", "years"), "integer", _between(1, 40), "is {} years old"),
        Field(("weight", "kilos"), "integer", _between(1, 500), "weighs {} kilos"),
        Field(("colour",), "string", _one_of(*COLOURS), "has the colour {}", COLOURS),
        Field(("tame",), "boolean", _yes_no, ("is not tame", "is tame")),
        Field(("mood",), "string", _one_of(*ADJECTIVES), "seems to be {}"),
    )),
    Kind("trip", "The trip", (
        Field(("start", "from"), "string", _one_of(*CITIES), "starts in {}"),
        Field(("goal", "to", "end"), "string", _one_of(*CITIES), "ends in {}"),
        Field(("day",), "string", _one_of(*DAYS), "is on a {}", DAYS),
        Field(("month",), "string", _one_of(*MONTHS), "takes place in {}"),
        Field(("people", "travellers"), "integer", _between(1, 40), "is for {} people"),
        Field(("guide", "leader"), "string", _one_of(*NAMES), "is led by {}"),
        Field(("by_train", "train"), "boolean", _yes_no, ("is not by train", "is by train")),
    )),
    Kind("meeting", "The meeting", (
        Field(("host", "name"), "string", _one_of(*NAMES), "was called by {}"),
        Field(("place", "city"), "string", _one_of(*CITIES), "takes place in {}"),
        Field(("day",), "string", _one_of(*DAYS), "is on {}", DAYS),
        Field(("hour", "start"), "integer", _between(6, 22), "starts at {}"),
        Field(("room",), "string", _one_of(*ROOMS), "is in the {}", ROOMS),
        Field(("guests", "people"), "integer", _between(2, 80), "has {} guests"),
        Field(("public", "open"), "boolean", _yes_no, ("is not open to all", "is open to all")),
    )),
)  # fmt: skip
