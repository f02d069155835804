"""/primary_ips: addresses that were created with a server. They are billed until they are deleted."""

from pydantic import Field

from windlass_emulators.hetzner import resource_json
from windlass_emulators.hetzner.errors import HetznerApiError, not_found, not_unique
from windlass_emulators.hetzner.lists import list_response
from windlass_emulators.hetzner.project import PrimaryIp, Project
from windlass_emulators.hetzner.validation import HetznerBody, Labels, ResourceName, parse_hetzner_body
from windlass_emulators.http import ApiCall, Response, json_response


class PrimaryIpUpdate(HetznerBody):
    name: ResourceName = ""
    labels: Labels = Field(default={})
    auto_delete: bool = False


def _find(project: Project, call: ApiCall) -> PrimaryIp:
    primary_ip = project.primary_ips.get(call.params["id"])
    if primary_ip is None:
        raise not_found("primary_ip", call.params["id"])
    return primary_ip


def list_primary_ips(project: Project, call: ApiCall) -> Response:
    return list_response(
        call,
        "primary_ips",
        project.visible_primary_ips(),
        resource_json.primary_ip,
        sorts=("id", "created"),
        filters={"name": lambda each: each.name, "ip": lambda each: each.ip},
        has_labels=True,
    )


def get_primary_ip(project: Project, call: ApiCall) -> Response:
    return json_response(200, {"primary_ip": resource_json.primary_ip(_find(project, call))})


def update_primary_ip(project: Project, call: ApiCall) -> Response:
    primary_ip = _find(project, call)
    change = parse_hetzner_body(PrimaryIpUpdate, call.body)
    if any(each.name == change.name for each in project.primary_ips.values() if each is not primary_ip):
        raise not_unique("primary_ip")
    primary_ip.name = change.name or primary_ip.name
    if "labels" in change.model_fields_set:
        primary_ip.labels = change.labels
    if "auto_delete" in change.model_fields_set:
        primary_ip.is_auto_deleted = change.auto_delete
    return json_response(200, {"primary_ip": resource_json.primary_ip(primary_ip)})


def delete_primary_ip(project: Project, call: ApiCall) -> Response:
    primary_ip = _find(project, call)
    if primary_ip.server_id is not None:
        raise HetznerApiError("must_be_unassigned", "primary IP is still assigned to a server")
    project.remove_primary_ip(primary_ip)
    return Response(204)
