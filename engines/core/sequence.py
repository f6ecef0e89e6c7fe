"""One sequence an engine computes, and the only ways it may move through its life."""

from enum import StrEnum

from shoal.engines.core.request import EngineRequest, FinishReason, ImageSpan


class Phase(StrEnum):
    """Where a sequence is. WAITING and LOADING may own memory (a half-done or swapped-in prompt); FINISHED may
    still own it until the plan that collects it is committed."""

    WAITING = "waiting"
    LOADING = "loading"
    ARRIVED = "arrived"
    RUNNING = "running"
    HANDOFF = "handoff"
    FINISHED = "finished"


NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.LOADING, Phase.RUNNING, Phase.HANDOFF, Phase.FINISHED}),
    Phase.LOADING: frozenset({Phase.WAITING, Phase.FINISHED}),
    Phase.ARRIVED: frozenset({Phase.WAITING, Phase.RUNNING, Phase.FINISHED}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.FINISHED}),
    Phase.HANDOFF: frozenset({Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class IllegalTransitionError(Exception):
    """A sequence was asked to move where its phase does not lead: a defect of the caller."""


class Sequence:
    """Tokens, cache position and memory of one request in one engine.

    The scheduler that owns it is the only writer. `cached` tokens are committed in its blocks; `len` counts prompt
    and output; `prompt_len` is the client's prompt alone, so a re-routed sequence starts with outputs.

    Drafts (engine runtime notes 1.4, 7.3): `drafts` held to be verified, none or all, pads where none were made;
    `has_draft_info`: the slot `draft_slot` holds what they were drawn from and no step has been planned to read it.
    `accept_rates`: running product of their raw confidences (empty without), `prev_accept_rates` those of the drafts
    before. `schedule_count` and `process_count`: steps planned and committed; they differ by the open ones.
    """

    __slots__ = (
        "accept_rates",
        "arrival",
        "block_table",
        "cached",
        "detail",
        "draft_slot",
        "drafts",
        "has_draft_info",
        "is_constrained",
        "is_reported",
        "is_sharing",
        "is_waiting_for_images",
        "len",
        "next_checkpoint",
        "output",
        "overtaken",
        "phase",
        "prev_accept_rates",
        "process_count",
        "prompt_len",
        "reason",
        "request",
        "request_id",
        "schedule_count",
        "slot",
        "wants_load",
    )

    def __init__(
        self, request: EngineRequest, is_waiting_for_images: bool = False, phase: Phase = Phase.WAITING
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.prompt_len = request.prompt_len
        self.output: list[int] = []  # tokens after request.token_ids
        self.len = len(request.token_ids)
        self.cached = 0
        self.block_table: list[int] = []
        self.slot = 0
        self.drafts: tuple[int, ...] = ()
        self.draft_slot = 0  # 0 = none
        self.has_draft_info = False
        self.accept_rates: tuple[float, ...] = ()
        self.prev_accept_rates: tuple[float, ...] = ()
        self.schedule_count = 0
        self.process_count = 0
        self.phase = phase
        self.reason: FinishReason | None = None
        self.detail = ""
        self.next_checkpoint = 0  # index into request.checkpoints
        self.is_waiting_for_images = is_waiting_for_images
        self.wants_load = request.hit_tokens > 0  # a stored prefix that is not on its way yet
        self.is_constrained = False  # a grammar's state cannot be recomputed, so neither can the sequence
        self.is_sharing = False  # a branch that will write what is still shared: its last block and slot
        self.arrival = 0  # order of submission to this engine
        self.overtaken = 0  # plans that gave memory to a younger prompt
        self.is_reported = False  # its FinishEvent is out

    @property
    def output_tokens(self) -> int:
        """Output tokens of the request over all attempts."""
        return self.len - self.prompt_len

    @property
    def open_steps(self) -> int:
        """Steps that were planned for it and are not committed."""
        return self.schedule_count - self.process_count

    @property
    def is_finished(self) -> bool:
        """Whether it ended; nothing is pushed any more."""
        return self.phase is Phase.FINISHED

    @property
    def is_schedulable(self) -> bool:
        """Whether a prefill step may take it."""
        return self.phase is Phase.WAITING and not (self.is_waiting_for_images or self.wants_load)

    @property
    def holds_memory(self) -> bool:
        """Whether it owns blocks and a slot."""
        return bool(self.block_table)

    def token_slice(self, start: int, end: int) -> tuple[int, ...]:
        """Ids of positions [start, end); costs only what it returns."""
        given = self.request.token_ids
        split = len(given)
        if end <= split:
            return given[start:end]
        if start >= split:
            return tuple(self.output[start - split : end - split])
        return given[start:] + tuple(self.output[: end - split])

    @property
    def output_ids(self) -> tuple[int, ...]:
        """Output tokens of the request over all attempts; costs what it returns."""
        return self.token_slice(self.prompt_len, self.len)

    def image_at(self, cut: int) -> ImageSpan | None:
        """The image that a chunk ending at `cut` would divide; a cut at its first position is legal."""
        for span in self.request.images:
            if span.start < cut < span.end:
                return span
        return None

    def move(self, to: Phase) -> None:
        """Change phase. Raises IllegalTransitionError naming both phases; the sequence is unchanged then."""
        if to not in NEXT[self.phase]:
            legal = sorted(NEXT[self.phase]) or "none"
            raise IllegalTransitionError(f"sequence {self.request_id}: {self.phase} -> {to} is illegal; legal: {legal}")
        self.phase = to

    def finish(self, reason: FinishReason, detail: str = "") -> None:
        """End it. Raises IllegalTransitionError if it has ended already."""
        self.move(Phase.FINISHED)
        self.reason = reason
        self.detail = detail

    def push(self, token_id: int) -> None:
        """Append one output token."""
        self.output.append(token_id)
        self.len += 1

    def restart(self) -> None:
        """Forget what was cached, after its memory was taken away: it waits to be computed again from 0."""
        assert not self.block_table, f"{self.request_id} restarts while it owns blocks {self.block_table}"
        assert not self.slot, f"{self.request_id} restarts while it owns slot {self.slot}"
        assert not self.draft_slot, f"{self.request_id} restarts while it owns draft slot {self.draft_slot}"
        self.move(Phase.WAITING)
        self.cached = 0
        self.drafts = ()
        self.has_draft_info = False
        self.accept_rates = self.prev_accept_rates = ()
        self.schedule_count = self.process_count = 0
