"""/networks, /firewalls and /ssh_keys: resources that a fleet's configuration names.

They can be created, listed and read. Changing and deleting them is not emulated. Firewall rules are stored and shown;
they block nothing.
"""

import base64
import binascii
import hashlib
import ipaddress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from windlass_emulators.hetzner import resource_json
from windlass_emulators.hetzner.errors import invalid, not_found, not_unique, unsupported
from windlass_emulators.hetzner.lists import list_response
from windlass_emulators.hetzner.project import Firewall, Network, Project, Resource, SshKey
from windlass_emulators.hetzner.validation import HetznerBody, Labels, RequiredName, parse_hetzner_body
from windlass_emulators.http import ApiCall, Json, Response, json_response

_SORTS = ("id", "name", "created")
_NEW_SUBNET_PREFIX = 24


def _check_ip_range(text: str) -> str:
    try:
        return str(ipaddress.IPv4Network(text))
    except ValueError:
        raise ValueError("is not valid") from None


IpRange = Annotated[str, AfterValidator(_check_ip_range)]


class SubnetOrder(HetznerBody):
    type: Literal["cloud", "server", "vswitch"]
    network_zone: str
    ip_range: IpRange = ""


class NetworkOrder(HetznerBody):
    name: RequiredName
    ip_range: IpRange
    labels: Labels = Field(default={})
    subnets: list[SubnetOrder] = Field(default=[])


class FirewallRule(HetznerBody):
    direction: Literal["in", "out"]
    protocol: Literal["tcp", "udp", "icmp", "esp", "gre"]
    port: str | None = None
    source_ips: list[str] = Field(default=[])
    destination_ips: list[str] = Field(default=[])
    description: str | None = None


class FirewallOrder(HetznerBody):
    name: RequiredName
    labels: Labels = Field(default={})
    rules: list[FirewallRule] = Field(default=[])
    apply_to: list[Any] = Field(default=[])


class SshKeyOrder(HetznerBody):
    name: RequiredName
    public_key: str
    labels: Labels = Field(default={})


def _check_unique(what: str, name: str, existing: dict[int, Any]) -> None:
    if any(each.name == name for each in existing.values()):
        raise not_unique(what)


def _find(what: str, call: ApiCall, existing: dict[int, Any]) -> Any:
    found: Resource | None = existing.get(call.params["id"])
    if found is None:
        raise not_found(what, call.params["id"])
    return found


# -------------------------------------------------------------------------------------------------------- networks


def list_networks(project: Project, call: ApiCall) -> Response:
    return list_response(
        call,
        "networks",
        project.networks.values(),
        lambda each: resource_json.network(project, each),
        sorts=_SORTS,
        has_labels=True,
    )


def get_network(project: Project, call: ApiCall) -> Response:
    return json_response(200, {"network": resource_json.network(project, _find("network", call, project.networks))})


def create_network(project: Project, call: ApiCall) -> Response:
    order = parse_hetzner_body(NetworkOrder, call.body)
    _check_unique("network", order.name, project.networks)
    whole = ipaddress.IPv4Network(order.ip_range)
    subnets: list[Json] = []
    for each in order.subnets:
        taken = [ipaddress.IPv4Network(subnet["ip_range"]) for subnet in subnets]
        ip_range = each.ip_range or _free_range(whole, taken)
        wanted = ipaddress.IPv4Network(ip_range)
        if not wanted.subnet_of(whole) or any(wanted.overlaps(other) for other in taken):
            raise invalid([("ip_range", "must be within the network and overlap with no other subnet")])
        subnets.append(
            {
                "type": each.type,
                "network_zone": each.network_zone,
                "ip_range": ip_range,
                "gateway": str(whole.network_address + 1),
                "vswitch_id": None,
            }
        )
    network = Network(project.new_id(), order.name, order.labels, project.published_now(), order.ip_range, subnets)
    project.networks[network.id] = network
    return json_response(201, {"network": resource_json.network(project, network)})


def _free_range(whole: ipaddress.IPv4Network, taken: list[ipaddress.IPv4Network]) -> str:
    for candidate in whole.subnets(new_prefix=max(_NEW_SUBNET_PREFIX, whole.prefixlen)):
        if not any(candidate.overlaps(each) for each in taken):
            return str(candidate)
    raise invalid([("ip_range", "no free range is left in the network")])


# -------------------------------------------------------------------------------------------------------- firewalls


def list_firewalls(project: Project, call: ApiCall) -> Response:
    return list_response(
        call, "firewalls", project.firewalls.values(), resource_json.firewall, sorts=_SORTS, has_labels=True
    )


def get_firewall(project: Project, call: ApiCall) -> Response:
    return json_response(200, {"firewall": resource_json.firewall(_find("firewall", call, project.firewalls))})


def create_firewall(project: Project, call: ApiCall) -> Response:
    order = parse_hetzner_body(FirewallOrder, call.body)
    if order.apply_to:
        raise unsupported("apply_to of a firewall; name the firewall when you create a server")
    _check_unique("firewall", order.name, project.firewalls)
    rules = [rule.model_dump() for rule in order.rules]
    firewall = Firewall(project.new_id(), order.name, order.labels, project.published_now(), rules)
    project.firewalls[firewall.id] = firewall
    action = project.act("set_firewall_rules", [("firewall", firewall.id)], 0.0)
    return json_response(
        201, {"firewall": resource_json.firewall(firewall), "actions": [resource_json.action(project, action)]}
    )


# --------------------------------------------------------------------------------------------------------- SSH keys


def list_ssh_keys(project: Project, call: ApiCall) -> Response:
    filters = {"name": lambda each: each.name, "fingerprint": lambda each: each.fingerprint}
    return list_response(
        call,
        "ssh_keys",
        project.ssh_keys.values(),
        resource_json.ssh_key,
        sorts=("id", "name"),
        filters=filters,
        has_labels=True,
    )


def get_ssh_key(project: Project, call: ApiCall) -> Response:
    return json_response(200, {"ssh_key": resource_json.ssh_key(_find("ssh_key", call, project.ssh_keys))})


def create_ssh_key(project: Project, call: ApiCall) -> Response:
    order = parse_hetzner_body(SshKeyOrder, call.body)
    try:
        _, value, *_ = order.public_key.split()
        digest = hashlib.md5(base64.b64decode(value, validate=True), usedforsecurity=False).hexdigest()
    except (ValueError, binascii.Error):
        raise invalid([("public_key", "is not an SSH public key")]) from None
    fingerprint = ":".join(digest[index : index + 2] for index in range(0, len(digest), 2))
    _check_unique("SSH key", order.name, project.ssh_keys)
    if any(each.fingerprint == fingerprint for each in project.ssh_keys.values()):
        raise not_unique("SSH key", "public_key")
    key = SshKey(
        project.new_id(), order.name, order.labels, project.published_now(), order.public_key.strip(), fingerprint
    )
    project.ssh_keys[key.id] = key
    return json_response(201, {"ssh_key": resource_json.ssh_key(key)})
