"""How everything looks in an answer."""

import ipaddress
from datetime import datetime

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
from windlass_emulators.runpod.calls import shown_time
from windlass_emulators.runpod.containers import SSH_PORT

MICROS = 1_000_000
# As published, in words. One of the published examples says otherwise.
ACTIONS = {
    RUNNING: ("stop", "restart", "terminate"),
    EXITED: ("start", "terminate"),
    ERROR: ("start", "terminate"),
    PROVISIONING: ("stop", "terminate"),
    STARTING: ("stop", "terminate"),
}
_PROXY = "ssh.runpod.io"
_GLOBAL_NETWORK = int(ipaddress.IPv4Address("10.65.0.2"))


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
    """As it was at a moment, for a list that lags. What was changed by hand since then shows at once."""
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
        "cost": of.micros_per_hour / MICROS if of.is_paid_at(moment) else 0.0,
        "locked": of.is_locked,
        "globalNetworking": _global_network(account, of),
        "runtime": _runtime(account, of, moment),
        "createdAt": shown_time(of.created),
        "startedAt": shown_time(of.started_at) if of.started_at and of.started_at <= moment else None,
    }
    if of.gpu is not None:
        # At least one by the published schema, whatever is really there.
        shown["gpu"] = {"id": of.gpu.id, "count": of.gpu_count}
    if of.cpu is not None:
        memory_gb = max(1, int(of.vcpu_count * of.cpu.ram_gb_per_vcpu))
        shown["cpu"] = {"id": of.cpu.id, "vcpuCount": of.vcpu_count, "memory": memory_gb}
    return shown


def mounts(mount: PersistentMount | NetworkMount | None) -> Json:
    if isinstance(mount, PersistentMount):
        return {"persistent": {"size": mount.size_gb, "path": mount.path}}
    return {} if mount is None else {"network": [{"volumeId": mount.volume_id, "path": mount.path}]}


def _runtime(account: EmulatedRunpodAccount, of: EmulatedPod, moment: datetime) -> Json | None:
    since = of.has_runtime_at(moment)
    if since is None or of.status_at(moment) != RUNNING:
        return None
    gpus = of.gpu_count if of.gpu and of.has_gpus else 0
    return {
        "uptime": max(0, int((moment - since).total_seconds())),
        "gpus": [{"util": 0, "memoryUtil": 0} for _ in range(gpus)],
        "cpu": {"util": 0},
        "memory": {"util": 0},
        "ports": [_port(account, of, port) for port in of.config.ports],
    }


def _port(account: EmulatedRunpodAccount, of: EmulatedPod, port: str) -> Json:
    number, _, kind = port.partition("/")
    # HTTP is reached through Runpod's proxy, and has no address of its own.
    public = of.public_ports.get(int(number)) if kind == "tcp" else None
    return {"private": int(number), "public": public, "type": kind, "ip": account.host.address if public else None}


def _ssh(account: EmulatedRunpodAccount, of: EmulatedPod, moment: datetime) -> Json:
    token = f"{of.id}-{of.id[:8]}"
    proxy = {"host": _PROXY, "port": 22, "username": token, "command": f"ssh {token}@{_PROXY}"}
    public = of.public_ports.get(SSH_PORT) if _runtime(account, of, moment) else None
    if public is None:
        return {"proxy": None if of.status_at(moment) == PROVISIONING else proxy, "direct": None}
    host, user = account.host.address, account.host.user
    direct = {"host": host, "port": public, "username": user, "command": f"ssh {user}@{host} -p {public}"}
    return {"proxy": proxy, "direct": direct}


def _global_network(account: EmulatedRunpodAccount, of: EmulatedPod) -> Json:
    if not of.has_global_network:
        return {"enabled": False}
    number = list(account.pods).index(of.id) if of.id in account.pods else 0
    address = str(ipaddress.IPv4Address(_GLOBAL_NETWORK + number))
    return {"enabled": True, "ip": address, "internalDns": f"{of.id}.runpod.internal"}


def template(of: Template) -> Json:
    return {
        "id": of.id,
        "name": of.name,
        **config(of.config),
        "mounts": mounts(of.persistent),
        "serverless": of.is_serverless,
        "public": of.is_public,
        "category": of.category,
        "startSsh": of.starts_ssh,
        "startJupyter": of.starts_jupyter,
        "allowedCudaVersions": list(of.cuda_versions),
    }


def volume(of: EmulatedVolume) -> Json:
    return {"id": of.id, "name": of.name, "size": of.size_gb, "dataCenter": of.data_center, "type": of.type}
