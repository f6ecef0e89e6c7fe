"""The plain loop: compute the whole sequence again for every token, without caches; the measure of every engine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from shoal.engines.config import Truncation
from shoal.engines.core.request import EngineRequest, TokensEvent
from shoal.engines.run.penalties import Penalties
from shoal.engines.run.sampler import Sampled, sample
from torch import Tensor


class WholeModel(Protocol):
    """What the plain loop asks of a model."""

    @property
    def eos_token_id(self) -> int:
        """The token that ends an answer."""
        ...

    def logits_of(self, text: "WholeText", count: int) -> Tensor:
        """Logits [count, vocab] after each of the last `count` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class WholeText:
    """A sequence to compute at once: token_ids int64 [T], image_mask bool [T], image_rows [masked, H] in order.

    `data_len` is the prompt length from which truncation counts back.
    """

    token_ids: Tensor
    image_mask: Tensor
    image_rows: Tensor
    truncation: Truncation
    data_len: int


def plain_loop(
    model: WholeModel, request: EngineRequest, images: Mapping[bytes, Tensor], truncation: Truncation
) -> Iterator[TokensEvent]:
    """Output tokens of a request, one full forward each, until it stops by the rules every engine follows.

    `images` maps the digest of each span to its rows. The decoder layers start at `request.prompt_len - keep`
    whatever has been generated since. Costs O(n) full forwards.
    """
    ids, params = list(request.token_ids), request.sampling
    penalties = Penalties(model.eos_token_id)
    while True:
        logits = model.logits_of(whole_text(request, ids, images, truncation), count=1)
        logits = penalties.apply(logits, [request], lambda _: ids[request.prompt_len :])
        drawn = sample(logits, [params], [len(ids)])[0]
        if not drawn.is_valid:
            raise ArithmeticError(f"{request.request_id}: no finite logits at position {len(ids)}")
        told = () if drawn.logprobs is None else (drawn.logprobs,)
        yield TokensEvent(request.request_id, len(ids) - request.prompt_len, (drawn.token_id,), told)
        ids.append(drawn.token_id)
        if drawn.token_id == model.eos_token_id and not params.ignore_eos:
            return
        if drawn.token_id in params.stop_token_ids or len(ids) - request.prompt_len >= params.max_tokens:
            return


def replay(
    model: WholeModel,
    request: EngineRequest,
    outputs: Sequence[int],
    images: Mapping[bytes, Tensor],
    truncation: Truncation,
) -> tuple[Sampled, ...]:
    """What the plain loop draws at each of the given outputs' places if it drew the earlier ones: one full forward.

    Rows do not see later rows, so outputs equal to these draws are the plain loop's outputs, by induction.
    """
    ids = (*request.token_ids, *outputs[:-1])
    logits = model.logits_of(whole_text(request, ids, images, truncation), count=len(outputs))
    first = len(request.token_ids)
    logits = Penalties(model.eos_token_id).apply(
        logits, [request] * len(outputs), lambda row: ids[request.prompt_len : first + row]
    )
    return sample(logits, [request.sampling] * len(outputs), range(first, first + len(outputs)))


def whole_text(
    request: EngineRequest, ids: Sequence[int], images: Mapping[bytes, Tensor], truncation: Truncation
) -> WholeText:
    """The model's input for the tokens so far; image_rows is [0, 0] when there are no images."""
    mask = torch.zeros(len(ids), dtype=torch.bool)
    for span in request.images:
        mask[span.start : span.end] = True
    rows = [images[span.digest] for span in request.images]
    return WholeText(
        torch.tensor(ids, dtype=torch.int64),
        mask,
        torch.cat(rows) if rows else torch.empty(0, 0),
        truncation,
        request.prompt_len,
    )
