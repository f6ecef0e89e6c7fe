"""Turns a scenario's settings into this core's configuration, and its names into ours."""

from typing import Any

from shoal.engines.config import CacheConfig, EngineConfig, Role, VerifyMode
from shoal.engines.core.request import EngineRequest, FinishReason, ImageSpan, SamplingParams
from shoal.engines.core.rules import SchedulingRules
from shoal.engines.core.scheduler import StepScheduler
from shoal.engines.core.sequence import Phase, Sequence
from shoal.engines.core.verify.curve import StepCurve
from shoal.engines.core.verify.lengths import VerifyLengths, VerifySettings

STATUS_OF_REASON = {
    FinishReason.STOP: "FINISHED_STOPPED",
    FinishReason.LENGTH: "FINISHED_LENGTH_CAPPED",
    FinishReason.ABORT: "FINISHED_ABORTED",
    FinishReason.REFUSED: "FINISHED_IGNORED",
    FinishReason.PREEMPTED: "FINISHED_PREEMPTED",
}
STATUS_OF_PHASE = {
    Phase.WAITING: "WAITING",
    Phase.LOADING: "WAITING",
    Phase.ARRIVED: "WAITING",
    Phase.RUNNING: "RUNNING",
    Phase.HANDOFF: "RUNNING",  # the published engine keeps a prompt that is done among the running ones
}


def status_of_end(reason: FinishReason, detail: str) -> str:
    """The published name of an ending. Errors carry theirs as detail, for they are told to the scheduler by it."""
    return detail if reason is FinishReason.ERROR else STATUS_OF_REASON[reason]


def status_of(sequence: Sequence) -> str:
    """The published name of where a sequence is."""
    if sequence.reason is not None:
        return status_of_end(sequence.reason, sequence.detail)
    return STATUS_OF_PHASE[sequence.phase]


def scheduling_rules(settings: dict[str, Any], as_published: bool) -> SchedulingRules:
    """The scenario's constants; the switches as published, or as we want them where the entry marks a defect."""
    wanted = not as_published
    return SchedulingRules(
        all_interval=settings["all_interval"],
        any_interval=settings["any_interval"],
        chunked_prefill=settings["chunked_prefill"],
        chunk_alignment=2 * settings["cp_size"] if settings["cp_size"] > 1 else 1,
        lookahead_tokens=settings["lookahead_tokens"],
        drafts=settings["nextn"],
        pad_token_id=settings["vocab_size"] - 1,
        sum_k_max=settings["prefill_max_sum_seqlen_k"],
        vote_when_idle=wanted,
        purge_before_vote=wanted,
        younger_may_pass=wanted,
        charge_whole_prompt=as_published,
        refuse_at_submit=wanted,
        preempt_on_need=wanted,
        count_handoffs=as_published,
        failure_pushes_zero=as_published,
        adopt_when_sole=wanted,
        pipelined=settings["zos"],
    )


def build_scheduler(settings: dict[str, Any], as_published: bool) -> StepScheduler:
    """A scheduler of one rank set up as the scenario says."""
    verify = None
    if settings["varlen"]:
        curve = StepCurve.of(settings["perf_curve"])
        verify = VerifyLengths(VerifySettings(VerifyMode.VARLEN, settings["nextn"], settings["max_num_seqs"], curve))
    config = EngineConfig(
        role=Role(settings["engine_type"].lower()),
        max_model_len=settings["max_model_len"],
        step_tokens_max=settings["max_num_batched_tokens"],
        sequences_max=settings["max_num_seqs"],
        recompute_preempted=not settings["stop_preempted_request"],
        cache=CacheConfig(settings["block_size"], settings["num_blocks"], settings["num_state_slots"]),
    )
    return StepScheduler(config, settings["eos_token_id"], scheduling_rules(settings, as_published), verify)


def build_request(fields: dict[str, Any], settings: dict[str, Any]) -> EngineRequest:
    """A scenario's request: `len` tokens of id 10, or runs of ids in which an image and its pads are one span."""
    tokens: list[int] = []
    spans: list[ImageSpan] = []
    for name, count in fields.get("tokens", [[10, fields.get("len", 0)]]):
        if name == "image":
            spans += [ImageSpan(len(tokens) + i, 1, 0, 0, b"") for i in range(count)]
        elif name == "image_pad" and spans and spans[-1].end == len(tokens):
            last = spans.pop()
            spans.append(ImageSpan(last.start, last.length + count, 0, 0, b""))
        ids = {"image": settings["vocab_size"] + 2, "image_pad": settings["vocab_size"] + 1}
        tokens += [ids.get(name, name)] * count
    return EngineRequest(
        request_id=fields["id"],
        token_ids=tuple(tokens),
        prompt_len=len(tokens),
        sampling=SamplingParams(
            max_tokens=fields.get("max_tokens", settings["max_tokens"]), ignore_eos=fields.get("ignore_eos", False)
        ),
        images=tuple(spans),
        checkpoints=tuple(fields.get("chunk_checkpoints", ())),
    )
