"""The worker protocol: ports/transport.py over HTTP, with the same semantics.

A worker's token says which worker it is and which queues it serves. Everything else is decided by the store, so workers
over HTTP and over the database follow the same rules.
"""

from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from windlass.model.auth import WORKER_PREFIX, Activation, JoinCaller, TokenCaller, WorkerCaller, hash_of, is_token
from windlass.model.errors import BadInput
from windlass.model.redaction import mask_known
from windlass.model.task import MAX_ERROR_CHARACTERS, Claim, ClaimResult, TaskStatus, is_name
from windlass.model.work_order import WorkOrder, work_order
from windlass.model.worker import DEFAULT_FLEET, HeartbeatReply, RecoveredTasks, Registration, WorkerKind, WorkerStatus
from windlass.operations import check_queue_scope
from windlass.ports import http
from windlass.server.auth import joining_caller, self_registering_caller, worker_caller
from windlass.server.context import WorkerApiContext
from windlass.server.errors import forbidden, gone, unauthorized, unavailable
from windlass.server.json_api import json_response
from windlass.server.openapi import documented
from windlass.server.worker_calls import check_queue_count, check_queues

HANDLER_NOT_FOUND = "HANDLER_NOT_FOUND"
BOOT_FAILED = "BOOT_FAILED"
Worker = Annotated[WorkerCaller, Depends(worker_caller)]
JoiningMachine = Annotated[JoinCaller, Depends(joining_caller)]
WorkerToken = Annotated[TokenCaller, Depends(self_registering_caller)]

_order = json_response(WorkOrder, is_masked=False)
_worker_status = json_response(WorkerStatus)
_self_registered = json_response(http.SelfRegisterReply)
_recovered = json_response(list[RecoveredTasks])
_task_status = json_response(TaskStatus | None)
_is_released = json_response(bool)
_run_after = json_response(datetime | None)
_cursor = json_response(str, is_masked=False)


def worker_protocol_routes(context: WorkerApiContext) -> APIRouter:
    router = APIRouter()
    _add_joining_routes(router, context)
    _add_working_routes(router, context)
    _document(router, http.CLAIM, http.ClaimCall, list[Claim], "Claim tasks")
    _document(router, http.FINISH, http.FinishCall, ClaimResult, "Complete tasks and claim more")
    _document(router, http.LOGS, http.LogsCall, None, "Store output")
    _document(router, http.HEARTBEAT, http.HeartbeatCall, HeartbeatReply, "Send a heartbeat")
    return router


def _document(router: APIRouter, path: str, call: Any, reply: Any, summary: str) -> None:
    """A route for the API description only: server/worker_calls.py answers its requests."""

    async def answered_elsewhere(call: Any) -> Response:
        raise NotImplementedError(path)

    answered_elsewhere.__annotations__["call"] = call
    name = path.rpartition("/")[2]
    router.add_api_route(
        path,
        answered_elsewhere,
        methods=["POST"],
        name=name,
        dependencies=[Depends(worker_caller)],
        **documented(reply, summary),
    )


def _add_joining_routes(router: APIRouter, context: WorkerApiContext) -> None:
    """How a process becomes a worker: activation of spawned machines, self-registration of others."""
    store = context.auth_store

    async def order_for(caller: WorkerCaller | JoinCaller) -> Response:
        fleet = context.control.fleet_config(caller.fleet)
        if fleet is None:
            raise unavailable(f"this control plane does not run fleet {caller.fleet} of worker {caller.worker_id}")
        return _order(
            work_order(
                caller.worker_id,
                caller.fleet,
                caller.queues,
                fleet,
                context.worker_defaults,
                max_payload_bytes=context.max_payload_bytes,
                version=context.version,
                logs=context.logs,
                ray_head=await context.control.ray_head() if fleet.engine == "ray" else None,
            )
        )

    @router.post(http.ACTIVATE, **documented(WorkOrder, "Activate a worker"))
    async def activate(worker_id: str, call: http.ActivateCall, caller: JoiningMachine, request: Request) -> Response:
        """Exchange the join token for the worker token in the body. Repeating it with the same two tokens is safe."""
        if caller.worker_id != worker_id:
            raise forbidden(f"this join token does not belong to worker {worker_id}")
        _check_token(call.token)
        match await store.activate(worker_id, request.state.token_hash, hash_of(call.token)):
            case Activation.ACTIVATED:
                return await order_for(caller)
            case Activation.USED:
                raise gone(f"the join token of worker {worker_id} was already used")
            case Activation.EXPIRED:
                raise gone(f"the join token of worker {worker_id} has expired: the machine took too long to start")
            case Activation.ENDED | Activation.UNKNOWN:
                raise gone(f"worker {worker_id} has terminated")

    @router.post(http.BOOT_STEP, status_code=204)
    async def report_boot_step(worker_id: str, call: http.BootStepCall, caller: JoiningMachine) -> Response:
        """A machine that has not joined yet reports what its boot does. Each report proves progress. With `has_failed`
        its worker fails with code BOOT_FAILED."""
        if caller.worker_id != worker_id:
            raise forbidden(f"this join token does not belong to worker {worker_id}")
        # The control plane knows secrets that the machine does not: those of a private package index, for example.
        await store.report_boot_step(worker_id, call.step, mask_known(call.output))
        if call.has_failed:
            await store.cannot_start(worker_id, BOOT_FAILED, f"Its boot {call.step}")
        return Response(status_code=204)

    @router.post(http.SELF_REGISTER, **documented(http.SelfRegisterReply, "Register an unmanaged worker"))
    async def self_register(call: http.SelfRegisterCall, caller: WorkerToken, request: Request) -> Response:
        """Register a worker outside of any fleet, with the worker token in the body. Repeating it is safe."""
        _check_token(call.token)
        if not is_name(call.registration.worker_id):
            raise BadInput("a worker name consists of letters, digits and _ . : -, at most 63 characters.")
        check_queue_count(call.registration.queues)
        for queue in call.registration.queues:
            check_queue_scope(caller.scope, queue)
        registration = replace(call.registration, fleet=DEFAULT_FLEET, kind=WorkerKind.WORKER)
        status = await store.self_register(request.state.token_hash, hash_of(call.token), registration)
        if status is None:
            raise unauthorized("this token was revoked")
        return _self_registered(http.SelfRegisterReply(status, context.max_payload_bytes))

    @router.post(http.CANNOT_START, status_code=204)
    async def cannot_start(call: http.ReasonCall, worker: Worker) -> Response:
        """The worker's handler cannot be imported: it fails with code HANDLER_NOT_FOUND and the given reason."""
        await store.cannot_start(worker.worker_id, HANDLER_NOT_FOUND, call.reason[:MAX_ERROR_CHARACTERS])
        return Response(status_code=204)

    @router.get(http.ORDER, **documented(WorkOrder, "Get the work order"))
    async def order(worker: Worker) -> Response:
        """For a worker process that was restarted."""
        return await order_for(worker)


def _add_working_routes(router: APIRouter, context: WorkerApiContext) -> None:
    store = context.worker_store

    @router.post(http.REGISTER, **documented(WorkerStatus, "Register a worker"))
    async def register(registration: Registration, worker: Worker) -> Response:
        """The worker's id and fleet are those of its token."""
        check_queues(worker, registration.queues)
        registration = replace(registration, worker_id=worker.worker_id, fleet=worker.fleet)
        return _worker_status(await store.register(registration))

    @router.post(http.FAIL, **documented(TaskStatus | None, "Report a failed attempt"))
    async def fail(call: http.FailCall, worker: Worker) -> Response:
        status = await store.fail(
            worker.worker_id,
            call.task_id,
            call.token,
            call.error,
            code=call.code,
            retry=call.retry,
            jitter=call.jitter,
        )
        return _task_status(status)

    @router.post(http.RELEASE, **documented(bool, "Release a task"))
    async def release(call: http.ReleaseCall, worker: Worker) -> Response:
        is_released = await store.release(worker.worker_id, call.task_id, call.token, call.reason, call.delay_s)
        return _is_released(is_released)

    @router.post(http.DEREGISTER, status_code=204)
    async def deregister(call: http.ReasonCall, worker: Worker) -> Response:
        await store.deregister(worker.worker_id, call.reason)
        return Response(status_code=204)

    @router.post(http.RUN_MAINTENANCE, **documented(list[RecoveredTasks], "Run maintenance"))
    async def run_maintenance(worker: Worker) -> Response:
        """Recover tasks of lost workers, and apply retention for a bounded time."""
        return _recovered(await store.run_maintenance(worker.worker_id))

    @router.post(http.NEXT_RUN_AFTER, **documented(datetime | None, "Get the next due time"))
    async def next_run_after(call: http.NextRunAfterCall, worker: Worker) -> Response:
        check_queues(worker, call.queues)
        return _run_after(await store.next_run_after(call.queues))

    @router.post(http.WAIT, **documented(str, "Wait for work"))
    async def wait(call: http.WaitCall, worker: Worker) -> Response:
        """Returns a cursor for the next wait, as soon as there may be work, or at the timeout."""
        check_queues(worker, call.queues)
        timeout_s = min(max(call.timeout_s, 0.0), http.MAX_WAIT_S)
        return _cursor(await context.long_poll_hub.wait(call.queues, timeout_s, call.cursor))


def _check_token(token: str) -> None:
    if not is_token(token, WORKER_PREFIX):
        raise BadInput(f"a worker token is {WORKER_PREFIX} followed by 64 random hexadecimal digits.")
