"""Which threads forbid and which allow the host to wait for the device, and the one mode that follows for all."""

from collections.abc import Hashable
from enum import StrEnum


class Intent(StrEnum):
    """What a region of code says about the host waiting for the device unasked."""

    FORBID = "forbid"
    ALLOW = "allow"


class SyncMode(StrEnum):
    """What happens to an operation that makes the host wait; the names are torch's sync debug modes."""

    DEFAULT = "default"
    WARN = "warn"
    ERROR = "error"


class SyncIntents:
    """One stack of intents a thread (engine runtime notes 6.8).

    The mode counts for the whole process, so somebody has to give way: a thread that allows beats another that
    forbids, because a step that waits is slow and a wait that must happen and may not is an error.
    """

    def __init__(self) -> None:
        self._stacks: dict[Hashable, list[Intent]] = {}
        self._found = SyncMode.DEFAULT

    def enter(self, thread: Hashable, intent: Intent, found: SyncMode) -> SyncMode:
        """A region begins; `found` is the mode of this moment. Returns the mode to set."""
        if not self._stacks:
            self._found = found
        self._stacks.setdefault(thread, []).append(intent)
        return self._mode()

    def leave(self, thread: Hashable) -> SyncMode:
        """The thread's innermost region ends. Returns the mode to set; after the last region, the one found first.

        Raises ValueError for a thread that is in no region.
        """
        if thread not in self._stacks:
            raise ValueError(f"thread {thread!r} leaves a region that it did not enter")
        self._stacks[thread].pop()
        if not self._stacks[thread]:
            del self._stacks[thread]
        return self._mode()

    def _mode(self) -> SyncMode:
        if not self._stacks:
            return self._found
        if any(stack[-1] is Intent.ALLOW for stack in self._stacks.values()):
            return SyncMode.DEFAULT
        return SyncMode.ERROR
