"""What workers call: ports/transport.py over HTTP, with the same meaning.

A worker acts in its own name, which its token says, and for the queues it was hired or enlisted for. Everything else is
the store's to judge, so that a worker over HTTP and one over the database live by the same rules.
"""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from windlass.model.auth import WORKER_PREFIX, Activation, JoinCaller, TokenCaller, WorkerCaller, hash_of, is_token
from windlass.model.errors import BadInput
from windlass.model.task import MAX_ERROR_CHARACTERS, ClaimResult, is_name
from windlass.model.work_order import WorkOrder, work_order
from windlass.model.worker import HeartbeatReply, Registration
from windlass.ports import http
from windlass.server.auth import enlisting_caller, joining_caller, worker_caller
from windlass.server.context import AppContext, answering
from windlass.server.errors import forbidden, gone, unauthorized, unavailable
from windlass.server.openapi import documented

HANDLER_NOT_FOUND = "HANDLER_NOT_FOUND"
Worker = Annotated[WorkerCaller, Depends(worker_caller)]
Joining = Annotated[JoinCaller, Depends(joining_caller)]
Enlisting = Annotated[TokenCaller, Depends(enlisting_caller)]

_order = answering(WorkOrder)
_registered = answering(http.Registered)
_enlisted = answering(http.SelfRegisteredReply)
_recovered = answering(http.Recovered)
_claimed = answering(http.Claimed)
_turn = answering(ClaimResult)
_failed = answering(http.Failed)
_released = answering(http.Released)
_pulse = answering(HeartbeatReply)
_next_run_after = answering(http.NextRunAfter)
_waited = answering(http.Waited)


def joining_routes(face: AppContext) -> APIRouter:
    """How one becomes a worker: activation of the hired, enlistment of others, and the order of the hired."""
    router = APIRouter()

    def order_for(caller: WorkerCaller | JoinCaller) -> Response:
        fleet = face.fleet(caller.fleet)
        if fleet is None:
            raise unavailable(f"fleet {caller.fleet} of worker {caller.worker_id} is not run by this control plane.")
        return _order(
            work_order(
                caller.worker_id,
                caller.fleet,
                caller.queues,
                fleet,
                face.worker_defaults,
                max_payload_bytes=face.max_payload_bytes,
                version=face.version,
                ray_head=face.ray_head(),
            )
        )

    @router.post(http.ACTIVATE, **documented(WorkOrder, "Join", "order"))
    async def activate(worker_id: str, call: http.ActivateCall, caller: Joining, request: Request) -> Response:
        """Exchange the join token for the worker token in the body. Asking again with the same two is safe."""
        if caller.worker_id != worker_id:
            raise forbidden(f"this join token is not worker {worker_id}'s.")
        _check_token(call.token)
        match await face.access.activate(worker_id, request.state.token_hash, hash_of(call.token)):
            case Activation.ACTIVATED:
                return order_for(caller)
            case Activation.USED:
                raise gone(f"the join token of worker {worker_id} was used already.")
            case Activation.EXPIRED:
                raise gone(f"the join token of worker {worker_id} has expired: it took too long to start.")
            case Activation.ENDED | Activation.UNKNOWN:
                raise gone(f"worker {worker_id} has ended.")

    @router.post(http.SELF_REGISTER, **documented(http.SelfRegisteredReply, "Enlist", "enlisted"))
    async def self_register(call: http.SelfRegisterCall, _caller: Enlisting, request: Request) -> Response:
        """Register a worker that nobody hired, with the worker token in the body. Asking again is safe."""
        _check_token(call.token)
        if not is_name(call.worker_id):
            raise BadInput("a worker's name is made of letters, digits and _ . : -, at most 63 of them.")
        registration = Registration(
            worker_id=call.worker_id,
            queues=call.queues,
            concurrency=call.concurrency,
            lease_s=call.lease_s,
            host=call.host,
            pid=call.pid,
            version=call.version,
            start_id=call.start_id,
        )
        status = await face.access.self_register(request.state.token_hash, hash_of(call.token), registration)
        if status is None:
            raise unauthorized("this token was revoked.")
        return _enlisted(http.SelfRegisteredReply(status, face.max_payload_bytes))

    @router.post(http.CANNOT_START, status_code=204)
    async def cannot_start(call: http.CannotStartCall, worker: Worker) -> Response:
        """Its handler cannot be imported there: the worker fails as HANDLER_NOT_FOUND, for the reason in the body."""
        await face.access.cannot_start(worker.worker_id, HANDLER_NOT_FOUND, call.reason[:MAX_ERROR_CHARACTERS])
        return Response(status_code=204)

    @router.get(http.ORDER, **documented(WorkOrder, "The work order", "order"))
    async def order(worker: Worker) -> Response:
        """The order again: for a worker that was restarted."""
        return order_for(worker)

    return router


def worker_routes(face: AppContext) -> APIRouter:
    router = APIRouter()
    store = face.store

    @router.post(http.REGISTER, **documented(http.Registered, "Announce a worker", "registered"))
    async def register(call: http.RegisterCall, worker: Worker) -> Response:
        _check_queues(worker, call.queues)
        registration = Registration(
            worker_id=worker.worker_id,
            queues=call.queues,
            # Whoever hired it knows where it belongs.
            fleet=worker.fleet,
            concurrency=call.concurrency,
            lease_s=call.lease_s,
            host=call.host,
            pid=call.pid,
            version=call.version,
            kind=call.kind,
            start_id=call.start_id,
        )
        return _registered(http.Registered(await store.register(registration)))

    @router.post(http.CLAIM, **documented(http.Claimed, "Claim tasks", "claimed"))
    async def claim(call: http.ClaimCall, worker: Worker) -> Response:
        _check_queues(worker, call.queues)
        claims = await store.claim(worker.worker_id, call.queues, min(call.limit, http.MAX_CLAIMS))
        return _claimed(http.Claimed(claims))

    @router.post(http.FINISH, **documented(ClaimResult, "Finish, and claim more", "turn"))
    async def finish(call: http.FinishCall, worker: Worker) -> Response:
        """Complete what is done and claim more, in one call."""
        _check_queues(worker, call.queues)
        _check_results(call, face.max_payload_bytes)
        limit = min(call.limit, http.MAX_CLAIMS)
        return _turn(await store.finish_and_claim(worker.worker_id, call.finished, call.queues, limit))

    @router.post(http.FAIL, **documented(http.Failed, "An attempt failed", "failed"))
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
        return _failed(http.Failed(status))

    @router.post(http.RELEASE, **documented(http.Released, "Give a task back", "released"))
    async def release(call: http.ReleaseCall, worker: Worker) -> Response:
        is_released = await store.release(worker.worker_id, call.task_id, call.token, call.reason, call.delay_s)
        return _released(http.Released(is_released))

    @router.post(http.HEARTBEAT, **documented(HeartbeatReply, "A heartbeat", "pulse"))
    async def heartbeat(call: http.HeartbeatCall, worker: Worker) -> Response:
        return _pulse(await store.heartbeat(worker.worker_id, call.claims, call.vitals))

    @router.post(http.DEREGISTER, status_code=204)
    async def leave(call: http.DeregisterCall, worker: Worker) -> Response:
        await store.deregister(worker.worker_id, call.reason)
        return Response(status_code=204)

    @router.post(http.RUN_MAINTENANCE, **documented(http.Recovered, "Look after others", "recovered"))
    async def run_maintenance(worker: Worker) -> Response:
        """What workers do for the queue: recover the tasks of lost ones, and apply retention for a bounded time."""
        return _recovered(http.Recovered(await store.run_maintenance(worker.worker_id)))

    @router.post(http.NEXT_RUN_AFTER, **documented(http.NextRunAfter, "When the next task is due", "next_run_after"))
    async def next_run_after(call: http.NextRunAfterCall, worker: Worker) -> Response:
        _check_queues(worker, call.queues)
        return _next_run_after(http.NextRunAfter(await store.next_run_after(call.queues)))

    @router.post(http.WAIT, **documented(http.Waited, "Wait for work", "waited"))
    async def wait(call: http.WaitCall, worker: Worker) -> Response:
        """Answered when there may be work, or when the time is up."""
        _check_queues(worker, call.queues)
        timeout_s = min(max(call.timeout_s, 0.0), http.MAX_WAIT_S)
        return _waited(http.Waited(await face.long_poll_hub.wait(call.queues, timeout_s, call.cursor)))

    return router


def _check_token(token: str) -> None:
    if not is_token(token, WORKER_PREFIX):
        raise BadInput(f"a worker token is {WORKER_PREFIX} and 64 hexadecimal digits of chance.")


def _check_queues(worker: WorkerCaller, queues: Sequence[str]) -> None:
    strange = [queue for queue in queues if queue not in worker.queues]
    if strange:
        serves = ", ".join(worker.queues) or "none"
        raise forbidden(f"worker {worker.worker_id} serves {serves}, not {', '.join(strange[:5])}.")


def _check_results(call: http.FinishCall, max_bytes: int) -> None:
    for done in call.finished:
        # A character has at least one byte; only what comes close is worth encoding.
        if done.result is not None and 4 * len(done.result) > max_bytes:
            size_bytes = len(done.result.encode())
            if size_bytes > max_bytes:
                what = f"the result of task {done.task_id} has {size_bytes:,} bytes"
                raise BadInput(f"{what} and at most {max_bytes:,} are accepted.")
