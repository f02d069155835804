"""A control plane in memory with spawned machines, for tests of its HTTP server."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import httpx

from support.asgi_server import serve_asgi
from support.fake_control_plane import FakeControlPlane
from support.memory_store.stores import MemoryStores
from windlass.model.action import Plan
from windlass.model.auth import API_PREFIX, JOIN_PREFIX, WORKER_PREFIX, Role, hash_of, new_token
from windlass.model.config import WorkerConfig
from windlass.model.errors import DatabaseUnavailable
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.outcome import Deleted, Intent
from windlass.model.snapshot import PlannerState
from windlass.server.app import make_app
from windlass.server.context import LoopHealth, WorkerApiContext
from windlass.server.long_poll import LongPollHub
from windlass.server.wheel import Wheel
from windlass.worker.http_transport import HttpTransport, WorkerCredentials

URL = "http://127.0.0.1:1"
SECRET = "hunter2"
TTL_S = 120.0
CHANCE = random.SystemRandom()
ANN = Candidate("ann", ttl_s=3600.0)
FLEET = FleetConfig(
    queues=("a", "b"),
    handler="app:work",
    concurrency=3,
    chdir="/srv/app",  # type: ignore[arg-type]
    env={"API_KEY": SECRET},
    heartbeat_interval_s=7,
    heartbeat_timeout_s=70,
    stop_timeout_s=33,
)
WHEEL = Wheel("windlass-1.0-py3-none-any.whl", "1.0", "abc", b"the wheel")


class FailingStore(MemoryStores):
    """While `error` is set, every call of a worker raises it."""

    error: Exception | None = None
    refused_logins = 0

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    async def claim(self, *args: Any) -> Any:
        self._check()
        return await super().claim(*args)

    async def now(self) -> Any:
        if isinstance(self.error, DatabaseUnavailable):
            raise self.error
        return await super().now()

    async def authenticate(self, token_hash: bytes) -> Any:
        if isinstance(self.error, DatabaseUnavailable):
            self.refused_logins += 1
            raise self.error
        return await super().authenticate(token_hash)


class InMemoryControlPlane:
    def __init__(self, clock: Any, **changed: Any) -> None:
        self.store = FailingStore(clock, None, Random(1))  # noqa: S311
        self.long_poll_hub = LongPollHub(self.store.wait_for_work)
        self.control = FakeControlPlane({"gpus": FLEET})
        self.control.loops["gpus"] = LoopHealth(last_cycle_age_s=1.0, is_running=True)
        self.control.cycle_summaries = [{"fleet": "gpus", "decision": "nothing to do"}]
        context = WorkerApiContext(
            worker_store=self.store,
            auth_store=self.store,
            long_poll_hub=self.long_poll_hub,
            control=self.control,
            worker_defaults=WorkerConfig(timeout_s=99, memory_limit_mb=512),
            max_payload_bytes=10_000,
            version="1.0",
            wheel=WHEEL,
        )
        self.app = make_app(replace(context, **changed))
        # The address of the application over a real connection.
        self.url = ""
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url=URL)

    async def spawn_worker(self, worker_id: str = "w0", slot: int = 0) -> str:
        """Spawn a machine and return its join token."""
        token = new_token(JOIN_PREFIX, CHANCE)
        observed = await self.store.observe(ANN, "gpus", FLEET)
        assert isinstance(observed, tuple)
        intent = Intent(worker_id, slot, "wanted", 30.0, join_token_hash=hash_of(token), join_ttl_s=TTL_S)
        await self.store.commit_plan(ANN, observed[0], observed[1], Plan((), PlannerState(), "x"), [intent])
        return token

    async def join(self, worker_id: str = "w0", slot: int = 0) -> str:
        """Spawn and activate a worker and return its worker token."""
        token = new_token(WORKER_PREFIX, CHANCE)
        answer = await self.activate(await self.spawn_worker(worker_id, slot), token, worker_id)
        assert answer.status_code == 200, answer.text
        return token

    async def activate(self, join_token: str, token: str, worker_id: str = "w0") -> httpx.Response:
        return await self.post(f"/internal/workers/{worker_id}/activate", join_token, {"token": token})

    async def terminate_worker(self, worker_id: str = "w0") -> None:
        term = await self.store.acquire_lease(ANN)
        assert isinstance(term, int)
        await self.store.record_outcomes("gpus", 0, [Deleted(worker_id, None, "IDLE", "idle")], None)

    async def api_token(self, role: Role) -> str:
        token = new_token(API_PREFIX, CHANCE)
        await self.store.create_token(f"a-{role}", role, hash_of(token))
        return token

    async def post(self, path: str, token: str, body: Any = None) -> httpx.Response:
        return await self.client.post(path, headers=bearer(token), json=body if body is not None else {})

    async def get(self, path: str, token: str) -> httpx.Response:
        return await self.client.get(path, headers=bearer(token))

    def transport(self, token: str, worker_id: str = "w0") -> HttpTransport:
        credentials = WorkerCredentials(worker_id, self.url, token, max_payload_bytes=10_000)
        return HttpTransport(credentials, False)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@asynccontextmanager
async def open_control_plane(clock: Any, **other: Any) -> AsyncIterator[InMemoryControlPlane]:
    plane = InMemoryControlPlane(clock, **other)
    try:
        async with serve_asgi(plane.app) as plane.url:
            yield plane
    finally:
        await plane.long_poll_hub.close()
        await plane.client.aclose()
