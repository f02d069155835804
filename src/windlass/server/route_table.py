"""The routes of the application with the access each needs, so that a request is judged before its body is read.

Every route declares its access once, by one of the dependencies in auth.py. The table reads these declarations from the
application and finds the route of a request by method and path. A route without a declaration, or with two, is an error
when the application is built.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Any

from fastapi import FastAPI, routing
from starlette.routing import compile_path
from starlette.types import ASGIApp

from windlass.ports import http

# Bodies of all routes but those in `large_bodies`.
MAX_SMALL_BODY_BYTES = 64 * 1024
# Bodies of routes that need no caller: a form with a CSRF token.
MAX_ANONYMOUS_BODY_BYTES = 4 * 1024


class Access(Enum):
    """Who may call a route."""

    OPEN = auto()  # all callers, without authentication
    ANYONE = auto()  # all callers; a token or session is checked if the request has one
    VIEWER = auto()
    TASK_READER = auto()  # a viewer, or the producer that enqueued the task
    PRODUCER = auto()
    OPERATOR = auto()
    ADMIN = auto()
    OPERATOR_FORM = auto()  # an operator's session; the CSRF token is a field of the form
    ADMIN_FORM = auto()
    WORKER = auto()  # a worker token
    JOINING = auto()  # a join token
    MACHINE = auto()  # a worker token or a join token
    WORKER_ROLE = auto()  # an API token of role worker


@dataclass(frozen=True, slots=True)
class RouteEntry:
    method: str
    path: str
    access: Access
    max_body_bytes: int = MAX_SMALL_BODY_BYTES
    # Sessions and requests without a token are not accepted.
    needs_token: bool = False
    # Answers in place of the application, for routes that must be fast.
    handler: ASGIApp | None = None
    # The route itself checks the queues and fleets that a token is limited to.
    is_scoped: bool = False

    def parameters(self, path: str) -> dict[str, str]:
        """The parameters in the path of a request to this route."""
        match = _pattern(self.path).match(path)
        return match.groupdict() if match is not None else {}


def large_bodies(max_payload_bytes: int) -> dict[str, int]:
    """Limits of the bodies that carry payloads, results and output, by path."""
    return {
        "/api/v1/tasks": max_payload_bytes + MAX_SMALL_BODY_BYTES,
        http.FINISH: http.max_body_bytes(max_payload_bytes),
        http.LOGS: http.MAX_LOGS_BYTES,
    }


@lru_cache(maxsize=1_000)
def _pattern(path: str) -> re.Pattern[str]:
    return compile_path(path)[0]


class RouteTable:
    """Finds the route of a request. A fixed path comes before a path with parameters."""

    def __init__(self, entries: Iterable[RouteEntry]) -> None:
        self._fixed: dict[str, dict[str, RouteEntry]] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, RouteEntry]]] = {}
        for entry in entries:
            if "{" in entry.path:
                pattern = _pattern(entry.path)
                by_method = self._patterns.setdefault(entry.path, (pattern, {}))[1]
            else:
                by_method = self._fixed.setdefault(entry.path, {})
            if entry.method in by_method:
                raise ValueError(f"route {entry.method} {entry.path} is defined twice")
            by_method[entry.method] = entry

    def __iter__(self) -> Iterable[RouteEntry]:
        for by_method in (*self._fixed.values(), *(methods for _, methods in self._patterns.values())):
            yield from by_method.values()

    def find(self, method: str, path: str) -> RouteEntry | frozenset[str]:
        """The route, or the methods that this path has. Empty if there is no such path."""
        by_method = self._fixed.get(path)
        if by_method is not None:
            return by_method.get(method) or frozenset(by_method)
        allowed: set[str] = set()
        for pattern, methods in self._patterns.values():
            if pattern.match(path) is not None:
                if method in methods:
                    return methods[method]
                allowed.update(methods)
        return frozenset(allowed)


def read_routes(
    app: FastAPI,
    access_of: Mapping[Callable[..., Any], Access],
    *,
    scope_checks: Iterable[Callable[..., Any]] = (),
    max_payload_bytes: int,
    static_files: Iterable[str] = (),
    handlers: Mapping[str, ASGIApp] | None = None,
) -> RouteTable:
    """The table of an application.

    `access_of`: the access that each dependency stands for. `scope_checks`: dependencies of the routes that check the
    caller's scope themselves. `static_files`: paths of a mounted folder, open to all.
    `handlers`: by path, see RouteEntry.
    """
    limits, checks = large_bodies(max_payload_bytes), frozenset(scope_checks)
    entries = [RouteEntry(method, path, Access.OPEN) for path in static_files for method in ("GET", "HEAD")]
    for route in routing.iter_route_contexts(app.routes):
        dependant = getattr(route, "dependant", None)
        if dependant is None:
            continue  # a mounted folder: only its files are in the table
        path, methods = route.path or "", route.methods or set()
        declared = {access_of[each.call] for each in dependant.dependencies if each.call in access_of}
        if len(declared) != 1:
            raise ValueError(f"route {path} must declare its access by exactly one dependency of auth.py")
        (access,) = declared
        small = MAX_ANONYMOUS_BODY_BYTES if access in (Access.OPEN, Access.ANYONE) else MAX_SMALL_BODY_BYTES
        entries += [
            RouteEntry(
                method,
                path,
                access,
                max_body_bytes=limits.get(path, small) if method == "POST" else small,
                needs_token=path.startswith("/internal/"),
                handler=(handlers or {}).get(path),
                is_scoped=any(each.call in checks for each in dependant.dependencies),
            )
            for method in methods
        ]
    return RouteTable(entries)
