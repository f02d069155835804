"""`/metrics`: what Prometheus reads."""

from fastapi import APIRouter, Depends, Response

from windlass.api.documented import documented
from windlass.api.face import Shown
from windlass.api.gate import viewer

TEXT = "text/plain; version=0.0.4; charset=utf-8"


def measuring_routes(shown: Shown) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/metrics", dependencies=[Depends(viewer)], **documented(str, "Metrics", "metrics", media_type="text/plain")
    )
    async def metrics() -> Response:
        """In the text format of Prometheus."""
        return Response(await shown.metrics(), media_type=TEXT)

    return router
