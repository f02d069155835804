"""The control plane's HTTP face over a real PostgreSQL, with a fleet that a provider of the tests' own serves."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random, SystemRandom
from typing import Any

import httpx

from windlass.control.cycle import FleetCycle
from windlass.control.explain import tell
from windlass.control.summary import Summary
from windlass.model.auth import API_PREFIX, JOIN_PREFIX, WORKER_PREFIX, Role, hash_of, new_token
from windlass.model.bootstrap import BootstrapSettings
from windlass.model.config import WorkerConfig
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.machine import Machine, MachineRequest, MachineState, ProviderTraits
from windlass.model.task import new_task
from windlass.server.app import make_app
from windlass.server.context import AppContext, DashboardContext, LoopHealth
from windlass.server.event_stream import OverviewFeed
from windlass.server.long_poll import LongPollHub
from windlass.server.metrics import Metrics
from windlass.store.auth import PostgresAuthStore
from windlass.store.dashboard_queries import PostgresQueryStore
from windlass.wiring.http_server import face_stores

URL = "http://127.0.0.1:1"
SECRET = "hunter2"
FLEET = FleetConfig(
    queues=("a",),
    handler="app:work",
    max_workers=3,
    env={"API_KEY": SECRET},
    bootstrap=BootstrapSettings(requirements=(f"--extra-index-url https://app:{SECRET}@pypi.example/simple",)),
)
CHANCE = SystemRandom()


class Shed:
    """A provider that does everything at once, for EUR 0.36 an hour."""

    def __init__(self, traits: ProviderTraits) -> None:
        self.traits = traits
        self.machines: dict[str, Machine] = {}

    async def create(self, request: MachineRequest) -> Machine:
        machine = Machine(
            f"m-{request.name}", request.name, MachineState.RUNNING, price_micros_per_hour=360_000, currency="EUR"
        )
        self.machines[machine.id] = machine
        return machine

    async def list_machines(self) -> tuple[Machine, ...]:
        return tuple(self.machines.values())

    async def delete(self, machine: Machine) -> None:
        self.machines.pop(machine.id, None)

    async def close(self) -> None: ...


class Bed:
    def __init__(self, machines: PostgresAuthStore, store: PostgresQueryStore, **other: Any) -> None:
        self.store = store
        # The settings of those that are run here, as they are now.
        self.fleets = {"gpus": FLEET}
        self.live = OverviewFeed(store, lambda: frozenset({"gpus"}))
        self.metrics = Metrics(self.live.overview, store.fleet_metrics)
        self.summaries: dict[str, Summary] = {}
        self.shown = DashboardContext(
            store=store,
            live=self.live,
            explain=lambda what: tell(store, what),
            worker_log=self._worker_log,
            last_actions=self._last_actions,
            metrics=self.metrics.read,
            **{"is_open_here": True, **other},
        )
        self.long_poll_hub = LongPollHub(machines.wait_for_work)
        self.app = make_app(
            AppContext(
                store=machines,
                access=machines,
                long_poll_hub=self.long_poll_hub,
                fleet=self.fleets.get,
                worker_defaults=WorkerConfig(),
                max_payload_bytes=10_000,
                version="1.0",
                ask_database=machines.now,
                pulses=lambda: {"gpus": LoopHealth(is_leader=True, last_cycle_age_s=1.0, limit_s=60.0)},
                run_cycle=self.run_cycle,
                wheel=lambda: None,
                shown=self.shown,
            )
        )
        shed = Shed(ProviderTraits())
        self.cycle = FleetCycle("gpus", FLEET, store, shed, Candidate("ann", 3600.0), Random(4))  # noqa: S311
        # Somebody on this host, and somebody elsewhere.
        self.here = self.client("127.0.0.1")
        self.elsewhere = self.client("192.0.2.7")

    def client(self, address: str, **headers: str) -> httpx.AsyncClient:
        carrier = httpx.ASGITransport(self.app, client=(address, 4711))
        return httpx.AsyncClient(transport=carrier, base_url=URL, headers=headers, timeout=30)

    async def run_cycle(self) -> list[dict[str, Any]]:
        summary = await self.cycle.run()
        self.summaries["gpus"] = summary
        self.metrics.record_cycle(
            "gpus",
            is_leader=summary.is_leader,
            duration_s=summary.duration_s,
            actions=summary.actions or {},
            provider_calls=summary.provider_calls,
        )
        self.live.poke()
        return [summary.to_plain()]

    async def token(self, role: Role) -> dict[str, str]:
        """Headers of somebody with this role."""
        token = new_token(API_PREFIX, CHANCE)
        await self.store.create_token(f"a-{role}-{token[-6:]}", role, hash_of(token))
        return {"Authorization": f"Bearer {token}"}

    async def join(self) -> httpx.AsyncClient:
        """A worker that the fleet hires for a task, and that has joined over HTTP."""
        await self.store.enqueue(new_task("a"))
        await self.run_cycle()
        worker_id = (await self.store.workers())[-1].id
        join_token, token = new_token(JOIN_PREFIX, CHANCE), new_token(WORKER_PREFIX, CHANCE)
        async with self.store._connection("giving a worker its token") as connection:
            await connection.execute(
                "update windlass.workers set join_token_hash = $2, join_expires_at = windlass.now() + interval '1 hour'"
                " where id = $1",
                worker_id,
                hash_of(join_token),
            )
        worker = self.client("192.0.2.9", Authorization=f"Bearer {join_token}")
        (await worker.post(f"/internal/workers/{worker_id}/activate", json={"token": token})).raise_for_status()
        worker.headers["Authorization"] = f"Bearer {token}"
        return worker

    def _last_actions(self) -> Mapping[str, Mapping[str, int]]:
        return {name: summary.actions or {} for name, summary in self.summaries.items()}

    async def _worker_log(self, fleet: str, worker_id: str, _lines: int) -> AsyncIterator[str]:
        if fleet != "gpus":
            raise BadInput(f"there is no log of worker {worker_id} on this host.")
        yield f"{worker_id} says hello"

    async def close(self) -> None:
        await self.live.close()
        await self.long_poll_hub.close()
        for client in (self.here, self.elsewhere):
            await client.aclose()


@asynccontextmanager
async def bed_of(dsn: str, clock: Any = None, **other: Any) -> AsyncIterator[Bed]:
    async with face_stores(dsn, virtual_now=clock) as (machines, people):
        bed = Bed(machines, people, **other)
        try:
            yield bed
        finally:
            await bed.close()
