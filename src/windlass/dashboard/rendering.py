"""Jinja environment, the context that every page gets, and addresses of static files."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from importlib import resources
from re import compile as pattern
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from windlass.dashboard import filters, ray_nodes
from windlass.dashboard.charts import RANGE_LABELS
from windlass.dashboard.runbooks import runbook_link, runbook_url
from windlass.model.listing import Page
from windlass.model.masked_values import without_secrets_inside
from windlass.model.money import amount
from windlass.runbooks import codes_in

# Event codes that are highlighted in lists.
FAILURE_CODES = (
    *("WORKER_ERROR", "TASK_ERROR", "TASK_FAILED", "TASK_REQUEUED"),
    *("SLOT_FAILED", "MACHINE_REFUSED", "ALERT"),
)
_CODE = pattern(r"`([^`]+)`")


@dataclass(frozen=True, slots=True)
class Viewer:
    """The user of a page. Buttons are shown only to operators."""

    is_operator: bool = False
    csrf: str = ""
    # The request was refused before its caller was looked up, or has none.
    is_unknown: bool = False


@dataclass(frozen=True, slots=True)
class PageContext:
    now: datetime
    version: str
    viewer: Viewer = field(default_factory=Viewer)
    # "light" or "dark". None: as the system is set.
    theme: str | None = None
    # Address of the event stream. None: the page never changes.
    stream: str | None = None
    # Minimum time between two reloads of the page. None: reload with every change.
    refresh_s: float | None = None
    # Address of this page, to return to after a form.
    back: str = "/"
    # Result of the form that was just submitted.
    notice: str | None = None


@cache
def asset_version(name: str) -> str:
    """Hash of a static file, part of its address, so that browsers may cache it without end."""
    content = resources.files("windlass.dashboard").joinpath("static", name).read_bytes()
    return hashlib.sha256(content).hexdigest()[:10]


def asset(name: str) -> str:
    return f"/static/{name}?v={asset_version(name)}"


def render(template: str, page_context: PageContext, *, here: str = "", **variables: Any) -> str:
    """The page without known secrets in its variables. `here`: the entry of the navigation to highlight."""
    context = {name: getattr(page_context, name) for name in PageContext.__dataclass_fields__}
    masked = without_secrets_inside({**variables, "notice": page_context.notice})
    return _environment().get_template(template).render(here=here, **{**context, **masked})


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("windlass.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["FAILURE_CODES"] = FAILURE_CODES
    environment.globals["CHART_RANGES"] = [(value.value, label) for value, label in RANGE_LABELS.items()]
    environment.globals["asset"] = asset
    for function in (
        *(filters.duration, filters.brief, filters.count, filters.counted, filters.percent),
        *(filters.money, filters.cents, filters.moment, filters.gigabytes, filters.headline),
        *(filters.gist, filters.action_label, filters.plain),
        *(ray_nodes.node_state, ray_nodes.node_uses, query, in_code, explained, runbook_link, runbook_url, amount),
    ):
        environment.filters[function.__name__] = function
    return environment


def query(parameters: Mapping[str, Any], path: str) -> str:
    """A path with those query parameters that have a value."""
    given = {name: value for name, value in parameters.items() if value not in (None, "", False)}
    return f"{path}?{urlencode(given)}" if given else path


def next_page_url(path: str, page: Page[Any], **parameters: Any) -> str | None:
    return query({**parameters, "cursor": page.next_cursor}, path) if page.next_cursor is not None else None


def in_code(sentence: str) -> Markup:
    """Text between backticks as <code>; everything else escaped."""
    parts = _CODE.split(sentence)
    rendered = [Markup("<code>{}</code>").format(part) if odd % 2 else escape(part) for odd, part in enumerate(parts)]
    return Markup().join(rendered)


def explained(sentence: str) -> Markup:
    """The same, with the codes of an explanation linked to their runbooks."""
    shown = in_code(sentence)
    for code in codes_in(sentence):
        # Markup.replace keeps markup and escapes the rest.
        shown = shown.replace(f"({code}", Markup("({}").format(runbook_link(code)), 1)
    return shown


def confirm_page(
    page_context: PageContext,
    *,
    path: str,
    question: str,
    explanation: str,
    button: str,
    back_to: str,
    fields: Mapping[str, str],
) -> str:
    """Asks for confirmation of a form, for browsers without JavaScript. `fields` are submitted again."""
    return render(
        "confirm.html",
        page_context,
        path=path,
        question=question,
        explanation=explanation,
        button=button,
        back_to=back_to,
        inputs=fields,
    )


def error_page(page_context: PageContext, title: str, message: str, *, can_read: bool = True) -> str:
    """`can_read`: the caller may be allowed to read other pages, so that a link to the overview is of use."""
    return render("error.html", page_context, title=title, message=message, can_read=can_read)
