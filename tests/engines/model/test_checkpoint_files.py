"""Checkpoints on disk: what is saved loads back to the same bytes, and every defect is named before use."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.errors import WeightsError
from shoal.engines.model.quant import dequantise_fp8_blocks
from shoal.engines.model.save import quantise_fp8_blocks, save_checkpoint
from shoal.engines.model.weights import Weights, load_model_weights

ORACLE = Path(__file__).resolve().parents[2] / "data" / "oracle"


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_dir(ORACLE)


@pytest.fixture(scope="module")
def weights(config: ModelConfig) -> Weights:
    return load_model_weights(ORACLE, config)


@pytest.fixture(scope="module")
def sharded(config: ModelConfig, weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    save_checkpoint(directory, config, weights, shard_bytes=2_000_000)
    return directory


def test_types_are_kept(weights: Weights) -> None:
    """Exponents and packed codes come as their bytes."""
    scale = weights["layers.0.attn.wq_a.scale"]
    assert scale.dtype == torch.uint8
    assert 90 < int(scale.min()) <= int(scale.max()) < 140
    assert weights["layers.0.ffn.experts.0.w1.weight"].dtype == torch.uint8
    assert weights["layers.0.attn.wq_a.weight"].dtype == torch.float8_e4m3fn
    assert weights["embed.weight"].dtype == torch.bfloat16
    assert weights.under("layers.3.hc_attn_")["fn"].dtype == torch.float32


def test_saved_shards_load_back_bit_for_bit(config: ModelConfig, weights: Weights, sharded: Path) -> None:
    again = load_model_weights(sharded, ModelConfig.from_dir(sharded))
    assert ModelConfig.from_dir(sharded) == config
    assert set(again) == set(weights)
    for name in weights:
        assert torch.equal(again[name].view(torch.uint8), weights[name].view(torch.uint8)), name
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 5
    table = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    engram = {f for n, f in table.items() if ".engram.embed." in n}
    assert len(engram) == 2
    assert all((".engram.embed." in n) == (f in engram) for n, f in table.items())


def test_a_part_needs_only_its_own_shards(config: ModelConfig, sharded: Path, tmp_path: Path) -> None:
    """An encode engine starts although every shard without vision tensors is absent."""
    table = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    names = {n for n in table if n.startswith(("vision.", "aligner.", "image_"))}
    for file in {table[n] for n in names} | {"model.safetensors.index.json"}:
        shutil.copy(sharded / file, tmp_path)
    assert set(load_model_weights(tmp_path, config, {"vision"})) == names
    with pytest.raises(WeightsError, match="cannot be read"):
        load_model_weights(tmp_path, config)


def test_defects_are_listed_together(config: ModelConfig, tmp_path: Path) -> None:
    tensors = load_file(ORACLE / "model.safetensors")
    del tensors["norm.weight"]
    tensors["layers.0.attn.wkv.weight_scale"] = torch.zeros(1)
    tensors["head.weight"] = tensors["head.weight"][:1000].contiguous()
    tensors["embed.weight"] = tensors["embed.weight"].float()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        load_model_weights(tmp_path, config)
    text = str(caught.value)
    assert "4 tensors do not match" in text
    assert "missing norm.weight" in text
    assert "unexpected layers.0.attn.wkv.weight_scale" in text
    assert "head.weight has shape [1000, 128], needs [1024, 128]" in text
    assert "embed.weight has type F32, needs BF16" in text


def test_broken_files_are_named(config: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="has neither"):
        load_model_weights(tmp_path, config)
    whole = (ORACLE / "model.safetensors").read_bytes()
    file = tmp_path / "model.safetensors"
    for content, text in (
        (whole[:-10], "its header describes"),
        (b"PK", "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        (b"\x08" + b"\0" * 7 + b"notjson!", "cannot be read"),
    ):
        file.write_bytes(content)
        with pytest.raises(WeightsError, match=text):
            load_model_weights(tmp_path, config)


def test_fp8_blocks_round_trip() -> None:
    """Odd sizes, a block of zeros, and values that are exact in the format come back exactly."""
    weight = torch.randn(70, 45, generator=torch.Generator().manual_seed(5))
    weight[:32, :32] = 0
    data, scales = quantise_fp8_blocks(weight)
    assert scales.shape == (3, 2)
    back = dequantise_fp8_blocks(data, scales)
    assert (back - weight).abs().max() < 0.07 * weight.abs().max()
    again, scales_again = quantise_fp8_blocks(back)
    assert torch.equal(dequantise_fp8_blocks(again, scales_again), back)
