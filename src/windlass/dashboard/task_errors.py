"""The page of failed attempts: which tasks failed with which error, when, and on which worker."""

from collections.abc import Sequence

from windlass.dashboard.charts import RANGE_LABELS, RANGE_WORDS, ChartRange
from windlass.dashboard.filters import counted
from windlass.dashboard.rendering import PageContext, next_page_url, render
from windlass.model.listing import ErrorCounts, Page, TaskError
from windlass.ports.queries import MAX_COUNTED_ERRORS

# Workers and codes that are offered as filters.
MAX_FILTERS = 6


def task_errors_page(
    page_context: PageContext,
    page: Page[TaskError],
    counts: ErrorCounts,
    *,
    queues: Sequence[str],
    queue: str | None,
    worker_id: str | None,
    search: str | None,
    chosen: ChartRange,
    is_first: bool,
    is_incomplete: bool,
) -> str:
    """`is_incomplete`: the search stopped at its time limit."""
    filters = {"queue": queue, "worker": worker_id, "search": search, "range": chosen.value}
    what = f"{counted(counts.errors, 'failed attempt')} of {counted(counts.tasks, 'task')}"
    if counts.errors >= MAX_COUNTED_ERRORS:
        what = f"More than {what}"
    return render(
        "errors.html",
        page_context,
        here="tasks",
        rows=page.rows,
        next_url=next_page_url("/errors", page, **filters),
        filters=filters,
        queues=queues,
        queue=queue,
        worker_id=worker_id,
        search=search,
        ranges=[(value.value, label) for value, label in RANGE_LABELS.items()],
        chosen=chosen.value,
        summary=f"{what} in the last {RANGE_WORDS[chosen]}.",
        by_worker=[count for count in counts.by_worker if count.name is not None][:MAX_FILTERS],
        by_code=[count for count in counts.by_code if count.name is not None][:MAX_FILTERS],
        is_first=is_first,
        is_incomplete=is_incomplete,
    )
