"""What a request machine works on: the request as the API hands it over, and its images once they are encoded."""

from dataclasses import dataclass

from shoal.balancers.reports import GroupRef
from shoal.engines.core.grammar.spec import GrammarSpec
from shoal.engines.core.request import Branch, ImageSpan, SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """One request as the API hands it over: tokens with image placeholders expanded, images digested.

    `token_ids` is the client's prompt; `end_token_ids` end an answer (sampling.stop_token_ids end it too).
    `patches[i]` is the ViT patch count of images[i]. `deadline_us` is absolute on the shell's clock; `is_urgent`: the
    client set it, so queues serve by it. `priority`: smaller is sooner, as clients of vLLM have it. Requests of one
    `user` share that user's turns in a queue.

    `branches` are other answers to the same prompt, which have machines of their own (`following`) and are named as the
    first attempts of those. `prompt_logprobs`: alternatives to score each prompt token with, None = no scores; the
    store is not asked then.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    images: tuple[ImageSpan, ...] = ()
    patches: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    traffic_class: str = "default"
    arrival_us: int = 0
    deadline_us: int = 0
    grammar: GrammarSpec | None = None
    priority: int = 0
    user: str = ""
    is_urgent: bool = False
    branches: tuple[Branch, ...] = ()
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """Where one encoded image can be read; `rows` is opaque here (an object reference or shared memory name)."""

    image_index: int
    digest: bytes
    group: GroupRef
    rows: object
