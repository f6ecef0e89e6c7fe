"""Who is in the cluster now, with handles: follows the controller's views through the controller's own deaths."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from shoal.balancers.reports import GroupRef
from shoal.cluster.core.membership import View
from shoal.cluster.live.names import controller_name

log = logging.getLogger(__name__)

WATCH_S = 10.0  # a watch call is answered at the latest after this, changed or not
RETRY_S = 0.2


class Directory:
    """The newest view and its handles. One task runs `follow`; readers never wait.

    `on_view` is called in that task after every change, with the new view.
    """

    def __init__(self, cluster: str, on_view: Callable[[View], None] = lambda view: None) -> None:
        self._cluster = cluster
        self._on_view = on_view
        self._handles: dict[GroupRef, Any] = {}
        self.view = View(0)

    def handle(self, group: GroupRef) -> Any | None:
        """Actor handle of a living member, None once it is lost."""
        return self._handles.get(group)

    def only(self, role: str) -> Any | None:
        """Handle of the first ready member of a role, None while there is none."""
        ready = self.view.ready(role)
        return self._handles.get(ready[0]) if ready else None

    async def follow(self) -> None:
        """Watch for ever. A controller that restarts numbers its views higher than the one before."""
        controller: Any | None = None
        while True:
            try:
                # A blocking call on this loop, so only when the handle is not known or has failed.
                controller = controller or ray.get_actor(controller_name(self._cluster))
                reference = controller.watch.remote(self.view.number)
                view, handles = await asyncio.wait_for(reference, timeout=2 * WATCH_S)
            except (RayError, ValueError, TimeoutError) as error:
                log.debug("controller not reachable: %s", error)
                controller = None
                await asyncio.sleep(RETRY_S)
                continue
            if view.number != self.view.number:
                self.view, self._handles = view, handles
                try:
                    self._on_view(view)
                except Exception:  # one failed reaction must not blind this process to every later view
                    log.exception("view %d was not acted upon as it should", view.number)

    async def wait_for(self, role: str, timeout_s: float) -> Any:
        """Handle of a ready member of the role; a TimeoutError after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            while (handle := self.only(role)) is None:
                await asyncio.sleep(0.05)
        return handle
