"""What drafts were drawn from, kept between the step that makes them and the step that verifies them.

Source: engine runtime notes 8.6. Slots are the scheduler's; slot 0 is never written and says "pad, with probability 1".
"""

import torch
from torch import Tensor


class DraftPool:
    """Slots 0..sequences_max of n drafts: `tokens` int64 [slots, n], `logprobs` float32 [slots, n, V], `confidence`.

    `logprobs` are those of the final distribution (tempered, filtered) that each token was drawn from; one-hot where
    it was not drawn but chosen. `confidence` float32 [slots, n] lies in 0..1.
    """

    def __init__(self, sequences_max: int, drafts: int, vocabulary: int, pad: int) -> None:
        self.tokens = torch.full((sequences_max + 1, drafts), pad, dtype=torch.int64)
        self.confidence = torch.zeros(sequences_max + 1, drafts)
        self.logprobs = torch.empty(sequences_max + 1, drafts, vocabulary)  # untouched slots take no memory
        self.logprobs[0] = -torch.inf
        self.logprobs[0, :, pad] = 0.0

    def read(self, slot: int, drafts: int) -> tuple[Tensor, Tensor]:
        """Views of the first `drafts` tokens [drafts] and log-distributions [drafts, V] of a slot."""
        return self.tokens[slot, :drafts], self.logprobs[slot, :drafts]

    def write(self, slots: Tensor, tokens: Tensor, logprobs: Tensor, confidence: Tensor) -> None:
        """Fill whole slots int64 [S], none of them 0, with tokens [S, n], logprobs [S, n, V], confidence [S, n]."""
        assert bool((slots > 0).all()), f"draft slots {slots.tolist()}: slot 0 holds pads and is never written"
        self.tokens[slots], self.logprobs[slots], self.confidence[slots] = tokens, logprobs, confidence
