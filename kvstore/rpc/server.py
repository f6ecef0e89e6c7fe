"""The gateway's gRPC server: address, TLS, tokens, health service, and the thread that ends what is overdue."""

import hmac
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from shoal.kvstore.errors import ConfigError
from shoal.kvstore.rpc.service import StoreServicer

log = logging.getLogger(__name__)

SERVICE = "shoal.store.v1.Store"
CALLS_MAX = 64  # at once; more are told RESOURCE_EXHAUSTED. Each stream holds a thread while it lasts
MESSAGE_BYTES_MAX = 4 << 20
OVERDUE_S = 1.0
CLOSE_GRACE_S = 2.0
_HEALTH_PREFIX = "/grpc.health.v1.Health/"  # probes carry no token


@dataclass(frozen=True, slots=True)
class Security:
    """Who may call. `tokens`: any of them as `authorization: Bearer …`; empty admits everybody.

    `certificate` and `key` are PEM bytes of the server's TLS identity; None: plain text.
    """

    tokens: tuple[str, ...] = ()
    certificate: bytes | None = None
    key: bytes | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            given = "certificate" if self.key is None else "key"
            raise ConfigError("security", given, "is given alone", "TLS needs certificate and key")


class StoreServer:
    """A running server. `port` is the one bound (of use when 0 was asked for)."""

    def __init__(self, servicer: StoreServicer, address: str, security: Security) -> None:
        """Bind and serve; ConfigError if the address is taken or the TLS identity is no good."""
        self._servicer = servicer
        self._server = grpc.server(
            ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="store-rpc"),
            interceptors=[_Tokens(security.tokens)] if security.tokens else [],
            options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)),
            maximum_concurrent_rpcs=CALLS_MAX,
        )
        self._server.add_generic_rpc_handlers((servicer.handlers(),))
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.port = self._bind(address, security)
        self._closing = Event()
        self._upkeep = Thread(target=self._end_overdue, name="store-rpc-upkeep", daemon=True)
        self._server.start()
        self._upkeep.start()
        self.set_serving(True)

    def set_serving(self, is_serving: bool) -> None:
        """What the health service says of the store and of the server as a whole."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            self._health.set(name, status)

    def close(self) -> None:
        """Refuse new calls, let those under way end for a moment, then end them."""
        self.set_serving(False)
        self._closing.set()
        self._server.stop(CLOSE_GRACE_S).wait(2 * CLOSE_GRACE_S)
        self._upkeep.join()

    def _bind(self, address: str, security: Security) -> int:
        try:
            if security.certificate is None or security.key is None:
                return self._server.add_insecure_port(address)
            identity = grpc.ssl_server_credentials([(security.key, security.certificate)])
            return self._server.add_secure_port(address, identity)
        except RuntimeError as error:
            raise ConfigError("address", address, f"cannot be bound: {error}", "choose a free host:port") from error

    def _end_overdue(self) -> None:
        while not self._closing.wait(OVERDUE_S):
            try:
                self._servicer.end_overdue()
            except Exception:  # the index may be gone for a while; leases must go on ending
                log.exception("overdue pins and calls could not be ended")


class _Tokens(grpc.ServerInterceptor):
    """Refuses calls without one of the tokens."""

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self._wanted = tuple(f"Bearer {token}".encode() for token in tokens)

        def refuse(request: Any, context: grpc.ServicerContext) -> Any:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "metadata `authorization` must be `Bearer <a known token>`")

        self._refusals: dict[tuple[bool, bool], grpc.RpcMethodHandler[Any, Any]] = {
            (False, False): grpc.unary_unary_rpc_method_handler(refuse),
            (False, True): grpc.unary_stream_rpc_method_handler(refuse),
            (True, False): grpc.stream_unary_rpc_method_handler(refuse),
            (True, True): grpc.stream_stream_rpc_method_handler(refuse),
        }

    def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Pass a call on, or refuse it in its own shape."""
        handler = continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_HEALTH_PREFIX):
            return handler
        given = [_bytes(v) for k, v in handler_call_details.invocation_metadata or () if k == "authorization"]
        # Every token is compared, and each in constant time: how long it takes says nothing of which is near.
        fits = [hmac.compare_digest(one, token) for one in given for token in self._wanted]
        return handler if any(fits) else self._refusals[handler.request_streaming, handler.response_streaming]


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
