"""What every clock promises to those who are given its readings: the live ones and the ones that tests set by hand."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from shoal.cluster.live.clock import SteadyClock, monotonic_s, now_us

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kvstore"))
from store_world import Clock, RunningClock

STEP_US = 20_000


@dataclass
class Subject:
    """A clock under test: a reading in microseconds, and how to let at least so many microseconds pass for it."""

    read: Callable[[], int]
    let_pass: Callable[[int], None]


def slept(microseconds: int) -> None:
    time.sleep(microseconds / 1e6)


def set_by_hand(clock: Clock) -> Subject:
    def let_pass(microseconds: int) -> None:
        clock.us += microseconds

    return Subject(clock, let_pass)


CLOCKS: dict[str, Callable[[], Subject]] = {
    "wall": lambda: Subject(now_us, slept),
    "monotonic": lambda: Subject(lambda: int(monotonic_s() * 1e6), slept),
    "steady": lambda: Subject(SteadyClock(pause_s=1.0).now_us, slept),
    "set by hand": lambda: set_by_hand(Clock()),
    "running by itself": lambda: set_by_hand(RunningClock()),
}


@pytest.fixture(params=CLOCKS)
def subject(request: pytest.FixtureRequest) -> Subject:
    return CLOCKS[request.param]()


def test_readings_are_whole_microseconds(subject: Subject) -> None:
    assert type(subject.read()) is int
    assert subject.read() > 0


def test_time_never_runs_backwards_between_readings(subject: Subject) -> None:
    readings = [subject.read() for _ in range(2000)]
    assert readings == sorted(readings)


def test_what_has_passed_is_seen(subject: Subject) -> None:
    before = subject.read()
    subject.let_pass(STEP_US)
    assert subject.read() - before >= STEP_US


def test_many_threads_may_read(subject: Subject) -> None:
    before = subject.read()
    with ThreadPoolExecutor(8) as pool:
        readings = list(pool.map(lambda _: subject.read(), range(400)))
    subject.let_pass(STEP_US)
    assert min(readings) >= before
    assert max(readings) <= subject.read()


def test_the_wall_clock_is_the_one_that_other_machines_have() -> None:
    """Deadlines and leases travel between machines: the live clock counts from the Unix epoch."""
    before_s = time.time()
    reading = now_us()
    assert int(before_s * 1e6) - 1 <= reading <= int(time.time() * 1e6) + 1
