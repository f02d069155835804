"""What the dashboard's buttons do. Each asks before it acts, and says in a sentence what became of it.

A form is posted with its session's CSRF token. Without `is_confirmed` the answer is a page that asks; with it the thing
is done and the browser sent back to where it was. The page's script asks in a dialog instead and takes the sentence as
JSON.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from windlass.dashboard.filters import counted
from windlass.dashboard.pages import confirm_page
from windlass.model.auth import Role
from windlass.model.task import MAX_TASK_ID, check_queue_name
from windlass.model.worker import Worker
from windlass.server.auth import check_csrf, check_role
from windlass.server.context import AppContext, DashboardContext
from windlass.server.errors import not_found
from windlass.server.routes.operations import restart_fleet
from windlass.server.routes.pages import SAID_COOKIE, html, setting_of
from windlass.server.session import form_of

# Dead letters put back by one click; whoever has more clicks again.
RETRY_ROUNDS = 10
RETRY_AT_ONCE = 1_000
BY_HAND = "ended by hand"

TaskId = Annotated[int, Path(ge=1, le=MAX_TASK_ID)]
Doing = Callable[[], Awaitable[str]]


def act_routes(face: AppContext, shown: DashboardContext) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    _add_workers(router, face, shown)
    _add_fleets(router, face, shown)
    _add_tasks(router, face, shown)
    return router


async def _carry_out(face: AppContext, shown: DashboardContext, request: Request, do: Doing) -> Response:
    fields = await form_of(request)
    check_role(request, Role.OPERATOR)
    check_csrf(request, fields.get("csrf"))
    back = _way_back(fields.get("back", ""))
    if fields.get("is_confirmed") != "yes":
        setting = setting_of(face, request, await shown.store.now(), is_live=False)
        asked = {name: fields.get(name, "") for name in ("ask", "words", "verb")}
        page = confirm_page(setting, path=request.url.path, back_to=back, fields={**fields, "back": back}, **asked)
        return html(request, page)
    sentence = await do()
    shown.live.poke()
    if "application/json" in request.headers.get("accept", ""):
        return JSONResponse({"sentence": sentence})
    answer = RedirectResponse(back, 303)
    # A cookie holds ASCII only, and names of workers and fleets come from the address.
    answer.set_cookie(SAID_COOKIE, quote(sentence), max_age=30, httponly=True, samesite="strict")
    return answer


def _way_back(back: str) -> str:
    """A page of ours, or the first one: no address may lead elsewhere."""
    return back if back.startswith("/") and not back.startswith(("//", "/\\")) and back.isprintable() else "/"


# -------------------------------------------------------------------------------------------------------------- workers


def _add_workers(router: APIRouter, face: AppContext, shown: DashboardContext) -> None:
    store = shown.store

    async def living(worker_id: str) -> Worker:
        worker = await store.worker(worker_id)
        if worker is None or worker.terminated_at is not None:
            raise not_found(f"worker {worker_id} has ended: nothing can be done with it.")
        return worker

    @router.post("/workers/{worker_id}/pause")
    async def pause(request: Request, worker_id: str) -> Response:
        async def do() -> str:
            await living(worker_id)
            changed = await store.set_paused([worker_id], True)
            return f"{worker_id} {'is' if changed else 'was already'} paused."

        return await _carry_out(face, shown, request, do)

    @router.post("/workers/{worker_id}/resume")
    async def resume(request: Request, worker_id: str) -> Response:
        async def do() -> str:
            await living(worker_id)
            changed = await store.set_paused([worker_id], False)
            return f"{worker_id} goes on." if changed else f"{worker_id} was not paused."

        return await _carry_out(face, shown, request, do)

    @router.post("/workers/{worker_id}/restart")
    async def restart(request: Request, worker_id: str) -> Response:
        async def do() -> str:
            worker = await living(worker_id)
            if worker.slot is not None:
                await store.restart_slots(worker.fleet, worker.slot)
            await store.set_terminating([worker_id], "restarted by hand")
            return f"{worker_id} finishes what it has and leaves; the next cycle hires anew."

        return await _carry_out(face, shown, request, do)

    @router.post("/workers/{worker_id}/terminate")
    async def terminate(request: Request, worker_id: str) -> Response:
        async def do() -> str:
            await living(worker_id)
            changed = await store.set_terminating([worker_id], BY_HAND)
            return f"{worker_id} finishes what it has and leaves." if changed else f"{worker_id} is leaving already."

        return await _carry_out(face, shown, request, do)

    @router.post("/workers/{worker_id}/end")
    async def end(request: Request, worker_id: str) -> Response:
        async def do() -> str:
            await living(worker_id)
            is_ended = await store.terminate_worker(worker_id, BY_HAND)
            return f"{worker_id} is ended; its tasks go to others." if is_ended else f"{worker_id} had ended already."

        return await _carry_out(face, shown, request, do)


# --------------------------------------------------------------------------------------------------------------- fleets


def _add_fleets(router: APIRouter, face: AppContext, shown: DashboardContext) -> None:
    store = shown.store

    @router.post("/fleets/{fleet}/pause")
    async def pause(request: Request, fleet: str) -> Response:
        async def do() -> str:
            return f"Fleet {fleet} is paused, with {counted(await store.pause_fleet(fleet, True), 'worker')}."

        return await _carry_out(face, shown, request, do)

    @router.post("/fleets/{fleet}/resume")
    async def resume(request: Request, fleet: str) -> Response:
        async def do() -> str:
            return f"Fleet {fleet} goes on, with {counted(await store.pause_fleet(fleet, False), 'worker')}."

        return await _carry_out(face, shown, request, do)

    @router.post("/fleets/{fleet}/spawn")
    async def spawn(request: Request, fleet: str) -> Response:
        async def do() -> str:
            known = {one.name: one for one in await store.fleets()}.get(fleet)
            if known is None:
                raise not_found(f"there is no fleet {fleet}.")
            if await store.request_workers(fleet, 1) <= known.requested_workers:
                return f"Fleet {fleet} has no room for another: its maximum is {known.max_workers}."
            return f"One more is asked for in fleet {fleet}; the next cycle hires it."

        return await _carry_out(face, shown, request, do)

    @router.post("/fleets/{fleet}/restart")
    async def restart(request: Request, fleet: str) -> Response:
        async def do() -> str:
            leaving = await restart_fleet(store, fleet)
            return f"Fleet {fleet} is restarted: {counted(leaving, 'worker')} finish and leave, others are hired."

        return await _carry_out(face, shown, request, do)


# ---------------------------------------------------------------------------------------------------------------- tasks


def _add_tasks(router: APIRouter, face: AppContext, shown: DashboardContext) -> None:
    store = shown.store

    async def check_known(task_id: int) -> None:
        if await store.task(task_id) is None:
            raise not_found(f"there is no task {task_id}: it was never enqueued, or its retention is over.")

    @router.post("/tasks/{task_id}/retry")
    async def retry(request: Request, task_id: TaskId) -> Response:
        async def do() -> str:
            await check_known(task_id)
            is_done = await store.retry_task(task_id)
            return f"Task {task_id} is back in its queue." if is_done else f"Task {task_id} is nothing to retry now."

        return await _carry_out(face, shown, request, do)

    @router.post("/tasks/{task_id}/cancel")
    async def cancel(request: Request, task_id: TaskId) -> Response:
        async def do() -> str:
            await check_known(task_id)
            is_done = await store.cancel_task(task_id, "cancelled by hand")
            return f"Task {task_id} is cancelled." if is_done else f"Task {task_id} had finished already."

        return await _carry_out(face, shown, request, do)

    @router.post("/queues/{queue}/retry")
    async def retry_all(request: Request, queue: str) -> Response:
        async def do() -> str:
            check_queue_name(queue)
            until, failed_from, retried = await store.now(), None, 0
            for _ in range(RETRY_ROUNDS):
                was_from = failed_from
                # At the end once more from the beginning, for those that somebody had locked.
                ids, failed_from = await store.retry_failed(queue, until, RETRY_AT_ONCE, failed_from=was_from)
                retried += len(ids)
                if not ids and was_from is None:
                    break
            return f"{counted(retried, 'dead letter')} of {queue} are back in the queue."

        return await _carry_out(face, shown, request, do)
