"""A Ray head of our own: for a host that has none, and for trying things out.

It runs as long as it is kept, and is started again when it dies, at the same address. What was in the cluster is lost
with it: nodes of the old one leave by themselves and are replaced, and the dispatcher takes its tasks back. It offers
no resources, so that nothing is placed on it. Whoever would join, or drive, needs its token.
"""

import asyncio
import math
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
from windlass.ray.probe import greet
from windlass.ray.temp_dir import ray_folder
from windlass.worker.process import ProcessGroup, describe_exit, start_group

START_TIMEOUT_S = 60.0
# After a head that died, and died again: the wait doubles from the first to the second.
MIN_RESTART_S, MAX_RESTART_S = 0.5, 30.0
# A head keeps only its own small things in shared memory. Ray takes no less.
OBJECT_STORE_BYTES = 80 << 20
# How long a node, or a driver, waits for a head that is away before it ends itself. A head of ours that comes back is a
# new one, which knows none of them.
RECONNECT_TIMEOUT_S = 10
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HeadAddress:
    """Where the head is. `env`: for whoever joins or drives."""

    address: str
    env: dict[str, str] = field(repr=False)
    dashboard_url: str | None = None


def credentials(token: str | None = None) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token or secrets.token_hex(32),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_TIMEOUT_S),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@asynccontextmanager
async def kept_head(host: str | None = None) -> AsyncIterator[HeadAddress]:
    """A head, until the end of this. Raises WindlassError if it does not start."""
    head = HeadAddress(f"{host or _own_ip()}:{_free_port()}", credentials())
    env = {**os.environ, **head.env}
    # For our own questions to it, and for whoever we start to join or drive.
    os.environ.update(head.env)
    with ray_folder() as folder:
        group = await _start(head, folder, env)
        keeper = asyncio.create_task(_keep(head, folder, env, group))
        try:
            yield head
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)


async def _keep(head: HeadAddress, folder: Path, env: dict[str, str], group: ProcessGroup) -> None:
    pause_s = MIN_RESTART_S
    try:
        while True:
            code = await group.wait()
            await group.end()
            log.error("the Ray head died; starting another", how=describe_exit(code), pause_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RESTART_S)
            try:
                group = await _start(head, folder, env)
            except WindlassError as error:
                log.error("the Ray head did not start", error=str(error))
            else:
                pause_s = MIN_RESTART_S
    finally:
        await group.end()


async def _start(head: HeadAddress, folder: Path, env: dict[str, str]) -> ProcessGroup:
    """Raises WindlassError."""
    try:
        return await _start_and_greet(head, folder, env)
    except OSError as error:
        # This host has no process, or no memory, to spare.
        raise WindlassError(f"the Ray head cannot be started on this host ({error}).") from error


async def _start_and_greet(head: HeadAddress, folder: Path, env: dict[str, str]) -> ProcessGroup:
    host, _, port = head.address.rpartition(":")
    # Where the last head was. Ray starts none at the same address while raylets of the old one still look for it there.
    (folder / "ray_current_cluster").unlink(missing_ok=True)
    group = await start_group(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
            *(f"--node-ip-address={host}", f"--port={port}", f"--temp-dir={folder}"),
            *("--num-cpus=0", "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}"),
        ],
        env=env,
        max_output_bytes=math.inf,
        # What it has to say is in the folder's logs; here it would only drown what we say.
        forwards_output=False,
    )
    greeting, exit_reason = asyncio.create_task(greet(head.address, START_TIMEOUT_S)), asyncio.create_task(group.wait())
    try:
        await asyncio.wait((greeting, exit_reason), return_when=asyncio.FIRST_COMPLETED)
        _check_lives(group)
        await greeting
    except ClusterUnavailable:
        await group.end()
        raise WindlassError(f"the Ray head did not start within {START_TIMEOUT_S:g} s: {group.tail()[-500:]}") from None
    except BaseException:
        await group.end()
        raise
    finally:
        greeting.cancel()
        exit_reason.cancel()
        await asyncio.gather(greeting, exit_reason, return_exceptions=True)
    log.info("Ray head started", address=head.address)
    return group


def _check_lives(group: ProcessGroup) -> None:
    if group.returncode is not None:
        raise WindlassError(f"the Ray head {describe_exit(group.returncode)}: {group.tail()[-500:]}")


def _own_ip() -> str:
    """The address by which this host is known to others, as Ray finds it."""
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
