"""Checkpoint tensors as the values that the operators take: dequantised to BF16, small ones widened."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from shoal.engines.model import quant
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.engram_write import EngramWeights
from shoal.engines.model.mhc import HyperWeights
from shoal.engines.model.moe import Expert, MoeWeights
from shoal.engines.model.numerics import Linear
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Projections of one attention layer; wo_a of each group is [rank, heads of a group x head_dim], sink [heads] wide.

    wqkv_a holds the rows of the query's down projection, then those of wkv: one product for both, each output still
    the sum over the same row. `wkv` is a view of it.
    """

    wqkv_a: Linear
    wq_b: Linear
    wkv: Linear
    wo_a: tuple[Tensor, ...]
    wo_b: Linear
    q_norm: Tensor
    kv_norm: Tensor
    sink: Tensor


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """What a KV source owns: latent projection, norms, index key projection.

    `gated` (ratio above 1 only) holds the gate's rows, then those of `wkv`, which is a view of it.
    """

    wkv: Linear
    gated: Linear | None
    norm: Tensor
    index_key: Linear
    index_norm: Tensor


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """What an index source owns: queries [index heads x index dim, q rank] and head weights [index heads, H]."""

    queries: Linear
    heads: Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer block. The last three are None on layers that do not own them."""

    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: HyperWeights
    hc_ffn: HyperWeights
    attention: AttentionWeights
    moe: MoeWeights
    compressor: CompressorWeights | None = None
    indexer: IndexerWeights | None = None
    engram: EngramWeights | None = None


@dataclass(frozen=True, slots=True)
class DrafterWeights:
    """The drafter: feature projection, its blocks, head norm, Markov correction and confidence."""

    main_proj: Linear
    main_norm: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    markov_embed: Tensor
    markov_head: Linear
    confidence: Linear


@dataclass(frozen=True, slots=True)
class TrunkWeights:
    """Embedding [V, H] as stored, blocks, final norm and head [V, H]."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear


class Reader:
    """Reads tensors under one prefix. Layers' weights are BF16 (exact) until they are used; small ones are `wide`."""

    def __init__(self, tensors: Mapping[str, Tensor], wide: torch.dtype, block: int, prefix: str = "") -> None:
        self._tensors, self._wide, self._block, self._prefix = tensors, wide, block, prefix

    def under(self, prefix: str) -> "Reader":
        """The reader of a longer prefix."""
        return Reader(self._tensors, self._wide, self._block, self._prefix + prefix)

    def stored(self, name: str) -> Tensor:
        """A tensor as in the file."""
        return self._tensors[self._prefix + name]

    def wide(self, name: str) -> Tensor:
        """A BF16 or F32 tensor, widened."""
        return self.stored(name).to(self._wide)

    def dense(self, name: str) -> Linear:
        """An FP8 weight, dequantised; BF16 holds its four significant bits exactly."""
        values = quant.dequantise_fp8_blocks(self.stored(f"{name}.weight"), self.stored(f"{name}.scale"), self._block)
        return Linear(values.to(torch.bfloat16), is_quantised=True)

    def plain(self, name: str) -> Linear:
        """A BF16 weight, as stored."""
        return Linear(self.stored(f"{name}.weight"))

    def expert(self, prefix: str, is_packed: bool) -> Expert:
        """A routed (MXFP4) or shared (FP8) expert."""
        gate, up, down = (self._packed(prefix + n) if is_packed else self.dense(prefix + n) for n in ("w1", "w3", "w2"))
        return Expert(joined(gate, up), down)

    def _packed(self, name: str) -> Linear:
        data, scales = self.stored(f"{name}.weight"), self.stored(f"{name}.scale")
        values = quant.dequantise_mxfp4(data.view(torch.uint8), scales.view(torch.uint8))
        return Linear(values.to(torch.bfloat16), is_quantised=True)


def joined(first: Linear, second: Linear) -> Linear:
    """Two layers of the same input as one: the rows of the first, then those of the second."""
    assert first.is_quantised == second.is_quantised, "layers that share a product share its input's rounding"
    return Linear(torch.cat((first.weight, second.weight)), first.is_quantised)


def read_trunk(tensors: Mapping[str, Tensor], config: ModelConfig, wide: torch.dtype) -> TrunkWeights:
    """The trunk of a checkpoint's tensors (parts embed, encoder, decoder, engram)."""
    reader = Reader(tensors, wide, config.quantization.block)
    layers = tuple(
        _layer(reader.under(f"layers.{layer}."), config, layer, config.text.n_routed_experts)
        for layer in range(config.n_layers)
    )
    return TrunkWeights(reader.stored("embed.weight"), layers, reader.wide("norm.weight"), reader.plain("head"))


def read_drafter(tensors: Mapping[str, Tensor], config: ModelConfig, wide: torch.dtype) -> DrafterWeights:
    """The drafter of a checkpoint's tensors (part drafter)."""
    reader = Reader(tensors, wide, config.quantization.block, "mtp.")
    layers = tuple(
        _layer(reader.under(f"{index}."), config, layer, config.text.dspark_n_routed_experts)
        for index, layer in enumerate(config.drafter_layers)
    )
    last = reader.under(f"{len(layers) - 1}.")
    return DrafterWeights(
        main_proj=reader.dense("0.main_proj"),
        main_norm=reader.wide("0.main_norm.weight"),
        layers=layers,
        norm=last.wide("norm.weight"),
        markov_embed=last.stored("markov_head.embed.weight"),
        markov_head=last.plain("markov_head.head"),
        confidence=last.plain("confidence_head.proj"),
    )


def _layer(reader: Reader, config: ModelConfig, layer: int, experts: int) -> LayerWeights:
    attention, in_trunk = reader.under("attn."), layer < config.n_layers
    return LayerWeights(
        attn_norm=reader.wide("attn_norm.weight"),
        ffn_norm=reader.wide("ffn_norm.weight"),
        hc_attn=_hyper(reader, "hc_attn", config.text.hc_mult),
        hc_ffn=_hyper(reader, "hc_ffn", config.text.hc_mult),
        attention=_attention(attention, config),
        moe=_moe(reader.under("ffn."), experts),
        compressor=_compressor(attention, config, layer) if in_trunk and config.is_kv_source(layer) else None,
        indexer=_indexer(attention) if in_trunk and config.is_index_source(layer) else None,
        engram=_engram(reader.under("engram.")) if config.engram_table(layer) is not None else None,
    )


def _hyper(reader: Reader, name: str, streams: int) -> HyperWeights:
    fn, base, scale = (reader.wide(f"{name}_{part}") for part in ("fn", "base", "scale"))
    counts = torch.tensor((streams, streams, streams * streams))
    return HyperWeights(fn, base, scale.repeat_interleave(counts))


def _attention(reader: Reader, config: ModelConfig) -> AttentionWeights:
    wqkv_a = joined(reader.dense("wq_a"), reader.dense("wkv"))
    return AttentionWeights(
        wqkv_a=wqkv_a,
        wq_b=reader.dense("wq_b"),
        wkv=Linear(wqkv_a.weight[config.text.q_lora_rank :], is_quantised=True),
        wo_a=reader.dense("wo_a").weight.split(config.text.o_lora_rank),
        wo_b=reader.dense("wo_b"),
        q_norm=reader.wide("q_norm.weight"),
        kv_norm=reader.wide("kv_norm.weight"),
        sink=reader.wide("attn_sink"),
    )


def _compressor(reader: Reader, config: ModelConfig, layer: int) -> CompressorWeights:
    wkv, gated = reader.plain("compressor.wkv"), None
    if config.ratio(layer) > 1:
        gated = joined(reader.plain("compressor.wgate"), wkv)
        wkv = Linear(gated.weight[config.text.head_dim :])
    return CompressorWeights(
        wkv=wkv,
        gated=gated,
        norm=reader.wide("compressor.norm.weight"),
        index_key=reader.plain("indexer.wk"),
        index_norm=reader.wide("indexer.k_norm.weight"),
    )


def _indexer(reader: Reader) -> IndexerWeights:
    return IndexerWeights(queries=reader.dense("indexer.wq_b"), heads=reader.plain("indexer.weights_proj"))


def _moe(reader: Reader, experts: int) -> MoeWeights:
    return MoeWeights(
        router=reader.wide("gate.weight"),
        bias=reader.wide("gate.bias"),
        bias_image=reader.wide("gate.bias_vl"),
        experts=tuple(reader.expert(f"experts.{index}.", is_packed=True) for index in range(experts)),
        shared=reader.expert("shared_experts.", is_packed=False),
    )


def _engram(reader: Reader) -> EngramWeights:
    return EngramWeights(
        rows=reader.stored("embed.weight"),
        scales=reader.stored("embed.scale"),
        wkv=reader.dense("wkv"),
        query=reader.wide("q_weight"),
        key=reader.wide("k_weight"),
    )
