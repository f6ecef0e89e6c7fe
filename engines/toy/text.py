"""The text that the toy tokenizer is trained on: samples of all tasks as chats, their words, and some prose."""

import re
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

from deepseek_recipe import ChatCompletionRequest, ConversionOptions, DeepseekV41Encoding, ModelVersion
from shoal.engines.toy.tasks import chat, copying, lexicon, prose, recall, words
from shoal.engines.toy.tasks.rendering import answer_pieces
from shoal.engines.toy.tasks.sample import Sample

SEED = 1
SAMPLES = 400
# Documents of so many tokens, and how often each word of the tasks is repeated beside the samples.
DOCUMENTS = 500
DOCUMENT_TOKENS = 400
WORD_WEIGHT = 500
# Special tokens divide a text before it is tokenised.
_SPECIAL = re.compile("<｜[^｜]*｜>|</?think>|｜DSML｜")
SENTENCES = """
The model reads a prompt and writes an answer, one token after another.
A request arrives at the server; the server chooses an engine for the prompt and an engine for the answer.
If an engine is lost, another one continues the answer where it stopped, and the reader does not see any difference.
I do not know the answer to this question, but I can tell you where you might find it.
Once upon a time there was a small fish that wanted to see the whole ocean, and so it swam away from home.
She opened the window, looked at the mountains, and decided that today would be a good day for a long walk.
There are three rules: write what you mean, say it once, and say it in the place where people will look for it.
The weather in Paris today is sunny with some clouds; tomorrow there will be rain and wind in the north.
BUT THE HEADLINE WAS WRITTEN IN CAPITAL LETTERS: THE CITY AND THE SEA, THE NEWS OF THE DAY.
Café, naïve, résumé, Ångström, über, señor, façade: accents are written with more than one byte.
""".strip()


def corpus() -> Iterable[str]:
    """Lines to train on, in a fixed order; the prose depends on the running Python."""
    dice = Random(SEED)
    yield from SENTENCES.splitlines() * 3
    for word in task_words():
        yield f" {word}" * WORD_WEIGHT
    for _ in range(SAMPLES):
        for sample in _samples(dice):
            yield from _SPECIAL.split(rendered(sample))
    for _ in range(DOCUMENTS):
        yield prose.generate(dice, DOCUMENT_TOKENS).document


def task_words() -> list[str]:
    """Words that should be one token each when a space comes before them."""
    found = {*words.ADJECTIVES, *words.NOUNS, *words.NAMES, *words.COLOURS, *words.CITIES, *words.DAYS, *words.MONTHS}
    found |= {*words.CAPITALS} | {part for city in words.CAPITALS.values() for part in city.split()}
    return sorted(found | {*chat.OPPOSITES, *chat.OPPOSITES.values()})


def rendered(sample: Sample) -> str:
    """A chat as one text, prompt and wanted answer, special tokens spelled out; a document as it is."""
    if sample.document:
        return sample.document
    prompt = str(DeepseekV41Encoding().render_conversation(_conversation(sample)).prompt)
    return prompt + "".join(answer_pieces(sample.wanted, sample.thinking))


def _conversation(sample: Sample) -> Any:
    options = ConversionOptions().with_model_alias("toy", ModelVersion.DeepseekV41Flash)
    body: dict[str, Any] = {
        "model": "toy",
        "messages": [_without_images(message) for message in sample.messages],
        "thinking": {"type": "enabled" if sample.thinking else "disabled"},
    }
    body |= {"tools": list(sample.tools)} if sample.tools else {}
    body |= {"response_format": dict(sample.response_format)} if sample.response_format else {}
    return ChatCompletionRequest(body).convert(options).conversation


def _without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": "".join(part.get("text", "") for part in content)}


def _samples(dice: Random) -> list[Sample]:
    return [
        recall.generate(dice, dice.randint(64, 400), dice.randint(1, 4)),
        copying.generate(dice),
        lexicon.generate(dice),
        chat.generate(dice),
    ]
