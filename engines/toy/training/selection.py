"""The indexer in training: its choice of entries, candidate blocks, and the loss that teaches it attention's taste."""

from collections.abc import Mapping

import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.toy.training import fused
from shoal.engines.toy.training.rows import RowMasks
from torch import Tensor
from torch.nn import functional

TIE_STEP = 1e-7
"""Taken off a score per entry, so that equal scores (no head fires) go to lower entries, as they do when served."""


class Selector:
    """Which entries each row reads, from one index source to the next.

    Scores have no gradient into the trunk, and a choice has none at all. Scores learn by the cross-entropy of their
    softmax with the probability mass that all heads of the layers served give to each entry.
    """

    def __init__(self, config: ModelConfig, masks: RowMasks, is_sparse: bool, learns: bool) -> None:
        self._config, self._masks, self._is_sparse, self._learns = config, masks, is_sparse, learns
        self._keys: Tensor | None = None
        self._visible: Tensor | None = None
        self._candidates: Tensor | None = None
        self._scores: Tensor | None = None
        self._mass: Tensor | None = None
        self._losses: list[Tensor] = []
        self.chosen: Tensor | None = None

    def new_source(self, layer: int, keys: Tensor) -> None:
        """Index keys [B, E, d] of a KV source."""
        self._keys, self._visible = keys, self._masks.entries[self._config.ratio(layer)]
        self._candidates = None

    def select(
        self, layer: int, weights: Mapping[str, Tensor], latents: Tensor, x: Tensor, by: tuple[Tensor, Tensor]
    ) -> None:
        """Choose for query latents [B x T, r] and normed rows [B x T, H] of an index source, at phases `by`."""
        self._finish()
        assert self._visible is not None, f"layer {layer} selects before any KV source"
        assert self._keys is not None, f"layer {layer} selects before any KV source"
        self.chosen = self._visible
        if not (self._is_sparse or self._learns):
            return
        own, text = f"layers.{layer}.attn.indexer", self._config.text
        queries = functional.linear(latents.detach(), weights[f"{own}.wq_b.weight"])
        queries = queries.unflatten(-1, (text.index_n_heads, -1))
        queries = fused.index_rows(queries, by[0].unsqueeze(1), by[1].unsqueeze(1)).unflatten(
            0, self._visible.shape[:2]
        )
        heads = functional.linear(x.detach(), weights[f"{own}.weights_proj.weight"]).unflatten(0, queries.shape[:2])
        heads = heads.float() * (text.index_head_dim**-0.5 * text.index_n_heads**-0.5)
        products = torch.bmm(queries.flatten(1, 2), self._keys.transpose(1, 2)).unflatten(1, queries.shape[1:3])
        scores = fused.index_logits(products, heads)
        if self._is_sparse:
            self.chosen = self._choose(layer, scores.detach())
        if self._learns:
            self._scores = scores.masked_fill(~self.chosen, -torch.inf)

    def observe(self, mass: Tensor) -> None:
        """Probability [B, T, E] that a layer's heads gave to the entries."""
        if self._learns and self._scores is not None:
            mass = mass / self._config.text.num_attention_heads
            self._mass = mass if self._mass is None else self._mass + mass

    def loss(self) -> Tensor:
        """The mean cross-entropy over all rows and index sources."""
        self._finish()
        device = self._masks.window.device
        return torch.stack(self._losses).mean() if self._losses else torch.zeros((), device=device)

    def _finish(self) -> None:
        """Close the account of the last index source."""
        if self._scores is not None and self._mass is not None:
            self._losses.append(divergence(self._scores, self._mass))
        self._scores = self._mass = None

    def _choose(self, layer: int, scores: Tensor) -> Tensor:
        text, visible = self._config.text, self._visible
        assert visible is not None
        scores = scores.masked_fill(~visible, -torch.inf)
        if layer in self._config.candidate_consumers and self._candidates is not None:
            scores = scores.masked_fill(~self._candidates, -torch.inf)
        if layer == text.candidate_source_layer_id:
            self._candidates = candidates(scores, visible, text.candidate_block_size, text.candidate_topk_blocks)
        return largest(scores, text.index_topk)


def largest(scores: Tensor, count: int) -> Tensor:
    """Mask bool [..., n] of the `count` largest scores of each row, never of -inf; of equal ones the first."""
    if scores.shape[-1] <= count:
        return scores > -torch.inf
    scores = scores - torch.arange(scores.shape[-1], device=scores.device) * TIE_STEP
    edge = scores.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    return (scores >= edge) & (scores > -torch.inf)


def candidates(scores: Tensor, visible: Tensor, block: int, count: int) -> Tensor:
    """Mask bool [B, T, E] of the entries in each row's best blocks; the newest visible entry's block always counts."""
    entries = scores.shape[-1]
    if entries <= block * count:
        return torch.ones_like(visible)
    best = scores.unflatten(-1, (-1, block)).amax(-1)
    index = torch.arange(entries, device=scores.device)
    newest = torch.where(visible, index, -1).amax(-1, keepdim=True) // block
    best = best.masked_fill(torch.arange(best.shape[-1], device=scores.device) == newest, torch.inf)
    return largest(best, count).repeat_interleave(block, dim=-1)


@fused.fused
def divergence(scores: Tensor, mass: Tensor) -> Tensor:
    """Mean over rows of the cross-entropy between scores [B, T, E] (-inf: not chosen) and mass, heads averaged."""
    logs = scores - torch.logsumexp(scores.masked_fill(scores == -torch.inf, -1e30), dim=-1, keepdim=True)
    return -(mass * logs.masked_fill(scores == -torch.inf, 0.0)).sum(-1).mean()
