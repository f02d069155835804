"""The application: every route, behind one guard and one gate.

It takes ports and knows nobody behind them. Whoever adds a route adds it to the list below. What is under `/internal/`
needs a token; who may call a route stands at the route.
"""

import functools

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from windlass.ports.http import max_body_bytes
from windlass.server.auth import CSRF_HEADER, AuthMiddleware
from windlass.server.context import AppContext, DashboardContext
from windlass.server.errors import add_error_handlers
from windlass.server.metrics_recording import measuring_routes
from windlass.server.middleware import RequestLimits
from windlass.server.openapi import describe
from windlass.server.routes.dashboard_actions import act_routes
from windlass.server.routes.health import control_routes, health_routes
from windlass.server.routes.operations import operating_routes, producing_routes
from windlass.server.routes.pages import asset_routes, page_routes, problem
from windlass.server.routes.queries import looking_routes
from windlass.server.routes.supervisor_compat import compatible_routes
from windlass.server.routes.worker_protocol import joining_routes, worker_routes
from windlass.server.session import session_routes


def make_app(face: AppContext) -> FastAPI:
    # Its pages of documentation load scripts from elsewhere; docs/api.md is ours.
    app = FastAPI(title="Windlass", version=face.version, docs_url=None, redoc_url=None, openapi_url=None)
    for routes in (health_routes, joining_routes, worker_routes, control_routes):
        app.include_router(routes(face))
    if face.shown is not None:
        _show(app, face, face.shown)
    as_page = functools.partial(problem, face) if face.shown is not None else None
    add_error_handlers(app, as_page)
    if face.shown is not None:
        app.add_middleware(
            AuthMiddleware,
            access=face.access,
            people=face.shown.store,
            is_open_here=face.shown.is_open_here,
            rate_limit=face.shown.rate_limit,
        )
    else:
        app.add_middleware(AuthMiddleware, access=face.access)
    # What is added later stands before what was added first.
    app.add_middleware(RequestLimits, max_body_bytes=max_body_bytes(face.max_payload_bytes), as_page=as_page)
    if face.shown is not None and face.shown.cors_origins:
        # Before the gate: a browser asks whether it may ask before it has a token. And before the guard, which answers
        # for whatever was refused: a page may read that too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=face.shown.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", CSRF_HEADER],
        )
    return app


def _show(app: FastAPI, face: AppContext, shown: DashboardContext) -> None:
    for routes in (looking_routes, producing_routes, operating_routes):
        app.include_router(routes(face, shown))
    for others in (compatible_routes, measuring_routes, session_routes):
        app.include_router(others(shown))
    for pages in (page_routes, act_routes):
        app.include_router(pages(face, shown))
    app.include_router(asset_routes())
    describe(app)
