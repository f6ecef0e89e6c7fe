"""Exact bytes of a block and of a slot, and the ring arithmetic of a slot, for any model shape.

A block holds the paged KV of `block_tokens` tokens: for each owning layer its index keys, then its main KV.
A slot holds one sequence's unpaged state: the window rings of the encoder layers (stored outside the device),
then the rings of decoder and drafter layers and the compressor accumulators (dropped, recomputed after a hit).
Sources: the published sizes (114,048 B, 1,415,040 B, 3,128,928 B) and engine runtime notes 10.1-10.3, 10.7.
"""

from dataclasses import dataclass
from math import lcm
from typing import Literal

Kind = Literal["index", "main"]

SECTION_ALIGNMENT = 32
BLOCK_ALIGNMENT = 128
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The facts about a model that fix its cache bytes. Every number comes from its configuration.

    `ratios[layer]` is the compression ratio of a trunk layer (0: window only, 1 or 2). `kv_sources` are the layers
    that own main KV, ascending; `index_sources` those that own index keys (layers that read another layer's keys own
    nothing). `n_prefill_layer` is the first decoder layer. Drafter layers follow the trunk layers. `backtracking` is
    how many positions may be rewritten. `ring_extra` lengthens every ring beyond window + backtracking. `is_exact`
    stores float32 rows in place of the published formats, for the float32 numeric modes.
    """

    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    n_prefill_layer: int
    drafter_layers: int
    window: int
    backtracking: int
    head_dim: int = 512
    index_dim: int = 128
    block_tokens: int = 128
    ring_extra: int = 0
    is_exact: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value, the rule and what to change."""
        layers = len(self.ratios)
        if not 0 <= self.n_prefill_layer <= layers:
            raise ValueError(f"n_prefill_layer = {self.n_prefill_layer} must lie in 0..{layers}, the number of ratios")
        for name, least in (("window", 1), ("block_tokens", 1), ("backtracking", 0), ("ring_extra", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {least}")
        for name in ("kv_sources", "index_sources"):
            owners = getattr(self, name)
            if list(owners) != sorted(set(owners)):
                raise ValueError(f"{name} = {owners} must be ascending and without repetition")
            for layer in owners:
                if not 0 <= layer < layers or self.ratios[layer] < 1:
                    raise ValueError(f"{name} has layer {layer}: it must be a layer whose ratio is at least 1")
                if self.block_tokens % self.ratios[layer]:
                    raise ValueError(
                        f"block_tokens = {self.block_tokens} must be a multiple of ratios[{layer}] = "
                        f"{self.ratios[layer]}: a compressed row may not straddle two blocks"
                    )
        if self.head_dim % 32 or self.index_dim % 32:
            raise ValueError(f"head_dim = {self.head_dim} and index_dim = {self.index_dim} must be multiples of 32")

    @property
    def layers(self) -> int:
        """Trunk and drafter layers: each owns one window ring."""
        return len(self.ratios) + self.drafter_layers

    @property
    def inference_ring_tokens(self) -> int:
        """Positions a decode engine keeps for each ring: window + backtracking."""
        return self.window + self.backtracking

    @property
    def ring_tokens(self) -> int:
        """Positions this engine keeps for each ring."""
        return self.inference_ring_tokens + self.ring_extra

    @property
    def swa_row_bytes(self) -> int:
        """One window row: e4m3 data, then one scale byte for every 32 channels (model notes 9.1)."""
        if self.is_exact:
            return self.head_dim * FLOAT32_BYTES
        return self.head_dim + self.head_dim // 32

    @property
    def main_row_bytes(self) -> int:
        """One main KV row: packed e2m1 data, then one e4m3 scale byte for every 16 channels (model notes 9.1)."""
        if self.is_exact:
            return self.head_dim * FLOAT32_BYTES
        return self.head_dim // 2 + self.head_dim // 16

    @property
    def index_row_bytes(self) -> int:
        """One index key: packed e2m1 data and one scale byte for every 32 channels (model notes 9.1)."""
        if self.is_exact:
            return self.index_dim * FLOAT32_BYTES
        return self.index_dim // 2 + self.index_dim // 32


@dataclass(frozen=True, slots=True)
class Section:
    """`rows` rows of `row_bytes` bytes at `offset` in a block; `bytes` is rows * row_bytes, padding excluded."""

    layer: int
    kind: Kind
    offset: int
    bytes: int
    rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where each owning layer's rows lie in one block. `sections` are in offset order, index before main."""

    sections: tuple[Section, ...]
    block_bytes: int
    block_tokens: int

    def section(self, layer: int, kind: Kind) -> Section:
        """The section of an owning layer. Raises KeyError when the layer owns none of that kind."""
        for section in self.sections:
            if section.layer == layer and section.kind == kind:
                return section
        owners = [s.layer for s in self.sections if s.kind == kind]
        raise KeyError(f"layer {layer} owns no {kind} section; owners are {owners}")


@dataclass(frozen=True, slots=True)
class Ring:
    """The window ring of one layer (drafter layers count on from the trunk): ring_tokens rows from `offset`."""

    layer: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Accumulator:
    """Compressor state of one layer: float32 [rows, 2, head_dim], (score, latent), rows written modulo `rows`."""

    layer: int
    offset: int
    bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where each ring and accumulator lies in one slot. Bytes [0, stored_bytes) are the stored region.

    `stored_anchor_bytes` is the stored region in inference length, what an anchor puts into the store.
    """

    rings: tuple[Ring, ...]
    accumulators: tuple[Accumulator, ...]
    stored_bytes: int
    stored_anchor_bytes: int
    slot_bytes: int
    ring_tokens: int
    inference_ring_tokens: int
    row_bytes: int

    def ring(self, layer: int) -> Ring:
        """The ring of a layer; rings lie in layer order."""
        return self.rings[layer]

    def accumulator(self, layer: int) -> Accumulator:
        """The accumulator of a compressing layer. Raises KeyError for a layer without one."""
        for accumulator in self.accumulators:
            if accumulator.layer == layer:
                return accumulator
        raise KeyError(f"layer {layer} has no accumulator; layers are {[a.layer for a in self.accumulators]}")


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `value`."""
    return -(-value // alignment) * alignment


def place_sections(parts: tuple[tuple[int, Kind, int, int], ...], block_tokens: int) -> BlockLayout:
    """Lay (layer, kind, ratio, bytes of a row) parts one after the other, each padded to 32 bytes.

    The block is padded to lcm(128, bytes of a main row), so that a kernel may view it as main rows (notes 10.2).
    """
    sections: list[Section] = []
    offset = 0
    for layer, kind, ratio, row_bytes in parts:
        rows = block_tokens // ratio
        sections.append(Section(layer, kind, offset, rows * row_bytes, rows, row_bytes))
        offset = align_up(offset + rows * row_bytes, SECTION_ALIGNMENT)
    main_rows = [s.row_bytes for s in sections if s.kind == "main"]
    return BlockLayout(tuple(sections), align_up(offset, lcm(BLOCK_ALIGNMENT, *main_rows)), block_tokens)


def block_layout(shape: CacheShape) -> BlockLayout:
    """Bytes of one block of this model: 114,048 for DeepSeek-V4.1-Flash."""
    parts: list[tuple[int, Kind, int, int]] = []
    for layer, ratio in enumerate(shape.ratios):
        if layer in shape.index_sources:
            parts.append((layer, "index", ratio, shape.index_row_bytes))
        if layer in shape.kv_sources:
            parts.append((layer, "main", ratio, shape.main_row_bytes))
    return place_sections(tuple(parts), shape.block_tokens)


def slot_layout(shape: CacheShape) -> SlotLayout:
    """Bytes of one slot of this model: 3,128,928, of them 1,415,040 stored, for DeepSeek-V4.1-Flash."""
    row, tokens = shape.swa_row_bytes, shape.ring_tokens
    ring_bytes = align_up(tokens * row, SECTION_ALIGNMENT)
    rings = tuple(Ring(layer, layer * ring_bytes, tokens * row) for layer in range(shape.layers))
    accumulators: list[Accumulator] = []
    offset = shape.layers * ring_bytes
    for layer in shape.kv_sources:
        if shape.ratios[layer] > 1:
            rows = accumulator_rows(shape.ratios[layer], shape.backtracking)
            size = rows * 2 * shape.head_dim * FLOAT32_BYTES
            accumulators.append(Accumulator(layer, offset, size, rows))
            offset = align_up(offset + size, SECTION_ALIGNMENT)
    return SlotLayout(
        rings=rings,
        accumulators=tuple(accumulators),
        stored_bytes=shape.n_prefill_layer * ring_bytes,
        stored_anchor_bytes=shape.n_prefill_layer * align_up(shape.inference_ring_tokens * row, SECTION_ALIGNMENT),
        slot_bytes=slot_bytes(shape.layers, tokens, row, offset - shape.layers * ring_bytes),
        ring_tokens=tokens,
        inference_ring_tokens=shape.inference_ring_tokens,
        row_bytes=row,
    )


def slot_bytes(layers: int, ring_tokens: int, row_bytes: int, accumulator_bytes: int) -> int:
    """Bytes of a slot: rings padded to 32, accumulators, the whole padded to lcm(32, row) (notes 10.3)."""
    used = layers * align_up(ring_tokens * row_bytes, SECTION_ALIGNMENT) + accumulator_bytes
    return align_up(used, lcm(SECTION_ALIGNMENT, row_bytes))


def accumulator_rows(ratio: int, backtracking: int) -> int:
    """Rows a compressor keeps: the ratio and what backtracking may bring back (notes 10.1)."""
    return ratio + max(0, backtracking - 1)


def slots_count(sequences_max: int, ratio: float = 1.2) -> int:
    """Slots of an engine: floor(sequences * ratio) + 1, slot 0 being null (notes 10.4)."""
    return int(sequences_max * ratio) + 1


def ring_slot(position: int, ring_tokens: int) -> int:
    """Row of a ring that holds an absolute position."""
    return position % ring_tokens


def ring_select(end: int, source_tokens: int, target_tokens: int) -> tuple[tuple[int, int], ...]:
    """(target row, source row) for each position of the last `target_tokens` before `end`, by target row.

    Selects the inference window out of a longer ring (notes 10.7); `ring_load` is the inverse. Positions before 0
    follow the mathematical modulo: their rows hold nothing yet, and copying them is harmless.
    """
    if target_tokens > source_tokens:
        raise ValueError(
            f"target_tokens = {target_tokens} must not exceed source_tokens = {source_tokens}: use ring_load to widen"
        )
    return tuple(sorted((p % target_tokens, p % source_tokens) for p in range(end - target_tokens, end)))


def ring_load(end: int, source_tokens: int, target_tokens: int) -> tuple[tuple[int, int], ...]:
    """(target row, source row) that puts a window of `source_tokens` back into a longer ring: undoes `ring_select`."""
    return tuple(sorted((target, source) for source, target in ring_select(end, target_tokens, source_tokens)))


def blocks_needed(tokens: int, block_tokens: int) -> int:
    """Blocks that hold `tokens` tokens (committed, in flight and drafted together; notes 1.4)."""
    return -(-tokens // block_tokens)


def runtime_tokens_max(max_model_len: int, drafts: int, pipelined: bool) -> int:
    """Exclusive upper bound of every position: drafts being verified, drafts proposed, one open step (notes 4)."""
    return max_model_len + drafts + (drafts + 1 if pipelined else 0) + drafts


def draft_pool_bytes(sequences_max: int, drafts: int, vocabulary: int) -> int:
    """Bytes of a draft pool's log-distributions, float32, one slot for each sequence and the null slot (notes 8.6)."""
    return (sequences_max + 1) * drafts * vocabulary * 4
