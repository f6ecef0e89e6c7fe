"""Scores of prompt tokens as clients of vLLM read them: `prompt_logprobs`."""

from collections.abc import Sequence
from typing import Any

from shoal.engines.core.request import PromptScore
from shoal.engines.grammar.token_bytes import TokenBytes


def prompt_logprobs(
    token_ids: Sequence[int], scores: Sequence[PromptScore], tokens: TokenBytes
) -> list[dict[str, Any] | None]:
    """One entry a prompt token, by token id: its own score and the alternatives'; null for the first, that has none."""
    assert len(scores) == len(token_ids) - 1, f"{len(scores)} scores for a prompt of {len(token_ids)} tokens"
    entries: list[dict[str, Any] | None] = [None]
    for token_id, score in zip(token_ids[1:], scores, strict=True):
        found = {str(token_id): _entry(token_id, score.logprob, score.rank, tokens)}
        for rank, (other, logprob) in enumerate(score.top, 1):
            found.setdefault(str(other), _entry(other, logprob, rank, tokens))
        entries.append(found)
    return entries


def _entry(token_id: int, logprob: float, rank: int, tokens: TokenBytes) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": tokens.of(token_id).decode(errors="replace")}
