"""The rules a configuration must keep for this architecture; each broken one names field, value, rule and remedy."""

from shoal.engines.model.config import ModelConfig, TextConfig, VisionConfig
from shoal.engines.model.errors import ConfigError

RATIOS = (0, 1, 2)
NO_CANDIDATES = -1
"""`candidate_source_layer_id` where every index source chooses among all entries (published model.py: below 0)."""
POSITIVE_TEXT = (
    "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "swiglu_limit", "rms_norm_eps",
    "max_position_embeddings", "rope_theta", "compress_rope_theta", "n_routed_experts", "num_experts_per_tok",
    "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "candidate_topk_blocks",
    "candidate_block_size", "hc_mult", "hc_sinkhorn_iters", "engram_vocab_size", "engram_n_heads", "engram_head_dim",
    "engram_compressed_vocab_size", "dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts",
    "dspark_num_experts_per_tok", "num_nextn_predict_layers",
)  # fmt: skip
POSITIVE_VISION = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "patch_size", "rope_theta",
    "downsample_ratio", "max_image_tokens", "min_pixels",
)  # fmt: skip


def check_config(config: ModelConfig) -> None:
    """Raise ConfigError at the first broken rule (published layer map, shapes that the formats need, token ids)."""
    for name in POSITIVE_TEXT:
        _require(getattr(config.text, name) > 0, f"text_config.{name}", getattr(config.text, name), "must be positive")
    _check_shapes(config.text, config.quantization.block)
    _check_layer_map(config)
    _check_engram_and_drafter(config)
    _check_tokens(config)
    _check_vision(config.vision)


def _require(ok: bool, field: str, value: object, rule: str, remedy: str = "use the checkpoint's own config") -> None:
    if not ok:
        raise ConfigError(field, value, rule, remedy)


def _check_shapes(text: TextConfig, block: int) -> None:
    def multiple(name: str, of: int, why: str) -> None:
        value = getattr(text, name)
        _require(value % of == 0, f"text_config.{name}", value, f"must be a multiple of {of} ({why})")

    multiple("head_dim", block, "FP8 and FP4 cache groups")
    multiple("index_head_dim", block, "MXFP4 index groups")
    multiple("hidden_size", block, "MXFP4 expert groups")
    multiple("moe_intermediate_size", block, "MXFP4 expert groups")
    multiple("engram_head_dim", block, "Engram row groups")
    multiple("qk_rope_head_dim", 2, "pairs are rotated")
    multiple("num_attention_heads", text.o_groups, "heads are split over o_groups")
    for name in ("head_dim", "index_head_dim"):
        _require(
            text.qk_rope_head_dim <= getattr(text, name),
            "text_config.qk_rope_head_dim",
            text.qk_rope_head_dim,
            f"must not exceed {name} = {getattr(text, name)}",
        )
    _require(text.n_shared_experts == 1, "text_config.n_shared_experts", text.n_shared_experts, "only 1 is defined")
    for experts, top in (
        ("n_routed_experts", "num_experts_per_tok"),
        ("dspark_n_routed_experts", "dspark_num_experts_per_tok"),
    ):
        count, chosen = getattr(text, experts), getattr(text, top)
        _require(chosen <= count, f"text_config.{top}", chosen, f"must not exceed {experts} = {count}")


def _check_sources(field: str, ids: tuple[int, ...], layers: int) -> None:
    _require(bool(ids), field, ids, "must not be empty")
    _require(list(ids) == sorted(set(ids)), field, ids, "must be strictly ascending")
    _require(ids[0] >= 0 and ids[-1] < layers, field, ids, f"must name trunk layers 0 to {layers - 1}")


def _check_layer_map(config: ModelConfig) -> None:
    text, layers = config.text, config.text.num_hidden_layers
    ratios, field = text.compress_ratios, "text_config.compress_ratios"
    total = layers + text.num_nextn_predict_layers
    _require(len(ratios) >= total, field, ratios, f"needs an entry for each of {total} trunk and drafter layers")
    _require(all(r in RATIOS for r in ratios), field, ratios, f"entries must be in {RATIOS}")
    _require(1 in ratios[:layers], field, ratios, "some trunk layer must have ratio 1 (the decoder boundary)")
    _require(not any(ratios[layers:]), field, ratios, "drafter layers must have ratio 0")
    _check_sources("text_config.kv_source_layer_ids", text.kv_source_layer_ids, layers)
    _check_sources("text_config.index_source_layer_ids", text.index_source_layer_ids, layers)
    for layer in text.kv_source_layer_ids:
        _require(
            layer in text.index_source_layer_ids,
            "text_config.kv_source_layer_ids",
            layer,
            "every KV source must be an index source",
        )
    for layer in text.index_source_layer_ids:
        _require(ratios[layer] > 0, "text_config.index_source_layer_ids", layer, "a ratio-0 layer cannot be a source")
    for layer in range(layers):
        if ratios[layer]:
            _check_layer_source(config, layer)
    source = text.candidate_source_layer_id
    _require(
        source == NO_CANDIDATES or source in text.kv_source_layer_ids,
        "text_config.candidate_source_layer_id",
        source,
        f"must be a KV source, or {NO_CANDIDATES}: no candidates",
    )
    keys = text.index_k_source_layer_ids
    _require(
        keys is None or keys == text.kv_source_layer_ids,
        "text_config.index_k_source_layer_ids",
        keys,
        f"must equal kv_source_layer_ids = {text.kv_source_layer_ids}",
    )


def _check_layer_source(config: ModelConfig, layer: int) -> None:
    field, boundary = f"text_config.compress_ratios[{layer}]", config.n_prefill_layer
    ratio = config.ratio(layer)
    _require(
        config.text.kv_source_layer_ids[0] <= layer, field, ratio, "no KV source at or below this layer", "use 0 here"
    )
    source = config.kv_source(layer)
    assert source is not None, f"layer {layer} reads a cache and must have a source"
    _require(
        config.ratio(source) == ratio, field, ratio, f"must equal its KV source's ({source}): {config.ratio(source)}"
    )
    # Truncated prefill skips decoder rows: a cache written above the boundary would miss them.
    _require(
        layer < boundary or source == boundary,
        "text_config.kv_source_layer_ids",
        source,
        f"no KV source may lie above the first ratio-1 layer, {boundary}",
    )


def _check_engram_and_drafter(config: ModelConfig) -> None:
    text, layers = config.text, config.text.num_hidden_layers
    if text.engram_layer_ids:
        _check_sources("text_config.engram_layer_ids", text.engram_layer_ids, layers)
    _require(
        len(text.engram_num_embeddings) == len(text.engram_layer_ids),
        "text_config.engram_num_embeddings",
        text.engram_num_embeddings,
        f"needs one entry per Engram layer ({len(text.engram_layer_ids)})",
    )
    size = text.engram_max_ngram_size
    _require(size >= 2, "text_config.engram_max_ngram_size", size, "must be at least 2")
    taps, boundary = text.dspark_target_layer_ids, config.n_prefill_layer
    _check_sources("text_config.dspark_target_layer_ids", taps, layers)
    _require(
        len({t >= boundary for t in taps}) == 1,
        "text_config.dspark_target_layer_ids",
        taps,
        f"must all lie on one side of the first ratio-1 layer, {boundary}",
    )


def _check_tokens(config: ModelConfig) -> None:
    vocab = config.text.vocab_size
    ids = {k: getattr(config, k) for k in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")}
    ids |= {f"text_config.{k}": getattr(config.text, k) for k in ("engram_pad_token_id", "dspark_noise_token_id")}
    for field, value in ids.items():
        _require(0 <= value < vocab, field, value, f"must be below vocab_size = {vocab}")


def _check_vision(vision: VisionConfig) -> None:
    for name in POSITIVE_VISION:
        value = getattr(vision, name)
        _require(value > 0, f"vision_config.{name}", value, "must be positive")
    heads = vision.num_attention_heads
    fits = vision.hidden_size % heads == 0 and vision.head_dim % 4 == 0
    _require(
        fits,
        "vision_config.hidden_size",
        vision.hidden_size,
        f"must give each of {heads} heads a multiple of 4 channels",
    )
    tokens = vision.max_image_tokens
    _require(tokens >= 4, "vision_config.max_image_tokens", tokens, "must fit START, IMAGE, NEWLINE and END")
    ratio = vision.max_wh_ratio
    _require(ratio is None or ratio > 0, "vision_config.max_wh_ratio", ratio, "must be positive or null")
