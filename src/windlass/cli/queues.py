"""Filters by queue: a name that nobody knows is a typo, and an empty answer would hide it."""

from typing import TYPE_CHECKING

from windlass.model.errors import BadInput

if TYPE_CHECKING:
    from windlass.wiring.stores import CommandStore

# A queue whose tasks have all ended is found if one of them is among so many of the newest. What is most likely a typo
# is not looked for in all of a large table.
RECENT_TASKS = 100_000
MAX_NAMED = 20


async def check_queue_is_known(store: "CommandStore", queue: str | None) -> None:
    """Raise BadInput with the known ones unless a task or a worker names this queue."""
    if queue is None:
        return
    known = await store.known_queues()
    if queue in known or await store.has_recent_task(queue, RECENT_TASKS):
        return
    names = ", ".join(known[:MAX_NAMED]) + (", …" if len(known) > MAX_NAMED else "")
    raise BadInput(f"there is no queue {queue!r}: " + (f"known are {names}." if known else "there are no queues yet."))
