"""Take over a step's result: advance what was computed, push tokens, apply the stop rules, report events."""

from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

from shoal.engines.config import Role
from shoal.engines.core.drafts import accept_rates, hold_drafts
from shoal.engines.core.ledger import Ledger
from shoal.engines.core.plan import ChunkDone, Ended, Event, Plan, PromptDone, StepKind, StepResult
from shoal.engines.core.request import FinishEvent, FinishReason, TokenLogprobs, TokensEvent
from shoal.engines.core.sequence import Phase, Sequence

_tokens_event = partial(tuple.__new__, TokensEvent)  # from a tuple of all fields: half the cost of the constructor


class Columns(NamedTuple):
    """Of each item of a step: what it outputs (accepted drafts, then the sampled token) and the logprobs of that,
    its next drafts and their acceptance rates; empty where there are none or nobody asks."""

    outputs: Seq[tuple[int, ...]]
    logprobs: Seq[tuple[TokenLogprobs, ...]]
    drafts: Seq[Seq[int]]
    rates: Seq[tuple[float, ...]]


def stop_reason(
    sequence: Sequence, token_id: int, length: int, eos_token_id: int, max_model_len: int
) -> FinishReason | None:
    """Whether a sequence ends with `token_id` as its token number `length`, first match wins (runtime notes 1.2).

    Stop tokens count as EOS and are honoured even where EOS is ignored. Output is compared with >=, so a sequence
    that arrives at its limit by several accepted tokens, or from another engine, cannot run past it.
    """
    sampling = sequence.request.sampling
    if (token_id == eos_token_id and not sampling.ignore_eos) or token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if length > max_model_len or length - sequence.prompt_len >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None


def commit_step(ledger: Ledger, plan: Plan, result: StepResult, eos_token_id: int) -> list[Event]:
    """Advance every sequence of the plan, and end those that failed. Events are in batch order.

    Raises ValueError, before anything changes, when the result does not fit the plan.
    """
    _require_fit(plan, result, ledger.rules.drafts)
    events: list[Event] = []
    if result.failed:
        _fail(ledger, plan, dict(result.failed), events)
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


def _fail(ledger: Ledger, plan: Plan, details: dict[str, str], events: list[Event]) -> None:
    for item in plan.items:
        sequence = item.sequence
        if sequence.request_id not in details or sequence.is_finished:
            continue
        if ledger.rules.failure_pushes_zero and item.completes:
            events.append(TokensEvent(sequence.request_id, sequence.output_tokens, (0,)))
            sequence.push(0)
            sequence.cached = sequence.len - 1
        sequence.finish(FinishReason.ERROR, details[sequence.request_id])


def _commit_prefill(ledger: Ledger, plan: Plan, result: StepResult, eos_token_id: int, events: list[Event]) -> None:
    requeued: list[Sequence] = []
    max_model_len = ledger.config.max_model_len
    for item, tokens, told, made, rates in zip(plan.items, *_columns(ledger, result), strict=True):
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
            hold_drafts(sequence, made, rates, ledger.pads)
        if _push_tokens(sequence, tokens, told, eos_token_id, max_model_len, events):
            ledger.return_draft_slot(sequence)
        _place_prefilled(ledger, sequence, events)
    ledger.waiting.extendleft(reversed(requeued))  # in order: the first cut prompt is the first again


def _commit_decode(ledger: Ledger, plan: Plan, result: StepResult, eos_token_id: int, events: list[Event]) -> None:
    """The loop of every step: what is the same for all sequences is looked up before it."""
    pads, waiting, finished = ledger.pads, Phase.WAITING, Phase.FINISHED
    max_model_len = ledger.config.max_model_len
    for item, tokens, told, made, rates in zip(plan.items, *_columns(ledger, result), strict=True):
        sequence = item.sequence
        phase = sequence.phase
        if phase is waiting:
            continue  # preempted while the step was open: it is computed again
        sequence.process_count += 1
        if phase is finished:
            ledger.return_draft_slot(sequence)
            continue
        if pads:
            hold_drafts(sequence, made, rates, pads)
        if _push_tokens(sequence, tokens, told, eos_token_id, max_model_len, events):
            ledger.return_draft_slot(sequence)


def _columns(ledger: Ledger, result: StepResult) -> Columns:
    none = ((),) * len(result.sampled)
    outputs = [(*drafts, last) for drafts, last in zip(result.accepted or none, result.sampled, strict=True)]
    logprobs: Seq[tuple[TokenLogprobs, ...]] = none
    if result.logprobs:
        told = zip(result.accepted_logprobs or none, result.logprobs, strict=True)
        logprobs = [() if last is None else (*drafts, last) for drafts, last in told]
    asks_rates = ledger.keeps_rates and result.confidences
    return Columns(outputs, logprobs, result.drafts or none, accept_rates(result.confidences) if asks_rates else none)


def _require_fit(plan: Plan, result: StepResult, drafts: int) -> None:
    """Raise ValueError unless every part of the result has one entry an item, each of a length that makes sense."""
    items = len(plan.items)
    if len(result.sampled) != items:
        raise ValueError(f"result has {len(result.sampled)} sampled tokens for {items} planned items")
    for name in ("accepted", "logprobs", "drafts", "confidences", "accepted_logprobs"):
        values = getattr(result, name)
        if values and len(values) != items:
            raise ValueError(f"result has {len(values)} {name} for {items} planned items; give all or none")
    for item, accepted in zip(plan.items, result.accepted, strict=False):
        if len(accepted) >= item.rows:
            raise ValueError(f"{item.request_id}: {len(accepted)} drafts accepted of {item.rows - 1} verified")
    for name, given in (("drafts", result.drafts), ("confidences", result.confidences)):
        if set(map(len, given)) <= {0, drafts}:
            continue
        for item, values in zip(plan.items, given, strict=False):
            if len(values) not in (0, drafts):
                raise ValueError(f"{item.request_id}: {len(values)} {name} were made, must be 0 or drafts = {drafts}")
    if not (result.logprobs or result.accepted_logprobs):
        return
    of_sampled, of_accepted = result.logprobs or (None,) * items, result.accepted_logprobs or ((),) * items
    for item, accepted, last, told in zip(plan.items, result.accepted, of_sampled, of_accepted, strict=False):
        if len(told) != (0 if last is None else len(accepted)):
            what = "no logprobs" if last is None else "logprobs"
            raise ValueError(
                f"{item.request_id}: {len(told)} accepted_logprobs for {len(accepted)} accepted drafts and {what} of "
                "the sampled token: give one for each token, or none"
            )


def _free_finished(ledger: Ledger, one: Ended, events: list[Event]) -> None:
    sequence = ledger.sequences[one.request_id]
    ledger.forget(sequence)
    if not sequence.is_reported:
        events.append(FinishEvent(*one))


def _push_tokens(
    sequence: Sequence,
    tokens: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...],
    eos_token_id: int,
    max_model_len: int,
    events: list[Event],
) -> bool:
    """Push output tokens up to the first that ends the sequence, and report them as one event; true if one does.

    `cached` grows by what was pushed: the row of a pushed token's predecessor is what was computed.
    """
    before, reason = sequence.len, None
    length, index, sampling = before + len(tokens), before - sequence.prompt_len, sequence.request.sampling
    if (
        length > max_model_len
        or index + len(tokens) >= sampling.max_tokens
        or sampling.stop_token_ids
        or (eos_token_id in tokens and not sampling.ignore_eos)
    ):  # it may end: look at each token
        count, reason = _first_end(sequence, tokens, eos_token_id, max_model_len)
        tokens, logprobs, length = tokens[:count], logprobs[:count], before + count
    sequence.output += tokens
    sequence.len, sequence.cached = length, length - 1
    events.append(_tokens_event((sequence.request_id, index, tokens, logprobs)))
    if reason is None:
        return False
    sequence.finish(reason)
    sequence.is_reported = True
    events.append(FinishEvent(sequence.request_id, reason, sequence.output_tokens))
    return True


def _first_end(
    sequence: Sequence, tokens: tuple[int, ...], eos_token_id: int, max_model_len: int
) -> tuple[int, FinishReason | None]:
    """How many of the tokens there are up to the first that ends the sequence, and why; all and None if none does."""
    for count, token_id in enumerate(tokens, 1):
        reason = stop_reason(sequence, token_id, sequence.len + count, eos_token_id, max_model_len)
        if reason is not None:
            return count, reason
    return len(tokens), None


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
