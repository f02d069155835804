"""/primary_ips: made with a server or alone, and billed in either case."""

from windlass_emulators.hetzner import render
from windlass_emulators.hetzner.errors import HetznerApiError, not_found, not_unique
from windlass_emulators.hetzner.project import PrimaryIp, Project, Server
from windlass_emulators.hetzner.request import Filter, HetznerAnswer, HetznerCall, list_of
from windlass_emulators.hetzner.validation import Inputs
from windlass_emulators.http import Json


def find(project: Project, id_: int) -> PrimaryIp:
    primary_ip = project.primary_ips.get(id_)
    if primary_ip is None:
        raise not_found("primary_ip", id_)
    return primary_ip


def list_all(project: Project, call: HetznerCall) -> HetznerAnswer:
    filters = (Filter("name", lambda each: each.name), Filter("ip", lambda each: each.ip))
    return list_of(
        call,
        "primary_ips",
        project.visible_primary_ips(),
        lambda each: render.primary_ip(project, each),
        sorts=("id", "created"),
        filters=filters,
    )


def get(project: Project, call: HetznerCall) -> HetznerAnswer:
    return HetznerAnswer(200, {"primary_ip": render.primary_ip(project, find(project, call.ids[0]))})


def create(project: Project, call: HetznerCall) -> HetznerAnswer:
    inputs = call.inputs
    name, labels = inputs.name(is_required=True), inputs.labels()
    type_ = inputs.text("type", is_required=True, choices=("ipv4", "ipv6"))
    # The document says that it is always required; Hetzner's own SDK leaves it out where there is no assignee.
    inputs.text("assignee_type", is_required=inputs.has("assignee_id"), choices=("server",))
    is_auto_deleted = inputs.flag("auto_delete", False)
    server = _assignee(project, inputs)
    wanted, datacenter = inputs.id_or_name("location"), inputs.id_or_name("datacenter")
    place = project.catalog.location(wanted) if wanted is not None else project.catalog.datacenter(datacenter)
    place = server.location if server else place
    if place is None:
        inputs.refuse("location", "location not found" if wanted or datacenter else "is required")
    inputs.finish()
    if place is None:
        raise AssertionError("finish() has refused this")
    if any(each.name == name for each in project.primary_ips.values()):
        raise not_unique("primary_ip")
    if server is not None:
        _check_assignable(server, type_)
    made = project.add_primary_ip(type_, place, name=name, labels=labels, is_auto_deleted=is_auto_deleted)
    body = {"primary_ip": render.primary_ip(project, made)}
    if server is not None:
        body["action"] = _assign(project, made, server)
        body["primary_ip"] = render.primary_ip(project, made)
    return HetznerAnswer(201, body)


def update(project: Project, call: HetznerCall) -> HetznerAnswer:
    primary_ip = find(project, call.ids[0])
    inputs = call.inputs
    name, labels = inputs.name(is_required=False), inputs.labels()
    is_auto_deleted = inputs.flag("auto_delete", primary_ip.is_auto_deleted)
    inputs.finish()
    if name and any(each.name == name for each in project.primary_ips.values() if each is not primary_ip):
        raise not_unique("primary_ip")
    primary_ip.name = name or primary_ip.name
    primary_ip.labels = labels if inputs.has("labels") else primary_ip.labels
    primary_ip.is_auto_deleted = is_auto_deleted
    return HetznerAnswer(200, {"primary_ip": render.primary_ip(project, primary_ip)})


def delete(project: Project, call: HetznerCall) -> HetznerAnswer:
    primary_ip = find(project, call.ids[0])
    if primary_ip.is_delete_protected:
        raise HetznerApiError("protected", "primary IP is protected from deletion")
    if primary_ip.server_id is not None:
        raise HetznerApiError("must_be_unassigned", "primary IP is still assigned to a server")
    project.remove_primary_ip(primary_ip)
    return HetznerAnswer(204, None)


def assign(project: Project, call: HetznerCall) -> HetznerAnswer:
    primary_ip = find(project, call.ids[0])
    inputs = call.inputs
    inputs.text("assignee_type", is_required=True, choices=("server",))
    server = _assignee(project, inputs, is_required=True)
    inputs.finish()
    if server is None:
        raise AssertionError("finish() has refused this")
    if primary_ip.server_id is not None:
        raise HetznerApiError("primary_ip_already_assigned", "primary IP is already assigned to a server")
    if primary_ip.location.name != server.location.name:
        raise HetznerApiError("primary_ip_datacenter_mismatch", "primary IP is in another location than the server")
    _check_assignable(server, primary_ip.type)
    return HetznerAnswer(201, {"action": _assign(project, primary_ip, server)})


def unassign(project: Project, call: HetznerCall) -> HetznerAnswer:
    primary_ip = find(project, call.ids[0])
    server = project.servers.get(primary_ip.server_id or 0)
    if server is None:
        raise HetznerApiError("invalid_input", "primary IP is not assigned", {})
    if server.status != "off":
        raise HetznerApiError("server_not_stopped", "server is running, but needs to be powered off")
    if primary_ip.type == "ipv4":
        server.ipv4_id = None
    else:
        server.ipv6_id = None
    primary_ip.server_id = None
    return _acted(project, primary_ip, "unassign_primary_ip", server)


def change_protection(project: Project, call: HetznerCall) -> HetznerAnswer:
    primary_ip = find(project, call.ids[0])
    inputs = call.inputs
    primary_ip.is_delete_protected = inputs.flag("delete", primary_ip.is_delete_protected)
    inputs.finish()
    return _acted(project, primary_ip, "change_protection", None)


def _assignee(project: Project, inputs: Inputs, *, is_required: bool = False) -> Server | None:
    id_ = inputs.number("assignee_id", is_required=is_required)
    server = None if id_ is None else project.servers.get(id_)
    if id_ is not None and server is None:
        inputs.refuse("assignee_id", "server not found")
    return server


def _check_assignable(server: Server, type_: str) -> None:
    if server.status != "off":
        raise HetznerApiError("server_not_stopped", "server is running, but needs to be powered off")
    if (server.ipv4_id if type_ == "ipv4" else server.ipv6_id) is not None:
        raise HetznerApiError(f"server_has_{type_}", f"server already has an {type_} address")


def _assign(project: Project, primary_ip: PrimaryIp, server: Server) -> Json:
    primary_ip.server_id = server.id
    if primary_ip.type == "ipv4":
        server.ipv4_id = primary_ip.id
    else:
        server.ipv6_id = primary_ip.id
    answer = _acted(project, primary_ip, "assign_primary_ip", server)
    return dict((answer.body or {})["action"])


def _acted(project: Project, primary_ip: PrimaryIp, command: str, server: Server | None) -> HetznerAnswer:
    also = [("server", server.id)] if server else []
    takes_s = project.settings.action_s if server else 0.0
    action = project.act(command, [("primary_ip", primary_ip.id), *also], takes_s)
    return HetznerAnswer(201, {"action": render.action(project, action)})
