"""Take over a step's result: advance what was computed, push tokens, apply the stop rules, report events."""

from shoal.engines.config import Role
from shoal.engines.core.ledger import Ledger
from shoal.engines.core.plan import ChunkDone, Ended, Event, Plan, PlanItem, PromptDone, StepKind, StepResult
from shoal.engines.core.request import FinishEvent, FinishReason, TokenEvent, TokenLogprobs
from shoal.engines.core.sequence import Phase, Sequence


def stop_reason(sequence: Sequence, token_id: int, eos_token_id: int, max_model_len: int) -> FinishReason | None:
    """Whether a sequence ends after `token_id` was pushed, first match wins (engine runtime notes 1.2).

    Stop tokens count as EOS and are honoured even where EOS is ignored. Output is compared with >=, so a sequence
    that arrives at its limit by several accepted tokens, or from another engine, cannot run past it.
    """
    sampling = sequence.request.sampling
    if (token_id == eos_token_id and not sampling.ignore_eos) or token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if sequence.len > max_model_len or sequence.len - sequence.prompt_len >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None


def commit_step(ledger: Ledger, plan: Plan, result: StepResult, eos_token_id: int) -> list[Event]:
    """Advance every sequence of the plan and free what it collected. Events are in batch order.

    Raises ValueError, before anything changes, when the result does not fit the plan.
    """
    _require_fit(plan, result)
    events: list[Event] = []
    events += [FinishEvent(*one) for one in plan.dropped]
    for one in plan.finished:
        _free_finished(ledger, one, events)
    for request_id, detail in result.failed:
        sequence = ledger.sequences.get(request_id)
        if sequence is not None and not sequence.is_finished:
            sequence.finish(FinishReason.ERROR, detail)
    requeued: list[Sequence] = []
    for index, item in enumerate(plan.items):
        sequence = item.sequence
        if sequence.is_finished:
            ledger.return_draft_slot(sequence)
            if plan.kind is StepKind.PREFILL:
                ledger.running.append(sequence)  # collected by the next plan, as any finished sequence
            continue
        if plan.kind is StepKind.PREFILL:
            events.append(ChunkDone(item.request_id, item.end, item.end in sequence.request.checkpoints))
            sequence.cached = item.end
            if not item.completes:
                requeued.append(sequence)
                continue
        _push_tokens(ledger, item, index, result, eos_token_id, events)
        if plan.kind is StepKind.PREFILL:
            _place_prefilled(ledger, sequence, events)
    ledger.waiting.extendleft(reversed(requeued))  # in order: the first cut prompt is the first again
    return events


def _require_fit(plan: Plan, result: StepResult) -> None:
    count = len(plan.items)
    if len(result.sampled) != count:
        raise ValueError(f"result has {len(result.sampled)} sampled tokens for {count} planned items")
    for name, values in (("accepted", result.accepted), ("logprobs", result.logprobs)):
        if values and len(values) != count:
            raise ValueError(f"result has {len(values)} {name} for {count} planned items; give all or none")
    for item, accepted in zip(plan.items, result.accepted, strict=False):
        if len(accepted) > item.rows - 1:
            raise ValueError(f"{item.request_id}: {len(accepted)} drafts accepted of {item.rows - 1} verified")


def _free_finished(ledger: Ledger, one: Ended, events: list[Event]) -> None:
    sequence = ledger.sequences.pop(one.request_id)
    ledger.give_back(sequence)
    if not sequence.is_reported:
        events.append(FinishEvent(*one))


def _push_tokens(
    ledger: Ledger, item: PlanItem, index: int, result: StepResult, eos_token_id: int, events: list[Event]
) -> None:
    """Push accepted drafts and the sampled token until one stops the sequence; later ones are lost.

    `cached` grows by what was pushed: the row of a pushed token's predecessor is what was computed.
    """
    sequence = item.sequence
    logprobs: TokenLogprobs | None = result.logprobs[index] if result.logprobs else None
    drafts = result.accepted[index] if result.accepted else ()
    for token_id in drafts:
        if _push(sequence, token_id, None, eos_token_id, ledger.config.max_model_len, events):
            break
    else:
        _push(sequence, result.sampled[index], logprobs, eos_token_id, ledger.config.max_model_len, events)
    sequence.cached = sequence.len - 1
    if sequence.is_finished:
        ledger.return_draft_slot(sequence)


def _push(
    sequence: Sequence,
    token_id: int,
    logprobs: TokenLogprobs | None,
    eos_token_id: int,
    max_model_len: int,
    events: list[Event],
) -> bool:
    """Push one token and report it; true if it ends the sequence."""
    events.append(TokenEvent(sequence.request_id, sequence.len - sequence.prompt_len, token_id, logprobs))
    sequence.push(token_id)
    reason = stop_reason(sequence, token_id, eos_token_id, max_model_len)
    if reason is None:
        return False
    sequence.finish(reason)
    sequence.is_reported = True
    events.append(FinishEvent(sequence.request_id, reason, sequence.output_tokens))
    return True


def _place_prefilled(ledger: Ledger, sequence: Sequence, events: list[Event]) -> None:
    """A complete prompt goes on to decode, or waits for its hand-off; a finished one waits to be collected."""
    if sequence.is_finished or ledger.config.role is Role.NORMAL:
        if not sequence.is_finished:
            sequence.move(Phase.RUNNING)
            sequence.drafts = ledger.pads
        ledger.running.append(sequence)
        return
    sequence.move(Phase.HANDOFF)
    ledger.handoff[sequence.request_id] = sequence
    events.append(
        PromptDone(sequence.request_id, sequence.cached, sequence.token_slice(sequence.cached, sequence.len)[0])
    )
