"""/network-volumes: storage that outlives pods, in one data center, and only ever grows."""

from windlass_emulators.runpod import render
from windlass_emulators.runpod.account import EmulatedRunpodAccount, EmulatedVolume
from windlass_emulators.runpod.calls import RunpodAnswer, RunpodCall
from windlass_emulators.runpod.catalog import VOLUME_TYPES
from windlass_emulators.runpod.errors import RunpodApiError, not_found

MIN_GB, MAX_GB = 10, 4096


def find(account: EmulatedRunpodAccount, id_: str) -> EmulatedVolume:
    volume = account.volumes.get(id_)
    if volume is None:
        raise not_found("network volume")
    return volume


def list_all(account: EmulatedRunpodAccount, _: RunpodCall) -> RunpodAnswer:
    return RunpodAnswer(200, {"networkVolumes": [render.volume(each) for each in account.volumes.values()]})


def get(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    return RunpodAnswer(200, render.volume(find(account, call.id)))


def create(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    body = call.form
    name, place_id = body.text("name", is_required=True), body.text("dataCenter", is_required=True)
    size_gb = body.number("size", least=MIN_GB, most=MAX_GB, is_required=True)
    type_ = body.one_of("type", VOLUME_TYPES)
    body.finish()
    place = account.catalog.data_center(place_id or "")
    if place is None:
        raise RunpodApiError(400, f"data center '{place_id}' not found")
    if not place.volume_types or (type_ is not None and type_ not in place.volume_types):
        raise RunpodApiError(400, f"data center '{place.id}' does not support {type_ or 'network volumes'}")
    if not account.faults.has_balance:
        raise RunpodApiError(402)
    volume = EmulatedVolume(
        account.new_id(), name or "", size_gb or MIN_GB, place.id, type_ or place.volume_types[0], account.created_now()
    )
    account.add_volume(volume)
    return RunpodAnswer(201, render.volume(volume))


def update(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    body = call.form
    name, size_gb = body.text("name"), body.number("size", least=MIN_GB, most=MAX_GB)
    if not call.body:
        body.refuse("minProperties: got 0, want 1")
    body.finish()
    volume = find(account, call.id)
    if size_gb is not None and size_gb < volume.size_gb:
        raise RunpodApiError(400, "network volume size cannot be reduced")
    volume.name = name or volume.name
    if size_gb is not None and size_gb > volume.size_gb:
        account.grow_volume(volume, size_gb)
    return RunpodAnswer(200, render.volume(volume))


def delete(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    volume = find(account, call.id)
    if account.users_of(volume):
        raise RunpodApiError(400, "network volume is in use by a pod")
    account.remove_volume(volume)
    return RunpodAnswer(204)
