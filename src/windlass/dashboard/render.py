"""Templates and what they are given; the files that browsers keep."""

import gzip
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

from windlass.dashboard import filters as words
from windlass.dashboard import ray_nodes as nodes
from windlass.model.money import amount

# A browser keeps a file for this long; its address changes with its content.
KEPT_S = 31_536_000
ASSETS = {
    "windlass.css": "text/css; charset=utf-8",
    "windlass.js": "text/javascript; charset=utf-8",
    "uplot.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
# Events that are marked among others.
BAD_NEWS = ("WORKER_ERROR", "TASK_ERROR", "TASK_FAILED", "TASK_REQUEUED", "SLOT_FAILED", "MACHINE_REFUSED", "ALERT")
_CODE = pattern(r"`([^`]+)`")


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks. Only one who may act is shown what acts."""

    may_act: bool = False
    csrf: str = ""


@dataclass(frozen=True, slots=True)
class PageContext:
    """Where a page is shown, and to whom."""

    now: datetime
    version: str
    viewer: Viewer = field(default_factory=Viewer)
    # "light" or "dark" where the reader has chosen; otherwise what the system says.
    theme: str | None = None
    # Where changes are told. None: the page does not change.
    stream: str | None = None
    # However much changes, the page is fetched again no more often than this; None: as soon as may be.
    refresh_s: float | None = None
    # Its own address, to come back to.
    back: str = "/"
    # What became of what the reader has just done.
    said: str | None = None


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    compressed: bytes
    media_type: str
    address: str


@cache
def assets() -> Mapping[str, Asset]:
    """By address, which names their content."""
    found = {}
    for name, media_type in ASSETS.items():
        content = resources.files("windlass.dashboard").joinpath("static", name).read_bytes()
        stem, _, suffix = name.rpartition(".")
        address = f"/static/{stem}-{hashlib.sha256(content).hexdigest()[:10]}.{suffix}"
        found[address] = Asset(content, gzip.compress(content, 9, mtime=0), media_type, address)
    return found


@cache
def _addresses() -> Mapping[str, str]:
    return dict(zip(ASSETS, assets(), strict=True))


def render(template: str, setting: PageContext, *, here: str = "", **shown: Any) -> str:
    context = {name: getattr(setting, name) for name in PageContext.__dataclass_fields__}
    return _environment().get_template(template).render(here=here, **context, **shown)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("windlass.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["BAD_NEWS"] = BAD_NEWS
    environment.globals["asset"] = lambda name: _addresses()[name]
    for function in (
        *(words.duration, words.brief, words.count, words.counted, words.percent, words.money, words.moment),
        *(nodes.node_state, nodes.node_uses),
        *(words.gigabytes, words.last_line, words.gist, words.action_label, words.plain, query, in_code, amount),
    ):
        environment.filters[function.__name__] = function
    return environment


def query(parameters: Mapping[str, Any], path: str) -> str:
    """An address with those parameters that have a value."""
    given = {name: value for name, value in parameters.items() if value not in (None, "", False)}
    return f"{path}?{urlencode(given)}" if given else path


def in_code(sentence: str) -> Markup:
    """What stands between backticks, as code."""
    parts = _CODE.split(sentence)
    shown = [Markup("<code>{}</code>").format(part) if odd % 2 else escape(part) for odd, part in enumerate(parts)]
    return Markup().join(shown)
