"""What the HTTP side hands to the cluster and gets back: the chat job, token batches and the service port."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
from shoal.engines.core.grammar.spec import GrammarSpec
from shoal.engines.core.request import FinishReason, ImageSpan, PromptScore, SamplingParams, TokenLogprobs

Canvas = npt.NDArray[np.uint8]


class TrafficClass(StrEnum):
    """What kind of traffic a request belongs to; balancers and store policies may treat the classes apart."""

    CHAT = "chat"
    AGENT = "agent"


@dataclass(frozen=True, slots=True, eq=False)
class ChatJob:
    """One sequence to answer. A request with n choices becomes n jobs that differ in id, `choice` and seed.

    `token_ids` is the rendered prompt with every image expanded to its placeholder span; `spans[i]` describes the
    image whose preprocessed pixels are `canvases[i]`, uint8 [height, width, 3], already fitted and padded to the
    ViT grid. `sampling.max_tokens` is resolved and fits the context. `stop` strings are matched by the HTTP side,
    which closes the iterator on a match; they are given for information. `priority`: smaller is sooner. Requests of one
    `user` share that user's turns in a queue. `arrival_us` and `deadline_us` are Unix time in microseconds; every job
    has a deadline, and `is_urgent` says that the client named it, so that queues serve by it. `request_id` is unique;
    `client_request_id` is what the client sent as x-request-id, for logs only. `cache_salt` separates prefix caches of
    tenants; empty is the shared one. `grammar` rules the answer.

    `followers`: (request id, seed) of the other choices, in the job of the first one, which is submitted first and is
    their `leader`: they begin from the prompt that is computed for it, where that can be. `prompt_logprobs`: score each
    prompt token, with so many alternatives (None: no scores); scores come with the leader's batches alone.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    spans: tuple[ImageSpan, ...] = ()
    canvases: tuple[Canvas, ...] = ()
    stop: tuple[str, ...] = ()
    traffic_class: TrafficClass = TrafficClass.CHAT
    cache_salt: str = ""
    priority: int = 0
    arrival_us: int = 0
    deadline_us: int = 0
    client_request_id: str = ""
    choice: int = 0
    n: int = 1
    grammar: GrammarSpec | None = None
    user: str = ""
    is_urgent: bool = False
    leader: str = ""
    followers: tuple[tuple[str, int], ...] = ()
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Output tokens in order, as many as were ready; an empty batch without a finish reason is allowed.

    `logprobs` has one entry a token when the job asked for them, else it is empty. `cached_tokens` is the number
    of prompt tokens nobody had to compute for this request (0 on a cold P/D prompt); None until it is known, and
    known at the latest in the batch that finishes. The iterator ends after a batch with a `finish_reason`. A stop
    token (EOS) that ended the sequence is the last token id of that batch: it is counted, never shown. `prompt_scores`
    are of all prompt tokens but the first, in one batch, where the job asked for them.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    detail: str = ""
    prompt_scores: tuple[PromptScore, ...] = ()


class ChatService(Protocol):
    """The cluster as the HTTP side sees it."""

    @property
    def models(self) -> Sequence[str]:
        """Served model names; the first is the main one."""
        ...

    def submit(self, job: ChatJob) -> AsyncGenerator[TokenBatch, None]:
        """Iterate over the answer; `aclose()` (or cancelling the waiting task) aborts the sequence everywhere.

        Raises a `ServiceError` from `shoal.cluster.api.errors`: before the first batch for what is refused
        (FullError, PromptTooLongError, UnavailableError), at any time for DeadlineExceededError and EngineError.
        """
        ...

    def ready(self) -> bool:
        """Whether a request sent now could be answered; never blocks."""
        ...

    async def metrics_text(self) -> str:
        """Prometheus text of the cluster behind, merged into `/metrics`; empty when there is none."""
        ...
