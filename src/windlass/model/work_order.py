"""A work order: what a machine that has joined is to do, and how. The control plane hands it out.

Its environment may hold secrets. It is never printed, stored or logged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from windlass.model.config import WorkerConfig
from windlass.model.fleet import FleetConfig
from windlass.model.ray import RaySettings


@dataclass(frozen=True, slots=True)
class RayHead:
    """The cluster that nodes join. `env` lets them in: it is a secret."""

    address: str
    ray_version: str
    python_version: str
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class RayOrder:
    """Be a node of this cluster, and claim nothing. Its versions are to be the machine's own."""

    address: str
    ray_version: str
    python_version: str
    settings: RaySettings


@dataclass(frozen=True, slots=True)
class WorkOrder:
    worker_id: str
    fleet: str
    queues: tuple[str, ...]
    concurrency: int
    heartbeat_interval_s: float
    lease_s: float
    drain_timeout_s: float
    max_payload_bytes: int
    # Of the control plane; a worker should run the same.
    version: str
    handler: str | None = None
    exec: str | None = None
    is_inline: bool = False
    # On the machine.
    chdir: str | None = None
    # Without a GPU that answers, claim nothing.
    needs_gpu: bool = False
    # Storage that the fleet's machines share, where it is mounted: how much of it is used is told with heartbeats.
    storage_path: str | None = None
    timeout_s: float | None = None
    memory_limit_mb: int | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    ray: RayOrder | None = None


def work_order(
    worker_id: str,
    fleet_name: str,
    queues: Sequence[str],
    fleet: FleetConfig,
    defaults: WorkerConfig,
    *,
    max_payload_bytes: int,
    version: str,
    ray_head: RayHead | None = None,
) -> WorkOrder:
    """`queues` are those the worker was hired for: a worker keeps what it was started with. `ray_head`: what machines
    of a fleet with that engine join."""
    return WorkOrder(
        worker_id=worker_id,
        fleet=fleet_name,
        queues=tuple(queues),
        concurrency=fleet.concurrency,
        heartbeat_interval_s=fleet.heartbeat_interval_s,
        lease_s=fleet.heartbeat_timeout_s,
        drain_timeout_s=fleet.stop_timeout_s,
        max_payload_bytes=max_payload_bytes,
        version=version,
        handler=fleet.handler,
        exec=fleet.exec,
        is_inline=fleet.is_inline,
        chdir=str(fleet.chdir) if fleet.chdir is not None else None,
        needs_gpu=fleet.has_gpu,
        storage_path=fleet.runpod.volume_path if fleet.runpod.network_volume_id is not None else None,
        timeout_s=defaults.timeout_s,
        memory_limit_mb=defaults.memory_limit_mb,
        env={**fleet.env, **(ray_head.env if ray_head is not None and fleet.engine == "ray" else {})},
        ray=_ray_order(fleet, ray_head),
    )


def _ray_order(fleet: FleetConfig, head: RayHead | None) -> RayOrder | None:
    if head is None or fleet.engine != "ray":
        return None
    return RayOrder(head.address, head.ray_version, head.python_version, fleet.ray)
