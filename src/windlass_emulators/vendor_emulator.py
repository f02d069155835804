"""Request handling that all emulated vendors share.

`handle` serialises requests with a lock and runs each through the same steps: settle the timeline, throttle and
authenticate, apply a scripted fault, route, parse the body, call the endpoint, add the vendor's headers. Starlette
matches the routes. A vendor defines its routes, its error format, its rate limit and its headers.

Requests under `/_emulator/` control the emulator itself: the bill, the clock, the machines, the faults.
"""

import json
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from starlette.datastructures import Headers, QueryParams
from starlette.routing import Match, Route

from windlass_emulators.fault_script import FaultScript
from windlass_emulators.http import ApiCall, Json, Response, VendorApiError, json_response

CONTROL = "/_emulator/"
# Requests kept for tests and reports: more than a day's at any vendor's rate limit.
MAX_REQUESTS = 100_000
# Larger than any valid request: user_data has at most 32 KiB.
MAX_BODY_BYTES = 1024 * 1024


class _Bill(Protocol):
    def to_json(self, now: datetime) -> Json: ...


class VendorState(Protocol):
    """The resources of one customer: a project, an account."""

    now: datetime

    @property
    def ledger(self) -> _Bill: ...

    def advance(self, to: datetime, /) -> None: ...

    def next_due(self) -> datetime | None: ...

    def crash(self, machine: Any, /) -> None: ...


StateT = TypeVar("StateT", bound=VendorState)
FaultsT = TypeVar("FaultsT", bound=FaultScript)


def make_routes(base: str, endpoints: Iterable[tuple[str, str, Callable[..., Response]]]) -> list[Route]:
    """Routes from (methods, path, endpoint); several methods are separated by spaces."""
    routes = []
    for methods, path, endpoint in endpoints:
        route = Route(base + path, endpoint, methods=methods.split())
        # Starlette adds HEAD to every GET. The vendors do not answer it.
        route.methods = set(methods.split())
        routes.append(route)
    return routes


def match_route(routes: Sequence[Route], method: str, path: str) -> tuple[Route | None, Mapping[str, Any], list[str]]:
    """The matching route and its path parameters; without one, the methods that the path allows."""
    allowed: list[str] = []
    for route in routes:
        match, scope = route.matches({"type": "http", "method": method, "path": path, "root_path": ""})
        if match is Match.FULL:
            return route, scope["path_params"], []
        if match is Match.PARTIAL:
            allowed += sorted(route.methods or ())
    return None, {}, allowed


class VendorEmulator(ABC, Generic[StateT, FaultsT]):
    routes: ClassVar[Sequence[Route]]
    # Names of the injectable machine failures: POST /_emulator/machines/ID/NAME calls the method of that name.
    machine_faults: ClassVar[Mapping[str, str]] = {"crash": "crash"}

    def __init__(
        self,
        clock: Callable[[], datetime],
        state: StateT,
        faults: FaultsT,
        machines: Mapping[Any, Any],
        token: str | None,
    ) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._state = state
        self._faults = faults
        # Servers or pods by id.
        self._machines = machines
        self._token = token
        # The latest requests, as (time, method, path).
        self.requests: deque[tuple[datetime, str, str]] = deque(maxlen=MAX_REQUESTS)
        self._control_routes = make_routes(
            CONTROL.rstrip("/"),
            [
                ("GET", "/ledger", lambda _: json_response(200, self.bill())),
                ("GET", "/clock", lambda _: json_response(200, self.clock_json())),
                ("GET", "/machines", lambda _: json_response(200, self._machines_json())),
                ("POST", "/machines/{id}/{fault}", self._inject_machine_fault),
                ("GET", "/faults", lambda _: json_response(200, self._faults.to_json())),
                ("POST", "/faults", self._inject_fault),
                ("DELETE", "/faults", self._clear_faults),
                *self.control_endpoints(),
            ],
        )

    # -------------------------------------------------------------------------------------------------- vendor hooks

    @abstractmethod
    def throttle(self) -> None:
        """Count the request against the rate limit. Raises VendorApiError."""

    @abstractmethod
    def unauthorized(self, *, is_missing: bool) -> VendorApiError: ...

    @abstractmethod
    def parse_body(self, body: bytes) -> Json:
        """Raises VendorApiError if the body is not a JSON object of at most MAX_BODY_BYTES."""

    @abstractmethod
    def no_route(self, method: str, path: str, allowed: Sequence[str]) -> VendorApiError: ...

    @abstractmethod
    def response_headers(self, status: int) -> Mapping[str, str]: ...

    @abstractmethod
    def machine_json(self, machine: Any) -> Json: ...

    def clock_json(self) -> Json:
        return {"now": self._state.now.isoformat()}

    def control_endpoints(self) -> Iterable[tuple[str, str, Callable[[ApiCall], Response]]]:
        """Further endpoints under /_emulator/."""
        return ()

    def admit(self, headers: Headers) -> None:
        self.throttle()
        self.authenticate(headers)

    # ------------------------------------------------------------------------------------------------------- requests

    def handle(
        self, method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str], body: bytes
    ) -> Response:
        with self._lock:
            self.settle()
            call = ApiCall(path, QueryParams(list(query)), Headers(dict(headers)), {}, {})
            if path.startswith(CONTROL):
                return self._handle_control(method, call, body)
            self.requests.append((self._state.now, method, path))
            try:
                response = self._respond(method, call, body)
            except VendorApiError as error:
                response = error.response()
            return replace(response, headers={**self.response_headers(response.status), **response.headers})

    def _respond(self, method: str, call: ApiCall, body: bytes) -> Response:
        self.admit(call.headers)
        fault = self._faults.take(method, call.path)
        if fault is not None and not fault.takes_effect:
            fault.fail()
        route, params, allowed = match_route(self.routes, method, call.path)
        if route is None:
            raise self.no_route(method, call.path, allowed)
        document = {} if method in ("GET", "DELETE") else self.parse_body(body)
        response: Response = route.endpoint(self._state, replace(call, body=document, params=params))
        if fault is not None:
            fault.fail()
        return response

    def authenticate(self, headers: Headers) -> None:
        """Without a configured token, any bearer token is accepted. Raises VendorApiError."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        is_missing = scheme.lower() != "bearer" or not token.strip()
        if is_missing or self._token not in (None, token):
            raise self.unauthorized(is_missing=is_missing)

    # -------------------------------------------------------------------------------------------------------- control

    def _handle_control(self, method: str, call: ApiCall, body: bytes) -> Response:
        """Open to every local process, unless the emulator was started with a token."""
        try:
            if self._token is not None:
                self.authenticate(call.headers)
        except VendorApiError as error:
            return error.response()
        route, params, _ = match_route(self._control_routes, method, call.path)
        if route is None:
            return _refusal(404, f"{method} {call.path} does not exist; see docs/emulators.md")
        try:
            document = json.loads(body or b"{}")
        except ValueError:
            return _refusal(422, "the body is not JSON")
        if not isinstance(document, dict):
            return _refusal(422, "the body is not a JSON object")
        try:
            response: Response = route.endpoint(replace(call, body=document, params=params))
        except LookupError as error:
            return _refusal(404, str(error.args[0]))
        except (TypeError, ValueError) as error:
            return _refusal(422, str(error))
        return response

    def _machines_json(self) -> Json:
        return {"machines": [self.machine_json(each) for each in self._machines.values()]}

    def _inject_machine_fault(self, call: ApiCall) -> Response:
        name = self.machine_faults.get(call.params["fault"])
        machine_id = next((each for each in self._machines if str(each) == call.params["id"]), None)
        if name is None or machine_id is None:
            raise LookupError(f"machine {call.params['id']} or fault {call.params['fault']} not found")
        getattr(self, name)(machine_id)
        return json_response(200, self._machines_json())

    def _inject_fault(self, call: ApiCall) -> Response:
        self._faults.inject(call.body)
        return json_response(200, self._faults.to_json())

    def _clear_faults(self, _: ApiCall) -> Response:
        self._faults.clear()
        return json_response(200, self._faults.to_json())

    # ---------------------------------------------------------------------------------------------------------- state

    @property
    def faults(self) -> FaultsT:
        """Injects faults from now on. Everything that was due before happens first."""
        self.settle()
        return self._faults

    def crash(self, machine_id: int | str) -> None:
        """Kill the processes of a machine. The API still reports it as running, and it is still billed."""
        with self._lock:
            self.settle()
            self._state.crash(self._machines[machine_id])

    def settle(self) -> None:
        with self._lock:
            self._state.advance(self._clock())

    def next_due(self) -> datetime | None:
        with self._lock:
            return self._state.next_due()

    def bill(self) -> Json:
        with self._lock:
            self.settle()
            return self._state.ledger.to_json(self._state.now)


def _refusal(status: int, message: str) -> Response:
    return json_response(status, {"error": message})
