"""Explains the state of a task, a worker or a fleet in sentences.

Every sentence states a stored fact: a row, an event or a cycle's snapshot. `explain` reads the store; the rest is pure.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from windlass.model.action import ACTION_KINDS, Fail
from windlass.model.cycle import Cycle, CycleDetail, Explanation, Fleet
from windlass.model.cycle_actions import done_note
from windlass.model.error_text import error_headline
from windlass.model.errors import BadInput
from windlass.model.event import Event
from windlass.model.plural import plural
from windlass.model.task import MAX_TASK_ID, Task, TaskStatus
from windlass.model.worker import Worker, WorkerStatus
from windlass.policy.planning_context import build_context
from windlass.policy.stages.failure_rate import CODE as FAILURE_RATE
from windlass.policy.worker_state import WorkerState
from windlass.ports.fleets import MAX_AHEAD, FleetQueries
from windlass.ports.tasks import TaskStore
from windlass.ports.worker_logs import WorkerLogQueries

CYCLES_SHOWN = 10
# Last lines of a worker's output, and characters of each.
OUTPUT_LINES = 3
OUTPUT_CHARACTERS = 200


class ExplainStore(TaskStore, FleetQueries, WorkerLogQueries, Protocol):
    """The store as explanations read it."""


async def explain(store: ExplainStore, name: str, redact_event: Callable[[Event], Event] | None = None) -> Explanation:
    """Explain the task (by its id), the worker or the fleet of this name; all of them if several have it. BadInput if
    none has. `redact_event` removes what the reader may not see from the events of a worker."""
    now = await store.now()
    fleets = await store.fleets()
    found: dict[str, Explanation] = {}
    is_number = name.isascii() and name.isdigit()
    # Python refuses to parse numbers with thousands of digits.
    could_be_task = is_number and len(name) <= len(str(MAX_TASK_ID)) and int(name) <= MAX_TASK_ID
    task = await store.task(int(name)) if could_be_task else None
    if task is not None:
        found["a task"] = await _explain_stored_task(store, task, fleets, now)
    worker = await store.worker(name)
    if worker is not None:
        seen = await store.last_cycle_with(worker.fleet, worker.id)
        events = await store.events(worker_id=name)
        has_output = worker.status not in (WorkerStatus.ACTIVE, WorkerStatus.TERMINATING)
        if redact_event is not None:
            events = list(map(redact_event, events))
            # It may contain something derived from hidden parts. The log of the worker has its own rule.
            has_output = False
        output = await _output(store, name) if has_output else []
        found["a worker"] = explain_worker(worker, events, cycle=seen, output=output)
    for fleet in fleets:
        if fleet.name == name:
            cycles = await store.cycles(name, CYCLES_SHOWN)
            workers = [] if cycles else await store.workers()
            by_hand = sum(worker.fleet == name and worker.is_by_hand for worker in workers)
            found["a fleet"] = explain_fleet(fleet, cycles, now=now, by_hand=by_hand)
    if len(found) > 1:
        return _together(name, found)
    for explanation in found.values():
        return explanation
    if is_number:
        raise BadInput(f"task {name} not found (unknown, or already purged); no worker or fleet has that name either.")
    if name in await store.known_queues():
        raise BadInput(f"{name} is a queue: {_about_queue(name, fleets)}.")
    known = ", ".join(fleet.name for fleet in fleets) or "none yet"
    raise BadInput(
        f"no task, worker or fleet has the name {name}. Fleets: {known}. `windlass workers list` shows workers."
    )


def _together(name: str, found: Mapping[str, Explanation]) -> Explanation:
    *others, last = found
    answer = [f"{name} is {', '.join(others)} and {last}."]
    answer += [sentence for each in found.values() for sentence in each.answer]
    return Explanation(answer, sorted(line for each in found.values() for line in each.history))


def _about_queue(queue: str, fleets: Sequence[Fleet]) -> str:
    serving = [fleet.name for fleet in fleets if queue in fleet.queues]
    fleet = f"`windlass explain {serving[0]}` explains the fleet that serves it" if serving else "no fleet serves it"
    return f"{fleet}; `windlass tasks list --queue {queue}` lists its tasks, and each can be explained"


async def _explain_stored_task(store: ExplainStore, task: Task, fleets: Sequence[Fleet], now: datetime) -> Explanation:
    serving = [fleet for fleet in fleets if task.queue in fleet.queues]
    is_waiting = task.status in (TaskStatus.QUEUED, TaskStatus.ERROR)
    return explain_task(
        task,
        await store.events(task_id=task.id),
        now=now,
        ahead=await store.ready_before(task.id) if is_waiting else 0,
        # There may be thousands: read them only for a task that waits for one.
        workers=await store.workers() if is_waiting else [],
        fleets=[(fleet, await store.cycles(fleet.name, CYCLES_SHOWN)) for fleet in serving],
    )


# ---------------------------------------------------------------------------------------------------------------- task


def explain_task(
    task: Task,
    events: Sequence[Event],
    *,
    now: datetime,
    ahead: int,
    workers: Sequence[Worker],
    fleets: Sequence[tuple[Fleet, Sequence[Cycle]]],
) -> Explanation:
    """`ahead`: ready tasks of its queue that come before it, MAX_AHEAD + 1 for more. `fleets`: those that serve its
    queue, with their last cycles, newest first."""
    answer = _task_answer(task, now, ahead)
    if task.status in (TaskStatus.QUEUED, TaskStatus.ERROR) and not _is_scheduled(task, now):
        answer += _workers_of_queue(task, workers)
        answer += [sentence for fleet, cycles in fleets for sentence in _fleet_sentences(fleet, cycles, now)]
        if not fleets and not any(task.queue in worker.queues for worker in workers):
            answer.append(f"No fleet and no worker serves the queue {task.queue}: start one, or check its name.")
    history = [(task.created_at, f"enqueued into {task.queue}")]
    history += [(event.at, _event_line(event)) for event in events]
    # A set: the last attempt of a failed task is in the task and in its event.
    starts = {(started_at, event.worker_id, attempt) for event in events for attempt, started_at in _attempt_of(event)}
    if task.started_at is not None and task.worker_id is not None:
        starts.add((task.started_at, task.worker_id, task.attempts))
    history += [(at, f"attempt {attempt} started on {worker_id}") for at, worker_id, attempt in starts]
    if task.finished_at is not None and task.status is TaskStatus.COMPLETE:
        history.append((task.finished_at, "complete"))
    return Explanation(answer, sorted(history))


def _task_answer(task: Task, now: datetime, ahead: int) -> list[str]:
    match task.status:
        case TaskStatus.COMPLETE:
            return [f"Task {task.id} is complete after {plural(task.attempts, 'attempt')}."]
        case TaskStatus.FAILED:
            return [
                f"Task {task.id} failed permanently ({task.error_code}) after {task.attempts} of "
                f"{plural(task.max_attempts, 'attempt')}: {_headline(task.error)}.",
                f"`windlass tasks show {task.id}` shows the error, `windlass tasks retry {task.id}` queues it again.",
            ]
        case TaskStatus.RUNNING:
            since_s = _since_s(task.started_at, now)
            done = f", {task.progress * 100:.0f} % done" if task.progress is not None else ""
            note = f" ({task.progress_note})" if task.progress_note else ""
            return [f"Task {task.id} has been running on {task.worker_id} for {since_s:.0f} s{done}{note}."]
        case TaskStatus.ERROR:
            wait_s = -_since_s(task.run_after, now)
            when = f"in {wait_s:.0f} s" if wait_s > 0 else "as soon as a worker is free"
            return [
                f"Task {task.id} failed in attempt {task.attempts} of {task.max_attempts} ({task.error_code}: "
                f"{_headline(task.error)}) and will be retried {when}."
            ]
        case TaskStatus.QUEUED if _is_scheduled(task, now):
            return [f"Task {task.id} is scheduled for {task.run_after:%Y-%m-%d %H:%M:%S} UTC."]
        case TaskStatus.QUEUED:
            return [
                f"Task {task.id} has been queued for {_since_s(task.created_at, now):.0f} s; {_queue_position(ahead)}."
            ]


def _queue_position(count: int) -> str:
    if count > MAX_AHEAD:
        return f"more than {MAX_AHEAD:,} tasks are ahead of it"
    return {0: "it is next in its queue", 1: "1 task is ahead of it"}.get(count, f"{count} tasks are ahead of it")


def _is_scheduled(task: Task, now: datetime) -> bool:
    return task.run_after is not None and task.run_after > now


def _workers_of_queue(task: Task, workers: Sequence[Worker]) -> list[str]:
    serving = [worker for worker in workers if task.queue in worker.queues]
    if not serving:
        return []
    counts = {status: sum(worker.status is status for worker in serving) for status in WorkerStatus}
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    return [f"Its queue has {plural(len(serving), 'worker')}: {', '.join(parts)}{_paused_note(serving)}."]


def _paused_note(workers: Sequence[Worker]) -> str:
    paused = sum(worker.is_paused for worker in workers)
    if paused < len(workers):
        return f" ({paused} of them paused)" if paused else ""
    return {1: " (paused)", 2: " (both paused)"}.get(paused, " (all paused)")


# -------------------------------------------------------------------------------------------------------------- worker


async def _output(store: WorkerLogQueries, worker_id: str) -> list[str]:
    """The last lines of a worker that does not run, or not yet."""
    lines = (await store.worker_log(worker_id, OUTPUT_LINES)).lines
    texts = [line.text for line in lines]
    if not texts:
        texts = list((await store.diagnostics(worker_id) or {}).get("last_lines", []))[-OUTPUT_LINES:]
    return [text[:OUTPUT_CHARACTERS] for text in texts if text.strip()]


def explain_worker(
    worker: Worker, events: Sequence[Event], *, cycle: CycleDetail | None, output: Sequence[str] = ()
) -> Explanation:
    """`cycle`: the newest that observed it. Its state is derived with the settings of that cycle.

    `output`: the last lines that it, or the boot of its machine, printed.
    """
    if worker.status is WorkerStatus.TERMINATED:
        answer = [f"Worker {worker.id} is terminated ({worker.code or 'no code'}): {_clause(worker.reason)}."]
    elif worker.reason is not None:
        answer = [f"Worker {worker.id} is {worker.status} ({worker.code}): {_clause(worker.reason)}."]
    else:
        answer = [f"Worker {worker.id} is {worker.status}{' and paused' if worker.is_paused else ''}."]
    state = _state_in_cycle(worker.id, cycle)
    if state is not None and cycle is not None:
        answer.append(f"Cycle {cycle.cycle.id} observed it as {state.lifecycle}{_details(state, worker.reason)}.")
        decided = [action for action in cycle.cycle.actions if getattr(action, "worker_id", None) == worker.id]
        # Reasons that the first sentence gives are not repeated.
        reasons = [_clause(a.reason) for a in decided if _clause(a.reason) != _clause(worker.reason)]
        if decided:
            what = ", ".join(ACTION_KINDS[type(action)] for action in decided)
            answer.append(f"It decided: {'; '.join([what, *dict.fromkeys(reasons)])}.")
    if output:
        more = f"`windlass workers logs {worker.id}` has more"
        answer.append(f"Its last output ({more}): {' | '.join(output)}")
    history = [(event.at, _event_line(event, names_task=True)) for event in events]
    if not any(event.code == "WORKER_SPAWNED" for event in events):
        started = "spawned" if worker.slot is not None else "started by hand" if worker.is_by_hand else "started"
        history.append((worker.created_at, started))
    return Explanation(answer, sorted(history))


def _state_in_cycle(worker_id: str, cycle: CycleDetail | None) -> WorkerState | None:
    if cycle is None or cycle.snapshot.settings is None:
        return None
    return build_context(cycle.snapshot, cycle.snapshot.settings).states.get(worker_id)


def _details(state: WorkerState, known_reason: str | None) -> str:
    parts = []
    if state.heartbeat_age_s is not None:
        parts.append(f"heartbeat {state.heartbeat_age_s:.0f} s old")
    if state.worker.running:
        parts.append("running task " + ", ".join(str(task.task_id) for task in state.worker.running))
    elif state.has_active_task:
        parts.append("running a task placed by Ray")
    elif state.idle_s is not None and state.has_heartbeat:
        parts.append(f"idle for {state.idle_s:.0f} s")
    if state.reason is not None and _clause(state.reason) != _clause(known_reason):
        parts.append(_clause(state.reason))
    return f" ({'; '.join(parts)})" if parts else ""


# --------------------------------------------------------------------------------------------------------------- fleet


def explain_fleet(fleet: Fleet, cycles: Sequence[Cycle], *, now: datetime, by_hand: int = 0) -> Explanation:
    """`cycles`: newest first. `by_hand`: live workers that a person started in a fleet without cycles."""
    if not cycles and by_hand:
        return Explanation(
            [
                f"Fleet {fleet.name} has {plural(by_hand, 'worker')} started by hand with `windlass worker`. "
                "Nothing spawns or replaces them: no orchestrator has a fleet of that name."
            ],
            [],
        )
    answer = _fleet_sentences(fleet, cycles, now)
    history = [
        (cycle.started_at, f"cycle {cycle.id}: {cycle.decision}{done_note(cycle)}{_repeated_note(cycle)}")
        for cycle in cycles
    ]
    return Explanation(answer, sorted(history))


def _fleet_sentences(fleet: Fleet, cycles: Sequence[Cycle], now: datetime) -> list[str]:
    if not cycles:
        return [f"Fleet {fleet.name} has had no cycle yet: is `windlass up` running?"]
    cycle = cycles[0]
    without_orchestrator_s = fleet.without_orchestrator_s(now)
    seen_at = cycle.repeated_at or cycle.started_at
    if without_orchestrator_s is None:
        sentences = [f"Fleet {fleet.name}, {_since_s(seen_at, now):.0f} s ago: {cycle.decision}{done_note(cycle)}."]
    else:
        sentences = [
            f"Fleet {fleet.name} has no orchestrator: {no_orchestrator_reason(fleet, without_orchestrator_s)}.",
            f"Its last decision was: {cycle.decision}.",
        ]
    sentences += _latest_failure(cycles, now)
    if fleet.is_paused:
        sentences.append(f"It is paused: `windlass resume --fleet {fleet.name}` resumes it.")
    if fleet.hold is not None:
        restart = (
            f". After fixing the cause: `windlass restart {fleet.name}`" if fleet.hold.code == FAILURE_RATE else ""
        )
        sentences.append(
            f"It is on hold since {fleet.hold.since:%H:%M:%S} UTC ({fleet.hold.code}): {fleet.hold.reason}{restart}."
        )
    if fleet.failed_slots:
        which = ", ".join(map(str, fleet.failed_slots))
        slots = f"Slot {which} has" if len(fleet.failed_slots) == 1 else f"Slots {which} have"
        sentences.append(
            f"{slots} failed too often and stay{'s' if len(fleet.failed_slots) == 1 else ''} empty until "
            f"`windlass restart {fleet.name}`."
        )
    return sentences


def _latest_failure(cycles: Sequence[Cycle], now: datetime) -> list[str]:
    """The newest failed worker: an operator should see the cause long before it leads to a hold."""
    for cycle in cycles:
        for action in reversed(cycle.actions):
            if isinstance(action, Fail):
                ago = f"{_since_s(cycle.started_at, now):.0f} s ago"
                return [f"Worker {action.worker_id} failed {ago} ({action.code}): {_clause(action.reason)}."]
    return []


def no_orchestrator_reason(fleet: Fleet, without_orchestrator_s: float) -> str:
    """Why a fleet without recent cycles has none, and what to do."""
    silent = f"no cycle for {without_orchestrator_s:.0f} s"
    return (
        f"{silent}, although an orchestrator leads; its log names the error, for example a database whose disk is "
        "full; without an error there, its windlass.toml lacks this fleet"
        if fleet.is_led
        else f"{silent}; start `windlass up`"
    )


def _repeated_note(cycle: Cycle) -> str:
    """Until when later cycles, which are not stored, decided the same."""
    if cycle.repeated_at is None:
        return ""
    is_same_day = cycle.repeated_at.date() == cycle.started_at.date()
    return f"; unchanged until {cycle.repeated_at:{'%H:%M:%S' if is_same_day else '%Y-%m-%d %H:%M:%S'}}"


def _attempt_of(event: Event) -> Iterator[tuple[int, datetime]]:
    """Number and start of the attempt whose failure the event records."""
    detail = event.detail or {}
    if "attempt" in detail and "started_at" in detail:
        yield int(detail["attempt"]), datetime.fromisoformat(detail["started_at"])


def _event_line(event: Event, *, names_task: bool = False) -> str:
    task = f"task {event.task_id}, " if names_task and event.task_id is not None else ""
    return f"{event.code}: {task}{event.reason}" + (f" (by {event.actor})" if event.actor is not None else "")


def _clause(reason: str | None) -> str:
    return (reason or "no reason given").rstrip(".")


def _headline(error: str | None) -> str:
    return error_headline(error).rstrip(".") or "no error given"


def _since_s(moment: datetime | None, now: datetime) -> float:
    return (now - moment).total_seconds() if moment is not None else 0.0
