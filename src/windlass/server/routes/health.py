"""Health, the cycle on request, and the program itself as a wheel."""

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse

from windlass.model.auth import JoinCaller, TokenCaller, WorkerCaller
from windlass.model.errors import DatabaseUnavailable
from windlass.ports import http
from windlass.server.auth import machine_caller, operator
from windlass.server.context import AppContext
from windlass.server.errors import ApiError, unavailable
from windlass.server.openapi import documented
from windlass.server.schemas import Health, Readiness, WheelResponse
from windlass.server.wheel import Wheel

# A probe that asks is answered within this time, whatever the database does.
PROBE_TIMEOUT_S = 2.0
# However many probe, the database is asked once in this time, by one of them.
PROBED_S = 1.0

Machine = Annotated[WorkerCaller | JoinCaller, Depends(machine_caller)]
Operator = Annotated[TokenCaller, Depends(operator)]


def health_routes(face: AppContext) -> APIRouter:
    router = APIRouter()
    probe = _Probe(face)

    # Some probes ask for the head only.
    @router.head("/healthz", include_in_schema=False)
    @router.get("/healthz", **documented(Health, "Does it answer?", "health"))
    async def healthz() -> dict[str, str]:
        """This process answers."""
        return {"status": "ok", "version": face.version}

    @router.head("/readyz", include_in_schema=False)
    @router.get("/readyz", **documented(Readiness, "Is it ready?", "readiness", also=(503, "not_ready")))
    async def readyz() -> JSONResponse:
        """Its database answers and its control loop turns, leading or standing by."""
        has_database = await probe.has_database()
        pulses = face.pulses()
        fleets = {
            name: {"is_leader": pulse.is_leader, "last_cycle_age_s": round(pulse.last_cycle_age_s, 1)}
            for name, pulse in pulses.items()
        }
        is_ready = has_database and bool(pulses) and all(pulse.is_turning for pulse in pulses.values())
        found: dict[str, Any] = {
            "is_ready": is_ready,
            "has_database": has_database,
            "is_leader": any(pulse.is_leader for pulse in pulses.values()),
            "fleets": fleets,
        }
        return JSONResponse(found, 200 if is_ready else 503)

    return router


class _Probe:
    """Whether the database answers, for anybody who asks: nobody needs a token for it, so it must cost nothing."""

    def __init__(self, face: AppContext) -> None:
        self._face = face
        self._asking = asyncio.Lock()
        self._has_database = False
        self._known_until = float("-inf")

    async def has_database(self) -> bool:
        async with self._asking:  # whoever waited here takes the answer of the first
            if time.monotonic() >= self._known_until:
                self._has_database = await self._ask()
                self._known_until = time.monotonic() + PROBED_S
            return self._has_database

    async def _ask(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._face.ask_database()
        except (DatabaseUnavailable, TimeoutError):
            return False
        return True


def control_routes(face: AppContext) -> APIRouter:
    router = APIRouter()

    @router.post("/internal/cycle", **documented(list[dict[str, Any]], "Run a cycle now", "summaries"))
    async def cycle(_operator: Operator) -> list[dict[str, Any]]:
        """Run a cycle of every fleet now, and say what each did: for pg_cron and the like."""
        try:
            return await face.run_cycle()
        except TimeoutError:
            raise unavailable("no cycle of every fleet ended in time: look at the log of `windlass up`.") from None

    @router.get("/internal/wheel", **documented(WheelResponse, "The program itself", "wheel"))
    async def wheel(_machine: Machine) -> dict[str, str]:
        """Name and hash of the wheel of this very program."""
        found = _wheel(face)
        return {"filename": found.filename, "version": found.version, "sha256": found.sha256}

    @router.get(
        "/internal/wheel/{filename}",
        **documented(bytes, "The program's wheel", "wheel_file", media_type="application/zip"),
    )
    async def wheel_file(filename: str, _machine: Machine) -> Response:
        found = _wheel(face)
        if filename != found.filename:
            raise ApiError(404, http.NOT_FOUND, f"the wheel of this program is {found.filename}.")
        return Response(found.content, media_type="application/zip")

    return router


def _wheel(face: AppContext) -> Wheel:
    found = face.wheel()
    if found is None:
        raise ApiError(404, http.NOT_FOUND, "the control plane was not installed as a package, so it has no wheel.")
    return found
