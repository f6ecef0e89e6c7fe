"""Every tensor of a checkpoint: name, shape, stored type and the part of the model that needs it."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from shoal.engines.model.config import ModelConfig, TextConfig, VisionConfig


class Part(StrEnum):
    """What can be loaded alone. An encode engine needs VISION only; a drafter also needs EMBED and DECODER's head."""

    EMBED = "embed"
    ENCODER = "encoder"
    DECODER = "decoder"
    ENGRAM = "engram"
    DRAFTER = "drafter"
    VISION = "vision"


TRUNK = frozenset({Part.EMBED, Part.ENCODER, Part.DECODER, Part.ENGRAM})
ALL = frozenset(Part)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor; `dtype` is the safetensors tag (F8_E4M3, F8_E8M0, I8, BF16, F32)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    part: Part


Named = Iterator[tuple[str, tuple[int, ...], str]]


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """All tensors of the checkpoint of `config` by name, in the order of the layers.

    Source: the published checkpoint's index (96,085 tensors for the released configuration).
    """
    specs: dict[str, TensorSpec] = {}

    def add(part: Part, prefix: str, tensors: Named) -> None:
        for name, shape, dtype in tensors:
            full = f"{prefix}{name}"
            assert full not in specs, f"{full} is listed twice"
            specs[full] = TensorSpec(full, shape, dtype, part)

    text = config.text
    hidden, vocab = text.hidden_size, text.vocab_size
    add(Part.EMBED, "", iter([("embed.weight", (vocab, hidden), "BF16")]))
    for layer in range(text.num_hidden_layers):
        part = Part.ENCODER if layer < config.n_prefill_layer else Part.DECODER
        prefix = f"layers.{layer}."
        add(part, prefix, block_tensors(text, text.n_routed_experts))
        add(part, f"{prefix}attn.", sparse_tensors(config, layer))
        if layer in text.engram_layer_ids:
            rows = text.engram_num_embeddings[text.engram_layer_ids.index(layer)]
            add(Part.ENGRAM, f"{prefix}engram.", engram_tensors(text, rows))
    add(Part.DECODER, "", iter([("norm.weight", (hidden,), "BF16"), ("head.weight", (vocab, hidden), "BF16")]))
    for index in range(text.num_nextn_predict_layers):
        add(Part.DRAFTER, f"mtp.{index}.", block_tensors(text, text.dspark_n_routed_experts))
    add(Part.DRAFTER, "mtp.", drafter_tensors(text))
    add(Part.VISION, "", vision_tensors(config.vision, hidden))
    return specs


def float_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """The tensors of `tensor_specs` as float weights have them: no scales, packed FP4 weights in their whole shape."""
    specs = {name: spec for name, spec in tensor_specs(config).items() if spec.dtype != "F8_E8M0"}
    return {
        name: TensorSpec(name, (spec.shape[0], 2 * spec.shape[1]), spec.dtype, spec.part)
        if spec.dtype == "I8"
        else spec
        for name, spec in specs.items()
    }


def fp8(name: str, rows: int, columns: int) -> Named:
    """An FP8 weight and its scale per 32 x 32 block."""
    yield f"{name}.weight", (rows, columns), "F8_E4M3"
    yield f"{name}.scale", (-(-rows // 32), -(-columns // 32)), "F8_E8M0"


def fp4(name: str, rows: int, columns: int) -> Named:
    """An MXFP4 weight, two values a byte, and its scale per row and 32 columns."""
    yield f"{name}.weight", (rows, columns // 2), "I8"
    yield f"{name}.scale", (rows, columns // 32), "F8_E8M0"


def bf16(name: str, *shape: int) -> Named:
    """A BF16 weight."""
    yield f"{name}.weight", shape, "BF16"


def block_tensors(text: TextConfig, experts: int) -> Named:
    """One transformer block without its sparse-attention parts: norms, mHC, attention, gate, experts."""
    hidden, mixes, heads = text.hidden_size, text.hc_mixes, text.num_attention_heads
    for sublayer in ("attn", "ffn"):
        yield f"{sublayer}_norm.weight", (hidden,), "BF16"
        yield f"hc_{sublayer}_fn", (mixes, text.hc_mult * hidden), "F32"
        yield f"hc_{sublayer}_base", (mixes,), "F32"
        yield f"hc_{sublayer}_scale", (3,), "F32"
    yield from fp8("attn.wq_a", text.q_lora_rank, hidden)
    yield from fp8("attn.wq_b", heads * text.head_dim, text.q_lora_rank)
    yield from fp8("attn.wkv", text.head_dim, hidden)
    yield from fp8("attn.wo_a", text.o_groups * text.o_lora_rank, heads * text.head_dim // text.o_groups)
    yield from fp8("attn.wo_b", hidden, text.o_groups * text.o_lora_rank)
    yield from bf16("attn.q_norm", text.q_lora_rank)
    yield from bf16("attn.kv_norm", text.head_dim)
    yield "attn.attn_sink", (heads,), "F32"
    yield from bf16("ffn.gate", experts, hidden)
    yield "ffn.gate.bias", (experts,), "F32"
    yield "ffn.gate.bias_vl", (experts,), "F32"
    inner = text.moe_intermediate_size
    for name, rows, columns in (("w1", inner, hidden), ("w2", hidden, inner), ("w3", inner, hidden)):
        yield from fp8(f"ffn.shared_experts.{name}", rows, columns)
        for expert in range(experts):
            yield from fp4(f"ffn.experts.{expert}.{name}", rows, columns)


def sparse_tensors(config: ModelConfig, layer: int) -> Named:
    """Compressor and index keys of a KV source; index queries and head weights of an index source."""
    text = config.text
    if config.is_kv_source(layer):
        yield from bf16("compressor.wkv", text.head_dim, text.hidden_size)
        yield from bf16("compressor.norm", text.head_dim)
        if config.ratio(layer) > 1:
            yield from bf16("compressor.wgate", text.head_dim, text.hidden_size)
        yield from bf16("indexer.wk", text.index_head_dim, text.head_dim)
        yield from bf16("indexer.k_norm", text.index_head_dim)
    if config.is_index_source(layer):
        yield from fp8("indexer.wq_b", text.index_n_heads * text.index_head_dim, text.q_lora_rank)
        yield from bf16("indexer.weights_proj", text.index_n_heads, text.hidden_size)


def engram_tensors(text: TextConfig, rows: int) -> Named:
    """One Engram table with row-wise scales, its projection (key of each stream, then value) and gate weights."""
    yield "embed.weight", (rows, text.engram_head_dim), "F8_E4M3"
    yield "embed.scale", (rows, text.engram_head_dim // 32), "F8_E8M0"
    yield from fp8("wkv", (text.hc_mult + 1) * text.hidden_size, text.engram_columns * text.engram_head_dim)
    yield "q_weight", (text.hc_mult, text.hidden_size), "BF16"
    yield "k_weight", (text.hc_mult, text.hidden_size), "BF16"


def drafter_tensors(text: TextConfig) -> Named:
    """What the drafter has beyond its blocks; names relative to `mtp.`."""
    hidden, last = text.hidden_size, text.num_nextn_predict_layers - 1
    yield from fp8("0.main_proj", hidden, len(text.dspark_target_layer_ids) * hidden)
    yield from bf16("0.main_norm", hidden)
    yield from bf16(f"{last}.norm", hidden)
    yield from bf16(f"{last}.markov_head.embed", text.vocab_size, text.dspark_markov_rank)
    yield from bf16(f"{last}.markov_head.head", text.vocab_size, text.dspark_markov_rank)
    yield from bf16(f"{last}.confidence_head.proj", 1, hidden + text.dspark_markov_rank)


def vision_tensors(vision: VisionConfig, hidden: int) -> Named:
    """Vision tower, aligner and the three learned delimiter rows."""

    def linear(name: str, rows: int, columns: int) -> Named:
        yield f"{name}.weight", (rows, columns), "BF16"
        yield f"{name}.bias", (rows,), "BF16"

    width = vision.hidden_size
    yield from linear("vision.patch_embed.proj", width, vision.patch_channels)
    for index in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{index}."
        yield from bf16(f"{prefix}norm1", width)
        yield from bf16(f"{prefix}norm2", width)
        yield from linear(f"{prefix}attn.wqkv", 3 * width, width)
        yield from linear(f"{prefix}attn.wo", width, width)
        yield from bf16(f"{prefix}mlp.w1", 2 * vision.intermediate_size, width)
        yield from bf16(f"{prefix}mlp.w2", width, vision.intermediate_size)
    yield from bf16("vision.norm", width)
    yield from linear("aligner.w1", hidden, width * vision.downsample_ratio**2)
    yield from linear("aligner.w2", hidden, hidden)
    for name in ("image_start", "image_end", "image_newline"):
        yield name, (hidden,), "BF16"
