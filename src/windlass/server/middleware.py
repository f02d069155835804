"""Outermost middleware: decides on each request by its header, and gives a response to every error.

Route, caller, role, CSRF token, rate and size are judged before a byte of the body is read. A refused request is
answered at once; if its body is large or of unknown size, the connection is closed after the response. A caller that is
refused all the time is answered late, so that it occupies its own connections and not the server. Responses get
security headers, and requests a line in the access log. An unexpected error is answered with 500, and its traceback is
logged once per interval and place.
"""

import asyncio
import contextlib
import functools
import random
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.background import background_task
from windlass.model.actor import acting_as
from windlass.model.auth import JoinCaller, TokenCaller, WorkerCaller
from windlass.ports import http
from windlass.server.access_log import AccessLog, short_path
from windlass.server.auth import ANONYMOUS, SAFE_METHODS, Authenticator, Headers, address_of, check_access, check_scope
from windlass.server.errors import ApiError, ErrorPage, defect, error_response, not_found, to_api_error
from windlass.server.failure_log import FailureLog
from windlass.server.identity_cache import CallerIdentity
from windlass.server.rate_limit import (
    BYTES_PER_REQUEST,
    MAX_LARGE_PER_WORKER,
    MAX_OPEN_CALLS,
    MAX_OPEN_CALLS_PER_WORKER,
    MAX_REFUSALS_PER_S,
    ConcurrencyLimiter,
    LeakyBuckets,
    RequestRateLimiter,
    WorkerTurns,
)
from windlass.server.request_body import BodyReader, BufferedBytes
from windlass.server.route_table import Access, RouteEntry, RouteTable

# After a refusal the rest of a body is dropped within these limits. Closing a connection with unread data would reset
# it, and the client might lose the response.
MAX_DROPPED_BYTES = 1 << 20
DROP_TIMEOUT_S = 2.0
# A caller with more than MAX_REFUSALS_PER_S refusals gets further ones this late, and nothing of its bodies is read.
# Between half and one and a half of it: otherwise all of them would return at the same moment.
LATE_REFUSAL_S = 1.0
# Refusals that wait at the same time. They hold connections, so further ones are sent at once.
MAX_LATE_REFUSALS = 1_000
# Defaults; a handler may set its own.
SECURITY_HEADERS = {
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
}
# Pages load only what this server serves, and contain no inline script.
PAGE_CONTENT_SECURITY_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    b"connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_CLOSE = (b"connection", b"close")
log = structlog.get_logger("windlass.server")

BackgroundTask = Callable[[], Coroutine[Any, Any, None]]


class PageCompression(GZipMiddleware):
    """gzip for pages, static files and the JSON API.

    The worker protocol is left out: its many small responses would cost more time than they save. Starlette never
    compresses `text/event-stream`, so events are not buffered.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/internal/"):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class AdmissionMiddleware:
    """Decides whether a request reaches the application, and runs background tasks while the server runs."""

    def __init__(
        self,
        app: ASGIApp,
        routes: RouteTable,
        authenticator: Authenticator,
        *,
        rate_limit: float,
        worker_rate_limit: float,
        access_log: AccessLog | None = None,
        failures: FailureLog | None = None,
        error_page: ErrorPage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.app = app
        self.error_page = error_page
        self.access_log = access_log or AccessLog()
        self.failures = failures or FailureLog(clock)
        self.buffered = BufferedBytes()
        self.open_calls = ConcurrencyLimiter("requests")
        self.worker_bodies = ConcurrencyLimiter("large requests")
        self.worker_turns = WorkerTurns()
        self.routes = routes
        self.authenticator = authenticator
        self._requests = RequestRateLimiter("request", rate_limit, clock)
        self._worker_requests = RequestRateLimiter("worker", worker_rate_limit, clock)
        self._open_requests = RequestRateLimiter("open", rate_limit, clock)
        self._refusals = RequestRateLimiter("refusal", MAX_REFUSALS_PER_S, clock)
        self.late_refusals = 0
        # Started and stopped by the server, over the lifespan protocol of ASGI.
        self.background_tasks: Sequence[BackgroundTask] = ()

    @property
    def buckets(self) -> tuple[LeakyBuckets, ...]:
        """Limits that server processes share."""
        return self._requests, self._worker_requests, self._open_requests, self._refusals, self.authenticator.failures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await _RequestContext(self, scope, receive, send).run()
            case "websocket":
                await send({"type": "websocket.close", "code": 1000})
            case "lifespan":
                await self._run_background_tasks(receive, send)

    async def admit(self, scope: Scope, headers: Headers, body: BodyReader) -> tuple[RouteEntry, CallerIdentity]:
        """The route and the caller of a request. Raises ApiError, or DatabaseUnavailable."""
        identity = ANONYMOUS
        try:
            route = self._find_route(scope)
            if route.access is Access.OPEN:
                self._open_requests.check(address_of(scope))
            else:
                identity = await self.authenticator.authenticate(scope, headers, needs_token=route.needs_token)
                self._check_rate(identity, scope, body)
                check_access(route.access, identity, scope["method"], headers)
                check_scope(route, identity.caller, scope["path"])
            body.set_limit(route.max_body_bytes)
        except ApiError as error:
            error.caller_name = identity.name
            raise
        return route, identity

    async def throttle_refusal(self, caller: str) -> bool:
        """Count a refusal of this caller. If it has too many, wait and return True."""
        if self._refusals.add(caller, is_counted_when_full=False):
            return False
        if self.late_refusals < MAX_LATE_REFUSALS:
            self.late_refusals += 1
            try:
                await asyncio.sleep(LATE_REFUSAL_S * random.uniform(0.5, 1.5))  # noqa: S311
            finally:
                self.late_refusals -= 1
        return True

    def _find_route(self, scope: Scope) -> RouteEntry:
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            # PostgreSQL accepts no NUL in text. Without this check every route would fail in its own way.
            raise ApiError(400, http.BAD_INPUT, "the address contains a NUL character (%00)")
        found = self.routes.find(scope["method"], scope["path"])
        if isinstance(found, RouteEntry):
            return found
        if not found:
            raise not_found("no such path")
        error = ApiError(405, http.NOT_FOUND, "method not allowed")
        error.headers = {"Allow": ", ".join(sorted(found))}
        raise error

    def _check_rate(self, identity: CallerIdentity, scope: Scope, body: BodyReader) -> None:
        if isinstance(identity.caller, WorkerCaller | JoinCaller):
            calls = 1.0 + (body.announced_bytes or 0) / BYTES_PER_REQUEST
            self._worker_requests.check(identity.caller.worker_id, calls)
        else:
            self._requests.check(identity.name or address_of(scope))

    def charge_body(self, worker_id: str, body: BodyReader) -> None:
        """Count what a worker sent beyond the announced size: a chunked or compressed body."""
        more_bytes = body.content_bytes - (body.announced_bytes or 0)
        if more_bytes > 0:
            self._worker_requests.add(worker_id, more_bytes / BYTES_PER_REQUEST, is_counted_when_full=True)

    async def _run_background_tasks(self, receive: Receive, send: Send) -> None:
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            for task in self.background_tasks:
                await stack.enter_async_context(background_task(task()))
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


class _ConnectionFailed(Exception):
    """The server could not send: the client is gone, or has broken the protocol."""


class _RequestContext:
    """One request and its response."""

    __slots__ = (
        *("_body", "_counted_worker", "_headers", "_identity", "_is_admitted", "_is_counted", "_is_late"),
        *("_middleware", "_scope", "_send_to_client", "_status", "_turn_of"),
    )

    def __init__(self, middleware: AdmissionMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        self._middleware = middleware
        self._scope = scope
        self._send_to_client = send
        self._headers: Headers = dict(scope["headers"])
        self._body = BodyReader(receive, self._headers, buffered=middleware.buffered)
        self._identity = ANONYMOUS
        # The body may be read.
        self._is_admitted = False
        self._is_late = False
        # This request is counted as an open call of its caller.
        self._is_counted = False
        # None until the response has started.
        self._status: int | None = None
        # The worker whose large body is counted.
        self._counted_worker: str | None = None
        # The worker whose turn this request has.
        self._turn_of: str | None = None

    async def run(self) -> None:
        started = time.monotonic()
        caller_name: str | None = None
        try:
            route, self._identity = await self._middleware.admit(self._scope, self._headers, self._body)
            self._set_state(route)
            self._body.caller = self._identity.name or address_of(self._scope)
            await self._begin_call(route)
            if self._scope["method"] not in SAFE_METHODS:
                if self._body.may_be_large:
                    self._count_large_body()
                self._is_admitted = True
                await self._body.read()
                if self._counted_worker is not None:
                    self._middleware.charge_body(self._counted_worker, self._body)
            self._is_admitted = True
            with acting_as(self._actor()):
                await (route.handler or self._middleware.app)(self._scope, self._body.receive, self._send)
        except _ConnectionFailed:
            pass
        except Exception as error:
            if isinstance(error, ApiError) and error.caller_name is not None:
                caller_name = error.caller_name
            await self._respond_to(error)
        finally:
            self._body.release()
            if self._counted_worker is not None:
                self._middleware.worker_bodies.end(self._counted_worker)
            if self._turn_of is not None:
                self._middleware.worker_turns.end(self._turn_of)
            if self._is_counted:
                self._middleware.open_calls.end(self._body.caller)
            duration_s = time.monotonic() - started
            self._middleware.access_log.record(
                self._scope, self._status or 0, caller_name or self._identity.name, duration_s
            )

    async def _begin_call(self, route: RouteEntry) -> None:
        """Count the call of a known caller. That of a worker waits for its turn, except a wait for work."""
        caller = self._identity.caller
        if self._identity.name is None:
            return
        is_worker = isinstance(caller, WorkerCaller | JoinCaller)
        self._middleware.open_calls.begin(self._body.caller, MAX_OPEN_CALLS_PER_WORKER if is_worker else MAX_OPEN_CALLS)
        self._is_counted = True
        if isinstance(caller, WorkerCaller | JoinCaller) and route.path != http.WAIT:
            await self._middleware.worker_turns.begin(caller.worker_id)
            self._turn_of = caller.worker_id

    def _count_large_body(self) -> None:
        caller = self._identity.caller
        if isinstance(caller, WorkerCaller):
            self._middleware.worker_bodies.begin(caller.worker_id, MAX_LARGE_PER_WORKER)
            self._counted_worker = caller.worker_id

    def _actor(self) -> str | None:
        """Named in the events that this request causes. Workers have events of their own."""
        caller = self._identity.caller
        return caller.actor if isinstance(caller, TokenCaller) and self._identity.name is not None else None

    def _set_state(self, route: RouteEntry) -> None:
        identity, authenticator = self._identity, self._middleware.authenticator
        state = self._scope.setdefault("state", {})
        state["access"] = route.access
        state["caller"] = identity.caller
        state["caller_name"] = identity.name
        state["session"] = identity.session
        state["token_hash"] = identity.token_hash
        if route.handler is None:
            address = address_of(self._scope)
            state["is_still_allowed"] = functools.partial(
                authenticator.is_still_allowed, identity, self._scope, self._headers
            )
            state["check_failures"] = functools.partial(authenticator.failures.check, address)
            state["count_failure"] = functools.partial(authenticator.failures.count, address)
            state["forget_identity"] = authenticator.cache.remove

    async def _respond_to(self, error: Exception) -> None:
        failures = self._middleware.failures
        converted = to_api_error(error, failures)
        if converted is None:
            if requests := failures.count(_place_of(error)):
                method, path = self._scope["method"], short_path(self._scope["path"])
                log.error("handle request failed", method=method, path=path, requests=requests, exc_info=error)
            converted = defect()
        if self._status is not None:
            return
        if not self._is_admitted and converted.status_code < 500:
            caller = converted.caller_name or self._identity.name or address_of(self._scope)
            self._is_late = await self._middleware.throttle_refusal(caller)
            if self._is_late:
                message = f"more than {MAX_REFUSALS_PER_S:g} refused requests per second; the last: {converted.detail}"
                converted = ApiError(429, http.TOO_MANY, message, retry_after_s=1)
        response = error_response(Request(self._scope), converted, self._middleware.error_page)
        with contextlib.suppress(_ConnectionFailed):
            if self._is_late or not self._has_unread_body:
                await response(self._scope, self._body.receive, self._send)
                return
            await self._send(
                {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
            )
            await self._send({"type": "http.response.body", "body": bytes(response.body), "more_body": True})
            await self._body.discard(MAX_DROPPED_BYTES, DROP_TIMEOUT_S)
            await self._send({"type": "http.response.body", "body": b""})

    @property
    def _has_unread_body(self) -> bool:
        """Whether a large body, or one of unknown size, was not read. The server drops the rest of a small one."""
        return self._body.is_large and not self._body.is_complete

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = _with_security_headers(message["headers"])
            if self._has_unread_body:
                headers.append(_CLOSE)
            message = {**message, "headers": headers}
        try:
            await self._send_to_client(message)
        except Exception as error:
            raise _ConnectionFailed from error


def _place_of(error: Exception) -> str:
    """Type of a defect, the last line of Windlass in its traceback, and the line that raised it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = [each for each in frames if each[0].f_globals.get("__name__", "").startswith("windlass.")]
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in (*ours[-1:], *frames[-1:])]
    return f"{type(error).__name__} at {' in '.join(dict.fromkeys(lines))}"


def _with_security_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    given = {name.lower(): value for name, value in headers}
    added = dict(SECURITY_HEADERS)
    if given.get(b"content-type", b"").startswith(b"text/html"):
        added[b"content-security-policy"] = PAGE_CONTENT_SECURITY_POLICY
    return [*headers, *((name, value) for name, value in added.items() if name not in given)]
