"""Alert managers for tests: cycles that raise alerts, and a webhook server that records messages."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from support.stores import PostgresStores
from windlass.control.alerting import SETTLING_S, AlertManager
from windlass.model.action import Plan, RaiseAlert
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.snapshot import Cadence, Hold, PlannerState
from windlass.server.server import listen

ANN = Candidate("ann", ttl_s=1e6)
FLEET = FleetConfig(queues=("a",), handler="app:work", poll_interval_s=10)
SECRET = "s3cr3t"
GRACE_S = 60.0


async def commit_cycle(
    store: PostgresStores,
    *alerts: RaiseAlert,
    hold: Hold | None = None,
    fleet: str = "gpus",
    next_plan_in_s: float | None = 1e6,
) -> None:
    """Commit the plan of one cycle that raises these alerts and this hold."""
    observed = await store.observe(ANN, fleet, FLEET)
    assert isinstance(observed, tuple)
    term, snapshot = observed
    raised = {f"{alert.code} {alert.about}".rstrip(): snapshot.now for alert in alerts}
    cadence = Cadence(planned_at=snapshot.now, next_plan_in_s=next_plan_in_s)
    state = PlannerState(cadence=cadence, alerts=raised, hold=hold)
    await store.commit_plan(ANN, term, snapshot, Plan(alerts, state, "x"), [])


class WebhookServer:
    """A real HTTP server that records messages. It answers the next `refusals` requests with 503."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.refusals = 0
        self.url = ""

    async def receive(self, request: Request) -> Response:
        if self.refusals > 0:
            self.refusals -= 1
            return Response("no", 503)
        self.received.append(json.loads(await request.body()))
        return Response(status_code=204)


@asynccontextmanager
async def webhook_server() -> AsyncIterator[WebhookServer]:
    inbox = WebhookServer()
    listener = listen("127.0.0.1", 0)
    app = Starlette(routes=[Route(f"/{SECRET}", inbox.receive, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    inbox.url = f"http://127.0.0.1:{listener.getsockname()[1]}/{SECRET}"
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield inbox
    finally:
        server.should_exit = True
        await serving


def make_manager(store: PostgresStores, *notifiers: Any, **other: Any) -> AlertManager:
    """The manager of a process that has run for a while, unless `settling_s` is given."""
    settled = {"failed_tasks_allowed": 0, "leader_grace_s": GRACE_S, "settling_s": 0.0, "rng": Random(1)}  # noqa: S311
    return AlertManager(store, notifiers, **{**settled, **other})


def make_starting_manager(store: PostgresStores, *notifiers: Any) -> AlertManager:
    """The manager of a process that has just started."""
    return make_manager(store, *notifiers, settling_s=SETTLING_S)


async def run_for(
    store: PostgresStores,
    manager: AlertManager,
    clock: Any,
    for_s: int,
    *alerts: RaiseAlert,
    hold: Hold | None = None,
) -> None:
    """Every 5 s: evaluate and send, then commit a cycle that raises these alerts and this hold."""
    for _ in range(0, for_s, 5):
        await manager.evaluate()
        await manager.send_due()
        clock.advance(5)
        await commit_cycle(store, *alerts, hold=hold, next_plan_in_s=10)
    await manager.evaluate()
    await manager.send_due()


def received(inbox: WebhookServer) -> list[tuple[str, str]]:
    return [(message["status"], message["code"]) for message in inbox.received]
