"""Tokens, sessions and the audit list: JSON routes, pages and dashboard forms.

Administrators create and revoke tokens; operators read the audit list. A new token is shown once, in the response that
created it: the database stores its hash.
"""

import secrets
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Path, Query, Request, Response
from pydantic import FailFast, Field

from windlass.dashboard.access import access_page, audit_page
from windlass.model.auth import (
    API_PREFIX,
    DEFAULT_TOKEN_TTL_S,
    MAX_SCOPE_NAMES,
    ApiToken,
    Role,
    TokenScope,
    hash_of,
    new_token,
)
from windlass.model.errors import BadInput
from windlass.model.event import Event
from windlass.model.task import NAME_PATTERN, is_name
from windlass.operations import OperationOutcome, OperationResult
from windlass.server.auth import admin, check_csrf, operator
from windlass.server.context import AppContext
from windlass.server.errors import not_found
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
MAX_TOKEN_DAYS = 36_500
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


@dataclass(frozen=True, slots=True)
class NewTokenResponse:
    # Shown only here.
    token: str
    details: ApiToken


_tokens = json_response(list[ApiToken])
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


async def create_token(context: AppContext, body: NewTokenBody) -> NewTokenResponse:
    token = new_token(API_PREFIX, secrets.SystemRandom())
    scope = TokenScope(frozenset(body.queues), frozenset(body.fleets))
    ttl_s = body.expires_in_days * DAY_S if body.expires_in_days is not None else None
    created = await context.store.create_token(body.name, body.role, hash_of(token), scope=scope, ttl_s=ttl_s)
    return NewTokenResponse(token, created)


async def revoke_token(context: AppContext, name: str) -> OperationResult:
    is_revoked = await context.store.revoke_token(name)
    outcome = OperationOutcome.DONE if is_revoked else OperationOutcome.NOT_FOUND
    message = f"token {name} revoked" if is_revoked else f"active token {name} not found"
    return OperationResult(outcome=outcome, message=message, changed=int(is_revoked))


def _add_json_routes(administrator: APIRouter, operator_routes: APIRouter, context: AppContext) -> None:
    store = context.store

    @administrator.get("/tokens", **documented(list[ApiToken], "List tokens"))
    async def tokens() -> Response:
        """Newest first, including revoked and expired ones. Without the tokens themselves."""
        return _tokens(await store.tokens())

    @administrator.post("/tokens", **documented(NewTokenResponse, "Create a token", status_code=201))
    async def create(body: Annotated[NewTokenBody, Body()]) -> Response:
        """The token is in this response only."""
        response = _new_token(await create_token(context, body))
        response.status_code = 201
        return response

    @administrator.post("/tokens/{name}/revoke", **documented(OperationResult, "Revoke a token"))
    async def revoke(name: TokenName) -> Response:
        """It stops working at once."""
        result = await revoke_token(context, name)
        if result.is_refused:
            raise not_found(result.message)
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
    async def access(request: Request) -> Response:
        return await show_access(request)

    @router.post("/access/tokens", dependencies=[FORM_ADMIN], include_in_schema=False)
    async def create(request: Request) -> Response:
        """The response is the page itself, because the token is shown once and must not be in a cookie or address."""
        fields = await read_form(request)
        check_csrf(request.state.session, fields.get("csrf"))
        return await show_access(request, await create_token(context, _new_token_of(fields)))

    @router.post("/access/tokens/{name}/revoke", dependencies=[FORM_ADMIN], include_in_schema=False)
    async def revoke(request: Request, name: TokenName) -> Response:
        return await submit_form(context, request, lambda _: revoke_token(context, name))

    @router.get("/audit", dependencies=[Depends(operator)], include_in_schema=False)
    async def audit(
        request: Request,
        actor: Annotated[str | None, Query(max_length=200)] = None,
        cursor: PageCursor = None,
    ) -> Response:
        found = await store.audit_page(actor=actor or None, limit=PAGE_ROWS, cursor=cursor)
        shown = page_context(context, request, await store.now(), is_live=False)
        return html(request, audit_page(shown, found, actor=actor or None, is_first=cursor is None))


def _new_token_of(fields: dict[str, str]) -> NewTokenBody:
    """Raises BadInput for fields that no token can have."""
    name, role, days = fields.get("name", "").strip(), fields.get("role", ""), fields.get("days", "").strip()
    if not is_name(name):
        raise BadInput(f"invalid token name {name!r}: use at most 63 letters, digits and _ . : -.")
    if role not in tuple(Role):
        raise BadInput(f"unknown role {role!r}: use {', '.join(Role)}.")
    lists = {kind: fields.get(kind, "").replace(",", " ").split() for kind in ("queues", "fleets")}
    for names in lists.values():
        if len(names) > MAX_SCOPE_NAMES or not all(map(is_name, names)):
            raise BadInput(f"write at most {MAX_SCOPE_NAMES} names of queues and fleets, separated by commas.")
    if days != "never" and not (days.isascii() and days.isdigit() and 0 < int(days) <= MAX_TOKEN_DAYS):
        raise BadInput(f"a token expires after 1 to {MAX_TOKEN_DAYS:,} days, or never.")
    return NewTokenBody(name=name, role=Role(role), **lists, expires_in_days=None if days == "never" else int(days))
