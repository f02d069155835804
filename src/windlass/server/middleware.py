"""Outermost middleware: request limits, security headers, the access log, and a response to every error.

A body above the limit, or one that arrives too slowly, is refused before a handler sees it. An unexpected error is
logged with its traceback and answered with 500. No log line contains a header, a query string or a body.
"""

import asyncio
import time
from typing import Any

import structlog
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.ports import http
from windlass.server.connections import MIN_BODY_BYTES_PER_S
from windlass.server.errors import ApiError, ErrorPage, error_response, to_api_error

# Time for a body, plus the time that the bytes received so far take at MIN_BODY_BYTES_PER_S.
BODY_TIMEOUT_S = 60.0
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
# Requested all the time by workers, probes and open pages: successful reads are not logged.
_UNLOGGED_READS = (
    *("/internal/worker/", "/healthz", "/readyz", "/metrics", "/static/", "/api/v1/"),
    *("/workers", "/tasks", "/cycles", "/cost"),
)
log = structlog.get_logger("windlass.server")


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


class RequestLimits:
    def __init__(self, app: ASGIApp, *, max_body_bytes: int, error_page: ErrorPage | None = None) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._error_page = error_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _RequestContext(self._app, self._max_body_bytes, self._error_page, scope, receive, send).run()
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})


class _RequestContext:
    """One request and its response."""

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        error_page: ErrorPage | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._error_page = error_page
        self._scope = scope
        self._receive_from_client = receive
        self._send_to_client = send
        self._received_bytes = 0
        self._is_body_complete = False
        # On the event loop's clock. None until a handler reads the body.
        self._body_started_at: float | None = None
        # None until the response has started.
        self._status: int | None = None

    async def run(self) -> None:
        started = time.monotonic()
        try:
            announced = dict(self._scope["headers"]).get(b"content-length", b"0")
            self._check_size(int(announced) if announced.isdigit() else 0)
            await self._app(self._scope, self._receive, self._send)
        except Exception as error:
            converted = to_api_error(error)
            if converted is None:
                log.exception("handle request failed", method=self._scope["method"], path=self._scope["path"])
                converted = ApiError(500, http.DEFECT, "internal error: the server's log has the details")
            if self._status is None:
                response = error_response(Request(self._scope), converted, self._error_page)
                await response(self._scope, self._receive, self._send)
        finally:
            self._log(time.monotonic() - started)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_body_bytes:
            raise ApiError(413, http.TOO_LARGE, f"the request body has more than {self._max_body_bytes:,} bytes")

    async def _receive(self) -> Message:
        if self._is_body_complete:
            return await self._receive_from_client()
        if self._body_started_at is None:
            self._body_started_at = asyncio.get_running_loop().time()
        due_at = self._body_started_at + BODY_TIMEOUT_S + self._received_bytes / MIN_BODY_BYTES_PER_S
        try:
            async with asyncio.timeout_at(due_at):
                message = await self._receive_from_client()
        except TimeoutError:
            # A code of its own, because a worker retries a slow upload but not a bad request.
            raise ApiError(408, http.TOO_SLOW, "the request body arrived too slowly") from None
        if message["type"] == "http.request":
            self._received_bytes += len(message.get("body", b""))
            self._is_body_complete = not message.get("more_body", False)
            self._check_size(self._received_bytes)
        return message

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message = {**message, "headers": _with_security_headers(message["headers"])}
        await self._send_to_client(message)

    def _log(self, duration_s: float) -> None:
        path, status = self._scope["path"], self._status or 0
        is_success = 200 <= status < 400
        is_read = self._scope["method"] in ("GET", "HEAD") or path.startswith("/internal/worker/")
        if is_success and is_read and (path == "/" or path.startswith(_UNLOGGED_READS)):
            return
        client = self._scope.get("client")
        fields: dict[str, Any] = {
            "method": self._scope["method"],
            "path": path,
            "status": status,
            "duration_ms": round(duration_s * 1000, 1),
            "client": client[0] if client else None,
            "caller": self._scope.get("state", {}).get("caller_name"),
        }
        (log.info if is_success else log.warning)("handle request", **fields)


def _with_security_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    given = {name.lower(): value for name, value in headers}
    added = dict(SECURITY_HEADERS)
    if given.get(b"content-type", b"").startswith(b"text/html"):
        added[b"content-security-policy"] = PAGE_CONTENT_SECURITY_POLICY
    return [*headers, *((name, value) for name, value in added.items() if name not in given)]
