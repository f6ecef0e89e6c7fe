"""Begin the branches of a computed prompt: each shares its blocks and goes on from a first token of its own."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from shoal.engines.config import Role
from shoal.engines.core.commit import stop_reason
from shoal.engines.core.fork import branch
from shoal.engines.core.ledger import Ledger
from shoal.engines.core.plan import Accepted, Branched, Event
from shoal.engines.core.request import BranchToken, EngineRequest, FinishEvent, FinishReason, TokensEvent
from shoal.engines.core.sequence import Phase, Sequence


def begin_branches(ledger: Ledger, parent_id: str, firsts: Seq[BranchToken], eos_token_id: int) -> list[Event]:
    """Branch a prompt whose first token has just been pushed, or that was just admitted; events of all branches.

    A branch that ends with its first token needs no sequence. A PROMPT engine begins no others: nothing is said of
    them if the prompt waits for its hand-off, for they begin where it is admitted. Nothing is said either for a
    prompt that failed or was aborted: nobody has its answer.
    """
    parent = ledger.sequences.get(parent_id)
    if parent is None or (parent.is_finished and parent.reason not in (FinishReason.STOP, FinishReason.LENGTH)):
        return []
    events: list[Event] = []
    for first in firsts:
        events += _begin(ledger, parent, first, eos_token_id)
    return events


def _begin(ledger: Ledger, parent: Sequence, first: BranchToken, eos_token_id: int) -> list[Event]:
    request = _request_of(parent, first)
    index = len(request.token_ids) - 1 - request.prompt_len
    told = () if first.logprobs is None else (first.logprobs,)
    token = TokensEvent(request.request_id, index, (first.token_id,), told)
    sequence, limit = Sequence(request), ledger.config.max_model_len
    reason = stop_reason(sequence, first.token_id, sequence.len, eos_token_id, limit)
    if reason is not None:
        return [Branched(parent.request_id, request), token, FinishEvent(request.request_id, reason, index + 1)]
    if ledger.config.role is Role.PROMPT:
        if parent.phase is Phase.HANDOFF:
            return []
        return [Branched(parent.request_id, request, "its prompt has ended and is not handed off")]
    answer = branch(ledger, parent, request)
    if isinstance(answer, Accepted):
        return [Branched(parent.request_id, request), token]
    return [Branched(parent.request_id, request, str(answer))]


def _request_of(parent: Sequence, first: BranchToken) -> EngineRequest:
    return replace(
        parent.request,
        request_id=first.request_id,
        token_ids=(*parent.token_slice(0, parent.cached), first.token_id),
        sampling=replace(parent.request.sampling, seed=first.seed),
        hit_tokens=0,
        checkpoints=(),
        branches=(),
    )
