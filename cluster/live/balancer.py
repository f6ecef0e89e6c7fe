"""The actor around one balancer: groups from the directory, reports from engines, choices for entrypoints."""

import asyncio
import os
from typing import Any, Protocol

from shoal.balancers.decode import DecodeBalancer
from shoal.balancers.encode import EncodeBalancer
from shoal.balancers.prefill import PrefillBalancer
from shoal.balancers.reports import Choice, Full, GroupRef
from shoal.cluster.core.membership import View
from shoal.cluster.live.clock import now_us
from shoal.cluster.live.logs import begin_logging
from shoal.cluster.live.names import (
    COMPLETION,
    DECODE_BALANCER,
    ENCODE_BALANCER,
    ENCODER,
    NORMAL,
    PREFILL_BALANCER,
    PROMPT,
    role_of,
)
from shoal.cluster.live.spec import ClusterSpec
from shoal.cluster.live.surroundings import RAY, Surroundings
from shoal.cluster.live.tasks import Tasks

FIRST_VIEW_S = 10.0


class Balancer(Protocol):
    """What the three balancers have in common."""

    def set_ready(self, groups: tuple[GroupRef, ...], now_us: int) -> None:
        """These groups may be given work."""

    def report(self, report: Any, now_us: int) -> None:
        """Take a group's own numbers."""

    def release(self, reservation: str) -> None:
        """The room held for this reservation is not needed."""

    def choose(self, need: Any, now_us: int) -> Choice | Full:
        """A group, held under the need's reservation, or why there is none."""


def build_balancer(spec: ClusterSpec, role: str) -> tuple[Balancer, str]:
    """A role's balancer core, and the role of the groups it chooses among."""
    cluster = spec.cluster
    if role == PREFILL_BALANCER:
        return PrefillBalancer(cluster.prefill_balancer), NORMAL if cluster.is_normal else PROMPT
    if role == DECODE_BALANCER:
        return DecodeBalancer(cluster.decode_balancer), COMPLETION
    assert role == ENCODE_BALANCER, f"no balancer is called {role}"
    return EncodeBalancer(cluster.encode_balancer), ENCODER


class BalancerActor:
    """One balancer. A new life knows nothing and learns all from the next view and reports, within a second."""

    def __init__(self, spec: ClusterSpec, group: GroupRef, place: Surroundings = RAY) -> None:
        begin_logging(str(group))
        self._core, self._serves = build_balancer(spec, role_of(group))
        self._directory = place.members(spec.name, self._on_view)
        self._tasks = Tasks()

    async def open(self) -> None:
        """Follow the directory."""
        self._tasks.spawn(self._directory.follow())
        async with asyncio.timeout(FIRST_VIEW_S):
            while self._directory.view.number == 0:
                await asyncio.sleep(0.02)

    async def ping(self) -> bool:
        """Whether this life is up."""
        return self._directory.view.number > 0

    async def lifeline(self) -> None:
        """Never returns: its end is this process's end."""
        await asyncio.Event().wait()

    async def pid(self) -> int:
        """Process id, for tests and status."""
        return os.getpid()

    async def drain(self) -> None:
        """Reservations expire by themselves: there is nothing to wait for."""

    def close(self) -> None:
        """End everything this life runs, where no process ends with it."""
        self._tasks.cancel()

    async def choose(self, need: Any) -> Choice | Full:
        """Choose and hold."""
        return self._core.choose(need, now_us())

    async def release(self, reservation: str) -> None:
        """Give held room back."""
        self._core.release(reservation)

    async def report(self, report: Any) -> None:
        """A group's load."""
        self._core.report(report, now_us())

    def _on_view(self, view: View) -> None:
        self._core.set_ready(view.ready(self._serves), now_us())
