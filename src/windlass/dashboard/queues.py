"""Pages about queues: the list, and one queue with what serves it, its next tasks and its recent errors."""

from collections.abc import Sequence

from windlass.dashboard.filters import counted
from windlass.dashboard.fleets import FleetCard
from windlass.dashboard.rendering import PageContext, render
from windlass.model.listing import ErrorCounts, TaskError, TaskRow
from windlass.model.overview import MAX_QUEUES, Overview, QueueOverview


def queues_page(page_context: PageContext, overview: Overview) -> str:
    queues = sorted(map(overview.queue, overview.queues), key=_importance)
    unserved = sum(not queue.is_served for queue in queues)
    parts = [counted(len(queues), "queue"), *([f"{unserved} not served"] if unserved else [])]
    return render(
        "queues.html",
        page_context,
        here="queues",
        queues=queues,
        summary=", ".join(parts),
        more=f"Only the first {MAX_QUEUES} queues without a fleet are listed." if overview.has_more_queues else None,
    )


def _importance(queue: QueueOverview) -> tuple[bool, int, str]:
    """Unserved queues first, then by the number of tasks in work."""
    work = queue.work
    return queue.is_served, -(work.queued + work.running + work.retrying), queue.name


def queue_page(
    page_context: PageContext,
    queue: QueueOverview,
    *,
    cards: Sequence[FleetCard],
    next_tasks: Sequence[TaskRow],
    errors: Sequence[TaskError],
    counts: ErrorCounts,
) -> str:
    """`cards`: the fleets that serve it. `errors` and `counts` are of the last hour."""
    return render(
        "queue.html",
        page_context,
        here="queues",
        queue=queue,
        cards=cards,
        next_tasks=next_tasks,
        errors=errors,
        counts=counts,
    )
