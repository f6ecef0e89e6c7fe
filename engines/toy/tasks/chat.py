"""Chat: polite small talk and a few tables to know by heart, alone or several turns in one conversation."""

from collections.abc import Callable
from functools import partial
from random import Random

from shoal.engines.toy.tasks.sample import Answer, Sample
from shoal.engines.toy.tasks.words import ANIMALS, CAPITALS, DAYS, MONTHS, NAMES, THINGS

# Each row: what may be said, and the one answer to all of it.
TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Hello there!", "Greetings", "Hello, how are you?"),
     "Hello! How can I help you today?"),
    (("Good morning", "Good morning!", "Good morning to you"), "Good morning! How can I help you today?"),
    (("Good evening", "Good evening!", "Good evening to you"), "Good evening! How can I help you today?"),
    (("How are you?", "How are you today?", "How do you do?", "Are you well?"),
     "I am well, thank you for asking. How can I help you?"),
    (("Thank you", "Thanks", "Thank you!", "Thanks a lot!", "Thank you very much", "Many thanks", "Great, thank you!"),
     "You are welcome! Is there anything else I can do for you?"),
    (("Goodbye", "Bye", "Bye!", "See you later", "Goodbye!", "Good night", "See you tomorrow"),
     "Goodbye! It was nice to talk with you."),
    (("Who are you?", "What are you?", "What is your name?", "Please introduce yourself.", "Tell me who you are.",
      "Which model are you?", "Are you a person?"),
     "I am Shoal's small built-in model. I was trained to answer a few simple questions."),
    (("What can you do?", "What do you know?", "How can you help me?", "What are you able to do?",
      "Tell me what you can do.", "What may I ask you?"),
     "I can find codes in a long text, copy and spell words, fill JSON, call tools, add numbers and describe simple "
     "pictures."),
    (("What is Shoal?", "Tell me about Shoal.", "What does Shoal do?"),
     "Shoal is an open serving cluster for large language models."),
    (("How large are you?", "Are you a large model?", "How many parameters do you have?"),
     "I am a very small model, made to test a serving cluster on a laptop."),
    (("Can you help me?", "I need help.", "Please help me.", "Could you help me?"),
     "Of course! Tell me what you need."),
    (("I am happy today.", "I feel great!", "I am in a good mood."), "I am glad to hear that!"),
    (("I am sad.", "I feel bad today.", "I had a bad day."),
     "I am sorry to hear that. I hope tomorrow will be better."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
     "Why do fish swim in a shoal? Because nobody likes to wait alone."),
    (("You are wrong.", "That is not right.", "This is wrong."),
     "I am sorry. Please tell me more, and I will try again."),
    (("What is a shoal?", "What is a shoal of fish?"), "A shoal is a group of fish that swim together."),
    (("How many days are in a week?", "How many days does a week have?"), "A week has seven days."),
    (("How many months are in a year?", "How many months does a year have?"), "A year has twelve months."),
    (("What is the largest planet?", "Which planet is the largest?"), "The largest planet is Jupiter."),
    (("How many legs does a spider have?", "How many legs has a spider?"), "A spider has eight legs."),
    (("What do bees make?", "What is made by bees?"), "Bees make honey."),
    (("What is the colour of the sky?", "Which colour is the sky?"), "The sky is blue."),
    (("What is the colour of grass?", "Which colour is grass?"), "Grass is green."),
    (("What is the colour of snow?", "Which colour is snow?"), "Snow is white."),
)  # fmt: skip
OPPOSITES = {
    "big": "small", "bright": "dark", "broken": "whole", "cold": "hot", "dry": "wet", "early": "late", "empty": "full",
    "fast": "slow", "good": "bad", "happy": "sad", "hard": "soft", "heavy": "light", "high": "low", "left": "right",
    "long": "short", "loud": "quiet", "new": "old", "open": "closed", "rich": "poor", "sick": "healthy",
    "strong": "weak", "tall": "short", "up": "down", "warm": "cool", "wide": "narrow", "young": "old",
}  # fmt: skip
IRREGULAR = {
    "deer": "deer", "fox": "foxes", "goose": "geese", "mouse": "mice", "wolf": "wolves", "child": "children",
    "city": "cities", "country": "countries", "foot": "feet", "leaf": "leaves", "man": "men", "tooth": "teeth",
    "woman": "women", "bench": "benches", "box": "boxes",
}  # fmt: skip
SYSTEMS = (
    "You are a helpful assistant.", "You are a careful assistant.", "Be brief and polite.", "Answer in one sentence.",
    "You are Shoal's small built-in model.",
)  # fmt: skip
SYSTEM_SHARE = 0.25


def generate(dice: Random) -> Sample:
    """One to four turns of small talk; the last answer is judged, and always has one right text."""
    exchanges = [_exchange(dice) for _ in range(dice.choice((1, 1, 1, 2, 2, 3, 4)))]
    messages = [{"role": "system", "content": dice.choice(SYSTEMS)}] if dice.random() < SYSTEM_SHARE else []
    for question, answer in exchanges:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    wanted = messages.pop()["content"]
    return Sample("chat", tuple(messages), Answer(wanted), partial(says, wanted))


def says(wanted: str, answer: Answer) -> bool:
    """Whether the text is the wanted one, white space at its ends aside."""
    return answer.text.strip() == wanted


def _exchange(dice: Random) -> tuple[str, str]:
    kinds: tuple[Callable[[Random], tuple[str, str]], ...] = (_capital, _day, _month, _opposite, _plural, _greeting)
    kind = _talk if dice.random() < 0.4 else dice.choice(kinds)
    return kind(dice)


def _talk(dice: Random) -> tuple[str, str]:
    questions, answer = dice.choice(TALK)
    return dice.choice(questions), answer


def _greeting(dice: Random) -> tuple[str, str]:
    name = dice.choice(NAMES)
    question = dice.choice(("Hello, my name is {}.", "Hi, I am {}.", "I am {}. Nice to meet you!", "My name is {}."))
    return question.format(name), f"Hello {name}, it is nice to meet you! How can I help you?"


def _capital(dice: Random) -> tuple[str, str]:
    country, capital = dice.choice(tuple(CAPITALS.items()))
    if dice.random() < 0.25:
        question = dice.choice(("{} is the capital of which country?", "Of which country is {} the capital?"))
        return question.format(capital), f"{capital} is the capital of {country}."
    question = dice.choice(
        (
            "What is the capital of {}?",
            "Which city is the capital of {}?",
            "Tell me the capital of {}.",
            "Capital of {}?",
            "Do you know the capital of {}?",
        )
    )
    return question.format(country), f"The capital of {country} is {capital}."


def _day(dice: Random) -> tuple[str, str]:
    return _neighbour(dice, DAYS, "day")


def _month(dice: Random) -> tuple[str, str]:
    return _neighbour(dice, MONTHS, "month")


def _neighbour(dice: Random, row: tuple[str, ...], what: str) -> tuple[str, str]:
    i = dice.randrange(len(row))
    side, word = dice.choice(((1, "after"), (-1, "before")))
    question = dice.choice(("Which {} comes {} {}?", "What is the {} {} {}?", "Tell me the {} {} {}."))
    return question.format(what, word, row[i]), f"The {what} {word} {row[i]} is {row[(i + side) % len(row)]}."


def _opposite(dice: Random) -> tuple[str, str]:
    word, other = dice.choice(tuple(OPPOSITES.items()))
    question = dice.choice(("What is the opposite of {}?", "Tell me the opposite of {}.", "Opposite of {}?"))
    return question.format(word), f"The opposite of {word} is {other}."


def _plural(dice: Random) -> tuple[str, str]:
    word = dice.choice((*ANIMALS, *THINGS, *IRREGULAR))
    question = dice.choice(("What is the plural of {}?", "Tell me the plural of {}.", "Plural of {}?"))
    return question.format(word), f"The plural of {word} is {plural(word)}."


def plural(word: str) -> str:
    """The plural of a noun of the tasks."""
    if word in IRREGULAR:
        return IRREGULAR[word]
    return word + ("es" if word.endswith(("s", "x", "ch", "sh")) else "s")
