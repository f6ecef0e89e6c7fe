"""The HTTP application: routes, request ids, keys, and an error object for whatever goes wrong."""

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from shoal.cluster.api.chat import ChatDesk, ChatResponse, read_body, read_envelope
from shoal.cluster.api.codec import ChatCodec
from shoal.cluster.api.completions import CompletionDialect
from shoal.cluster.api.dialect import ChatDialect
from shoal.cluster.api.errors import ApiError, BadRequestError, UnauthorisedError, UnavailableError
from shoal.cluster.api.jobs import ChatService
from shoal.cluster.api.metrics import ApiMetrics
from shoal.cluster.api.settings import ApiSettings
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal import __version__

log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def create_app(service: ChatService, codec: ChatCodec, settings: ApiSettings) -> FastAPI:
    """Build the application. Call it in the process that serves it: it owns threads and counters."""
    metrics = ApiMetrics(service.models[0])
    pool = ThreadPoolExecutor(settings.prepare_threads, thread_name_prefix="prepare")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        pool.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="Shoal", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan
    )
    app.add_middleware(RequestScope, metrics=metrics)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    _add_chat(app, ChatDesk(service, codec, settings, metrics, pool))
    _add_state(app, service, metrics, settings)
    return app


def _add_chat(app: FastAPI, desk: ChatDesk) -> None:
    started, chat, text = int(time.time()), ChatDialect(), CompletionDialect()

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        check_key(request, desk.settings)
        envelope = read_envelope(request, desk.settings, request.scope["shoal.request_id"])
        return ChatResponse(desk, chat, await read_body(request, desk.settings), envelope)

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        check_key(request, desk.settings)
        envelope = read_envelope(request, desk.settings, request.scope["shoal.request_id"])
        return ChatResponse(desk, text, await read_body(request, desk.settings), envelope)

    @app.get("/v1/models", response_model=None)
    async def models(request: Request) -> Response:
        check_key(request, desk.settings)
        return JSONResponse({"object": "list", "data": [_model(name, desk, started) for name in desk.service.models]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(request: Request, name: str) -> Response:
        check_key(request, desk.settings)
        if name not in desk.service.models:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"model {name[:80]!r} is not served here")
        return JSONResponse(_model(name, desk, started))


def _model(name: str, desk: ChatDesk, created: int) -> dict[str, Any]:
    limit = desk.settings.context_tokens
    return {"id": name, "object": "model", "created": created, "owned_by": "shoal", "max_model_len": limit}


def _add_state(app: FastAPI, service: ChatService, metrics: ApiMetrics, settings: ApiSettings) -> None:
    @app.get("/health", response_model=None)
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        if not service.ready():
            raise UnavailableError("not ready: no complete set of groups is serving yet")
        return JSONResponse({"status": "ready"})

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics", response_model=None)
    async def scrape() -> Response:
        cluster: str | None = None
        try:
            async with asyncio.timeout(settings.metrics_timeout_s):
                cluster = await service.metrics_text()
        except Exception:  # a cluster that cannot answer must not hide this process's own counters
            log.exception("the cluster's metrics did not come within %g s", settings.metrics_timeout_s)
        return Response(metrics.text(cluster), media_type="text/plain; version=0.0.4; charset=utf-8")


def check_key(request: Request, settings: ApiSettings) -> None:
    """Refuse a missing or wrong API key; the comparison takes the same time wherever the keys differ."""
    if not settings.api_keys:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    matches = [hmac.compare_digest(given.encode(), key.encode()) for key in settings.api_keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise UnauthorisedError("the API key is missing or wrong; send 'Authorization: Bearer <key>'")


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for ApiError"
    return JSONResponse(error.body(), error.status, headers=error.headers())


async def _http_error(_: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods."""
    assert isinstance(error, HTTPException), "registered for HTTPException"
    body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": "not_found"}
    if error.status_code != HTTPStatus.NOT_FOUND:
        body["code"] = "invalid_request_error"
    return JSONResponse({"error": body}, error.status_code, headers=error.headers)


class RequestScope:
    """Gives each request its id, puts it on the response, counts it, and turns a crash into a 500 error object."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; never lets an exception reach the server."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        is_valid = _REQUEST_ID.fullmatch(given) is not None
        request_id = given if is_valid else f"req-{uuid.uuid4().hex}"
        scope["shoal.request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                self._metrics.count_http(status)
            await send(message)

        try:
            if given and not is_valid:
                rule = "must be 1 to 128 visible ASCII characters"
                error = BadRequestError(f"x-request-id {rule}", param="x-request-id", code="invalid_value")
                await JSONResponse(error.body(), error.status)(scope, receive, send_with_id)
                return
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            log.info("request %s: the client went away while sending", request_id)
        except Exception:
            log.exception("request %s: failed", request_id)
            if not status:
                message = f"internal error; the server's log has it under request id {request_id}"
                crash = ApiError(message, code="internal_error")
                await JSONResponse(crash.body(), crash.status)(scope, receive, send_with_id)
