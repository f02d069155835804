"""The OpenAPI description, with an example for every request and response.

Examples are generated from the schemas: values come from `examples` and defaults in the schema, or from the table of
sample values below. Every error response is a Problem (RFC 9457).
"""

from http import HTTPStatus
from typing import Any

from fastapi import Depends, FastAPI, Response
from fastapi.openapi.utils import get_openapi

from windlass.ports import http
from windlass.server.auth import CSRF_HEADER, viewer

OPENAPI = "/api/v1/openapi.json"
_DESCRIPTION = (
    "Elastic workers for a PostgreSQL task queue. Reading needs a token of role `viewer`, enqueueing `producer`, "
    "changes `operator`, and managing tokens `admin`. "
    f"A dashboard session works too, with its CSRF token in `{CSRF_HEADER}`. "
    "Requests from the server's own host may read without a token until the first token is created. "
    "Every error response is a Problem (RFC 9457)."
)
_PROBLEM = {"$ref": "#/components/schemas/Problem"}
_PROBLEM_RESPONSE = {"description": "Error", "content": {http.PROBLEM_JSON: {"schema": _PROBLEM}}}
_PROBLEM_SCHEMA = {
    "type": "object",
    "title": "Problem",
    "required": ["type", "title", "status", "code", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "description": "For programs. docs/api.md lists the codes."},
        "detail": {"type": "string", "description": "What failed, why, and what to do."},
    },
    "example": {
        "type": "about:blank",
        "title": "Not Found",
        "status": 404,
        "code": http.NOT_FOUND,
        "detail": "task 17 not found (unknown, or already purged).",
    },
}
# Sample values by property name, used where a schema has no example of its own and the type matches.
_SAMPLES: dict[str, Any] = {
    "id": 812,
    "task_id": 4711,
    "fleet": "gpus",
    "name": "gpus",
    "queue": "renders",
    "queues": ["renders"],
    "worker_id": "gpus-3-7f2a9c",
    "provider": "runpod",
    "version": "1.0.0",
    "currency": "USD",
    "token": "4b2a9f0e-6c1d-4f55-9a55-0d4d7e2f6a10",
    "code": "HANDLER_ERROR",
    "level": "warning",
    "severity": "warning",
    "reason": "idle 61 s, 4 workers, 2 needed",
    "message": "worker gpus-3-7f2a9c paused",
    "decision": "spawn 3: 41 queued, 0 free slots, target 5",
    "error": "ValueError: prompt is empty",
    "host": "10.0.0.7",
    "filename": "windlass-1.0.0-py3-none-any.whl",
}
_BY_FORMAT = {"date-time": "2026-11-15T10:00:00Z", "uuid": _SAMPLES["token"], "binary": ""}
_MAX_DEPTH = 12
_OPEN_PATHS = ("/healthz", "/readyz")


def documented(
    model: Any,
    summary: str,
    *,
    media_type: str = "application/json",
    example: Any = None,
    status_code: int = 200,
    also: int | None = None,
    also_example: Any = None,
) -> dict[str, Any]:
    """Arguments of a route decorator: response schema, summary and examples.

    `example` is needed only for responses that are not JSON. `also`: another status with the same schema.
    """
    documented_route: dict[str, Any] = {"summary": summary, "status_code": status_code, "responses": {}}
    if media_type == "application/json":
        documented_route["response_model"] = model
    else:
        content = {media_type: {"schema": {"type": "string"}, "example": example}}
        documented_route |= {"response_class": Response, "response_model": None}
        documented_route["responses"][status_code] = {"content": content}
    if also is not None:
        response: dict[str, Any] = {"description": HTTPStatus(also).phrase, "model": model}
        if also_example is not None:
            response["content"] = {media_type: {"example": also_example}}
        documented_route["responses"][also] = response
    return documented_route


def add_openapi(app: FastAPI) -> None:
    """Serve the description."""

    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            app.openapi_schema = _build_description(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]

    @app.get(OPENAPI, dependencies=[Depends(viewer)], include_in_schema=False)
    async def description() -> dict[str, Any]:
        return openapi()


def _build_description(app: FastAPI) -> dict[str, Any]:
    description = get_openapi(title=app.title, version=app.version, description=_DESCRIPTION, routes=app.routes)
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    # Invalid requests are answered with 400 and a Problem, not with FastAPI's 422.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Problem"] = _PROBLEM_SCHEMA
    description["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "Created by `windlass tokens create`."}
    }
    description["security"] = [{"token": []}]
    for path, methods in description["paths"].items():
        for operation in methods.values():
            if path in _OPEN_PATHS:
                operation["security"] = []
            operation["responses"].pop("422", None)
            contents = [operation.get("requestBody", {}), *operation["responses"].values()]
            for content in (one for part in contents for one in part.get("content", {}).values()):
                content.setdefault("example", _example(content["schema"], schemas))
            operation["responses"].setdefault("default", _PROBLEM_RESPONSE)
    return description


def _example(schema: dict[str, Any], schemas: dict[str, Any], name: str = "", depth: int = 0) -> Any:
    """A value that the schema accepts. `name` is the property that holds it."""
    if "$ref" in schema:
        return _example(schemas[schema["$ref"].rpartition("/")[2]], schemas, name, depth + 1)
    for key in ("examples", "enum"):
        if key in schema:
            return schema[key][0]
    for key in ("const", "example"):
        if key in schema:
            return schema[key]
    choices = schema.get("allOf") or schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return _example(choices[0], schemas, name, depth + 1)
    sample = _SAMPLES.get(name)
    match schema.get("type"):
        case "object":
            properties: dict[str, Any] = schema.get("properties", {})
            return {key: _example(value, schemas, key, depth + 1) for key, value in properties.items()}
        case "array" if isinstance(sample, list) or depth > _MAX_DEPTH:
            return sample or []
        case "array":
            items = schema.get("prefixItems") or [schema.get("items", {})]
            return [_example(item, schemas, name, depth + 1) for item in items]
        case "string":
            return _BY_FORMAT.get(schema.get("format", ""), sample if isinstance(sample, str) else "string")
        case "integer" | "number":
            return sample if isinstance(sample, int) else schema.get("default", schema.get("minimum", 1))
        case kind:
            return schema.get("default", True if kind == "boolean" else None)
