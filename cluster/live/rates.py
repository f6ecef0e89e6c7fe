"""Measured throughput over a sliding window, for reports to balancers."""

from collections import deque

from shoal.cluster.live.clock import monotonic_s

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
