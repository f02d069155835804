"""Filters by queue: an unknown name is most likely a typo, so it is an error instead of an empty result."""

from typing import Protocol

from windlass.model.errors import BadInput
from windlass.ports.tasks import TaskStore

# A queue whose tasks have all finished is known if one of them is among this many newest tasks. This bounds the
# search in a large table.
RECENT_TASKS = 100_000
MAX_LISTED = 20


class QueueStore(TaskStore, Protocol):
    async def has_recent_task(self, queue: str, newest: int, /) -> bool: ...


async def check_queue_is_known(store: QueueStore, queue: str | None) -> None:
    """Raise BadInput, with the known queues, unless a task or a worker names this queue."""
    if queue is None:
        return
    known = await store.known_queues()
    if queue in known or await store.has_recent_task(queue, RECENT_TASKS):
        return
    names = ", ".join(known[:MAX_LISTED]) + (", …" if len(known) > MAX_LISTED else "")
    raise BadInput(f"queue {queue} not found; known queues: {names or 'none'}.")
