"""Filters by queue: a name that nobody knows is a typo, and an empty answer would hide it."""

from typing import TYPE_CHECKING

from windlass.model.errors import BadInput

if TYPE_CHECKING:
    from windlass.store.postgres import PostgresStore

# Named in the message beside all that hold something or are served: enough to recognise one's own.
RECENT_TASKS = 200
MAX_NAMED = 20


async def check_queue_is_known(store: "PostgresStore", queue: str | None) -> None:
    """Raise BadInput with the known ones unless a task or a worker names this queue."""
    if queue is None or await store.tasks(queue=queue, limit=1):
        return
    known = await _known_queues(store)
    if queue in known:
        return
    names = ", ".join(sorted(known)[:MAX_NAMED]) + (", …" if len(known) > MAX_NAMED else "")
    raise BadInput(f"there is no queue {queue!r}: " + (f"known are {names}." if known else "there are no queues yet."))


async def _known_queues(store: "PostgresStore") -> set[str]:
    held = {depth.queue for depth in await store.queue_depths()}
    served = {queue for worker in await store.workers() for queue in worker.queues}
    recent = {task.queue for task in await store.tasks(limit=RECENT_TASKS)}
    return held | served | recent
