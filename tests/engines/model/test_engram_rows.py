"""Engram rows against the independent oracle, and the published configuration's check values."""

import dataclasses
import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.engram import EngramHash, class_map, hash_constants, read_tokenizer
from shoal.engines.model.errors import ConfigError, TokenizerError

ORACLE = Path(__file__).resolve().parents[2] / "data" / "oracle"
PROMPTS = ("short", "image", "long", "images2")


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_dir(ORACLE)


@pytest.fixture(scope="module")
def engram(config: ModelConfig) -> EngramHash:
    return EngramHash.from_dir(ORACLE, config)


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    with np.load(ORACLE / "reference.npz") as arrays:
        keys = ("input_ids", "token_types", "engram_rows")
        return {f"{p}.{k}": arrays[f"{p}.{k}"] for p in PROMPTS for k in keys}


def prompt(reference: dict[str, np.ndarray], name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.from_numpy(reference[f"{name}.input_ids"].astype(np.int64))
    image = torch.from_numpy(reference[f"{name}.token_types"] >= 0)
    return ids, image, torch.from_numpy(reference[f"{name}.engram_rows"].astype(np.int64))


def lookback_at(ids: torch.Tensor, image: torch.Tensor, start: int, depth: int) -> list[int]:
    return [-1 if p < 0 or image[p] else int(ids[p]) for p in range(start - 1, start - 1 - depth, -1)]


def test_classes_equal_the_oracle() -> None:
    assert np.array_equal(class_map(read_tokenizer(ORACLE)), np.load(ORACLE / "engram_map.npy"))


def test_constants_equal_the_oracle(config: ModelConfig, engram: EngramHash) -> None:
    golden = json.loads((ORACLE / "engram_hash.json").read_text())
    assert engram.multipliers.tolist() == golden["multipliers"]
    assert engram.primes.tolist() == golden["primes"]
    assert engram.offsets.tolist() == golden["offsets"]
    assert engram.pad_class == golden["pad_class"]
    assert list(config.text.engram_layer_ids) == golden["layer_ids"]


@pytest.mark.parametrize("name", PROMPTS)
def test_rows_of_a_whole_prompt(engram: EngramHash, reference: dict[str, np.ndarray], name: str) -> None:
    ids, image, golden = prompt(reference, name)
    start = torch.full((1, engram.lookback), -1)
    assert torch.equal(engram.rows(ids, image, (len(ids),), start), golden)


@pytest.mark.parametrize("cuts", [(1, 2, 3), (36, 37, 40, 62, 63, 64, 65), (50,)])
def test_rows_do_not_depend_on_chunks(
    engram: EngramHash, reference: dict[str, np.ndarray], cuts: tuple[int, ...]
) -> None:
    """Every chunk of the image prompt as one sequence of one batch, look-back given: cuts inside the image too."""
    ids, image, golden = prompt(reference, "image")
    edges = (0, *cuts, len(ids))
    q_lens = tuple(b - a for a, b in itertools.pairwise(edges))
    lookback = torch.tensor([lookback_at(ids, image, a, engram.lookback) for a in edges[:-1]])
    assert torch.equal(engram.rows(ids, image, q_lens, lookback), golden)


def test_one_row_of_each_sequence(engram: EngramHash, reference: dict[str, np.ndarray]) -> None:
    """Decode: one token a sequence, a sequence without tokens between them."""
    ids, image, golden = prompt(reference, "long")
    at = [7, 200]
    lookback = torch.tensor(
        [lookback_at(ids, image, 7, engram.lookback), [-1] * 3, lookback_at(ids, image, 200, engram.lookback)]
    )
    assert torch.equal(engram.rows(ids[at], image[at], (1, 0, 1), lookback), golden[at])


def test_wrong_ids_are_refused(engram: EngramHash) -> None:
    """A negative id would silently index from the end."""
    none = torch.full((1, 3), -1)
    with pytest.raises(ValueError, match=r"token_ids must be in \[0, 1024\)"):
        engram.rows(torch.tensor([-1]), torch.tensor([False]), (1,), none)
    with pytest.raises(ValueError, match="lookback must be in"):
        engram.rows(torch.tensor([3]), torch.tensor([False]), (1,), none - 1)
    with pytest.raises(ValueError, match="image_mask"):
        engram.rows(torch.tensor([3]), torch.tensor([[False]]), (1,), none)


def test_another_tokenizer_is_refused(config: ModelConfig) -> None:
    classes = np.load(ORACLE / "engram_map.npy")
    with pytest.raises(TokenizerError, match="591 classes"):
        EngramHash.build(config, np.minimum(classes, 590))
    with pytest.raises(TokenizerError, match="1000 ids"):
        EngramHash.build(config, classes[:1000])


def test_wrong_table_size_is_refused(config: ModelConfig) -> None:
    text = dataclasses.replace(config.text, engram_num_embeddings=(6126, 6333))
    with pytest.raises(ConfigError, match="must be 6332, the sum of the layer's primes"):
        hash_constants(text)


def test_published_check_values(config: ModelConfig) -> None:
    """Released configuration: 16 million base size, 99,092 classes, layers 1 and 14; the prime search is fast."""
    text = dataclasses.replace(
        config.text,
        engram_layer_ids=(1, 14),
        engram_vocab_size=16_000_000,
        engram_n_heads=8,
        engram_compressed_vocab_size=99_092,
        engram_num_embeddings=(384_006_168, 384_016_682),
    )
    started = time.perf_counter()
    constants = hash_constants(text)
    assert time.perf_counter() - started < 1
    assert constants.multipliers == (
        (76632096046245, 4839876093313, 35959672319349, 73987337458391),
        (67716810739261, 51510806800915, 30921347202721, 82619226485591),
    )
    assert [(p[0], p[-1]) for p in constants.primes] == [(16000057, 16000463), (16000477, 16000889)]
    assert constants.offsets[1][:2] == (0, 16000477)
