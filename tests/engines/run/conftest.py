"""Models of the engine suites: the toy, and a narrow one whose small window puts many anchors into short prompts."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from shoal.engines.model.decoder import Model
from shoal.engines.model.engram import EngramHash, class_map
from shoal.engines.model.numerics import Mode, Numerics
from shoal.engines.model.save import quantised
from shoal.engines.run.load import load_model
from shoal.engines.toy.build import ensure_toy
from shoal.engines.toy.configuration import toy_config
from shoal.engines.toy.initialise import random_weights
from shoal.engines.toy.tokenizer import toy_tokenizer


@pytest.fixture(scope="session")
def toy_dir() -> Path:
    return ensure_toy()


@pytest.fixture(scope="session")
def toy(toy_dir: Path) -> Model:
    return load_model(toy_dir)


@pytest.fixture(scope="session")
def narrow(narrow_drafting: Model) -> Model:
    """Window 16, so 22 ring rows; selection is sparse from 8 entries on."""
    return dataclasses.replace(narrow_drafting, drafter=None)


@pytest.fixture(scope="session")
def narrow_drafting(narrow_of: Callable[[Numerics], Model]) -> Model:
    """The narrow model with its drafter, which guesses at random."""
    return narrow_of(Numerics.of(Mode.N1))


@pytest.fixture(scope="session")
def narrow_of() -> Callable[[Numerics], Model]:
    """The narrow model in any arithmetic."""
    tokenizer = toy_tokenizer()
    config = toy_config(tokenizer)
    text = dataclasses.replace(config.text, sliding_window=16, index_topk=8, candidate_topk_blocks=4)
    config = dataclasses.replace(config, text=text)
    tensors = quantised(config, random_weights(config, tokenizer))
    engram = EngramHash.build(config, class_map(tokenizer))
    return lambda numerics: Model.build(config, numerics, tensors, engram)
