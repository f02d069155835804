"""Workers that nobody hired and that have no database: an API token of role `worker` lets them in.

With each name a worker takes it makes up a token, and registers both by the API token; from then on it is that worker,
as any other over HTTP. The API token is needed again only when it was declared lost and joins under a new name. When
that token is revoked, the workers it let in are over.
"""

import ssl
from dataclasses import dataclass
from random import SystemRandom

import httpx
from pydantic import TypeAdapter

from windlass.model.auth import WORKER_PREFIX, new_token
from windlass.model.worker import Registration, WorkerStatus
from windlass.ports import http
from windlass.worker.http_transport import ControlPlane, HttpTransport, WorkerCredentials, read_answer, write


@dataclass(slots=True)
class SelfRegistration:
    """Shared by all transports of a worker: who it is now. The heartbeat reads it in a thread of its own."""

    url: str
    api_token: str
    tls: ssl.SSLContext | bool
    credentials: WorkerCredentials
    # Carries the requests instead of the network: tests speak to an application in memory.
    carrier: httpx.AsyncBaseTransport | None = None

    def __repr__(self) -> str:
        return f"Enlistment(url={self.url!r}, membership={self.credentials!r})"


def new_self_registration(
    url: str, api_token: str, tls: ssl.SSLContext | bool, carrier: httpx.AsyncBaseTransport | None = None
) -> SelfRegistration:
    """Nobody yet: the first registration gives it a name."""
    return SelfRegistration(url, api_token, tls, WorkerCredentials("", url, ""), carrier)


class SelfRegisteredTransport(HttpTransport):
    def __init__(self, self_registration: SelfRegistration) -> None:
        super().__init__(self_registration.credentials, self_registration.tls, self_registration.carrier)
        self._enlistment = self_registration

    async def register(self, registration: Registration) -> WorkerStatus:
        self_registration, r = self._enlistment, registration
        token = self_registration.credentials.token
        if self_registration.credentials.worker_id != r.worker_id:
            token = new_token(WORKER_PREFIX, SystemRandom())
            # Before it asks: if the answer is lost, it asks again with the same two.
            self_registration.credentials = WorkerCredentials(r.worker_id, self_registration.url, token)
        call = http.SelfRegisterCall(
            token, r.worker_id, r.queues, r.concurrency, r.lease_s, r.host, r.pid, r.version, r.start_id
        )
        plane = ControlPlane(
            self_registration.url, self_registration.api_token, self_registration.tls, self_registration.carrier
        )
        try:
            doing = "registering the worker"
            enlisted = read_answer(
                doing, _ENLISTED, await plane.call(doing, "POST", http.SELF_REGISTER, write(doing, call))
            )
        finally:
            await plane.close()
        self_registration.credentials = WorkerCredentials(
            r.worker_id, self_registration.url, token, max_payload_bytes=enlisted.max_payload_bytes
        )
        self._check_name(r.worker_id)
        return enlisted.status

    def _check_name(self, worker_id: str) -> None:
        if self._membership is not self._enlistment.credentials:
            self._membership = self._enlistment.credentials
            self._plane.act_with(self._membership.token)
        super()._check_name(worker_id)


_ENLISTED = TypeAdapter(http.SelfRegisteredReply)
