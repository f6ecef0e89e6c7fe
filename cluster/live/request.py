"""One request on its way: its machine, the calls its effects become, and the batches its client gets."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError, RayTaskError
from shoal.balancers.reports import GroupRef
from shoal.cluster.api.jobs import ChatJob, TokenBatch
from shoal.cluster.core import messages as m
from shoal.cluster.core.entrypoint import RequestMachine
from shoal.cluster.core.following import FollowerMachine
from shoal.cluster.core.handoff import Refused
from shoal.cluster.core.job import Embedding, Job
from shoal.cluster.core.names import FIRST_ATTEMPT, engine_id, split_engine_id
from shoal.cluster.core.prompt_scored import EmitScores
from shoal.cluster.core.state import State
from shoal.cluster.core.timeline import RequestTimeline
from shoal.cluster.live.clock import now_us
from shoal.cluster.live.names import DECODE_BALANCER, ENCODE_BALANCER, INDEX, PREFILL_BALANCER
from shoal.cluster.live.submission import ImageRef, Origin, Submission, TicketOffer
from shoal.engines.core.request import Branch, NoRoom, Rejected, TokensEvent
from shoal.kvstore.core.chain import chain_keys

if TYPE_CHECKING:
    from shoal.cluster.live.entrypoint import EntrypointService

log = logging.getLogger(__name__)

BALANCERS = {"encode": ENCODE_BALANCER, "prefill": PREFILL_BALANCER, "decode": DECODE_BALANCER}
PATCHES_PER_TOKEN = 9  # the aligner folds 3 x 3 patches into one token


class RequestRun:
    """Feeds one machine and performs what it says. Every call is bounded by the machine's own ask limits."""

    def __init__(self, service: "EntrypointService", job: ChatJob, eos_token_id: int) -> None:
        self._service = service
        self._chat = job
        self._canvases = {span.digest: canvas for span, canvas in zip(job.spans, job.canvases, strict=True)}
        kind = FollowerMachine if job.leader else RequestMachine
        self._machine = kind(_job(job, eos_token_id), service.spec.policy)
        self._wake: asyncio.TimerHandle | None = None
        self._pending: list[TokensEvent] = []
        self._finish: m.Finish | None = None
        self.batches: asyncio.Queue[TokenBatch | m.Failure] = asyncio.Queue()

    def feed(self, event: m.Event) -> None:
        """Give the machine one event and perform its effects; tokens wait for `flush` or the end.

        Whatever goes wrong in here ends this request alone, not the loop that brought the event.
        """
        try:
            for effect in self._machine.on(event, now_us()):
                self._perform(effect)
        except Exception as error:
            log.exception("%s: %s could not be taken", self._chat.request_id, type(event).__name__)
            message = f"internal error ({type(error).__name__}); the entrypoint's log has it"
            self.batches.put_nowait(m.Failure(500, "internal_error", message))

    def flush(self) -> None:
        """Pass on the tokens gathered since the last call, in one batch, with the end if it has come."""
        if not self._pending and self._finish is None:
            return
        finish, events, self._pending = self._finish, self._pending, []
        self._finish = None
        if finish is not None and finish.failure is not None:
            self.batches.put_nowait(finish.failure)
            return
        ended = finish.finish if finish is not None else None
        self.batches.put_nowait(
            TokenBatch(
                token_ids=tuple(token_id for event in events for token_id in event.token_ids),
                logprobs=tuple(one for event in events for one in event.logprobs),
                finish_reason=ended.reason if ended else None,
                cached_tokens=finish.cached_tokens if finish is not None else self._machine.cached_tokens,
                detail=ended.detail if ended else "",
            )
        )

    def close(self) -> None:
        """No more ticks: the machine has ended."""
        if self._wake is not None:
            self._wake.cancel()

    @property
    def is_over(self) -> bool:
        """Whether the machine has ended."""
        return self._machine.state is State.ENDED

    def timeline(self) -> RequestTimeline:
        """What has happened so far."""
        return self._machine.timeline()

    # ------------------------------------------------------------ effects

    def _perform(self, effect: m.Effect) -> None:
        match effect:
            case m.Emit(tokens):
                self._pending.append(tokens)
            case EmitScores(scores):
                self.batches.put_nowait(TokenBatch(prompt_scores=scores))
            case m.Finish():
                self._finish = effect
                self.flush()
            case m.WakeAt(at_us):
                if self._wake is not None:
                    self._wake.cancel()
                loop = asyncio.get_running_loop()
                self._wake = loop.call_later(max(0.0, (at_us - now_us()) / 1e6), self._tick)
            case m.Match(ask):
                self._call(ask, self._match(effect))
            case m.ChooseEncoder(ask, need):
                self._call(ask, self._choose(ask, ENCODE_BALANCER, need))
            case m.ChoosePrefill(ask, need):
                self._call(ask, self._choose(ask, PREFILL_BALANCER, need))
            case m.ChooseDecode(ask, need):
                self._call(ask, self._choose(ask, DECODE_BALANCER, need))
            case m.Encode(ask):
                self._call(ask, self._encode(effect))
            case m.Reserve(ask):
                self._call(ask, self._reserve(effect))
            case m.Submit(ask):
                self._call(ask, self._submit(effect))
            case m.Abort(group, sequence, reason):
                self._tell(self._service.directory.handle(group), "abort", sequence, reason)
            case m.ReleaseFollowers():
                self._service.release_followers(self._chat)
            case m.ReleaseChoice(balancer, reservation):
                self._tell(self._service.directory.only(BALANCERS[balancer]), "release", reservation)

    def _tick(self) -> None:
        self._wake = None
        self.feed(m.Tick())
        self.flush()

    def _call(self, ask: int, work: Awaitable[m.Event]) -> None:
        self._service.tasks.spawn(self._answer(ask, work))

    async def _answer(self, ask: int, work: Awaitable[m.Event]) -> None:
        """Feed a call's answer; whatever went wrong with the call is CallFailed, once."""
        try:
            event = await work
        except RayTaskError as error:
            event = m.CallFailed(ask, str(error.cause)[:500])
        except (RayError, LookupError) as error:
            what = str(error).partition("\n")[0]  # Ray goes on with a page about the actor
            event = m.CallFailed(ask, f"{type(error).__name__}: {what}"[:500], is_lost=True)
        except Exception as error:  # our own mistake must not leave the machine waiting for its deadline
            log.exception("call %d of %s failed", ask, self._chat.request_id)
            event = m.CallFailed(ask, f"internal: {type(error).__name__}")
        self.feed(event)
        self.flush()

    def _tell(self, handle: Any | None, method: str, *args: object) -> None:
        """A message nobody waits for: its receiver may be gone, and then there is nothing to do there."""
        if handle is not None:
            try:
                getattr(handle, method).remote(*args)
            except RayError:
                log.debug("%s: receiver is gone", method)

    async def _match(self, effect: m.Match) -> m.Event:
        grain = self._service.spec.cluster.model.block_tokens
        namespace = self._service.spec.namespace(self._chat.cache_salt)
        keys = chain_keys(namespace, effect.token_ids, effect.images, grain)
        index = self._role(INDEX)
        found = await index.match.remote(keys, effect.limit_tokens, self._chat.traffic_class.value)
        if not found.anchor_grain:
            return m.Matched(effect.ask, found.grains_matched * grain)
        anchor = found.anchor_grain
        return m.Matched(effect.ask, found.grains_matched * grain, (anchor * grain,), (keys[anchor - 1],))

    async def _choose(self, ask: int, role: str, need: object) -> m.Event:
        return m.Chosen(ask, await self._role(role).choose.remote(need))

    async def _encode(self, effect: m.Encode) -> m.Event:
        span = self._chat.spans[effect.image_index]
        handle = self._member(effect.group)
        # Not on the loop: while the object store is full, `put` waits until something has been spilled.
        canvas = await asyncio.to_thread(self._service.put, self._canvases[span.digest])
        [rows] = await handle.encode.remote(effect.sequence, span.digest, _patches(span.length), canvas)
        return m.Encoded(effect.ask, Embedding(effect.image_index, span.digest, effect.group, rows))

    async def _reserve(self, effect: m.Reserve) -> m.Event:
        handle = self._member(effect.group)
        answer = await handle.reserve.remote(
            self._origin(effect.sequence), effect.sequence, effect.source, effect.tokens, effect.deadline_us
        )
        if isinstance(answer, NoRoom):
            return m.ReserveRefused(effect.ask, answer)
        if isinstance(answer, Rejected):
            return m.SubmitRejected(effect.ask, answer)
        if isinstance(answer, Refused):
            return m.CallFailed(effect.ask, answer.reason)
        return m.Reserved(effect.ask, answer)

    async def _submit(self, effect: m.Submit) -> m.Event:
        handle = self._member(effect.group)
        offer = effect.ticket if isinstance(effect.ticket, TicketOffer) else None
        images = tuple(ImageRef(e.digest, e.image_index, e.rows) for e in effect.embeddings)
        sequence = effect.request.request_id
        answer = await handle.submit.remote(Submission(effect.request, self._origin(sequence), offer, images))
        if isinstance(answer, Rejected):
            return m.SubmitRejected(effect.ask, answer)
        if isinstance(answer, Refused):
            return m.CallFailed(effect.ask, answer.reason)
        return m.Submitted(effect.ask)

    def _origin(self, sequence: str) -> Origin:
        request_id, attempt = split_engine_id(sequence)
        chat = self._chat
        return Origin(self._service.name, request_id, attempt, chat.traffic_class.value, chat.cache_salt)

    def _role(self, role: str) -> Any:
        if (handle := self._service.directory.only(role)) is None:
            raise LookupError(f"no {role} is ready")
        return handle

    def _member(self, group: GroupRef) -> Any:
        if (handle := self._service.directory.handle(group)) is None:
            raise LookupError(f"{group} is gone")
        return handle


def _patches(span_tokens: int) -> int:
    """About how many vision patches a span stands for, for queue estimates."""
    return span_tokens * PATCHES_PER_TOKEN


def _job(chat: ChatJob, eos_token_id: int) -> Job:
    return Job(
        request_id=chat.request_id,
        token_ids=chat.token_ids,
        sampling=chat.sampling,
        images=chat.spans,
        patches=tuple(_patches(span.length) for span in chat.spans),
        end_token_ids=(eos_token_id,),
        traffic_class=chat.traffic_class.value,
        arrival_us=chat.arrival_us,
        deadline_us=chat.deadline_us or 0,
        grammar=chat.grammar,
        priority=chat.priority,
        user=chat.user,
        prompt_logprobs=chat.prompt_logprobs,
        is_urgent=chat.is_urgent,
        branches=tuple(Branch(engine_id(name, FIRST_ATTEMPT), seed) for name, seed in chat.followers),
    )
