"""The only reader of time: wall microseconds for people and stores, monotonic for deadlines."""

import time


def now_us() -> int:
    """Unix time in microseconds; what cores are given. It may step; deadlines across machines use it knowingly."""
    return time.time_ns() // 1000


def monotonic_s() -> float:
    """Seconds that never go back, for waits inside one process."""
    return time.monotonic()


def sleep_s(seconds: float) -> None:
    """Block this thread; shells only, and only inside a loop that has a deadline."""
    time.sleep(seconds)
