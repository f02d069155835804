"""The OpenAPI description: what each route answers, with an example, and that everything else is a Problem."""

import json
from http import HTTPStatus
from importlib import resources
from typing import Any

from fastapi import Depends, FastAPI, Response
from fastapi.openapi.utils import get_openapi

from windlass.ports import http
from windlass.server.auth import CSRF_HEADER, OPEN, viewer

OPENAPI = "/api/v1/openapi.json"
_DESCRIPTION = (
    "Elastic workers for a PostgreSQL task queue. Reading needs a token of role `viewer`, enqueueing `producer`, "
    f"everything else `operator`; a session of the dashboard does as well, with its CSRF token in `{CSRF_HEADER}`. "
    "On the control plane's own host, for as long as no token was made, reading is open. "
    "Every answer that is no success is a Problem (RFC 9457)."
)
EXAMPLES: dict[str, Any] = json.loads(resources.files("windlass.server").joinpath("examples.json").read_text())


def documented(
    kind: Any,
    summary: str,
    example: str,
    *,
    media_type: str = "application/json",
    status_code: int = 200,
    also: tuple[int, str] | None = None,
) -> dict[str, Any]:
    """What a route's decorator is told: the shape of its answer, an example of it, and of what goes wrong.

    `also`: another status that comes with the same shape, and an example of that.
    """
    # Of examples only their names: FastAPI would leave out every null of them.
    content: dict[str, Any] = {"example": example}
    if media_type != "application/json":
        content["schema"] = {"type": "string"}
    told: dict[str, Any] = {
        "summary": summary,
        "status_code": status_code,
        "responses": {
            status_code: {"content": {media_type: content}},
            "default": {"description": "What is wrong", "content": {http.PROBLEM_JSON: {"schema": _PROBLEM}}},
        },
    }
    if media_type == "application/json":
        told["response_model"] = kind
    else:
        told |= {"response_class": Response, "response_model": None}
    if also is not None:
        status, its_example = also
        told["responses"][status] = {
            "description": HTTPStatus(status).phrase,
            "model": kind,
            "content": {media_type: {"example": its_example}},
        }
    return told


_PROBLEM = {"$ref": "#/components/schemas/Problem"}
_PROBLEM_SCHEMA = {
    "type": "object",
    "title": "Problem",
    "required": ["type", "title", "status", "code", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "description": "For programs; docs/api.md lists them."},
        "detail": {"type": "string", "description": "One sentence: what is wrong, what to do."},
    },
    "example": EXAMPLES["problem"],
}


def describe(app: FastAPI) -> None:
    """Make the whole description, and serve it."""

    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]

    @app.get(OPENAPI, dependencies=[Depends(viewer)], include_in_schema=False)
    async def description() -> dict[str, Any]:
        return openapi()


def _described(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, description=_DESCRIPTION, routes=app.routes)
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    # What cannot be read is answered with 400, as a Problem.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Problem"] = _PROBLEM_SCHEMA
    schema["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "`windlass tokens create` makes one."}
    }
    schema["security"] = [{"token": []}]
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            if path.startswith(OPEN):
                operation["security"] = []
            for content in operation.get("requestBody", {}).get("content", {}).values():
                content["example"] = EXAMPLES["bodies"][_named(content["schema"])]
            operation["responses"].pop("422", None)
            for answer in operation["responses"].values():
                for content in answer.get("content", {}).values():
                    if "example" in content:
                        content["example"] = EXAMPLES[content["example"]]
            problem = {"description": "What is wrong", "content": {http.PROBLEM_JSON: {"schema": _PROBLEM}}}
            operation["responses"].setdefault("default", problem)
    return schema


def _named(schema: dict[str, Any]) -> str:
    """The name of a body's shape, which may stand beside its description or a null."""
    found: list[dict[str, Any]] = [schema, *schema.get("allOf", ()), *schema.get("anyOf", ())]
    return next(str(part["$ref"]).rpartition("/")[2] for part in found if "$ref" in part)
