"""The model's configuration: published `config.json` as frozen values, and every size derived from it."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.engines.model.config_decode import decode
from shoal.engines.model.errors import ConfigError

# Keys with one defined value (published config.json, and the defaults an absent key has in DeepInfer's loader).
TEXT_FIXED: Mapping[str, object] = {
    "model_type": "deepseek_v41_text", "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
    "num_key_value_heads": 1, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "hc_shifted": True, "use_fp4_sparse_kv": True, "dspark_target_attn_input": True, "gate_temp": 1.0,
    "tokenizer_compatibility": "release",
}  # fmt: skip
VISION_FIXED: Mapping[str, object] = {"model_type": "deepseek_v41_vision"}
ROPE_FIXED: Mapping[str, object] = {"rope_type": "yarn", "type": "yarn"}
QUANT_FIXED: Mapping[str, object] = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "expert_dtype": "fp4",
    "weight_block_size": [32, 32],
}  # fmt: skip
TOP_FIXED: Mapping[str, object] = {"model_type": "deepseek_v41", "tie_word_embeddings": False}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN frequency interpolation of the layers that read a compressed cache."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The one published weight format: FP8 e4m3 in blocks with UE8M0 scales, MXFP4 routed experts."""

    weight_block_size: tuple[int, ...] = (32, 32)

    @property
    def block(self) -> int:
        """Rows, and columns, that share one FP8 weight scale; also the group of MXFP4 and Engram rows."""
        return self.weight_block_size[0]


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Vision tower and aligner; names as published."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def patch_channels(self) -> int:
        """Values of one flattened RGB patch."""
        return 3 * self.patch_size * self.patch_size


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Trunk, Engram and drafter; names as published (model keys of `text_config`)."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    index_k_source_layer_ids: tuple[int, ...] | None = None

    @property
    def engram_columns(self) -> int:
        """Hashed rows one Engram layer reads for a token: (n-gram sizes from 2 up) x heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def hc_mixes(self) -> int:
        """Mixing coefficients of one sublayer: pre and post of each stream, and the stream-to-stream matrix."""
        return (2 + self.hc_mult) * self.hc_mult


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One checkpoint's architecture. Layer ids run over the trunk, then the drafter (as in `compress_ratios`)."""

    text: TextConfig
    vision: VisionConfig
    quantization: QuantizationConfig
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Decode and check a published `config.json` object; raises ConfigError naming field, value, rule, remedy."""
        text = dict(_section(raw, "text_config"))
        text["rope_scaling"] = decode(
            RopeScaling, _section(text, "rope_scaling", "text_config."), "text_config.rope_scaling", ROPE_FIXED, NONE
        )
        if "quantization_config" in raw:
            quantization = decode(
                QuantizationConfig, raw["quantization_config"], "quantization_config", QUANT_FIXED, NONE
            )
        else:
            raise ConfigError("quantization_config", None, "is required", "use a checkpoint in the published format")
        top = {k: v for k, v in raw.items() if k not in SECTIONS}
        top["text"] = decode(TextConfig, text, "text_config", TEXT_FIXED, frozenset({"rope_scaling"}))
        top["vision"] = decode(VisionConfig, _section(raw, "vision_config"), "vision_config", VISION_FIXED, NONE)
        top["quantization"] = quantization
        config = decode(cls, top, "", TOP_FIXED, frozenset({"text", "vision", "quantization"}))
        from shoal.engines.model.config_rules import check_config  # the rules read the types of this module

        check_config(config)
        return config

    @classmethod
    def from_dir(cls, directory: Path) -> "ModelConfig":
        """The configuration of the checkpoint in `directory`; raises ConfigError."""
        path = Path(directory) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(str(path), None, f"cannot be read ({error})", "give a checkpoint directory") from error
        return cls.from_dict(raw)

    def to_dict(self) -> dict[str, Any]:
        """The published `config.json` object of this configuration: `from_dict(to_dict())` equals `self`."""
        text = {k: _plain(v) for k, v in dataclasses.asdict(self.text).items() if v is not None}
        text["rope_scaling"] |= {"rope_type": "yarn"}
        defaults = ("hc_shifted", "use_fp4_sparse_kv", "dspark_target_attn_input", "gate_temp")
        text |= {k: v for k, v in TEXT_FIXED.items() if k not in (*defaults, "tokenizer_compatibility")}
        tokens = {k: getattr(self, k) for k in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")}
        return {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "dtype": "bfloat16",
            **tokens,
            "quantization_config": dict(QUANT_FIXED),
            "text_config": text,
            "vision_config": {**VISION_FIXED, **dataclasses.asdict(self.vision)},
        }

    @property
    def hidden(self) -> int:
        """Width of one residual stream."""
        return self.text.hidden_size

    @property
    def window(self) -> int:
        """Tokens of the sliding window, the query itself included."""
        return self.text.sliding_window

    @property
    def n_layers(self) -> int:
        """Trunk layers."""
        return self.text.num_hidden_layers

    @property
    def n_prefill_layer(self) -> int:
        """First decoder layer (first ratio-1 layer): layers below it are the causal encoder, never truncated."""
        return self.text.compress_ratios.index(1)

    @property
    def drafter_layers(self) -> tuple[int, ...]:
        """Layer ids of the drafter, after the trunk's."""
        return tuple(range(self.n_layers, self.n_layers + self.text.num_nextn_predict_layers))

    @property
    def backtracking(self) -> int:
        """Positions a rejected draft may rewind: the draft block and the token it starts from."""
        return self.text.dspark_block_size + 1

    @property
    def ring_tokens(self) -> int:
        """Slots of a sliding-window ring: the window and what may be rewound."""
        return self.window + self.backtracking

    @property
    def keep_min(self) -> int:
        """Fewest prompt tokens a truncated prefill may run through the decoder layers."""
        return self.window + self.backtracking

    def ratio(self, layer: int) -> int:
        """Tokens per entry of the compressed cache that `layer` reads; 0: it reads none."""
        return self.text.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed cache `layer` reads, or None for a window-only layer."""
        return _source(self.text.kv_source_layer_ids, layer) if self.ratio(layer) else None

    def index_source(self, layer: int) -> int | None:
        """The layer whose top-k selection `layer` uses, or None for a window-only layer."""
        return _source(self.text.index_source_layer_ids, layer) if self.ratio(layer) else None

    def is_kv_source(self, layer: int) -> bool:
        """Whether `layer` owns a compressor, index keys and a paged cache."""
        return layer in self.text.kv_source_layer_ids

    def is_index_source(self, layer: int) -> bool:
        """Whether `layer` owns index queries and selects entries."""
        return layer in self.text.index_source_layer_ids

    @property
    def candidate_consumers(self) -> tuple[int, ...]:
        """Index sources that select only among the candidate layer's blocks."""
        source = self.text.candidate_source_layer_id
        return tuple(i for i in self.text.index_source_layer_ids if i > source and self.kv_source(i) == source)

    def engram_table(self, layer: int) -> int | None:
        """Which Engram table is read at the entry of `layer` (index into `engram_layer_ids`), or None."""
        ids = self.text.engram_layer_ids
        return ids.index(layer) if layer in ids else None


NONE: frozenset[str] = frozenset()
SECTIONS = frozenset({"text_config", "vision_config", "quantization_config"})


def _section(raw: Mapping[str, Any], key: str, path: str = "") -> Mapping[str, Any]:
    value = raw.get(key) if isinstance(raw, Mapping) else None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}{key}", value, "must be an object", "use the published layout of config.json")
    return value


def _plain(value: object) -> Any:
    return list(value) if isinstance(value, tuple) else value


@functools.cache
def _source(sources: tuple[int, ...], layer: int) -> int:
    return max(s for s in sources if s <= layer)
