"""The program of a hired machine: it makes the machine a node of the Ray cluster, and says that it lives.

It claims nothing and runs nothing: what Ray places on the node is claimed, beaten for and finished by the dispatcher.
It registers first and then joins, so that one that booted and never joined can be told from one that never booted.
When Ray's part ends, so does it: in good order if the worker was told to end, else as a failure. When it is ended, even
by SIGKILL, Ray's part ends with it.
"""

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import psutil
import structlog

from windlass.model.errors import DatabaseUnavailable, WindlassError
from windlass.model.ray import RaySettings
from windlass.model.worker import LIVE, HeartbeatReply, Registration, WorkerKind, WorkerStatus
from windlass.policy.backoff import reconnect_delay_s
from windlass.ports.transport import WorkerTransport
from windlass.ray.cluster import FLEET_LABEL, WORKER_LABEL, label_value
from windlass.ray.temp_dir import ray_folder
from windlass.ray.versions import MATCH_MINOR, Versions, check_versions, our_versions
from windlass.worker.heartbeat import Heartbeat, OpenTransport
from windlass.worker.lifecycle import ExitReason
from windlass.worker.process import ProcessGroup, describe_exit, start_group

# From one look at Ray's processes to the next.
WATCH_INTERVAL_S = 0.5
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class NodeSettings:
    worker_id: str
    fleet: str
    queues: tuple[str, ...]
    # Of the head.
    address: str
    ray: RaySettings
    concurrency: int = 1
    heartbeat_interval_s: float = 5.0
    lease_s: float = 30.0
    registration_timeout_s: float = 0.0
    version: str | None = None
    # Of the head, where they are known before it is asked.
    head_versions: Versions | None = None
    # Added to the environment of Ray's processes, and so of handlers.
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    # Identifies this start of the program when it registers more than once under the same worker id.
    start_id: str = field(default_factory=lambda: uuid4().hex)


class NodeLost(WindlassError):
    """Ray's part of this machine ended of itself."""


class Node:
    def __init__(self, settings: NodeSettings, open_transport: OpenTransport) -> None:
        self._settings = settings
        self._open_transport = open_transport
        self._status: WorkerStatus | None = WorkerStatus.SPAWNING
        self._is_told = False
        # Ray's part has ended.
        self._is_over = False
        self._changed = asyncio.Event()

    async def run(self) -> ExitReason:
        """Until told to end, or until Ray's part ends of itself: NodeLost."""
        settings = self._settings
        if settings.head_versions is not None:
            check_versions(our_versions(), settings.head_versions, f"the Ray head at {settings.address}")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        async with self._open_transport() as transport:
            if not await self._has_registered(transport):
                return ExitReason.DRAINED
            heartbeat = self._start_heartbeat()
            try:
                with ray_folder() as folder:
                    return await self._run_ray(transport, folder)
            finally:
                await heartbeat.stop()

    async def _run_ray(self, transport: WorkerTransport, folder: Path) -> ExitReason:
        command, env = ray_start(self._settings, folder), {**os.environ, **self._settings.env, **MATCH_MINOR}
        group = await start_group(command, env=env, max_output_bytes=math.inf)
        group.call_on_exit(self._changed.set)
        watch = asyncio.create_task(self._watch_raylet(group))
        try:
            return await self._live(transport, group)
        finally:
            watch.cancel()
            await group.end()

    async def _watch_raylet(self, group: ProcessGroup) -> None:
        """`ray start --block` goes on without a raylet that ended in good order: a node that was drained."""
        was_there = is_there = False
        while is_there or not was_there:
            await asyncio.sleep(WATCH_INTERVAL_S)
            was_there = is_there or was_there
            is_there = await asyncio.to_thread(_has_raylet, group.pid)
        self._is_over = True
        self._changed.set()

    async def _live(self, transport: WorkerTransport, group: ProcessGroup) -> ExitReason:
        while self._status in LIVE and not (self._is_told or self._is_over) and group.returncode is None:
            await self._changed.wait()
            self._changed.clear()
        if self._status not in LIVE:
            log.warning("ended by others", worker_id=self._settings.worker_id)
            return ExitReason.LOST
        # It was drained, perhaps, and we have not heard of it yet.
        if not self._is_told and not await self._is_to_end(transport):
            raise NodeLost(_how_it_ended(group))
        await group.end()
        with contextlib.suppress(DatabaseUnavailable):
            await transport.deregister(self._settings.worker_id, "its node was drained")
        return ExitReason.DRAINED

    async def _is_to_end(self, transport: WorkerTransport) -> bool:
        try:
            pulse = await transport.heartbeat(self._settings.worker_id)
        except DatabaseUnavailable:
            return False
        return pulse.status is WorkerStatus.TERMINATING

    async def _has_registered(self, transport: WorkerTransport) -> bool:
        """False when told to end meanwhile, or over already."""
        settings = self._settings
        registration = Registration(
            worker_id=settings.worker_id,
            queues=settings.queues,
            fleet=settings.fleet,
            concurrency=settings.concurrency,
            lease_s=settings.lease_s,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=settings.version,
            kind=WorkerKind.NODE,
            start_id=settings.start_id,
        )
        give_up_at = time.monotonic() + settings.registration_timeout_s
        failures = 0
        while not self._is_told:
            try:
                self._status = await transport.register(registration)
            except DatabaseUnavailable as error:
                failures += 1
                if time.monotonic() >= give_up_at:
                    raise
                log.warning("not registered, trying again", error=str(error), failures=failures)
                await asyncio.sleep(reconnect_delay_s(failures, random.random()))  # noqa: S311
            else:
                log.info("node registered", worker_id=settings.worker_id, ray=settings.address)
                return self._status in LIVE
        return False

    def _start_heartbeat(self) -> Heartbeat:
        loop = asyncio.get_running_loop()

        def on_pulse(pulse: HeartbeatReply) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(self._on_pulse, pulse)

        heartbeat = Heartbeat(
            self._open_transport,
            self._settings.worker_id,
            interval_s=self._settings.heartbeat_interval_s,
            lease_s=self._settings.lease_s,
            held_claims=list,
            vitals=lambda: {"pid": os.getpid()},
            on_reply=on_pulse,
            on_mismatch=lambda error: log.error("the control plane is of another version", error=str(error)),
        )
        heartbeat.start()
        return heartbeat

    def _on_pulse(self, pulse: HeartbeatReply) -> None:
        # One that is terminating goes on: its dispatcher drains it, and then it ends of itself.
        self._status = pulse.status
        self._changed.set()

    def _on_signal(self) -> None:
        self._is_told = True
        self._changed.set()


def _has_raylet(pid: int) -> bool:
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return False
    for child in children:
        with contextlib.suppress(psutil.Error):
            if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _how_it_ended(group: ProcessGroup) -> str:
    """With its last line, which in Ray's log is the cause."""
    if group.returncode is None:
        return "the Ray node ended by itself"
    last = next((line.strip() for line in reversed(group.tail().splitlines()) if line.strip()), "")
    return f"the Ray node ended by itself: it {describe_exit(group.returncode)}" + (f" ({last[:300]})" if last else "")


def ray_start(settings: NodeSettings, folder: Path) -> list[str]:
    """The command that joins the cluster and goes on until the node ends."""
    ray = settings.ray
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={settings.address}"),
        "--disable-usage-stats",
        # Other nodes may run on this host: a folder of its own, and ports that nobody else has.
        *(f"--temp-dir={folder}", "--min-worker-port=0", "--max-worker-port=0"),
        f"--labels={WORKER_LABEL}={settings.worker_id},{FLEET_LABEL}={label_value(settings.fleet)}",
    ]
    if ray.node_cpus is not None:
        command.append(f"--num-cpus={ray.node_cpus}")
    if ray.node_gpus is not None:
        command.append(f"--num-gpus={ray.node_gpus}")
    if ray.node_resources:
        command.append(f"--resources={json.dumps(ray.node_resources)}")
    if ray.object_store_mb is not None:
        command.append(f"--object-store-memory={ray.object_store_mb << 20}")
    return command
