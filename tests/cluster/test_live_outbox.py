"""Letters to entrypoints: repeated until acknowledged, and never taken for older ones."""

import asyncio

from shoal.balancers.reports import GroupRef
from shoal.cluster.core.messages import Known
from shoal.cluster.live.outbox import Letter, Outbox

WAIT_S = 0.01


def letter(number: int) -> Letter:
    return f"request-{number}", Known(1, GroupRef("decode/0", 1))


def test_a_letter_is_repeated_until_the_next_poll_acknowledges_it() -> None:
    async def run() -> None:
        box = Outbox()
        box.post("a", letter(1))
        first, letters = await box.poll("a", 0, WAIT_S)
        assert letters == [letter(1)]
        assert (await box.poll("a", 0, WAIT_S))[1] == [letter(1)], "the reply was lost on its way"
        assert not box.is_empty
        assert await box.poll("a", first, WAIT_S) == (first, [])
        assert box.is_empty

    asyncio.run(run())


def test_an_entrypoint_that_was_silent_for_long_misses_nothing_posted_later() -> None:
    """Its box is dropped with its letters; what comes afterwards must not look older than what it has."""

    async def run() -> None:
        box = Outbox()
        for number in range(5):
            box.post("a", letter(number))
        known, _ = await box.poll("a", 0, WAIT_S)
        assert box.silent(-1.0) == ["a"]
        box.post("a", letter(5))
        newer, letters = await box.poll("a", known, WAIT_S)
        assert letters == [letter(5)]
        assert newer > known

    asyncio.run(run())
