"""The only reader of time: wall microseconds for people and stores, monotonic for deadlines."""

import time
from collections.abc import Callable


def now_us() -> int:
    """Unix time in microseconds; what cores are given. It may step; deadlines across machines use it knowingly."""
    return time.time_ns() // 1000


def monotonic_s() -> float:
    """Seconds that never go back, for waits inside one process."""
    return time.monotonic()


def sleep_s(seconds: float) -> None:
    """Block this thread; shells only, and only inside a loop that has a deadline."""
    time.sleep(seconds)


class SteadyClock:
    """Microseconds for judging others' silence: monotonic, and standing still while this process itself does.

    Whoever reads it at least every `pause_s` sees plain time. A longer gap between two readings means that this
    process was stopped or starved, and counts as `pause_s`: others may have spoken meanwhile without being heard.
    """

    def __init__(self, pause_s: float, monotonic: Callable[[], float] = monotonic_s) -> None:
        self._pause_s = pause_s
        self._monotonic = monotonic
        self._last_s = monotonic()
        self._now_s = self._last_s

    def now_us(self) -> int:
        """The time now, in no relation to any other clock."""
        now_s = self._monotonic()
        self._now_s += min(now_s - self._last_s, self._pause_s)
        self._last_s = now_s
        return int(self._now_s * 1e6)
