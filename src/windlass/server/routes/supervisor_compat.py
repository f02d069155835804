"""Two routes with the paths and JSON of the process supervisor that Windlass replaces."""

from dataclasses import dataclass

from fastapi import APIRouter, Response

from windlass import operations
from windlass.server.context import AppContext
from windlass.server.errors import raise_if_refused
from windlass.server.json_api import OPERATOR, VIEWER, json_response
from windlass.server.openapi import documented


@dataclass(frozen=True, slots=True)
class Component:
    """A slot or worker, in the words of the supervisor."""

    component: str
    status: str
    # Why it failed, or why it has no worker.
    error_message: str | None
    pid: int | None
    current_job: int | None
    restart_count: int
    last_seen: int


@dataclass(frozen=True, slots=True)
class RestartResponse:
    status: str
    message: str


_components = json_response(list[Component])
_restarted = json_response(RestartResponse)


def routes(context: AppContext) -> APIRouter:
    router = APIRouter(prefix="/api/web/worker")

    @router.get("/status", dependencies=[VIEWER], **documented(list[Component], "List components"))
    async def status() -> Response:
        """Every slot and worker: starting, healthy, stopping, crashed or failed. Times are Unix seconds.

        A slot below min_workers that has no worker is listed too, and one of a fleet that is held, or has tasks and no
        worker: "all healthy" is never true while one is missing.
        """
        return _components([Component(**row) for row in await context.store.component_health()])

    @router.post("/restart", dependencies=[OPERATOR], **documented(RestartResponse, "Restart all workers"))
    async def restart() -> Response:
        """The same operation as `POST /api/v1/restart`."""
        result = await operations.restart_all_fleets(context.store)
        raise_if_refused(result)
        context.overview_feed.mark_changed()
        return _restarted(RestartResponse("success", f"{result.message}."))

    return router
