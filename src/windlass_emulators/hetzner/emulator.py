"""The emulated Hetzner Cloud API: its routes, authentication, rate limit and headers.

State lives in memory and ends with the emulator. The bill (`ledger`) uses none of Windlass's own arithmetic.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from windlass_emulators.hetzner import catalog_routes, network_resources, primary_ips, servers
from windlass_emulators.hetzner.catalog import DEFAULT_CATALOG, HetznerCatalog
from windlass_emulators.hetzner.errors import HetznerApiError, unsupported
from windlass_emulators.hetzner.faults import HetznerFaults
from windlass_emulators.hetzner.ledger import HetznerBill
from windlass_emulators.hetzner.project import Project, Server
from windlass_emulators.hetzner.settings import HetznerEmulatorSettings
from windlass_emulators.http import ApiCall, Json, Response
from windlass_emulators.machines import MachineHost, VirtualHost
from windlass_emulators.throttle import Bucket
from windlass_emulators.vendor_emulator import MAX_BODY_BYTES, VendorEmulator, make_routes

HOUR_S = 3600.0


def _refuse_unsupported(_: Project, call: ApiCall) -> Response:
    raise unsupported(call.path)


def _refuse_datacenters(_: Project, __: ApiCall) -> Response:
    raise HetznerApiError("deprecated_api_endpoint", "API functionality was removed: use locations", {})


ROUTES = make_routes(
    "/v1",
    [
        ("GET", "/servers", servers.list_servers),
        ("POST", "/servers", servers.create_server),
        ("GET", "/servers/actions", catalog_routes.list_actions_of("server")),
        ("GET", "/servers/actions/{action_id:int}", catalog_routes.get_action),
        ("GET", "/servers/{id:int}", servers.get_server),
        ("PUT", "/servers/{id:int}", servers.update_server),
        ("DELETE", "/servers/{id:int}", servers.delete_server),
        ("GET", "/servers/{id:int}/actions", catalog_routes.list_actions_of("server")),
        ("GET", "/servers/{id:int}/actions/{action_id:int}", catalog_routes.get_action),
        ("POST", "/servers/{id:int}/actions/poweron", servers.power_on),
        ("POST", "/servers/{id:int}/actions/poweroff", servers.power_off),
        ("POST", "/servers/{id:int}/actions/shutdown", servers.shut_down),
        ("POST", "/servers/{id:int}/actions/reboot", servers.reboot),
        ("POST", "/servers/{id:int}/actions/reset", servers.reset),
        ("GET", "/primary_ips", primary_ips.list_primary_ips),
        ("GET", "/primary_ips/{id:int}", primary_ips.get_primary_ip),
        ("PUT", "/primary_ips/{id:int}", primary_ips.update_primary_ip),
        ("DELETE", "/primary_ips/{id:int}", primary_ips.delete_primary_ip),
        ("GET", "/actions", catalog_routes.list_actions_by_id),
        ("GET", "/actions/{action_id:int}", catalog_routes.get_action),
        ("GET", "/server_types", catalog_routes.list_server_types),
        ("GET", "/server_types/{id:int}", catalog_routes.get_server_type),
        ("GET", "/locations", catalog_routes.list_locations),
        ("GET", "/locations/{id:int}", catalog_routes.get_location),
        ("GET", "/images", catalog_routes.list_images),
        ("GET", "/images/{id:int}", catalog_routes.get_image),
        ("GET", "/pricing", catalog_routes.get_pricing),
        ("GET", "/networks", network_resources.list_networks),
        ("POST", "/networks", network_resources.create_network),
        ("GET", "/networks/{id:int}", network_resources.get_network),
        ("GET", "/firewalls", network_resources.list_firewalls),
        ("POST", "/firewalls", network_resources.create_firewall),
        ("GET", "/firewalls/{id:int}", network_resources.get_firewall),
        ("GET", "/ssh_keys", network_resources.list_ssh_keys),
        ("POST", "/ssh_keys", network_resources.create_ssh_key),
        ("GET", "/ssh_keys/{id:int}", network_resources.get_ssh_key),
        ("GET", "/datacenters", _refuse_datacenters),
        ("GET", "/datacenters/{id:int}", _refuse_datacenters),
        # Published operations that are not emulated.
        ("GET", "/servers/{id:int}/metrics", _refuse_unsupported),
        ("POST", "/primary_ips", _refuse_unsupported),
        *(
            ("PUT DELETE", f"/{root}/{{id:int}}", _refuse_unsupported)
            for root in ("images", "networks", "firewalls", "ssh_keys")
        ),
        *(
            ("GET POST", f"/{root}/{{id:int}}/actions/{{action}}", _refuse_unsupported)
            for root in ("servers", "primary_ips", "networks", "firewalls", "images")
        ),
        *(
            ("GET POST PUT DELETE", f"/{root}{rest}", _refuse_unsupported)
            for root in (
                "certificates", "floating_ips", "isos", "load_balancers", "load_balancer_types", "placement_groups",
                "volumes", "zones",
            )
            for rest in ("", "/{rest:path}")
        ),
    ],
)  # fmt: skip


class HetznerEmulator(VendorEmulator[Project, HetznerFaults]):
    routes = ROUTES

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
        super().__init__(clock, self.project, faults, self.project.servers, self.settings.token)
        self._bucket = Bucket(self.settings.requests_per_hour, HOUR_S)

    @property
    def ledger(self) -> HetznerBill:
        return self.project.ledger

    def throttle(self) -> None:
        if self._faults.wants_drained_bucket:
            self._faults.wants_drained_bucket = False
            self._bucket.drain(self.project.now)
        if not self._bucket.take(self.project.now):
            raise HetznerApiError("rate_limit_exceeded", "limit of requests per hour reached", None)

    def unauthorized(self, *, is_missing: bool) -> HetznerApiError:  # noqa: ARG002 - Hetzner does not tell which
        return HetznerApiError("unauthorized", "unable to authenticate", {})

    def parse_body(self, body: bytes) -> Json:
        if not body.strip():
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

    def no_route(self, method: str, path: str, allowed: Sequence[str]) -> HetznerApiError:  # noqa: ARG002
        if allowed:
            return HetznerApiError("method_not_allowed", f"{method} is not allowed here", {})
        return HetznerApiError("not_found", "page not found", {})

    def response_headers(self, status: int) -> Mapping[str, str]:  # noqa: ARG002 - on every response
        now = self.project.now
        return {
            "RateLimit-Limit": str(self._bucket.capacity),
            "RateLimit-Remaining": str(self._bucket.remaining(now)),
            "RateLimit-Reset": str(int(self._bucket.full_at(now).timestamp())),
        }

    def clock_json(self) -> Json:
        return {**super().clock_json(), "billing_hour_s": self.settings.billing_hour_s}

    def machine_json(self, machine: Server) -> Json:
        return {
            "server_id": machine.id,
            "name": machine.name,
            "status": machine.status,
            "is_running": self.host.is_running(machine.id),
        }
