"""Which endpoint answers which request."""

import re
from collections.abc import Callable, Iterator

from windlass_emulators.hetzner import catalog_routes as offers
from windlass_emulators.hetzner import networks_firewalls_keys as surroundings
from windlass_emulators.hetzner import primary_ips, servers
from windlass_emulators.hetzner.errors import HetznerApiError
from windlass_emulators.hetzner.project import Project
from windlass_emulators.hetzner.request import HetznerAnswer, HetznerCall
from windlass_emulators.hetzner.validation import unsupported

Endpoint = Callable[[Project, HetznerCall], HetznerAnswer]
BASE = "/v1"


def _resource(root: str, kind: str, endpoints: dict[str, Endpoint]) -> Iterator[tuple[str, str, Endpoint]]:
    """Its own endpoints, and the actions that everything has. Longer names of an action come as "POST name"."""
    for name, endpoint in endpoints.items():
        method, _, action = name.partition(" ")
        if action:
            yield method, f"/{root}/N/actions/{action}", endpoint
        else:
            yield {"LIST": "GET", "CREATE": "POST"}.get(method, method), _place(root, method), endpoint
    yield "GET", f"/{root}/actions", offers.list_actions_of(kind)
    yield "GET", f"/{root}/actions/N", offers.get_action
    yield "GET", f"/{root}/N/actions", offers.list_actions_of(kind)
    yield "GET", f"/{root}/N/actions/N", offers.get_action


def _place(root: str, method: str) -> str:
    return f"/{root}" if method in ("LIST", "CREATE") else f"/{root}/N"


_SERVERS: dict[str, Endpoint] = {
    "LIST": servers.list_all,
    "CREATE": servers.create,
    "GET": servers.get,
    "PUT": servers.update,
    "DELETE": servers.delete,
    "POST poweron": servers.poweron,
    "POST poweroff": servers.poweroff,
    "POST shutdown": servers.shutdown,
    "POST reboot": servers.reboot,
    "POST reset": servers.reset,
    "POST rebuild": servers.rebuild,
    "POST change_protection": servers.change_protection,
    "POST attach_to_network": servers.attach_to_network,
    "POST detach_from_network": servers.detach_from_network,
}
_PRIMARY_IPS: dict[str, Endpoint] = {
    "LIST": primary_ips.list_all,
    "CREATE": primary_ips.create,
    "GET": primary_ips.get,
    "PUT": primary_ips.update,
    "DELETE": primary_ips.delete,
    "POST assign": primary_ips.assign,
    "POST unassign": primary_ips.unassign,
    "POST change_protection": primary_ips.change_protection,
}
_NETWORKS: dict[str, Endpoint] = {
    "LIST": surroundings.list_networks,
    "CREATE": surroundings.create_network,
    "GET": surroundings.get_network,
    "PUT": surroundings.update_network,
    "DELETE": surroundings.delete_network,
    "POST add_subnet": surroundings.add_subnet,
    "POST delete_subnet": surroundings.delete_subnet,
    "POST change_protection": surroundings.change_network_protection,
}
_FIREWALLS: dict[str, Endpoint] = {
    "LIST": surroundings.list_firewalls,
    "CREATE": surroundings.create_firewall,
    "GET": surroundings.get_firewall,
    "PUT": surroundings.update_firewall,
    "DELETE": surroundings.delete_firewall,
    "POST set_rules": surroundings.set_rules,
    "POST apply_to_resources": surroundings.apply_to_resources,
    "POST remove_from_resources": surroundings.remove_from_resources,
}
_SSH_KEYS: dict[str, Endpoint] = {
    "LIST": surroundings.list_ssh_keys,
    "CREATE": surroundings.create_ssh_key,
    "GET": surroundings.get_ssh_key,
    "PUT": surroundings.update_ssh_key,
    "DELETE": surroundings.delete_ssh_key,
}


def _all() -> Iterator[tuple[str, str, Endpoint]]:
    yield from _resource("servers", "server", _SERVERS)
    yield from _resource("primary_ips", "primary_ip", _PRIMARY_IPS)
    yield from _resource("networks", "network", _NETWORKS)
    yield from _resource("firewalls", "firewall", _FIREWALLS)
    for method, place, endpoint in _resource("ssh_keys", "ssh_key", _SSH_KEYS):
        if "/actions" not in place:
            yield method, place, endpoint
    yield "GET", "/actions", offers.list_actions_by_id
    yield "GET", "/actions/N", offers.get_action
    yield "GET", "/server_types", offers.list_server_types
    yield "GET", "/server_types/N", offers.get_server_type
    yield "GET", "/locations", offers.list_locations
    yield "GET", "/locations/N", offers.get_location
    yield "GET", "/datacenters", offers.list_datacenters
    yield "GET", "/datacenters/N", offers.get_datacenter
    yield "GET", "/images", offers.list_images
    yield "GET", "/images/N", offers.get_image
    yield "GET", "/pricing", offers.get_pricing
    for root in offers.EMPTY:
        yield "GET", f"/{root}", offers.list_nothing(root)
        yield "GET", f"/{root}/N", offers.get_nothing(root)


_ROUTES: dict[str, dict[str, Endpoint]] = {}
for _method, _where, _endpoint in _all():
    _ROUTES.setdefault(BASE + _where, {})[_method] = _endpoint

_NUMBER = re.compile(r"(?<=/)\d{1,19}(?=/|$)")
_KNOWN_ROOTS = {place.split("/")[2] for place in _ROUTES}


def route(method: str, path: str) -> tuple[Endpoint, tuple[int, ...]]:
    """Who answers, and the numbers in the path. Raises ApiError."""
    ids = tuple(int(number) for number in _NUMBER.findall(path))
    endpoints = _ROUTES.get(_NUMBER.sub("N", path))
    if endpoints and method in endpoints:
        return endpoints[method], ids
    root = path.removeprefix(f"{BASE}/").partition("/")[0]
    if root in _KNOWN_ROOTS and method != "GET" and (root in offers.EMPTY or "/actions/" in path):
        raise unsupported(f"{method} {path}")
    if endpoints:
        raise HetznerApiError("method_not_allowed", f"{method} is not allowed here", {})
    raise HetznerApiError("not_found", "page not found", {})
