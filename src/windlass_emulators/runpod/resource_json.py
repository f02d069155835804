"""Resources as the API renders them."""

from datetime import UTC, datetime

from windlass_emulators.http import Json
from windlass_emulators.runpod.account import (
    ERROR,
    EXITED,
    PROVISIONING,
    RUNNING,
    STARTING,
    EmulatedPod,
    EmulatedRunpodAccount,
    EmulatedVolume,
    EmulatorConfig,
    NetworkMount,
    PersistentMount,
    Template,
)
from windlass_emulators.runpod.containers import SSH_PORT

MICROS = 1_000_000
# The published text. One of the published examples contradicts it.
ACTIONS = {
    RUNNING: ("stop", "restart", "terminate"),
    EXITED: ("start", "terminate"),
    ERROR: ("start", "terminate"),
    PROVISIONING: ("stop", "terminate"),
    STARTING: ("stop", "terminate"),
}
_PROXY = "ssh.runpod.io"


def shown_time(moment: datetime) -> str:
    # The document's examples have whole seconds; the vendor's answers have milliseconds.
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def config(of: EmulatorConfig) -> Json:
    return {
        "image": of.image,
        "args": of.args,
        "disk": of.disk_gb,
        "env": dict(of.env),
        "ports": list(of.ports),
        "registry": of.registry,
    }


def pod(account: EmulatedRunpodAccount, of: EmulatedPod, moment: datetime | None = None) -> Json:
    """The pod as it was at `moment`, for a list with an injected lag."""
    moment = moment or account.now
    status = of.status_at(moment)
    shown: Json = {
        "id": of.id,
        "name": of.name,
        **config(of.config),
        "status": status,
        "actions": list(ACTIONS[status]),
        "mounts": mounts(of.mount),
        "cloud": of.cloud,
        "dataCenterId": of.data_center.id,
        "cudaVersion": of.cuda_version,
        "ssh": _ssh(account, of, moment),
        "template": None,
        "cost": of.micros_per_hour / MICROS if of.is_billed_at(moment) else 0.0,
        "locked": of.is_locked,
        "globalNetworking": {"enabled": False},
        "runtime": _runtime(account, of, moment),
        "createdAt": shown_time(of.created),
        "startedAt": shown_time(of.started_at) if of.started_at and of.started_at <= moment else None,
    }
    # The published schema has no zero: the count is what was ordered, even if the pod has no GPU.
    shown["gpu"] = {"id": of.gpu.id, "count": of.gpu_count}
    return shown


def mounts(mount: PersistentMount | NetworkMount | None) -> Json:
    if isinstance(mount, PersistentMount):
        return {"persistent": {"size": mount.size_gb, "path": mount.path}}
    return {} if mount is None else {"network": [{"volumeId": mount.volume_id, "path": mount.path}]}


def _runtime(account: EmulatedRunpodAccount, of: EmulatedPod, moment: datetime) -> Json | None:
    since = of.runtime_since(moment)
    if since is None or of.status_at(moment) != RUNNING:
        return None
    gpus = of.gpu_count if of.has_gpus else 0
    return {
        "uptime": max(0, int((moment - since).total_seconds())),
        "gpus": [{"util": 0, "memoryUtil": 0} for _ in range(gpus)],
        "cpu": {"util": 0},
        "memory": {"util": 0},
        "ports": [_port(account, of, port) for port in of.config.ports],
    }


def _port(account: EmulatedRunpodAccount, of: EmulatedPod, port: str) -> Json:
    number, _, kind = port.partition("/")
    # HTTP ports are reached through Runpod's proxy and have no public address.
    public = of.public_ports.get(int(number)) if kind == "tcp" else None
    return {
        "private": int(number),
        "public": public,
        "type": kind,
        "ip": of.faults.host or account.host.address if public else None,
    }


def _ssh(account: EmulatedRunpodAccount, of: EmulatedPod, moment: datetime) -> Json:
    token = f"{of.id}-{of.id[:8]}"
    proxy = {"host": _PROXY, "port": 22, "username": token, "command": f"ssh {token}@{_PROXY}"}
    public = of.public_ports.get(SSH_PORT) if _runtime(account, of, moment) else None
    if public is None:
        return {"proxy": None if of.status_at(moment) == PROVISIONING else proxy, "direct": None}
    host, user = account.host.address, account.host.user
    direct = {"host": host, "port": public, "username": user, "command": f"ssh {user}@{host} -p {public}"}
    return {"proxy": proxy, "direct": direct}


def template(of: Template) -> Json:
    return {
        "id": of.id,
        "name": of.name,
        **config(of.config),
        "mounts": mounts(of.persistent),
        "serverless": False,
        "public": False,
        "category": of.category,
        "startSsh": of.starts_ssh,
        "startJupyter": of.starts_jupyter,
        "allowedCudaVersions": list(of.cuda_versions),
    }


def volume(of: EmulatedVolume) -> Json:
    return {"id": of.id, "name": of.name, "size": of.size_gb, "dataCenter": of.data_center, "type": of.type}
