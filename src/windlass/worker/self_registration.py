"""Registration over HTTP of workers that were not spawned, with an API token of role `worker`.

For each worker id the worker generates a worker token and registers both with the API token. From then on it uses the
worker token, like any worker over HTTP. It needs the API token again only to register under a new id after it was
declared lost. Revoking the API token terminates the workers that registered with it.
"""

import ssl
from dataclasses import dataclass
from random import SystemRandom

from windlass.model.auth import WORKER_PREFIX, new_token
from windlass.model.worker import Registration, WorkerStatus
from windlass.ports import http
from windlass.worker.http_transport import (
    ControlPlaneClient,
    Decoder,
    HttpTransport,
    WorkerCredentials,
    encode_call,
    parse_answer,
)


@dataclass(slots=True)
class SelfRegistration:
    """The current credentials, shared by all transports of a worker. The heartbeat reads them on its own thread."""

    url: str
    api_token: str
    tls: ssl.SSLContext | bool
    credentials: WorkerCredentials

    def __repr__(self) -> str:
        return f"SelfRegistration(url={self.url!r}, credentials={self.credentials!r})"


def new_self_registration(url: str, api_token: str, tls: ssl.SSLContext | bool) -> SelfRegistration:
    """Without an id until the first registration."""
    return SelfRegistration(url, api_token, tls, WorkerCredentials("", url, ""))


class SelfRegisteredTransport(HttpTransport):
    def __init__(self, self_registration: SelfRegistration) -> None:
        super().__init__(self_registration.credentials, self_registration.tls)
        self._registration = self_registration

    async def register(self, registration: Registration) -> WorkerStatus:
        self_registration, r = self._registration, registration
        token = self_registration.credentials.token
        if self_registration.credentials.worker_id != r.worker_id:
            token = new_token(WORKER_PREFIX, SystemRandom())
            # Saved before the call: after a lost answer it is repeated with the same id and token.
            self_registration.credentials = WorkerCredentials(r.worker_id, self_registration.url, token)
        call = http.SelfRegisterCall(token, registration)
        plane = ControlPlaneClient(self_registration.url, self_registration.api_token, self_registration.tls)
        try:
            doing = "registering the worker"
            registered = parse_answer(
                doing, _REGISTERED, await plane.call(doing, "POST", http.SELF_REGISTER, encode_call(doing, call))
            )
        finally:
            await plane.close()
        self_registration.credentials = WorkerCredentials(
            r.worker_id, self_registration.url, token, max_payload_bytes=registered.max_payload_bytes
        )
        self._check_worker(r.worker_id)
        return registered.status

    def _check_worker(self, worker_id: str) -> None:
        if self._credentials is not self._registration.credentials:
            self._credentials = self._registration.credentials
            self._plane.set_token(self._credentials.token)
        super()._check_worker(worker_id)


_REGISTERED = Decoder(http.SelfRegisterReply)
