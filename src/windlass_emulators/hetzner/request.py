"""One request on its way through the emulator, and lists: filters, order, pages."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar
from urllib.parse import urlencode

from windlass_emulators.hetzner.errors import invalid
from windlass_emulators.hetzner.selectors import parse_selector
from windlass_emulators.hetzner.validation import Inputs, number_in_query
from windlass_emulators.http import Json

DEFAULT_PER_PAGE = 25
# More is not refused, only not given.
MAX_PER_PAGE = 50

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HetznerCall:
    path: str
    query: Sequence[tuple[str, str]]
    body: Json
    # The numbers in its path.
    ids: tuple[int, ...]
    # Where it was sent to, for links.
    origin: str

    def asked(self, name: str) -> list[str]:
        return [value for key, value in self.query if key == name]

    def asked_once(self, name: str) -> str:
        values = self.asked(name)
        return values[-1] if values else ""

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.body)


@dataclass(frozen=True, slots=True)
class HetznerAnswer:
    status: int
    body: Json | None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Filter:
    """`?status=off&status=running`: those for which the value is among the ones asked for."""

    name: str
    value: Callable[[Any], object]


def list_of(
    call: HetznerCall,
    root: str,
    items: Iterable[T],
    render: Callable[[T], Json],
    *,
    sorts: Sequence[str] = ("id",),
    filters: Sequence[Filter] = (),
    has_labels: bool = True,
    extra: Json | None = None,
) -> HetznerAnswer:
    """A page of what was asked for. Raises ApiError."""
    found = list(items)
    for each in filters:
        if wanted := [value for value in call.asked(each.name) if value]:
            found = [item for item in found if str(each.value(item)) in wanted]
    if has_labels and (text := call.asked_once("label_selector")):
        selects = parse_selector(text)
        found = [item for item in found if selects(attrgetter("labels")(item))]
    _sort(found, call.asked("sort") or ["id:asc"], sorts)
    return _page(call, root, found, render, extra or {})


def _sort(items: list[Any], wanted: Sequence[str], allowed: Sequence[str]) -> None:
    # The first named counts most, so it is applied last.
    for text in reversed(wanted):
        name, _, direction = text.partition(":")
        if name not in allowed or direction not in ("", "asc", "desc"):
            raise invalid([("sort", f"'{text}' is not supported")])
        items.sort(key=attrgetter(name), reverse=direction == "desc")


def _page(call: HetznerCall, root: str, items: Sequence[T], render: Callable[[T], Json], extra: Json) -> HetznerAnswer:
    page = number_in_query("page", call.asked_once("page"), 1)
    per_page = min(MAX_PER_PAGE, number_in_query("per_page", call.asked_once("per_page"), DEFAULT_PER_PAGE))
    last = max(1, -(-len(items) // per_page))
    pages = {
        "page": page,
        "per_page": per_page,
        "previous_page": page - 1 if page > 1 else None,
        "next_page": page + 1 if page < last else None,
        "last_page": last,
        "total_entries": len(items),
    }
    shown = [render(item) for item in items[(page - 1) * per_page : page * per_page]]
    links = [("prev", pages["previous_page"]), ("next", pages["next_page"]), ("last", last)]
    header = ", ".join(f'<{_link(call, number)}>; rel="{rel}"' for rel, number in links if number)
    return HetznerAnswer(200, {root: shown, **extra, "meta": {"pagination": pages}}, {"Link": header})


def _link(call: HetznerCall, page: int) -> str:
    query = [(name, value) for name, value in call.query if name != "page"]
    return f"{call.origin}{call.path}?{urlencode([('page', str(page)), *query])}"
