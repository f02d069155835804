"""A Runpod account that answers as REST v2 is published, on anybody's clock.

`handle` never waits: pods are provisioned, start, run and die as the clock it was given goes on. Requests are answered
one at a time, whatever thread they come from. Trouble is scripted through `faults`; the bill is `ledger`, kept without
any of Windlass's own arithmetic. State lives in memory and ends with the emulator.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import format_datetime

from windlass_emulators.base import VendorEmulator
from windlass_emulators.http import Json, Response, json_response
from windlass_emulators.runpod.account import EmulatedRunpodAccount
from windlass_emulators.runpod.calls import RunpodAnswer, RunpodCall
from windlass_emulators.runpod.catalog import DEFAULT_CATALOG, RunpodCatalog
from windlass_emulators.runpod.containers import PodHost, VirtualPodHost
from windlass_emulators.runpod.control import CONTROL, control
from windlass_emulators.runpod.errors import RunpodApiError
from windlass_emulators.runpod.faults import RunpodFaults
from windlass_emulators.runpod.ledger import RunpodBill
from windlass_emulators.runpod.routes import route
from windlass_emulators.runpod.settings import RunpodEmulatorSettings
from windlass_emulators.throttle import Window

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
MAX_BODY_BYTES = 1024 * 1024


class RunpodEmulator(VendorEmulator[EmulatedRunpodAccount, RunpodFaults]):
    def __init__(
        self,
        clock: Callable[[], datetime],
        settings: RunpodEmulatorSettings | None = None,
        host: PodHost | None = None,
        catalog: RunpodCatalog = DEFAULT_CATALOG,
    ) -> None:
        self.settings = settings or RunpodEmulatorSettings()
        self.host: PodHost = host or VirtualPodHost()
        faults = RunpodFaults(clock())
        self.account = EmulatedRunpodAccount(self.settings, self.host, faults, clock(), catalog)
        super().__init__(clock, self.account, faults)
        self._windows = [
            Window("minute", self.settings.requests_per_minute, MINUTE_S),
            Window("hour", self.settings.requests_per_hour, HOUR_S),
            Window("day", self.settings.requests_per_day, DAY_S),
        ]

    @property
    def ledger(self) -> RunpodBill:
        return self.account.ledger

    def crash(self, pod_id: str) -> None:
        """What runs inside it is gone at once; the API goes on calling it `RUNNING`, and billing it."""
        with self._lock:
            self.settle()
            self.account.crash(self.account.pods[pod_id])

    def lose_gpus(self, pod_id: str) -> None:
        """Its GPUs fall off the bus: no memory is read from them any more."""
        with self._lock:
            self.settle()
            self.account.lose_gpus(self.account.pods[pod_id])

    def fill_volume(self, volume_id: str, used_gb: float) -> None:
        """So much of it is used, as its pods measure it."""
        with self._lock:
            self.settle()
            self.account.fill_volume(self.account.volumes[volume_id], used_gb)

    def handle(
        self, method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str], body: bytes
    ) -> Response:
        with self._lock:
            self.settle()
            if path.startswith(CONTROL):
                return control(self, method, path, body)
            self.requests.append((self.account.now, method, path))
            lowered = {name.lower(): value for name, value in headers.items()}
            # When it was answered is when it was done.
            date = {"Date": format_datetime(self.account.now.astimezone(UTC), usegmt=True)}
            try:
                self._authorize(lowered)
            except RunpodApiError as problem:
                return problem.response(date)
            try:
                answer = self._answer(method, path, query, lowered, body)
            except RunpodApiError as problem:
                return problem.response({**date, **self._rate_limit()})
            return _response(answer, {**date, **self._rate_limit()})

    def _answer(
        self, method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str], body: bytes
    ) -> RunpodAnswer:
        self._throttle()
        fault = self._faults.take(method, path)
        if fault is not None and not fault.takes_effect:
            fault.fail()
        endpoint, id_ = route(method, path)
        answer = endpoint(self.account, RunpodCall(query, headers, _read_body(method, body), id_))
        if fault is not None:
            fault.fail()
        return answer

    def _authorize(self, headers: Mapping[str, str]) -> None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise RunpodApiError(401)
        if self.settings.key is not None and key != self.settings.key:
            raise RunpodApiError(401, "invalid bearer token")

    def _throttle(self) -> None:
        now = self.account.now
        for window in self._windows:
            if window.name == self._faults.wants_drained_window:
                self._faults.wants_drained_window = None
                window.drain(now)
        for window in self._windows:
            if window.remaining(now) == 0:
                retry = {"Retry-After": str(window.resets_in_s(now))}
                raise RunpodApiError(429, f"rate limit exceeded for the {window.name} window", headers=retry)
        for window in self._windows:
            window.use(now)

    def _rate_limit(self) -> dict[str, str]:
        now = self.account.now
        left = (f'"{each.name}";r={each.remaining(now)};t={each.resets_in_s(now)}' for each in self._windows)
        policy = (f'"{each.name}";q={each.quota};w={each.length_s}' for each in self._windows)
        return {"RateLimit": ", ".join(left), "RateLimit-Policy": ", ".join(policy)}


def _response(answer: RunpodAnswer, headers: Mapping[str, str]) -> Response:
    if answer.text is not None:
        return Response(answer.status, {**answer.headers, **headers}, answer.text.encode())
    return json_response(answer.status, answer.body, {**answer.headers, **headers})


def _read_body(method: str, body: bytes) -> Json:
    if method in ("GET", "DELETE"):
        return {}
    if len(body) > MAX_BODY_BYTES:
        raise RunpodApiError(413)
    try:
        document = json.loads(body or b"")
    except ValueError as error:
        raise RunpodApiError(400, "request body is not valid JSON") from error
    if not isinstance(document, dict):
        raise RunpodApiError(422, None, ["$: want object"])
    return document
