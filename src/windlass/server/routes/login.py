"""Browser sessions: a login link or a login at the identity provider opens one, and logging out ends it.

A link works once. A login at the provider starts at LOGIN_OIDC and returns to OIDC_CALLBACK. The session cookie is not
readable by scripts and not sent by other sites; pages also prove themselves with a CSRF token. Addresses that keep
sending made-up links get 429; a valid link is never refused. Such an address cannot finish a login at the provider
either, because each attempt is a request to the provider.
"""

import functools
import secrets
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from windlass.model.auth import LINK_PREFIX, SESSION_PREFIX, Role, hash_of, is_token, new_token
from windlass.ports import http
from windlass.ports.auth import AuthStore
from windlass.server.auth import address_of, anyone, check_csrf, session_cookie
from windlass.server.connections import has_left
from windlass.server.context import AppContext
from windlass.server.errors import ApiError, gone, unauthorized, unavailable
from windlass.server.forms import read_form
from windlass.server.identity_lookups import LookupQueue
from windlass.server.json_api import OPEN
from windlass.server.oidc import LoginRefused, OidcClient, PendingLogin, ProviderUnavailable, TooManyLogins

LOGIN = "/login"
HTTPS = "https"
LINK_TTL_S = 86_400.0
SESSION_TTL_S = 7 * 86_400.0
LOGIN_OIDC = "/login/oidc"
OIDC_CALLBACK = "/login/oidc/callback"
# Shorter than that of a link: a person who loses access at the provider loses it here on the same day.
OIDC_SESSION_TTL_S = 12 * 3_600.0
# Time to log in at the provider.
PENDING_TTL_S = 600
PENDING_COOKIE = "windlass_login"
log = structlog.get_logger(__name__)
# A page that redirects, not a redirect response: a browser that comes from another site would not send the new cookie
# to the target of a redirect.
_WELCOME = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/">
<link rel="icon" href="/favicon.ico" type="image/svg+xml">
<title>windlass</title><p><a href="/">To the dashboard</a></p></html>"""


async def create_login_link(
    store: AuthStore, base_url: str, role: Role = Role.OPERATOR, name: str = "dashboard"
) -> str:
    """`name`: the person that the session's events name."""
    key = new_token(LINK_PREFIX, secrets.SystemRandom())
    await store.create_link(hash_of(key), role, LINK_TTL_S, name)
    # A proxy may not report that it was called over https, so the link does.
    return f"{base_url}{LOGIN}?key={key}" + (f"&over={HTTPS}" if base_url.startswith(f"{HTTPS}://") else "")


def routes(context: AppContext) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    store = context.store
    lookups = LookupQueue[bool]()

    @router.get(LOGIN, dependencies=[OPEN])
    async def login(request: Request, key: str = "", over: str = "") -> Response:
        if not key and context.oidc is not None:
            return RedirectResponse(LOGIN_OIDC, 303)
        if not key:
            raise unauthorized("a login link is needed: `windlass tokens link` prints one")
        session = new_token(SESSION_PREFIX, secrets.SystemRandom())
        is_opened = False
        if is_token(key, LINK_PREFIX):
            # By session: two requests with the same link must not share its only use.
            open_session = functools.partial(store.open_session, hash_of(key), hash_of(session), SESSION_TTL_S)
            client = address_of(request.scope), functools.partial(has_left, request.scope)
            is_opened = await lookups.get(hash_of(session), open_session, *client)
        if not is_opened:
            request.state.count_failure()
            raise gone("this login link was used or has expired: `windlass tokens link` prints another")
        return _welcome(request, session, SESSION_TTL_S, is_secure=HTTPS in (request.url.scheme, over))

    @router.post("/logout", dependencies=[Depends(anyone)])
    async def logout(request: Request) -> Response:
        response = RedirectResponse("/", 303)
        if request.state.session is not None:
            check_csrf(request.state.session, (await read_form(request)).get("csrf"))
            await store.end_session(hash_of(request.state.session))
            request.state.forget_identity(hash_of(request.state.session))
        response.delete_cookie(session_cookie(request.headers.get("host", "")), httponly=True, samesite="strict")
        return response

    if context.oidc is not None:
        _add_oidc_routes(router, context.oidc, store)
    return router


def _welcome(request: Request, session: str, ttl_s: float, *, is_secure: bool) -> HTMLResponse:
    response = HTMLResponse(_WELCOME)
    response.set_cookie(
        session_cookie(request.headers.get("host", "")),
        session,
        max_age=int(ttl_s),
        httponly=True,
        samesite="strict",
        secure=is_secure,
    )
    return response


def _add_oidc_routes(router: APIRouter, client: OidcClient, store: AuthStore) -> None:
    # With this prefix a browser accepts the cookie from this host only, not from a neighbour in its domain.
    cookie = f"__Host-{PENDING_COOKIE}" if client.is_https else PENDING_COOKIE

    @router.get(LOGIN_OIDC, dependencies=[OPEN])
    async def begin() -> Response:
        try:
            address, pending = await client.begin()
        except ProviderUnavailable as error:
            raise _provider_unavailable(error) from None
        response = RedirectResponse(address, 302)
        # Lax: the browser returns from the provider's site.
        response.set_cookie(
            cookie,
            pending.to_cookie(),
            max_age=PENDING_TTL_S,
            httponly=True,
            samesite="lax",
            secure=client.is_https,
        )
        return response

    @router.get(OIDC_CALLBACK, dependencies=[OPEN])
    async def finish(
        request: Request,
        state: Annotated[str, Query(max_length=200)] = "",
        code: Annotated[str, Query(max_length=4_000)] = "",
        error: Annotated[str, Query(max_length=200)] = "",
    ) -> Response:
        request.state.check_failures()
        pending = PendingLogin.from_cookie(request.cookies.get(cookie))
        try:
            person = await client.finish(pending, state, code, error)
        except LoginRefused as refused:
            request.state.count_failure()
            raise unauthorized(str(refused)) from None
        except TooManyLogins:
            raise unavailable("too many logins at the same time: retry") from None
        except ProviderUnavailable as failed:
            raise _provider_unavailable(failed) from None
        session = new_token(SESSION_PREFIX, secrets.SystemRandom())
        await store.create_session(hash_of(session), person.role, OIDC_SESSION_TTL_S, person.name)
        response = _welcome(request, session, OIDC_SESSION_TTL_S, is_secure=client.is_https)
        response.delete_cookie(cookie, httponly=True, samesite="lax", secure=client.is_https)
        return response


def _provider_unavailable(error: ProviderUnavailable) -> ApiError:
    log.warning("reach identity provider failed", error=str(error))
    return ApiError(502, http.UNAVAILABLE, "the identity provider does not answer: retry later, or use a login link")
