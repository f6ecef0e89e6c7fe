"""What an engine has to tell each entrypoint, kept until it is known to have arrived.

An entrypoint polls with the number of the last batch it has; that acknowledges it and everything before. So a lost
reply is sent again, one message a step carries all its tokens, and an entrypoint that stops polling is noticed.
"""

import asyncio
from dataclasses import dataclass, field

from shoal.cluster.core.messages import Event
from shoal.cluster.live.clock import monotonic_s

Letter = tuple[str, Event]  # request id, what happened


@dataclass(slots=True)
class _Box:
    letters: list[tuple[int, Letter]] = field(default_factory=list)
    polled_s: float = field(default_factory=monotonic_s)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class Outbox:
    """Letters by entrypoint. Owned by one asyncio loop.

    Numbers grow over all boxes: an entrypoint whose box was dropped may come back with the number it knew.
    """

    def __init__(self) -> None:
        self._boxes: dict[str, _Box] = {}
        self._last = 0

    def post(self, entrypoint: str, letter: Letter) -> None:
        """Keep one letter for the entrypoint and wake its poll."""
        box = self._boxes.setdefault(entrypoint, _Box())
        self._last += 1
        box.letters.append((self._last, letter))
        box.arrived.set()

    async def poll(self, entrypoint: str, after: int, wait_s: float) -> tuple[int, list[Letter]]:
        """(number of the last letter, letters after `after`), as soon as there is one, or none after `wait_s`.

        `after` acknowledges. Numbers are per life: an entrypoint must poll a new life from 0.
        """
        box = self._boxes.setdefault(entrypoint, _Box())
        box.polled_s = monotonic_s()
        box.letters = [entry for entry in box.letters if entry[0] > after]
        if not box.letters:
            box.arrived.clear()
            try:
                await asyncio.wait_for(box.arrived.wait(), timeout=wait_s)
            except TimeoutError:
                return after, []
        box.polled_s = monotonic_s()
        if not box.letters:  # another poll of the same entrypoint has acknowledged them meanwhile
            return after, []
        return box.letters[-1][0], [letter for _, letter in box.letters]

    @property
    def is_empty(self) -> bool:
        """Whether every letter has arrived."""
        return not any(box.letters for box in self._boxes.values())

    def silent(self, limit_s: float) -> list[str]:
        """Entrypoints that have not polled for `limit_s`; their boxes are dropped."""
        now_s = monotonic_s()
        gone = [name for name, box in self._boxes.items() if now_s - box.polled_s > limit_s]
        for name in gone:
            del self._boxes[name]
        return gone
