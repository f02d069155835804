"""Runs a Ray head, for orchestrators without an external one.

The head is restarted at the same address when it dies. The state of the cluster is lost with it: nodes of the old head
exit by themselves and are replaced, and the dispatcher requeues its tasks. The head offers no resources, so that no
task is placed on it. Nodes and drivers need its token.
"""

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from windlass.model.errors import WindlassError
from windlass.ray.cluster import ClusterUnavailable
from windlass.ray.probe import probe_head
from windlass.ray.temp_dir import ray_temp_dir
from windlass.worker.process import ProcessGroup, describe_exit, start_group

START_TIMEOUT_S = 60.0
# Delay before a restart, doubled with each failure.
MIN_RESTART_DELAY_S, MAX_RESTART_DELAY_S = 0.5, 30.0
# Shared memory for the head's own small objects. Ray's minimum.
OBJECT_STORE_BYTES = 80 << 20
# Nodes and drivers that lose their head exit after this time. A restarted head is a new cluster that knows none of
# them, so waiting longer would be useless.
RECONNECT_TIMEOUT_S = 10
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HeadAddress:
    """The address of a head, and the environment that nodes and drivers need to connect to it."""

    address: str
    env: dict[str, str] = field(repr=False)


def head_credentials() -> dict[str, str]:
    """Variables for a head, its nodes and drivers. The token is that of the environment, or a new one."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_TIMEOUT_S),
    }


@asynccontextmanager
async def run_head(host: str | None = None) -> AsyncIterator[HeadAddress]:
    """Keep a head running inside the context. Raises WindlassError if it does not start.

    Sets the head's credentials in the environment of this process, for probes and child processes.
    """
    env = {**head_credentials(), "RAY_USAGE_STATS_ENABLED": "0"}
    head = HeadAddress(f"{host or _own_ip()}:{_free_port()}", env)
    os.environ.update(env)
    with ray_temp_dir() as temp_dir:
        group = await _start(head, temp_dir)
        restarting = asyncio.create_task(_restart_forever(head, temp_dir, group))
        try:
            yield head
        finally:
            restarting.cancel()
            await asyncio.gather(restarting, return_exceptions=True)


async def _restart_forever(head: HeadAddress, temp_dir: Path, group: ProcessGroup) -> None:
    delay_s = MIN_RESTART_DELAY_S
    try:
        while True:
            code = await group.wait()
            await group.end()
            log.error("restart ray head", address=head.address, exit=describe_exit(code), delay_s=delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_RESTART_DELAY_S)
            try:
                group = await _start(head, temp_dir)
            except WindlassError as error:
                log.error("start ray head failed", address=head.address, error=str(error))
            else:
                delay_s = MIN_RESTART_DELAY_S
    finally:
        await group.end()


async def _start(head: HeadAddress, temp_dir: Path) -> ProcessGroup:
    """Start a head and wait until it responds. Raises WindlassError."""
    host, _, port = head.address.rpartition(":")
    try:
        # Names the last head. With it Ray starts no head at the same address while old raylets still look for that one.
        (temp_dir / "ray_current_cluster").unlink(missing_ok=True)
        group = await start_group(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
                *(f"--node-ip-address={host}", f"--port={port}", f"--temp-dir={temp_dir}"),
                *("--num-cpus=0", "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}"),
            ],
            env={**os.environ, **head.env},
            limits_output=False,
            # Its output is also in the logs of its directory. Here it would hide our own.
            forwards_output=False,
        )
    except OSError as error:
        # The host is out of processes or memory.
        raise WindlassError(f"cannot start a Ray head on this host: {error}") from error
    probing, exiting = asyncio.create_task(probe_head(head.address, START_TIMEOUT_S)), asyncio.create_task(group.wait())
    try:
        await asyncio.wait((probing, exiting), return_when=asyncio.FIRST_COMPLETED)
        if group.returncode is None:
            await probing
    except ClusterUnavailable:
        await group.end()
        raise WindlassError(f"the Ray head did not start within {START_TIMEOUT_S:g} s: {group.tail()[-500:]}") from None
    except BaseException:
        await group.end()
        raise
    finally:
        probing.cancel()
        exiting.cancel()
        await asyncio.gather(probing, exiting, return_exceptions=True)
    if group.returncode is not None:
        await group.end()
        raise WindlassError(f"the Ray head {describe_exit(group.returncode)}: {group.tail()[-500:]}")
    log.info("started ray head", address=head.address)
    return group


def _own_ip() -> str:
    """The address of this host on its default route, as Ray determines it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 53))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
