"""/network-volumes: storage in one data center that outlives pods and can only grow."""

from typing import Annotated, Literal

from pydantic import Field

from windlass_emulators.http import ApiCall, Response, json_response
from windlass_emulators.runpod import resource_json
from windlass_emulators.runpod.account import EmulatedRunpodAccount, EmulatedVolume
from windlass_emulators.runpod.errors import RunpodApiError, not_found
from windlass_emulators.runpod.validation import NonEmptyText, RunpodBody, parse_runpod_body
from windlass_emulators.validation import NotNull

MIN_GB, MAX_GB = 10, 4096


class VolumeOrder(RunpodBody):
    name: NonEmptyText
    dataCenter: NonEmptyText  # noqa: N815 - the published name
    size: int = Field(ge=MIN_GB, le=MAX_GB)
    type: Annotated[Literal["STANDARD", "HIGH_PERFORMANCE"] | None, NotNull] = None


class VolumeUpdate(RunpodBody):
    name: NonEmptyText = ""
    size: int = Field(default=0, ge=MIN_GB, le=MAX_GB)


def _find(account: EmulatedRunpodAccount, call: ApiCall) -> EmulatedVolume:
    volume = account.volumes.get(call.params["id"])
    if volume is None:
        raise not_found("network volume")
    return volume


def list_volumes(account: EmulatedRunpodAccount, _: ApiCall) -> Response:
    return json_response(200, {"networkVolumes": [resource_json.volume(each) for each in account.volumes.values()]})


def get_volume(account: EmulatedRunpodAccount, call: ApiCall) -> Response:
    return json_response(200, resource_json.volume(_find(account, call)))


def create_volume(account: EmulatedRunpodAccount, call: ApiCall) -> Response:
    order = parse_runpod_body(VolumeOrder, call.body)
    place = account.catalog.data_center(order.dataCenter)
    if place is None:
        raise RunpodApiError(400, f"data center '{order.dataCenter}' not found")
    if not place.volume_types or order.type not in (None, *place.volume_types):
        raise RunpodApiError(400, f"data center '{place.id}' does not support {order.type or 'network volumes'}")
    if not account.faults.has_balance:
        raise RunpodApiError(402)
    type_ = order.type or place.volume_types[0]
    volume = EmulatedVolume(account.new_id(), order.name, order.size, place.id, type_, account.created_now())
    account.add_volume(volume)
    return json_response(201, resource_json.volume(volume))


def update_volume(account: EmulatedRunpodAccount, call: ApiCall) -> Response:
    change = parse_runpod_body(VolumeUpdate, call.body)
    if not call.body:
        raise RunpodApiError(422, None, ["$: minProperties: got 0, want 1"])
    volume = _find(account, call)
    if change.size and change.size < volume.size_gb:
        raise RunpodApiError(400, "network volume size cannot be reduced")
    volume.name = change.name or volume.name
    if change.size > volume.size_gb:
        account.grow_volume(volume, change.size)
    return json_response(200, resource_json.volume(volume))


def delete_volume(account: EmulatedRunpodAccount, call: ApiCall) -> Response:
    volume = _find(account, call)
    if account.users_of(volume):
        raise RunpodApiError(400, "network volume is in use by a pod")
    account.remove_volume(volume)
    return Response(204)
