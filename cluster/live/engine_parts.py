"""What one engine actor consists of, wired: model, steps, hand-off sides, store client, letters, reports."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from shoal.balancers.reports import GroupRef
from shoal.cluster.core.handoff import Ended, Group, Refused, Ticket, TicketState
from shoal.cluster.core.messages import (
    Admitted,
    EmbeddingLost,
    Event,
    FetchFailed,
    HandoffFailed,
    Known,
    PrefillStarted,
    Saved,
)
from shoal.cluster.core.names import engine_id, split_engine_id
from shoal.cluster.core.target_ledger import SOURCE_ABORTED, Ask
from shoal.cluster.live.clock import monotonic_s, now_us
from shoal.cluster.live.handoff_bytes import HandoffBytes
from shoal.cluster.live.handoff_source import HandoffSource, SourcePorts
from shoal.cluster.live.handoff_target import HandoffTarget, TargetPorts
from shoal.cluster.live.images_in import image_rows
from shoal.cluster.live.loader import Loaded, Loader, NotLoaded
from shoal.cluster.live.names import COMPLETION, PROMPT, role_of
from shoal.cluster.live.outbox import Letter, Outbox
from shoal.cluster.live.pace import Pace
from shoal.cluster.live.prefix import Prefix
from shoal.cluster.live.rates import DraftCounts, Rate
from shoal.cluster.live.reporting import Reports
from shoal.cluster.live.saver import Saver
from shoal.cluster.live.sequences import Sequences
from shoal.cluster.live.spec import ClusterSpec
from shoal.cluster.live.step_loop import StepLoop
from shoal.cluster.live.store_ports import store_client
from shoal.cluster.live.submission import Origin, Submission, TicketOffer
from shoal.cluster.live.surroundings import Members
from shoal.cluster.live.tasks import Tasks
from shoal.engines.core.grammar.spec import GrammarSpec
from shoal.engines.core.plan import Accepted, LoadTarget, Reservation
from shoal.engines.core.request import EngineRequest, NoRoom, Rejected, TokensEvent, TokenState
from shoal.engines.grammar.pool import GrammarPool, no_grammar
from shoal.engines.run.output import StepOutput

if TYPE_CHECKING:
    from shoal.cluster.live.engine_build import Built

log = logging.getLogger(__name__)

BROKEN_EXIT = 71
KNOWN_S = 2.0
STEP_SLOW_S = 30.0


class EngineParts:
    """One open engine. Owned by the actor's asyncio loop; the engine itself is touched only in the step loop."""

    def __init__(
        self,
        spec: ClusterSpec,
        group: GroupRef,
        directory: Members,
        built: "Built",
        end: Callable[[int], object],
        pace: Pace,
    ) -> None:
        self._spec, self._group, self._directory, self._end = spec, group, directory, end
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks()
        self._rate, self._drafts = Rate(), DraftCounts()
        self._known_s: dict[str, float] = {}
        self.implementations = built.implementations
        self._balance = built.balance
        self.outbox = Outbox()
        self.sequences = Sequences(group, self.outbox)
        self._reports = Reports(spec, group, self.sequences)
        self._grammars = GrammarPool(built.compiler.compile if built.compiler else no_grammar)
        self.steps = StepLoop(built.engine, self._on_output, end, pace)
        self._transfer = built.transfer
        self.metadata = built.transfer.metadata() if built.transfer else b""
        self._layout = layout = HandoffBytes(
            built.memory.block_layout, built.memory.slot_layout, dict(built.memory.buffers())
        )
        self.source = self._make_source(layout) if role_of(group) == PROMPT else None
        self.target = self._make_target(layout) if role_of(group) == COMPLETION else None
        self._grain_tokens = spec.cluster.model.block_tokens
        self._saver: Saver | None = None
        self._loader: Loader | None = None
        if spec.cluster.store is not None:
            client, missing = store_client(spec, directory, group)
            self._saver = Saver(client, missing, self._on_saved)
            self._loader = Loader(client, self.steps, self._grain_tokens, self._on_loaded)

    # ------------------------------------------------------------ requests

    async def submit(self, submission: Submission) -> Rejected | Refused | None:
        """Take a sequence: its ticket first, then the queue, then what it waits for."""
        request, origin = submission.request, submission.origin
        sequence = request.request_id
        if sequence in self.sequences:
            return None
        if (offer := submission.offer) is not None:
            assert self.source is not None, f"{self._group} got a ticket but hands nothing off"
            if reason := self.source.accept(sequence, offer.ticket, offer.metadata):
                return Refused(reason)
        self.sequences.expect(sequence, origin)
        self.sequences.begin(sequence, self._prefix(request, origin), request.hit_tokens)
        answer = await self.steps.call(lambda engine: engine.submit(request, now_us()))
        if isinstance(answer, Rejected):
            self.sequences.forget(sequence)  # first, so that the answer is all the entrypoint hears of it
            if self.source is not None:
                self.source.abort(sequence, answer.reason)
            return answer
        if sequence not in self.sequences:
            return None  # aborted, or ended, while it was submitted
        for image in submission.images:
            self._tasks.spawn(self._image_in(sequence, origin, image))
        if request.grammar is not None:
            self._tasks.spawn(self._grammar_in(sequence, request.grammar))
        if request.hit_tokens:
            self._tasks.spawn(self._load(request, origin))
        else:
            self.letter(origin, PrefillStarted(origin.attempt, self._group))
        return None

    async def reserve(
        self, origin: Origin, sequence: str, source: GroupRef, tokens: int, deadline_us: int
    ) -> TicketOffer | NoRoom | Rejected | Refused:
        """Memory for a sequence to be handed off to this engine, as a ticket; asked again, the same ticket."""
        assert self.target is not None, f"{self._group} takes no hand-offs: it is a {role_of(self._group)} group"
        expected = self._layout.expected(tokens)
        peer = Group(source.name, source.epoch)
        ask = Ask(origin.request_id, origin.attempt, peer, expected, deadline_us)
        ticket = await self.target.reserve(ask, sequence, tokens)
        if isinstance(ticket, NoRoom | Rejected | Refused):
            return ticket
        self.sequences.expect(sequence, origin)
        return TicketOffer(ticket, self.metadata)

    async def abort(self, sequence: str, reason: str) -> None:
        """End a sequence wherever it is: hand-off, load, scheduler. Who asks for it need not be told."""
        request_id, attempt = split_engine_id(sequence)
        self.sequences.forget(sequence)
        held = False  # by a hand-off, which frees the memory when no write can touch it any more
        if self.source is not None:
            self.source.abort(sequence, reason)
            held = self.source.has(sequence)
        if self.target is not None:
            held = self.target.abort(request_id, attempt, reason)
        if self._loader is not None:
            self._loader.cancel(sequence)
        if not held:
            await self.steps.call(lambda engine: (engine.abort(sequence), engine.release(sequence)))

    async def _load(self, request: EngineRequest, origin: Origin) -> None:
        sequence = request.request_id
        if (prefix := self.sequences.prefix(sequence)) is None:
            return  # aborted in the meantime
        assert self._loader is not None, "a hit was promised by a cluster without a store"
        try:
            loaded = await self._loader.load(sequence, prefix.keys, request.hit_tokens)
        except Exception as error:  # the request must not wait for a load that never ends
            log.exception("%s: its hit could not be loaded", sequence)
            loaded = NotLoaded(f"internal: {type(error).__name__}")
        if sequence not in self.sequences:
            return
        if not isinstance(loaded, Loaded):
            self.letter(origin, FetchFailed(origin.attempt, self._group, loaded.reason))
            await self.abort(sequence, f"hit not loaded: {loaded.reason}")
            return
        sizes = (loaded.target.tokens, loaded.fetch_bytes, loaded.fetch_us, loaded.memory_bytes)
        self.letter(origin, PrefillStarted(origin.attempt, self._group, *sizes))

    def _on_loaded(self, target: LoadTarget) -> None:
        if self.source is not None:
            self.source.blocks_ready(target.request_id, 0, target.blocks)

    async def _image_in(self, sequence: str, origin: Origin, image: Any) -> None:
        rows = await image_rows(image, origin, self._group)
        if isinstance(rows, EmbeddingLost):
            self.letter(origin, rows)
            await self.abort(sequence, "an embedding is lost")
            return
        await self.steps.call(lambda engine: engine.image_ready(sequence, image.digest, rows))

    async def _grammar_in(self, sequence: str, spec: GrammarSpec) -> None:
        """Compile beside the steps; a text that is no grammar, or takes too long, ends its request alone."""
        grammar = await self._grammars.compile(spec)
        if isinstance(grammar, str):
            await self.steps.call(lambda engine: engine.refuse(sequence, grammar))
        else:
            await self.steps.call(lambda engine: engine.grammar_ready(sequence, grammar))

    def _prefix(self, request: EngineRequest, origin: Origin) -> Prefix | None:
        if self._spec.cluster.store is None:
            return None
        return Prefix(self._spec.namespace(origin.salt), request.token_ids, request.images, self._grain_tokens)

    # ------------------------------------------------------------ letters

    def letter(self, origin: Origin, event: Event) -> None:
        """Post one event to the request's entrypoint."""
        self.outbox.post(origin.entrypoint, (origin.request_id, event))

    async def poll(self, entrypoint: str, after: int, wait_s: float) -> tuple[int, list[Letter]]:
        """Letters; after a quiet `wait_s`, and now and then among others, a word about each sequence still here."""
        number, letters = await self.outbox.poll(entrypoint, after, wait_s)
        if letters and monotonic_s() - self._known_s.get(entrypoint, 0.0) < KNOWN_S:
            return number, letters
        if self.steps.step_s > STEP_SLOW_S:  # it may never end: a request must not be told that all is well
            return number, letters
        self._known_s[entrypoint] = monotonic_s()
        origins = [self.sequences.origin(name) for name in self.sequences.of(entrypoint)]
        return number, [*letters, *((o.request_id, Known(o.attempt, self._group)) for o in origins if o is not None)]

    def _on_output(self, output: StepOutput) -> None:
        """What one step produced, on the asyncio loop."""
        self._rate.add(output.rows)
        self._drafts.add(output.verified, output.accepted, output.drafts)
        if self._saver is not None and (output.grains or output.anchors):
            self._saver.save(self.sequences.objects(output))
        if self.source is not None:
            for chunk in output.chunks:
                self.source.blocks_ready(chunk.request_id, chunk.first_block, chunk.blocks)
            for prompt in output.prompts:
                self.source.prompt_ready(prompt.request_id, prompt)
        for branched in output.branched:
            if not self.sequences.post_branched(branched, self._prefix):
                self.steps.post(methodcaller("abort", branched.request_id))
        ended = self.sequences.post_step(output)
        for sequence in ended:
            if self.source is not None:
                self.source.abort(sequence, "ended before its hand-off")

    def _on_saved(self, origin: Origin, grains: int, anchors: int) -> None:
        saved = Saved(origin.attempt, self._group, grains, anchors)
        self._loop.call_soon_threadsafe(self.letter, origin, saved)

    # ------------------------------------------------------------ hand-off

    def _make_source(self, layout: HandoffBytes) -> HandoffSource:
        settings = self._spec.cluster.transfer
        assert self._transfer is not None
        assert settings is not None
        ports = SourcePorts(self._transfer, self._send, self._release, self._ticket_ended, self._on_broken)
        return HandoffSource(Group(self._group.name, self._group.epoch), layout, ports, settings.checksum)

    def _make_target(self, layout: HandoffBytes) -> HandoffTarget:
        settings = self._spec.cluster.transfer
        assert self._transfer is not None
        assert settings is not None
        ports = TargetPorts(
            transfer=self._transfer,
            send=self._send,
            reserve=lambda sequence, tokens: self.steps.call(lambda e: e.reserve(sequence, tokens, now_us())),
            cancel=lambda reservation: self.steps.post(lambda e: e.cancel(reservation)),
            admit=self._admit,
            admitted=self._on_admitted,
            ended=self._ticket_ended,
        )
        group = Group(self._group.name, self._group.epoch)
        return HandoffTarget(group, layout, ports, settings.lease_us, settings.checksum)

    def _send(self, to: Group, message: object) -> None:
        """At most once: a lost message is repeated by the ledgers."""
        if (handle := self._directory.handle(GroupRef(to.name, to.epoch))) is not None:
            handle.peer.remote(message)

    def _release(self, ticket: Ticket) -> None:
        sequence = engine_id(ticket.request_id, ticket.attempt)
        self.steps.post(lambda engine: (engine.abort(sequence), engine.release(sequence)))
        self.sequences.forget(sequence)

    async def _admit(
        self, reservation: Reservation, state: TokenState, then: Callable[[Accepted | Rejected], None]
    ) -> None:
        sequence, spec = state.request.request_id, state.request.grammar
        grammar = None if spec is None else await self._grammars.compile(spec)
        if isinstance(grammar, str):
            then(Rejected(sequence, grammar))
            return
        if (origin := self.sequences.origin(sequence)) is not None:  # its first step may complete a grain
            self.sequences.begin(sequence, self._prefix(state.request, origin), state.cached)
        await self.steps.call(lambda engine: engine.admit(reservation, state, now_us(), grammar), then)

    def _on_admitted(self, ticket: Ticket, state: TokenState, handoff_us: int) -> None:
        """The sequence is ours: say so, and repeat its outputs, so that nothing depends on the source's letters."""
        sequence = state.request.request_id
        if (origin := self.sequences.origin(sequence)) is None:  # aborted while it was admitted
            self.steps.post(lambda engine: engine.abort(sequence))
            return
        moved = sum(kind.byte_count for kind in ticket.expected)
        self.letter(origin, Admitted(origin.attempt, self._group, moved, handoff_us))
        if state.request.sampling.logprobs is None:
            self.sequences.post_tokens(TokensEvent(sequence, 0, state.token_ids[state.request.prompt_len :]))

    def _ticket_ended(self, ended: Ended) -> None:
        if ended.state is TicketState.RELEASED:
            return
        sequence = engine_id(ended.ticket.request_id, ended.ticket.attempt)
        if (origin := self.sequences.origin(sequence)) is not None:
            # A source tells the entrypoint itself why it gave up, if it was not the entrypoint's own wish.
            if ended.reason != SOURCE_ABORTED:
                reason = f"{ended.state}: {ended.reason}"
                self.letter(origin, HandoffFailed(origin.attempt, self._group, reason))
            self.sequences.forget(sequence)

    def _on_broken(self, target: Group) -> None:
        self._tasks.spawn(self._end_if_alive(target))

    async def _end_if_alive(self, target: Group) -> None:
        """A broken connection to a peer that lives cannot be trusted again within this epoch: start a new one."""
        await asyncio.sleep(self._spec.membership.lost_after_us / 1e6)
        if self._directory.handle(GroupRef(target.name, target.epoch)) is not None:
            log.critical(
                "connection to %s broke and it lives on: this engine ends, to come back in a new epoch", target
            )
            self._end(BROKEN_EXIT)

    def close(self) -> None:
        """End tasks and threads, where no process ends with them; what is held is lost, as in a crash."""
        self._tasks.cancel()
        for part in (self.source, self.target, self._saver, self._loader, self._transfer, self._grammars):
            if part is not None:
                part.close()
        self.steps.stop()

    def open_tickets(self) -> int:
        """Tickets of either side that have not ended."""
        return sum(side.open_tickets() for side in (self.source, self.target) if side is not None)

    def wake(self) -> None:
        """Let time pass for tickets."""
        for side in (self.source, self.target):
            if side is not None:
                side.wake()

    def heartbeat(self) -> None:
        """Renew leases."""
        for side in (self.source, self.target):
            if side is not None:
                side.heartbeat()

    # ------------------------------------------------------------ facts

    async def report(self, directory: Members) -> None:
        """Send this engine's load to its balancer."""
        capacity = await self.steps.call(lambda engine: engine.capacity())
        await self._reports.send(directory, capacity, self._rate.per_s())

    def is_idle(self) -> bool:
        """Whether nothing is left here: no sequence, no ticket, no letter on its way, nothing to write to the store."""
        is_saved = self._saver is None or self._saver.is_idle
        return is_saved and self.outbox.is_empty and not len(self.sequences) and not self.open_tickets()

    def counters(self) -> Mapping[str, int]:
        """Counts since the start, for metrics."""
        saver = self._saver
        grammars = {f"grammars_{what}": count for what, count in self._grammars.counts.items()}
        saves = {"grains_dropped": saver.dropped if saver else 0, "saves_failed": saver.failed if saver else 0}
        experts = self._balance.counters() if self._balance else {}
        return {**grammars, **self._drafts.counts(), **saves, **experts}
