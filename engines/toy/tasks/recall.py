"""Recall: codes planted anywhere in a long text, among facts that look alike, and asked later, one in each turn."""

import re
from functools import partial
from random import Random

from shoal.engines.toy.tasks.filler import filler_sentence, token_estimate
from shoal.engines.toy.tasks.sample import Answer, Sample
from shoal.engines.toy.tasks.words import ADJECTIVES, NOUNS

# Tokens of the chat format around one question and its answer, and of a needle's sentence.
TURN_TOKENS = 34
FACTS = (
    "The code of the {} is {}.", "The code of the {} is {}.", "Remember that the code of the {} is {}.",
    "Note: the code of the {} is {}.", "It was written that the code of the {} is {}.",
    "The secret code of the {} is {}.", "Everybody knows that the {} has the code {}.",
)  # fmt: skip
QUESTIONS = (
    "What is the code of the {}?", "What is the code of the {}?", "Tell me the code of the {}.",
    "Which code does the {} have?", "Please give me the code of the {}.", "I need the code of the {}.",
)  # fmt: skip
OPENINGS = ("Read this text.", "Here are some notes.", "Please read the following.", "Remember these facts.", "")


def generate(dice: Random, tokens: int = 256, needles: int = 2, turns: int = 0) -> Sample:
    """A text of about `tokens` tokens with `needles` codes in it; `turns` of them are asked (0: drawn, at most 3).

    The last question is the one that is judged; answers to earlier ones are in the conversation. Names share their
    adjective or their noun with others, so both words are needed. Raises ValueError for fewer needles than turns.
    """
    if turns > needles:
        raise ValueError(f"turns = {turns} must not exceed needles = {needles}: each code is asked once; lower turns")
    turns = turns or dice.randint(1, min(needles, 3))
    names = entity_names(dice, needles)
    codes = [str(dice.randint(1000, 9999)) for _ in names]
    facts = [dice.choice(FACTS).format(name, code) for name, code in zip(names, codes, strict=True)]
    text = _plant(dice, facts, names, tokens - TURN_TOKENS * turns)
    asked = dice.sample(range(needles), turns)
    questions = [dice.choice(QUESTIONS).format(names[i]) for i in asked]
    answers = [f"The code of the {names[i]} is {codes[i]}." for i in asked]
    opening = dice.choice(OPENINGS)
    messages: list[dict[str, str]] = [{"role": "user", "content": f"{opening}\n\n{text}\n\n{questions[0]}".strip()}]
    for i in range(1, turns):
        messages += [{"role": "assistant", "content": answers[i - 1]}, {"role": "user", "content": questions[i]}]
    return Sample("recall", tuple(messages), Answer(answers[-1]), partial(has_only_code, codes[asked[-1]]))


def entity_names(dice: Random, count: int) -> list[str]:
    """Different names of two words, drawn so that adjectives and nouns recur."""
    width = max(2, round(count**0.5) + 1)
    adjectives, nouns = dice.sample(ADJECTIVES, width), dice.sample(NOUNS, width)
    pairs = [f"{a} {n}" for a in adjectives for n in nouns]
    return dice.sample(pairs, count)


def has_only_code(code: str, answer: Answer) -> bool:
    """Whether the answer names this code and no other number."""
    return re.findall(r"\d+", answer.text) == [code]


def _plant(dice: Random, facts: list[str], names: list[str], tokens: int) -> str:
    """The facts at random places of a filler that brings the text to about `tokens` tokens."""
    room = tokens - sum(map(token_estimate, facts))
    sentences: list[str] = []
    while room > 0:
        sentence, length = filler_sentence(dice, names)
        room -= length
        if room > -8:
            sentences.append(sentence)
    for fact in facts:
        sentences.insert(dice.randint(0, len(sentences)), fact)
    parts: list[str] = []
    for sentence in sentences:
        parts += [sentence, "\n" if dice.random() < 0.12 else " "]
    return "".join(parts[:-1])
