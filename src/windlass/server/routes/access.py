"""Tokens, sessions and the audit list: JSON routes, pages and dashboard forms.

Administrators create and revoke tokens, and revoke sessions; operators read the audit list. A new token is shown once,
in the response that created it: the database stores its hash.
"""

from typing import Annotated

from fastapi import APIRouter, Body, Depends, Path, Query, Request, Response
from pydantic import FailFast, Field

from windlass import access
from windlass.access import NewTokenResponse
from windlass.dashboard.access import access_page, audit_page
from windlass.model.auth import (
    DEFAULT_TOKEN_TTL_S,
    MAX_SCOPE_NAMES,
    MAX_TOKEN_DAYS,
    ApiToken,
    NewToken,
    Role,
    Session,
    TokenScope,
)
from windlass.model.errors import BadInput
from windlass.model.event import Event
from windlass.model.task import NAME_PATTERN
from windlass.operations import OperationResult
from windlass.server.auth import admin, check_csrf, operator
from windlass.server.context import AppContext
from windlass.server.errors import raise_if_refused
from windlass.server.forms import read_form, submit_form
from windlass.server.json_api import (
    ADMIN,
    FORM_ADMIN,
    OPERATOR,
    Cursor,
    Limit,
    PageResponse,
    RequestBody,
    api_router,
    json_response,
    page_response,
)
from windlass.server.openapi import documented
from windlass.server.pages import PAGE_ROWS, PageCursor, html, page_context

DAY_S = 86_400.0
SessionName = Annotated[str, Path(max_length=63)]
TokenName = Annotated[str, Path(max_length=63)]
ScopeNames = Annotated[list[Annotated[str, Field(pattern=NAME_PATTERN)]], Field(max_length=MAX_SCOPE_NAMES), FailFast()]


class NewTokenBody(RequestBody):
    name: str = Field(description="Needed to revoke it.", pattern=NAME_PATTERN, examples=["ci"])
    role: Role = Field(description="What the token allows.")
    queues: ScopeNames = Field(default=[], description="Only these queues. Without queues and fleets: everything.")
    fleets: ScopeNames = Field(default=[], description="Only these fleets.")
    expires_in_days: Annotated[float, Field(gt=0, le=MAX_TOKEN_DAYS)] | None = Field(
        default=DEFAULT_TOKEN_TTL_S / DAY_S, description="Null: it never expires."
    )

    def wanted(self) -> NewToken:
        """Raises BadInput for values that no token can have."""
        scope = TokenScope(frozenset(self.queues), frozenset(self.fleets))
        ttl_s = self.expires_in_days * DAY_S if self.expires_in_days is not None else None
        return NewToken(name=self.name, role=self.role, scope=scope, ttl_s=ttl_s)


_tokens = json_response(list[ApiToken])
_sessions = json_response(list[Session])
_new_token = json_response(NewTokenResponse)
_result = json_response(OperationResult)
_events = json_response(PageResponse[Event])


def routes(context: AppContext) -> APIRouter:
    router, administrator, operator_routes = APIRouter(), api_router(ADMIN), api_router(OPERATOR)
    _add_json_routes(administrator, operator_routes, context)
    _add_pages(router, context)
    for part in (administrator, operator_routes):
        router.include_router(part)
    return router


def _add_json_routes(administrator: APIRouter, operator_routes: APIRouter, context: AppContext) -> None:
    store = context.store

    @administrator.get("/tokens", **documented(list[ApiToken], "List tokens"))
    async def tokens() -> Response:
        """Newest first, including revoked and expired ones. Without the tokens themselves."""
        return _tokens(await store.tokens())

    @administrator.post("/tokens", **documented(NewTokenResponse, "Create a token", status_code=201))
    async def create(body: Annotated[NewTokenBody, Body()]) -> Response:
        """The token is in this response only."""
        response = _new_token(await access.create_token(store, body.wanted()))
        response.status_code = 201
        return response

    @administrator.post("/tokens/{name}/revoke", **documented(OperationResult, "Revoke a token"))
    async def revoke(name: TokenName) -> Response:
        """It stops working at once."""
        result = await access.revoke_token(store, name)
        raise_if_refused(result)
        return _result(result)

    @administrator.get("/sessions", **documented(list[Session], "List sessions"))
    async def sessions() -> Response:
        """Browser sessions and unused links, newest first."""
        return _sessions(await store.sessions())

    @administrator.post("/sessions/{session}/revoke", **documented(OperationResult, "Revoke a session"))
    async def revoke_session(session: SessionName) -> Response:
        """The browser is logged out at once, or the link opens nothing."""
        result = await access.revoke_session(store, session)
        raise_if_refused(result)
        return _result(result)

    @operator_routes.get("/audit", **documented(PageResponse[Event], "List who did what"))
    async def audit(
        actor: Annotated[str | None, Query(max_length=200, description="Only this actor, such as token:ci.")] = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Response:
        """Events that a person or a program with a token caused, newest first."""
        return _events(page_response(await store.audit_page(actor=actor, limit=limit, cursor=cursor)))


def _add_pages(router: APIRouter, context: AppContext) -> None:
    store = context.store

    async def show_access(request: Request, created: NewTokenResponse | None = None) -> Response:
        now = await store.now()
        page = access_page(
            page_context(context, request, now, is_live=False),
            tokens=await store.tokens(),
            sessions=await store.sessions(),
            new_token=created.token if created is not None else None,
        )
        return html(request, page)

    @router.get("/access", dependencies=[Depends(admin)], include_in_schema=False)
    async def show(request: Request) -> Response:
        return await show_access(request)

    @router.post("/access/tokens", dependencies=[FORM_ADMIN], include_in_schema=False)
    async def create(request: Request) -> Response:
        """The response is the page itself, because the token is shown once and must not be in a cookie or address."""
        fields = await read_form(request)
        check_csrf(request.state.session, fields.get("csrf"))
        return await show_access(request, await access.create_token(store, _new_token_of(fields)))

    @router.post("/access/tokens/{name}/revoke", dependencies=[FORM_ADMIN], include_in_schema=False)
    async def revoke(request: Request, name: TokenName) -> Response:
        return await submit_form(context, request, lambda _: access.revoke_token(store, name))

    @router.post("/access/sessions/{session}/revoke", dependencies=[FORM_ADMIN], include_in_schema=False)
    async def revoke_session(request: Request, session: SessionName) -> Response:
        return await submit_form(context, request, lambda _: access.revoke_session(store, session))

    @router.get("/audit", dependencies=[Depends(operator)], include_in_schema=False)
    async def audit(
        request: Request,
        actor: Annotated[str | None, Query(max_length=200)] = None,
        cursor: PageCursor = None,
    ) -> Response:
        found = await store.audit_page(actor=actor or None, limit=PAGE_ROWS, cursor=cursor)
        shown = page_context(context, request, await store.now(), is_live=False)
        return html(request, audit_page(shown, found, actor=actor or None, is_first=cursor is None))


def _new_token_of(fields: dict[str, str]) -> NewToken:
    """Raises BadInput for fields that no token can have."""
    role, days = fields.get("role", ""), fields.get("days", "").strip()
    if role not in tuple(Role):
        raise BadInput(f"unknown role {role!r}: use {', '.join(Role)}.")
    if days != "never" and not (days.isascii() and days.isdigit() and len(days) < 10):
        raise BadInput(f"{days!r} is not a number of days: write a whole number, or never.")
    queues, fleets = (frozenset(fields.get(kind, "").replace(",", " ").split()) for kind in ("queues", "fleets"))
    ttl_s = int(days) * DAY_S if days != "never" else None
    return NewToken(name=fields.get("name", "").strip(), role=Role(role), scope=TokenScope(queues, fleets), ttl_s=ttl_s)
