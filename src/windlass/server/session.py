"""A person's browser: let in by a link, known by a cookie, gone by logging out.

The link is good for one browser. What it is exchanged for is a cookie that no script can read and no other site can
have sent; pages prove themselves by the CSRF token besides (gate.csrf_of). Whoever keeps coming with made-up links is
told to wait, as with made-up tokens; a good one is never refused for that.
"""

import asyncio
import secrets
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from windlass.model.auth import LINK_PREFIX, SESSION_PREFIX, Role, hash_of, is_token, new_token
from windlass.ports.auth import AuthStore
from windlass.server.auth import MAX_LOOKUPS, check_csrf, session_cookie
from windlass.server.context import DashboardContext
from windlass.server.errors import gone, unauthorized

LOGIN = "/login"
HTTPS = "https"
# A link is used when it has been printed, or by whoever comes back to that terminal on the same day.
LINK_TTL_S = 86_400.0
SESSION_TTL_S = 7 * 86_400.0
# Not a redirection: a browser that came from another site would not send the cookie to where it is redirected.
_WELCOME = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/">
<link rel="icon" href="/favicon.ico" type="image/svg+xml">
<title>windlass</title><p><a href="/">To the dashboard</a></p></html>"""


async def new_link(access: AuthStore, base_url: str, role: Role = Role.OPERATOR) -> str:
    """The address that lets one browser in."""
    key = new_token(LINK_PREFIX, secrets.SystemRandom())
    await access.create_link(hash_of(key), role, LINK_TTL_S)
    # A proxy need not tell us that it was asked by https: the link does.
    return f"{base_url}{LOGIN}?key={key}" + (f"&over={HTTPS}" if base_url.startswith(f"{HTTPS}://") else "")


def session_routes(shown: DashboardContext) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    access = shown.store
    lookups = asyncio.Semaphore(MAX_LOOKUPS)

    async def open_session(key: str, session: str) -> bool:
        if not is_token(key, LINK_PREFIX):
            return False
        async with lookups:
            return await access.open_session(hash_of(key), hash_of(session), SESSION_TTL_S)

    @router.get(LOGIN)
    async def login(request: Request, key: str = "", over: str = "") -> Response:
        """Exchange a link for a session, and show the dashboard."""
        if not key:
            raise unauthorized("a link lets a browser in: `windlass tokens link` prints one.")
        session = new_token(SESSION_PREFIX, secrets.SystemRandom())
        if not await open_session(key, session):
            request.state.note_failure()
            raise gone("this link was used, or has expired: `windlass tokens link` prints another.")
        answer = HTMLResponse(_WELCOME)
        answer.set_cookie(
            session_cookie(request.headers.get("host", "")),
            session,
            max_age=int(SESSION_TTL_S),
            httponly=True,
            samesite="strict",
            secure=HTTPS in (request.url.scheme, over),
        )
        return answer

    @router.post("/logout")
    async def logout(request: Request) -> Response:
        answer = RedirectResponse("/", 303)
        if request.state.session is not None:
            check_csrf(request, (await form_of(request)).get("csrf"))
            await access.end_session(hash_of(request.state.session))
        answer.delete_cookie(session_cookie(request.headers.get("host", "")), httponly=True, samesite="strict")
        return answer

    return router


async def form_of(request: Request) -> dict[str, str]:
    """What a page's form sent; of a name that comes twice, the last."""
    return dict(parse_qsl((await request.body()).decode(errors="replace"), keep_blank_values=True))
