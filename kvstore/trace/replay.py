"""Replay a trace through a policy and count what it hits; each request is looked up, then written at its arrival."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from shoal.kvstore.core.policy.chained import ChainPolicy
from shoal.kvstore.core.policy.verbs import Policy
from shoal.kvstore.trace.packed import Trace


class Progress(Protocol):
    """Told now and then how many requests have been replayed."""

    def __call__(self, requests: int) -> None:
        """`requests` since the last call."""


@dataclass(frozen=True, slots=True)
class HitCounts:
    """What a replay found; rates are shares of all blocks or input tokens.

    `object_hits` counts every resident block, reachable or not. `live_peak` is taken just after each request,
    `live_mean` over time from the first to the last request; both only where grains expire exactly (chain policies).
    `hits_of` int32 [requests].
    """

    hit_blocks: int
    blocks: int
    hit_tokens: int
    tokens: int
    requests_with_hit: int
    object_hits: int
    live_peak: int
    live_mean: float
    hits_of: npt.NDArray[np.int32]

    @property
    def block_hit_rate(self) -> float:
        """Hit blocks of all blocks."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Hit tokens of all input tokens; a hit partial block counts what it holds."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def replay(trace: Trace, policy: Policy, progress: Progress | None = None, traffic: int = 0) -> HitCounts:
    """Serve every request of the trace in order; `progress` is called about every thousandth request.

    `traffic`: class number of every request, where the policy knows classes.
    """
    hits_of = np.zeros(len(trace), np.int32)
    resident = peak = 0
    by_class = policy if isinstance(policy, ChainPolicy) and traffic else None
    serve = policy.serve
    for at, (chain, now_us) in enumerate(zip(trace.chains(), trace.times_us.tolist(), strict=True)):
        served = serve(chain, now_us) if by_class is None else by_class.serve(chain, now_us, traffic)
        hits_of[at] = served.hits
        resident += served.resident
        peak = max(peak, policy.live)
        if progress is not None and at % 1000 == 999:
            progress(1000)
    if progress is not None:
        progress(len(trace) % 1000)
    area = policy.grain_microseconds if isinstance(policy, ChainPolicy) else 0
    hit_tokens = np.minimum(hits_of.astype(np.int64) * trace.block_tokens, trace.input_tokens)
    return HitCounts(
        int(hits_of.sum()), len(trace.grains), int(hit_tokens.sum()), int(trace.input_tokens.sum()),
        int(np.count_nonzero(hits_of)), resident, peak, area / trace.span_us if trace.span_us else 0.0, hits_of,
    )  # fmt: skip
