"""What stands before every handler: limits, headers, the access log, and an answer whatever happens.

A body larger than the limit, or one that does not arrive in time, is refused before anything is done with it. An error
nobody foresaw is logged here with all there is to know, and answered with a sentence. No log line holds a header, a
query or a body.
"""

import asyncio
import time
from typing import Any

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.ports import http
from windlass.server.connections import BODY_BYTES_PER_S
from windlass.server.errors import ApiError, AsPage, answer_to, as_api_error

# From the first look for a body to its end, and as much more as what has come of it is worth at a fair pace. Whoever is
# slower is not a worker of ours.
BODY_TIMEOUT_S = 60.0
# Unless a handler has said otherwise.
HEADERS = {
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
}
# A page may load what we serve, and nothing else; no script stands in it.
PAGE_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    b"connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# Asked for all day by workers, probes and pages: they are told only when something is wrong.
_ROUTINE = (
    *("/internal/worker/", "/healthz", "/readyz", "/metrics", "/static/", "/api/v1/"),
    *("/workers", "/tasks", "/decisions", "/cost"),
)
log = structlog.get_logger("windlass.server")


class RequestLimits:
    def __init__(self, app: ASGIApp, *, max_body_bytes: int, as_page: AsPage | None = None) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._as_page = as_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _RequestContext(self._app, self._max_body_bytes, self._as_page, scope, receive, send).carry_out()
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})


class _RequestContext:
    """One request and its answer."""

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        as_page: AsPage | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._as_page = as_page
        self._scope = scope
        self._receive_from_client = receive
        self._send_to_client = send
        self._received_bytes = 0
        self._has_whole_body = False
        # On the loop's clock; None: nobody has looked for a body yet.
        self._body_awaited_since: float | None = None
        self._status: int | None = None

    async def carry_out(self) -> None:
        started = time.monotonic()
        try:
            self._check_announced_size()
            await self._app(self._scope, self._receive, self._send)
        except Exception as error:
            told = as_api_error(error)
            if told is None:
                log.exception("a request failed", method=self._scope["method"], path=self._scope["path"])
                told = ApiError(500, http.DEFECT, "this is a defect of windlass: its log shows where it happened.")
            await self._answer_instead(told)
        finally:
            self._note(time.monotonic() - started)

    def _check_announced_size(self) -> None:
        announced = dict(self._scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, http.TOO_LARGE, f"the request has more than {self._max_body_bytes:,} bytes.")

    async def _receive(self) -> Message:
        if self._has_whole_body:
            return await self._receive_from_client()
        if self._body_awaited_since is None:
            self._body_awaited_since = asyncio.get_running_loop().time()
        due_at = self._body_awaited_since + BODY_TIMEOUT_S + self._received_bytes / BODY_BYTES_PER_S
        try:
            async with asyncio.timeout_at(due_at):
                message = await self._receive_from_client()
        except TimeoutError:
            # Nothing is wrong with what it holds: a worker tries again.
            raise ApiError(408, http.TOO_SLOW, "the request did not arrive in time.") from None
        if message["type"] == "http.request":
            self._received_bytes += len(message.get("body", b""))
            self._has_whole_body = not message.get("more_body", False)
            if self._received_bytes > self._max_body_bytes:
                raise self._too_large()
        return message

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message = {**message, "headers": _with_ours(message["headers"])}
        await self._send_to_client(message)

    async def _answer_instead(self, error: ApiError) -> None:
        if self._status is None:  # what has begun cannot be taken back
            answer = answer_to(Request(self._scope), error, self._as_page)
            await answer(self._scope, self._receive, self._send)

    def _note(self, duration_s: float) -> None:
        path, status = self._scope["path"], self._status or 0
        is_fine = 200 <= status < 400
        is_looking = self._scope["method"] in ("GET", "HEAD") or path.startswith("/internal/worker/")
        if is_fine and is_looking and (path == "/" or path.startswith(_ROUTINE)):
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
        (log.info if is_fine else log.warning)("request", **fields)


def _with_ours(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    given = {name.lower(): value for name, value in headers}
    ours = dict(HEADERS)
    if given.get(b"content-type", b"").startswith(b"text/html"):
        ours[b"content-security-policy"] = PAGE_POLICY
    return [*headers, *((name, value) for name, value in ours.items() if name not in given)]
