"""Several ranks of a group in one process, each in a thread of its own."""

import threading
from collections.abc import Callable

from shoal.engines.run.rank_group import GlooGroup, Meeting

WAIT_S = 20.0


def together(size: int, work: Callable[[GlooGroup], object], wait_s: float = WAIT_S) -> list[object]:
    """What each of `size` ranks returns, each in a thread of its own; the first failure is raised."""
    store = GlooGroup.open_store("127.0.0.1", size)
    results: list[object] = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            meeting = Meeting("127.0.0.1", store.port, rank, size)
            results[rank] = work(GlooGroup(meeting, GlooGroup.find_store(meeting), wait_s))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
