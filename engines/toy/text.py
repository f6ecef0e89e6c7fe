"""The text that the toy tokenizer is trained on: samples of all tasks as chats, their words, and some prose."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from math import isqrt
from random import Random
from typing import Any

from deepseek_recipe import ChatCompletionRequest, ConversionOptions, DeepseekV41Encoding, ModelVersion
from shoal.engines.toy.tasks import arithmetic, chat, copying, lexicon, pictures, prose, recall, schema, tools, words
from shoal.engines.toy.tasks.drawing import SHAPES
from shoal.engines.toy.tasks.filler import distractor, plain_sentence
from shoal.engines.toy.tasks.records import JOBS, ROOMS
from shoal.engines.toy.tasks.rendering import answer_pieces
from shoal.engines.toy.tasks.sample import Sample
from shoal.engines.toy.tokenizer import word_splitter

SEED = 1
# Rounds of one sample of each task; a word counts by the root of its number in them, for the model has to write rare
# ones as well. Of recall there are fewer: they are long, and hold prose. Other prose fills the rest of the vocabulary.
SAMPLES = 2000
ROUNDS_OF_RECALL = 20
WORD_COUNT_MIN = 20
WORD_WEIGHT_MIN = 20
DOCUMENTS = 40
DOCUMENT_TOKENS = 400
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
    yield from SENTENCES.splitlines()
    counts = _word_counts(text for i in range(SAMPLES) for text in _texts(dice, i))
    weights = {word: WORD_WEIGHT_MIN + isqrt(count) for word, count in counts.items() if count >= WORD_COUNT_MIN}
    for word in (*(f" {word}" for word in task_words()), *quoted_words()):
        weights[word] = max(2 * WORD_WEIGHT_MIN, weights.get(word, 0))
    for word, weight in sorted(weights.items()):
        yield from [word] * weight
    for _ in range(DOCUMENTS):
        yield prose.generate(dice, DOCUMENT_TOKENS).document


def _word_counts(texts: Iterable[str]) -> dict[str, int]:
    splitter = word_splitter()
    counts: Counter[str] = Counter()
    for text in texts:
        for piece in _SPECIAL.split(text):
            counts.update(piece[start:end] for _, (start, end) in splitter.pre_tokenize_str(piece))
    return counts


def task_words() -> list[str]:
    """Words that should be one token each when a space comes before them."""
    found = {*words.ADJECTIVES, *words.NOUNS, *words.NAMES, *words.COLOURS, *words.CITIES, *words.DAYS, *words.MONTHS}
    return sorted(found | {*SHAPES, *JOBS, *ROOMS})


def quoted_words() -> list[str]:
    """Words that should be one token each without a space, too: values of JSON and of tool calls."""
    parts = (words.NAMES, words.THINGS, words.COLOURS, words.CITIES, words.DAYS)
    return sorted({word for part in parts for word in part})


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


def _texts(dice: Random, index: int) -> list[str]:
    drawn = [task.generate(dice) for task in (copying, lexicon, chat, schema, tools, arithmetic, pictures)]
    texts = [rendered(sample) for sample in drawn] + [distractor(dice, ["amber fox"]), plain_sentence(dice)]
    return texts if index % ROUNDS_OF_RECALL else [*texts, rendered(recall.generate(dice))]
