"""Whether a request can be served at all, decided when it arrives."""

from shoal.engines.config import TruncationMode
from shoal.engines.core.ledger import Ledger
from shoal.engines.core.request import EngineRequest
from shoal.engines.core.sequence import Sequence


def objection(ledger: Ledger, sequence: Sequence) -> str:
    """Why a new request cannot be accepted, naming field, value, rule and remedy; "" if it can."""
    request = sequence.request
    if request.request_id in ledger.sequences or request.request_id in ledger.reservations:
        return f"request_id {request.request_id!r} is in use: a request has one sequence in an engine at a time"
    return (
        _bad_tokens(request)
        or _bad_images(request)
        or _bad_hit(ledger, request)
        or (ledger.refusal(len(request.token_ids), sequence) if ledger.rules.refuse_at_submit else "")
    )


def crowd(ledger: Ledger) -> str:
    """Why no request is accepted now, whatever it asks for; "" if the queue has room."""
    most = ledger.rules.waiting_max
    if not most or len(ledger.waiting) < most:
        return ""
    return f"waiting_max = {most} requests wait already: retry later, ask another engine, or raise waiting_max"


def _bad_tokens(request: EngineRequest) -> str:
    length = len(request.token_ids)
    if not length:
        return "token_ids is empty: a prompt has at least one token"
    if not 1 <= request.prompt_len <= length:
        return f"prompt_len = {request.prompt_len} must lie in 1..{length}, the number of token_ids"
    left = request.sampling.max_tokens - (length - request.prompt_len)
    if left < 1:
        return f"max_tokens = {request.sampling.max_tokens} leaves nothing to produce: give at least 1 more"
    checkpoints = request.checkpoints
    if list(checkpoints) != sorted(set(checkpoints)) or (checkpoints and not checkpoints[0] > 0):
        return f"checkpoints = {checkpoints} must be positive and strictly ascending"
    return ""


def _bad_images(request: EngineRequest) -> str:
    end = 0
    for span in request.images:
        if span.start < end or span.length < 1 or span.end > request.prompt_len:
            return (
                f"image span {span.start}..{span.end} must follow the one before (ends at {end}) and lie inside the "
                f"prompt of {request.prompt_len} tokens"
            )
        end = span.end
    return ""


def _bad_hit(ledger: Ledger, request: EngineRequest) -> str:
    """A hit must leave a token to compute and stay before the rows that decoder layers need (notes 10.8, 14.2)."""
    hit, block_tokens = request.hit_tokens, ledger.config.cache.block_tokens
    if not hit:
        return ""
    if request.prompt_logprobs is not None:
        return f"hit_tokens = {hit} must be 0 with prompt_logprobs: a stored prefix has no logits"
    if hit < 0 or hit % block_tokens:
        return f"hit_tokens = {hit} must be a multiple of block_tokens = {block_tokens}"
    truncation = ledger.config.truncation
    if truncation.mode is TruncationMode.OFF:
        return f"hit_tokens = {hit} needs truncation: decoder rings are not stored, so a hit cannot restore them"
    furthest = request.prompt_len - truncation.keep
    if hit > furthest:
        return (
            f"hit_tokens = {hit} must be at most prompt_len - keep = {furthest}: the last {truncation.keep} tokens "
            "are recomputed to fill the decoder rings; offer an earlier anchor"
        )
    return ""
