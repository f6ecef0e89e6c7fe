"""One attempt to compute a request: what was chosen and started, and what has to be undone if it ends early."""

from dataclasses import dataclass, field, replace

from shoal.balancers.reports import Choice, GroupRef
from shoal.cluster.core.asks import Undo
from shoal.cluster.core.job import Embedding, Job
from shoal.cluster.core.messages import Abort, Effect, Reserve, Submit
from shoal.cluster.core.names import engine_id
from shoal.engines.core.request import EngineRequest


@dataclass(slots=True)
class Attempt:
    """`number` is never used twice in a request, so names and holds of two attempts cannot meet.

    `undos` gives back whatever engines, encoders and balancers may hold for it; each is idempotent.
    """

    number: int
    request_id: str
    hit_tokens: int = 0
    prefix: bytes = b""
    prefill: Choice | None = None
    decode: Choice | None = None
    ticket: object | None = None
    is_admitted: bool = False
    undos: list[Undo] = field(default_factory=list)

    @property
    def sequence(self) -> str:
        """Its name in engines and tickets, and its reservation at the prefill and decode balancers."""
        return engine_id(self.request_id, self.number)

    def groups(self) -> tuple[GroupRef, ...]:
        """Chosen groups of engines."""
        return tuple(choice.group for choice in (self.prefill, self.decode) if choice)

    def needs(self, group: GroupRef) -> bool:
        """Whether the attempt cannot go on without that life of a group: a source may go once it has handed off."""
        if self.decode and self.decode.group == group:
            return True
        return bool(self.prefill and self.prefill.group == group and not self.is_admitted)

    def undo(self, reason: str, ended_at: GroupRef | None = None) -> tuple[Effect, ...]:
        """Give back everything, except where the sequence has ended by itself or was handed off."""
        over = {ended_at}
        if self.is_admitted and self.prefill:
            over.add(self.prefill.group)
        undos, self.undos = list(dict.fromkeys(self.undos)), []
        return tuple(
            replace(undo, reason=reason) if isinstance(undo, Abort) else undo
            for undo in undos
            if not (isinstance(undo, Abort) and undo.group in over)
        )


def effective_hit(anchors: tuple[int, ...], matched_tokens: int, prompt_len: int, keep: int) -> int:
    """The largest stored anchor <= min(matched, prompt_len - keep); 0 for none.

    Beyond prompt_len - keep decoder rows are computed from their own start, which an anchor cannot replace.
    """
    limit = min(matched_tokens, prompt_len - keep)
    return max((anchor for anchor in anchors if 0 < anchor <= limit), default=0)


def checkpoints(prompt_len: int, tokens: int, hit_tokens: int, keep: int, grain_tokens: int) -> tuple[int, ...]:
    """Positions where a prefill chunk must end, since the slot is saved there: the last grain boundary before the
    kept rows (what a longer or equal prompt can hit), and the last one of the sequence (what its next turn can)."""
    if keep <= 0:
        return ()
    ends = {(prompt_len - keep) // grain_tokens * grain_tokens, tokens // grain_tokens * grain_tokens}
    return tuple(sorted(end for end in ends if end > hit_tokens))


def submit(
    attempt: Attempt, ask: int, job: Job, output_ids: tuple[int, ...], embeddings: tuple[Embedding, ...],
    checkpoint_ends: tuple[int, ...],
) -> Submit:  # fmt: skip
    """The Submit of this attempt: prompt and tokens already emitted, the client's prompt length unchanged."""
    assert attempt.prefill is not None, "submit needs a chosen PROMPT or NORMAL group"
    request = EngineRequest(
        request_id=attempt.sequence,
        token_ids=job.token_ids + output_ids,
        prompt_len=len(job.token_ids),
        sampling=job.sampling,
        images=job.images,
        hit_tokens=attempt.hit_tokens,
        checkpoints=checkpoint_ends,
        arrival_us=job.arrival_us,
        grammar=job.grammar,
        priority=-job.priority,  # an engine's greater one goes first
        deadline_us=job.deadline_us if job.is_urgent else 0,
        user=job.user,
        prompt_logprobs=job.prompt_logprobs,
        branches=() if output_ids else job.branches,  # they begin with the prompt's end alone
    )
    target = attempt.decode.group if attempt.decode else None
    return Submit(ask, attempt.prefill.group, attempt.number, request, attempt.ticket, embeddings, target)


def reserve(attempt: Attempt, ask: int, tokens: int, deadline_us: int) -> Reserve:
    """The Reserve of this attempt at its COMPLETION group, for its PROMPT group to write into."""
    assert attempt.prefill is not None, "reserve needs the PROMPT group that will write"
    assert attempt.decode is not None, "reserve needs a COMPLETION group"
    source, target = attempt.prefill.group, attempt.decode.group
    return Reserve(ask, target, source, attempt.sequence, attempt.number, tokens, deadline_us)
