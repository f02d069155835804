"""Results of operations by the state of the task, worker or fleet, over the memory store."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest

from support.memory_store.stores import MemoryStores
from support.provider_fixtures import set_status_in_memory
from windlass import access, operations, queue_operations, rollouts
from windlass.model.action import Plan, Spawn
from windlass.model.auth import (
    API_PREFIX,
    DEFAULT_TOKEN_TTL_S,
    MAX_SCOPE_NAMES,
    MAX_TOKEN_DAYS,
    NewToken,
    Role,
    TokenScope,
    is_token,
)
from windlass.model.config import Retention
from windlass.model.errors import BadInput, OutOfScope
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, Standby
from windlass.model.outcome import Intent
from windlass.model.task import NewTask, TaskStatus
from windlass.model.worker import Registration, WorkerStatus
from windlass.operations import OperationOutcome, OperationResult

NOW = datetime(2030, 1, 1, tzinfo=UTC)
LEADER = Candidate("leader", ttl_s=30.0)


@pytest.fixture
async def store() -> MemoryStores:
    """A fleet `gpu` of at most three workers with w0 in slot 0, and an unmanaged worker `manual` of fleet `other`."""
    store = MemoryStores(lambda: NOW, Retention(), Random(1))  # noqa: S311
    observed = await store.observe(LEADER, "gpu", FleetConfig(queues=("renders",), max_workers=3))
    assert not isinstance(observed, Standby)
    term, snapshot = observed
    state = replace(snapshot.planner_state, cadence=replace(snapshot.planner_state.cadence, planned_at=NOW))
    plan = Plan((Spawn(0, "wanted"),), state, "spawn 1")
    await store.commit_plan(LEADER, term, snapshot, plan, (Intent("w0", 0, "wanted", 30.0),))
    await store.register(Registration("manual", ("renders",), fleet="other"))
    return store


Operate = Callable[[MemoryStores, str], Awaitable[OperationResult]]
WORKER_OPERATIONS: tuple[Operate, ...] = (
    operations.pause_worker,
    operations.resume_worker,
    operations.restart_worker,
    operations.terminate_worker,
)


@pytest.mark.parametrize("operate", WORKER_OPERATIONS)
async def test_operation_on_unknown_worker_is_not_found(store: MemoryStores, operate: Operate) -> None:
    result = await operate(store, "nope")
    assert (result.outcome, result.changed) == (OperationOutcome.NOT_FOUND, 0)
    assert result.message == "worker nope not found (unknown, or already purged)"


@pytest.mark.parametrize("operate", WORKER_OPERATIONS)
@pytest.mark.parametrize("status", [WorkerStatus.ERROR, WorkerStatus.TERMINATED])
async def test_operation_on_dead_worker_conflicts_and_changes_nothing(
    store: MemoryStores, operate: Operate, status: WorkerStatus
) -> None:
    set_status_in_memory(store, "w0", status)
    before = await store.worker("w0"), await store.events(), await store.fleets()
    result = await operate(store, "w0")
    assert (result.outcome, result.changed) == (OperationOutcome.CONFLICT, 0)
    assert f"status {status}" in result.message
    assert (await store.worker("w0"), await store.events(), await store.fleets()) == before


async def test_repeated_worker_operation_is_unchanged(store: MemoryStores) -> None:
    for operate in (operations.pause_worker, operations.resume_worker, operations.terminate_worker):
        assert (await operate(store, "w0")).outcome is OperationOutcome.DONE
        assert (await operate(store, "w0")).outcome is OperationOutcome.UNCHANGED
    assert (await operations.restart_worker(store, "w0")).outcome is OperationOutcome.UNCHANGED


async def test_forced_termination_ends_worker_without_slot_at_once(store: MemoryStores) -> None:
    assert (await operations.terminate_worker(store, "manual", force=True)).changed == 1
    worker = await store.worker("manual")
    assert worker is not None
    assert worker.status is WorkerStatus.TERMINATED


async def test_terminating_a_fleet_drains_its_live_workers(store: MemoryStores) -> None:
    assert (await operations.terminate_fleet_workers(store, "gpu")).changed == 1
    assert (await operations.terminate_fleet_workers(store, "gpu")).outcome is OperationOutcome.UNCHANGED
    assert (await operations.terminate_fleet_workers(store, "gpu", force=True)).changed == 1
    assert (await operations.terminate_fleet_workers(store, "nope")).outcome is OperationOutcome.NOT_FOUND


async def test_fleet_pause_and_resume_report_repeats(store: MemoryStores) -> None:
    assert (await operations.pause_fleet(store, "gpu")).message == "fleet gpu paused, with 1 worker"
    assert (await operations.pause_fleet(store, "gpu")).outcome is OperationOutcome.UNCHANGED
    assert (await operations.resume_fleet(store, "gpu")).changed == 1
    assert (await operations.resume_fleet(store, "gpu")).message == "fleet gpu was not paused"
    assert (await operations.pause_fleet(store, "nope")).message == "fleet nope not found; known fleets: gpu, other"


async def test_operations_on_all_fleets_sum_up_changed_workers(store: MemoryStores) -> None:
    assert (await operations.pause_all_fleets(store)).changed == 2
    assert (await operations.resume_all_fleets(store)).changed == 2
    restarted = await operations.restart_all_fleets(store)
    assert (restarted.changed, restarted.workers) == (1, ("w0",))  # workers without a slot are not replaced


async def test_spawn_grants_no_more_than_free_slots(store: MemoryStores) -> None:
    result = await operations.spawn_workers(store, "gpu", 5)
    assert (result.outcome, result.asked, result.granted, result.requested) == (OperationOutcome.DONE, 5, 2, 2)
    assert "max_workers is 3" in result.message
    again = await operations.spawn_workers(store, "gpu")
    assert (again.outcome, again.granted, again.requested) == (OperationOutcome.UNCHANGED, 0, 2)


async def test_spawn_and_restart_need_a_fleet_with_cycles(store: MemoryStores) -> None:
    assert (await operations.spawn_workers(store, "other")).outcome is OperationOutcome.CONFLICT
    assert (await operations.restart_fleet(store, "other")).outcome is OperationOutcome.CONFLICT
    assert (await operations.spawn_workers(store, "nope")).outcome is OperationOutcome.NOT_FOUND
    assert (await operations.restart_fleet(store, "nope")).outcome is OperationOutcome.NOT_FOUND


async def test_restart_of_one_slot_drains_only_its_worker(store: MemoryStores) -> None:
    assert (await operations.restart_fleet(store, "gpu", 1)).changed == 0
    assert (await operations.restart_fleet(store, "gpu", 0)).workers == ("w0",)
    with pytest.raises(BadInput):
        await operations.restart_fleet(store, "gpu", 99)


async def test_enqueue_reports_whether_the_task_is_new(store: MemoryStores) -> None:
    first = await operations.enqueue_task(store, NewTask("renders", unique_key="k"))
    second = await operations.enqueue_task(store, NewTask("renders", unique_key="k"))
    assert (first.outcome, second.outcome) == (OperationOutcome.DONE, OperationOutcome.UNCHANGED)
    assert first.task_id == second.task_id


async def test_task_operations_by_status(store: MemoryStores) -> None:
    task_id = await store.enqueue(NewTask("renders"))
    refused = await operations.retry_task(store, task_id)
    assert refused.outcome is OperationOutcome.CONFLICT
    assert refused.message == f"task {task_id} is queued: only failed and retrying tasks can be retried"
    assert (await operations.cancel_task(store, task_id)).outcome is OperationOutcome.DONE
    assert (await operations.cancel_task(store, task_id)).outcome is OperationOutcome.CONFLICT
    assert (await operations.retry_task(store, task_id)).outcome is OperationOutcome.DONE
    assert (await operations.retry_task(store, 999)).outcome is OperationOutcome.NOT_FOUND
    assert (await operations.cancel_task(store, 999)).outcome is OperationOutcome.NOT_FOUND


@pytest.mark.parametrize(("limit", "expected"), [(None, 5), (3, 3), (100, 5)])
async def test_retry_failed_tasks_stops_at_its_limit(
    store: MemoryStores, monkeypatch: pytest.MonkeyPatch, limit: int | None, expected: int
) -> None:
    monkeypatch.setattr(queue_operations, "RETRY_BATCH", 2)
    ids = [await store.enqueue(NewTask("renders")) for _ in range(5)]
    for task_id in ids:
        await store.cancel_task(task_id, "test")
    assert (await queue_operations.retry_failed_tasks(store, "renders")).outcome is OperationOutcome.UNCHANGED
    batches: list[int] = []
    result = await queue_operations.retry_failed_tasks(
        store, "renders", limit=limit, include_cancelled=True, on_batch=batches.append
    )
    assert (result.outcome, result.changed, len(result.task_ids)) == (OperationOutcome.DONE, expected, expected)
    assert sum(batches) == expected
    assert max(batches) <= 2


async def test_cancel_queued_tasks_leaves_running_ones_and_other_queues(store: MemoryStores) -> None:
    assert (await queue_operations.cancel_queued_tasks(store, "renders")).outcome is OperationOutcome.UNCHANGED
    ids = [await store.enqueue(NewTask("renders")) for _ in range(3)]
    other = await store.enqueue(NewTask("thumbnails"))
    batches: list[int] = []
    result = await queue_operations.cancel_queued_tasks(store, "renders", on_batch=batches.append)
    assert (result.task_ids, result.changed, sum(batches)) == (tuple(ids), 3, 3)
    kept = await store.task(other)
    assert kept is not None
    assert kept.status is TaskStatus.QUEUED
    with pytest.raises(OutOfScope):
        scope = TokenScope(frozenset({"renders"}))
        await queue_operations.cancel_queued_tasks(store, "thumbnails", scope=scope)


async def test_deploy_of_a_fleet_on_a_foreign_ray_cluster_conflicts(store: MemoryStores) -> None:
    """No cycle runs such a fleet, so the database does not know its provider."""
    settings = FleetConfig(queues=("renders",), provider="ray", engine="ray", handler="app:run")
    result = await rollouts.deploy_fleet(store, "other", settings)
    assert result.outcome is OperationOutcome.CONFLICT
    assert result.message == f"fleet other {rollouts.FOREIGN_CLUSTER}"


NAMES = frozenset(f"q{n}" for n in range(MAX_SCOPE_NAMES + 1))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"name": "no name"}, "invalid token name 'no name'"),
        ({"scope": TokenScope(queues=frozenset({"<x>"}))}, "'<x>' is not the name of a queue or fleet"),
        ({"scope": TokenScope(fleets=frozenset({""}))}, "'' is not the name of a queue or fleet"),
        ({"scope": TokenScope(queues=NAMES)}, "at most 100 queues and 100 fleets"),
        ({"ttl_s": 0.0}, "more than 0 and at most 36,500 days"),
        ({"ttl_s": MAX_TOKEN_DAYS * 86_400 + 1}, "more than 0 and at most 36,500 days"),
        ({"ttl_s": math.nan}, "more than 0 and at most 36,500 days"),
    ],
)
def test_token_that_cannot_exist_is_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        NewToken(**{"name": "ci", "role": Role.VIEWER} | changed)


async def test_created_token_is_returned_once_and_revoked_once(store: MemoryStores) -> None:
    created = await access.create_token(store, NewToken(name="ci", role=Role.VIEWER))
    assert is_token(created.token, API_PREFIX)
    assert created.details.expires_at == NOW + timedelta(seconds=DEFAULT_TOKEN_TTL_S)
    assert (await access.revoke_token(store, "ci")).message == "token ci revoked"
    assert (await access.revoke_token(store, "ci")).outcome is OperationOutcome.NOT_FOUND


async def test_session_is_revoked_once(store: MemoryStores) -> None:
    await store.create_session(b"hash of a session", Role.VIEWER, 60.0, "ann")
    (session,) = await store.sessions()
    assert (await access.revoke_session(store, session.id)).changed == 1
    assert (await access.revoke_session(store, session.id)).outcome is OperationOutcome.NOT_FOUND
