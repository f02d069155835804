"""A Hetzner Cloud project that answers as published, on anybody's clock.

`handle` never waits: servers boot, actions end and lists catch up as the clock it was given goes on. Requests are
answered one at a time, whatever thread they come from. Trouble is scripted through `faults`; the bill is `ledger`,
kept without any of Windlass's own arithmetic. State lives in memory and ends with the emulator.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from windlass_emulators.base import VendorEmulator
from windlass_emulators.hetzner.catalog import DEFAULT_CATALOG, HetznerCatalog
from windlass_emulators.hetzner.control import CONTROL, control
from windlass_emulators.hetzner.errors import HetznerApiError
from windlass_emulators.hetzner.faults import HetznerFaults
from windlass_emulators.hetzner.ledger import HetznerBill
from windlass_emulators.hetzner.project import Project
from windlass_emulators.hetzner.request import HetznerAnswer, HetznerCall
from windlass_emulators.hetzner.routes import route
from windlass_emulators.hetzner.settings import HetznerEmulatorSettings
from windlass_emulators.http import Json, Response, json_response
from windlass_emulators.machines import MachineHost, VirtualHost
from windlass_emulators.throttle import Bucket

HOUR_S = 3600.0
# What a body may have at most: user_data with room to spare.
MAX_BODY_BYTES = 1024 * 1024


class HetznerEmulator(VendorEmulator[Project, HetznerFaults]):
    def __init__(
        self,
        clock: Callable[[], datetime],
        settings: HetznerEmulatorSettings | None = None,
        host: MachineHost | None = None,
        catalog: HetznerCatalog = DEFAULT_CATALOG,
    ) -> None:
        self.settings = settings or HetznerEmulatorSettings()
        self.host: MachineHost = host or VirtualHost()
        faults = HetznerFaults(clock())
        self.project = Project(self.settings, self.host, faults, clock(), catalog)
        super().__init__(clock, self.project, faults)
        self._bucket = Bucket(self.settings.requests_per_hour, HOUR_S)

    @property
    def ledger(self) -> HetznerBill:
        return self.project.ledger

    def crash(self, server_id: int) -> None:
        """What runs inside it is gone at once; the API goes on calling it `running`, and billing it."""
        with self._lock:
            self.settle()
            self.project.crash(self.project.servers[server_id])

    def handle(
        self, method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str], body: bytes
    ) -> Response:
        with self._lock:
            self.settle()
            if path.startswith(CONTROL):
                return self._control(method, path, headers, body)
            self.requests.append((self.project.now, method, path))
            try:
                answer = self._answer(method, path, query, _lower(headers), body)
            except HetznerApiError as error:
                answer = HetznerAnswer(error.status, error.to_json())
            return json_response(answer.status, answer.body, {**answer.headers, **self._rate_limit()})

    def _control(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Open to everybody who may ask, unless the emulator is kept for whoever has its token."""
        try:
            if self.settings.token is not None:
                self._authorize(_lower(headers))
        except HetznerApiError as error:
            return json_response(error.status, error.to_json())
        return control(self, method, path, body)

    def _answer(
        self, method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str], body: bytes
    ) -> HetznerAnswer:
        self._throttle()
        self._authorize(headers)
        fault = self._faults.take(method, path)
        if fault is not None and not fault.takes_effect:
            fault.fail()
        endpoint, ids = route(method, path)
        origin = f"http://{headers.get('host', 'localhost')}"
        answer = endpoint(self.project, HetznerCall(path, query, _read_body(method, body), ids, origin))
        if fault is not None:
            fault.fail()
        return answer

    def _throttle(self) -> None:
        if self._faults.wants_drained_bucket:
            self._faults.wants_drained_bucket = False
            self._bucket.drain(self.project.now)
        if not self._bucket.take(self.project.now):
            raise HetznerApiError("rate_limit_exceeded", "limit of requests per hour reached", None)

    def _authorize(self, headers: Mapping[str, str]) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        is_known = self.settings.token is None or token == self.settings.token
        if scheme.lower() != "bearer" or not token.strip() or not is_known:
            raise HetznerApiError("unauthorized", "unable to authenticate", {})

    def _rate_limit(self) -> dict[str, str]:
        now = self.project.now
        return {
            "RateLimit-Limit": str(self._bucket.capacity),
            "RateLimit-Remaining": str(self._bucket.remaining(now)),
            "RateLimit-Reset": str(int(self._bucket.full_at(now).timestamp())),
        }


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _read_body(method: str, body: bytes) -> Json:
    if not body.strip() or method in ("GET", "DELETE"):
        return {}
    if len(body) > MAX_BODY_BYTES:
        raise HetznerApiError("json_error", f"the body has more than {MAX_BODY_BYTES} bytes", {})
    try:
        document = json.loads(body)
    except ValueError as error:
        raise HetznerApiError("json_error", "invalid JSON in request body", {}) from error
    if not isinstance(document, dict):
        raise HetznerApiError("json_error", "the request body is not an object", {})
    return document
