"""Pages about workers: the list with the slot map of each fleet, and one worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from windlass.cost.report import Meter, read_meter
from windlass.dashboard.filters import count
from windlass.dashboard.rendering import PageContext, next_page_url, render
from windlass.dashboard.worker_logs import log_text
from windlass.model.cycle import Fleet
from windlass.model.listing import Page, WorkerRow
from windlass.model.node import NodeState
from windlass.model.task import TaskSummary
from windlass.model.worker import WorkerStatus
from windlass.model.worker_log import WorkerLogLine
from windlass.policy.billing import LONG_UNIT_S

# Workers per slot map. Larger fleets are shown in several pages.
MAX_CELLS = 500


@dataclass(frozen=True, slots=True)
class Cell:
    slot: int
    state: str
    # Tooltip, and text for screen readers.
    label: str
    worker_id: str | None = None


@dataclass(frozen=True, slots=True)
class SlotMap:
    fleet: str
    cells: tuple[Cell, ...]
    states: Mapping[str, int]
    # False for a large fleet: only occupied slots are shown, and failed ones on the first page.
    is_whole: bool
    is_first_page: bool
    next_cursor: str | None


def worker_state(worker: WorkerRow) -> str:
    """The status, or for an active worker: paused, silent, error if its Ray node is dead, busy or idle."""
    if worker.status is WorkerStatus.ACTIVE:
        if worker.is_paused:
            return "paused"
        if worker.is_silent:
            return "silent"
        if worker.node is not None and worker.node.state is NodeState.DEAD:
            return "error"
        return "busy" if worker.running_tasks else "idle"
    return worker.status.value


def slot_map(
    fleet: Fleet, workers: Sequence[WorkerRow], *, is_first_page: bool = True, next_cursor: str | None = None
) -> SlotMap:
    """`workers`: at most MAX_CELLS, in slot order. Workers without a slot are ignored."""
    by_slot = {worker.slot: worker for worker in workers if worker.slot is not None}
    failed = set(fleet.failed_slots[:MAX_CELLS]) if is_first_page else set()
    is_whole = is_first_page and fleet.max_workers <= MAX_CELLS
    # After max_workers was lowered, workers may still be in slots above it.
    slots = sorted({*by_slot, *failed, *(range(fleet.max_workers) if is_whole else ())})
    cells = tuple(_cell(slot, by_slot.get(slot), slot in failed) for slot in slots)
    states: dict[str, int] = {}
    for cell in cells:
        states[cell.state] = states.get(cell.state, 0) + 1
    return SlotMap(fleet.name, cells, states, is_whole, is_first_page, next_cursor)


def _cell(slot: int, worker: WorkerRow | None, is_failed: bool) -> Cell:
    if worker is None:
        state = "failed" if is_failed else "empty"
        return Cell(slot, state, f"Slot {slot}: {'failed, restart limit reached' if is_failed else 'empty'}")
    state = worker_state(worker)
    task = f", task {worker.task_id}" if worker.task_id is not None else ""
    return Cell(slot, state, f"Slot {slot}: {worker.id}, {state}{task}", worker.id)


@dataclass(frozen=True, slots=True)
class WorkerLine:
    worker: WorkerRow
    meter: Meter | None
    # Billed in periods long enough to show when the current one ends.
    has_long_billing_period: bool
    vram_share: float
    # When its current status began.
    since: datetime


def worker_line(worker: WorkerRow, now: datetime) -> WorkerLine:
    since = {
        WorkerStatus.ACTIVE: worker.activated_at,
        WorkerStatus.TERMINATING: worker.terminating_at,
        WorkerStatus.TERMINATED: worker.terminated_at,
    }.get(worker.status)
    return WorkerLine(
        worker,
        read_meter(worker.bill, now) if worker.bill is not None else None,
        worker.bill is not None and worker.bill.tariff.unit_s >= LONG_UNIT_S,
        (worker.vram_used_mb or 0) / worker.vram_total_mb if worker.vram_total_mb else 0.0,
        since or worker.created_at,
    )


def workers_page(
    page_context: PageContext,
    page: Page[WorkerRow],
    *,
    fleets: Sequence[str],
    maps: Sequence[SlotMap],
    counts: Mapping[WorkerStatus, int],
    ray_dashboards: Mapping[str, str],
    fleet: str | None,
    is_terminated: bool,
    is_first: bool,
) -> str:
    live = ", ".join(f"{count(number)} {status}" for status, number in counts.items() if number)
    return render(
        "workers.html",
        page_context,
        here="workers",
        rows=[worker_line(worker, page_context.now) for worker in page.rows],
        next_url=next_page_url("/workers", page, fleet=fleet, terminated="yes" if is_terminated else None),
        fleets=fleets,
        maps=maps,
        ray_dashboards=ray_dashboards,
        summary="Terminated workers, newest first" if is_terminated else live or "No live workers",
        fleet=fleet,
        is_terminated=is_terminated,
        is_first=is_first,
    )


def worker_page(
    page_context: PageContext,
    worker: WorkerRow,
    *,
    answer: Sequence[str],
    history: Sequence[tuple[datetime, str]],
    tasks: Sequence[TaskSummary],
    log: Sequence[WorkerLogLine],
    ray_dashboard: str | None,
    diagnostics: Mapping[str, Any] | None = None,
    log_problem: str | None = None,
) -> str:
    """`diagnostics`: what was known about the worker when it failed or terminated."""
    return render(
        "worker.html",
        page_context,
        here="workers",
        worker=worker,
        row=worker_line(worker, page_context.now),
        answer=answer,
        history=history,
        tasks=tasks,
        log=[log_text(line) for line in log],
        diagnostics=diagnostics or {},
        log_problem=log_problem and f"{log_problem[:1].upper()}{log_problem[1:]}.",
        ray_dashboard=ray_dashboard,
    )
