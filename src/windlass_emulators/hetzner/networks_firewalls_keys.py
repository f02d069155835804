"""/networks, /firewalls, /ssh_keys: what a project prepares once and its servers then use."""

import base64
import binascii
import hashlib
import ipaddress
import itertools

from windlass_emulators.hetzner import render
from windlass_emulators.hetzner.errors import HetznerApiError, invalid, not_found, not_unique
from windlass_emulators.hetzner.project import Action, Firewall, Network, Project, SshKey
from windlass_emulators.hetzner.request import Filter, HetznerAnswer, HetznerCall, list_of
from windlass_emulators.hetzner.selectors import parse_selector
from windlass_emulators.hetzner.validation import Inputs
from windlass_emulators.http import Json

_BY_NAME = Filter("name", lambda each: each.name)
_SORTS = ("id", "name", "created")
_SUBNET_TYPES = ("cloud", "server", "vswitch")
MAX_RULES = 50

# ------------------------------------------------------------------------------------------------------- networks


def find_network(project: Project, id_: int) -> Network:
    network = project.networks.get(id_)
    if network is None:
        raise not_found("network", id_)
    return network


def list_networks(project: Project, call: HetznerCall) -> HetznerAnswer:
    items = project.networks.values()
    return list_of(
        call, "networks", items, lambda each: render.network(project, each), sorts=_SORTS, filters=(_BY_NAME,)
    )


def get_network(project: Project, call: HetznerCall) -> HetznerAnswer:
    return HetznerAnswer(200, {"network": render.network(project, find_network(project, call.ids[0]))})


def create_network(project: Project, call: HetznerCall) -> HetznerAnswer:
    inputs = call.inputs
    name, labels = inputs.name(is_required=True), inputs.labels()
    ip_range = inputs.ip_range("ip_range", is_required=True)
    exposes_routes = inputs.flag("expose_routes_to_vswitch", False)
    subnets, routes = inputs.items("subnets", dict), inputs.items("routes", dict)
    inputs.finish()
    if any(each.name == name for each in project.networks.values()):
        raise not_unique("network")
    network = Network(project.new_id(), name, labels, project.published_now(), ip_range, [], [], exposes_routes)
    for subnet in subnets:
        network.subnets.append(_subnet(network, Inputs(subnet)))
    for route in routes:
        network.routes.append(_route(Inputs(route)))
    project.networks[network.id] = network
    return HetznerAnswer(201, {"network": render.network(project, network)})


def update_network(project: Project, call: HetznerCall) -> HetznerAnswer:
    network = find_network(project, call.ids[0])
    inputs = call.inputs
    name, labels = inputs.name(is_required=False), inputs.labels()
    exposes_routes = inputs.flag("expose_routes_to_vswitch", network.exposes_routes)
    inputs.finish()
    if name and any(each.name == name for each in project.networks.values() if each is not network):
        raise not_unique("network")
    network.name, network.exposes_routes = name or network.name, exposes_routes
    network.labels = labels if inputs.has("labels") else network.labels
    return HetznerAnswer(200, {"network": render.network(project, network)})


def delete_network(project: Project, call: HetznerCall) -> HetznerAnswer:
    network = find_network(project, call.ids[0])
    if network.is_delete_protected:
        raise HetznerApiError("protected", "network is protected from deletion")
    for server in project.servers.values():
        server.private_nets = [net for net in server.private_nets if net.network_id != network.id]
    del project.networks[network.id]
    return HetznerAnswer(204, None)


def add_subnet(project: Project, call: HetznerCall) -> HetznerAnswer:
    network = find_network(project, call.ids[0])
    network.subnets.append(_subnet(network, call.inputs))
    return _acted(project, network, "add_subnet")


def delete_subnet(project: Project, call: HetznerCall) -> HetznerAnswer:
    network = find_network(project, call.ids[0])
    inputs = call.inputs
    ip_range = inputs.ip_range("ip_range", is_required=True)
    if not any(each["ip_range"] == ip_range for each in network.subnets):
        inputs.refuse("ip_range", "there is no such subnet")
    inputs.finish()
    network.subnets = [each for each in network.subnets if each["ip_range"] != ip_range]
    return _acted(project, network, "delete_subnet")


def change_network_protection(project: Project, call: HetznerCall) -> HetznerAnswer:
    network = find_network(project, call.ids[0])
    inputs = call.inputs
    network.is_delete_protected = inputs.flag("delete", network.is_delete_protected)
    inputs.finish()
    return _acted(project, network, "change_protection")


def _subnet(network: Network, inputs: Inputs) -> Json:
    """Raises ApiError."""
    kind = inputs.text("type", is_required=True, choices=_SUBNET_TYPES)
    zone = inputs.text("network_zone", is_required=True)
    ip_range = inputs.ip_range("ip_range", is_required=False)
    inputs.finish()
    whole = ipaddress.IPv4Network(network.ip_range)
    taken = [ipaddress.IPv4Network(each["ip_range"]) for each in network.subnets]
    if ip_range:
        wanted = ipaddress.IPv4Network(ip_range)
        if not wanted.subnet_of(whole) or any(wanted.overlaps(each) for each in taken):
            raise invalid([("ip_range", "must be within the network and overlap with no other subnet")])
    else:
        # As published: the first available /24.
        parts = whole.subnets(new_prefix=24) if whole.prefixlen <= 24 else iter([whole])
        wanted = next((each for each in parts if not any(each.overlaps(other) for other in taken)), whole)
    gateway = str(next(itertools.islice(whole.hosts(), 0, None)))
    return {"type": kind, "ip_range": str(wanted), "network_zone": zone, "gateway": gateway, "vswitch_id": None}


def _route(inputs: Inputs) -> Json:
    destination = inputs.ip_range("destination", is_required=True)
    gateway = inputs.ip("gateway")
    inputs.finish()
    return {"destination": destination, "gateway": gateway or ""}


def _acted(project: Project, network: Network, command: str) -> HetznerAnswer:
    action = project.act(command, [("network", network.id)], project.settings.action_s)
    return HetznerAnswer(201, {"action": render.action(project, action)})


# ------------------------------------------------------------------------------------------------------ firewalls


def find_firewall(project: Project, id_: int) -> Firewall:
    firewall = project.firewalls.get(id_)
    if firewall is None:
        raise not_found("firewall", id_)
    return firewall


def list_firewalls(project: Project, call: HetznerCall) -> HetznerAnswer:
    items = project.firewalls.values()
    return list_of(
        call, "firewalls", items, lambda each: render.firewall(project, each), sorts=_SORTS, filters=(_BY_NAME,)
    )


def get_firewall(project: Project, call: HetznerCall) -> HetznerAnswer:
    return HetznerAnswer(200, {"firewall": render.firewall(project, find_firewall(project, call.ids[0]))})


def create_firewall(project: Project, call: HetznerCall) -> HetznerAnswer:
    inputs = call.inputs
    name, labels, rules = inputs.name(is_required=True), inputs.labels(), _rules(inputs)
    targets = _targets(project, inputs, "apply_to")
    inputs.finish()
    if any(each.name == name for each in project.firewalls.values()):
        raise not_unique("firewall")
    firewall = Firewall(project.new_id(), name, labels, project.published_now(), rules, targets)
    project.firewalls[firewall.id] = firewall
    actions = [_on_firewall(project, firewall, "set_firewall_rules")]
    actions += [_applied(project, firewall, target) for target in targets]
    return HetznerAnswer(201, {"firewall": render.firewall(project, firewall), "actions": _shown(project, actions)})


def update_firewall(project: Project, call: HetznerCall) -> HetznerAnswer:
    firewall = find_firewall(project, call.ids[0])
    inputs = call.inputs
    name, labels = inputs.name(is_required=False), inputs.labels()
    inputs.finish()
    if name and any(each.name == name for each in project.firewalls.values() if each is not firewall):
        raise not_unique("firewall")
    firewall.name = name or firewall.name
    firewall.labels = labels if inputs.has("labels") else firewall.labels
    return HetznerAnswer(200, {"firewall": render.firewall(project, firewall)})


def delete_firewall(project: Project, call: HetznerCall) -> HetznerAnswer:
    firewall = find_firewall(project, call.ids[0])
    if firewall.applied_to:
        raise HetznerApiError("resource_in_use", "firewall is still in use")
    del project.firewalls[firewall.id]
    return HetznerAnswer(204, None)


def set_rules(project: Project, call: HetznerCall) -> HetznerAnswer:
    firewall = find_firewall(project, call.ids[0])
    inputs = call.inputs
    rules = _rules(inputs)
    inputs.finish()
    firewall.rules = rules
    return HetznerAnswer(201, {"actions": _shown(project, [_on_firewall(project, firewall, "set_firewall_rules")])})


def apply_to_resources(project: Project, call: HetznerCall) -> HetznerAnswer:
    firewall = find_firewall(project, call.ids[0])
    inputs = call.inputs
    targets = _targets(project, inputs, "apply_to")
    inputs.finish()
    new = [target for target in targets if target not in firewall.applied_to]
    firewall.applied_to.extend(new)
    return HetznerAnswer(201, {"actions": _shown(project, [_applied(project, firewall, target) for target in new])})


def remove_from_resources(project: Project, call: HetznerCall) -> HetznerAnswer:
    firewall = find_firewall(project, call.ids[0])
    inputs = call.inputs
    targets = _targets(project, inputs, "remove_from")
    inputs.finish()
    firewall.applied_to = [target for target in firewall.applied_to if target not in targets]
    return HetznerAnswer(201, {"actions": _shown(project, [_on_firewall(project, firewall, "remove_firewall")])})


def _rules(inputs: Inputs) -> list[Json]:
    rules = inputs.items("rules", dict)
    if len(rules) > MAX_RULES:
        inputs.refuse("rules", f"are more than {MAX_RULES}")
    for rule in rules:
        if rule.get("direction") not in ("in", "out") or rule.get("protocol") not in (
            "tcp",
            "udp",
            "icmp",
            "esp",
            "gre",
        ):
            inputs.refuse("rules", "need a direction and a protocol")
        elif rule["protocol"] in ("tcp", "udp") and not rule.get("port"):
            inputs.refuse("rules", "need a port for tcp and udp")
    return [
        {
            "description": rule.get("description"),
            "direction": rule.get("direction"),
            "source_ips": rule.get("source_ips") or [],
            "destination_ips": rule.get("destination_ips") or [],
            "protocol": rule.get("protocol"),
            "port": rule.get("port"),
        }
        for rule in rules
    ]


def _targets(project: Project, inputs: Inputs, field: str) -> list[tuple[str, int | str]]:
    targets: list[tuple[str, int | str]] = []
    for entry in inputs.items(field, dict):
        server, selector = entry.get("server"), entry.get("label_selector")
        if entry.get("type") == "server" and isinstance(server, dict) and server.get("id") in project.servers:
            targets.append(("server", server["id"]))
        elif entry.get("type") == "label_selector" and isinstance(selector, dict) and selector.get("selector"):
            parse_selector(selector["selector"])
            targets.append(("label_selector", selector["selector"]))
        else:
            inputs.refuse(field, "names something that is not there")
    return targets


def _on_firewall(project: Project, firewall: Firewall, command: str) -> Action:
    return project.act(command, [("firewall", firewall.id)], 0.0)


def _applied(project: Project, firewall: Firewall, target: tuple[str, int | str]) -> Action:
    also = [("server", int(target[1]))] if target[0] == "server" else []
    return project.act("apply_firewall", [("firewall", firewall.id), *also], project.settings.action_s)


def _shown(project: Project, actions: list[Action]) -> list[Json]:
    return [render.action(project, each) for each in actions]


# ------------------------------------------------------------------------------------------------------- SSH keys


def find_ssh_key(project: Project, id_: int) -> SshKey:
    key = project.ssh_keys.get(id_)
    if key is None:
        raise not_found("ssh_key", id_)
    return key


def list_ssh_keys(project: Project, call: HetznerCall) -> HetznerAnswer:
    filters = (_BY_NAME, Filter("fingerprint", lambda each: each.fingerprint))
    return list_of(call, "ssh_keys", project.ssh_keys.values(), render.ssh_key, sorts=("id", "name"), filters=filters)


def get_ssh_key(project: Project, call: HetznerCall) -> HetznerAnswer:
    return HetznerAnswer(200, {"ssh_key": render.ssh_key(find_ssh_key(project, call.ids[0]))})


def create_ssh_key(project: Project, call: HetznerCall) -> HetznerAnswer:
    inputs = call.inputs
    name, labels = inputs.name(is_required=True), inputs.labels()
    public_key = inputs.text("public_key", is_required=True).strip()
    fingerprint = _fingerprint(public_key)
    if fingerprint is None:
        inputs.refuse("public_key", "is not an SSH public key")
    inputs.finish()
    if any(each.name == name for each in project.ssh_keys.values()):
        raise not_unique("SSH key")
    if any(each.fingerprint == fingerprint for each in project.ssh_keys.values()):
        raise not_unique("SSH key", "public_key")
    key = SshKey(project.new_id(), name, labels, project.published_now(), public_key, fingerprint or "")
    project.ssh_keys[key.id] = key
    return HetznerAnswer(201, {"ssh_key": render.ssh_key(key)})


def update_ssh_key(project: Project, call: HetznerCall) -> HetznerAnswer:
    key = find_ssh_key(project, call.ids[0])
    inputs = call.inputs
    name, labels = inputs.name(is_required=False), inputs.labels()
    inputs.finish()
    if name and any(each.name == name for each in project.ssh_keys.values() if each is not key):
        raise not_unique("SSH key")
    key.name = name or key.name
    key.labels = labels if inputs.has("labels") else key.labels
    return HetznerAnswer(200, {"ssh_key": render.ssh_key(key)})


def delete_ssh_key(project: Project, call: HetznerCall) -> HetznerAnswer:
    del project.ssh_keys[find_ssh_key(project, call.ids[0]).id]
    return HetznerAnswer(204, None)


def _fingerprint(public_key: str) -> str | None:
    """As Hetzner shows it: MD5 of the key's own bytes. None: this is no key."""
    words = public_key.split()
    try:
        blob = base64.b64decode(words[1], validate=True)
    except (IndexError, binascii.Error, ValueError):
        return None
    digest = hashlib.md5(blob, usedforsecurity=False).hexdigest()
    return ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))
