"""What a balancer is told: which groups exist, what each one reports, and what a request needs."""

from dataclasses import dataclass, field


@dataclass(frozen=True, order=True, slots=True)
class GroupRef:
    """One life of one group: a group that was lost and started again has the same name and the next epoch."""

    name: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.name}@{self.epoch}"


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """Load of one PROMPT or NORMAL group, as its engine saw it at `seq` (increasing within an epoch).

    `waiting_tokens` are uncached prompt tokens not yet computed, over queued and running requests. `tokens_per_s` is
    measured over recent steps (0: nothing measured yet). `known` holds the reservation ids (engine request ids) the
    engine has taken since its last report: from here on they are part of its own numbers.
    """

    group: GroupRef
    seq: int
    waiting_tokens: int
    waiting_requests: int
    tokens_per_s: float = 0.0
    known: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """Room and load of one COMPLETION group. `blocks_free`/`slots_free` already exclude what it has reserved.

    `context_tokens` is the sum of the running sequences' lengths, `step_us` the measured time of recent steps (0:
    none yet). `known`: see `PrefillReport`.
    """

    group: GroupRef
    seq: int
    blocks_free: int
    blocks_total: int
    slots_free: int
    sequences: int
    sequences_max: int
    context_tokens: int = 0
    step_us: float = 0.0
    known: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EncodeReport:
    """Load of one encoder: patches and images not yet encoded, patches a second (0: none yet), and what it caches.

    `cached` lists digests in its embedding cache (all of them: the cache is small and bounded).
    """

    group: GroupRef
    seq: int
    waiting_patches: int
    waiting_images: int
    patches_per_s: float = 0.0
    cached: tuple[bytes, ...] = ()
    known: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillNeed:
    """What a request asks of a PROMPT group. `reservation` is the id under which room is held (engine request id).

    `prefix` names the deepest matched grain (b"": no hit). `deadline_us` is absolute; 0 means none. Groups in
    `excluded` have failed this request before: they are used only if nothing else is ready.
    """

    reservation: str
    uncached_tokens: int
    hit_tokens: int = 0
    prefix: bytes = b""
    deadline_us: int = 0
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeNeed:
    """What a request asks of a COMPLETION group: room for `tokens` now, and for `tokens_final` at most later."""

    reservation: str
    tokens: int
    tokens_final: int
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EncodeNeed:
    """One image to encode: its digest and its number of ViT patches."""

    reservation: str
    digest: bytes
    patches: int
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupScore:
    """How one group was judged: `terms` add up to `cost_us`; a group that could not be used says why instead."""

    group: GroupRef
    cost_us: float
    terms: tuple[tuple[str, float], ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """The group to use; room in it is held under `reservation` until `expires_us`, a release or a report."""

    group: GroupRef
    reservation: str
    expires_us: int
    cost_us: float
    scores: tuple[GroupScore, ...] = ()

    def costs(self) -> dict[str, int | str]:
        """For each group judged its cost in microseconds, or why it could not be used."""
        return {score.group.name: score.refused or round(score.cost_us) for score in self.scores}


@dataclass(frozen=True, slots=True)
class Full:
    """Nothing can be chosen. `code` is one of NO_GROUP, QUEUE, ROOM, DEADLINE, TOO_LONG (balancers.config)."""

    code: str
    reason: str
    retry_after_us: int
    scores: tuple[GroupScore, ...] = field(default=())
