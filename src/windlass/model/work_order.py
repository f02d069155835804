"""The work order: the settings that a machine gets from the control plane after it joined.

Its environment may contain secrets, so it is never printed, stored or logged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from windlass.model.config import LogsConfig, WorkerConfig
from windlass.model.fleet import FleetConfig
from windlass.model.ray import RaySettings


@dataclass(frozen=True, slots=True)
class RayHead:
    """The cluster that nodes join. `env` contains its credentials."""

    address: str
    ray_version: str
    python_version: str
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class RayOrder:
    """Run as a node of this cluster and claim nothing. The machine must have the same versions."""

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
    # Version of the control plane, which the worker should have too.
    version: str
    handler: str | None = None
    exec: str | None = None
    is_inline: bool = False
    # A path on the machine.
    chdir: str | None = None
    # Claim nothing while no GPU responds.
    needs_gpu: bool = False
    # Mount point of the storage that the fleet's machines share. Heartbeats report its usage.
    storage_path: str | None = None
    timeout_s: float | None = None
    memory_limit_mb: int | None = None
    # Parts of payloads that errors and output must not quote.
    redact: tuple[str, ...] = ()
    # Whether the worker sends what it and its handler print, and how much of it.
    sends_output: bool = True
    output_bytes_per_s: int = 32_768
    output_bytes_per_attempt: int = 1 << 20
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
    logs: LogsConfig | None = None,
    ray_head: RayHead | None = None,
) -> WorkOrder:
    """`queues`: those the worker was spawned with, which it keeps. `ray_head`: the cluster, if the engine is Ray."""
    logs = logs or LogsConfig()
    head = ray_head if fleet.engine == "ray" else None
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
        redact=fleet.redact,
        sends_output=logs.send_output,
        output_bytes_per_s=logs.output_bytes_per_s,
        output_bytes_per_attempt=logs.output_bytes_per_attempt,
        env={**fleet.env, **(head.env if head is not None else {})},
        ray=RayOrder(head.address, head.ray_version, head.python_version, fleet.ray) if head is not None else None,
    )
