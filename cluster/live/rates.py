"""Measured throughput over a sliding window, for reports to balancers; counts of drafts, for metrics."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from shoal.cluster.live.clock import monotonic_s
from shoal.engines.run.output import DraftTotals

WINDOW_S = 10.0
BUSY_GAP_S = 0.5  # a longer pause between two samples is idleness, not slowness


class Rate:
    """Units a second while busy: idle time between samples does not count."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, int]] = deque()  # (when, busy seconds, units)
        self._last_s = monotonic_s()

    def add(self, units: int) -> None:
        """Some work has just ended."""
        now_s = monotonic_s()
        busy_s = min(now_s - self._last_s, BUSY_GAP_S)
        self._last_s = now_s
        self._samples.append((now_s, busy_s, units))
        while self._samples and self._samples[0][0] < now_s - WINDOW_S:
            self._samples.popleft()

    def per_s(self) -> float:
        """Units a second, 0 while nothing was measured."""
        busy_s = sum(busy for _, busy, _ in self._samples)
        units = sum(units for _, _, units in self._samples)
        return units / busy_s if busy_s > 0.01 else 0.0


class DraftCounts:
    """Drafts made, verified and accepted since the start; judged behind right ones, also by number in the block."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, verified: Sequence[int], accepted: Sequence[int], totals: DraftTotals) -> None:
        """What one step judged, draft by draft, and what it did in all."""
        self._counts.update({f"drafts_{name}": count for name, count in totals._asdict().items()})
        for name, counts in (("verified", verified), ("accepted", accepted)):
            self._counts.update({f"drafts_{name}_{number}": count for number, count in enumerate(counts)})

    def counts(self) -> Mapping[str, int]:
        """`drafts_<field>` of the totals, and by place `drafts_verified_<number>` and `drafts_accepted_<number>`.

        By place only drafts behind accepted ones count, so their quotient is the chance of one place.
        """
        return self._counts
