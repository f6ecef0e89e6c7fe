"""Which prompt rows decoder layers compute, store and see when prefill keeps only a suffix of the prompt.

Decoder layers start at rect = full_len - keep (engine runtime notes 10.8). COMPACT drops the rows before it, MASK
keeps them but lets them see nothing; kept rows get the same numbers either way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SuffixChunk:
    """One sequence's chunk: `rows` rows from `start` of a prompt of `full_len`; its ring belongs to `slot`.

    `valid_start` is the first position whose window keys exist (0 unless a prefix was swapped in without them).
    """

    full_len: int
    start: int
    rows: int
    slot: int
    valid_start: int = 0


@dataclass(frozen=True, slots=True)
class SuffixRows:
    """Decoder rows of a batch. With R rows kept of S sequences:

    rows: int64 [R], index of each row among the rows of all chunks. row_offsets: int64 [S + 1]. positions: int64 [R].
    ring_rows: int64 [R], slot * ring_tokens + position % ring_tokens, -1 = not stored. visible: int64 [R, 4], (start,
    length) of the keys in the history section (`window` rows a sequence), then in the section of new rows behind it.
    """

    rows: Ints
    row_offsets: Ints
    positions: Ints
    ring_rows: Ints
    visible: Ints


def clip_rows(full_len: int, start: int, rows: int, keep: int) -> int:
    """Leading rows of a chunk that COMPACT drops; at least one row always stays, for the sampler."""
    return min(max(full_len - keep - start, 0), rows - 1)


def suffix_rows(
    chunks: Sequence[SuffixChunk], window: int, keep: int, ring_tokens: int, is_compact: bool
) -> SuffixRows:
    """Lay out a prefill batch for the decoder layers; a row sees [max(p - window + 1, rect, valid_start, 0), p]."""
    clips = [clip_rows(c.full_len, c.start, c.rows, keep) if is_compact else 0 for c in chunks]
    offsets = np.cumsum([0, *(c.rows - clip for c, clip in zip(chunks, clips, strict=True))])
    firsts = np.cumsum([0, *(c.rows for c in chunks)])
    parts = [
        _chunk_rows(chunk, clip, window, keep, ring_tokens, (int(firsts[i]), i, len(chunks) * window + int(offsets[i])))
        for i, (chunk, clip) in enumerate(zip(chunks, clips, strict=True))
    ]
    rows, positions, ring_rows, visible = (np.concatenate(column) for column in zip(*parts, strict=True))
    return SuffixRows(rows, offsets, positions, ring_rows, visible)


def _chunk_rows(
    chunk: SuffixChunk, clip: int, window: int, keep: int, ring_tokens: int, base: tuple[int, int, int]
) -> tuple[Ints, Ints, Ints, Ints]:
    """Columns of SuffixRows for one chunk; `base` = (its first row, its index, where its new rows' section starts)."""
    first_row, index, section = base
    rect, end = chunk.full_len - keep, chunk.start + chunk.rows
    local = np.arange(chunk.rows - clip, dtype=np.int64)
    positions = chunk.start + clip + local
    is_kept = positions >= rect
    ring_rows = np.where(
        is_kept & (positions >= end - ring_tokens), chunk.slot * ring_tokens + positions % ring_tokens, -1
    )
    lowest = np.maximum(positions - window + 1, max(rect, chunk.valid_start, 0))
    history = np.where(is_kept, np.maximum(chunk.start - lowest, 0), 0)
    new = np.where(is_kept, positions - np.maximum(lowest, chunk.start + clip) + 1, 0)
    visible = np.stack([(index + 1) * window - history, history, section + local + 1 - new, new], axis=1)
    return first_row + clip + local, positions, ring_rows, visible
