"""/pods: creation with all published refusals, actions, deletion."""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field

from windlass_emulators.http import ApiCall, Response, json_response
from windlass_emulators.runpod import resource_json
from windlass_emulators.runpod.account import (
    EmulatedPod,
    EmulatedRunpodAccount,
    EmulatedVolume,
    NetworkMount,
    PersistentMount,
    Template,
)
from windlass_emulators.runpod.catalog import COMMUNITY, DataCenter, GpuType, cuda_key
from windlass_emulators.runpod.errors import NO_CAPACITY, RunpodApiError, not_found, unsupported
from windlass_emulators.runpod.templates import ContainerBody, make_config
from windlass_emulators.runpod.validation import CudaVersion, NonEmptyText, RunpodBody, parse_runpod_body
from windlass_emulators.validation import NotNull, OptionalFlag

MAX_LOG_TAIL = 5_000


class GpuOrder(RunpodBody):
    id: str
    count: int = Field(default=1, ge=1)
    allowedCudaVersions: list[CudaVersion] = Field(default=[])  # noqa: N815 - the published name
    minCudaVersion: Annotated[CudaVersion | None, NotNull] = None  # noqa: N815 - the published name


class PodOrder(ContainerBody):
    templateId: Annotated[NonEmptyText | None, NotNull] = None  # noqa: N815 - the published name
    cloud: Literal["SECURE", "COMMUNITY"] = "SECURE"
    gpu: Annotated[GpuOrder | None, NotNull] = None
    cpu: Any = None
    dataCenterIds: list[str] = Field(default=[])  # noqa: N815 - the published name
    globalNetworking: OptionalFlag = None  # noqa: N815 - the published name


class TemplatePodOrder(PodOrder):
    """With a template, the image is optional."""

    image: str = ""


class PodAction(RunpodBody):
    action: Literal["start", "stop", "restart", "terminate"]


def _find(account: EmulatedRunpodAccount, call: ApiCall) -> EmulatedPod:
    pod = account.pods.get(call.params["id"])
    if pod is None or account.is_hidden(pod):
        raise not_found("pod")
    return pod


def list_pods(account: EmulatedRunpodAccount, _: ApiCall) -> Response:
    moment = account.list_moment()
    return json_response(200, {"pods": [resource_json.pod(account, each, moment) for each in account.visible_pods()]})


def get_pod(account: EmulatedRunpodAccount, call: ApiCall) -> Response:
    return json_response(200, resource_json.pod(account, _find(account, call)))


def delete_pod(account: EmulatedRunpodAccount, call: ApiCall) -> Response:
    pod = _find(account, call)
    if pod.is_locked:
        raise RunpodApiError(409, "pod is locked: unlock it first")
    if not account.faults.take_ineffective_deletion():
        account.remove(pod)
    return Response(204)


def stream_logs(account: EmulatedRunpodAccount, call: ApiCall) -> Response:
    """The last lines as events of a stream that stays open. `since` and Last-Event-ID are not emulated."""
    pod, source = _find(account, call), call.query.get("source")
    if source not in (None, "container", "system"):
        raise RunpodApiError(422, None, ["source: want one of container, system"])
    try:
        tail = int(call.query.get("tail", "100"))
    except ValueError:
        tail = -1
    if not 0 <= tail <= MAX_LOG_TAIL:
        raise RunpodApiError(422, None, [f"tail: want 0 to {MAX_LOG_TAIL}"])
    lines = [("system", f"pod {pod.id} is {pod.status}")] if source != "container" else []
    lines += [("container", line) for line in account.host.log_lines(pod.id)] if source != "system" else []
    ts = account.now.isoformat(timespec="seconds").replace("+00:00", "Z")
    events = [
        f"id: {ts}/{number:012d}\ndata: {json.dumps({'ts': ts, 'source': name, 'line': line})}\n\n"
        for number, (name, line) in enumerate(lines[len(lines) - tail if tail < len(lines) else 0 :], 1)
    ]
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return Response(200, headers, "".join(events).encode(), is_held_open=True)


def act_on_pod(account: EmulatedRunpodAccount, call: ApiCall) -> Response:
    action = parse_runpod_body(PodAction, call.body).action
    pod = _find(account, call)
    if action not in resource_json.ACTIONS[pod.status]:
        raise RunpodApiError(409, f"action '{action}' is not valid for a pod that is {pod.status}")
    if pod.is_locked:
        raise RunpodApiError(409, "pod is locked: unlock it first")
    if action == "terminate":
        return delete_pod(account, call)
    if action == "start" and not account.faults.has_balance:
        raise RunpodApiError(402)
    {"start": account.start, "stop": account.stop, "restart": account.restart}[action](pod)
    return json_response(200, resource_json.pod(account, pod))


# --------------------------------------------------------------------------------------------------------- creation


def create_pod(account: EmulatedRunpodAccount, call: ApiCall) -> Response:
    order = parse_runpod_body(TemplatePodOrder if "templateId" in call.body else PodOrder, call.body)
    if (order.gpu is None) == (order.cpu is None):
        raise RunpodApiError(400, "exactly one of gpu or cpu must be set")
    if order.gpu is None:
        raise unsupported("CPU pods")
    if order.globalNetworking:
        raise unsupported("global networking")
    template = None
    if order.templateId is not None:
        template = account.templates.get(order.templateId)
        if template is None:
            raise not_found("template")
    pod = _place_pod(account, order, order.gpu, template)
    account.add_pod(pod)
    return json_response(201, resource_json.pod(account, pod))


def _place_pod(
    account: EmulatedRunpodAccount, order: PodOrder, wanted: GpuOrder, template: Template | None
) -> EmulatedPod:
    """Put the pod into the first requested data center with enough GPUs. Raises RunpodApiError."""
    fields = order.config_fields()
    if template is not None:
        own = template.config
        inherited = {"image": own.image, "args": own.args, "disk_gb": own.disk_gb, "ports": list(own.ports)}
        inherited["registry"] = own.registry
        fields = {**inherited, **fields, "env": {**own.env, **fields.get("env", {})}}
    config = make_config(account, fields)
    starts_jupyter = (
        order.startJupyter if "startJupyter" in order.model_fields_set else bool(template and template.starts_jupyter)
    )
    if starts_jupyter:
        config.env.setdefault("JUPYTER_PASSWORD", hashlib.sha256(order.name.encode()).hexdigest()[:20])
    if not account.faults.has_balance:
        raise RunpodApiError(402)
    mount, volume = _choose_mount(account, order, template)
    places = _choose_places(account, order, volume)
    gpu = account.catalog.gpu(wanted.id)
    if gpu is None:
        raise RunpodApiError(400, f"gpu type '{wanted.id}' not found")
    if wanted.allowedCudaVersions and wanted.minCudaVersion:
        raise RunpodApiError(400, "gpu.allowedCudaVersions and gpu.minCudaVersion are mutually exclusive")
    if wanted.count > gpu.max_counts[order.cloud]:
        most = gpu.max_counts[order.cloud]
        raise RunpodApiError(400, f"gpu.count must be at most {most} for {gpu.id} on {order.cloud}")
    place, cuda_version = _choose_place(account, order, wanted, gpu, template, places)
    faults = account.faults.take_pod_faults()
    if faults.data_center is not None:
        place = account.catalog.data_center(faults.data_center) or place
    return EmulatedPod(
        id=account.new_id(),
        name=order.name,
        config=config,
        gpu=gpu,
        gpu_count=wanted.count,
        cloud=order.cloud,
        data_center=place,
        cuda_version=cuda_version,
        mount=mount,
        micros_per_hour=gpu.prices_micros[order.cloud] * wanted.count,
        created=account.created_now(),
        faults=faults,
        has_gpus=not faults.has_no_gpu,
        is_locked=faults.is_locked,
    )


def _choose_mount(
    account: EmulatedRunpodAccount, order: PodOrder, template: Template | None
) -> tuple[PersistentMount | NetworkMount | None, EmulatedVolume | None]:
    mount = order.mounts.read()
    if not isinstance(mount, NetworkMount):
        return mount or (template.persistent if template else None), None
    volume = account.volumes.get(mount.volume_id)
    if volume is None:
        raise RunpodApiError(400, f"network volume '{mount.volume_id}' not found")
    if order.cloud == COMMUNITY:
        raise RunpodApiError(400, "network volumes are not available on community cloud")
    return mount, volume


def _choose_places(account: EmulatedRunpodAccount, order: PodOrder, volume: EmulatedVolume | None) -> list[DataCenter]:
    places = []
    for id_ in order.dataCenterIds:
        place = account.catalog.data_center(id_)
        if place is None:
            raise RunpodApiError(400, f"data center '{id_}' not found")
        places.append(place)
    places = places or list(account.catalog.data_centers)
    if volume is None:
        return places
    if near := [each for each in places if each.id == volume.data_center]:
        return near
    raise RunpodApiError(
        400, f"network volume '{volume.id}' is in {volume.data_center}, not in a requested data center"
    )


def _choose_place(
    account: EmulatedRunpodAccount,
    order: PodOrder,
    wanted: GpuOrder,
    gpu: GpuType,
    template: Template | None,
    places: list[DataCenter],
) -> tuple[DataCenter, str]:
    """The first data center with enough free GPUs and a suitable CUDA version, and the newest such version."""
    names_cuda = bool(wanted.model_fields_set & {"allowedCudaVersions", "minCudaVersion"})
    allowed = wanted.allowedCudaVersions if names_cuda or template is None else template.cuda_versions
    least = wanted.minCudaVersion
    for place in places:
        versions = [
            version
            for version in place.cuda_versions
            if (not allowed or version in allowed) and (least is None or cuda_key(version) >= cuda_key(least))
        ]
        if not versions or account.faults.shortage(gpu.id, order.cloud, place.id):
            continue
        if account.free_gpus(gpu, order.cloud, place.id) >= wanted.count:
            return place, versions[-1]
    raise RunpodApiError(400, NO_CAPACITY)
