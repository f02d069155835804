"""Builds the application: all routes, behind authentication and request limits.

It depends on ports only. A new route module is added to the lists below. Each route declares the access it needs.
"""

import functools

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.model.counters import HTTP_REFUSALS
from windlass.server.access_log import AccessLog
from windlass.server.auth import ACCESS_OF, CSRF_HEADER, Authenticator, caller_scope
from windlass.server.context import AppContext, WorkerApiContext
from windlass.server.errors import add_error_handlers
from windlass.server.failure_log import FailureLog
from windlass.server.middleware import AdmissionMiddleware, PageCompression
from windlass.server.openapi import add_openapi
from windlass.server.pages import STATIC, DashboardFiles, render_error, static_paths
from windlass.server.rate_limit import RateSharing
from windlass.server.route_table import read_routes
from windlass.server.routes import (
    access,
    alerts,
    cost,
    cycles,
    fleets,
    health,
    login,
    overview,
    queues,
    runbooks,
    supervisor_compat,
    task_errors,
    tasks,
    what_if,
    worker_protocol,
    workers,
)
from windlass.server.worker_calls import worker_call_handlers


class Application:
    """The ASGI application. `admission` judges requests before `api`, the FastAPI application, handles them."""

    def __init__(self, api: FastAPI, admission: AdmissionMiddleware, outermost: ASGIApp) -> None:
        self.api = api
        self.admission = admission
        self._outermost = outermost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._outermost(scope, receive, send)


def make_app(context: WorkerApiContext) -> Application:
    """The worker protocol and health routes; with an AppContext also the JSON API and the dashboard."""
    # FastAPI's own documentation pages load scripts from other hosts.
    api = FastAPI(title="Windlass", version=context.version, docs_url=None, redoc_url=None, openapi_url=None)
    api.include_router(health.health_routes(context))
    api.include_router(worker_protocol.worker_protocol_routes(context))
    error_page = None
    authenticator = Authenticator(worker_store=context.auth_store)
    if isinstance(context, AppContext):
        error_page = functools.partial(render_error, context)
        for subject in (
            *(overview, queues, fleets, workers, tasks, task_errors, cycles, cost, alerts),
            *(what_if, access, runbooks, supervisor_compat, login),
        ):
            api.include_router(subject.routes(context))
        api.include_router(health.metrics_routes(context))
        api.mount(STATIC, DashboardFiles())
        add_openapi(api)
        api.add_middleware(PageCompression)
        authenticator = Authenticator(
            worker_store=context.auth_store,
            user_store=context.store,
            is_open_to_localhost=context.is_open_to_localhost,
        )
    failures = FailureLog()
    add_error_handlers(api, error_page, failures)
    admission = AdmissionMiddleware(
        api,
        read_routes(
            api,
            ACCESS_OF,
            scope_checks=(caller_scope,),
            max_payload_bytes=context.max_payload_bytes,
            static_files=static_paths() if isinstance(context, AppContext) else (),
            handlers=worker_call_handlers(context),
        ),
        authenticator,
        rate_limit=context.rate_limit,
        worker_rate_limit=context.worker_rate_limit,
        access_log=AccessLog(lambda status: context.counters.add(HTTP_REFUSALS, (str(status),))),
        failures=failures,
        error_page=error_page,
    )
    sharing = RateSharing(context.auth_store, admission.buckets)
    cache = authenticator.cache
    admission.background_tasks = (
        functools.partial(context.auth_store.watch_revocations, cache.set_listening, cache.revoke),
        sharing.run,
        admission.access_log.run,
        failures.run,
    )
    outermost: ASGIApp = admission
    if isinstance(context, AppContext) and context.cors_origins:
        # Outside of authentication, because a preflight request has no token. Outside of the limits, so that a page may
        # read refusals too.
        outermost = CORSMiddleware(
            admission,
            allow_origins=context.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", CSRF_HEADER],
        )
    return Application(api, admission, outermost)
