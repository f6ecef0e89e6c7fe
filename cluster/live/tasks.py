"""Background tasks of one asyncio loop: kept from garbage collection, and loud when they fail."""

import asyncio
import logging
import os
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)

VITAL_EXIT = 72


class Tasks:
    """Owns what it spawned until it ends."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def spawn_vital(self, work: Coroutine[Any, Any, Any]) -> None:
        """As `spawn`, for what this process is useless without: its failure ends the process, to be replaced."""
        self.spawn(_or_exit(work))

    def cancel(self) -> None:
        """Cancel everything that still runs."""
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task %s failed", task.get_name(), exc_info=error)


async def _or_exit(work: Coroutine[Any, Any, Any]) -> None:
    try:
        await work
    except Exception:
        log.critical(
            "%s failed, and this process is useless without it: it ends",
            getattr(work, "__qualname__", work),
            exc_info=True,
        )
        logging.shutdown()
        os._exit(VITAL_EXIT)
