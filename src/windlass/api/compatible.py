"""The two routes that programs of a process supervisor call: its paths, its shapes, its words."""

from fastapi import APIRouter, Depends, Response

from windlass.api.documented import documented
from windlass.api.doing import restart_fleets
from windlass.api.face import Shown, answering
from windlass.api.gate import operator, viewer
from windlass.api.shapes import Component, Restarted

_components = answering(list[Component])
_restarted = answering(Restarted)


def compatible_routes(shown: Shown) -> APIRouter:
    router = APIRouter(prefix="/api/web/worker")
    store = shown.store

    @router.get("/status", dependencies=[Depends(viewer)], **documented(list[Component], "Workers", "components"))
    async def status() -> Response:
        """Each slot and worker: starting, healthy, stopping, crashed or failed. Times are Unix seconds."""
        return _components([Component(**row) for row in await store.component_health()])

    @router.post("/restart", dependencies=[Depends(operator)], **documented(Restarted, "Restart all", "restarted"))
    async def restart() -> Response:
        """Failed slots are free again, and every worker is replaced, gracefully."""
        count = await restart_fleets(store, [fleet.name for fleet in await store.fleets()])
        shown.live.poke()
        who = "1 worker" if count == 1 else f"{count} workers"
        return _restarted(Restarted("success", f"{who} asked to leave; the next cycle hires anew."))

    return router
