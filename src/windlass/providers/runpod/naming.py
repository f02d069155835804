"""Tags of pods, and the body of a request for a pod. Pure.

A fleet's pod has its worker's id as its name, which need not be unique, and in its environment a tag that names the
database, fleet and worker. A pod that a person created from one of these has the tag but another name: it is theirs.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from windlass.model.errors import InvalidRequest
from windlass.model.machine import MachineRequest
from windlass.model.runpod import GpuChoice, RunpodSettings
from windlass.providers.fingerprint import fingerprint

TAG = "WINDLASS_POD"
JOIN = "WINDLASS_JOIN"
PUBLIC_KEY = "PUBLIC_KEY"


def fleet_tag(identity: str, fleet: str) -> str:
    """The prefix of the tags of all pods of a fleet. Fleet names have no slash."""
    return f"{fingerprint(identity)}/{fleet}/"


def tagged_worker(pod: Mapping[str, Any], fleet_tag: str) -> str | None:
    """The worker that the pod's tag names. None if the tag is not of this fleet."""
    tag = _read_tag(pod)
    return tag.removeprefix(fleet_tag) if tag.startswith(fleet_tag) else None


def is_of_fleet(pod: Mapping[str, Any], fleet_tag: str) -> bool:
    """Whether both the pod's tag and its name are of a worker of this fleet."""
    worker_id = tagged_worker(pod, fleet_tag)
    return worker_id is not None and worker_id == pod.get("name")


def count_pods(pods: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """Number of pods by installation and fleet."""
    counts: Counter[tuple[str, str]] = Counter()
    for pod in pods:
        installation, slash, rest = _read_tag(pod).partition("/")
        fleet = rest.rpartition("/")[0]
        if slash and is_of_fleet(pod, f"{installation}/{fleet}/"):
            counts[installation, fleet] += 1
    return counts


def _read_tag(pod: Mapping[str, Any]) -> str:
    env = pod.get("env")
    return str(env.get(TAG) or "") if isinstance(env, Mapping) else ""


def pod_body(
    request: MachineRequest,
    settings: RunpodSettings,
    fleet_tag: str,
    *,
    url: str,
    public_key: str | None,
    ca_pem: str | None = None,
) -> dict[str, Any]:
    """The body of a request for a pod, without its location. With `public_key` the pod accepts SSH connections.

    A pod knows only its worker's id, the URL of the control plane, a token for joining once, and the certificates of
    the control plane's authority (`ca_pem`) if that is not publicly trusted.
    """
    if request.join_token is None:
        raise InvalidRequest(f"creating pod {request.name}: no join token, and without one its worker cannot join.")
    join = {"worker_id": request.name, "url": url, "join_token": request.join_token}
    if ca_pem is not None:
        join["ca_pem"] = ca_pem
    env = {**settings.env, TAG: f"{fleet_tag}{request.name}", JOIN: json.dumps(join)}
    if public_key is not None:
        env[PUBLIC_KEY] = "\n".join(filter(None, (public_key, settings.env.get(PUBLIC_KEY))))
    ports = settings.opened_ports(has_ssh=public_key is not None)
    mount = {"volumeId": settings.network_volume_id, "path": settings.volume_path}
    optional = {
        "image": settings.image,
        "args": settings.args,
        "disk": settings.disk_gb,
        "registry": settings.registry_id,
        "templateId": settings.template_id,
        "ports": list(ports) or None,
        "mounts": {"network": [mount]} if settings.network_volume_id is not None else None,
        "startSsh": True if public_key is not None else None,
    }
    return {"name": request.name, "env": env} | {key: value for key, value in optional.items() if value is not None}


def location_body(choice: GpuChoice, settings: RunpodSettings) -> dict[str, Any]:
    """The rest of the body: GPU, cloud and data centers."""
    gpu: dict[str, Any] = {"id": choice.gpu, "count": settings.gpu_count}
    if settings.min_cuda_version is not None:
        gpu["minCudaVersion"] = settings.min_cuda_version
    places = [place for place in choice.data_centers if place not in settings.excluded_data_centers]
    where = {"dataCenterIds": places} if places else {}
    return {"gpu": gpu, "cloud": choice.cloud, **where}
