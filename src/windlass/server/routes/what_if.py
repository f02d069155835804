"""The page "What if" of each fleet. The fleet is in the path, so a limited caller reaches only its own fleets."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from windlass.dashboard.what_if import what_if_page
from windlass.model.auth import TokenScope
from windlass.server.auth import caller_scope
from windlass.server.context import AppContext
from windlass.server.errors import not_found
from windlass.server.json_api import FleetName
from windlass.server.pages import PageViewer, html, page_context
from windlass.server.what_if import WhatIf

# The page is not reloaded more often, whatever else changes.
PAGE_REFRESH_S = 60.0
CALCULATING_REFRESH_S = 2.0


def routes(context: AppContext) -> APIRouter:
    router, what_if = APIRouter(), WhatIf(context.store)

    async def configured(scope: TokenScope) -> list[str]:
        seen = await context.overview_feed.overview()
        names = [each.fleet.name for each in seen.fleets]
        return [name for name in names if scope.allows_fleet(name) and context.control.fleet_config(name) is not None]

    @router.get("/what-if", include_in_schema=False)
    async def first(
        request: Request, _viewer: PageViewer, scope: Annotated[TokenScope, Depends(caller_scope)]
    ) -> Response:
        names = await configured(scope)
        if names:
            return RedirectResponse(f"/fleets/{names[0]}/what-if", 303)
        shown = page_context(context, request, await context.store.now(), is_live=False)
        return html(request, what_if_page(shown, fleet=None, fleets=[]))

    @router.get("/fleets/{fleet}/what-if", include_in_schema=False)
    async def page(
        request: Request,
        fleet: FleetName,
        _viewer: PageViewer,
        scope: Annotated[TokenScope, Depends(caller_scope)],
    ) -> Response:
        settings = context.control.fleet_config(fleet)
        if settings is None or not scope.allows_fleet(fleet):
            raise not_found(f"fleet {fleet} not found (unknown, or not configured on this server)")
        found = what_if.get(fleet, settings)
        refresh_s = CALCULATING_REFRESH_S if found is None else PAGE_REFRESH_S
        shown = page_context(context, request, await context.store.now(), refresh_s=refresh_s)
        fleets = await configured(scope)
        if found is None or found.comparison is None:
            problem = found.problem if found is not None else ""
            return html(request, what_if_page(shown, fleet=fleet, fleets=fleets, problem=problem))
        return html(
            request,
            what_if_page(
                shown,
                fleet=fleet,
                fleets=fleets,
                at=found.at,
                past=found.past,
                results=found.comparison.results,
                charts=found.comparison.charts,
            ),
        )

    return router
