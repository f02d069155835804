"""Builds the application: all routes, behind authentication and request limits.

It depends on ports only. A new route module is added to the lists below. Each route names the role it needs.
"""

import functools
from collections.abc import Mapping

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.ports.http import max_body_bytes
from windlass.server.auth import CSRF_HEADER, AuthMiddleware
from windlass.server.context import AppContext, WorkerApiContext
from windlass.server.errors import add_error_handlers
from windlass.server.middleware import PageCompression, RequestLimits
from windlass.server.openapi import add_openapi
from windlass.server.pages import DashboardFiles, render_error
from windlass.server.routes import (
    alerts,
    cost,
    cycles,
    fleets,
    health,
    login,
    overview,
    supervisor_compat,
    tasks,
    worker_protocol,
    workers,
)
from windlass.server.worker_calls import worker_call_handlers


def make_app(context: WorkerApiContext) -> FastAPI:
    """The worker protocol and health routes; with an AppContext also the JSON API and the dashboard."""
    # FastAPI's own documentation pages load scripts from other hosts.
    app = FastAPI(title="Windlass", version=context.version, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(health.health_routes(context))
    app.include_router(worker_protocol.worker_protocol_routes(context))
    error_page = None
    if isinstance(context, AppContext):
        error_page = functools.partial(render_error, context)
        for subject in (overview, workers, tasks, fleets, cycles, cost, alerts, supervisor_compat, login):
            app.include_router(subject.routes(context))
        app.include_router(health.metrics_routes(context))
        app.mount("/static", DashboardFiles())
        add_openapi(app)
    add_error_handlers(app, error_page)
    # Middleware that is added later runs earlier.
    app.add_middleware(_WorkerCalls, handlers=worker_call_handlers(context))
    if isinstance(context, AppContext):
        app.add_middleware(PageCompression)
        app.add_middleware(
            AuthMiddleware,
            worker_store=context.auth_store,
            user_store=context.store,
            is_open_to_localhost=context.is_open_to_localhost,
            rate_limit=context.rate_limit,
        )
    else:
        app.add_middleware(AuthMiddleware, worker_store=context.auth_store)
    limit = max_body_bytes(context.max_payload_bytes)
    app.add_middleware(RequestLimits, max_body_bytes=limit, error_page=error_page)
    if isinstance(context, AppContext) and context.cors_origins:
        # Outside of authentication, because a preflight request has no token. Outside of the limits, so that a page may
        # read refusals too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=context.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", CSRF_HEADER],
        )
    return app


class _WorkerCalls:
    """Answers the calls in `handlers` in place of the routes."""

    def __init__(self, app: ASGIApp, handlers: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (handler or self._app)(scope, receive, send)
