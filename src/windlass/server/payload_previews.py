"""Payload previews and errors of lists, without the parts that a fleet's `redact` hides.

A preview that is cut cannot be parsed, so it is hidden as a whole, and so is the error, which may repeat a part of the
payload. Payloads of such queues are not searched either: a search that matches would tell what it found.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from windlass.model.listing import TaskError, TaskRow
from windlass.model.payload_privacy import PayloadPrivacy

Row = TypeVar("Row", TaskRow, TaskError)


def without_private_parts(privacy: PayloadPrivacy, rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(_without_private_parts(privacy, row) for row in rows)


def _without_private_parts(privacy: PayloadPrivacy, row: Row) -> Row:
    queue = row.queue or ""
    if not privacy.hides(queue):
        return row
    # Not valid JSON: everything is hidden.
    payload = row.payload_preview or ""
    return replace(
        row, payload_preview=privacy.redact(queue, payload), error=privacy.redact_text(queue, row.error, payload)
    )


def unsearched_queues(privacy: PayloadPrivacy) -> list[str]:
    """Queues whose payloads a search leaves out."""
    return [queue for queue, paths in privacy.paths.items() if paths]
