"""Background tasks of one asyncio loop: kept from garbage collection, and loud when they fail."""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

VITAL_EXIT = 72


class Tasks:
    """Owns what it spawned until it ends. After `cancel` nothing runs any more."""

    def __init__(self, end: Callable[[int], object] = os._exit) -> None:
        """`end` ends the process when something vital has failed."""
        self._end = end
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_over = False

    def __len__(self) -> int:
        """How many run now."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        if self._is_over:
            task.cancel()
        return task

    def spawn_vital(self, work: Coroutine[Any, Any, Any]) -> None:
        """As `spawn`, for what this process is useless without: its failure ends the process, to be replaced."""
        self.spawn(self._or_end(work))

    def cancel(self) -> None:
        """Cancel everything that still runs."""
        self._is_over = True
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task %s failed", task.get_name(), exc_info=error)

    async def _or_end(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except Exception:
            name = getattr(work, "__qualname__", work)
            log.critical("%s failed, and this process is useless without it: it ends", name, exc_info=True)
            logging.shutdown()
            self._end(VITAL_EXIT)
