"""Shared parts of the page routes: the page context of a request, HTML responses, error pages and static files."""

from datetime import UTC, datetime
from importlib import resources
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import Depends, Query, Request, Response
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from windlass.dashboard.rendering import PageContext, Viewer, asset_version, error_page
from windlass.model.auth import Role, TokenCaller
from windlass.server.auth import expected_csrf_token, viewer
from windlass.server.context import AppContext
from windlass.server.errors import ApiError
from windlass.server.json_api import API

STREAM = f"{API}/stream"
STATIC = "/static"
PAGE_ROWS = 50
# Roles whose pages have buttons.
OPERATORS = (Role.OPERATOR, Role.ADMIN)
# Static files carry a hash of their content in the address.
STATIC_MAX_AGE_S = 31_536_000
THEME_COOKIE = "windlass_theme"
# Carries the result of a form to the page that follows it.
NOTICE_COOKIE = "windlass_notice"

PageCursor = Annotated[str | None, Query(max_length=500)]
PageFilter = Annotated[str | None, Query(max_length=63)]
PageViewer = Annotated[TokenCaller, Depends(viewer)]

# Without a session, or with a login link that has expired: other pages are refused too.
_LOGIN_ERRORS = (401, 410)
_ERROR_TITLES = {
    400: "Invalid request",
    401: "Not logged in",
    403: "Not allowed",
    404: "Not found",
    409: "Not possible now",
    410: "Link expired",
    429: "Too many requests",
    500: "Internal error",
    503: "Database unavailable",
}


def page_context(
    context: AppContext, request: Request, now: datetime, *, is_live: bool = True, refresh_s: float | None = None
) -> PageContext:
    """`is_live`: the page is reloaded when something changes."""
    caller = getattr(request.state, "caller", None)
    csrf = expected_csrf_token(request) if caller is not None else None
    is_operator = csrf is not None and isinstance(caller, TokenCaller) and caller.role in OPERATORS
    theme = request.cookies.get(THEME_COOKIE)
    return PageContext(
        now=now,
        version=context.version,
        viewer=Viewer(is_operator, csrf or "", is_unknown=caller is None),
        theme=theme if theme in ("light", "dark") else None,
        stream=STREAM if is_live else None,
        refresh_s=refresh_s,
        back=f"{request.url.path}{f'?{request.url.query}' if request.url.query else ''}",
        notice=unquote(request.cookies[NOTICE_COOKIE]) if NOTICE_COOKIE in request.cookies else None,
    )


def html(request: Request, page: str, status: int = 200) -> Response:
    response = HTMLResponse(page, status, {"Vary": "Cookie"})
    if NOTICE_COOKIE in request.cookies:
        response.delete_cookie(NOTICE_COOKIE, path="/")
    return response


def render_error(context: AppContext, request: Request, error: ApiError) -> Response:
    message = error.detail
    if error.status_code == 401:
        message = f"{message} " if context.oidc is not None else ""
        message += "Sign in at /login/oidc. " if context.oidc is not None else ""
        message += "Open a login link. `windlass tokens link` and `windlass up` print one; each works for one browser."
    title = _ERROR_TITLES.get(error.status_code, "Error")
    shown = page_context(context, request, datetime.now(UTC), is_live=False)
    message = message[:1].upper() + message[1:]
    can_read = error.status_code not in _LOGIN_ERRORS
    return html(request, error_page(shown, title, message, can_read=can_read), error.status_code)


def static_paths() -> list[str]:
    """Paths of the static files."""
    files = resources.files("windlass.dashboard").joinpath("static").iterdir()
    return [f"{STATIC}/{file.name}" for file in files if file.is_file()]


class DashboardFiles(StaticFiles):
    """Static files. Addresses with the current hash are cached for a year, others are revalidated."""

    def __init__(self) -> None:
        super().__init__(packages=[("windlass.dashboard", "static")])

    def file_response(self, full_path: Any, stat_result: Any, scope: Scope, status_code: int = 200) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        is_current = scope["query_string"].decode() == f"v={asset_version(str(full_path).rpartition('/')[2])}"
        response.headers["Cache-Control"] = (
            f"public, max-age={STATIC_MAX_AGE_S}, immutable" if is_current else "no-cache"
        )
        return response
