"""The configuration: the published values, their derived sizes, and one clear error for each broken rule."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from shoal.engines.core.layout import block_layout, slot_layout
from shoal.engines.model.cache_shape import cache_shape
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.errors import ConfigError
from shoal.engines.model.names import Part, tensor_specs

ORACLE = Path(__file__).resolve().parents[2] / "data" / "oracle"


def tiny() -> dict[str, Any]:
    return json.loads((ORACLE / "config.json").read_text())


def published() -> dict[str, Any]:
    """The released config.json (sizes as published)."""
    raw = tiny()
    raw["image_token_id"] = 129264
    raw["text_config"] |= {
        "vocab_size": 129280, "hidden_size": 5120, "moe_intermediate_size": 2304, "num_hidden_layers": 40,
        "num_attention_heads": 64, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8,
        "max_position_embeddings": 1048576, "n_routed_experts": 384, "num_experts_per_tok": 6, "sliding_window": 128,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3, "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "index_n_heads": 32, "index_topk": 512,
        "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682], "engram_vocab_size": 16000000, "engram_n_heads": 8,
        "engram_head_dim": 256, "engram_compressed_vocab_size": 99092, "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256, "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    }  # fmt: skip
    raw["vision_config"] |= {
        "num_hidden_layers": 32, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2816,
        "max_image_tokens": 1024, "min_pixels": 295936,
    }  # fmt: skip
    return raw


def test_published_layer_map() -> None:
    config = ModelConfig.from_dict(published())
    assert config.n_prefill_layer == 20
    assert [config.kv_source(layer) for layer in (0, 1, 2, 7, 8, 13, 14, 19, 20, 39, 40, 42)] == [
        None, None, 2, 2, 8, 8, 14, 14, 20, 20, None, None,
    ]  # fmt: skip
    assert [config.index_source(layer) for layer in (7, 19, 20, 23, 24, 27, 28, 36, 39)] == [
        2, 14, 20, 20, 24, 24, 28, 36, 36,
    ]  # fmt: skip
    assert config.candidate_consumers == (24, 28, 32, 36)
    assert config.drafter_layers == (40, 41, 42)
    assert config.ring_tokens == 134
    assert config.keep_min == 134


def test_published_checkpoint_has_96085_tensors() -> None:
    specs = tensor_specs(ModelConfig.from_dict(published()))
    assert len(specs) == 96_085
    assert specs["layers.14.engram.embed.scale"].shape == (384016682, 8)
    assert specs["layers.20.attn.wo_a.scale"].shape == (256, 128)
    assert specs["layers.39.ffn.experts.383.w2.scale"].shape == (5120, 72)
    assert specs["mtp.2.confidence_head.proj.weight"].shape == (1, 5376)
    assert specs["vision.blocks.31.mlp.w1.weight"].shape == (5632, 1024)
    assert [specs[n].part for n in ("layers.19.attn_norm.weight", "layers.20.attn_norm.weight", "image_end")] == [
        Part.ENCODER,
        Part.DECODER,
        Part.VISION,
    ]
    assert "layers.20.attn.compressor.wgate.weight" not in specs
    assert "layers.24.attn.indexer.wk.weight" not in specs


@pytest.mark.parametrize("raw", [tiny(), published()], ids=["tiny", "published"])
def test_written_config_reads_back(raw: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(raw)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_optional_keys_have_their_published_defaults() -> None:
    raw = tiny()
    raw["text_config"] |= {"hc_shifted": True, "gate_temp": 1.0, "index_k_source_layer_ids": [2, 4, 6]}
    del raw["vision_config"]["max_wh_ratio"]
    ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("section", "key", "value", "text"),
    [
        ("text_config", "hc_shifted", False, "only True is defined"),
        ("text_config", "use_fp4_sparse_kv", 1, "text_config.use_fp4_sparse_kv"),
        ("text_config", "n_group", 8, "text_config.n_group = 8: is not a key of this architecture"),
        ("text_config", "hidden_size", "128", "text_config.hidden_size = '128': must be int"),
        ("text_config", "hidden_size", True, "must be int"),
        ("text_config", "hidden_size", 0, "must be positive"),
        ("text_config", "hidden_size", 144, "multiple of 32"),
        ("text_config", "compress_ratios", [0, 0, 2], "needs an entry for each of 13 trunk and drafter layers"),
        ("text_config", "compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 1, 4, 0, 0, 0], "entries must be in"),
        ("text_config", "compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 2, 1, 0, 0, 0], r"compress_ratios\[8\] = 2"),
        ("text_config", "compress_ratios", [0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0], "no KV source at or below"),
        ("text_config", "compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 1], "drafter layers must have"),
        ("text_config", "kv_source_layer_ids", [2, 4, 6, 7], "every KV source must be an index source"),
        ("text_config", "kv_source_layer_ids", [2, 4, 6, 8], "no KV source may lie above"),
        ("text_config", "kv_source_layer_ids", [4, 2, 6], "strictly ascending"),
        ("text_config", "index_source_layer_ids", [0, 2, 4, 6, 8], "a ratio-0 layer cannot be a source"),
        ("text_config", "candidate_source_layer_id", 8, "must be a KV source"),
        ("text_config", "index_k_source_layer_ids", [2, 4], "must equal kv_source_layer_ids"),
        ("text_config", "engram_num_embeddings", [6126], "one entry per Engram layer"),
        ("text_config", "dspark_target_layer_ids", [5, 7, 8], "one side of the first ratio-1 layer, 6"),
        ("text_config", "dspark_noise_token_id", 1024, "must be below vocab_size = 1024"),
        ("text_config", "num_experts_per_tok", 9, "must not exceed n_routed_experts = 8"),
        ("text_config", "rope_scaling", None, "text_config.rope_scaling = None: must be an object"),
        ("vision_config", "num_attention_heads", 3, "multiple of 4 channels"),
        ("vision_config", "patch_size", -14, "must be positive"),
        ("quantization_config", "weight_block_size", [128, 128], r"only \[32, 32\] is defined"),
        ("quantization_config", "expert_dtype", "fp8", "only 'fp4' is defined"),
    ],
)
def test_a_broken_rule_names_field_and_rule(section: str, key: str, value: object, text: str) -> None:
    raw = copy.deepcopy(tiny())
    raw[section][key] = value
    with pytest.raises(ConfigError, match=text):
        ModelConfig.from_dict(raw)


def test_missing_keys_and_files_are_named(tmp_path: Path) -> None:
    raw = tiny()
    del raw["text_config"]["index_topk"]
    with pytest.raises(ConfigError, match=r"text_config\.index_topk = None: is required"):
        ModelConfig.from_dict(raw)
    with pytest.raises(ConfigError, match="vision_config = None"):
        ModelConfig.from_dict({k: v for k, v in tiny().items() if k != "vision_config"})
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)
    with pytest.raises(ConfigError, match="model_type"):
        ModelConfig.from_dict(tiny() | {"model_type": "deepseek_v4"})


def test_published_cache_bytes() -> None:
    """A block, a slot and its stored region have the published sizes; bytes a token are 890."""
    config = ModelConfig.from_dict(published())
    shape = cache_shape(config)
    block, slot = block_layout(shape), slot_layout(shape)
    assert block.block_bytes == 114_048
    assert sum(s.bytes for s in block.sections) == 890 * 128
    assert [(s.layer, s.kind) for s in block.sections[:3]] == [(2, "index"), (2, "main"), (8, "index")]
    assert (slot.stored_bytes, slot.slot_bytes, slot.ring_tokens) == (1_415_040, 3_128_928, config.ring_tokens)
    assert [(a.layer, a.bytes) for a in slot.accumulators] == [(2, 28_672), (8, 28_672), (14, 28_672)]


def test_a_model_without_candidates_lets_every_indexer_choose_among_all_entries() -> None:
    raw = tiny()
    raw["text_config"]["candidate_source_layer_id"] = -1
    assert ModelConfig.from_dict(raw).candidate_consumers == ()
    raw["text_config"]["candidate_source_layer_id"] = -2
    with pytest.raises(ConfigError, match="must be a KV source, or -1"):
        ModelConfig.from_dict(raw)
