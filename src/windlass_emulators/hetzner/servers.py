"""/servers: creation with all published refusals, power actions, deletion."""

import hashlib
from collections import Counter
from typing import Any

from pydantic import Field

from windlass_emulators.hetzner import resource_json
from windlass_emulators.hetzner.catalog import Image, Location, ServerType
from windlass_emulators.hetzner.errors import HetznerApiError, invalid, not_found, not_unique
from windlass_emulators.hetzner.lists import list_response
from windlass_emulators.hetzner.project import Action, Project, Server
from windlass_emulators.hetzner.validation import (
    HetznerBody,
    Hostname,
    IdOrName,
    Labels,
    RequiredHostname,
    UserData,
    parse_hetzner_body,
)
from windlass_emulators.http import ApiCall, Response, json_response

# Share of boot_s in which a server is `initializing`. The rest is `starting`.
_INITIALIZING_SHARE = 0.75


class PublicNet(HetznerBody):
    enable_ipv4: bool = True
    enable_ipv6: bool = True
    ipv4: int | None = None
    ipv6: int | None = None


class FirewallRef(HetznerBody):
    firewall: int


class ServerOrder(HetznerBody):
    name: RequiredHostname
    server_type: IdOrName
    image: IdOrName
    location: IdOrName = None
    datacenter: Any = None
    labels: Labels = Field(default={})
    user_data: UserData = ""
    networks: list[int] = Field(default=[])
    firewalls: list[FirewallRef] = Field(default=[])
    ssh_keys: list[str | int] = Field(default=[])
    volumes: list[int] = Field(default=[])
    placement_group: Any = None
    public_net: PublicNet = PublicNet()
    start_after_create: bool = True


class ServerUpdate(HetznerBody):
    name: Hostname = ""
    labels: Labels = Field(default={})


def _find(project: Project, call: ApiCall) -> Server:
    server = project.servers.get(call.params["id"])
    if server is None:
        raise not_found("server", call.params["id"])
    return server


def _find_unlocked(project: Project, call: ApiCall) -> Server:
    server = _find(project, call)
    if server.is_locked(project.now):
        raise HetznerApiError("locked", "cannot perform operation because server is locked", None)
    return server


def list_servers(project: Project, call: ApiCall) -> Response:
    moment = project.list_moment()
    return list_response(
        call,
        "servers",
        project.visible_servers(),
        lambda each: resource_json.server(project, each, moment),
        sorts=("id", "name", "created"),
        filters={"name": lambda each: each.name, "status": lambda each: each.status_at(moment)},
        has_labels=True,
    )


def get_server(project: Project, call: ApiCall) -> Response:
    return json_response(200, {"server": resource_json.server(project, _find(project, call))})


def update_server(project: Project, call: ApiCall) -> Response:
    server = _find(project, call)
    change = parse_hetzner_body(ServerUpdate, call.body)
    if any(each.name == change.name for each in project.servers.values() if each is not server):
        raise not_unique("server")
    server.name = change.name or server.name
    if "labels" in change.model_fields_set:
        server.labels = change.labels
    return json_response(200, {"server": resource_json.server(project, server)})


def delete_server(project: Project, call: ApiCall) -> Response:
    server = _find_unlocked(project, call)
    action = project.act("delete_server", [("server", server.id)], project.settings.delete_s)
    if action.error is None:
        project.begin_deletion(server)
    return json_response(200, {"action": resource_json.action(project, action)})


# --------------------------------------------------------------------------------------------------------- creation


def create_server(project: Project, call: ApiCall) -> Response:
    order = parse_hetzner_body(ServerOrder, call.body)
    kind, place, image = _look_up(project, order)
    _check_available(project, order, kind, place)
    server, actions = _build(project, order, kind, place, image)
    # No one can log in with it. It is the same in every run.
    password = hashlib.sha256(f"emulated root password {server.id}".encode()).hexdigest()[:20]
    return json_response(
        201,
        {
            "server": resource_json.server(project, server),
            "action": resource_json.action(project, actions[0]),
            "next_actions": [resource_json.action(project, each) for each in actions[1:]],
            "root_password": None if order.ssh_keys else password,
        },
    )


def _look_up(project: Project, order: ServerOrder) -> tuple[ServerType, Location, Image]:
    """Resolve what the order names. Raises HetznerApiError with all names that do not exist."""
    catalog = project.catalog
    violations: list[tuple[str, str]] = []
    kind = catalog.server_type(order.server_type)
    if kind is None:
        violations.append(("server_type", "server type not found"))
    place = None if order.location is None else catalog.location(order.location)
    if order.location is not None and place is None:
        violations.append(("location", "location not found"))
    elif order.location is None and kind is not None:
        # Without a location the vendor chooses one with capacity.
        places = [each for each in catalog.locations if each.name in kind.rates]
        place = next((each for each in places if project.faults.shortage(kind.name, each.name) is None), places[0])
    image = catalog.image(order.image, kind.architecture if kind else "x86")
    if image is None:
        violations.append(("image", "image not found"))
    elif kind is not None and image.architecture != kind.architecture:
        violations.append(("image", "image architecture does not match that of the server type"))
    if any(id_ not in project.networks for id_ in order.networks):
        violations.append(("networks", "network not found"))
    if any(each.firewall not in project.firewalls for each in order.firewalls):
        violations.append(("firewalls", "firewall not found"))
    known_keys = {name for key in project.ssh_keys.values() for name in (str(key.id), key.name)}
    if any(str(key) not in known_keys for key in order.ssh_keys):
        violations.append(("ssh_keys", "SSH key not found"))
    public = order.public_net
    if not (public.enable_ipv4 or public.enable_ipv6 or order.networks):
        violations.append(("public_net", "a server needs at least one network interface"))
    unsupported = {
        "datacenter": order.datacenter is not None,
        "volumes": bool(order.volumes),
        "placement_group": order.placement_group is not None,
        "public_net.ipv4": public.ipv4 is not None,
        "public_net.ipv6": public.ipv6 is not None,
    }
    violations += [(field, "is not supported by the emulator") for field, is_used in unsupported.items() if is_used]
    if violations or kind is None or place is None or image is None:
        raise invalid(violations)
    return kind, place, image


def _check_available(project: Project, order: ServerOrder, kind: ServerType, place: Location) -> None:
    """Raises HetznerApiError for a well-formed order that cannot be fulfilled."""
    if resource_json.is_retired(project, kind):
        raise HetznerApiError("invalid_input", f"server type {kind.id} is deprecated", {})
    if place.name not in kind.rates:
        raise HetznerApiError("invalid_input", "unsupported location for server type", {})
    if any(each.name == order.name for each in project.servers.values()):
        raise not_unique("server")
    _check_limits(project, order, kind)
    if shortage := project.faults.shortage(kind.name, place.name):
        raise HetznerApiError(shortage.code, "error during placement", None)


def _check_limits(project: Project, order: ServerOrder, kind: ServerType) -> None:
    """The project's limits, each of its own kind. The vendor names the kind in the details and in the message."""
    dedicated = sum(
        each.server_type.cores for each in project.servers.values() if each.server_type.cpu_type == "dedicated"
    )
    wanted_cores = kind.cores if kind.cpu_type == "dedicated" else 0
    wanted_ips = order.public_net.enable_ipv4 + order.public_net.enable_ipv6
    attached = Counter(net.network_id for each in project.servers.values() for net in each.private_nets)
    used = {
        "server_limit": (len(project.servers) + 1, "server limit exceeded"),
        "dedicated_core_limit": (dedicated + wanted_cores if wanted_cores else 0, "dedicated core limit exceeded"),
        "primary_ip_limit": (
            len(project.primary_ips) + wanted_ips if wanted_ips else 0,
            "Primary IP limit exceeded",
        ),
        "network_limit": (
            max((attached[each] + 1 for each in order.networks), default=0),
            "limit of servers attached to a network exceeded",
        ),
    }
    for name, (needed, message) in used.items():
        limit = project.faults.limits.get(name, getattr(project.settings, name))
        if needed > limit:
            raise HetznerApiError("resource_limit_exceeded", message, {"limits": [{"name": name}]})


def _build(
    project: Project, order: ServerOrder, kind: ServerType, place: Location, image: Image
) -> tuple[Server, list[Action]]:
    settings = project.settings
    server = Server(
        project.new_id(), order.name, order.labels, project.published_now(), kind, place, image, order.user_data,
        [(project.now, "initializing")],
    )  # fmt: skip
    for network_id in order.networks:
        # May be refused, so it comes before anything is created.
        project.attach(server, project.networks[network_id])
    project.add_server(server)
    if order.public_net.enable_ipv4:
        server.ipv4_id = project.add_primary_ip("ipv4", place, is_auto_deleted=True, server=server).id
    if order.public_net.enable_ipv6:
        server.ipv6_id = project.add_primary_ip("ipv6", place, is_auto_deleted=True, server=server).id
    for each in order.firewalls:
        project.firewalls[each.firewall].server_ids.append(server.id)
    fault = project.faults.take_boot_fault()
    server.extra_boot_s, server.is_dead = fault.extra_s, fault.is_dead
    initializing_s = settings.boot_s * _INITIALIZING_SHARE
    this = ("server", server.id)
    actions = [project.act("create_server", [this], initializing_s)]
    for network_id in order.networks:
        actions.append(project.act("attach_to_network", [this, ("network", network_id)], initializing_s))
        if actions[-1].error is not None:
            project.detach(server, network_id)
    is_started = order.start_after_create
    if is_started:
        actions.append(project.act("start_server", [this], settings.boot_s))
        is_started = actions[-1].error is None
    project.begin(server, initializing_s, settings.boot_s - initializing_s, is_started=is_started)
    return server, actions


# ---------------------------------------------------------------------------------------------------- power actions


def _respond_with_action(project: Project, server: Server, command: str, takes_s: float) -> Response:
    action = project.act(command, [("server", server.id)], takes_s)
    return json_response(201, {"action": resource_json.action(project, action)})


def power_on(project: Project, call: ApiCall) -> Response:
    server = _find_unlocked(project, call)
    takes_s = 0.0 if server.status == "running" else project.settings.action_s
    action = project.act("start_server", [("server", server.id)], takes_s)
    if server.status != "running" and action.error is None:
        project.power_on(server, takes_s)
    return json_response(201, {"action": resource_json.action(project, action)})


def power_off(project: Project, call: ApiCall) -> Response:
    server = _find_unlocked(project, call)
    takes_s = 0.0 if server.status == "off" else project.settings.action_s
    if server.status != "off":
        project.power_off(server, takes_s)
    return _respond_with_action(project, server, "stop_server", takes_s)


def shut_down(project: Project, call: ApiCall) -> Response:
    """The action ends when the server received the signal; the server is off `action_s` later."""
    server = _find_unlocked(project, call)
    if server.status != "off":
        project.power_off(server, project.settings.action_s)
    return _respond_with_action(project, server, "shutdown_server", 0.0)


def reboot(project: Project, call: ApiCall) -> Response:
    server = _find_unlocked(project, call)
    project.restart(server, project.settings.action_s)
    return _respond_with_action(project, server, "reboot_server", project.settings.action_s)


def reset(project: Project, call: ApiCall) -> Response:
    server = _find_unlocked(project, call)
    project.restart(server, project.settings.action_s, is_sudden=True)
    return _respond_with_action(project, server, "reset_server", project.settings.action_s)
