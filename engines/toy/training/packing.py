"""Samples packed into rows of equal length, and rows collated into the tensors of a step."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.engram import EngramHash
from shoal.engines.model.images import PAD_VALUE, ImageLayout, SpanToken, grid_of, span_tokens
from shoal.engines.toy.tasks.sample import Encoded
from shoal.engines.toy.training.images import Pictures
from shoal.engines.toy.training.rows import Rows
from torch import Tensor

ALIGNMENT = 8
"""Documents start at multiples of this, so that compressor groups and candidate blocks fall as they do from 0 on."""
PROMPT_WEIGHT = 0.1
"""Loss weight of tokens that the assistant does not have to produce: it should know the language, not guess facts."""
MARK = {SpanToken.START: 0, SpanToken.NEWLINE: 1, SpanToken.END: 2}
"""Order of the learned delimiter rows behind all cells."""


@dataclass(frozen=True, slots=True)
class Packed:
    """R rows of T tokens: ids, document, weight (of predicting the NEXT token), answer (the task's number where that
    one is the assistant's, else -1), lower, image_mask, engram; and pictures with the flat places of their spans.
    """

    ids: NDArray[np.int64]
    document: NDArray[np.int32]
    weight: NDArray[np.float32]
    answer: NDArray[np.int8]
    lower: NDArray[np.int32]
    image_mask: NDArray[np.bool_]
    engram: NDArray[np.int32]
    pictures: tuple[tuple[int, NDArray[np.uint8]], ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one training step reads: rows, loss weights [B, T], answers int8 [B, T] (task numbers), pictures."""

    rows: Rows
    weight: Tensor
    answer: Tensor
    pictures: Pictures


def pack(
    samples: Sequence[tuple[int, Encoded]],
    shape: tuple[int, int],
    pictures_max: int,
    config: ModelConfig,
    hash_: EngramHash,
    keep: int,
) -> Packed:
    """Place samples into the fullest row of `shape` (rows, tokens) that still has room, in `packing_order`.

    `samples` come with their task's number; those that fit nowhere, or whose pictures would be more than
    `pictures_max` in all, are left out. `keep`: prompt tokens that a truncated prefill runs through the decoder
    layers; every second sample is learned as if its prompts had been truncated so. Raises ValueError for a sample
    longer than a row.
    """
    rows, tokens = shape
    packed = _empty(rows, tokens, config, hash_)
    filled = [0] * rows
    pictures: list[tuple[int, NDArray[np.uint8]]] = []
    placed: list[tuple[slice, Encoded]] = []
    for number, (task, sample) in enumerate(packing_order(samples, rows * tokens), start=1):
        count = len(sample.ids)
        if count > tokens:
            raise ValueError(f"a sample has {count} tokens, a row holds {tokens}: draw shorter samples")
        room = [r for r in range(rows) if filled[r] + count <= tokens]
        if not room or len(pictures) + len(sample.canvases) > pictures_max:
            continue
        row = max(room, key=lambda r: filled[r])
        at = filled[row]
        filled[row] = -(-(at + count) // ALIGNMENT) * ALIGNMENT
        _place(packed, row, at, number, sample)
        packed.answer[row, at : at + count - 1] = np.where(sample.answer[1:], task, -1)
        if number % 2 == 0:
            packed.lower[row, at : at + count] = at + first_kept(sample.answer, keep)
        placed.append((slice(row * tokens + at, row * tokens + at + count), sample))
        pictures += [
            (row * tokens + at + s, c) for s, c in zip(span_starts(sample, config), sample.canvases, strict=True)
        ]
    _hash(packed, placed, hash_)
    return dataclasses.replace(packed, pictures=tuple(pictures))


def packing_order(samples: Sequence[tuple[int, Encoded]], room: int) -> list[tuple[int, Encoded]]:
    """Those drawn first that have `room` tokens together, longest first; then the others as drawn, to fill the gaps.

    All of them longest first would leave out the shortest of every pack: the tasks that have short samples, always.
    """
    lengths = np.cumsum([len(sample.ids) for _, sample in samples])
    first = int(np.searchsorted(lengths, room, side="right"))
    return sorted(samples[:first], key=lambda s: -len(s[1].ids)) + list(samples[first:])


def _empty(rows: int, tokens: int, config: ModelConfig, hash_: EngramHash) -> Packed:
    def zeros(kind: Any, *more: int) -> NDArray[Any]:
        return np.zeros((rows, tokens, *more), dtype=kind)

    ids = np.full((rows, tokens), config.pad_token_id, dtype=np.int64)
    document = np.tile(-np.arange(1, tokens + 1, dtype=np.int32), (rows, 1))  # padding sees nobody but itself
    engram = zeros(np.int32, *hash_.primes.shape)
    bools, floats = np.bool_, np.float32
    nobody = np.full((rows, tokens), -1, dtype=np.int8)
    return Packed(ids, document, zeros(floats), nobody, zeros(np.int32), zeros(bools), engram, ())


def _place(packed: Packed, row: int, at: int, number: int, sample: Encoded) -> None:
    count = len(sample.ids)
    span, learned = slice(at, at + count), slice(at, at + count - 1)
    packed.ids[row, span], packed.document[row, span] = sample.ids, number
    packed.image_mask[row, span] = sample.image_mask
    packed.weight[row, learned] = np.where(sample.answer[1:], 1.0, PROMPT_WEIGHT) * ~sample.image_mask[1:]


def first_kept(answer: NDArray[np.bool_], keep: int) -> NDArray[np.int32]:
    """For each token the first one that decoder layers keep: `keep` before the answer that it leads to, int32 [n]."""
    begins = np.flatnonzero(answer & ~np.concatenate(([False], answer[:-1])))
    lower = np.zeros(len(answer), np.int32)
    for begin in begins:
        first = max(0, int(begin) - keep)
        lower[first:] = first
    return lower


def span_starts(sample: Encoded, config: ModelConfig) -> list[int]:
    """Where each picture's span starts; spans may touch, so their lengths decide."""
    starts, at = [], 0
    for canvas in sample.canvases:
        at += int(np.argmax(sample.image_mask[at:]))
        starts.append(at)
        at += _layout(canvas, config).tokens
    return starts


def _layout(canvas: NDArray[np.uint8], config: ModelConfig) -> ImageLayout:
    rows, columns = grid_of(canvas, config.vision)
    ratio = config.vision.downsample_ratio
    return ImageLayout(rows, columns, -(-rows // ratio), -(-columns // ratio), config.vision.patch_size, False)


def _hash(packed: Packed, placed: Sequence[tuple[slice, Encoded]], hash_: EngramHash) -> None:
    """Engram's table rows of every document, each from its own start."""
    if not placed:
        return
    ids = torch.from_numpy(np.concatenate([s.ids for _, s in placed]).astype(np.int64))
    mask = torch.from_numpy(np.concatenate([s.image_mask for _, s in placed]))
    nothing = torch.full((len(placed), hash_.lookback), -1, dtype=torch.int64)
    rows = hash_.rows(ids, mask, [len(s.ids) for _, s in placed], nothing).to(torch.int32).numpy()
    flat, at = packed.engram.reshape(-1, *packed.engram.shape[2:]), 0
    for span, sample in placed:
        flat[span] = rows[at : at + len(sample.ids)]
        at += len(sample.ids)


def collate(parts: Sequence[Packed], pictures_max: int, config: ModelConfig) -> StepBatch:
    """The tensors of a step from several packs, each with room for `pictures_max` pictures."""

    def joined(name: str, kind: torch.dtype | None = None) -> Tensor:
        value = torch.from_numpy(np.concatenate([getattr(p, name) for p in parts]))
        return value if kind is None else value.to(kind)

    rows = Rows(joined("ids"), joined("document"), joined("image_mask"), joined("engram"), joined("lower"))
    pictures, offset = [], 0
    for part in parts:
        pictures += [(offset + at, canvas) for at, canvas in part.pictures]
        offset += part.ids.size
    room = pictures_max * len(parts)
    return StepBatch(rows, joined("weight"), joined("answer"), _pictures(pictures, room, offset, config))


def _pictures(
    pictures: Sequence[tuple[int, NDArray[np.uint8]]], room: int, nowhere: int, config: ModelConfig
) -> Pictures:
    """The tensors of `room` pictures; those that are missing are grey and their span tokens lie at `nowhere`."""
    vision = config.vision
    most = vision.max_image_tokens * vision.downsample_ratio**2  # patches of a picture
    values = np.full((room, most, vision.patch_channels), PAD_VALUE, np.uint8)
    places, counts = np.zeros((room, most, 2), np.int64), np.ones(room, np.int64)
    cells = np.full((room * vision.max_image_tokens, vision.downsample_ratio**2), room * most, np.int64)
    positions = np.full(room * vision.max_image_tokens, nowhere, np.int64)
    sources = np.full(room * vision.max_image_tokens, len(cells), np.int64)
    made = told = 0
    for number, (start, canvas) in enumerate(pictures):
        plan = _layout(canvas, config)
        counts[number] = count = plan.vit_rows * plan.vit_columns
        values[number, :count] = _patches(canvas, plan)
        places[number, :count] = np.stack(np.divmod(np.arange(count), plan.vit_columns), axis=-1)
        own = _cells(plan, vision.downsample_ratio, number * most, room * most)
        cells[made : made + len(own)] = own
        roles = np.array([MARK.get(role, -1) for role in span_tokens(plan)])
        positions[told : told + len(roles)] = np.arange(start, start + len(roles))
        shown = np.cumsum(roles < 0) - 1 + made
        sources[told : told + len(roles)] = np.where(roles < 0, shown, len(cells) + roles)
        made, told = made + len(own), told + len(roles)
    return Pictures(*(torch.from_numpy(v) for v in (values, counts, places, cells, positions, sources)))


def _cells(plan: ImageLayout, ratio: int, first: int, nothing: int) -> NDArray[np.int64]:
    """Patch numbers [IMAGE tokens, ratio x ratio] of each cell, `first` that of the picture's first patch."""
    padded = np.full((plan.rows * ratio, plan.columns * ratio), nothing)
    grid = np.arange(plan.vit_rows * plan.vit_columns).reshape(plan.vit_rows, plan.vit_columns)
    padded[: plan.vit_rows, : plan.vit_columns] = grid + first
    return padded.reshape(plan.rows, ratio, plan.columns, ratio).swapaxes(1, 2).reshape(-1, ratio * ratio)


def _patches(canvas: NDArray[np.uint8], plan: ImageLayout) -> NDArray[np.uint8]:
    """uint8 [patches, 3 x patch x patch] in the tower's order: channel, row, column."""
    size = plan.patch_size
    tiles = canvas.reshape(plan.vit_rows, size, plan.vit_columns, size, 3).transpose(0, 2, 4, 1, 3)
    return tiles.reshape(plan.vit_rows * plan.vit_columns, -1)
