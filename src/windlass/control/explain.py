"""Why is it so? Sentences about a task, a worker or a fleet, from what was stored. Pure: whoever asks reads the store.

Every sentence is a fact that stands in a row, an event or a cycle's snapshot; nothing is guessed.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from windlass.model.action import Drain, Spawn
from windlass.model.event import Event
from windlass.model.record import Cycle, CycleInFull, Fleet
from windlass.model.task import Task, TaskStatus
from windlass.model.worker import Worker, WorkerStatus
from windlass.policy.derive import WorkerState
from windlass.policy.draft import begin

# What the local provider adds to the end of a process, when that is a line of a JSON log.
_LOG_LINE = re.compile(r"; its log ends: (\{.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Story:
    """The answer in a sentence or two, and what led to it, oldest first."""

    answer: list[str]
    history: list[tuple[datetime, str]]


# ---------------------------------------------------------------------------------------------------------------- task


def explain_task(
    task: Task,
    events: Sequence[Event],
    *,
    now: datetime,
    ahead: int,
    workers: Sequence[Worker],
    fleets: Sequence[tuple[Fleet, Cycle | None]],
) -> Story:
    """`ahead`: ready tasks of its queue that come before it. `fleets`: those serving its queue, with the last cycle."""
    answer = _task_answer(task, now, ahead)
    if task.status in (TaskStatus.QUEUED, TaskStatus.ERROR) and not _is_waiting_for_time(task, now):
        answer += _who_could_take_it(task, workers)
        answer += [sentence for fleet, cycle in fleets for sentence in _fleet_sentences(fleet, cycle, now)]
        if not fleets and not any(task.queue in worker.queues for worker in workers):
            answer.append(f"No fleet and no worker serves the queue {task.queue}: start one, or check its name.")
    history = [(task.created_at, f"enqueued into {task.queue}")]
    history += [(event.at, _event_line(event)) for event in events]
    if task.started_at is not None and task.worker_id is not None:
        history.append((task.started_at, f"attempt {task.attempts} begun by {task.worker_id}"))
    if task.finished_at is not None and task.status is TaskStatus.COMPLETE:
        history.append((task.finished_at, "complete"))
    return Story(answer, sorted(history))


def _task_answer(task: Task, now: datetime, ahead: int) -> list[str]:
    match task.status:
        case TaskStatus.COMPLETE:
            return [f"Task {task.id} is complete after {_times(task.attempts, 'attempt')}."]
        case TaskStatus.FAILED:
            return [
                f"Task {task.id} is a dead letter ({task.error_code}) after {task.attempts} of "
                f"{_times(task.max_attempts, 'attempt')}: {_last_line(task.error)}.",
                f"`windlass tasks retry {task.id}` puts it back.",
            ]
        case TaskStatus.RUNNING:
            since_s = _since_s(task.started_at, now)
            done = f", {task.progress:.0%} done" if task.progress is not None else ""
            note = f" ({task.progress_note})" if task.progress_note else ""
            return [f"Task {task.id} has been running on {task.worker_id} for {since_s:.0f} s{done}{note}."]
        case TaskStatus.ERROR:
            wait_s = -_since_s(task.run_after, now)
            return [
                f"Task {task.id} failed in attempt {task.attempts} of {task.max_attempts} and is tried again "
                + (f"in {wait_s:.0f} s." if wait_s > 0 else "as soon as a worker is free.")
            ]
        case TaskStatus.QUEUED if _is_waiting_for_time(task, now):
            return [f"Task {task.id} is not to run before {task.run_after:%Y-%m-%d %H:%M:%S} UTC."]
        case TaskStatus.QUEUED:
            return [f"Task {task.id} has been waiting for {_since_s(task.created_at, now):.0f} s; {_before(ahead)}."]


def _before(count: int) -> str:
    return {0: "it is the next in its queue", 1: "1 is before it"}.get(count, f"{count} are before it")


def _is_waiting_for_time(task: Task, now: datetime) -> bool:
    return task.run_after is not None and task.run_after > now


def _who_could_take_it(task: Task, workers: Sequence[Worker]) -> list[str]:
    serving = [worker for worker in workers if task.queue in worker.queues]
    if not serving:
        return []
    paused = sum(worker.is_paused for worker in serving)
    counts = {status: sum(worker.status is status for worker in serving) for status in WorkerStatus}
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    return [
        f"Its queue has {_times(len(serving), 'worker')}: {', '.join(parts)}"
        + (f", {paused} paused." if paused else ".")
    ]


# -------------------------------------------------------------------------------------------------------------- worker


def explain_worker(worker: Worker, events: Sequence[Event], *, cycle: CycleInFull | None) -> Story:
    """`cycle`: the newest that saw it. What it was judged to be is said by the settings of then, not of today."""
    if worker.status is WorkerStatus.TERMINATED:
        reason = in_short(worker.reason or "no reason was given").rstrip(".")
        answer = [f"Worker {worker.id} has ended ({worker.code or 'no code'}): {reason}."]
    elif worker.reason is not None:
        answer = [f"Worker {worker.id} is {worker.status} ({worker.code}): {in_short(worker.reason).rstrip('.')}."]
    else:
        answer = [f"Worker {worker.id} is {worker.status}{' and paused' if worker.is_paused else ''}."]
    state = _judged(worker.id, cycle)
    if state is not None and cycle is not None:
        answer.append(f"Cycle {cycle.cycle.id} saw it as {state.lifecycle}{_details(state)}.")
        answer += [
            f"It decided: {type(action).__name__.lower()}, {in_short(action.reason)}."
            for action in cycle.cycle.actions
            if getattr(action, "worker_id", None) == worker.id
        ]
    history = [(worker.created_at, "hired" if worker.slot is not None else "started by hand")]
    history += [(event.at, _event_line(event)) for event in events]
    return Story(answer, sorted(history))


def _judged(worker_id: str, cycle: CycleInFull | None) -> WorkerState | None:
    if cycle is None or cycle.snapshot.settings is None:
        return None
    return begin(cycle.snapshot, cycle.snapshot.settings).states.get(worker_id)


def _details(state: WorkerState) -> str:
    parts = []
    if state.heartbeat_age_s is not None:
        parts.append(f"heartbeat {state.heartbeat_age_s:.0f} s old")
    if state.worker.running:
        parts.append("at work on " + ", ".join(str(task.task_id) for task in state.worker.running))
    elif state.idle_s is not None:
        parts.append(f"idle for {state.idle_s:.0f} s")
    if state.reason is not None:
        parts.append(in_short(state.reason))
    return f" ({'; '.join(parts)})" if parts else ""


# --------------------------------------------------------------------------------------------------------------- fleet


def explain_fleet(fleet: Fleet, cycles: Sequence[Cycle], *, now: datetime) -> Story:
    """`cycles`: newest first."""
    answer = _fleet_sentences(fleet, cycles[0] if cycles else None, now)
    history = [(cycle.started_at, _cycle_line(cycle)) for cycle in cycles]
    return Story(answer, sorted(history))


def _fleet_sentences(fleet: Fleet, cycle: Cycle | None, now: datetime) -> list[str]:
    if cycle is None:
        return [f"Fleet {fleet.name} has had no cycle yet: is `windlass up` running?"]
    seen_at = cycle.repeated_at or cycle.started_at
    sentences = [f"Fleet {fleet.name}, {_since_s(seen_at, now):.0f} s ago: {cycle.decision}."]
    if fleet.is_paused:
        sentences.append(f"It is paused: `windlass resume --fleet {fleet.name}` lets it go on.")
    if fleet.hold is not None:
        sentences.append(
            f"It is on hold since {fleet.hold.since:%H:%M:%S} UTC ({fleet.hold.code}): {fleet.hold.reason}."
        )
    if fleet.failed_slots:
        which = ", ".join(map(str, fleet.failed_slots))
        slots = f"Slot {which} has" if len(fleet.failed_slots) == 1 else f"Slots {which} have"
        sentences.append(
            f"{slots} failed too often and stay{'s' if len(fleet.failed_slots) == 1 else ''} empty until "
            f"`windlass restart {fleet.name}`."
        )
    return sentences


def _cycle_line(cycle: Cycle) -> str:
    hired = sum(isinstance(action, Spawn) for action in cycle.actions)
    let_go = sum(isinstance(action, Drain) for action in cycle.actions)
    did = ", ".join(part for count, part in ((hired, f"hired {hired}"), (let_go, f"let {let_go} go")) if count)
    again = f", and {cycle.repeats} more times" if cycle.repeats else ""
    return f"cycle {cycle.id}: {cycle.decision}{f' [{did}]' if did else ''}{again}"


def in_short(reason: str) -> str:
    """A reason without the log line at its end, unless that says what was wrong. The whole is in the worker's log."""
    found = _LOG_LINE.search(reason)
    if found is None:
        return reason
    return reason[: found.start()] + _complaint(found[1])


def _complaint(line: str) -> str:
    try:
        said = json.loads(line)
        if said["level"] in ("error", "critical"):
            return f"; it last said: {said['event']}" + (f": {said['error']}" if said.get("error") else "")
    except (ValueError, KeyError, TypeError):  # cut in the middle, or nobody's log line
        pass
    return ""


def _event_line(event: Event) -> str:
    return f"{event.code}: {in_short(event.reason)}"


def _times(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _last_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return in_short(lines[-1].strip()).rstrip(".") if lines else "no error was given"


def _since_s(moment: datetime | None, now: datetime) -> float:
    return (now - moment).total_seconds() if moment is not None else 0.0
