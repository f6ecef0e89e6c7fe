"""Weights and limits of the balancers, frozen; a manifest's `balancers:` section becomes these."""

from dataclasses import dataclass

NO_GROUP = "no_ready_group"  # no group of the role is ready: HTTP 503
QUEUE = "queue_full"  # every group's queue is at its bound: HTTP 429
ROOM = "no_room"  # no COMPLETION group has blocks, a slot and a place: wait, then HTTP 429
DEADLINE = "deadline_unreachable"  # the predicted wait passes the deadline: HTTP 503 at once
TOO_LONG = "context_length_exceeded"  # no group could ever hold it: HTTP 400


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Costs are microseconds. `tokens_per_s` and `fetch_us_per_grain` serve until a group has measured its own.

    cost = queue x wait + compute x uncached + fetch x hit grains - locality x the part of the fetch that a group
    which served the same prefix lately does not repeat (so the credit can never outweigh a real queue).
    """

    queue: float = 1.0
    compute: float = 1.0
    fetch: float = 1.0
    locality: float = 0.5
    tokens_per_s: float = 2000.0
    fetch_us_per_grain: float = 300.0
    grain_tokens: int = 128
    queue_max: int = 256
    reservation_us: int = 10_000_000


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """step cost = base + sequence x running + context x tokens in context, scaled by what the group measures.

    `pressure` multiplies the step cost by 1 + pressure x (share of blocks used if the answer grows to its limit).
    """

    base_us: float = 2000.0
    sequence_us: float = 500.0
    context_us: float = 0.05
    pressure: float = 1.0
    block_tokens: int = 128
    reservation_us: int = 10_000_000
    retry_us: int = 100_000


@dataclass(frozen=True, slots=True)
class EncodeConfig:
    """`cached` is the share of an image's cost saved where its embedding is cached; `queue_max` counts images."""

    cached: float = 1.0
    patches_per_s: float = 5000.0
    queue_max: int = 256
    reservation_us: int = 30_000_000
