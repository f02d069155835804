"""Cursors of paged lists: the sort key of the last row, as JSON in URL-safe base64."""

import base64
import binascii
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, TypeVar

from pydantic import AwareDatetime, Field, TypeAdapter, ValidationError

from windlass.model.errors import BadInput
from windlass.model.listing import MAX_PAGE

_BigInt = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Integer = Annotated[int, Field(ge=-(2**31), lt=2**31)]
ID = TypeAdapter(tuple[_BigInt])
AT_AND_ID = TypeAdapter(tuple[AwareDatetime, _BigInt])
AT_AND_NAME = TypeAdapter(tuple[AwareDatetime, str])
PRIORITY_AND_ID = TypeAdapter(tuple[_Integer, _BigInt])
FLEET_SLOT_AND_NAME = TypeAdapter(tuple[str, _Integer, str])

Key = TypeVar("Key")


def page_size(limit: int) -> int:
    return max(1, min(limit, MAX_PAGE))


def write_cursor(*key: Any) -> str:
    text = json.dumps([part.isoformat() if isinstance(part, datetime) else part for part in key])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read_cursor(cursor: str | None, key: TypeAdapter[Key]) -> Key | None:
    if cursor is None:
        return None
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        return key.validate_json(text)
    except (ValidationError, binascii.Error, ValueError):
        raise BadInput("invalid cursor: use the next_cursor of the previous page.") from None


def next_cursor(rows: Sequence[Any], limit: int, end: Any = None, key: Sequence[str] = ()) -> str | None:
    """The cursor after a full page, or after `end`: the last row that an incomplete search examined.

    `key` names the key columns; without it all columns are the key, the id last.
    """
    last = rows[-1] if len(rows) == limit else end
    if last is None:
        return None
    return write_cursor(*([last[column] for column in key] if key else row_key(last)))


def row_key(row: Any) -> tuple[Any, ...]:
    """All columns of the row, the id last."""
    return tuple(row[column] for column in sorted(row.keys(), key=lambda column: column == "id"))
