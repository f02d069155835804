"""Changing things over HTTP: what producers and operators do. The next cycle carries out what needs one."""

from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Response

from windlass.model.cycle import Fleet
from windlass.model.task import new_task
from windlass.model.worker import LIVE, Worker
from windlass.ports import http
from windlass.server.auth import operator, producer
from windlass.server.context import AppContext, DashboardContext, DashboardStore, answering
from windlass.server.errors import ApiError, not_found
from windlass.server.openapi import documented
from windlass.server.routes.queries import API, FleetName, TaskId, WorkerId
from windlass.server.schemas import (
    ChangeResponse,
    EnqueueResponse,
    NewTaskBody,
    ReasonBody,
    RequestResponse,
    RestartBody,
    RetryFailedBody,
    SpawnBody,
    TerminateBody,
)

Producing, Operating = Depends(producer), Depends(operator)
# A body that may be left out.
Reason = Annotated[ReasonBody, Body(default_factory=ReasonBody)]
Termination = Annotated[TerminateBody, Body(default_factory=TerminateBody)]
ScalingDecision = Annotated[SpawnBody, Body(default_factory=SpawnBody)]
Which = Annotated[RestartBody, Body(default_factory=RestartBody)]

_enqueued = answering(EnqueueResponse)
_changed = answering(ChangeResponse)
_requested = answering(RequestResponse)


def producing_routes(face: AppContext, shown: DashboardContext) -> APIRouter:
    router = APIRouter(prefix=API, dependencies=[Producing])
    store = shown.store

    @router.post(
        "/tasks",
        **documented(EnqueueResponse, "Enqueue a task", "enqueued", status_code=201, also=(200, "enqueued_before")),
    )
    async def enqueue(body: NewTaskBody) -> Response:
        task = new_task(**body.model_dump(), max_payload_bytes=face.max_payload_bytes)
        task_id, is_new = await store.enqueue_or_find(task)
        answer = _enqueued(EnqueueResponse(task_id, is_new))
        answer.status_code = 201 if is_new else 200
        return answer

    return router


def operating_routes(_face: AppContext, shown: DashboardContext) -> APIRouter:
    router = APIRouter(prefix=API, dependencies=[Operating])
    for add in (_tasks, _workers, _fleets, _everything):
        add(router, shown)
    return router


def _tasks(router: APIRouter, shown: DashboardContext) -> None:
    store, live = shown.store, shown.live

    async def done(task_id: int, is_done: bool, otherwise: str) -> Response:
        live.poke()
        if is_done:
            return _changed(ChangeResponse(1))
        task = await store.task(task_id)
        if task is None:
            raise not_found(f"there is no task {task_id}: it was never enqueued, or its retention is over.")
        raise ApiError(409, http.CONFLICT, f"task {task_id} is {task.status}: {otherwise}.")

    @router.post("/tasks/{task_id}/retry", **documented(ChangeResponse, "Try a task again", "changed"))
    async def retry(task_id: TaskId) -> Response:
        """A dead letter, or one that waits for its retry, goes back into its queue with fresh attempts."""
        is_done = await store.retry_task(task_id)
        return await done(task_id, is_done, "only dead letters, and tasks that wait for their retry, are tried again")

    @router.post("/tasks/{task_id}/cancel", **documented(ChangeResponse, "Cancel a task", "changed"))
    async def cancel(task_id: TaskId, body: Reason) -> Response:
        """It ends as a dead letter with the code CANCELLED; a worker that has it at hand is stopped."""
        return await done(
            task_id, await store.cancel_task(task_id, body.reason), "only what is not finished is cancelled"
        )

    @router.post("/tasks/retry-failed", **documented(ChangeResponse, "Try dead letters again", "changed"))
    async def retry_failed(body: RetryFailedBody) -> Response:
        """The oldest dead letters of a queue; those that were cancelled stay."""
        ids, _ = await store.retry_failed(body.queue, await store.now(), body.limit)
        live.poke()
        return _changed(ChangeResponse(len(ids)))


def _workers(router: APIRouter, shown: DashboardContext) -> None:
    store, live = shown.store, shown.live

    @router.post("/workers/{worker_id}/pause", **documented(ChangeResponse, "Pause a worker", "changed"))
    async def pause(worker_id: WorkerId) -> Response:
        """It finishes what it has at hand and claims nothing more."""
        await _living(store, worker_id)
        count = await store.set_paused([worker_id], True)
        live.poke()
        return _changed(ChangeResponse(count))

    @router.post("/workers/{worker_id}/resume", **documented(ChangeResponse, "Let a worker go on", "changed"))
    async def resume(worker_id: WorkerId) -> Response:
        await _living(store, worker_id)
        count = await store.set_paused([worker_id], False)
        live.poke()
        return _changed(ChangeResponse(count))

    @router.post("/workers/{worker_id}/restart", **documented(ChangeResponse, "Replace a worker", "changed"))
    async def restart(worker_id: WorkerId) -> Response:
        """It finishes and leaves, its slot's restarts are forgotten, and the next cycle hires anew."""
        worker = await _living(store, worker_id)
        if worker.slot is not None:
            await store.restart_slots(worker.fleet, worker.slot)
        count = await store.set_terminating([worker_id], "restarted by hand")
        live.poke()
        return _changed(ChangeResponse(count))

    @router.post("/workers/{worker_id}/terminate", **documented(ChangeResponse, "Let a worker go", "changed"))
    async def terminate(worker_id: WorkerId, body: Termination) -> Response:
        """It finishes what it has at hand first; with `force` it is ended at once, and its tasks go to others."""
        await _living(store, worker_id)
        if body.force:
            count = int(await store.terminate_worker(worker_id, body.reason))
        else:
            count = await store.set_terminating([worker_id], body.reason)
        live.poke()
        return _changed(ChangeResponse(count))


def _fleets(router: APIRouter, shown: DashboardContext) -> None:
    store, live = shown.store, shown.live

    @router.post("/fleets/{fleet}/pause", **documented(ChangeResponse, "Pause a fleet", "changed"))
    async def pause(fleet: FleetName) -> Response:
        """Its workers finish what they have and claim nothing; nobody is hired."""
        await _known(store, fleet)
        count = await store.pause_fleet(fleet, True)
        live.poke()
        return _changed(ChangeResponse(count))

    @router.post("/fleets/{fleet}/resume", **documented(ChangeResponse, "Let a fleet go on", "changed"))
    async def resume(fleet: FleetName) -> Response:
        await _known(store, fleet)
        count = await store.pause_fleet(fleet, False)
        live.poke()
        return _changed(ChangeResponse(count))

    @router.post("/fleets/{fleet}/restart", **documented(ChangeResponse, "Replace a fleet's workers", "changed"))
    async def restart(fleet: FleetName, body: Which) -> Response:
        """Say that what was broken is mended: restarts are forgotten, failed slots are free, a hold for failures ends.

        Every worker finishes and leaves; the next cycles hire anew. Of a fleet on hold with OTHER_ACCOUNT the machines
        that its key does not list are given up: they may still be charged."""
        await _known(store, fleet)
        count = await restart_fleet(store, fleet, body.slot)
        live.poke()
        return _changed(ChangeResponse(count))

    @router.post("/fleets/{fleet}/spawn", **documented(RequestResponse, "Hire workers now", "requested"))
    async def spawn(fleet: FleetName, body: ScalingDecision) -> Response:
        """Whatever the policy thinks, but never more than the fleet has room for. They leave again when idle."""
        known = await _known(store, fleet)
        requested = await store.request_workers(fleet, body.count)
        live.poke()
        granted = max(0, requested - known.requested_workers)
        return _requested(RequestResponse(fleet, body.count, granted, requested, known.max_workers))


def _everything(router: APIRouter, shown: DashboardContext) -> None:
    store, live = shown.store, shown.live

    @router.post("/pause", **documented(ChangeResponse, "Pause all fleets", "changed"))
    async def pause() -> Response:
        count = sum([await store.pause_fleet(fleet.name, True) for fleet in await store.fleets()])
        live.poke()
        return _changed(ChangeResponse(count))

    @router.post("/resume", **documented(ChangeResponse, "Let all fleets go on", "changed"))
    async def resume() -> Response:
        count = sum([await store.pause_fleet(fleet.name, False) for fleet in await store.fleets()])
        live.poke()
        return _changed(ChangeResponse(count))

    @router.post("/restart", **documented(ChangeResponse, "Replace all workers", "changed"))
    async def restart() -> Response:
        count = await restart_fleets(store, (fleet.name for fleet in await store.fleets()))
        live.poke()
        return _changed(ChangeResponse(count))


async def restart_fleets(store: DashboardStore, names: Iterable[str]) -> int:
    return sum([await restart_fleet(store, name) for name in names])


async def restart_fleet(store: DashboardStore, fleet: str, slot: int | None = None) -> int:
    """How many workers were asked to leave."""
    await store.restart_slots(fleet, slot)
    hired = [
        worker.id
        for worker in await store.workers()
        if worker.fleet == fleet and worker.slot is not None and slot in (None, worker.slot)
    ]
    return await store.set_terminating(hired, "restarted by hand")


async def _living(store: DashboardStore, worker_id: str) -> Worker:
    worker = await store.worker(worker_id)
    if worker is None:
        raise not_found(f"there is no worker {worker_id}: it never was, or its retention is over.")
    if worker.status not in LIVE:
        raise ApiError(409, http.CONFLICT, f"worker {worker_id} is {worker.status}: nothing can be done with it.")
    return worker


async def _known(store: DashboardStore, name: str) -> Fleet:
    for fleet in await store.fleets():
        if fleet.name == name:
            return fleet
    raise not_found(f"there is no fleet {name}: {API}/fleets lists them.")
