"""Lists: filters, label selectors, order and pages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar
from urllib.parse import urlencode

from windlass_emulators.hetzner.errors import invalid
from windlass_emulators.hetzner.selectors import parse_selector
from windlass_emulators.http import ApiCall, Json, Response, json_response

DEFAULT_PER_PAGE = 25
# A larger per_page is not refused; the page just has this many entries.
MAX_PER_PAGE = 50

T = TypeVar("T")
Filters = Mapping[str, Callable[[Any], object]]
BY_NAME: Filters = {"name": attrgetter("name")}


def list_response(
    call: ApiCall,
    root: str,
    items: Iterable[T],
    render: Callable[[T], Json],
    *,
    sorts: Sequence[str] = ("id",),
    filters: Filters = BY_NAME,
    has_labels: bool = False,
) -> Response:
    """One page of the items that the query selects. `?status=off&status=running` keeps items with either value."""
    found: list[Any] = list(items)
    for name, value_of in filters.items():
        if wanted := [value for value in call.query.getlist(name) if value]:
            found = [item for item in found if str(value_of(item)) in wanted]
    if has_labels and (text := call.query.get("label_selector", "")):
        selects = parse_selector(text)
        found = [item for item in found if selects(item.labels)]
    # The first sort key has the highest priority, so it is applied last.
    for text in reversed(call.query.getlist("sort") or ["id:asc"]):
        name, _, direction = text.partition(":")
        if name not in sorts or direction not in ("", "asc", "desc"):
            raise invalid([("sort", f"'{text}' is not supported")])
        found.sort(key=attrgetter(name), reverse=direction == "desc")
    page = _positive(call, "page", 1)
    per_page = min(MAX_PER_PAGE, _positive(call, "per_page", DEFAULT_PER_PAGE))
    last = max(1, -(-len(found) // per_page))
    pages = {
        "page": page,
        "per_page": per_page,
        "previous_page": page - 1 if page > 1 else None,
        "next_page": page + 1 if page < last else None,
        "last_page": last,
        "total_entries": len(found),
    }
    links = [("prev", pages["previous_page"]), ("next", pages["next_page"]), ("last", last)]
    header = ", ".join(f'<{_link(call, number)}>; rel="{relation}"' for relation, number in links if number)
    shown = [render(item) for item in found[(page - 1) * per_page : page * per_page]]
    return json_response(200, {root: shown, "meta": {"pagination": pages}}, {"Link": header})


def _positive(call: ApiCall, field: str, default: int) -> int:
    text = call.query.get(field, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise invalid([(field, "must be a positive number")])
    return int(text)


def _link(call: ApiCall, page: int) -> str:
    query = [(name, value) for name, value in call.query.multi_items() if name != "page"]
    origin = f"http://{call.headers.get('host', 'localhost')}"
    return f"{origin}{call.path}?{urlencode([('page', str(page)), *query])}"
