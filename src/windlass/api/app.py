"""The application: every route, behind one guard and one gate.

It takes ports and knows nobody behind them. Whoever adds a route adds it to the list below. What is under `/internal/`
needs a token; who may call a route stands at the route.
"""

import functools

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from windlass.api.acts import act_routes
from windlass.api.compatible import compatible_routes
from windlass.api.control import control_routes, health_routes
from windlass.api.documented import describe
from windlass.api.doing import operating_routes, producing_routes
from windlass.api.errors import add_error_handlers
from windlass.api.face import Face, Shown
from windlass.api.gate import CSRF_HEADER, Gate
from windlass.api.guard import Guard
from windlass.api.looking import looking_routes
from windlass.api.measuring import measuring_routes
from windlass.api.pages import asset_routes, page_routes, problem
from windlass.api.session import session_routes
from windlass.api.workers import joining_routes, worker_routes
from windlass.ports.http import max_body_bytes


def make_app(face: Face) -> FastAPI:
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
            Gate,
            access=face.access,
            people=face.shown.store,
            is_open_here=face.shown.is_open_here,
            rate_limit=face.shown.rate_limit,
        )
    else:
        app.add_middleware(Gate, access=face.access)
    # What is added later stands before what was added first.
    app.add_middleware(Guard, max_body_bytes=max_body_bytes(face.max_payload_bytes), as_page=as_page)
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


def _show(app: FastAPI, face: Face, shown: Shown) -> None:
    for routes in (looking_routes, producing_routes, operating_routes):
        app.include_router(routes(face, shown))
    for others in (compatible_routes, measuring_routes, session_routes):
        app.include_router(others(shown))
    for pages in (page_routes, act_routes):
        app.include_router(pages(face, shown))
    app.include_router(asset_routes())
    describe(app)
