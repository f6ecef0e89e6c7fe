"""Every event into and every effect out of a request machine, as frozen values.

An effect that expects an answer carries `ask`, a number of its own within the request; the answering event repeats it.
The machine ignores an answer whose `ask` it no longer waits for, and gives back whatever the late answer brought.
`group` is always a GroupRef: the name and the epoch, so that a group's next life is never mistaken for it.
Sequences are named `<request id>/<attempt>` in engines (`names.engine_id`): one may see two attempts of a request.
"""

from dataclasses import dataclass

from shoal.balancers.reports import Choice, DecodeNeed, EncodeNeed, Full, GroupRef, PrefillNeed
from shoal.cluster.core.job import Embedding
from shoal.cluster.core.prompt_scored import EmitScores, PromptScored
from shoal.engines.core.request import (
    EngineRequest,
    FinishEvent,
    ImageSpan,
    NoRoom,
    Rejected,
    TokensEvent,
)

# ---------------------------------------------------------------- events in


@dataclass(frozen=True, slots=True)
class Begin:
    """The request has arrived; the first event, once."""


@dataclass(frozen=True, slots=True)
class Matched:
    """The index offers grains up to `matched_tokens` and anchors at these positions (0 and () for a miss).

    `prefixes[i]` is the chain key at anchors[i]; it names the prefix to the prefill balancer's locality.
    """

    ask: int
    matched_tokens: int = 0
    anchors: tuple[int, ...] = ()
    prefixes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Chosen:
    """A balancer's answer to ChooseEncoder, ChoosePrefill or ChooseDecode."""

    ask: int
    result: Choice | Full


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoder's answer: one image's embedding is ready (finite values checked by the encoder)."""

    ask: int
    embedding: Embedding


@dataclass(frozen=True, slots=True)
class Reserved:
    """The COMPLETION engine holds blocks and a slot; `ticket` is opaque here and travels with Submit."""

    ask: int
    ticket: object


@dataclass(frozen=True, slots=True)
class ReserveRefused:
    """The COMPLETION engine has no room now."""

    ask: int
    short: NoRoom


@dataclass(frozen=True, slots=True)
class Submitted:
    """The engine has taken the sequence and owns it."""

    ask: int


@dataclass(frozen=True, slots=True)
class SubmitRejected:
    """The engine can never serve this request; nothing was taken."""

    ask: int
    rejected: Rejected


@dataclass(frozen=True, slots=True)
class CallFailed:
    """Any asked call came to nothing: peer died, refused, timed out. The peer may or may not have acted.

    `is_lost`: the peer is gone, so the failure says nothing about what was asked.
    """

    ask: int
    reason: str
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """The first chunk of this attempt runs, after the engine swapped in `hit_tokens`.

    `memory_bytes` of the `fetch_bytes` were in the engine's host cache.
    """

    attempt: int
    group: GroupRef
    hit_tokens: int = 0
    fetch_bytes: int = 0
    fetch_us: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """One prefill chunk was computed; `cached` tokens of the sequence are now in blocks."""

    attempt: int
    group: GroupRef
    tokens: int
    cached: int


@dataclass(frozen=True, slots=True)
class Known:
    """The engine still has this sequence, in whatever state; sent with its regular replies while nothing else is."""

    attempt: int
    group: GroupRef


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The announced hit could not be loaded; the PROMPT engine has dropped the sequence."""

    attempt: int
    group: GroupRef
    reason: str


@dataclass(frozen=True, slots=True)
class EmbeddingLost:
    """An embedding could not be read where it was said to be; the PROMPT engine has dropped the sequence."""

    attempt: int
    group: GroupRef
    image_index: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """The COMPLETION engine verified the hand-off and owns the sequence: from here the PROMPT group may die."""

    attempt: int
    group: GroupRef
    handoff_bytes: int
    handoff_us: int


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """The hand-off ended in any way but admitted (expired, checksum, write error); both sides clean up on abort."""

    attempt: int
    group: GroupRef
    reason: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output tokens of one attempt, in any order, perhaps again."""

    attempt: int
    group: GroupRef
    tokens: TokensEvent


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine says this sequence has ended there."""

    attempt: int
    group: GroupRef
    finish: FinishEvent


@dataclass(frozen=True, slots=True)
class Saved:
    """Grains and anchors of this request were stored; may come after the end, and only feeds the timeline."""

    attempt: int
    group: GroupRef
    grains: int
    anchors: int


@dataclass(frozen=True, slots=True)
class Forked:
    """The engine has begun this answer from the prompt that it computed for another one, and owns the sequence."""

    attempt: int
    group: GroupRef


@dataclass(frozen=True, slots=True)
class NotForked:
    """The engine that has the other answer's prompt could not begin this one there."""

    attempt: int
    group: GroupRef
    reason: str


@dataclass(frozen=True, slots=True)
class LeaderGone:
    """Nobody will begin this answer from another one's prompt any more."""


@dataclass(frozen=True, slots=True)
class GroupLost:
    """Membership declares one life of a group over."""

    group: GroupRef


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client left, or has all it wants (a stop string): nothing more is to be computed or emitted."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: sent when the last WakeAt is due."""


Event = (
    Begin | Matched | Chosen | Encoded | Reserved | ReserveRefused | Submitted | SubmitRejected | CallFailed
    | PrefillStarted | ChunkDone | Known | FetchFailed | EmbeddingLost | Admitted | HandoffFailed | Tokens | Ended
    | Saved | GroupLost | ClientGone | Tick | Forked | NotForked | LeaderGone | PromptScored
)  # fmt: skip

# ---------------------------------------------------------------- effects out


@dataclass(frozen=True, slots=True)
class Match:
    """Ask the index for the longest stored prefix of `token_ids[:limit_tokens]`; answer Matched or CallFailed."""

    ask: int
    token_ids: tuple[int, ...]
    images: tuple[ImageSpan, ...]
    limit_tokens: int


@dataclass(frozen=True, slots=True)
class ChooseEncoder:
    """Ask the encode balancer; answer Chosen or CallFailed."""

    ask: int
    need: EncodeNeed


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode one image at `group`; answer Encoded or CallFailed."""

    ask: int
    group: GroupRef
    sequence: str
    image_index: int


@dataclass(frozen=True, slots=True)
class ChoosePrefill:
    """Ask the prefill balancer (PROMPT groups, or NORMAL ones); answer Chosen or CallFailed."""

    ask: int
    need: PrefillNeed


@dataclass(frozen=True, slots=True)
class ChooseDecode:
    """Ask the decode balancer; answer Chosen or CallFailed."""

    ask: int
    need: DecodeNeed


@dataclass(frozen=True, slots=True)
class ReleaseChoice:
    """Tell a balancer ("encode", "prefill", "decode") that the room held under `reservation` is not needed."""

    balancer: str
    reservation: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve blocks and a slot at the COMPLETION group for the sequence; answer Reserved, ReserveRefused, CallFailed.

    `source` is the PROMPT group that will write; `tokens` are those the hand-off will carry at most.
    """

    ask: int
    group: GroupRef
    source: GroupRef
    sequence: str
    attempt: int
    tokens: int
    deadline_us: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Give the sequence to a PROMPT group (with a ticket) or a NORMAL group (ticket None).

    Answer Submitted, SubmitRejected or CallFailed. `embeddings` cover every image not wholly inside the hit.
    """

    ask: int
    group: GroupRef
    attempt: int
    request: EngineRequest
    ticket: object | None
    embeddings: tuple[Embedding, ...]
    target: GroupRef | None


@dataclass(frozen=True, slots=True)
class Abort:
    """End the sequence at `group` in whatever state it is: queued, computing, reserved, receiving, decoding.

    Idempotent by name; unknown names are fine. Sent to an encoder, too, with that image's sequence name.
    """

    group: GroupRef
    sequence: str
    reason: str


@dataclass(frozen=True, slots=True)
class Emit:
    """New tokens for the client: contiguous, each index once over the whole request."""

    tokens: TokensEvent


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed, ready for an API error object. `retry_after_us` 0: no Retry-After."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_us: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The request is over; exactly once, and nothing is emitted after it.

    `finish` is set for a normal end, `failure` otherwise; both are None when the client left.
    `cached_tokens` of the prompt were computed by nobody for this request (usage).
    """

    finish: FinishEvent | None
    failure: Failure | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ReleaseFollowers:
    """Tell the machines of the job's branches LeaderGone; those that have begun do not mind."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send Tick at `at_us` unless a later WakeAt of this request replaces it."""

    at_us: int


Effect = (
    Match | ChooseEncoder | Encode | ChoosePrefill | ChooseDecode | ReleaseChoice | Reserve | Submit | Abort
    | Emit | Finish | WakeAt | ReleaseFollowers | EmitScores
)  # fmt: skip

Answer = Matched | Chosen | Encoded | Reserved | ReserveRefused | Submitted | SubmitRejected | CallFailed
EngineEvent = (
    PrefillStarted | ChunkDone | Known | FetchFailed | EmbeddingLost | Admitted | HandoffFailed | Tokens | Ended
    | PromptScored
)  # fmt: skip
