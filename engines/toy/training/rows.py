"""What packed training rows carry, and who may see whom: documents apart, windows bounded, decoder rows truncated."""

from dataclasses import dataclass

import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.toy.training.attention import blocks_with_previous
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """B packed rows of T tokens.

    ids int64 [B, T]; document int32 [B, T], a number per document that no neighbour has (padding has its own);
    image_mask bool [B, T]; engram int64 [B, T, layers, columns]; lower int32 [B, T]: the first position that decoder
    layers may look at in their window, as a truncated prefill leaves it (0: all).
    """

    ids: Tensor
    document: Tensor
    image_mask: Tensor
    engram: Tensor
    lower: Tensor


@dataclass(frozen=True, slots=True)
class RowMasks:
    """window, decoder_window bool [B, T, 2 W] over a block and the one before; entries: ratio -> bool [B, T, E]."""

    window: Tensor
    decoder_window: Tensor
    entries: dict[int, Tensor]


def row_masks(rows: Rows, config: ModelConfig) -> RowMasks:
    """The masks of all layers; T must be a multiple of the window."""
    batch, count = rows.ids.shape
    at = torch.arange(count, device=rows.ids.device, dtype=torch.int32)
    width = config.window
    keys = blocks_with_previous(at.unsqueeze(0), width)
    keys[:, 0, :width] = -1
    keys = keys.repeat_interleave(width, dim=1)
    documents = blocks_with_previous(rows.document, width).repeat_interleave(width, dim=1)
    own = at[:, None]
    seen = (keys >= 0) & (keys <= own) & (keys > own - width) & (documents == rows.document.unsqueeze(2))
    bounded = seen & (keys >= rows.lower.unsqueeze(2))
    ratios = sorted({config.ratio(layer) for layer in range(config.n_layers)} - {0})
    entries = {}
    for ratio in ratios:
        visible = torch.arange(count // ratio, device=at.device)[None] < ((at + 1) // ratio)[:, None]
        entries[ratio] = visible & (rows.document[:, None, ::ratio] == rows.document.unsqueeze(2))
    assert seen.shape == (batch, count, 2 * width), seen.shape
    return RowMasks(seen, bounded, entries)
