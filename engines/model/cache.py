"""The bytes that hold sequences: paged blocks and state slots, seen as rows of the published formats."""

from dataclasses import dataclass

import torch
from shoal.engines.core.layout import (
    BlockLayout,
    CacheShape,
    Kind,
    Ring,
    Section,
    SlotLayout,
    block_layout,
    slot_layout,
)
from shoal.engines.model import quant
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How rows of values become data and scale bytes and back."""

    encode: quant.Quantise
    decode: quant.Dequantise
    scale_bytes: int


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """Row formats of window rings, main KV and index keys."""

    window: RowFormat
    main: RowFormat
    index: RowFormat
    is_exact: bool


def cache_format(shape: CacheShape) -> CacheFormat:
    """The published row formats, or float32 rows in the same structure for an exact shape."""
    if shape.is_exact:
        exact = RowFormat(_encode_exact, _decode_exact, 0)
        return CacheFormat(exact, exact, exact, is_exact=True)
    return CacheFormat(
        window=RowFormat(quant.quantise_fp8, quant.dequantise_fp8, shape.head_dim // 32),
        main=RowFormat(quant.quantise_fp4, quant.dequantise_fp4, shape.head_dim // 16),
        index=RowFormat(quant.quantise_mxfp4, quant.dequantise_mxfp4, shape.index_dim // 32),
        is_exact=False,
    )


class Caches:
    """Blocks uint8 [N, block_bytes] and slots uint8 [M, slot_bytes] of one engine, owned by the caller.

    Rows are read and written through views: the two tensors hold everything, so copying their bytes moves a sequence.
    Id 0 of both is null: padded table entries point at block 0, and its content is never used.
    """

    def __init__(self, blocks: Tensor, slots: Tensor, shape: CacheShape) -> None:
        self.blocks, self.slots, self.shape = blocks, slots, shape
        self.block_layout: BlockLayout = block_layout(shape)
        self.slot_layout: SlotLayout = slot_layout(shape)
        self.format = cache_format(shape)
        for name, tensor, row_bytes in (
            ("blocks", blocks, self.block_layout.block_bytes),
            ("slots", slots, self.slot_layout.slot_bytes),
        ):
            if tensor.dtype != torch.uint8 or tensor.dim() != 2 or tensor.shape[1] != row_bytes:
                raise ValueError(
                    f"Caches.{name} is {tensor.dtype} {tuple(tensor.shape)}; the layout needs uint8 [n, {row_bytes}]"
                )
        self._rings = tuple(self._ring(ring) for ring in self.slot_layout.rings)
        self._sections = {(s.layer, s.kind): self._section(s) for s in self.block_layout.sections}

    @classmethod
    def allocate(cls, shape: CacheShape, blocks_count: int, slots_count: int, device: str = "cpu") -> "Caches":
        """Zeroed caches for so many blocks and slots, null ones included."""
        block_bytes, slot_bytes = block_layout(shape).block_bytes, slot_layout(shape).slot_bytes
        return cls(
            torch.zeros(blocks_count, block_bytes, dtype=torch.uint8, device=device),
            torch.zeros(slots_count, slot_bytes, dtype=torch.uint8, device=device),
            shape,
        )

    def read_window(self, layer: int, slots: Tensor, rows: Tensor, valid: Tensor | None, to: torch.dtype) -> Tensor:
        """Window rows [..., D] of slot ids and ring rows, int64 of one shape after broadcasting; 0 where not valid.

        Bytes that nobody wrote may decode to NaN, and a masked NaN would still spoil a weighted sum; zero bytes decode
        to zeros in every format.
        """
        words = _words(self._rings[layer])[slots, rows]
        if valid is not None:
            words *= valid.unsqueeze(-1)
        return self.decode_window(words.view(torch.uint8), to)

    def write_window(self, layer: int, slots: Tensor, rows: Tensor, stored: Tensor) -> None:
        """Put encoded rows uint8 [n, row bytes] at slot ids and ring rows [n]."""
        self._rings[layer][slots, rows] = stored

    def encode_window(self, kv: Tensor) -> Tensor:
        """Window rows [T, D] as bytes uint8 [T, row bytes]."""
        return quant.join_rows(*self.format.window.encode(kv))

    def decode_window(self, stored: Tensor, to: torch.dtype) -> Tensor:
        """Bytes uint8 [..., row bytes] as window rows [..., D]."""
        cut = stored.shape[-1] - self.format.window.scale_bytes
        return self.format.window.decode(stored[..., :cut], stored[..., cut:], to)

    def read_entries(self, layer: int, kind: Kind, blocks: Tensor, rows: Tensor, to: torch.dtype) -> Tensor:
        """Main KV or index keys [..., width] of block ids and rows inside a block."""
        data, scales = self._sections[layer, kind]
        return self._format(kind).decode(_gathered(data, blocks, rows), _gathered(scales, blocks, rows), to)

    def read_blocks(self, layer: int, kind: Kind, tables: Tensor, to: torch.dtype) -> Tensor:
        """All rows of whole blocks, [S, rows, width] of block tables int64 [S, blocks]; unwritten hold anything."""
        data, scales = (_words(part)[tables].view(torch.uint8).flatten(1, 2) for part in self._sections[layer, kind])
        return self._format(kind).decode(data, scales, to)

    def write_entries(self, layer: int, kind: Kind, blocks: Tensor, rows: Tensor, values: Tensor) -> None:
        """Encode values [n, width] into block ids and rows [n]."""
        data, scales = self._sections[layer, kind]
        data[blocks, rows], scales[blocks, rows] = self._format(kind).encode(values)

    def accumulators(self, layer: int) -> Tensor:
        """The compressor state of a layer, a float32 view [M, rows, 2, D] of (score, latent)."""
        place = self.slot_layout.accumulator(layer)
        stored = self.slots[:, place.offset : place.offset + place.bytes].view(torch.float32)
        return stored.view(len(stored), place.rows, 2, self.shape.head_dim)

    def _format(self, kind: Kind) -> RowFormat:
        return self.format.index if kind == "index" else self.format.main

    def _ring(self, ring: Ring) -> Tensor:
        stored, layout = self.slots[:, ring.offset : ring.offset + ring.bytes], self.slot_layout
        return stored.view(len(stored), layout.ring_tokens, layout.row_bytes)

    def _section(self, section: Section) -> tuple[Tensor, Tensor]:
        stored = self.blocks[:, section.offset : section.offset + section.bytes]
        scale_bytes, count = self._format(section.kind).scale_bytes, section.rows
        data_bytes = section.row_bytes - scale_bytes
        if section.kind == "main":
            rows = stored.view(len(stored), count, section.row_bytes)
            return rows[..., :data_bytes], rows[..., data_bytes:]
        # Index keys: all data rows of the block, then all their scale rows.
        data, scales = stored[:, : count * data_bytes], stored[:, count * data_bytes :]
        return data.view(len(data), count, data_bytes), scales.view(len(scales), count, scale_bytes)


def _words(stored: Tensor) -> Tensor:
    """Bytes uint8 [..., n] seen as int64 [..., n / 8] if they lie so, else as they are: a gather moves fewer items."""
    places = (stored.shape[-1], stored.storage_offset(), *stored.stride()[:-1])
    return stored.view(torch.int64) if all(place % 8 == 0 for place in places) else stored


def _gathered(stored: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """`stored[first, second]` of bytes [N, M, n]."""
    return _words(stored)[first, second].view(torch.uint8)


def _encode_exact(x: Tensor, /) -> tuple[Tensor, Tensor]:
    data = x.to(torch.float32).contiguous().view(torch.uint8)
    return data, data[..., :0]


def _decode_exact(data: Tensor, scales: Tensor, to: torch.dtype = torch.float32, /) -> Tensor:
    assert scales.shape[-1] == 0, "exact rows have no scales"
    return data.contiguous().view(torch.float32).to(to)
