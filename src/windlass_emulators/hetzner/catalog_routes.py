"""What can be had, and what is only ever empty here: the catalog, prices, actions, resources the emulator lacks."""

from collections.abc import Callable

from windlass_emulators.hetzner import render
from windlass_emulators.hetzner.catalog import Location
from windlass_emulators.hetzner.errors import HetznerApiError, not_found
from windlass_emulators.hetzner.project import Action, Project
from windlass_emulators.hetzner.request import Filter, HetznerAnswer, HetznerCall, list_of

_BY_NAME = Filter("name", lambda each: each.name)
# Clients look for these, and find none.
EMPTY = (
    "certificates", "floating_ips", "isos", "load_balancers", "load_balancer_types", "placement_groups", "volumes",
    "zones",
)  # fmt: skip


def list_server_types(project: Project, call: HetznerCall) -> HetznerAnswer:
    items = project.catalog.server_types
    return list_of(
        call, "server_types", items, lambda e: render.server_type(project, e), filters=(_BY_NAME,), has_labels=False
    )


def get_server_type(project: Project, call: HetznerCall) -> HetznerAnswer:
    found = project.catalog.server_type(call.ids[0])
    if found is None:
        raise not_found("server_type", call.ids[0])
    return HetznerAnswer(200, {"server_type": render.server_type(project, found)})


def list_locations(project: Project, call: HetznerCall) -> HetznerAnswer:
    items = project.catalog.locations
    return list_of(
        call, "locations", items, render.location, sorts=("id", "name"), filters=(_BY_NAME,), has_labels=False
    )


def get_location(project: Project, call: HetznerCall) -> HetznerAnswer:
    found = project.catalog.location(call.ids[0])
    if found is None:
        raise not_found("location", call.ids[0])
    return HetznerAnswer(200, {"location": render.location(found)})


def list_datacenters(project: Project, call: HetznerCall) -> HetznerAnswer:
    def rendered(each: Location) -> dict[str, object]:
        return render.datacenter(project, each)

    by_name = Filter("name", lambda each: each.datacenter)
    first = project.catalog.locations[0].datacenter_id
    return list_of(
        call, "datacenters", project.catalog.locations, rendered,
        filters=(by_name,), has_labels=False, extra={"recommendation": first},
    )  # fmt: skip


def get_datacenter(project: Project, call: HetznerCall) -> HetznerAnswer:
    found = project.catalog.datacenter(call.ids[0])
    if found is None:
        raise not_found("datacenter", call.ids[0])
    return HetznerAnswer(200, {"datacenter": render.datacenter(project, found)})


def list_images(project: Project, call: HetznerCall) -> HetznerAnswer:
    filters = (
        _BY_NAME,
        Filter("architecture", lambda each: each.architecture),
        Filter("type", lambda _: "system"),
        Filter("status", lambda _: "available"),
        Filter("bound_to", lambda _: None),
    )
    # System images have no labels, so a selector that wants one finds none.
    items = [] if call.asked_once("label_selector") else project.catalog.images
    return list_of(
        call, "images", items, render.image, sorts=("id", "name", "created"), filters=filters, has_labels=False
    )


def get_image(project: Project, call: HetznerCall) -> HetznerAnswer:
    found = next((each for each in project.catalog.images if each.id == call.ids[0]), None)
    if found is None:
        raise not_found("image", call.ids[0])
    return HetznerAnswer(200, {"image": render.image(found)})


def get_pricing(project: Project, call: HetznerCall) -> HetznerAnswer:  # noqa: ARG001 - every endpoint has the same shape
    return HetznerAnswer(200, {"pricing": render.pricing(project)})


def list_nothing(root: str) -> Callable[[Project, HetznerCall], HetznerAnswer]:
    return lambda _, call: list_of(call, root, list[Location](), render.location, has_labels=False)


def get_nothing(root: str) -> Callable[[Project, HetznerCall], HetznerAnswer]:
    def get(project: Project, call: HetznerCall) -> HetznerAnswer:  # noqa: ARG001 - every endpoint has the same shape
        raise not_found(root.removesuffix("s"), call.ids[0])

    return get


# -------------------------------------------------------------------------------------------------------- actions


def list_actions_by_id(project: Project, call: HetznerCall) -> HetznerAnswer:
    wanted = call.asked("id")
    if not wanted:
        raise HetznerApiError(
            "deprecated_api_endpoint",
            "API functionality was removed: name the actions by id",
            {"announcement": "https://docs.hetzner.cloud/changelog#2023-07-20-actions-list-endpoint-is-deprecated"},
        )
    return _list(project, call, [each for each in project.actions.values() if str(each.id) in wanted])


def get_action(project: Project, call: HetznerCall) -> HetznerAnswer:
    """By its own number, the last in the path; those before it are its resource's."""
    found = project.actions.get(call.ids[-1])
    if found is None:
        raise not_found("action", call.ids[-1])
    return HetznerAnswer(200, {"action": render.action(project, found)})


def list_actions_of(kind: str) -> Callable[[Project, HetznerCall], HetznerAnswer]:
    """Of one resource, or of all of a kind. Also of a resource that is gone: its deletion is among them."""

    def list_actions(project: Project, call: HetznerCall) -> HetznerAnswer:
        wanted = (kind, call.ids[0]) if call.ids else None
        found = [
            each
            for each in project.actions.values()
            if (wanted in each.resources if wanted else any(kind == resource for resource, _ in each.resources))
        ]
        return _list(project, call, found)

    return list_actions


def _list(project: Project, call: HetznerCall, actions: list[Action]) -> HetznerAnswer:
    statuses = Filter("status", lambda each: "running" if each.is_running(project.now) else "success")
    by_id = Filter("id", lambda each: each.id)
    return list_of(
        call, "actions", actions, lambda each: render.action(project, each),
        sorts=("id", "command", "started"), filters=(statuses, by_id), has_labels=False,
    )  # fmt: skip
