"""The application: every route, behind one guard and one gate.

It takes ports and knows nobody behind them. Whoever adds a route adds it to the list below; what is under `/internal/`
needs a token, and which one stands at the route.
"""

from fastapi import FastAPI

from windlass.api.control import control_routes, health_routes
from windlass.api.errors import add_error_handlers
from windlass.api.face import Face
from windlass.api.gate import Gate
from windlass.api.guard import Guard
from windlass.api.workers import joining_routes, worker_routes
from windlass.ports.http import max_body_bytes


def make_app(face: Face) -> FastAPI:
    # Its pages of documentation load scripts from elsewhere; docs/api.md is ours.
    app = FastAPI(title="Windlass", version=face.version, docs_url=None, redoc_url=None, openapi_url=None)
    for routes in (health_routes, joining_routes, worker_routes, control_routes):
        app.include_router(routes(face))
    add_error_handlers(app)
    app.add_middleware(Gate, access=face.access)
    # Added last, so it stands first.
    app.add_middleware(Guard, max_body_bytes=max_body_bytes(face.max_payload_bytes))
    return app
