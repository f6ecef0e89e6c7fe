"""What one step of the model reads: rows of several sequences laid end to end, and where their caches live."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """T rows of S sequences, concatenated in sequence order; every sequence has at least one row.

    Row i of a sequence sits at absolute position `start + i`, and the caches hold its first `start` tokens.
    """

    token_ids: Tensor
    """int64 [T]; image positions carry the image token id."""
    q_lens: tuple[int, ...]
    """Rows of each sequence."""
    starts: tuple[int, ...]
    """Absolute position of each sequence's first row: the tokens already cached."""
    block_tables: tuple[Sequence[int], ...]
    """Block ids of each sequence, covering at least `start + q_len` tokens; the order is the order of positions."""
    slots: tuple[int, ...]
    """State slot of each sequence; no two are equal."""
    data_lens: tuple[int, ...]
    """Prompt length from which YOCO truncation counts back; the client's prompt, also after a re-route."""
    is_prefill: bool
    """Prefill truncates and returns one row a sequence; decode does neither."""
    lookback: Tensor
    """int64 [S, engram_max_ngram_size - 1]: token ids before `start`, nearest last; -1 is none or an image position."""
    image_mask: Tensor
    """bool [T]: positions of image spans, delimiters included."""
    image_rows: Tensor
    """[number of masked rows, hidden]: embeddings of the masked rows in order (may be empty [0, hidden])."""
    scored: tuple[int, ...] = ()
    """Sequences whose prompt is scored: prefill truncates nothing of them and returns all their rows as well."""

    def __post_init__(self) -> None:
        counts = {len(self.q_lens), len(self.starts), len(self.block_tables), len(self.slots), len(self.data_lens)}
        if len(counts) != 1 or not self.q_lens:
            raise ValueError(
                f"Batch: {sorted(counts)} entries a sequence; every per-sequence field needs the same number"
            )
        if min(self.q_lens) < 1 or sum(self.q_lens) != self.token_ids.shape[0]:
            raise ValueError(
                f"Batch.q_lens {self.q_lens} must be positive and add up to the {self.token_ids.shape[0]} token ids"
            )
        if len(set(self.slots)) != len(self.slots):
            raise ValueError(f"Batch.slots {self.slots}: two sequences share a slot; give each its own")
        if self.image_mask.shape != self.token_ids.shape:
            raise ValueError(
                f"Batch.image_mask has shape {tuple(self.image_mask.shape)}; it must be [T] like token_ids"
            )
        if self.lookback.shape[0] != len(self.q_lens):
            raise ValueError(f"Batch.lookback has {self.lookback.shape[0]} rows for {len(self.q_lens)} sequences")
