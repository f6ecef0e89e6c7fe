"""The HTTP side on Ray Serve: each replica is one entrypoint, built where it runs."""

import logging
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from ray import serve
from shoal.cluster.api.app import check_key, create_app
from shoal.cluster.api.codec import ChatCodec
from shoal.cluster.api.settings import ApiSettings
from shoal.cluster.live.entrypoint import EntrypointService
from shoal.cluster.live.facts import api_keys
from shoal.cluster.live.logs import begin_logging
from shoal.cluster.live.pixels import ModelPixels
from shoal.cluster.live.spec import ClusterSpec

REQUESTS_MAX = 4096  # streams open at once in one replica; the balancers refuse long before
SHUTDOWN_S = 5.0
# Behind HAProxy a replica that is told to go stays reachable for 30 s by default. HAProxy tries refused connections
# again elsewhere, so one second (to take the replica out of its list) loses no request.
SHORT_DRAIN = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1"}


def build_app(spec: ClusterSpec) -> FastAPI:
    """The application of one replica: codec, service, routes, and the timeline of recent requests."""
    begin_logging("entrypoint")
    directory = Path(spec.model_dir)
    preprocessor = ModelPixels(directory) if spec.cluster.encoders else None
    codec = ChatCodec.from_file(directory, preprocessor)
    service = EntrypointService(spec, f"entrypoint-{uuid.uuid4().hex[:12]}", codec.eos_token_id)
    settings = _settings(spec)
    app = create_app(service, codec, settings)
    _start_with(app, service)
    _add_timeline(app, service, settings)
    return app


def deploy(spec: ClusterSpec) -> None:
    """Start Serve on the manifest's address and run the entrypoints; returns when they are healthy."""
    api = spec.cluster.api
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(
        http_options={"host": api.host, "port": api.port, "keep_alive_timeout_s": 60},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        controller_options={"runtime_env": {"env_vars": SHORT_DRAIN}},
    )

    def build() -> FastAPI:
        return build_app(spec)

    entrypoint = serve.deployment(
        serve.ingress(build)(),
        name="entrypoint",
        num_replicas=spec.cluster.entrypoints,
        max_ongoing_requests=REQUESTS_MAX,
        ray_actor_options={"num_cpus": 0, "runtime_env": _with_short_drain()},
        graceful_shutdown_timeout_s=SHUTDOWN_S,
        health_check_period_s=1,
        health_check_timeout_s=10,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    serve.run(entrypoint.bind(), name=spec.name, route_prefix="/")


def _with_short_drain() -> dict[str, Any]:
    """This driver's runtime environment (its working directory, its variables) with the short drain added."""
    found = dict(ray.get_runtime_context().runtime_env)
    return found | {"env_vars": {**found.get("env_vars", {}), **SHORT_DRAIN}}


def _settings(spec: ClusterSpec) -> ApiSettings:
    cluster = spec.cluster
    return ApiSettings(
        context_tokens=cluster.max_model_len,
        thinking_default=False,
        request_timeout_s=cluster.policy.deadline_us / 1e6,
        api_keys=api_keys(cluster.api.keys_file),
    )


def _start_with(app: FastAPI, service: EntrypointService) -> None:
    """Begin following the directory when the application starts, on its own loop."""
    inner: Callable[[Any], AbstractAsyncContextManager[Any]] = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(started: FastAPI) -> AsyncGenerator[None, None]:
        async with inner(started):
            service.start()
            yield
            service.tasks.cancel()

    app.router.lifespan_context = lifespan


def _add_timeline(app: FastAPI, service: EntrypointService, settings: ApiSettings) -> None:
    @app.get("/debug/requests/{request_id}", response_model=None)
    async def timeline(request: Request, request_id: str) -> Response:
        check_key(request, settings)
        found = service.timeline(request_id)
        if found is None:
            return JSONResponse({"error": {"message": f"request {request_id!r} is not among the recent ones"}}, 404)
        marks = [{"at_us": k.at_us, "what": k.what, "attempt": k.attempt, **dict(k.detail)} for k in found.marks]
        return JSONResponse({"request_id": request_id, "prompt_tokens": found.prompt_tokens, "marks": marks})
