"""The sequences an engine works for: whose they are, their keys, and the letters their events become."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.balancers.reports import GroupRef
from shoal.cluster.core.messages import ChunkDone, Ended, Forked, NotForked, Tokens
from shoal.cluster.core.names import split_engine_id
from shoal.cluster.core.prompt_scored import PromptScored
from shoal.cluster.live.outbox import Outbox
from shoal.cluster.live.prefix import Prefix
from shoal.cluster.live.saver import ToSave
from shoal.cluster.live.submission import Origin
from shoal.engines.core.plan import Branched
from shoal.engines.core.request import EngineRequest, FinishEvent, TokensEvent
from shoal.engines.run.output import StepOutput


@dataclass(slots=True)
class _Known:
    origin: Origin
    prefix: Prefix | None = None
    cached: int = 0


class Sequences:
    """By engine sequence name. Owned by the engine's asyncio loop."""

    def __init__(self, group: GroupRef, outbox: Outbox) -> None:
        self._group = group
        self._outbox = outbox
        self._known: dict[str, _Known] = {}
        self._fresh: list[str] = []

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, sequence: str) -> bool:
        return sequence in self._known

    def expect(self, sequence: str, origin: Origin) -> None:
        """A sequence will run here, or has begun to."""
        self._known.setdefault(sequence, _Known(origin))
        self._fresh.append(sequence)

    def begin(self, sequence: str, prefix: Prefix | None, cached: int) -> None:
        """Its tokens are known; `cached` of them are computed."""
        if (known := self._known.get(sequence)) is not None:
            known.prefix, known.cached = prefix, cached

    def origin(self, sequence: str) -> Origin | None:
        """Whose sequence it is, None when it has ended here."""
        known = self._known.get(sequence)
        return known.origin if known else None

    def prefix(self, sequence: str) -> Prefix | None:
        """Its chain keys, None without a store."""
        known = self._known.get(sequence)
        return known.prefix if known else None

    def forget(self, sequence: str) -> None:
        """It has ended here."""
        self._known.pop(sequence, None)

    def of(self, entrypoint: str) -> list[str]:
        """Names of one entrypoint's sequences."""
        return [name for name, known in self._known.items() if known.origin.entrypoint == entrypoint]

    def take_fresh(self) -> tuple[str, ...]:
        """Sequences that arrived since the last call: their balancer reservations are real now."""
        fresh, self._fresh = tuple(self._fresh), []
        return fresh

    def give_back_fresh(self, names: tuple[str, ...]) -> None:
        """The balancer did not hear of these: they are taken again with the next call."""
        self._fresh += names

    def objects(self, output: StepOutput) -> list[ToSave]:
        """What a step's copies become in the store, grains before anchors."""
        objects = []
        for grain in output.grains:
            known = self._known.get(grain.request_id)
            if known is not None and known.prefix is not None:
                objects.append(ToSave(known.origin, known.prefix.grain(grain, known.origin)))
        for anchor in output.anchors:
            known = self._known.get(anchor.request_id)
            if known is not None and known.prefix is not None:
                objects.append(ToSave(known.origin, known.prefix.anchor(anchor, known.origin)))
        return objects

    def post_step(self, output: StepOutput) -> list[str]:
        """Letters for a step: chunks, tokens in one letter a sequence, endings; the sequences that ended."""
        for chunk in output.chunks:
            if (known := self._known.get(chunk.request_id)) is not None:
                done = ChunkDone(known.origin.attempt, self._group, chunk.cached - known.cached, chunk.cached)
                known.cached = chunk.cached
                self._outbox.post(known.origin.entrypoint, (known.origin.request_id, done))
        for part in output.prompt_scores:
            if (known := self._known.get(part.request_id)) is not None:
                scored = PromptScored(known.origin.attempt, self._group, part.first, part.scores)
                self._outbox.post(known.origin.entrypoint, (known.origin.request_id, scored))
        for event in output.events:
            if isinstance(event, TokensEvent):
                self.post_tokens(event)
        ended = []
        for event in output.events:
            if isinstance(event, FinishEvent) and (known := self._known.pop(event.request_id, None)) is not None:
                letter = Ended(known.origin.attempt, self._group, event)
                self._outbox.post(known.origin.entrypoint, (known.origin.request_id, letter))
                ended.append(event.request_id)
        return ended

    def post_branched(self, branched: Branched, prefix_of: Callable[[EngineRequest, Origin], Prefix | None]) -> bool:
        """A letter to whom a branch belongs, its parent's entrypoint; False when the parent has ended here."""
        request = branched.request
        if (parent := self.origin(branched.parent_id)) is None:
            return False
        request_id, attempt = split_engine_id(request.request_id)
        origin = replace(parent, request_id=request_id, attempt=attempt)
        if branched.refusal:
            letter: Forked | NotForked = NotForked(attempt, self._group, branched.refusal)
        else:
            letter = Forked(attempt, self._group)
            computed = replace(request, token_ids=request.token_ids[:-1])
            self.expect(request.request_id, origin)
            self.begin(request.request_id, prefix_of(computed, origin), len(computed.token_ids))
        self._outbox.post(origin.entrypoint, (request_id, letter))
        return True

    def post_tokens(self, tokens: TokensEvent) -> None:
        """One letter with output tokens."""
        if (known := self._known.get(tokens.request_id)) is not None:
            letter = Tokens(known.origin.attempt, self._group, tokens)
            self._outbox.post(known.origin.entrypoint, (known.origin.request_id, letter))
