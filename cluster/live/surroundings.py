"""What a live part takes from the place it runs in: who else is there, shared values, its engine, its own end."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import ray
from shoal.balancers.reports import GroupRef
from shoal.cluster.core.membership import View
from shoal.cluster.live.directory import Directory
from shoal.cluster.live.names import actor_name
from shoal.cluster.live.session import NAMESPACE
from shoal.cluster.live.spec import ClusterSpec

if TYPE_CHECKING:
    from shoal.cluster.live.engine_build import Built
    from shoal.engines.run.rank_group import Collectives


class Members(Protocol):
    """The newest view of the cluster and handles of its members. Readers never wait.

    `handle.method.remote(...)` starts a call; what it returns can be awaited, and `.future()` is it for threads.
    """

    @property
    def view(self) -> View:
        """Who is there."""
        ...

    def handle(self, group: GroupRef) -> Any | None:
        """Handle of a living member, None once it is lost."""
        ...

    def only(self, role: str) -> Any | None:
        """Handle of the first ready member of a role, None while there is none."""
        ...

    async def follow(self) -> None:
        """Keep the view new, for ever; one task runs this."""
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """One place to run in.

    `members(cluster, on_view)` follows a cluster; `put` shares a value and returns a reference that others await (as
    an argument of a call it arrives as the value); `build` makes an engine, with its group's collectives if it has
    any, and what it writes to peers with; `end` ends this life at once with an exit code, as a crash would.
    `find(cluster, group)` is the handle of a life that may still be starting, None before it exists; `host()` is the
    address at which this place can be reached.
    """

    members: Callable[[str, Callable[[View], None]], Members]
    put: Callable[[Any], Any]
    build: "Callable[[ClusterSpec, GroupRef, Collectives | None], Built]"
    end: Callable[[int], object]
    find: Callable[[str, GroupRef], Any | None]
    host: Callable[[], str]


def _build_with_nixl(spec: ClusterSpec, group: GroupRef, ranks: "Collectives | None") -> "Built":
    """Torch and the transfer library are imported by the process that opens an engine, and by no other."""
    from shoal.cluster.live.engine_build import build
    from shoal.cluster.live.transfer import NixlTransfer

    return build(spec, group, NixlTransfer, ranks)


def _find_actor(cluster: str, group: GroupRef) -> Any | None:
    try:
        return ray.get_actor(actor_name(cluster, group), namespace=NAMESPACE)
    except ValueError:
        return None


RAY = Surroundings(
    members=Directory,
    put=ray.put,
    build=_build_with_nixl,
    end=os._exit,
    find=_find_actor,
    host=ray.util.get_node_ip_address,
)
