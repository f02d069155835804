"""Browser sessions: a login link is exchanged for a session cookie, and logging out ends the session.

A link works once. The session cookie is not readable by scripts and not sent by other sites; pages also prove
themselves with a CSRF token. Addresses that keep sending made-up links get 429; a valid link is never refused.
"""

import asyncio
import secrets

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from windlass.model.auth import LINK_PREFIX, SESSION_PREFIX, Role, hash_of, is_token, new_token
from windlass.ports.auth import AuthStore
from windlass.server.auth import MAX_LOOKUPS, anyone, check_csrf, session_cookie
from windlass.server.context import AppContext
from windlass.server.errors import gone, unauthorized
from windlass.server.forms import read_form
from windlass.server.json_api import OPEN

LOGIN = "/login"
HTTPS = "https"
LINK_TTL_S = 86_400.0
SESSION_TTL_S = 7 * 86_400.0
# A page that redirects, not a redirect response: a browser that comes from another site would not send the new cookie
# to the target of a redirect.
_WELCOME = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/">
<link rel="icon" href="/favicon.ico" type="image/svg+xml">
<title>windlass</title><p><a href="/">To the dashboard</a></p></html>"""


async def create_login_link(
    store: AuthStore, base_url: str, role: Role = Role.OPERATOR, name: str = "dashboard"
) -> str:
    """`name`: the person whom the session's events name."""
    key = new_token(LINK_PREFIX, secrets.SystemRandom())
    await store.create_link(hash_of(key), role, LINK_TTL_S, name)
    # A proxy may not report that it was called over https, so the link does.
    return f"{base_url}{LOGIN}?key={key}" + (f"&over={HTTPS}" if base_url.startswith(f"{HTTPS}://") else "")


def routes(context: AppContext) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    store = context.store
    lookups = asyncio.Semaphore(MAX_LOOKUPS)

    @router.get(LOGIN, dependencies=[OPEN])
    async def login(request: Request, key: str = "", over: str = "") -> Response:
        if not key:
            raise unauthorized("a login link is needed: `windlass tokens link` prints one")
        session = new_token(SESSION_PREFIX, secrets.SystemRandom())
        is_opened = False
        if is_token(key, LINK_PREFIX):
            async with lookups:
                is_opened = await store.open_session(hash_of(key), hash_of(session), SESSION_TTL_S)
        if not is_opened:
            request.state.count_failure()
            raise gone("this login link was used or has expired: `windlass tokens link` prints another")
        response = HTMLResponse(_WELCOME)
        response.set_cookie(
            session_cookie(request.headers.get("host", "")),
            session,
            max_age=int(SESSION_TTL_S),
            httponly=True,
            samesite="strict",
            secure=HTTPS in (request.url.scheme, over),
        )
        return response

    @router.post("/logout", dependencies=[Depends(anyone)])
    async def logout(request: Request) -> Response:
        response = RedirectResponse("/", 303)
        if request.state.session is not None:
            check_csrf(request.state.session, (await read_form(request)).get("csrf"))
            await store.end_session(hash_of(request.state.session))
            request.state.forget_identity(hash_of(request.state.session))
        response.delete_cookie(session_cookie(request.headers.get("host", "")), httponly=True, samesite="strict")
        return response

    return router
