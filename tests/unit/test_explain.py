"""`windlass explain`: its sentences for tasks, workers and fleets, derived from stored rows and cycles."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest

from support.memory_store.stores import MemoryStores
from windlass.control.explanation import explain, explain_fleet, explain_task, explain_worker
from windlass.model.action import Delete, Drain, Fail, Promote, Spawn
from windlass.model.actor import acting_as
from windlass.model.config import Retention
from windlass.model.cycle import Cycle, CycleDetail, Fleet
from windlass.model.errors import BadInput
from windlass.model.event import Event
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.machine import Machine, MachineState
from windlass.model.snapshot import Hold, RunningView, Snapshot, WorkerView
from windlass.model.task import NewTask, Task, TaskStatus
from windlass.model.worker import Registration, Worker, WorkerStatus

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
ERROR = {"error_code": "HANDLER_ERROR", "error": "no disk"}


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


TASK = Task(
    id=7,
    queue="renders",
    status=TaskStatus.QUEUED,
    priority=0,
    attempts=0,
    max_attempts=3,
    timeout_s=None,
    run_after=None,
    created_at=ago(40),
    started_at=None,
    finished_at=None,
    worker_id=None,
    unique_key=None,
    progress=None,
    progress_note=None,
    error_code=None,
    error=None,
    owner=None,
    payload="{}",
    result=None,
)
WORKER = Worker(
    id="renders-0-aa",
    fleet="renders",
    slot=0,
    status=WorkerStatus.ACTIVE,
    is_paused=False,
    queues=("renders",),
    concurrency=1,
    lease_s=30.0,
    created_at=ago(100),
    activated_at=ago(95),
    last_heartbeat=ago(2),
    first_claimed_at=None,
    terminated_at=None,
    code=None,
    reason=None,
    host="here",
    pid=1,
    version="0",
    vram_total_mb=None,
    vram_used_mb=None,
    late_results=0,
)
FLEET = Fleet("renders", "local", ("renders",), 0, 4, False, 0, None, (), ago(1000))
CYCLE = Cycle(12, "renders", 1, ago(9), ago(9), "no change: 3 queued, 2 of 2 workers busy, 2 needed", (), None, 0, None)


def event(code: str, reason: str, seconds_ago: float = 10) -> Event:
    return Event(1, ago(seconds_ago), code, reason, "renders", WORKER.id, TASK.id, None)


def explain_lines(task: Task, **known: Any) -> list[str]:
    given: dict[str, Any] = {"ahead": 0, "workers": [], "fleets": [], **known}
    return explain_task(task, [], now=NOW, **given).answer


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param({}, "Task 7 has been queued for 40 s; it is next in its queue.", id="queued"),
        pytest.param(
            {"run_after": NOW + timedelta(hours=1)},
            "Task 7 is scheduled for 2030-01-01 13:00:00 UTC.",
            id="scheduled",
        ),
        pytest.param(
            {
                "status": TaskStatus.RUNNING,
                "worker_id": "w",
                "started_at": ago(5),
                "progress": 0.5,
                "progress_note": "x",
            },
            "Task 7 has been running on w for 5 s, 50 % done (x).",
            id="running",
        ),
        pytest.param(
            {"status": TaskStatus.ERROR, "attempts": 1, "run_after": NOW + timedelta(seconds=8), **ERROR},
            "Task 7 failed in attempt 1 of 3 (HANDLER_ERROR: no disk) and will be retried in 8 s.",
            id="retrying later",
        ),
        pytest.param(
            {"status": TaskStatus.ERROR, "attempts": 1, "run_after": ago(1), **ERROR},
            "Task 7 failed in attempt 1 of 3 (HANDLER_ERROR: no disk) and will be retried as soon as a worker is free.",
            id="retry is due",
        ),
        pytest.param(
            {"status": TaskStatus.COMPLETE, "attempts": 1}, "Task 7 is complete after 1 attempt.", id="complete"
        ),
        pytest.param(
            {
                "status": TaskStatus.FAILED,
                "attempts": 3,
                "error_code": "CRASHED",
                "error": "Traceback (most recent call last):\n  File\nOSError: no disk\nsee the wiki",
            },
            "Task 7 failed permanently (CRASHED) after 3 of 3 attempts: OSError: no disk.",
            id="failed",
        ),
    ],
)
def test_first_sentence_states_the_task_status(changes: dict[str, Any], sentence: str) -> None:
    assert explain_lines(replace(TASK, **changes))[0] == sentence


def test_tasks_ahead_are_counted_up_to_10000() -> None:
    assert explain_lines(TASK, ahead=10_000)[0] == "Task 7 has been queued for 40 s; 10000 tasks are ahead of it."
    assert (
        explain_lines(TASK, ahead=10_001)[0]
        == "Task 7 has been queued for 40 s; more than 10,000 tasks are ahead of it."
    )


def test_queued_task_names_workers_and_last_decision_of_its_fleet() -> None:
    busy = [WORKER, replace(WORKER, id="b", is_paused=True), replace(WORKER, id="c", queues=("other",))]
    assert explain_lines(TASK, ahead=2, workers=busy, fleets=[(FLEET, [CYCLE])]) == [
        "Task 7 has been queued for 40 s; 2 tasks are ahead of it.",
        "Its queue has 2 workers: 2 active (1 of them paused).",
        "Fleet renders, 9 s ago: no change: 3 queued, 2 of 2 workers busy, 2 needed.",
    ]


def test_unserved_queue_is_named() -> None:
    assert explain_lines(TASK)[-1] == "No fleet and no worker serves the queue renders: start one, or check its name."
    assert (
        explain_lines(TASK, fleets=[(FLEET, [])])[-1] == "Fleet renders has had no cycle yet: is `windlass up` running?"
    )


def test_history_of_a_task_is_chronological() -> None:
    done = replace(TASK, status=TaskStatus.COMPLETE, attempts=2, worker_id="w", started_at=ago(8), finished_at=ago(3))
    explanation = explain_task(
        done, [event("TASK_REQUEUED", "attempt 1 of 3: lost")], now=NOW, ahead=0, workers=[], fleets=[]
    )
    assert [text for _, text in explanation.history] == [
        "enqueued into renders",
        "TASK_REQUEUED: attempt 1 of 3: lost",
        "attempt 2 started on w",
        "complete",
    ]


def test_history_names_worker_and_start_of_every_attempt() -> None:
    def failure(attempt: int, seconds_ago: float) -> Event:
        detail = {"attempt": attempt, "started_at": ago(seconds_ago + 2).isoformat(), "error_code": "X", "error": "x"}
        code = "TASK_FAILED" if attempt == 2 else "TASK_ERROR"
        return replace(event(code, f"attempt {attempt} of 2: x", seconds_ago), worker_id=f"w{attempt}", detail=detail)

    dead = replace(
        TASK,
        status=TaskStatus.FAILED,
        attempts=2,
        max_attempts=2,
        worker_id="w2",
        started_at=ago(12),
        finished_at=ago(10),
    )
    events = [failure(1, 20), failure(2, 10)]
    explanation = explain_task(dead, events, now=NOW, ahead=0, workers=[], fleets=[])
    assert [text for _, text in explanation.history] == [
        "enqueued into renders",
        "attempt 1 started on w1",
        "TASK_ERROR: attempt 1 of 2: x",
        "attempt 2 started on w2",
        "TASK_FAILED: attempt 2 of 2: x",
    ]


def test_due_retry_is_explained_like_a_queued_task() -> None:
    due = replace(TASK, status=TaskStatus.ERROR, attempts=1, run_after=ago(3))
    held = replace(FLEET, hold=Hold("FAILURE_RATE", "6 of 7 workers failed", ago(60)))
    answer = explain_task(due, [], now=NOW, ahead=0, workers=[WORKER], fleets=[(held, [CYCLE])]).answer
    assert "will be retried as soon as a worker is free." in answer[0]
    assert answer[1] == "Its queue has 1 worker: 1 active."
    hold_text = "(FAILURE_RATE): 6 of 7 workers failed. After fixing the cause: `windlass restart renders`."
    assert f"It is on hold since 11:59:00 UTC {hold_text}" in answer
    later = replace(due, run_after=ago(-30))
    assert len(explain_task(later, [], now=NOW, ahead=0, workers=[WORKER], fleets=[(held, [CYCLE])]).answer) == 1


def test_terminated_worker_shows_its_reason_and_last_cycle() -> None:
    gone = replace(WORKER, status=WorkerStatus.TERMINATED, code="IDLE", reason="idle 31 s; 0 queued")
    view = WorkerView(
        id=WORKER.id,
        slot=0,
        status=WorkerStatus.ACTIVE,
        is_paused=False,
        concurrency=1,
        created_at=ago(100),
        activated_at=ago(95),
        last_heartbeat=ago(2),
        running=(RunningView(7, ago(5), None),),
        machine_id="m",
    )
    settings = FleetConfig(stuck_timeout_s=4)
    drain = Drain(WORKER.id, "IDLE", "idle 31 s; 0 queued")
    seen = CycleDetail(replace(CYCLE, actions=(drain,)), Snapshot(NOW, "renders", workers=(view,), settings=settings))
    answer = explain_worker(gone, [event("WORKER_TERMINATING", "idle")], cycle=seen).answer
    assert answer[0] == f"Worker {WORKER.id} is terminated (IDLE): idle 31 s; 0 queued."
    assert answer[1].startswith("Cycle 12 observed it as ")
    assert "heartbeat 2 s old; running task 7; Stuck task 7 (5s)" in answer[1], "with the settings of that cycle"
    assert answer[2] == "It decided: drain.", "the first sentence has the reason already"


def test_reason_is_not_repeated_and_sentences_end_in_one_period() -> None:
    reason = "Its process exited with code 2; its log ends: windlass: cannot find nope in app."
    gone = replace(WORKER, status=WorkerStatus.TERMINATED, code="MACHINE_GONE", reason=reason)
    actions = (Fail(WORKER.id, "MACHINE_GONE", reason), Delete(WORKER.id, "m", "MACHINE_GONE", "it has failed."))
    view = WorkerView(WORKER.id, 0, WorkerStatus.ACTIVE, False, 1, ago(100), machine_id="m", creation="created")
    machine = Machine("m", WORKER.id, MachineState.EXITED, ago(100), note=reason)
    seen = Snapshot(NOW, "renders", workers=(view,), machines=(machine,), settings=FleetConfig())
    answer = explain_worker(gone, [], cycle=CycleDetail(replace(CYCLE, actions=actions), seen)).answer
    assert answer == [
        f"Worker {WORKER.id} is terminated (MACHINE_GONE): {reason}",
        "Cycle 12 observed it as crashed.",
        "It decided: fail, delete; it has failed.",
    ]


def test_history_of_a_worker_names_the_tasks_of_its_events() -> None:
    failed = event("TASK_FAILED", "attempt 1 of 1: OSError: no disk")
    spawned = replace(event("WORKER_SPAWNED", "1 queued", 20), task_id=None)
    history = [line for _, line in explain_worker(WORKER, [failed, spawned], cycle=None).history]
    assert history == ["WORKER_SPAWNED: 1 queued", "TASK_FAILED: task 7, attempt 1 of 1: OSError: no disk"]


def test_worker_without_heartbeat_is_not_called_idle() -> None:
    view = WorkerView(WORKER.id, 0, WorkerStatus.SPAWNING, False, 1, ago(3), machine_id="m", creation="created")
    beating = replace(view, status=WorkerStatus.ACTIVE, last_heartbeat=ago(1), activated_at=ago(2))
    for seen, expected in (
        (view, "spawning_pod_pending."),
        (beating, "active_ready (heartbeat 1 s old; idle for 0 s)."),
    ):
        snapshot = Snapshot(NOW, "renders", workers=(seen,), settings=FleetConfig())
        answer = explain_worker(WORKER, [], cycle=CycleDetail(CYCLE, snapshot)).answer
        assert answer[1] == f"Cycle 12 observed it as {expected}"


@pytest.mark.parametrize(
    ("pauses", "expected"),
    [
        ((True,), "1 worker: 1 active (paused)"),
        ((True, True), "2 workers: 2 active (both paused)"),
        ((True, True, True), "3 workers: 3 active (all paused)"),
        ((True, False, False), "3 workers: 3 active (1 of them paused)"),
        ((False, False), "2 workers: 2 active"),
    ],
)
def test_paused_workers_are_counted_among_active_ones(pauses: tuple[bool, ...], expected: str) -> None:
    workers = [replace(WORKER, id=str(number), is_paused=paused) for number, paused in enumerate(pauses)]
    assert explain_lines(TASK, workers=workers)[1] == f"Its queue has {expected}."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param({"planned_at": ago(14)}, None, id="a cycle slightly late"),
        pytest.param({"planned_at": ago(40)}, "for 40 s; start `windlass up`.", id="no leader"),
        pytest.param({"planned_at": ago(40), "is_led": True}, None, id="a leader that may be slow"),
        pytest.param(
            {"planned_at": ago(400), "is_led": True},
            "for 400 s, although an orchestrator leads; its log names the error, for example a database whose disk is "
            "full; without an error there, its windlass.toml lacks this fleet.",
            id="a leader that does not run this fleet",
        ),
        pytest.param({"planned_at": ago(2), "next_plan_in_s": None}, "for 2 s; start `windlass up`.", id="shut down"),
        pytest.param({"planned_at": ago(2), "next_plan_in_s": None, "is_led": True}, None, id="shutting down"),
        pytest.param({"planned_at": ago(3000), "next_plan_in_s": 3600.0}, None, id="a long cycle interval"),
    ],
)
def test_fleet_without_orchestrator_is_reported(changes: dict[str, Any], sentence: str | None) -> None:
    fleet = replace(FLEET, **{"next_plan_in_s": 10.0, **changes})
    expected = f"Fleet renders has no orchestrator: no cycle {sentence}" if sentence else None
    for answer in (explain_lines(TASK, fleets=[(fleet, [CYCLE])])[1:], explain_fleet(fleet, [CYCLE], now=NOW).answer):
        assert (answer[0] == expected) == (sentence is not None), answer
        assert not any("paused" in line for line in answer)


def test_worker_without_cycle_or_events_is_explained_by_its_row() -> None:
    explanation = explain_worker(replace(WORKER, slot=None, is_paused=True), [], cycle=None)
    assert explanation.answer == [f"Worker {WORKER.id} is active and paused."]
    assert [text for _, text in explanation.history] == ["started by hand"]


def test_last_worker_failure_is_named() -> None:
    failed = (Fail("renders-0-aa", "MACHINE_GONE", "no"), Fail("renders-1-bb", "MACHINE_GONE", "Its process exited."))
    cycles = [CYCLE, replace(CYCLE, id=11, started_at=ago(20), actions=failed)]
    sentence = "Worker renders-1-bb failed 20 s ago (MACHINE_GONE): Its process exited."
    assert explain_fleet(FLEET, cycles, now=NOW).answer[-1] == sentence
    assert explain_lines(TASK, fleets=[(FLEET, cycles)])[-1] == sentence


def test_fleet_shows_decision_pause_hold_and_failed_slots() -> None:
    hold = Hold("FAILURE_RATE", "6 of 7 workers failed", ago(60))
    held = replace(FLEET, is_paused=True, hold=hold, failed_slots=(0, 2))
    spawned = replace(CYCLE, id=11, started_at=ago(20), decision="spawn 1: 1 queued", actions=(Spawn(0, "1 queued"),))
    spawned = replace(spawned, summary={"workers_spawned": 1})
    explanation = explain_fleet(held, [replace(CYCLE, repeats=3, repeated_at=ago(1)), spawned], now=NOW)
    assert explanation.answer == [
        "Fleet renders, 1 s ago: no change: 3 queued, 2 of 2 workers busy, 2 needed.",
        "It is paused: `windlass resume --fleet renders` resumes it.",
        "It is on hold since 11:59:00 UTC (FAILURE_RATE): 6 of 7 workers failed. After fixing the cause: "
        "`windlass restart renders`.",
        "Slots 0, 2 have failed too often and stay empty until `windlass restart renders`.",
    ]
    assert [text for _, text in explanation.history] == [
        "cycle 11: spawn 1: 1 queued [spawned 1]",
        "cycle 12: no change: 3 queued, 2 of 2 workers busy, 2 needed; unchanged until 11:59:59",
    ]
    overnight = replace(CYCLE, started_at=ago(50_000), repeats=1, repeated_at=ago(40_000))
    assert explain_fleet(held, [overnight], now=NOW).history[0][1].endswith("; unchanged until 2030-01-01 00:53:20")


@pytest.mark.parametrize(
    ("summary", "provider_calls"),
    [
        pytest.param({"workers_spawned": 2, "workers_terminated": 1}, ("spawned 2", "deleted 1"), id="all succeeded"),
        pytest.param(
            {"workers_spawned": 1, "workers_terminated": 1}, ("spawned 1 of 2", "deleted 1"), id="one refused"
        ),
        pytest.param(
            {"workers_spawned": 0, "workers_terminated": 0},
            ("2 spawns not confirmed", "1 deletion not confirmed"),
            id="all refused",
        ),
        pytest.param(None, ("2 spawns not confirmed", "1 deletion not confirmed"), id="no outcome yet"),
        pytest.param(
            {"workers_spawned": 1, "creations_refused": {"NO_CAPACITY": 1}, "workers_terminated": 1},
            ("spawned 1 of 2, 1 refused: no capacity", "deleted 1"),
            id="one refused, with its code",
        ),
        pytest.param(
            {"workers_spawned": 0, "creations_refused": {"NO_CAPACITY": 1, "REFUSED": 1}, "workers_terminated": 1},
            ("1 spawn refused: no capacity, 1 spawn refused", "deleted 1"),
            id="all refused, with their codes",
        ),
        pytest.param(
            {"workers_spawned": 0, "creations_refused": {"LIMIT_REACHED": 1}, "workers_terminated": 1},
            ("1 spawn refused: limit reached, 1 spawn not confirmed", "deleted 1"),
            id="one refused, one without an answer",
        ),
    ],
)
def test_fleet_explanation_tells_what_was_done(summary: dict[str, Any] | None, provider_calls: tuple[str, str]) -> None:
    spawns = (Spawn(0, "x"), Spawn(1, "x"))
    actions = (Promote("a", "x"), Fail("b", "X", "x"), Drain("c", "X", "x"), Delete("d", None, "X", "x"), *spawns)
    explanation = explain_fleet(FLEET, [replace(CYCLE, actions=actions, summary=summary)], now=NOW)
    spawned, deleted = provider_calls
    done = f" [{spawned}, activated 1, failed 1, drained 1, {deleted}]"
    assert [text.partition(" needed")[2] for _, text in explanation.history] == [done]
    assert f"{done}." in explanation.answer[0]


# --------------------------------------------------------------------------------------------------- name lookup


async def store_with(*fleets: str) -> MemoryStores:
    store = MemoryStores(lambda: NOW, Retention(), Random(1))  # noqa: S311
    for name in fleets:
        await store.observe(Candidate("ann", ttl_s=3600.0), name, FleetConfig(queues=("q",)))
    return store


async def test_numeric_name_finds_a_task_worker_or_fleet() -> None:
    store = await store_with("2", "3")
    await store.register(Registration("4", ("q",)))
    assert await store.enqueue(NewTask("q")) == 1
    for name, what in (
        ("1", "Task 1 has been queued"),
        ("2", "Fleet 2 has had no cycle"),
        ("4", "Worker 4 is active"),
    ):
        assert (await explain(store, name)).answer[0].startswith(what)
    with pytest.raises(BadInput, match="task 5 not found"):
        await explain(store, "5")


async def test_ambiguous_name_explains_every_match() -> None:
    store = await store_with("1")
    await store.register(Registration("1", ("q",)))
    await store.enqueue(NewTask("q"))
    answer = (await explain(store, "1")).answer
    assert answer[0] == "1 is a task, a worker and a fleet."
    assert [sentence for sentence in answer if sentence.startswith(("Task 1 ", "Worker 1 ", "Fleet 1 "))]
    assert {sentence.split()[0] for sentence in answer} >= {"Task", "Worker", "Fleet"}


async def test_history_names_the_person_who_caused_an_event() -> None:
    store = MemoryStores(lambda: NOW)
    task_id = await store.enqueue(NewTask("renders"))
    with acting_as("session:ann"):
        await store.cancel_task(task_id, "no longer needed")
    history = [text for _, text in (await explain(store, str(task_id))).history]
    assert any("TASK_CANCELLED: no longer needed (by session:ann)" in text for text in history), history
