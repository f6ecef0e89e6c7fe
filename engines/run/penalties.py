"""What a request's penalties, biases and least length do to its logits, before temperature and filters.

Order and formulas are those that vLLM's users know: biases are added, ends are forbidden below the least length, then
tokens seen in prompt or output are divided (if positive, else multiplied) by the repetition penalty, and tokens of the
output lose frequency_penalty for each time and presence_penalty once (OpenAI's formula).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from shoal.engines.core.request import EngineRequest, SamplingParams
from torch import Tensor

OutputOf = Callable[[int], Sequence[int]]
PROMPTS_KEPT = 1024
"""Distinct ids of so many prompts are kept: they do not change from step to step."""


class Penalties:
    """Adjusts the rows that ask for it. Holds nothing but a bounded cache, so any request may come and go."""

    def __init__(self, eos_token_id: int) -> None:
        self._eos = eos_token_id
        self._prompts: OrderedDict[str, tuple[tuple[int, ...], NDArray[np.int64]]] = OrderedDict()

    def apply(self, logits: Tensor, requests: Sequence[EngineRequest], output_of: OutputOf) -> Tensor:
        """`logits` [rows, vocab] as they are if no row asks for anything, else a copy with those rows adjusted.

        `requests`: whose row each is. `output_of(row)`: its output tokens before the row's, drafts among them.
        """
        asking = [i for i, request in enumerate(requests) if adjusts(request.sampling)]
        if not asking:
            return logits
        adjusted = logits.clone()
        for i in asking:
            self._adjust(adjusted[i], requests[i], np.array(output_of(i), dtype=np.int64))
        return adjusted

    def _adjust(self, logits: Tensor, request: EngineRequest, output: NDArray[np.int64]) -> None:
        asked = request.sampling
        for token_id, bias in asked.logit_bias:
            logits[token_id] += bias
        if len(output) < asked.min_tokens:
            logits[[self._eos, *asked.stop_token_ids]] = -torch.inf
        ids, counts = np.unique(output, return_counts=True)
        if asked.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.union1d(ids, self._prompt_ids(request)))
            value = logits[seen]
            logits[seen] = torch.where(value > 0, value / asked.repetition_penalty, value * asked.repetition_penalty)
        if len(ids) and (asked.frequency_penalty or asked.presence_penalty):
            lost = asked.frequency_penalty * counts + asked.presence_penalty
            logits[torch.from_numpy(ids)] -= torch.from_numpy(lost).to(logits.dtype)

    def _prompt_ids(self, request: EngineRequest) -> NDArray[np.int64]:
        """Distinct ids of the client's prompt, ascending."""
        tokens = request.token_ids
        kept = self._prompts.pop(request.request_id, None)
        if kept is None or kept[0] is not tokens:
            kept = (tokens, np.unique(np.array(tokens[: request.prompt_len], dtype=np.int64)))
        self._prompts[request.request_id] = kept
        if len(self._prompts) > PROMPTS_KEPT:
            self._prompts.popitem(last=False)
        return kept[1]


def adjusts(asked: SamplingParams) -> bool:
    """Whether a request's logits are changed at all."""
    return bool(
        asked.logit_bias
        or asked.min_tokens
        or asked.presence_penalty
        or asked.frequency_penalty
        or asked.repetition_penalty != 1.0
    )
