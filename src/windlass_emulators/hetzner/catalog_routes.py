"""/server_types, /locations, /images, /pricing and /actions: everything that can only be read."""

from collections.abc import Callable
from operator import itemgetter

from windlass_emulators.hetzner import resource_json
from windlass_emulators.hetzner.errors import HetznerApiError, not_found
from windlass_emulators.hetzner.lists import list_response
from windlass_emulators.hetzner.project import Action, Project
from windlass_emulators.http import ApiCall, Response, json_response


def list_server_types(project: Project, call: ApiCall) -> Response:
    return list_response(
        call, "server_types", project.catalog.server_types, lambda each: resource_json.server_type(project, each)
    )


def get_server_type(project: Project, call: ApiCall) -> Response:
    found = project.catalog.server_type(call.params["id"])
    if found is None:
        raise not_found("server_type", call.params["id"])
    return json_response(200, {"server_type": resource_json.server_type(project, found)})


def list_locations(project: Project, call: ApiCall) -> Response:
    return list_response(call, "locations", project.catalog.locations, resource_json.location, sorts=("id", "name"))


def get_location(project: Project, call: ApiCall) -> Response:
    found = project.catalog.location(call.params["id"])
    if found is None:
        raise not_found("location", call.params["id"])
    return json_response(200, {"location": resource_json.location(found)})


def list_images(project: Project, call: ApiCall) -> Response:
    return list_response(
        call,
        "images",
        # System images have no labels, so a label selector matches none.
        [] if call.query.get("label_selector") else project.catalog.images,
        resource_json.image,
        sorts=("id", "name", "created"),
        filters={
            "name": lambda each: each.name,
            "architecture": lambda each: each.architecture,
            "type": lambda _: "system",
            "status": lambda _: "available",
            "bound_to": lambda _: None,
        },
    )


def get_image(project: Project, call: ApiCall) -> Response:
    found = next((each for each in project.catalog.images if each.id == call.params["id"]), None)
    if found is None:
        raise not_found("image", call.params["id"])
    return json_response(200, {"image": resource_json.image(found)})


def get_pricing(project: Project, _: ApiCall) -> Response:
    return json_response(200, {"pricing": resource_json.pricing(project)})


# ---------------------------------------------------------------------------------------------------------- actions


def list_actions_by_id(project: Project, call: ApiCall) -> Response:
    wanted = call.query.getlist("id")
    if not wanted:
        raise HetznerApiError(
            "deprecated_api_endpoint",
            "API functionality was removed: name the actions by id",
            {"announcement": "https://docs.hetzner.cloud/changelog#2023-07-20-actions-list-endpoint-is-deprecated"},
        )
    found = [resource_json.action(project, each) for each in project.actions.values() if str(each.id) in wanted]
    # The only list without pages.
    return json_response(200, {"actions": sorted(found, key=itemgetter("id"))})


def get_action(project: Project, call: ApiCall) -> Response:
    found = project.actions.get(call.params["action_id"])
    if found is None:
        raise not_found("action", call.params["action_id"])
    return json_response(200, {"action": resource_json.action(project, found)})


def list_actions_of(kind: str) -> Callable[[Project, ApiCall], Response]:
    """Actions of one resource, or of all resources of a kind. Actions of a deleted resource are listed too."""

    def list_actions(project: Project, call: ApiCall) -> Response:
        wanted = (kind, call.params["id"]) if "id" in call.params else None
        found = [
            each
            for each in project.actions.values()
            if (wanted in each.resources if wanted else any(kind == resource for resource, _ in each.resources))
        ]
        return _list_actions(project, call, found)

    return list_actions


def _list_actions(project: Project, call: ApiCall, actions: list[Action]) -> Response:
    return list_response(
        call,
        "actions",
        actions,
        lambda each: resource_json.action(project, each),
        sorts=("id", "command", "started"),
        filters={
            "status": lambda each: "running" if each.is_running(project.now) else "success",
            "id": lambda each: each.id,
        },
    )
