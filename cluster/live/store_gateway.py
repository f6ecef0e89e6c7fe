"""The actor through which engines outside the cluster use its store: a store client behind a gRPC server."""

import asyncio
import logging
import os
from importlib.metadata import version

from shoal.balancers.reports import GroupRef
from shoal.cluster.live.clock import now_us
from shoal.cluster.live.facts import api_keys, tls_identity
from shoal.cluster.live.logs import begin_logging
from shoal.cluster.live.names import INDEX
from shoal.cluster.live.spec import ClusterSpec
from shoal.cluster.live.store_ports import RayIndex, store_client
from shoal.cluster.live.surroundings import RAY, Surroundings
from shoal.cluster.live.tasks import Tasks
from shoal.cluster.resolve import ApiSpec
from shoal.kvstore.rpc.server import Security, StoreServer
from shoal.kvstore.rpc.service import Limits, StoreServicer

log = logging.getLogger(__name__)


class StoreGatewayActor:
    """One gateway. It keeps nothing: pins of its clients end with it, and a new life serves at the same address."""

    def __init__(self, spec: ClusterSpec, group: GroupRef, place: Surroundings = RAY) -> None:
        begin_logging(str(group))
        self._spec, self._group = spec, group
        self._server: StoreServer | None = None
        self._directory = place.members(spec.name, lambda view: self._tell_health())
        self._tasks = Tasks()

    async def open(self) -> None:
        """Bind the address. ConfigError if it is taken or the TLS files are no good."""
        self._tasks.spawn(self._directory.follow())
        address = self._spec.cluster.api.grpc
        assert address is not None, "a gateway without an address"
        client, _ = store_client(self._spec, self._directory, self._group)
        index = RayIndex(self._directory)
        servicer = StoreServicer(client, index, str(self._group), now_us, Limits(), version("shoal"))
        security = read_security(self._spec.cluster.api)
        self._server = await asyncio.to_thread(StoreServer, servicer, address, security)
        self._tell_health()
        log.info("store gateway at %s, %s", address, describe(security))

    async def ping(self) -> bool:
        """Whether this life is up."""
        return self._server is not None

    async def lifeline(self) -> None:
        """Never returns: its end is this process's end."""
        await asyncio.Event().wait()

    async def pid(self) -> int:
        """Process id, for tests and status."""
        return os.getpid()

    async def drain(self) -> None:
        """Refuse new calls and wait a moment for those under way."""
        if self._server is not None:
            await asyncio.to_thread(self._server.close)

    def close(self) -> None:
        """End everything this life runs, where no process ends with it."""
        self._tasks.cancel()
        if self._server is not None:
            self._server.close()

    def _tell_health(self) -> None:
        """Probes see whether the index can be asked."""
        if self._server is not None:
            self._server.set_serving(bool(self._directory.view.ready(INDEX)))


def read_security(api: ApiSpec) -> Security:
    """Tokens and TLS identity out of the files that a manifest names. ShoalError for a bad file."""
    tokens = api_keys(api.keys_file)
    return Security(tokens) if api.grpc_tls is None else Security(tokens, *tls_identity(api.grpc_tls))


def describe(security: Security) -> str:
    """For the log: who may call, and how."""
    who = f"{len(security.tokens)} tokens" if security.tokens else "no tokens: everybody who can connect"
    return f"{'TLS' if security.certificate else 'plain text'}, {who}"
