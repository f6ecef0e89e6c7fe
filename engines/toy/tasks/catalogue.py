"""The tools that the tool task declares: names, parameters, what asks for them, and what their results look like."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from shoal.engines.toy.tasks.records import ROOMS
from shoal.engines.toy.tasks.words import CITIES, COLOURS, DAYS, NAMES, THINGS

Draw = Callable[[Random], Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument: its key in the templates, names it may be declared under, its JSON type, and how it is drawn."""

    key: str
    names: tuple[str, ...]
    type: str
    draw: Draw


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool; `requests` and `sentence` are templates over the parameters' keys and, the latter, the result's."""

    names: tuple[str, ...]
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    result: Mapping[str, Draw]
    sentence: str


def _text(words: tuple[str, ...]) -> Draw:
    return lambda dice: dice.choice(words)


def _number(low: int, high: int) -> Draw:
    return lambda dice: dice.randint(low, high)


CITY = Parameter("city", ("city", "place", "town"), "string", _text(CITIES))
DAYS_AHEAD = Parameter("days", ("days", "count"), "integer", _number(1, 14))
PERSON = Parameter("person", ("person", "name", "to"), "string", _text(NAMES))
DAY = Parameter("day", ("day", "date"), "string", _text(DAYS))
PEOPLE = Parameter("people", ("people", "guests", "seats"), "integer", _number(2, 12))
ROOM = Parameter("room", ("room", "place"), "string", _text(ROOMS))
ITEM = Parameter("item", ("item", "thing", "product"), "string", _text(THINGS))
COUNT = Parameter("count", ("count", "quantity"), "integer", _number(1, 50))
COLOUR = Parameter("colour", ("colour",), "string", _text(COLOURS))
HOUR = Parameter("hour", ("hour", "time"), "integer", _number(1, 23))
GOAL = Parameter("goal", ("goal", "end"), "string", _text(CITIES))
START = Parameter("start", ("start", "origin"), "string", _text(CITIES))
DEGREES = Parameter("degrees", ("degrees", "value"), "integer", _number(12, 28))

TOOLS = (
    Tool(
        ("get_weather", "weather", "check_weather"), "Current weather of a city.", (CITY,),
        ("What is the weather in {city}?", "How is the weather in {city}?", "Tell me the weather in {city}."),
        {"sky": _text(("sunny", "rainy", "windy", "cloudy")), "degrees": _number(2, 38)},
        "The weather in {city} is {sky} with {degrees} degrees.",
    ),
    Tool(
        ("get_forecast", "forecast"), "Weather of the next days.", (CITY, DAYS_AHEAD),
        ("Give me the forecast for {city} for {days} days.", "How will the next {days} days be in {city}?",
         "I need the forecast of {days} days for {city}."),
        {"sky": _text(("sunny", "rainy", "windy", "cloudy"))},
        "The next {days} days in {city} will be {sky}.",
    ),
    Tool(
        ("book_table", "reserve_table"), "Book a table in a restaurant.", (CITY, PEOPLE, DAY),
        ("Book a table for {people} people in {city} on {day}.", "We are {people} people and want a table in {city} on "
         "{day}.", "On {day} I need a table in {city} for {people} people."),
        {"table": _number(1, 60)},
        "Table {table} in {city} is booked for {people} people on {day}.",
    ),
    Tool(
        ("send_letter", "send_gift", "send"), "Send a thing to a person.", (PERSON, ITEM),
        ("Send the {item} to {person}.", "Please send {person} the {item}.", "{person} should get the {item}."),
        {"arrival": _text(DAYS)},
        "The {item} will reach {person} on {arrival}.",
    ),
    Tool(
        ("set_alarm", "wake_me"), "Set an alarm.", (DAY, HOUR),
        ("Set an alarm for {day} at {hour}.", "Wake me on {day} at {hour}.", "I have to get up at {hour} on {day}."),
        {"alarm": _number(1, 9)},
        "Alarm {alarm} is set for {day} at {hour}.",
    ),
    Tool(
        ("find_route", "route", "plan_trip"), "Find the way between two cities.", (START, GOAL),
        ("How do I get from {start} to {goal}?", "Find the way from {start} to {goal}.",
         "I want to go to {goal} from {start}."),
        {"hours": _number(2, 40)},
        "The way from {start} to {goal} takes {hours} hours.",
    ),
    Tool(
        ("add_item", "buy", "order_item"), "Put a thing on the shopping list.", (ITEM, COUNT, COLOUR),
        ("Order {count} pieces of the {colour} {item}.", "I need {count} pieces of the {item} in {colour}.",
         "Please buy the {item} in {colour}, {count} pieces."),
        {"price": _number(3, 900)},
        "The {count} pieces of the {colour} {item} cost {price} coins.",
    ),
    Tool(
        ("set_heating", "heat_room"), "Set the heating of a room.", (ROOM, DEGREES),
        ("Heat the {room} to {degrees} degrees.", "Make it {degrees} degrees in the {room}.",
         "I want {degrees} degrees in the {room}."),
        {"minutes": _number(5, 90)},
        "The {room} will have {degrees} degrees in {minutes} minutes.",
    ),
    Tool(
        ("set_light", "light"), "Set the colour of the light in a room.", (ROOM, COLOUR),
        ("Make the light in the {room} {colour}.", "I want {colour} light in the {room}.",
         "Set the light of the {room} to {colour}."),
        {"lamps": _number(1, 9)},
        "There are {lamps} lamps in the {room} and they are {colour} now.",
    ),
    Tool(
        ("find_phone", "get_phone", "phone_number"), "Phone number of a person.", (PERSON,),
        ("What is the phone number of {person}?", "How can I call {person}?", "Give me the number of {person}."),
        {"phone": _number(10000, 99999)},
        "The phone number of {person} is {phone}.",
    ),
)  # fmt: skip
