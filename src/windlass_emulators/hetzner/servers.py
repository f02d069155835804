"""/servers: creation with everything that can be refused, power, deletion."""

import hashlib
from dataclasses import dataclass

from windlass_emulators.hetzner import render
from windlass_emulators.hetzner.catalog import Image, Location, ServerType
from windlass_emulators.hetzner.errors import HetznerApiError, limit_exceeded, locked, not_found, not_unique
from windlass_emulators.hetzner.project import Action, Firewall, Network, PrimaryIp, Project, Server
from windlass_emulators.hetzner.request import Filter, HetznerAnswer, HetznerCall, list_of
from windlass_emulators.hetzner.validation import Inputs

# Of boot_s; the rest is `starting`.
_INITIALIZING_SHARE = 0.75


def find(project: Project, id_: int) -> Server:
    server = project.servers.get(id_)
    if server is None:
        raise not_found("server", id_)
    return server


def _unlocked(project: Project, id_: int) -> Server:
    server = find(project, id_)
    if server.is_locked(project.now):
        raise locked("server")
    return server


def list_all(project: Project, call: HetznerCall) -> HetznerAnswer:
    moment = project.list_moment()
    filters = (Filter("name", lambda each: each.name), Filter("status", lambda each: each.status_at(moment)))
    return list_of(
        call,
        "servers",
        project.visible_servers(),
        lambda each: render.server(project, each, moment),
        sorts=("id", "name", "created"),
        filters=filters,
    )


def get(project: Project, call: HetznerCall) -> HetznerAnswer:
    return HetznerAnswer(200, {"server": render.server(project, find(project, call.ids[0]))})


def update(project: Project, call: HetznerCall) -> HetznerAnswer:
    server = find(project, call.ids[0])
    inputs = call.inputs
    name, labels = inputs.hostname(is_required=False), inputs.labels()
    inputs.finish()
    if name and any(each.name == name for each in project.servers.values() if each is not server):
        raise not_unique("server")
    server.name = name or server.name
    server.labels = labels if inputs.has("labels") else server.labels
    return HetznerAnswer(200, {"server": render.server(project, server)})


def delete(project: Project, call: HetznerCall) -> HetznerAnswer:
    server = _unlocked(project, call.ids[0])
    if server.is_delete_protected:
        raise HetznerApiError("protected", "server is protected from deletion")
    action = project.act("delete_server", [("server", server.id)], project.settings.delete_s)
    if action.error is None:
        project.begin_deletion(server)
    return HetznerAnswer(200, {"action": render.action(project, action)})


# ------------------------------------------------------------------------------------------------------- creation


@dataclass(frozen=True, slots=True)
class _ServerOrder:
    """A request for a server that makes sense so far."""

    name: str
    labels: dict[str, str]
    user_data: str
    server_type: ServerType
    location: Location
    image: Image
    networks: list[Network]
    firewalls: list[Firewall]
    # None: a new one, if wanted at all.
    ipv4: PrimaryIp | None
    ipv6: PrimaryIp | None
    wants_ipv4: bool
    wants_ipv6: bool
    has_ssh_keys: bool
    is_started: bool


def create(project: Project, call: HetznerCall) -> HetznerAnswer:
    order = _read_order(project, call.inputs)
    _check_possible(project, order)
    server, actions = _build(project, order)
    return HetznerAnswer(
        201,
        {
            "server": render.server(project, server),
            "action": render.action(project, actions[0]),
            "next_actions": [render.action(project, each) for each in actions[1:]],
            "root_password": None if order.has_ssh_keys else _password(server.id),
        },
    )


def _read_order(project: Project, inputs: Inputs) -> _ServerOrder:
    public = Inputs(inputs.object("public_net"))
    kind = project.catalog.server_type(inputs.id_or_name("server_type", is_required=True))
    if kind is None:
        inputs.refuse("server_type", "server type not found")
    place = _location(project, inputs, kind)
    image = project.catalog.image(inputs.id_or_name("image", is_required=True), kind.architecture if kind else "x86")
    if image is None:
        inputs.refuse("image", "image not found")
    elif kind is not None and image.architecture != kind.architecture:
        inputs.refuse("image", "image architecture does not match that of the server type")
    networks = [project.networks.get(id_) for id_ in inputs.items("networks", int)]
    if None in networks:
        inputs.refuse("networks", "network not found")
    asked = [each.get("firewall") for each in inputs.items("firewalls", dict)]
    firewalls = [project.firewalls.get(id_) for id_ in asked if isinstance(id_, int)]
    if None in firewalls or len(firewalls) < len(asked):
        inputs.refuse("firewalls", "firewall not found")
    keys = inputs.items("ssh_keys", (str, int))
    if any(not _has_ssh_key(project, key) for key in keys):
        inputs.refuse("ssh_keys", "SSH key not found")
    if inputs.items("volumes", int) or inputs.has("placement_group"):
        inputs.refuse("volumes", "the emulator has no volumes and no placement groups")
    name, labels, user_data = inputs.hostname(is_required=True), inputs.labels(), inputs.user_data()
    wants_ipv4, wants_ipv6 = public.flag("enable_ipv4", True), public.flag("enable_ipv6", True)
    if not (wants_ipv4 or wants_ipv6 or networks):
        inputs.refuse("public_net", "a server needs at least one network interface")
    ipv4, ipv6 = public.number("ipv4"), public.number("ipv6")
    is_started = inputs.flag("start_after_create", True)
    inputs.problems.extend((f"public_net.{field}", message) for field, message in public.problems)
    inputs.finish()
    if kind is None or place is None or image is None:
        raise AssertionError("finish() has refused these")
    return _ServerOrder(
        name, labels, user_data, kind, place, image,
        [each for each in networks if each], [each for each in firewalls if each],
        _given_ip(project, ipv4, "ipv4", place), _given_ip(project, ipv6, "ipv6", place),
        wants_ipv4, wants_ipv6, bool(keys), is_started,
    )  # fmt: skip


def _location(project: Project, inputs: Inputs, kind: ServerType | None) -> Location | None:
    """Where it was asked for, or wherever there is one."""
    catalog = project.catalog
    wanted, datacenter = inputs.id_or_name("location"), inputs.id_or_name("datacenter")
    if wanted is not None and datacenter is not None:
        inputs.refuse("location", "give a location or a datacenter, not both")
    if wanted is not None or datacenter is not None:
        found = catalog.location(wanted) if wanted is not None else catalog.datacenter(datacenter)
        if found is None:
            inputs.refuse("location" if wanted is not None else "datacenter", "location not found")
        return found
    if kind is None:
        return None
    places = [each for each in catalog.locations if each.name in kind.rates]
    return next((each for each in places if project.faults.shortage(kind.name, each.name) is None), places[0])


def _has_ssh_key(project: Project, key: str | int) -> bool:
    return any(str(key) in (str(each.id), each.name) for each in project.ssh_keys.values())


def _given_ip(project: Project, id_: int | None, type_: str, place: Location) -> PrimaryIp | None:
    if id_ is None:
        return None
    given = project.primary_ips.get(id_)
    if given is None:
        raise not_found("primary_ip", id_)
    if given.type != type_:
        raise HetznerApiError("primary_ip_version_mismatch", f"primary IP {id_} is no {type_}")
    if given.server_id is not None:
        raise HetznerApiError("primary_ip_assigned", f"primary IP {id_} is already assigned")
    if given.location.name != place.name:
        raise HetznerApiError("primary_ip_datacenter_mismatch", f"primary IP {id_} is in another location")
    return given


def _check_possible(project: Project, order: _ServerOrder) -> None:
    """What is well asked for may still not be had. Raises ApiError."""
    kind, place = order.server_type, order.location
    if render.is_retired(project, kind):
        raise HetznerApiError("invalid_input", f"server type {kind.id} is deprecated", {})
    if place.name not in kind.rates:
        raise HetznerApiError("invalid_input", "unsupported location for server type", {})
    if any(each.name == order.name for each in project.servers.values()):
        raise not_unique("server")
    limit = project.faults.server_limit_override
    if len(project.servers) >= (project.settings.server_limit if limit is None else limit):
        raise limit_exceeded("server_limit")
    if shortage := project.faults.shortage(kind.name, place.name):
        raise HetznerApiError(shortage.code, "error during placement", None)


def _build(project: Project, order: _ServerOrder) -> tuple[Server, list[Action]]:
    settings = project.settings
    server = Server(
        project.new_id(), order.name, order.labels, project.published_now(),
        order.server_type, order.location, order.image, order.user_data, [(project.now, "initializing")],
    )  # fmt: skip
    for network in order.networks:
        # May be refused, so it comes before anything is there.
        project.attach(server, network, None, [])
    project.add_server(server)
    server.ipv4_id = _equip(project, server, order.ipv4, "ipv4") if order.wants_ipv4 else None
    server.ipv6_id = _equip(project, server, order.ipv6, "ipv6") if order.wants_ipv6 else None
    for firewall in order.firewalls:
        firewall.applied_to.append(("server", server.id))
    if trouble := project.faults.take_boot_trouble():
        server.extra_boot_s, server.is_dead = trouble.extra_s, trouble.is_dead
    initializing_s = settings.boot_s * _INITIALIZING_SHARE
    this = ("server", server.id)
    actions = [project.act("create_server", [this], initializing_s)]
    actions += [_attached(project, server, each.id, initializing_s) for each in order.networks]
    is_started = order.is_started
    if is_started:
        actions.append(project.act("start_server", [this], settings.boot_s))
        is_started = actions[-1].error is None
    project.begin(server, initializing_s, settings.boot_s - initializing_s, is_started=is_started)
    return server, actions


def _attached(project: Project, server: Server, network_id: int, takes_s: float) -> Action:
    """The action of a server that has been put into a network; out of which it is again where that fails."""
    action = project.act("attach_to_network", [("server", server.id), ("network", network_id)], takes_s)
    if action.error is not None:
        project.detach(server, network_id)
    return action


def _equip(project: Project, server: Server, given: PrimaryIp | None, type_: str) -> int:
    if given is None:
        given = project.add_primary_ip(
            type_, server.location, is_auto_deleted=True, server_id=server.id, made_with=server.id
        )
    given.server_id = server.id
    return given.id


def _password(server_id: int) -> str:
    """Of no use and no secret: nobody can log in. The same in every run."""
    return hashlib.sha256(f"emulated root password {server_id}".encode()).hexdigest()[:20]


# -------------------------------------------------------------------------------------------------------- actions


def _acted(project: Project, server: Server, command: str, takes_s: float) -> HetznerAnswer:
    action = project.act(command, [("server", server.id)], takes_s)
    return HetznerAnswer(201, {"action": render.action(project, action)})


def poweron(project: Project, call: HetznerCall) -> HetznerAnswer:
    server = _unlocked(project, call.ids[0])
    takes_s = 0.0 if server.status == "running" else project.settings.action_s
    action = project.act("start_server", [("server", server.id)], takes_s)
    if server.status != "running" and action.error is None:
        project.power_on(server, takes_s)
    return HetznerAnswer(201, {"action": render.action(project, action)})


def poweroff(project: Project, call: HetznerCall) -> HetznerAnswer:
    server = _unlocked(project, call.ids[0])
    takes_s = 0.0 if server.status == "off" else project.settings.action_s
    if server.status != "off":
        project.power_off(server, takes_s)
    return _acted(project, server, "stop_server", takes_s)


def shutdown(project: Project, call: HetznerCall) -> HetznerAnswer:
    """The action says only that the server was asked; it is off a moment later."""
    server = _unlocked(project, call.ids[0])
    if server.status != "off":
        project.power_off(server, project.settings.action_s)
    return _acted(project, server, "shutdown_server", 0.0)


def reboot(project: Project, call: HetznerCall) -> HetznerAnswer:
    server = _unlocked(project, call.ids[0])
    project.restart(server, project.settings.action_s, "running")
    return _acted(project, server, "reboot_server", project.settings.action_s)


def reset(project: Project, call: HetznerCall) -> HetznerAnswer:
    server = _unlocked(project, call.ids[0])
    project.restart(server, project.settings.action_s, "running", is_sudden=True)
    return _acted(project, server, "reset_server", project.settings.action_s)


def rebuild(project: Project, call: HetznerCall) -> HetznerAnswer:
    server = _unlocked(project, call.ids[0])
    if server.is_rebuild_protected:
        raise HetznerApiError("protected", "server is protected from being rebuilt")
    inputs = call.inputs
    image = project.catalog.image(inputs.id_or_name("image", is_required=True), server.server_type.architecture)
    if image is None:
        inputs.refuse("image", "image not found")
    user_data = inputs.user_data()
    inputs.finish()
    server.image = image or server.image
    server.user_data = user_data if inputs.has("user_data") else server.user_data
    project.host.erase(server.id)
    project.restart(server, project.settings.boot_s, "rebuilding")
    answer = _acted(project, server, "rebuild_server", project.settings.boot_s)
    return HetznerAnswer(201, {**(answer.body or {}), "root_password": _password(server.id)})


def change_protection(project: Project, call: HetznerCall) -> HetznerAnswer:
    server = _unlocked(project, call.ids[0])
    inputs = call.inputs
    server.is_delete_protected = inputs.flag("delete", server.is_delete_protected)
    server.is_rebuild_protected = inputs.flag("rebuild", server.is_rebuild_protected)
    inputs.finish()
    return _acted(project, server, "change_protection", 0.0)


def attach_to_network(project: Project, call: HetznerCall) -> HetznerAnswer:
    server = _unlocked(project, call.ids[0])
    inputs = call.inputs
    network = project.networks.get(inputs.number("network", is_required=True) or 0)
    if network is None:
        inputs.refuse("network", "network not found")
    ip, alias_ips = inputs.ip("ip"), inputs.items("alias_ips", str)
    inputs.finish()
    if network is None:
        raise AssertionError("finish() has refused this")
    project.attach(server, network, ip, alias_ips)
    action = _attached(project, server, network.id, project.settings.action_s)
    return HetznerAnswer(201, {"action": render.action(project, action)})


def detach_from_network(project: Project, call: HetznerCall) -> HetznerAnswer:
    server = _unlocked(project, call.ids[0])
    inputs = call.inputs
    network_id = inputs.number("network", is_required=True)
    if not any(net.network_id == network_id for net in server.private_nets):
        inputs.refuse("network", "the server is not attached to this network")
    inputs.finish()
    project.detach(server, network_id or 0)
    return _acted(project, server, "detach_from_network", project.settings.action_s)
