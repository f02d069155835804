"""`/metrics`: what Prometheus reads."""

from fastapi import APIRouter, Depends, Response

from windlass.server.auth import viewer
from windlass.server.context import DashboardContext
from windlass.server.openapi import documented

TEXT = "text/plain; version=0.0.4; charset=utf-8"


def measuring_routes(shown: DashboardContext) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/metrics", dependencies=[Depends(viewer)], **documented(str, "Metrics", "metrics", media_type="text/plain")
    )
    async def metrics() -> Response:
        """In the text format of Prometheus."""
        return Response(await shown.metrics(), media_type=TEXT)

    return router
