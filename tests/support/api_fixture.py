"""The whole HTTP application over a real PostgreSQL, with one fleet `gpus` on a provider without delays."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from random import Random, SystemRandom
from typing import Any

import httpx

from support.fake_control_plane import FakeControlPlane
from support.stores import PostgresStores
from windlass.control.cycle import FleetCycle
from windlass.control.deployment import Deployment, UnknownVersion
from windlass.control.explanation import explain
from windlass.model.auth import API_PREFIX, EVERYTHING, JOIN_PREFIX, WORKER_PREFIX, Role, TokenScope, hash_of, new_token
from windlass.model.bootstrap import BootstrapSettings
from windlass.model.config import WorkerConfig
from windlass.model.counters import CounterBuffer
from windlass.model.cycle import Explanation
from windlass.model.event import Event
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.machine import Machine, MachineRequest, MachineState, ProviderTraits
from windlass.model.payload_privacy import PayloadPrivacy
from windlass.model.task import new_task
from windlass.model.worker import Registration
from windlass.server.app import make_app
from windlass.server.auth import session_cookie
from windlass.server.context import AppContext, LoopHealth
from windlass.server.event_stream import OverviewFeed
from windlass.server.long_poll import LongPollHub
from windlass.server.metrics import Metrics
from windlass.server.routes.login import create_login_link
from windlass.store.connection import connected
from windlass.wiring import http_server

API = "/api/v1"
URL = "http://127.0.0.1:1"
COOKIE = session_cookie(httpx.URL(URL).netloc.decode())
SECRET = "hunter2"
FLEET = FleetConfig(
    queues=("a",),
    handler="app:work",
    # One worker per queued task.
    policy="buffered",
    max_workers=3,
    env={"API_KEY": SECRET},
    bootstrap=BootstrapSettings(requirements=(f"--extra-index-url https://app:{SECRET}@pypi.example/simple",)),
)
RNG = SystemRandom()


class InstantProvider:
    """Creates and deletes machines without delay, for EUR 0.36 an hour."""

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


class SetVersion(UnknownVersion):
    """A version that a test sets."""

    fingerprint: str | None = None

    async def read(self, _fleet: FleetConfig) -> str | None:
        return self.fingerprint


class CyclingControlPlane(FakeControlPlane):
    """Runs real cycles of the fleet `gpus`, and explains from the store."""

    def __init__(self, store: PostgresStores, feed: OverviewFeed) -> None:
        super().__init__({"gpus": FLEET})
        self.loops["gpus"] = LoopHealth(last_cycle_age_s=1.0, is_running=True)
        self._store = store
        self._feed = feed
        self.counters = CounterBuffer()
        provider = InstantProvider(ProviderTraits())
        self.versions = SetVersion()
        self._cycle = FleetCycle(
            "gpus",
            FLEET,
            store,
            provider,
            Candidate("leader", 3600.0),
            Random(4),  # noqa: S311
            deployment=Deployment(self.versions),
        )

    async def run_cycle(self) -> list[dict[str, Any]]:
        summary = await self._cycle.run()
        self.actions["gpus"] = summary.actions or {}
        self.counters.add_cycle(summary)
        await self._store.add_counters(self.counters.take())
        self._feed.mark_changed()
        return [summary.to_plain()]

    async def explain(self, subject: str, redact_event: Callable[[Event], Event] | None = None) -> Explanation:
        return await explain(self._store, subject, redact_event)


class ApiFixture:
    def __init__(self, dsn: str, worker_store: PostgresStores, store: PostgresStores, **settings: Any) -> None:
        self.dsn = dsn
        self.store = store
        privacy = settings.get("payload_privacy", PayloadPrivacy)()
        self.feed = OverviewFeed(store, lambda: frozenset({"gpus"}), redact_event=privacy.redact_event)
        self.control = CyclingControlPlane(store, self.feed)
        self.long_poll_hub = LongPollHub(worker_store.wait_for_work)
        self.app = make_app(
            AppContext(
                worker_store=worker_store,
                auth_store=worker_store,
                long_poll_hub=self.long_poll_hub,
                control=self.control,
                worker_defaults=WorkerConfig(),
                max_payload_bytes=10_000,
                version="1.0",
                store=store,
                overview_feed=self.feed,
                metrics=Metrics(self.feed, store),
                **{"is_open_to_localhost": True, **settings},
            )
        )
        self._clients: list[httpx.AsyncClient] = []
        # Without a token, from this host and from another one.
        self.localhost = self.client("127.0.0.1")
        self.remote = self.client("192.0.2.7")

    def client(self, address: str, **headers: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, client=(address, 4711))
        client = httpx.AsyncClient(transport=transport, base_url=URL, headers=headers, timeout=30)
        self._clients.append(client)
        return client

    async def client_as(self, role: Role, scope: TokenScope = EVERYTHING) -> httpx.AsyncClient:
        """A client on another host with a token of this role."""
        return self.client("192.0.2.7", **await self.auth_headers(role, scope))

    async def browser(self, address: str = "192.0.2.7", role: Role = Role.OPERATOR) -> httpx.AsyncClient:
        """A client with a dashboard session."""
        browser = self.client(address)
        (await browser.get(await create_login_link(self.store, "", role))).raise_for_status()
        return browser

    async def auth_headers(self, role: Role, scope: TokenScope = EVERYTHING) -> dict[str, str]:
        token = new_token(API_PREFIX, RNG)
        await self.store.create_token(f"a-{role}-{token[-6:]}", role, hash_of(token), scope=scope)
        return {"Authorization": f"Bearer {token}"}

    async def run_cycle(self) -> None:
        await self.control.run_cycle()

    async def spawn_active_workers(self, tasks: int = 2) -> list[str]:
        """Enqueue this many tasks and run cycles until their workers are active. Returns the workers' ids."""
        for number in range(tasks):
            await self.store.enqueue(new_task("a", {"number": number}))
        await self.run_cycle()
        ids = [worker.id for worker in await self.store.workers()]
        for worker_id in ids:
            await self.store.register(Registration(worker_id, ("a",), fleet="gpus"))
            await self.store.heartbeat(worker_id, (), {"vram_total_mb": 100, "vram_used_mb": 25})
        await self.run_cycle()
        return ids

    async def join_worker(self) -> httpx.AsyncClient:
        """The client of a worker that the fleet spawned and that joined over HTTP."""
        await self.store.enqueue(new_task("a"))
        await self.run_cycle()
        worker_id = (await self.store.workers())[-1].id
        join_token, token = new_token(JOIN_PREFIX, RNG), new_token(WORKER_PREFIX, RNG)
        async with connected(self.dsn, "setting a join token") as connection:
            await connection.execute(
                "update windlass.workers set join_token_hash = $2, join_expires_at = $3 where id = $1",
                worker_id,
                hash_of(join_token),
                await self.store.now() + timedelta(hours=1),
            )
        worker = self.client("192.0.2.9", Authorization=f"Bearer {join_token}")
        (await worker.post(f"/internal/workers/{worker_id}/activate", json={"token": token})).raise_for_status()
        worker.headers["Authorization"] = f"Bearer {token}"
        return worker

    async def close(self) -> None:
        await self.feed.close()
        await self.long_poll_hub.close()
        for client in self._clients:
            await client.aclose()


@asynccontextmanager
async def open_api(dsn: str, clock: Any = None, **settings: Any) -> AsyncIterator[ApiFixture]:
    async with (
        PostgresStores(dsn, max_connections=http_server.WORKER_CONNECTIONS, virtual_now=clock) as worker_store,
        PostgresStores(
            dsn,
            max_connections=http_server.USER_CONNECTIONS,
            statement_timeout_s=http_server.USER_STATEMENT_TIMEOUT_S,
            virtual_now=clock,
        ) as store,
    ):
        api = ApiFixture(dsn, worker_store, store, **settings)
        try:
            yield api
        finally:
            await api.close()


def problem_of(response: httpx.Response) -> tuple[int, str]:
    """Status and code of an error response."""
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["detail"].endswith(".")
    return response.status_code, problem["code"]
