"""The page of runbooks, and an address for each code."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from windlass.dashboard.rendering import render
from windlass.dashboard.runbooks import PATH, runbook_url, runbooks_html
from windlass.model.auth import TokenScope
from windlass.server.auth import caller_scope
from windlass.server.context import AppContext
from windlass.server.errors import not_found
from windlass.server.pages import PageViewer, html, page_context

# An anchor does not reach the server, so a person who guesses the address of a code writes a path.
PATH_OF_CODE = f"{PATH}/{{code}}"


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

    @router.get(PATH_OF_CODE, include_in_schema=False)
    async def page_of_code(
        code: str, _viewer: PageViewer, _scope: Annotated[TokenScope, Depends(caller_scope)]
    ) -> Response:
        url = runbook_url(code.upper())
        if url is None:
            raise not_found(f"no runbook has this code: {PATH} lists all codes")
        return RedirectResponse(url, 303)

    return router
