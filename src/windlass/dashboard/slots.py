"""The slot map: a cell for each place of a fleet, and who is in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from windlass.model.cycle import Fleet
from windlass.model.listing import WorkerRow
from windlass.model.worker import WorkerStatus

# Workers on one map: a fleet of thousands is shown in pages.
MAX_CELLS = 500


@dataclass(frozen=True, slots=True)
class Cell:
    slot: int
    state: str
    # What is said of it when one points at it, and to screen readers.
    words: str
    worker_id: str | None = None


@dataclass(frozen=True, slots=True)
class SlotMap:
    fleet: str
    cells: tuple[Cell, ...]
    states: Mapping[str, int]
    # Of a large fleet only who is there is shown, and on its first page what has failed.
    is_whole: bool
    is_first_page: bool
    # Where the next page of it begins; None on the last.
    next_cursor: str | None


def state_of(worker: WorkerRow) -> str:
    """The one word (and colour) for a worker: what it is, and whether it is at work."""
    if worker.status is WorkerStatus.ACTIVE:
        if worker.is_paused:
            return "paused"
        if worker.is_silent:
            return "silent"
        return "busy" if worker.running_tasks else "idle"
    return worker.status.value


def slot_map(
    fleet: Fleet, workers: Sequence[WorkerRow], *, is_first_page: bool = True, next_cursor: str | None = None
) -> SlotMap:
    """`workers`: at most MAX_CELLS of those in slots, in their order; whoever has no slot is not on it."""
    by_slot = {worker.slot: worker for worker in workers if worker.slot is not None}
    failed = set(fleet.failed_slots[:MAX_CELLS]) if is_first_page else set()
    is_whole = is_first_page and fleet.max_workers <= MAX_CELLS
    # A maximum that was lowered leaves workers beyond it, until they have gone.
    shown = sorted({*by_slot, *failed, *(range(fleet.max_workers) if is_whole else ())})
    cells = tuple(_cell(slot, by_slot.get(slot), slot in failed) for slot in shown)
    states: dict[str, int] = {}
    for cell in cells:
        states[cell.state] = states.get(cell.state, 0) + 1
    return SlotMap(fleet.name, cells, states, is_whole, is_first_page, next_cursor)


def _cell(slot: int, worker: WorkerRow | None, is_failed: bool) -> Cell:
    if worker is None:
        words = "failed too often, stays empty" if is_failed else "empty"
        return Cell(slot, "failed" if is_failed else "empty", f"Slot {slot}: {words}")
    state = state_of(worker)
    task = f", task {worker.task_id}" if worker.task_id is not None else ""
    return Cell(slot, state, f"Slot {slot}: {worker.id}, {state}{task}", worker.id)
