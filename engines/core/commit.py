"""Take over a step's result: advance what was computed, push tokens, apply the stop rules, report events."""

from itertools import zip_longest

from shoal.engines.config import Role
from shoal.engines.core.drafts import hold_drafts
from shoal.engines.core.ledger import Ledger
from shoal.engines.core.plan import ChunkDone, Ended, Event, Plan, PromptDone, StepKind, StepResult
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
    """Advance every sequence of the plan, and end those that failed. Events are in batch order.

    Raises ValueError, before anything changes, when the result does not fit the plan.
    """
    _require_fit(plan, result, ledger.rules.drafts)
    events: list[Event] = []
    if result.failed:
        _fail(plan, dict(result.failed))
    if plan.kind is StepKind.PREFILL:
        _commit_prefill(ledger, plan, result, eos_token_id, events)
    else:
        _commit_decode(ledger, plan, result, eos_token_id, events)
    return events


def collect(ledger: Ledger, plan: Plan) -> list[Event]:
    """Report who left with a plan and free what they own, and the sources of its copies.

    No step that is still open computes them, and copies come before whatever is written there next.
    """
    events: list[Event] = [FinishEvent(*one) for one in plan.dropped]
    for one in plan.finished:
        _free_finished(ledger, one, events)
    if plan.clone_slots or plan.clone_blocks:
        ledger.slots.free([source for source, _ in plan.clone_slots])
        ledger.blocks.free([source for source, _ in plan.clone_blocks])
    return events


def _fail(plan: Plan, details: dict[str, str]) -> None:
    for item in plan.items:
        sequence = item.sequence
        if sequence.request_id in details and not sequence.is_finished:
            sequence.finish(FinishReason.ERROR, details[sequence.request_id])


def _commit_prefill(ledger: Ledger, plan: Plan, result: StepResult, eos_token_id: int, events: list[Event]) -> None:
    requeued: list[Sequence] = []
    for index, item in enumerate(plan.items):
        sequence = item.sequence
        sequence.process_count += 1
        if sequence.is_finished:
            ledger.return_draft_slot(sequence)
            ledger.running.append(sequence)  # collected by the next plan, as any finished sequence
            continue
        events.append(ChunkDone(item.request_id, item.end, item.end in sequence.request.checkpoints))
        sequence.cached = item.end
        if not item.completes:
            requeued.append(sequence)
            continue
        if sequence.draft_slot:
            hold_drafts(sequence, index, result, ledger.pads)
        _push_tokens(ledger, sequence, index, result, eos_token_id, events)
        _place_prefilled(ledger, sequence, events)
    ledger.waiting.extendleft(reversed(requeued))  # in order: the first cut prompt is the first again


def _commit_decode(ledger: Ledger, plan: Plan, result: StepResult, eos_token_id: int, events: list[Event]) -> None:
    has_drafts = bool(ledger.pads)
    for index, item in enumerate(plan.items):
        sequence = item.sequence
        if sequence.phase is Phase.WAITING:
            continue  # preempted while the step was open: it is computed again
        sequence.process_count += 1
        if sequence.is_finished:
            ledger.return_draft_slot(sequence)
            continue
        if has_drafts:
            hold_drafts(sequence, index, result, ledger.pads)
        _push_tokens(ledger, sequence, index, result, eos_token_id, events)


def _require_fit(plan: Plan, result: StepResult, drafts: int) -> None:
    """Raise ValueError unless every part of the result has one entry an item, each of a length that makes sense."""
    count = len(plan.items)
    if len(result.sampled) != count:
        raise ValueError(f"result has {len(result.sampled)} sampled tokens for {count} planned items")
    for name in ("accepted", "logprobs", "drafts", "confidences", "accepted_logprobs"):
        values = getattr(result, name)
        if values and len(values) != count:
            raise ValueError(f"result has {len(values)} {name} for {count} planned items; give all or none")
    for item, accepted in zip(plan.items, result.accepted, strict=False):
        if len(accepted) > item.rows - 1:
            raise ValueError(f"{item.request_id}: {len(accepted)} drafts accepted of {item.rows - 1} verified")
    for name, given in (("drafts", result.drafts), ("confidences", result.confidences)):
        for item, values in zip(plan.items, given, strict=False):
            if len(values) not in (0, drafts):
                raise ValueError(f"{item.request_id}: {len(values)} {name} were made, must be 0 or drafts = {drafts}")
    for item, accepted, told in zip(plan.items, result.accepted, result.accepted_logprobs, strict=False):
        if told and len(told) != len(accepted):
            raise ValueError(f"{item.request_id}: {len(told)} accepted_logprobs for {len(accepted)} accepted drafts")


def _free_finished(ledger: Ledger, one: Ended, events: list[Event]) -> None:
    sequence = ledger.sequences[one.request_id]
    ledger.forget(sequence)
    if not sequence.is_reported:
        events.append(FinishEvent(*one))


def _push_tokens(
    ledger: Ledger, sequence: Sequence, index: int, result: StepResult, eos_token_id: int, events: list[Event]
) -> None:
    """Push accepted drafts and the sampled token until one stops the sequence; later ones are lost.

    `cached` grows by what was pushed: the row of a pushed token's predecessor is what was computed.
    """
    logprobs: TokenLogprobs | None = result.logprobs[index] if result.logprobs else None
    accepted = result.accepted[index] if result.accepted else ()
    told = result.accepted_logprobs[index] if result.accepted_logprobs else ()
    for token_id, logprob in zip_longest(accepted, told):
        if _push(sequence, token_id, logprob, eos_token_id, ledger.config.max_model_len, events):
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
        ledger.running.append(sequence)
        return
    sequence.move(Phase.HANDOFF)
    ledger.handoff[sequence.request_id] = sequence
    events.append(
        PromptDone(sequence.request_id, sequence.cached, sequence.token_slice(sequence.cached, sequence.len)[0])
    )
