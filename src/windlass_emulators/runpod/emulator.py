"""The emulated Runpod REST API v2: its routes, authentication, rate limits and headers.

State lives in memory and ends with the emulator. The bill (`ledger`) uses none of Windlass's own arithmetic.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import format_datetime

from starlette.datastructures import Headers

from windlass_emulators.http import ApiCall, Json, Response, json_response
from windlass_emulators.runpod import gpu_types, pods, templates, volumes
from windlass_emulators.runpod.account import EmulatedPod, EmulatedRunpodAccount
from windlass_emulators.runpod.catalog import DEFAULT_CATALOG, RunpodCatalog
from windlass_emulators.runpod.containers import PodHost, VirtualPodHost
from windlass_emulators.runpod.errors import RunpodApiError, unsupported
from windlass_emulators.runpod.faults import RunpodFaults
from windlass_emulators.runpod.ledger import RunpodBill
from windlass_emulators.runpod.settings import RunpodEmulatorSettings
from windlass_emulators.throttle import Window
from windlass_emulators.vendor_emulator import MAX_BODY_BYTES, VendorEmulator, make_routes

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400


def _refuse_unsupported(_: EmulatedRunpodAccount, call: ApiCall) -> Response:
    raise unsupported(call.path)


ROUTES = make_routes(
    "/v2",
    [
        ("GET", "/pods", pods.list_pods),
        ("POST", "/pods", pods.create_pod),
        ("GET", "/pods/{id}", pods.get_pod),
        ("DELETE", "/pods/{id}", pods.delete_pod),
        ("POST", "/pods/{id}/action", pods.act_on_pod),
        ("GET", "/pods/{id}/logs", pods.stream_logs),
        ("GET", "/network-volumes", volumes.list_volumes),
        ("POST", "/network-volumes", volumes.create_volume),
        ("GET", "/network-volumes/{id}", volumes.get_volume),
        ("PATCH", "/network-volumes/{id}", volumes.update_volume),
        ("DELETE", "/network-volumes/{id}", volumes.delete_volume),
        ("GET", "/catalog/gpus", gpu_types.list_gpus),
        ("GET", "/catalog/gpus/{id}", gpu_types.get_gpu),
        ("POST", "/templates", templates.create_template),
        ("POST", "/registries", templates.create_registry),
        ("GET", "/registries/{id}", templates.get_registry),
        # Published operations that are not emulated.
        ("PATCH", "/pods/{id}", _refuse_unsupported),
        ("GET", "/templates", _refuse_unsupported),
        ("GET PATCH DELETE", "/templates/{id}", _refuse_unsupported),
        ("GET", "/registries", _refuse_unsupported),
        ("DELETE", "/registries/{id}", _refuse_unsupported),
        *(
            ("GET POST PUT PATCH DELETE", path, _refuse_unsupported)
            for path in (
                "/account/ssh-keys", "/billing", "/billing/{rest:path}", "/catalog/cpus", "/catalog/cpus/{id}",
                "/catalog/datacenters", "/catalog/datacenters/{id}", "/catalog/templates", "/clusters",
                "/clusters/{rest:path}", "/serverless", "/serverless/{rest:path}",
            )
        ),
    ],
)  # fmt: skip


class RunpodEmulator(VendorEmulator[EmulatedRunpodAccount, RunpodFaults]):
    routes = ROUTES
    machine_faults = {"crash": "crash", "lose-gpus": "lose_gpus"}  # noqa: RUF012 - declared as a ClassVar in the base

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
        super().__init__(clock, self.account, faults, self.account.pods, self.settings.key)
        self._windows = [
            Window("minute", self.settings.requests_per_minute, MINUTE_S),
            Window("hour", self.settings.requests_per_hour, HOUR_S),
            Window("day", self.settings.requests_per_day, DAY_S),
        ]

    @property
    def ledger(self) -> RunpodBill:
        return self.account.ledger

    # -------------------------------------------------------------------------------------------------- machine faults

    def lose_gpus(self, pod_id: str) -> None:
        """Remove the GPUs of a running pod."""
        with self._lock:
            self.settle()
            self.account.lose_gpus(self.account.pods[pod_id])

    def fill_volume(self, volume_id: str, used_gb: float) -> None:
        """Set the used space of a network volume, as its pods measure it."""
        with self._lock:
            self.settle()
            self.account.fill_volume(self.account.volumes[volume_id], used_gb)

    # ---------------------------------------------------------------------------------------------------- vendor hooks

    def admit(self, headers: Headers) -> None:
        self.authenticate(headers)
        self.throttle()

    def unauthorized(self, *, is_missing: bool) -> RunpodApiError:
        return RunpodApiError(401, None if is_missing else "invalid bearer token")

    def throttle(self) -> None:
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

    def parse_body(self, body: bytes) -> Json:
        if len(body) > MAX_BODY_BYTES:
            raise RunpodApiError(413)
        try:
            document = json.loads(body or b"")
        except ValueError as error:
            raise RunpodApiError(400, "request body is not valid JSON") from error
        if not isinstance(document, dict):
            raise RunpodApiError(422, None, ["$: want object"])
        return document

    def no_route(self, method: str, path: str, allowed: Sequence[str]) -> RunpodApiError:  # noqa: ARG002
        return RunpodApiError(405, headers={"Allow": ", ".join(allowed)}) if allowed else RunpodApiError(404)

    def response_headers(self, status: int) -> Mapping[str, str]:
        now = self.account.now
        headers = {"Date": format_datetime(now.astimezone(UTC), usegmt=True)}
        if status != 401:
            left = (f'"{each.name}";r={each.remaining(now)};t={each.resets_in_s(now)}' for each in self._windows)
            policy = (f'"{each.name}";q={each.quota};w={each.length_s}' for each in self._windows)
            headers |= {"RateLimit": ", ".join(left), "RateLimit-Policy": ", ".join(policy)}
        return headers

    def machine_json(self, machine: EmulatedPod) -> Json:
        return {
            "pod_id": machine.id,
            "name": machine.name,
            "status": machine.status,
            "is_running": self.host.is_running(machine.id),
        }

    def control_endpoints(self) -> Iterable[tuple[str, str, Callable[[ApiCall], Response]]]:
        return [("POST", "/volumes/{id}/fill", self._fill_volume)]

    def _fill_volume(self, call: ApiCall) -> Response:
        volume_id = call.params["id"]
        if volume_id not in self.account.volumes:
            raise LookupError(f"network volume {volume_id} not found")
        if not isinstance(call.body.get("used_gb"), int | float):
            raise TypeError('give the used space, as in {"used_gb": 95}')
        self.fill_volume(volume_id, float(call.body["used_gb"]))
        return json_response(200, {"id": volume_id, "used_gb": self.account.volumes[volume_id].used_gb})
