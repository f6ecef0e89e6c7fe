"""Documents: plain English from Python's language topics, and source text of modules of the standard library."""

import re
import sysconfig
from functools import cache
from pathlib import Path
from random import Random

from shoal.engines.toy.tasks.sample import Sample

# Files of the standard library that every supported Python has.
MODULES = (
    "_collections_abc", "argparse", "ast", "bisect", "calendar", "cmd", "collections/__init__", "configparser",
    "contextlib", "copy", "csv", "dataclasses", "difflib", "enum", "fractions", "functools", "glob", "graphlib",
    "gzip", "heapq", "inspect", "json/decoder", "json/encoder", "keyword", "linecache", "locale", "mimetypes",
    "numbers", "operator", "pprint", "queue", "random", "reprlib", "sched", "secrets", "selectors", "shelve", "shlex",
    "shutil", "socketserver", "statistics", "string", "tempfile", "textwrap", "threading", "timeit", "tokenize",
    "trace", "traceback", "types", "typing", "urllib/parse", "uuid", "weakref",
)  # fmt: skip
# Characters of one token of such text, measured with the toy tokenizer.
CHARACTERS_PER_TOKEN = 2.4
CODE_SHARE = 0.5


def generate(dice: Random, tokens: int = 256) -> Sample:
    """A document of at most about `tokens` tokens, whole lines: half of them English, half Python."""
    text = dice.choice(python_texts() if dice.random() < CODE_SHARE else english_texts())
    wanted = max(1, round((tokens - 2) * CHARACTERS_PER_TOKEN))
    start = text.rfind("\n", 0, dice.randint(0, max(0, len(text) - wanted)) + 1) + 1
    piece = text[start : start + wanted]
    end = piece.rfind("\n") if start + wanted < len(text) else -1
    return Sample("prose", document=(piece[:end] if end > wanted // 2 else piece).strip("\n"))


@cache
def english_texts() -> tuple[str, ...]:
    """The language topics of the running Python as text: one string for each topic longer than a few lines."""
    from pydoc_data.topics import topics

    texts = [_plain(text) for _, text in sorted(topics.items())]
    return tuple(text for text in texts if len(text) > 400)


@cache
def python_texts() -> tuple[str, ...]:
    """Source text of the listed modules of the running Python."""
    return tuple(_source(name) for name in MODULES)


@cache
def sentences() -> tuple[str, ...]:
    """Sentences of the English texts that have no digits and are neither very short nor long."""
    found = []
    for text in english_texts():
        for sentence in re.split(r"(?<=[.!?])\s+", text):
            flat = " ".join(sentence.split())
            if 30 < len(flat) < 110 and flat[0].isupper() and flat[-1] in ".!?" and re.fullmatch(r"[\w ,.'()-]+", flat):
                found.append(flat)
    return tuple(s for s in found if not re.search(r"\d", s))


def _plain(text: str) -> str:
    """The topic without the marks of its source format that only a renderer needs."""
    return re.sub(r"\*\*|``", "", text).strip()


def _source(name: str) -> str:
    return (Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text(encoding="utf-8")
