"""Runs an operation that a dashboard form requests.

A form brings its session's CSRF token. Without `is_confirmed` the response is a page that asks for confirmation. With
it, the operation runs and the browser returns to the page it came from, which shows the result. The dashboard's script
asks in a dialog and reads the result as JSON. Refused operations get the same errors as in the JSON API.
"""

from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qsl, quote

from fastapi import Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from windlass.dashboard.rendering import confirm_page
from windlass.model.redaction import without_known_secrets
from windlass.operations import OperationResult
from windlass.server.auth import check_csrf
from windlass.server.context import AppContext
from windlass.server.errors import raise_if_refused
from windlass.server.pages import NOTICE_COOKIE, html, page_context

# Time in which the browser loads the next page.
NOTICE_MAX_AGE_S = 30

Operation = Callable[[Mapping[str, str]], Awaitable[OperationResult]]


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form. The values of a repeated field, as of several selected rows, are joined by commas."""
    fields: dict[str, str] = {}
    for name, value in parse_qsl((await request.body()).decode(errors="replace"), keep_blank_values=True):
        fields[name] = f"{fields[name]},{value}" if name in fields else value
    return fields


async def submit_form(context: AppContext, request: Request, operate: Operation) -> Response:
    """`operate` gets the fields of the form. Its route declares the access of `form_operator`."""
    fields = await read_form(request)
    check_csrf(request.state.session, fields.get("csrf"))
    back = fields.get("back", "")
    # Only paths of this server: no form may lead to another site.
    if not back.startswith("/") or back.startswith(("//", "/\\")) or not back.isprintable():
        back = "/"
    if fields.get("is_confirmed") != "yes":
        shown = page_context(context, request, await context.store.now(), is_live=False)
        texts = {name: fields.get(name, "") for name in ("question", "explanation", "button")}
        page = confirm_page(shown, path=request.url.path, back_to=back, fields={**fields, "back": back}, **texts)
        return html(request, page)
    result = await operate(fields)
    raise_if_refused(result)
    context.overview_feed.mark_changed()
    message = without_known_secrets(f"{result.message[:1].upper()}{result.message[1:]}.")
    if "application/json" in request.headers.get("accept", ""):
        return JSONResponse({"message": message})
    response = RedirectResponse(back, 303)
    # Cookies hold ASCII only; names of workers and fleets may hold more.
    response.set_cookie(NOTICE_COOKIE, quote(message), max_age=NOTICE_MAX_AGE_S, httponly=True, samesite="strict")
    return response
