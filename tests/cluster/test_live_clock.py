"""The clock by which a controller judges silence does not count time in which the controller itself stood still."""

from shoal.cluster.live.clock import SteadyClock


class Fake:
    """A monotonic clock to set by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """Seconds now."""
        return self.now_s


def test_regular_readings_show_plain_time() -> None:
    fake = Fake()
    clock = SteadyClock(2.0, fake)
    start_us = clock.now_us()
    for _ in range(10):
        fake.now_s += 1.0
        clock.now_us()
    assert clock.now_us() - start_us == 10_000_000


def test_a_stopped_process_loses_its_pause_not_its_members() -> None:
    fake = Fake()
    clock = SteadyClock(2.0, fake)
    start_us = clock.now_us()
    fake.now_s += 3600.0
    assert clock.now_us() - start_us == 2_000_000
    fake.now_s += 1.0
    assert clock.now_us() - start_us == 3_000_000
