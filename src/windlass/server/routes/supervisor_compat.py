"""The two routes that programs of a process supervisor call: its paths, its shapes, its words."""

from fastapi import APIRouter, Depends, Response

from windlass.server.auth import operator, viewer
from windlass.server.context import DashboardContext, answering
from windlass.server.openapi import documented
from windlass.server.routes.operations import restart_fleets
from windlass.server.schemas import Component, RestartResponse

_components = answering(list[Component])
_restarted = answering(RestartResponse)


def compatible_routes(shown: DashboardContext) -> APIRouter:
    router = APIRouter(prefix="/api/web/worker")
    store = shown.store

    @router.get("/status", dependencies=[Depends(viewer)], **documented(list[Component], "Workers", "components"))
    async def status() -> Response:
        """Each slot and worker: starting, healthy, stopping, crashed or failed. Times are Unix seconds."""
        return _components([Component(**row) for row in await store.component_health()])

    @router.post(
        "/restart", dependencies=[Depends(operator)], **documented(RestartResponse, "Restart all", "restarted")
    )
    async def restart() -> Response:
        """Failed slots are free again, and every worker is replaced, gracefully."""
        count = await restart_fleets(store, [fleet.name for fleet in await store.fleets()])
        shown.live.poke()
        who = "1 worker" if count == 1 else f"{count} workers"
        return _restarted(RestartResponse("success", f"{who} asked to leave; the next cycle hires anew."))

    return router
