"""The plain loop: compute the whole sequence again for every token, without caches; the measure of every engine."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from shoal.engines.config import Truncation
from shoal.engines.core.request import EngineRequest, TokenEvent
from shoal.engines.run.sampler import sample
from torch import Tensor


class WholeModel(Protocol):
    """What the plain loop asks of a model."""

    def last_logits(
        self, token_ids: Tensor, image_mask: Tensor, image_rows: Tensor, truncation: Truncation, data_len: int
    ) -> Tensor:
        """Logits [1, vocab] after the last of token_ids [T]."""
        ...


def plain_loop(
    model: WholeModel, request: EngineRequest, images: Mapping[bytes, Tensor], truncation: Truncation, eos_token_id: int
) -> Iterator[TokenEvent]:
    """Output tokens of a request, one full forward each, until it stops by the rules every engine follows.

    `images` maps the digest of each span to its rows. The decoder layers start at `request.prompt_len - keep`
    whatever has been generated since. Costs O(n) full forwards.
    """
    ids, params = list(request.token_ids), request.sampling
    while True:
        mask, rows = image_inputs(request, images, len(ids))
        logits = model.last_logits(torch.tensor(ids), mask, rows, truncation, request.prompt_len)
        drawn = sample(logits, [params], [len(ids)])[0]
        if not drawn.is_valid:
            raise ArithmeticError(f"{request.request_id}: no finite logits at position {len(ids)}")
        yield TokenEvent(request.request_id, len(ids) - request.prompt_len, drawn.token_id, drawn.logprobs)
        ids.append(drawn.token_id)
        if drawn.token_id == eos_token_id and not params.ignore_eos:
            return
        if drawn.token_id in params.stop_token_ids or len(ids) - request.prompt_len >= params.max_tokens:
            return


def image_inputs(request: EngineRequest, images: Mapping[bytes, Tensor], length: int) -> tuple[Tensor, Tensor]:
    """Mask bool [length] of image positions, and their rows in order ([0, 0] when there are none)."""
    mask = torch.zeros(length, dtype=torch.bool)
    for span in request.images:
        mask[span.start : span.end] = True
    rows = [images[span.digest] for span in request.images]
    return mask, torch.cat(rows) if rows else torch.empty(0, 0)
