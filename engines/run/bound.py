"""A loaded model bound to one engine's caches and truncation, and the same model as the plain loop sees it."""

import torch
from shoal.engines.config import Truncation
from shoal.engines.model.batch import Batch
from shoal.engines.model.cache import Caches
from shoal.engines.model.decoder import Model
from shoal.engines.model.drafter import DraftBlock, DraftChoice
from shoal.engines.run.plain import WholeText
from torch import Tensor


class BoundModel:
    """What a runner calls: the cached forward over this engine's blocks and slots."""

    def __init__(self, model: Model, caches: Caches, truncation: Truncation) -> None:
        self._model = model
        self._caches = caches
        self._truncation = truncation

    @property
    def lookback(self) -> int:
        """Ids before a chunk that Engram reads."""
        return self._model.engram.lookback

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return self._model.config.text.vocab_size

    @property
    def hidden(self) -> int:
        """Width of a row, an image's too."""
        return self._model.config.hidden

    @property
    def eos_token_id(self) -> int:
        """The token that ends an answer."""
        return self._model.config.eos_token_id

    def forward(self, batch: Batch) -> Tensor:
        """Advance the caches: hidden [S, H] of last rows in prefill, [T, H] of all rows in decode."""
        return self._model.forward(batch, self._caches, self._truncation)

    def join(self) -> None:
        """Take part in one forward of the other ranks without a row of one's own."""
        self._model.join()

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab]."""
        return self._model.logits(hidden)

    def draft(self, golden: Tensor, positions: Tensor, slots: Tensor, choice: DraftChoice) -> DraftBlock:
        """Drafts after `golden` tokens int64 [S] of the sequences in state `slots`; `positions` are those before."""
        return self._model.draft(golden, positions, slots, self._caches, choice)


class WholeSequence:
    """What the plain loop calls: the forward without caches."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @property
    def eos_token_id(self) -> int:
        """The token that ends an answer."""
        return self._model.config.eos_token_id

    @torch.inference_mode()
    def logits_of(self, text: WholeText, count: int) -> Tensor:
        """Logits float32 [count, vocab] after each of the last `count` tokens."""
        rows = text.image_rows
        if not rows.numel():
            rows = rows.new_empty(0, self._model.config.hidden)
        output = self._model.forward_full(text.token_ids, text.image_mask, rows, text.truncation, text.data_len)
        return self._model.logits(output.hidden[-count:])
