"""Life of one request as a state machine: match, encode, route, reserve, prefill, hand off, decode, end, re-route.

Pure: events and the time in, effects out. Every state but ENDED has an exit by time. What an attempt started is undone
when it is given up, and again when a late answer shows that a peer had acted after all. Tokens emitted are kept: the
next attempt computes prompt + outputs under a new number.
"""

from shoal.balancers.config import NO_GROUP, ROOM
from shoal.balancers.reports import Choice, DecodeNeed, Full, GroupRef, PrefillNeed
from shoal.cluster.core import messages as m
from shoal.cluster.core.asks import Ask
from shoal.cluster.core.attempt import Attempt, checkpoints, effective_hit, reserve, submit
from shoal.cluster.core.encoding import Encoding
from shoal.cluster.core.job import Job
from shoal.cluster.core.output import Output
from shoal.cluster.core.policy import RequestPolicy
from shoal.cluster.core.prompt_scored import EmitScores, PromptScored, ScoreBoard
from shoal.cluster.core.record import Record
from shoal.cluster.core.refusals import RETRY_AFTER_LEAST_US, failure, may_wait, rejection
from shoal.cluster.core.state import AT_ENGINE, State
from shoal.engines.core.request import FinishEvent, FinishReason, Rejected, TokensEvent


class RequestMachine(Record):
    """One request. `on` takes one event and returns what to do; it never raises for late, repeated or lost events."""

    def __init__(self, job: Job, policy: RequestPolicy) -> None:
        super().__init__(job, policy)
        self._job, self._policy = job, policy
        self._state = State.NEW
        self._output = Output(job.request_id, job.sampling, job.end_token_ids)
        self._images = Encoding(job)
        self._failures = 0
        self._was_full = False
        self._store_is_on = policy.keep > 0 and job.prompt_logprobs is None
        self._scores = ScoreBoard(len(job.token_ids), job.prompt_logprobs is not None)
        self._excluded: set[str] = set()  # names of groups that failed this request
        self._crowded: set[str] = set()  # names of COMPLETION groups without room, until the next pause
        self._finish: FinishEvent | None = None  # the engine's end, while tokens before it are missing
        self._ended_at: GroupRef | None = None  # where that end was
        self._cached_tokens: int | None = None

    @property
    def state(self) -> State:
        """Where the request stands."""
        return self._state

    @property
    def attempt(self) -> int:
        """Number of the current attempt."""
        return self._attempt.number

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that nobody computed for this request; None until an engine has begun."""
        return self._cached_tokens

    def on(self, event: m.Event, now_us: int) -> tuple[m.Effect, ...]:
        """Take one event; returns the effects to perform, in order."""
        self._now_us, self._effects = now_us, []
        if isinstance(event, m.Saved):
            self._mark("saved", group=event.group.name, grains=event.grains, anchors=event.anchors)
        elif self._is_over():
            self._late(event)
        else:
            self._live(event)
            if not self._is_over():
                self._expire()
            if not self._is_over():
                self._set_wake()
        return tuple(self._effects)

    def _is_over(self) -> bool:
        return self._state is State.ENDED

    def _live(self, event: m.Event) -> None:
        match event:
            case m.Begin():
                if self._state is State.NEW:
                    self._patience.begin(self._job.deadline_us, self._now_us)
                    self._mark("arrived", tokens=len(self._job.token_ids), images=len(self._job.images))
                    self._start_attempt()
            case m.ClientGone():
                self._end("client gone", None, None)
            case m.GroupLost(group):
                self._on_group_lost(group)
            case m.Tick() | m.Saved():
                self._wake_us = 0
            case m.Forked() | m.NotForked() | m.LeaderGone():
                pass  # a follower's
            case m.CallFailed(number, reason, is_lost):
                if ask := self._asks.drop(number):
                    self._on_call_failed(ask, reason, is_lost)
            case _ if isinstance(event, m.Answer):
                self._on_answer(event)
            case _:
                if self._is_current(event):
                    self._patience.heard(self._now_us)
                    self._on_engine(event)

    def _is_current(self, event: m.EngineEvent) -> bool:
        """From the attempt that runs now, and from a group that takes part in it."""
        attempt = self._attempt
        return self._state in AT_ENGINE and event.attempt == attempt.number and event.group in attempt.groups()

    def _on_answer(self, event: m.Answer) -> None:
        ask = self._asks.take(event.ask)
        if ask is None:
            return self._late(event)
        match event:
            case m.Matched():
                self._on_matched(event)
            case m.Chosen(_, Choice() as choice):
                self._on_choice(ask, choice)
            case m.Chosen(_, Full() as full):
                if may_wait(full, was_failed=self._failures > 0):
                    self._wait(full)
                else:
                    self._fail(failure(full))
            case m.Encoded(_, embedding):
                self._images.add(ask.image_index, embedding)
                self._mark("encoded", image=ask.image_index, group=embedding.group.name)
                if not self._asks.any("choose encoder", "encode"):
                    self._choose()
            case m.Reserved(_, ticket):
                self._attempt.ticket = ticket
                self._mark("reserved", group=ask.group_name)
                self._submit()
            case m.ReserveRefused(_, short):
                self._crowded.add(ask.group_name)
                self._mark("no room", group=ask.group_name, blocks=short.blocks_short, slots=short.slots_short)
                self._retry_room(f"{ask.group_name} has no room")
            case m.Submitted():
                self._mark("accepted", group=ask.group_name)
            case m.SubmitRejected(_, rejected):
                self._on_rejected(ask, rejected)
        return None

    def _on_rejected(self, ask: Ask, rejected: Rejected) -> None:
        if why := rejection(rejected, ask.group_name, self._was_full):
            return self._fail(why)
        self._was_full = True
        self._excluded.add(ask.group_name)
        self._mark("queue full", group=ask.group_name)
        self._give_up_attempt("queue full")
        return self._start_attempt()

    def _on_call_failed(self, ask: Ask, reason: str, is_lost: bool = False) -> None:
        self._mark("call failed", call=ask.kind, reason=reason)
        match ask.kind:
            case "match":  # a store that does not answer is a miss
                self._encode()
            case "choose encoder" | "choose prefill" | "choose decode":
                self._wait(Full(NO_GROUP, f"{ask.kind}: {reason}", self._policy.retry_us))
            case "encode":
                self._encode_again(ask, reason, is_lost)
            case _:
                self._reroute(f"{ask.kind} at {ask.group_name}: {reason}", exclude=ask.group_name)

    def _on_engine(self, event: m.EngineEvent) -> None:
        attempt = self._attempt
        match event:
            case m.PrefillStarted(_, group, hit_tokens, fetch_bytes, fetch_us, memory_bytes):
                if self._cached_tokens is None:
                    self._cached_tokens = hit_tokens
                fetched = {"bytes": fetch_bytes, "fetch_us": fetch_us, "memory_bytes": memory_bytes}
                self._mark("prefill started", group=group.name, hit_tokens=hit_tokens, **fetched)
            case m.ChunkDone(_, group, tokens, cached):
                self._mark("chunk", group=group.name, tokens=tokens, cached=cached)
                if cached >= self._length() and self._state is State.PREFILLING:
                    self._state = State.DECODING if self._policy.normal else State.HANDING_OFF
            case m.Admitted(_, group, handoff_bytes, handoff_us):
                if not attempt.is_admitted:
                    attempt.is_admitted, self._state = True, State.DECODING
                    self._mark("admitted", group=group.name, bytes=handoff_bytes, handoff_us=handoff_us)
            case m.Tokens(_, _, tokens):
                self._on_tokens(tokens)
            case PromptScored(_, _, first, scores):
                if ready := self._scores.take(first, scores):
                    self._effects.append(EmitScores(ready))
                    self._finish_if_complete()
            case m.Ended(_, group, finish):
                self._on_ended(group, finish)
            case m.HandoffFailed(_, group, reason):
                if not attempt.is_admitted:
                    self._reroute(f"hand-off to {group.name}: {reason}", exclude=group.name)
            case m.FetchFailed(_, group, reason):
                self._store_is_on = False  # for this request: a store that has just failed is a miss
                self._reroute(f"fetch at {group.name}: {reason}")
            case m.EmbeddingLost(_, _, image_index):
                lost = self._images.lose(image_index)
                self._reroute(f"embedding of image {image_index} is lost", exclude=lost.group.name if lost else "")

    def _on_tokens(self, tokens: TokensEvent) -> None:
        is_first = len(self._output) == 0
        if ready := self._output.take(tokens):
            if is_first:
                self._mark("first token")
            self._effects.append(m.Emit(ready))
            self._patience.gap(False, self._now_us)
        self._patience.gap(self._output.has_gap or self._finish is not None, self._now_us)
        self._finish_if_complete()

    def _on_ended(self, group: GroupRef, finish: FinishEvent) -> None:
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._finish, self._ended_at = finish, group
            self._patience.gap(True, self._now_us)
            self._finish_if_complete()
        elif finish.reason is FinishReason.REFUSED:
            self._fail(m.Failure(400, "request_rejected", finish.detail or f"{group.name} refused the request"))
        else:  # preempted, an error, or an abort we did not ask for: the tokens are kept and computed on elsewhere
            self._reroute(f"{group.name} ended it: {finish.reason} {finish.detail}".rstrip(), exclude=group.name)

    def _on_group_lost(self, group: GroupRef) -> None:
        for ask in self._asks.at(group, "encode"):
            if self._asks.drop(ask.number):
                self._encode_again(ask, "encoder lost", is_lost=True)
        if not self._is_over() and self._attempt.needs(group):
            self._reroute(f"{group} lost", exclude=group.name)

    def _length(self) -> int:
        return len(self._job.token_ids) + len(self._output)

    def _start_attempt(self) -> None:
        """A new number, a new match: more of the prefix may be stored by now."""
        if (reason := self._output.ending()) is not None:  # all was computed, only the engine's word for it was lost
            if not self._scores.is_complete:
                message = "scores of the prompt were lost with their engine"
                return self._fail(m.Failure(503, "engines_failed", message, None, RETRY_AFTER_LEAST_US))
            finish = FinishEvent(self._job.request_id, reason, len(self._output))
            return self._end("finished", finish, None)
        if len(self._output) and self._job.branches:
            self._effects.append(m.ReleaseFollowers())
        self._attempt = Attempt(self._attempt.number + 1, self._job.request_id)
        limit = len(self._job.token_ids) - self._policy.keep
        if not self._store_is_on or limit < self._policy.grain_tokens:
            return self._encode()
        self._state = State.MATCHING
        ask = self._ask("match", self._policy.match_us, None)
        self._effects.append(m.Match(ask, self._job.token_ids, self._job.images, limit))
        return None

    def _on_matched(self, event: m.Matched) -> None:
        hit = effective_hit(event.anchors, event.matched_tokens, len(self._job.token_ids), self._policy.keep)
        self._attempt.hit_tokens = hit
        if hit:
            self._attempt.prefix = event.prefixes[event.anchors.index(hit)]
        self._mark("matched", matched=event.matched_tokens, hit=hit)
        self._encode()

    def _encode(self) -> None:
        """Ask for every image that the hit does not wholly cover and that is not encoded yet."""
        self._state = State.ENCODING
        for index in self._images.missing(self._attempt.hit_tokens):
            self._choose_encoder(index)
        if not self._asks.any("choose encoder"):
            self._choose()

    def _choose_encoder(self, index: int) -> None:
        need = self._images.need(index, self._attempt.number, self._excluded)
        undo = m.ReleaseChoice("encode", need.reservation)
        ask = self._ask("choose encoder", self._policy.ask_us, undo, index)
        self._effects.append(m.ChooseEncoder(ask, need))

    def _encode_again(self, ask: Ask, reason: str, is_lost: bool) -> None:
        """Another encoder for this image alone; a lost one is no fault of the image, so its next life is waited for."""
        self._excluded.add(ask.group_name)
        if is_lost:
            return self._wait(Full(NO_GROUP, f"{ask.group_name}: {reason}", self._policy.retry_us))
        failures = self._images.fail(ask.image_index)
        if failures < self._policy.encode_attempts_max:
            return self._choose_encoder(ask.image_index)
        message = f"image {ask.image_index} failed {failures} times: {reason}"
        return self._fail(m.Failure(500, "image_encoding_failed", message, f"images[{ask.image_index}]"))

    def _choose(self) -> None:
        """Ask both balancers at once; room at a COMPLETION group is reserved before a PROMPT group computes."""
        self._state = State.ROUTING
        attempt, excluded = self._attempt, tuple(sorted(self._excluded))
        length, hit = self._length(), attempt.hit_tokens
        need = PrefillNeed(attempt.sequence, length - hit, hit, attempt.prefix, self._patience.deadline_us, excluded)
        ask = self._ask("choose prefill", self._policy.ask_us, m.ReleaseChoice("prefill", attempt.sequence))
        self._effects.append(m.ChoosePrefill(ask, need))
        if not self._policy.normal:
            final = len(self._job.token_ids) + self._job.sampling.max_tokens
            without = tuple(sorted(self._excluded | self._crowded))
            ask = self._ask("choose decode", self._policy.ask_us, m.ReleaseChoice("decode", attempt.sequence))
            self._effects.append(m.ChooseDecode(ask, DecodeNeed(attempt.sequence, length, final, without)))

    def _on_choice(self, ask: Ask, choice: Choice) -> None:
        self._mark(ask.kind.replace("choose", "chose"), group=choice.group.name, **choice.costs())
        if ask.kind == "choose encoder":
            index, undo = ask.image_index, m.Abort(choice.group, choice.reservation, "")
            number = self._ask("encode", self._policy.encode_us, undo, index)
            self._effects.append(m.Encode(number, choice.group, choice.reservation, index))
            return
        attempt, policy = self._attempt, self._policy
        if ask.kind == "choose prefill":
            attempt.prefill = choice
        else:
            attempt.decode = choice
        if policy.normal:
            self._submit()
        elif attempt.prefill and attempt.decode:
            self._state = State.RESERVING
            number = self._ask("reserve", policy.ask_us, m.Abort(attempt.decode.group, attempt.sequence, ""))
            self._effects.append(reserve(attempt, number, self._length(), self._patience.deadline_us))

    def _submit(self) -> None:
        attempt, policy = self._attempt, self._policy
        assert attempt.prefill is not None, "submit before a PROMPT or NORMAL group was chosen"
        self._state = State.PREFILLING
        self._patience.at_engine(self._now_us)
        needed = self._images.for_hit(attempt.hit_tokens)
        prompt_len, keep = len(self._job.token_ids), policy.keep if self._store_is_on else 0
        ends = checkpoints(prompt_len, self._length(), attempt.hit_tokens, keep, policy.grain_tokens)
        ask = self._ask("submit", policy.ask_us, m.Abort(attempt.prefill.group, attempt.sequence, ""))
        self._mark("submitted", group=attempt.prefill.group.name, hit=attempt.hit_tokens, tokens=self._length())
        self._effects.append(submit(attempt, ask, self._job, self._output.token_ids, needed, ends))

    def _retry_room(self, reason: str) -> None:
        """Once elsewhere at once, then after a pause: a group refused room that its reports had promised."""
        if self._patience.waits_for_room:
            return self._wait(Full(ROOM, reason, self._policy.retry_us))
        self._give_up_attempt("no room")
        self._patience.start_room(self._now_us)
        return self._start_attempt()

    def _wait(self, full: Full) -> None:
        """Hold nothing and try again after a pause, at most `wait_us` in all."""
        self._give_up_attempt("waiting for room")
        self._crowded.clear()
        is_absent = full.code == NO_GROUP and not self._failures
        if self._patience.pause(full.retry_after_us, self._now_us, is_absent):
            self._state = State.WAITING
            self._mark("waiting", code=full.code, until_us=self._patience.retry_at_us)
        else:
            self._fail(failure(full))

    def _reroute(self, reason: str, exclude: str = "") -> None:
        """Give this attempt up and compute on elsewhere, with the tokens the client already has."""
        self._failures += 1
        if exclude:
            self._excluded.add(exclude)
        self._mark("re-routed", reason=reason, output_tokens=len(self._output))
        self._give_up_attempt(reason)
        if self._failures >= self._policy.attempts_max:
            message = f"given up after {self._failures} attempts: {reason}"
            self._fail(m.Failure(503, "engines_failed", message, None, RETRY_AFTER_LEAST_US))
        else:
            self._start_attempt()

    def _give_up_attempt(self, reason: str) -> None:
        self._asks.drop_all()
        self._effects += self._attempt.undo(reason)
        self._output.forget_early()
        self._patience.leave_engine()
        self._attempt.prefill = self._attempt.decode = None
        self._finish = self._ended_at = None

    def _late(self, event: m.Event) -> None:
        """An answer nobody waits for: whatever it brought is given back."""
        if isinstance(event, m.Answer) and (undo := self._asks.late(event.ask)) is not None:
            self._effects.append(undo)

    def _expire(self) -> None:
        """Everything whose time has come, the request's own deadline first."""
        now_us, patience = self._now_us, self._patience
        if now_us >= patience.deadline_us > 0:
            return self._fail(m.Failure(504, "deadline_exceeded", f"not done within its deadline ({self._state})"))
        for ask in self._asks.overdue(now_us):
            if not self._is_over() and self._asks.drop(ask.number) is not None:
                self._on_call_failed(ask, "no answer in time")
        if self._state is State.WAITING and now_us >= patience.retry_at_us:
            patience.resume()
            self._start_attempt()
        elif self._state in AT_ENGINE and (reason := patience.complaint(len(self._output), now_us)):
            self._reroute(reason)
        return None

    def _finish_if_complete(self) -> None:
        is_told = (finish := self._finish) and len(self._output) >= finish.output_tokens
        if finish and is_told and self._scores.is_complete:
            final = FinishEvent(self._job.request_id, finish.reason, len(self._output), finish.detail)
            self._end("finished", final, None)

    def _fail(self, why: m.Failure) -> None:
        self._end("failed", None, why)

    def _end(self, what: str, finish: FinishEvent | None, why: m.Failure | None) -> None:
        """The one way out: undo what still runs, then say so once."""
        self._asks.drop_all()
        self._effects += self._attempt.undo(what, self._ended_at if finish else None)
        self._state = State.ENDED
        reason = finish.reason if finish else why.code if why else "client"
        self._mark("ended", how=what, reason=str(reason), output_tokens=len(self._output))
        self._effects.append(m.Finish(finish, why, self._cached_tokens or 0))
        if self._job.branches:
            self._effects.append(m.ReleaseFollowers())
