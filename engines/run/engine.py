"""Engine: one rank's scheduler, runner and memory behind plain verbs; no clock, no threads, no network.

The caller's loop is `step(now_us)` while `has_work`, everything else moves requests in and out between steps. A
request may wait before it runs: for rows of its images (`image_ready`), for its grammar (`grammar_ready`) and for a
store hit (`load_hit`).
What is wrong with one request (rows or payloads of another model, ids outside the vocabulary, logits that are not
finite) ends or rejects that request; an exception out of `step` means that an invariant broke and the memory can no
longer be trusted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.engines.config import EngineConfig, Role
from shoal.engines.core.grammar.matcher import Grammar
from shoal.engines.core.plan import (
    Accepted,
    Ballot,
    Branched,
    Event,
    LoadTarget,
    Plan,
    PromptDone,
    Reservation,
    StepKind,
    StepResult,
)
from shoal.engines.core.request import EngineRequest, FinishEvent, NoRoom, Rejected, TokensEvent, TokenState
from shoal.engines.core.scheduler import StepScheduler
from shoal.engines.core.vote import decide
from shoal.engines.ports import GrainMemory, StepRunner
from shoal.engines.run.constraints import Constraints
from shoal.engines.run.inputs import ImageRows, image_objection
from shoal.engines.run.output import (
    AnchorToSave,
    Capacity,
    GrainToSave,
    Progress,
    PromptReady,
    StepOutput,
    anchors_of,
    chunk_ready,
    draft_counts,
    draft_totals,
    grains_of,
    progress,
)
from torch import Tensor


@dataclass(slots=True)
class Held:
    """A request this engine knows: digests still missing, and whether its grammar and a failed hit wait for them."""

    request: EngineRequest
    missing: set[bytes] = field(default_factory=set)
    is_miss_pending: bool = False
    wants_grammar: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether everything that must be brought to it is here."""
        return not self.missing and not self.wants_grammar


class Engine:
    """One rank serving one role. `saves_grains`: copy out grains and anchors as they complete."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: StepScheduler,
        runner: StepRunner,
        memory: GrainMemory,
        images: ImageRows,
        saves_grains: bool = False,
        constraints: Constraints | None = None,
    ) -> None:
        self.config = config
        self._scheduler = scheduler
        self._runner = runner
        self._memory = memory
        self._images = images
        self._saves_grains = saves_grains
        self._constraints = Constraints() if constraints is None else constraints
        self._held: dict[str, Held] = {}
        self._last_plan: Plan | None = None
        self._branches_begun: tuple[Event, ...] = ()  # by an admission, to be told with the next step
        self._is_stuck = False  # the last step changed nothing, and nothing came in since

    def submit(self, request: EngineRequest, now_us: int) -> Accepted | Rejected:
        """Queue a request. It runs when its hit is loaded, its grammar is ready and so are the images not wholly
        inside the hit."""
        self._is_stuck = False
        if reason := self._runner.objection(request) or image_objection(request):
            return Rejected(request.request_id, reason)
        missing = {s.digest for s in request.images if s.end > request.hit_tokens}
        held = Held(request, missing, wants_grammar=request.grammar is not None)
        answer = self._scheduler.submit(request, now_us, images_pending=not held.is_complete)
        if isinstance(answer, Accepted):
            self._held[request.request_id] = held
        return answer

    def image_ready(self, request_id: str, digest: bytes, rows: Tensor) -> bool:
        """Give the rows [span length, hidden] of one image; False if no such request waits for it (late or ended).

        Rows that do not fit the span, or are not finite, end the request with an error and are not kept.
        """
        self._is_stuck = False
        held = self._held.get(request_id)
        if held is None or digest not in held.missing:
            return False
        span = next(s for s in held.request.images if s.digest == digest)
        if reason := self._images.add(request_id, span, rows):
            self._scheduler.fail(request_id, reason)
            return False
        held.missing.remove(digest)
        self._run_if_complete(held)
        return True

    def grammar_ready(self, request_id: str, grammar: Grammar) -> bool:
        """Give a request its compiled grammar, at its beginning; False if no such request waits for it."""
        self._is_stuck = False
        held = self._held.get(request_id)
        if held is None or not held.wants_grammar:
            return False
        self._constraints.add(held.request, grammar)
        held.wants_grammar = False
        self._run_if_complete(held)
        return True

    def refuse(self, request_id: str, detail: str) -> bool:
        """End one request that no engine can serve (its grammar is none); False if it is unknown or has ended."""
        self._is_stuck = False
        return self._scheduler.refuse(request_id, detail)

    def fail(self, request_id: str, detail: str) -> bool:
        """End one request with an error (an image that cannot be encoded); False if it is unknown or has ended."""
        self._is_stuck = False
        return self._scheduler.fail(request_id, detail)

    def abort(self, request_id: str) -> bool:
        """End one request at the client's wish; False if it is unknown, has ended or waits for its hand-off."""
        self._is_stuck = False
        return self._scheduler.abort(request_id)

    def loads_wanted(self) -> tuple[str, ...]:
        """Requests whose store hit is to be brought in, in queue order."""
        return tuple(i for i in self._scheduler.loads_wanted() if not self._held[i].is_miss_pending)

    def load_hit(self, request_id: str, grains: Sequence[bytes], anchor: bytes) -> LoadTarget | NoRoom | Rejected:
        """Write a hit's grains and anchor into the request's memory and let it run.

        NoRoom changes nothing: try again after a step. Rejected: no such hit is wanted, or these are not its bytes; a
        request that waits for its hit still does, until `hit_missed` or an abort.
        """
        self._is_stuck = False
        held = self._held.get(request_id)
        wanted = held.request.hit_tokens // self.config.cache.block_tokens if held else 0
        if len(grains) != wanted:
            return Rejected(request_id, f"its hit takes {wanted} grains, got {len(grains)}: a shorter hit is a miss")
        target = self._scheduler.load_hit(request_id)
        if not isinstance(target, LoadTarget):
            return target
        try:
            for block, payload in zip(target.blocks, grains, strict=True):
                self._memory.write_block(block, payload)
            self._memory.write_stored(target.slot, anchor)
        except ValueError as error:
            return Rejected(request_id, str(error))
        self._scheduler.hit_loaded(request_id, target.tokens)
        return target

    def hit_missed(self, request_id: str) -> tuple[bytes, ...]:
        """The store could not deliver: compute from the start. Returns digests of images now needed as well."""
        self._is_stuck = False
        held = self._held.get(request_id)
        if held is None:
            return ()
        assert not held.is_miss_pending, f"{request_id}: its hit was reported as missed before"
        held.missing |= {s.digest for s in held.request.images if not self._images.has(request_id, s.digest)}
        held.is_miss_pending = True
        needed = tuple(s.digest for s in held.request.images if s.digest in held.missing)
        self._run_if_complete(held)
        return needed

    def reserve(self, request_id: str, tokens: int, now_us: int) -> Reservation | NoRoom | Rejected:
        """Hold blocks and a slot for a prompt of `tokens` tokens that another engine computes."""
        return self._scheduler.reserve(request_id, tokens, now_us)

    def cancel(self, reservation: Reservation) -> bool:
        """Give a reservation back; the caller knows that nobody writes into it any more."""
        self._is_stuck = False
        return self._scheduler.cancel(reservation)

    def admit(
        self, reservation: Reservation, state: TokenState, now_us: int, grammar: Grammar | None = None
    ) -> Accepted | Rejected:
        """Start decoding a sequence whose bytes have arrived in the reserved memory, with its grammar if it has one."""
        self._is_stuck = False
        request = state.request
        if reason := self._runner.objection(request):
            return Rejected(request.request_id, reason)
        if (request.grammar is None) != (grammar is None):
            return Rejected(request.request_id, "a constrained request is admitted with its compiled grammar")
        answer = self._scheduler.admit(reservation, state, now_us)
        if isinstance(answer, Accepted):
            self._held[request.request_id] = Held(request)
            if grammar is not None:
                self._constraints.add(request, grammar)
            begun = self._scheduler.begin_branches(state)
            self._hold_branches(begun)
            self._branches_begun += begun
        return answer

    def release(self, request_id: str) -> bool:
        """Free a prompt that was handed off (or will never be); False if there is none."""
        self._is_stuck = False
        is_released = self._scheduler.release(request_id)
        if is_released:
            self._forget(request_id)
        return is_released

    def ballot(self, now_us: int) -> Ballot:
        """What this rank would like, for a vote among the ranks of a group."""
        return self._scheduler.ballot(now_us)

    def step(self, now_us: int, verdict: StepKind | None = None) -> StepOutput:
        """Plan, compute and commit one step. A rank alone votes for itself (`verdict` None).

        What is returned holds copies: it stays valid whatever the next step does.
        """
        if verdict is None:
            verdict = decide((self._scheduler.ballot(now_us),))
        plan = self._last_plan = self._scheduler.plan(verdict, now_us)
        result = self._runner.run(plan)
        made = progress(plan, result)
        grains, anchors = self._copy_out(plan, made)
        committed = self._scheduler.commit(plan, result, now_us)
        self._hold_branches(committed)
        events, self._branches_begun = (*self._branches_begun, *committed), ()
        parts = {p.item.request_id: p for p in made}
        verified, accepted = draft_counts(plan, result)
        output = StepOutput(
            step=plan.step,
            kind=plan.kind,
            rows=plan.rows,
            events=tuple(e for e in events if isinstance(e, TokensEvent | FinishEvent)),
            chunks=tuple(chunk_ready(p, self.config.cache.block_tokens) for p in made if plan.kind is StepKind.PREFILL),
            prompts=tuple(
                self._prompt_ready(parts[e.request_id], e, result) for e in events if isinstance(e, PromptDone)
            ),
            grains=grains,
            anchors=anchors,
            reasons=plan.reasons,
            verified=verified,
            accepted=accepted,
            drafts=draft_totals(plan, result),
            branched=tuple(e for e in events if isinstance(e, Branched)),
            prompt_scores=tuple(scores for scores in result.prompt_scores if scores.request_id in parts),
        )
        self._is_stuck = not (plan.items or plan.finished or plan.dropped or plan.preempted) and self._counts_no_steps
        self._end_unrepeatable(plan.preempted)
        for event in output.events:
            if isinstance(event, FinishEvent):
                self._forget(event.request_id)
        return output

    def step_took(self, took_us: float) -> None:
        """How long the last `step` took, by the caller's clock: the prefill time budget is kept by it."""
        if self._last_plan is not None:
            self._scheduler.measured(self._last_plan, took_us)

    @property
    def has_work(self) -> bool:
        """Whether a step may compute or report something, so that a loop may sleep until the next call if not.

        False also while requests only wait: for images, a hit, a hand-off, or memory that others hold. A rank of a
        group steps on as long as any rank has work.
        """
        return self._scheduler.has_work and not self._is_stuck

    def capacity(self) -> Capacity:
        """Free memory and queued work, now."""
        ledger = self._scheduler.ledger
        return Capacity(
            blocks_free=ledger.blocks.free_count,
            blocks_count=ledger.blocks.count - 1,
            slots_free=ledger.slots.free_count,
            slots_count=ledger.slots.count - 1,
            running=len(ledger.running) + len(ledger.arrived),
            context_tokens=sum(s.len for s in ledger.running),
            reserved=len(ledger.reservations),
            waiting=len(ledger.waiting),
            waiting_tokens=sum(s.len for s in ledger.waiting),
            uncached_tokens=sum(s.len - max(s.cached, s.request.hit_tokens) for s in ledger.waiting),
        )

    def check(self) -> None:
        """Assert every invariant of the scheduler, and that image rows and grammars belong to known requests."""
        self._scheduler.check()
        known = sum(len({s.digest for s in h.request.images}) for h in self._held.values())
        assert len(self._images) <= known, f"{len(self._images)} image rows are held, {known} images are known"
        grammars = [i for i, h in self._held.items() if h.request.grammar is not None and not h.wants_grammar]
        assert len(self._constraints) == len(grammars), f"{len(self._constraints)} grammars are held for {grammars}"

    @property
    def _counts_no_steps(self) -> bool:
        """Whether a step without work leaves the next one the same: not so where idle steps count towards a vote."""
        return self.config.role is not Role.NORMAL or self._scheduler.rules.vote_when_idle

    def _run_if_complete(self, held: Held) -> None:
        if not held.is_complete:
            return
        request_id = held.request.request_id
        self._scheduler.set_schedulable(request_id)
        if held.is_miss_pending:
            held.is_miss_pending = False
            self._scheduler.hit_loaded(request_id, 0)

    def _copy_out(
        self, plan: Plan, made: tuple[Progress, ...]
    ) -> tuple[tuple[GrainToSave, ...], tuple[AnchorToSave, ...]]:
        """Copies for the store, taken before the commit may hand the memory to another sequence."""
        if not self._saves_grains:
            return (), ()
        block_tokens = self.config.cache.block_tokens
        return grains_of(made, self._memory, block_tokens), anchors_of(made, plan.kind, self._memory, block_tokens)

    def _hold_branches(self, events: Sequence[Event]) -> None:
        """Know the branches that have begun; an ended one is forgotten with its end, as any request."""
        for event in events:
            if isinstance(event, Branched) and not event.refusal:
                request = event.request
                self._held[request.request_id] = Held(request)
                self._constraints.branch(event.parent_id, request)

    def _prompt_ready(self, done: Progress, event: PromptDone, result: StepResult) -> PromptReady:
        """A prompt to hand off, with those of its branches that go on."""
        request = self._held[event.request_id].request
        firsts = next((firsts for name, firsts in result.branched if name == event.request_id), ())
        going = tuple(first for first in firsts if first.request_id not in self._held)
        state = TokenState(request, (*request.token_ids, event.first_token), going)
        assert state.cached == event.cached == done.after, (
            f"{event.request_id}: {state.cached} tokens to hand off, {event.cached} cached, {done.after} computed"
        )
        return PromptReady(event.request_id, state, done.blocks, done.item.slot)

    def _end_unrepeatable(self, preempted: tuple[str, ...]) -> None:
        """A preempted prompt is computed again from its start: impossible without the images that its hit spared."""
        for request_id in preempted:
            spans = self._held[request_id].request.images
            if any(not self._images.has(request_id, s.digest) for s in spans):
                self._scheduler.fail(request_id, "preempted, and images inside its hit are not here: submit it again")

    def _forget(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            self._images.drop(request_id, held.request.images)
            self._constraints.drop(request_id)
