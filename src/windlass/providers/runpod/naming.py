"""How our pods are told from all others of an account, and what a pod is asked for. Pure.

A pod has a name, which need not be unique, and an environment. Ours have their worker's id as their name and, in their
environment, a tag that says which database, fleet and worker they belong to. A pod that a person has made from one of
ours carries the tag under another name: it is theirs.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from windlass.model.errors import InvalidRequest
from windlass.model.machine import MachineRequest
from windlass.model.runpod import GpuChoice, RunpodSettings

TAG = "WINDLASS_POD"
JOIN = "WINDLASS_JOIN"
PUBLIC_KEY = "PUBLIC_KEY"


def installation_of(identity: str) -> str:
    """`identity`: what tells one database from another. No secret can be read from the result."""
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def fleet_tag(identity: str, fleet: str) -> str:
    """What the tags of all pods of a fleet begin with, and nobody else's. Names of fleets have no slash."""
    return f"{installation_of(identity)}/{fleet}/"


def worker_of(pod: Mapping[str, Any], fleet_wide: str) -> str | None:
    """The worker whose pod this is, by its tag; None if it is not of this fleet."""
    tag = _tag_of(pod)
    return tag.removeprefix(fleet_wide) if tag.startswith(fleet_wide) else None


def is_listed(pod: Mapping[str, Any], fleet_wide: str) -> bool:
    """Whether it is a pod of this fleet, by its tag and its name."""
    worker_id = worker_of(pod, fleet_wide)
    return worker_id is not None and worker_id == pod.get("name")


def fleets_of(pods: list[dict[str, Any]], identity: str) -> dict[str, int]:
    """How many pods of each fleet of ours there are."""
    counts: dict[str, int] = {}
    for pod in pods:
        installation, _, rest = _tag_of(pod).partition("/")
        fleet = rest.rpartition("/")[0]
        if installation == installation_of(identity) and is_listed(pod, f"{installation}/{fleet}/"):
            counts[fleet] = counts.get(fleet, 0) + 1
    return counts


def other_installations(pods: list[dict[str, Any]], identity: str) -> dict[str, int]:
    """How many pods of each other database there are, by what its tags begin with."""
    counts: dict[str, int] = {}
    for pod in pods:
        installation, slash, rest = _tag_of(pod).partition("/")
        fleet = rest.rpartition("/")[0]
        if slash and installation != installation_of(identity) and is_listed(pod, f"{installation}/{fleet}/"):
            counts[installation] = counts.get(installation, 0) + 1
    return counts


def _tag_of(pod: Mapping[str, Any]) -> str:
    env = pod.get("env")
    return str(env.get(TAG) or "") if isinstance(env, Mapping) else ""


def order_of(
    request: MachineRequest,
    settings: RunpodSettings,
    fleet_wide: str,
    *,
    url: str,
    public_key: str | None,
) -> dict[str, Any]:
    """The body of a request for a pod, but for where. `public_key`: whom it lets in by SSH; None: nobody.

    All a pod knows of us is its worker's id, where the control plane is, and a token that joins once.
    """
    if request.join_token is None:
        raise InvalidRequest(f"creating pod {request.name}: it has no join token, and without one it cannot join.")
    join = {"worker_id": request.name, "url": url, "join_token": request.join_token}
    env = {**settings.env, TAG: f"{fleet_wide}{request.name}", JOIN: json.dumps(join)}
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


def place_of(choice: GpuChoice, settings: RunpodSettings) -> dict[str, Any]:
    """The rest of it."""
    gpu: dict[str, Any] = {"id": choice.gpu, "count": settings.gpu_count}
    if settings.min_cuda_version is not None:
        gpu["minCudaVersion"] = settings.min_cuda_version
    where = {"dataCenterIds": list(choice.data_centers)} if choice.data_centers else {}
    return {"gpu": gpu, "cloud": choice.cloud, **where}
