"""Choosing the largest entries of score rows, with ties to the lower index so that every batch chooses alike."""

import torch
from torch import Tensor


def top_entries(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores of each row, int64 [..., min(count, n)]; -1 where a score is -inf.

    Scores compare as float32. A library top-k breaks ties by its blocking, hence by shape: here each score and its
    index make one integer key, and keys are never equal.
    """
    size = scores.shape[-1]
    if size == 0:
        return torch.empty(*scores.shape[:-1], 0, dtype=torch.int64, device=scores.device)
    bits = (scores.to(torch.float32) + 0.0).view(torch.int32)  # adding zero joins -0 and 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    keys = (ordered << 32) | torch.arange(size - 1, -1, -1, device=scores.device)
    chosen = torch.topk(keys, min(count, size), dim=-1, sorted=False).indices
    hidden = torch.gather(scores, -1, chosen) == -torch.inf
    return torch.where(hidden, -1, chosen)


def candidate_blocks(scores: Tensor, visible: Tensor, block: int, count: int) -> Tensor:
    """Which blocks of `block` consecutive entries later indexers may choose from, bool [rows, blocks].

    scores: [rows, entries], -inf where hidden; visible: int64 [rows], entries that the row sees. A block ranks by
    its best entry; the block of the newest visible entry always stays (published model.py, Indexer candidates).
    """
    rows, entries = scores.shape
    blocks = -(-entries // block)
    padded = torch.nn.functional.pad(scores, (0, blocks * block - entries), value=-torch.inf)
    best = padded.unflatten(-1, (blocks, block)).amax(-1) if blocks else padded.new_empty(rows, 0)
    newest = (visible - 1).div(block, rounding_mode="floor")
    ids = torch.arange(blocks, device=scores.device)
    best = torch.where((ids == newest.unsqueeze(-1)) & (visible > 0).unsqueeze(-1), torch.inf, best)
    chosen = top_entries(best, count)
    kept = torch.zeros(rows, blocks + 1, dtype=torch.bool, device=scores.device)
    kept.scatter_(1, torch.where(chosen < 0, blocks, chosen), True)
    return kept[:, :blocks]


def expand_blocks(blocks: Tensor, block: int, entries: int) -> Tensor:
    """The entry mask bool [rows, entries] of a block mask bool [rows, blocks]."""
    return blocks.repeat_interleave(block, dim=-1)[..., :entries]
