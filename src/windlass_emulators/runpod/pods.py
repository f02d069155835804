"""/pods: creation with everything that can be refused, state transitions, deletion, logs."""

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime

from windlass_emulators.http import Json
from windlass_emulators.runpod import render
from windlass_emulators.runpod.account import (
    EmulatedPod,
    EmulatedRunpodAccount,
    EmulatedVolume,
    EmulatorConfig,
    NetworkMount,
    PersistentMount,
    Template,
)
from windlass_emulators.runpod.calls import RunpodAnswer, RunpodCall, shown_time
from windlass_emulators.runpod.catalog import CLOUDS, COMMUNITY, SECURE, CpuType, DataCenter, GpuType, cuda_key
from windlass_emulators.runpod.errors import RunpodApiError, no_capacity, not_found
from windlass_emulators.runpod.templates import (
    DEFAULT_DISK_GB,
    changed_config,
    check_config,
    find_template,
    read_config,
    read_network,
    read_persistent,
)
from windlass_emulators.runpod.validation import CUDA_VERSION, Body

DEFAULT_TAIL, MAX_TAIL = 100, 5000
MIN_VCPU = 2


def find(account: EmulatedRunpodAccount, id_: str) -> EmulatedPod:
    pod = account.pods.get(id_)
    if pod is None or account.is_hidden(pod):
        raise not_found("pod")
    return pod


def list_all(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    # There are no clusters here, so there is nothing more to include.
    call.flag("includeClusterPods")
    moment = account.list_moment()
    return RunpodAnswer(200, {"pods": [render.pod(account, each, moment) for each in account.visible_pods()]})


def get(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    return RunpodAnswer(200, render.pod(account, find(account, call.id)))


def delete(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    pod = find(account, call.id)
    if not account.faults.take_idle_deletion():
        account.remove(pod)
    return RunpodAnswer(204)


def act(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    body = call.form
    action = body.one_of("action", ("start", "stop", "restart", "terminate"), is_required=True)
    body.finish()
    pod = find(account, call.id)
    if action not in render.ACTIONS[pod.status]:
        raise RunpodApiError(409, f"action '{action}' is not valid for a pod that is {pod.status}")
    if pod.is_locked and action in ("stop", "restart"):
        raise RunpodApiError(409, "pod is locked")
    if action == "terminate":
        return delete(account, call)
    if action == "start" and not account.faults.has_balance:
        raise RunpodApiError(402)
    {"start": account.start, "stop": account.stop, "restart": account.restart}[str(action)](pod)
    return RunpodAnswer(200, render.pod(account, pod))


# ---------------------------------------------------------------------------------------------------------- update


def update(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    """What concerns the container is for its next start; the rest counts at once."""
    pod = find(account, call.id)
    body = call.form
    name, is_locked, has_network = body.text("name"), body.flag("locked"), body.flag("globalNetworking")
    fields, template_id = read_config(body), body.text("templateId", is_long=False)
    mounts = _read_mounts(body)
    body.finish()
    if template_id is not None:
        fields = _with_template(_pod_template(account, template_id), fields)
    config = changed_config(pod.config, fields)
    check_config(account, config)
    mount = _changed_mount(pod, mounts) if mounts.is_said else pod.mount
    if has_network:
        _check_global_network(pod.gpu, [pod.data_center])
    pod.name, pod.config, pod.mount = name or pod.name, config, mount
    pod.is_locked = pod.is_locked if is_locked is None else is_locked
    pod.has_global_network = pod.has_global_network if has_network is None else has_network
    return RunpodAnswer(200, render.pod(account, pod))


def _changed_mount(pod: EmulatedPod, mounts: "_Mounts") -> PersistentMount | NetworkMount | None:
    if mounts.network == []:
        raise RunpodApiError(400, "mounts cannot be cleared")
    wanted = mounts.the_one()
    if wanted is None:
        return pod.mount
    if type(wanted) is not type(pod.mount):
        raise RunpodApiError(400, "the kind of a mount is fixed at create")
    own = pod.mount
    if isinstance(wanted, NetworkMount) and isinstance(own, NetworkMount) and wanted.volume_id != own.volume_id:
        raise RunpodApiError(400, "volumeId of a network mount is immutable")
    return wanted


# -------------------------------------------------------------------------------------------------------- creation


@dataclass(frozen=True, slots=True)
class _Mounts:
    persistent: PersistentMount | None = None
    network: list[NetworkMount] | None = None
    is_said: bool = False

    def the_one(self) -> PersistentMount | NetworkMount | None:
        if self.persistent is not None and self.network:
            raise RunpodApiError(400, "mounts.persistent and mounts.network are mutually exclusive")
        return self.persistent or (self.network[0] if self.network else None)


@dataclass(frozen=True, slots=True)
class _Gpu:
    id: str
    count: int
    allowed_cuda: list[str] | None
    min_cuda: str | None


@dataclass(frozen=True, slots=True)
class _Cpu:
    id: str
    count: int


@dataclass(frozen=True, slots=True)
class _PodOrder:
    """A request for a pod that matches the schema."""

    name: str
    fields: Json
    cloud: str
    gpu: _Gpu | None
    cpu: _Cpu | None
    data_centers: list[str]
    mounts: _Mounts
    has_global_network: bool
    starts_ssh: bool | None
    starts_jupyter: bool | None
    template_id: str | None


def create(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    order = _read_order(call.form)
    if (order.gpu is None) == (order.cpu is None):
        raise RunpodApiError(400, "exactly one of gpu or cpu must be set")
    template = None if order.template_id is None else _pod_template(account, order.template_id)
    config = _config(account, order, template)
    if not account.faults.has_balance:
        raise RunpodApiError(402)
    mount, volume = _mount(account, order, template)
    places = _places(account, order, volume)
    if order.has_global_network:
        places = _check_global_network(account.catalog.gpu(order.gpu.id) if order.gpu else None, places)
    pod = _gpu_pod(account, order, order.gpu, template, config, mount, places) if order.gpu else None
    pod = pod or _cpu_pod(account, order, config, mount, places)
    account.add_pod(pod)
    return RunpodAnswer(201, render.pod(account, pod))


def _read_order(body: Body) -> _PodOrder:
    name, fields = body.text("name", is_required=True), read_config(body)
    template_id = body.text("templateId")
    if template_id is None and not body.has("image"):
        body.refuse("missing property 'image'")
    order = _PodOrder(
        name or "",
        fields,
        body.one_of("cloud", CLOUDS) or SECURE,
        _read_gpu(body.object("gpu")),
        _read_cpu(body.object("cpu")),
        body.texts("dataCenterIds") or [],
        _read_mounts(body),
        body.flag("globalNetworking") or False,
        body.flag("startSsh"),
        body.flag("startJupyter"),
        template_id,
    )
    body.finish()
    return order


def _read_gpu(body: Body | None) -> _Gpu | None:
    if body is None:
        return None
    id_, count = body.text("id", is_long=False, is_required=True), body.number("count", least=1)
    allowed = body.texts("allowedCudaVersions", pattern=CUDA_VERSION)
    least = body.text("minCudaVersion", pattern=CUDA_VERSION)
    body.close()
    return _Gpu(id_ or "", count or 1, allowed, least)


def _read_cpu(body: Body | None) -> _Cpu | None:
    if body is None:
        return None
    id_, count = body.text("id", is_required=True), body.number("vcpuCount", least=MIN_VCPU, is_required=True)
    body.close()
    return _Cpu(id_ or "", count or MIN_VCPU)


def _read_mounts(body: Body) -> _Mounts:
    mounts = body.object("mounts")
    if mounts is None:
        return _Mounts()
    persistent = mounts.object("persistent")
    found = _Mounts(
        None if persistent is None else read_persistent(persistent),
        mounts.objects("network", read_network, most=1),
        is_said=True,
    )
    mounts.close()
    return found


def _pod_template(account: EmulatedRunpodAccount, id_: str) -> Template:
    template = find_template(account, id_)
    if template.is_serverless:
        raise RunpodApiError(422, None, ["$.templateId: a serverless template cannot be used for a pod"])
    return template


def _with_template(template: Template, fields: Json) -> Json:
    own = template.config
    inherited = {"image": own.image, "args": own.args, "disk_gb": own.disk_gb, "ports": list(own.ports)}
    env = {**own.env, **fields.get("env", {})}
    # A registry of somebody else's is nobody's.
    registry = {"registry": own.registry} if own.registry else {}
    return {**inherited, **registry, **fields, "env": env}


def _config(account: EmulatedRunpodAccount, order: _PodOrder, template: Template | None) -> EmulatorConfig:
    fields = order.fields if template is None else _with_template(template, order.fields)
    blank = EmulatorConfig(fields["image"], "", DEFAULT_DISK_GB, {}, [], None)
    config = changed_config(blank, fields)
    check_config(account, config)
    starts_ssh = template.starts_ssh if template and order.starts_ssh is None else order.starts_ssh
    if starts_ssh and account.ssh_keys:
        config.env.setdefault("PUBLIC_KEY", "\n".join(account.ssh_keys))
    starts_jupyter = template.starts_jupyter if template and order.starts_jupyter is None else order.starts_jupyter
    if starts_jupyter:
        config.env.setdefault("JUPYTER_PASSWORD", hashlib.sha256(order.name.encode()).hexdigest()[:20])
    return config


def _mount(
    account: EmulatedRunpodAccount, order: _PodOrder, template: Template | None
) -> tuple[PersistentMount | NetworkMount | None, EmulatedVolume | None]:
    mount = order.mounts.the_one()
    if isinstance(mount, NetworkMount):
        volume = account.volumes.get(mount.volume_id)
        if volume is None:
            raise RunpodApiError(400, f"network volume '{mount.volume_id}' not found")
        if order.cloud == COMMUNITY:
            raise RunpodApiError(400, "network volumes are not available on community cloud")
        return mount, volume
    if order.cpu is not None and mount is not None:
        raise RunpodApiError(400, "mounts.persistent is not allowed on CPU pods")
    if mount is None and order.cpu is None and template is not None:
        mount = template.persistent
    return mount, None


def _places(account: EmulatedRunpodAccount, order: _PodOrder, volume: EmulatedVolume | None) -> list[DataCenter]:
    """Where it may be. Raises Problem."""
    wanted = [account.catalog.data_center(id_) for id_ in order.data_centers]
    if None in wanted:
        unknown = next(id_ for id_ in order.data_centers if account.catalog.data_center(id_) is None)
        raise RunpodApiError(400, f"data center '{unknown}' not found")
    places = [each for each in wanted if each] or list(account.catalog.data_centers)
    if volume is None:
        return places
    if near := [each for each in places if each.id == volume.data_center]:
        return near
    raise RunpodApiError(
        400, f"network volume '{volume.id}' is in {volume.data_center}, not in a requested data center"
    )


def _check_global_network(gpu: GpuType | None, places: list[DataCenter]) -> list[DataCenter]:
    found = [each for each in places if each.has_global_network]
    if gpu is None or not found:
        raise RunpodApiError(400, "global networking needs an NVIDIA GPU and a data center that supports it")
    return found


def _gpu_pod(
    account: EmulatedRunpodAccount,
    order: _PodOrder,
    wanted: _Gpu,
    template: Template | None,
    config: EmulatorConfig,
    mount: PersistentMount | NetworkMount | None,
    places: list[DataCenter],
) -> EmulatedPod:
    gpu = account.catalog.gpu(wanted.id)
    if gpu is None:
        raise RunpodApiError(400, f"gpu type '{wanted.id}' not found")
    if wanted.allowed_cuda and wanted.min_cuda:
        raise RunpodApiError(400, "gpu.allowedCudaVersions and gpu.minCudaVersion are mutually exclusive")
    if wanted.count > gpu.max_counts[order.cloud]:
        raise RunpodApiError(
            400, f"gpu.count must be at most {gpu.max_counts[order.cloud]} for {gpu.id} on {order.cloud}"
        )
    says_cuda = wanted.allowed_cuda is not None or wanted.min_cuda is not None
    allowed = wanted.allowed_cuda if says_cuda or template is None else template.cuda_versions
    for place in places:
        versions = suitable_cuda(place, allowed or [], wanted.min_cuda)
        if not versions or account.faults.shortage(gpu.id, order.cloud, place.id):
            continue
        if account.free_gpus(gpu, order.cloud, place.id) >= wanted.count:
            price = gpu.prices_micros[order.cloud] * wanted.count
            return _pod(account, order, config, mount, place, price, gpu=gpu, cuda=versions[-1])
    raise no_capacity()


def suitable_cuda(place: DataCenter, allowed: list[str], least: str | None) -> list[str]:
    return [
        version
        for version in place.cuda_versions
        if (not allowed or version in allowed) and (least is None or cuda_key(version) >= cuda_key(least))
    ]


def _cpu_pod(
    account: EmulatedRunpodAccount,
    order: _PodOrder,
    config: EmulatorConfig,
    mount: PersistentMount | NetworkMount | None,
    places: list[DataCenter],
) -> EmulatedPod:
    wanted = order.cpu
    flavor = account.catalog.cpu(wanted.id) if wanted else None
    if wanted is None or flavor is None:
        raise RunpodApiError(400, f"cpu flavor '{wanted.id if wanted else ''}' not found")
    if wanted.count & (wanted.count - 1) or not flavor.min_vcpu <= wanted.count <= flavor.max_vcpu:
        raise RunpodApiError(400, f"cpu.vcpuCount must be a power of two from {flavor.min_vcpu} to {flavor.max_vcpu}")
    free = [each for each in places if not account.faults.shortage(flavor.id, order.cloud, each.id)]
    if not free or order.cloud == COMMUNITY:
        raise no_capacity()
    return _pod(account, order, config, mount, free[0], flavor.secure_micros * wanted.count, cpu=flavor)


def _pod(
    account: EmulatedRunpodAccount,
    order: _PodOrder,
    config: EmulatorConfig,
    mount: PersistentMount | NetworkMount | None,
    place: DataCenter,
    micros_per_hour: int,
    *,
    gpu: GpuType | None = None,
    cpu: CpuType | None = None,
    cuda: str | None = None,
) -> EmulatedPod:
    luck = account.faults.take_luck()
    return EmulatedPod(
        id=account.new_id(),
        name=order.name,
        config=config,
        gpu=gpu,
        gpu_count=order.gpu.count if order.gpu else 0,
        cpu=cpu,
        vcpu_count=order.cpu.count if order.cpu else 0,
        cloud=order.cloud,
        data_center=place,
        cuda_version=cuda,
        mount=mount,
        micros_per_hour=micros_per_hour,
        created=account.created_now(),
        luck=luck,
        has_global_network=order.has_global_network,
        has_gpus=not luck.has_no_gpu,
    )


# ------------------------------------------------------------------------------------------------------------ logs


def logs(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    """What has been said so far, as events. The stream ends there: an EventSource comes back for more by itself."""
    pod = find(account, call.id)
    source = call.one_of("source", ("container", "system"), "")
    tail = call.number("tail", DEFAULT_TAIL, least=0, most=MAX_TAIL)
    since, cursor = call.moment("since"), call.headers.get("last-event-id")
    said = [(shown_time(at), "system", line) for at, line in pod.system_log]
    said += [(line.at, "container", line.text) for line in account.host.log(pod.id)]
    said.sort(key=lambda each: _moment(each[0]))
    events = [(f"{at}/{number:012d}", at, kind, line) for number, (at, kind, line) in enumerate(said, 1)]
    events = [event for event in events if source in ("", event[2])]
    if cursor is not None:
        events = [event for event in events if _is_after(event[0], cursor)]
    elif since is not None:
        events = [event for event in events if _moment(event[1]) >= since]
    else:
        events = events[len(events) - min(tail, len(events)) :]
    lines = (
        f"id: {id_}\ndata: {json.dumps({'ts': at, 'source': kind, 'line': line}, separators=(',', ':'))}\n\n"
        for id_, at, kind, line in events
    )
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return RunpodAnswer(200, None, headers, "".join(lines))


def _is_after(event_id: str, cursor: str) -> bool:
    """A cursor is the id of an event, or only its time."""
    at, _, number = event_id.partition("/")
    cursor_at, _, cursor_number = cursor.partition("/")
    moment, last = _moment(at), _moment(cursor_at)
    return moment > last or (moment == last and number > (cursor_number or "9"))


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise RunpodApiError(422, None, ["header.Last-Event-ID: is not a date-time"]) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
