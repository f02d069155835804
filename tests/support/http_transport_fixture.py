"""A store whose worker calls go over HTTP. All other calls go to the store directly.

The application runs in the process, behind a real connection. Routes, auth, limits and messages are those of
production. Only tokens are simplified: every worker id has one, so that a test can act as any worker.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

from support.asgi_server import serve_asgi
from support.fake_control_plane import FakeControlPlane
from support.stores import AnyStore
from windlass.model.auth import WORKER_PREFIX, Activation, ApiToken, Caller, Role, WorkerCaller, hash_of
from windlass.model.config import WorkerConfig
from windlass.model.task import MAX_PAYLOAD_BYTES, Claim, ClaimResult, Finished, TaskStatus
from windlass.model.worker import HeartbeatReply, HeldClaim, RecoveredTasks, Registration, WorkerStatus
from windlass.model.worker_log import LogChunk
from windlass.server.app import make_app
from windlass.server.context import WorkerApiContext
from windlass.server.long_poll import LongPollHub
from windlass.worker.http_transport import HttpTransport, WorkerCredentials

QUEUES = ("q", "r", "a", "b", "c", "other")


def token_of(worker_id: str) -> str:
    return f"{WORKER_PREFIX}{hash_of(worker_id).hex()}"


class OpenAccess:
    """Every worker has a token for all queues."""

    def __init__(self) -> None:
        self.names: dict[bytes, str] = {}
        # Fleet by worker id.
        self.fleets: dict[str, str] = {}

    async def authenticate(self, token_hash: bytes) -> Caller | None:
        name = self.names.get(token_hash)
        if name is None:
            return None
        return WorkerCaller(name, self.fleets.get(name, "default"), QUEUES, has_terminated=False)

    async def watch_revocations(
        self, set_listening: Callable[[bool], None], revoke: Callable[[bytes | None], None]
    ) -> None:
        """No token is ever revoked."""
        set_listening(True)
        await asyncio.Event().wait()

    async def share_rates(
        self, server_id: UUID, rates: Mapping[tuple[str, str], float]
    ) -> Mapping[tuple[str, str], float]:
        """This server is the only one."""
        return rates

    async def activate(self, worker_id: str, join_token_hash: bytes, token_hash: bytes) -> Activation:
        raise NotImplementedError

    async def create_token(self, name: str, role: Role, token_hash: bytes) -> ApiToken:
        raise NotImplementedError

    async def tokens(self) -> list[ApiToken]:
        raise NotImplementedError

    async def revoke_token(self, name: str) -> bool:
        raise NotImplementedError


def worker_api_context(store: Any, auth_store: Any, long_poll_hub: LongPollHub) -> WorkerApiContext:
    return WorkerApiContext(
        worker_store=store,
        auth_store=auth_store,
        long_poll_hub=long_poll_hub,
        control=FakeControlPlane(),
        worker_defaults=WorkerConfig(),
        max_payload_bytes=MAX_PAYLOAD_BYTES,
        version="test",
    )


class OverHttp:
    """Worker calls go over HTTP, one connection per worker. Other calls go to the store `behind` it."""

    def __init__(self, behind: AnyStore, access: OpenAccess, url: str) -> None:
        self.behind = behind
        self._access = access
        self._url = url
        self._transports: dict[str, HttpTransport] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)

    def as_worker(self, worker_id: str) -> HttpTransport:
        if worker_id not in self._transports:
            self._transports[worker_id] = self.new_transport(worker_id)
        return self._transports[worker_id]

    def new_transport(self, worker_id: str) -> HttpTransport:
        token = token_of(worker_id)
        self._access.names[hash_of(token)] = worker_id
        return HttpTransport(WorkerCredentials(worker_id, self._url, token), False)

    async def close(self) -> None:
        for transport in self._transports.values():
            await transport.__aexit__(None, None, None)

    async def register(self, registration: Registration) -> WorkerStatus:
        self._access.fleets[registration.worker_id] = registration.fleet
        return await self.as_worker(registration.worker_id).register(registration)

    async def claim(self, worker_id: str, queues: Sequence[str], limit: int = 1) -> list[Claim]:
        return await self.as_worker(worker_id).claim(worker_id, queues, limit)

    async def finish_and_claim(
        self, worker_id: str, finished: Sequence[Finished], queues: Sequence[str], limit: int
    ) -> ClaimResult:
        return await self.as_worker(worker_id).finish_and_claim(worker_id, finished, queues, limit)

    async def fail(self, worker_id: str, task_id: int, token: UUID, error: str, **how: Any) -> TaskStatus | None:
        return await self.as_worker(worker_id).fail(worker_id, task_id, token, error, **how)

    async def release(self, worker_id: str, task_id: int, token: UUID, reason: str, delay_s: float = 0.0) -> bool:
        return await self.as_worker(worker_id).release(worker_id, task_id, token, reason, delay_s)

    async def heartbeat(
        self, worker_id: str, claims: Sequence[HeldClaim] = (), vitals: Mapping[str, Any] | None = None
    ) -> HeartbeatReply:
        return await self.as_worker(worker_id).heartbeat(worker_id, claims, vitals)

    async def deregister(self, worker_id: str, reason: str) -> None:
        await self.as_worker(worker_id).deregister(worker_id, reason)

    async def run_maintenance(self, worker_id: str) -> list[RecoveredTasks]:
        return await self.as_worker(worker_id).run_maintenance(worker_id)

    async def append_logs(self, worker_id: str, batch_id: UUID, chunks: Sequence[LogChunk]) -> None:
        await self.as_worker(worker_id).append_logs(worker_id, batch_id, chunks)

    async def next_run_after(self, queues: Sequence[str]) -> datetime | None:
        return await self.as_worker("any").next_run_after(queues)

    async def wait_for_work(self, queues: Sequence[str], timeout_s: float) -> None:
        await self.as_worker("any").wait_for_work(queues, timeout_s)


@asynccontextmanager
async def over_http(store: AnyStore) -> AsyncIterator[OverHttp]:
    access, long_poll_hub = OpenAccess(), LongPollHub(store.wait_for_work)
    try:
        async with serve_asgi(make_app(worker_api_context(store, access, long_poll_hub))) as url:
            seen = OverHttp(store, access, url)
            try:
                yield seen
            finally:
                await seen.close()
    finally:
        await long_poll_hub.close()
