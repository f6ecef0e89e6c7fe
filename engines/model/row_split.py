"""The rows of a step that this context-parallel rank computes, and how rows of all ranks come together.

Every rank keeps the same caches, to the byte: whatever is written travels first, as the small thing it is (a stored
row, a compressor's latent), so that only queries, attention, experts and streams are shared out.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Protocol

import numpy as np
import torch
from shoal.engines.core.mirror import Exchange, MirrorSplit, rank_spans
from shoal.engines.model.placement import Spans
from torch import Tensor

Move = Callable[[Tensor], Tensor]
"""Takes values of own rows [n, ...] to those of other rows, in an order of their own."""


class RowExchange(Protocol):
    """The ranks that share the rows of a step. All make the same calls in the same order, from one thread each."""

    @property
    def rank(self) -> int:
        """This rank, 0 and up."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def all_gather(self, own: Tensor) -> Tensor:
        """Everybody's `own` [...], of one shape and type, as [ranks, ...]."""
        ...


class Alone:
    """One rank computes all rows."""

    rank, size = 0, 1

    def all_gather(self, own: Tensor) -> Tensor:
        """See RowExchange."""
        return own.unsqueeze(0)


ALONE = Alone()


class RowSplit:
    """One rank's part of T rows, sequences of `lens` int64 [S] end to end."""

    def __init__(self, exchange: RowExchange, lens: Tensor) -> None:
        self._exchange, self._device = exchange, lens.device
        if exchange.size == 1:
            self.spans = Spans.whole(lens)
            return
        counts = lens.tolist()
        spans = torch.tensor(rank_spans(counts, exchange.rank, exchange.size), device=lens.device)
        self.spans = Spans(spans[:, 0], spans[:, 1], spans[:, 2], is_whole=False)
        self._split = MirrorSplit.of(counts, exchange.size)
        self._rows = self._index(self._split.rows[exchange.rank])
        self._everything = self._split.exchange(np.arange(sum(counts)))

    def of_lens(self, lens: Tensor) -> "RowSplit":
        """The same ranks' split of other sequences."""
        return RowSplit(self._exchange, lens)

    def own(self, values: Tensor) -> Tensor:
        """Own rows' part [n, ...] of values of all rows [T, ...]."""
        return values if self.spans.is_whole else values[self._rows]

    def gather(self, values: Tensor, grid: torch.dtype | None = None) -> Tensor:
        """Values of all rows [T, ...] out of every rank's own [n, ...]; they travel as `grid`, which holds them."""
        if self.spans.is_whole:
            return values
        narrow = values if grid is None else values.to(grid)
        return self._exchanged(narrow, self._everything).to(values.dtype)

    def gatherer(self, wanted: Tensor) -> Move:
        """What takes own values [n, ...] to those of rows `wanted` int64 [W], on every rank: [W, ...]."""
        if self.spans.is_whole:
            return itemgetter(wanted)
        by = self._split.exchange(wanted.cpu().numpy())
        return lambda values: self._exchanged(values, by)

    def _exchanged(self, values: Tensor, by: Exchange) -> Tensor:
        shape = values.shape[1:]
        if not shape.numel():
            return values.new_empty(len(by.places), *shape)
        sent = self._index(by.sent[self._exchange.rank])
        load = values.new_zeros(by.width, shape.numel())
        load[: len(sent)] = values[sent].flatten(1) if shape else values[sent].unsqueeze(1)
        # As bytes, so that an exchange need not know every type.
        arrived = self._exchange.all_gather(load.view(torch.uint8)).flatten(0, 1)
        return arrived[self._index(by.places)].view(values.dtype).view(-1, *shape)

    def _index(self, rows: np.typing.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(rows).to(self._device)
