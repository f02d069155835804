"""Health, readiness and metrics, a cycle on request, and the wheel of the running program."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response

from windlass.model.auth import JoinCaller, TokenCaller, WorkerCaller
from windlass.model.errors import DatabaseUnavailable
from windlass.server.auth import machine_caller, operator
from windlass.server.context import AppContext, WorkerApiContext
from windlass.server.errors import not_found, unavailable
from windlass.server.json_api import OPEN, VIEWER, json_response
from windlass.server.openapi import documented
from windlass.server.wheel import Wheel

# A readiness probe is answered within this time, whatever the database does.
PROBE_TIMEOUT_S = 2.0
# Probes need no token, so they must be cheap: the database is asked at most once in this time.
PROBE_TTL_S = 1.0
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"

Machine = Annotated[WorkerCaller | JoinCaller, Depends(machine_caller)]
Operator = Annotated[TokenCaller, Depends(operator)]


@dataclass(frozen=True, slots=True)
class Health:
    status: str
    version: str


@dataclass(frozen=True, slots=True)
class FleetReadiness:
    """`last_cycle_age_s` None: no cycle yet."""

    is_running: bool
    last_cycle_age_s: float | None


@dataclass(frozen=True, slots=True)
class Readiness:
    """`has_control_loop`: the cycles of all fleets run in time. Without them, workers still claim and finish tasks."""

    is_ready: bool
    has_database: bool
    has_leader: bool
    has_control_loop: bool
    fleets: Mapping[str, FleetReadiness]


@dataclass(frozen=True, slots=True)
class WheelResponse:
    filename: str
    version: str
    sha256: str


_health = json_response(Health)
_readiness = json_response(Readiness)
_wheel = json_response(WheelResponse)
_summaries = json_response(list[dict[str, Any]])
_UNREADY = Readiness(is_ready=False, has_database=False, has_leader=False, has_control_loop=False, fleets={})
_NOT_READY = asdict(_UNREADY)


def health_routes(context: WorkerApiContext) -> APIRouter:
    router = APIRouter()
    probe = _ReadinessProbe(context)

    # Some probes send HEAD.
    @router.head("/healthz", dependencies=[OPEN], include_in_schema=False)
    @router.get("/healthz", dependencies=[OPEN], **documented(Health, "Check liveness"))
    async def healthz() -> Response:
        """The process answers."""
        return _health(Health("ok", context.version))

    @router.head("/readyz", dependencies=[OPEN], include_in_schema=False)
    @router.get(
        "/readyz", dependencies=[OPEN], **documented(Readiness, "Check readiness", also=503, also_example=_NOT_READY)
    )
    async def readyz() -> Response:
        """The database answers, so this server can do its work. The body also reports the control loop."""
        readiness = await probe.readiness()
        response = _readiness(readiness)
        response.status_code = 200 if readiness.is_ready else 503
        return response

    @router.post("/internal/cycle", **documented(list[dict[str, Any]], "Run a cycle"))
    async def cycle(_operator: Operator) -> Response:
        """Run one cycle of every fleet and return the summaries, for pg_cron and similar schedulers."""
        try:
            return _summaries(await context.control.run_cycle())
        except TimeoutError:
            raise unavailable("the cycles did not finish in time: see the log of `windlass up`") from None

    @router.get("/internal/wheel", **documented(WheelResponse, "Get the wheel's name"))
    async def wheel(_machine: Machine) -> Response:
        """Name and hash of the wheel of the running program."""
        found = _find_wheel(context)
        return _wheel(WheelResponse(found.filename, found.version, found.sha256))

    @router.get(
        "/internal/wheel/{filename}",
        **documented(bytes, "Download the wheel", media_type="application/zip", example=""),
    )
    async def wheel_file(filename: str, _machine: Machine) -> Response:
        found = _find_wheel(context)
        if filename != found.filename:
            raise not_found(f"the wheel of this program is {found.filename}")
        return Response(found.content, media_type="application/zip")

    return router


def metrics_routes(context: AppContext) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/metrics",
        dependencies=[VIEWER],
        **documented(
            str, "Get metrics", media_type="text/plain", example='windlass_tasks_queued{queue="renders"} 41.0\n'
        ),
    )
    async def metrics() -> Response:
        """In the text format of Prometheus."""
        return Response(await context.metrics.render(), media_type=PROMETHEUS_TEXT)

    return router


class _ReadinessProbe:
    def __init__(self, context: WorkerApiContext) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._readiness = _UNREADY
        self._cached_until = float("-inf")

    async def readiness(self) -> Readiness:
        async with self._lock:  # callers that waited here use the answer of the first
            if time.monotonic() >= self._cached_until:
                try:
                    async with asyncio.timeout(PROBE_TIMEOUT_S):
                        self._readiness = await self._load()
                except (DatabaseUnavailable, TimeoutError):
                    self._readiness = _UNREADY
                self._cached_until = time.monotonic() + PROBE_TTL_S
            return self._readiness

    async def _load(self) -> Readiness:
        await self._context.worker_store.now()
        control = await self._context.control.health()
        return Readiness(
            is_ready=True,
            has_database=True,
            has_leader=control.has_leader,
            has_control_loop=control.is_running,
            fleets={
                name: FleetReadiness(
                    loop.is_running, round(loop.last_cycle_age_s, 1) if loop.last_cycle_age_s is not None else None
                )
                for name, loop in control.fleets.items()
            },
        )


def _find_wheel(context: WorkerApiContext) -> Wheel:
    if context.wheel is None:
        raise not_found("the control plane was not installed as a package, so it has no wheel")
    return context.wheel
