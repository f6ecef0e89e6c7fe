"""From the rows of a KV source to compressed entries: pooled latents, main KV and index keys.

Source: published model.py (Compressor, Indexer keys). Groups of `ratio` tokens are disjoint and aligned to position 0.
"""

import torch
from shoal.engines.model.norm import rms_norm
from shoal.engines.model.numerics import Numerics
from shoal.engines.model.parameters import CompressorWeights
from shoal.engines.model.rope import Phases, rotate_rounded
from torch import Tensor


def partial_rows(numerics: Numerics, x: Tensor, weights: CompressorWeights) -> Tensor:
    """Score and latent of each row before pooling, [T, 2, D], on the float32 grid of the accumulators."""
    assert weights.gated is not None, "only a gated compressor (ratio above 1) keeps accumulators"
    both: Tensor = numerics.linear_unrounded(x, weights.gated).unflatten(-1, (2, -1))
    return both.copy_(both.to(torch.float32))


def pool(numerics: Numerics, partials: Tensor) -> Tensor:
    """Latents [E, D] of complete groups [E, ratio, 2, D]: the scores' softmax over the group, channel by channel."""
    scores, values = partials.unbind(2)
    return numerics.round((torch.softmax(scores, dim=1) * values).sum(1))


def latents_of_rows(numerics: Numerics, x: Tensor, weights: CompressorWeights) -> Tensor:
    """Latents [T, D] of an ungated compressor: every row is its own group."""
    return numerics.linear(x, weights.wkv)


def entries(
    numerics: Numerics, latents: Tensor, weights: CompressorWeights, by: Phases, eps: float
) -> tuple[Tensor, Tensor]:
    """Main KV [E, D] and index keys [E, index dim] of pooled latents, rotated and not yet quantised.

    The phases are those of each group's first token.
    """
    latents = numerics.round_(rms_norm(latents, weights.norm, eps))
    keys = numerics.round_(rms_norm(numerics.linear(latents, weights.index_key), weights.index_norm, eps))
    return rotate_rounded(numerics, latents, by), rotate_rounded(numerics, keys, by)
