"""The page of runbooks."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from windlass.dashboard.rendering import render
from windlass.dashboard.runbooks import PATH, runbooks_html
from windlass.model.auth import TokenScope
from windlass.server.auth import caller_scope
from windlass.server.context import AppContext
from windlass.server.errors import not_found
from windlass.server.pages import PageViewer, html, page_context


def routes(context: AppContext) -> APIRouter:
    router = APIRouter()

    # All viewers may read it, whatever fleets and queues they are limited to.
    # The page needs no query: runbooks are wanted most when the database does not answer.
    @router.get(PATH, include_in_schema=False)
    async def page(
        request: Request, _viewer: PageViewer, _scope: Annotated[TokenScope, Depends(caller_scope)]
    ) -> Response:
        body = runbooks_html()
        if not body:
            raise not_found("this installation has no runbooks: install Windlass from its wheel")
        shown = page_context(context, request, datetime.now(UTC), is_live=False)
        return html(request, render("runbooks.html", shown, body=body))

    return router
