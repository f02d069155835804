"""The program of a spawned machine: joins the machine to the Ray cluster and sends its heartbeats.

It claims and runs nothing: the dispatcher does that for the tasks that Ray places here. It registers before it joins,
which distinguishes a machine that booted and never joined from one that never booted. When Ray's processes exit, so
does the program: with success if its worker is terminating, else with NodeLost. If the program is killed, even by
SIGKILL, Ray's processes are killed with it.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import structlog

from windlass.model.errors import DatabaseUnavailable, WindlassError
from windlass.model.ray import RaySettings
from windlass.model.worker import LIVE, HeartbeatReply, WorkerKind, WorkerStatus
from windlass.ports.transport import WorkerTransport
from windlass.ray.cluster import FLEET_LABEL, WORKER_LABEL, to_label_value
from windlass.ray.temp_dir import ray_temp_dir
from windlass.ray.versions import MATCH_MINOR_ENV, Versions, check_versions, our_versions
from windlass.retry import retrying
from windlass.worker.heartbeat import Heartbeat, OpenTransport
from windlass.worker.lifecycle import ExitReason
from windlass.worker.output_buffer import OutputBuffer
from windlass.worker.output_shipper import OutputShipper
from windlass.worker.process import ProcessGroup, describe_exit, start_group
from windlass.worker.registration import RegistrationSettings

RAYLET_CHECK_INTERVAL_S = 0.5
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings(RegistrationSettings):
    worker_id: str
    # Address of the head.
    address: str
    ray: RaySettings
    # Versions of the head, if known in advance.
    head_versions: Versions | None = None


class NodeLost(WindlassError):
    """Ray's processes on this machine exited, and the worker was not terminating."""


class NodeProgram:
    def __init__(
        self, settings: NodeSettings, open_transport: OpenTransport, output: OutputBuffer | None = None
    ) -> None:
        """`output`: what this program and Ray's programs print, to send. The dispatcher sends that of tasks."""
        self._output = output
        self._settings = settings
        self._open_transport = open_transport
        self._status: WorkerStatus | None = WorkerStatus.SPAWNING
        self._is_stopping = False
        self._has_raylet_exited = False
        self._changed = asyncio.Event()

    async def run(self) -> ExitReason:
        """Run until stopped or drained. Raises NodeLost."""
        settings = self._settings
        if settings.head_versions is not None:
            check_versions(our_versions(), settings.head_versions, f"the Ray head at {settings.address}")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        async with self._open_transport() as transport:
            if not await self._register(transport):
                return ExitReason.DRAINED
            heartbeat = self._start_heartbeat()
            async with self._sending_output():
                try:
                    with ray_temp_dir() as temp_dir:
                        exit_reason = await self._run_ray(transport, temp_dir)
                finally:
                    await heartbeat.stop()
            if exit_reason is ExitReason.DRAINED:
                with contextlib.suppress(DatabaseUnavailable):
                    await transport.deregister(settings.worker_id, "node drained")
            return exit_reason

    @contextlib.asynccontextmanager
    async def _sending_output(self) -> AsyncIterator[None]:
        """Ends before the worker deregisters: then the control plane deletes the machine."""
        if self._output is None:
            yield
            return
        shipper = OutputShipper(self._open_transport, self._settings.worker_id, self._output)
        shipper.start()
        try:
            yield
        finally:
            self._output.close()
            await shipper.stop()

    async def _register(self, transport: WorkerTransport) -> bool:
        """Returns False if the program was stopped meanwhile, or its worker is not live any longer."""
        settings = self._settings
        registration = settings.registration(settings.worker_id, WorkerKind.NODE)
        try:
            self._status = await retrying(
                lambda: transport.register(registration),
                "register node failed",
                timeout_s=settings.registration_timeout_s,
                is_stopped=lambda: self._is_stopping,
                worker_id=settings.worker_id,
            )
        except DatabaseUnavailable:
            if self._is_stopping:
                return False
            raise
        log.info("registered node", worker_id=settings.worker_id, ray_address=settings.address)
        return self._status in LIVE

    def _start_heartbeat(self) -> Heartbeat:
        loop = asyncio.get_running_loop()

        def on_reply(reply: HeartbeatReply) -> None:
            """Runs on the heartbeat's thread."""
            with contextlib.suppress(RuntimeError):  # the loop has just closed
                loop.call_soon_threadsafe(self._on_heartbeat_reply, reply)

        heartbeat = Heartbeat(
            self._open_transport,
            self._settings.worker_id,
            interval_s=self._settings.heartbeat_interval_s,
            lease_s=self._settings.lease_s,
            held_claims=list,
            vitals=lambda: {"pid": os.getpid()},
            on_reply=on_reply,
            on_mismatch=lambda error: log.error("check schema failed", error=str(error)),
        )
        heartbeat.start()
        return heartbeat

    def _on_heartbeat_reply(self, reply: HeartbeatReply) -> None:
        # A terminating node continues: the dispatcher drains it, and then Ray's processes exit.
        self._status = reply.status
        self._changed.set()

    def _on_signal(self) -> None:
        self._is_stopping = True
        self._changed.set()

    async def _run_ray(self, transport: WorkerTransport, temp_dir: Path) -> ExitReason:
        command = ray_start_command(self._settings, temp_dir)
        group = await start_group(command, env={**os.environ, **MATCH_MINOR_ENV}, limits_output=False)
        group.call_on_exit(self._changed.set)
        watching = asyncio.create_task(self._watch_raylet(group))
        try:
            return await self._wait_for_end(transport, group)
        finally:
            watching.cancel()
            await group.end()

    async def _watch_raylet(self, group: ProcessGroup) -> None:
        """`ray start --block` keeps running after its raylet exited with success, as that of a drained node does."""
        has_started = is_running = False
        while is_running or not has_started:
            await asyncio.sleep(RAYLET_CHECK_INTERVAL_S)
            has_started = is_running or has_started
            is_running = await asyncio.to_thread(_has_raylet, group.pid)
        self._has_raylet_exited = True
        self._changed.set()

    async def _wait_for_end(self, transport: WorkerTransport, group: ProcessGroup) -> ExitReason:
        worker_id = self._settings.worker_id
        while self._status in LIVE and not (self._is_stopping or self._has_raylet_exited) and group.returncode is None:
            await self._changed.wait()
            self._changed.clear()
        if self._status not in LIVE:
            log.warning("stop terminated worker", worker_id=worker_id)
            return ExitReason.LOST
        if not self._is_stopping:
            # The node may have been drained before a heartbeat reported that its worker is terminating.
            status = None
            with contextlib.suppress(DatabaseUnavailable):
                status = (await transport.heartbeat(worker_id)).status
            if status is not WorkerStatus.TERMINATING:
                raise NodeLost(_describe_ray_exit(group))
        await group.end()
        return ExitReason.DRAINED


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


def _describe_ray_exit(group: ProcessGroup) -> str:
    """With the last line of its output, which in Ray's log is the cause."""
    if group.returncode is None:
        return "the Ray node exited unexpectedly: its raylet ended"
    last = next((line.strip() for line in reversed(group.tail().splitlines()) if line.strip()), "")
    return f"the Ray node exited unexpectedly: it {describe_exit(group.returncode)}" + (
        f" ({last[:300]})" if last else ""
    )


def ray_start_command(settings: NodeSettings, temp_dir: Path) -> list[str]:
    """The command that joins the cluster and runs until the node ends."""
    ray = settings.ray
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={settings.address}"),
        "--disable-usage-stats",
        # A directory of its own and free ports, because other nodes may run on this host.
        *(f"--temp-dir={temp_dir}", "--min-worker-port=0", "--max-worker-port=0"),
        f"--labels={WORKER_LABEL}={settings.worker_id},{FLEET_LABEL}={to_label_value(settings.fleet)}",
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
