"""The faults. Each injects one, ends it, and returns when it has ended: recovery counts from there.

A kill ends at once. A fault with a duration is longer or shorter than a lease, by chance.
"""

import asyncio
import os
import random
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from bench.chaos.installation import LEASE_S, ChaosInstallation
from bench.chaos.task_stream import TaskStream
from bench.chaos.tcp_proxy import TcpProxy
from bench.raw_http import RawConnection, open_raw

SHORT_S = 3.0
BEYOND_LEASE_S = LEASE_S + 4.0
DELAY_S = 0.3
DISK_FULL_S = 5.0
FILE_LIMIT_S = 6.0
# More connections than a process may open under the limit.
CONNECTIONS = 40
CLOCK_STEPS_S = (-3600.0, -60.0, -10.0, 10.0, 60.0, 3600.0)
STEPPED_S = 6.0
HOSTILE_TIMEOUT_S = 4.0


@dataclass(frozen=True, slots=True)
class FaultContext:
    installation: ChaosInstallation
    stream: TaskStream
    chance: random.Random

    def duration_s(self) -> float:
        return self.chance.choice((SHORT_S, BEYOND_LEASE_S))


Fault = Callable[[FaultContext], Awaitable[None]]


def _kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def _stopped(pids: Sequence[int], seconds: float) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


# ------------------------------------------------------------------------------------------------ processes


async def kill_supervisor(context: FaultContext) -> None:
    _kill(context.installation.up.pid)


async def kill_control(context: FaultContext) -> None:
    _kill(await context.installation.process_of("control"))


async def kill_server(context: FaultContext) -> None:
    _kill(await context.installation.process_of("server"))


async def kill_worker(context: FaultContext) -> None:
    queue = context.chance.choice(context.installation.queues)
    _kill(context.chance.choice(context.installation.workers_of(queue)))


async def kill_handler(context: FaultContext) -> None:
    """The child of a worker, in which its handler runs."""
    pids = [pid for parent in context.installation.all_workers() for pid in _tree(parent)[1:] if _is_handler(pid)]
    _kill(context.chance.choice(pids))


def _is_handler(pid: int) -> bool:
    try:
        return "windlass.worker.child" in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


async def kill_all_workers(context: FaultContext) -> None:
    _kill(*context.installation.all_workers())


async def stop_worker(context: FaultContext) -> None:
    """Beyond the lease: the worker and its handlers, or the worker alone, whose handlers run on."""
    queue = context.chance.choice(context.installation.queues)
    pid = context.chance.choice(context.installation.workers_of(queue))
    await _stopped(_tree(pid) if context.chance.random() < 0.5 else [pid], BEYOND_LEASE_S)


async def stop_control(context: FaultContext) -> None:
    await _stopped([await context.installation.process_of("control")], context.duration_s())


async def stop_server(context: FaultContext) -> None:
    await _stopped([await context.installation.process_of("server")], context.duration_s())


# -------------------------------------------------------------------------------------------------- network


async def _cut(links: Sequence[TcpProxy], seconds: float) -> None:
    for link in links:
        link.cut()
    try:
        await asyncio.sleep(seconds)
    finally:
        for link in links:
            link.restore()


async def cut_http(context: FaultContext) -> None:
    await _cut([context.installation.http_link], context.duration_s())


async def cut_workers_from_database(context: FaultContext) -> None:
    links = [*context.installation.direct_links, context.installation.pooler_link]
    await _cut(links, context.duration_s())


async def cut_control_from_database(context: FaultContext) -> None:
    """And the local workers with it, as if their host had lost its network."""
    await _cut(context.installation.control_links, context.duration_s())


async def delay_network(context: FaultContext) -> None:
    for proxy in context.installation.proxies:
        proxy.delay(DELAY_S)
    try:
        await asyncio.sleep(BEYOND_LEASE_S)
    finally:
        for proxy in context.installation.proxies:
            proxy.restore()


async def reset_connections(context: FaultContext) -> None:
    for proxy in context.installation.proxies:
        proxy.reset()


# ------------------------------------------------------------------------------------------------- database


async def restart_postgres(context: FaultContext) -> None:
    await context.installation.postgres.restart()


async def fail_over(context: FaultContext) -> None:
    await context.installation.postgres.fail_over()


async def kill_pooler(context: FaultContext) -> None:
    assert context.installation.pooler is not None
    _kill(context.installation.pooler.pid)


async def fill_disk(context: FaultContext) -> None:
    postgres = context.installation.postgres
    try:
        await asyncio.to_thread(postgres.fill_disk)
        await asyncio.sleep(DISK_FULL_S)
    finally:
        postgres.free_disk()


async def step_clock(context: FaultContext) -> None:
    """The database's clock is set, and set right again later: a step in each direction."""
    postgres = context.installation.postgres
    try:
        postgres.step_clock(context.chance.choice(CLOCK_STEPS_S))
        await asyncio.sleep(STEPPED_S)
    finally:
        postgres.step_clock(0.0)


# ------------------------------------------------------------------------------------------------ resources


@contextmanager
def _few_files(pids: Sequence[int]) -> Iterator[None]:
    before: dict[int, tuple[int, int]] = {}
    try:
        for pid in pids:
            with suppress(psutil.Error, ProcessLookupError):
                before[pid] = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                # One more than the process has open.
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (psutil.Process(pid).num_fds() + 1, before[pid][1]))
        yield
    finally:
        for pid, limits in before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


async def limit_files(context: FaultContext) -> None:
    """Control, servers and workers may open no further file, while clients open connections."""
    installation = context.installation
    connections: list[RawConnection] = []
    try:
        with _few_files([*installation.up_processes(), *installation.all_workers()]):
            ends_at = time.monotonic() + FILE_LIMIT_S
            for _ in range(CONNECTIONS):
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(1.0):
                        connections.append(await open_raw(installation.server_port))
            await asyncio.sleep(max(0.0, ends_at - time.monotonic()))
    finally:
        for connection in connections:
            connection.close()


async def flood_output(context: FaultContext) -> None:
    queue = context.chance.choice(context.installation.queues)
    await context.stream.add_failing_task(queue, "flood", 60.0)


async def explode_processes(context: FaultContext) -> None:
    queue = context.chance.choice(context.installation.queues)
    await context.stream.add_failing_task(queue, "bomb", HOSTILE_TIMEOUT_S)
    await asyncio.sleep(HOSTILE_TIMEOUT_S)


FAULTS: dict[str, Fault] = {
    "kill-supervisor": kill_supervisor,
    "kill-control": kill_control,
    "kill-server": kill_server,
    "kill-worker": kill_worker,
    "kill-handler": kill_handler,
    "kill-all-workers": kill_all_workers,
    "stop-worker": stop_worker,
    "stop-control": stop_control,
    "stop-server": stop_server,
    "cut-http": cut_http,
    "cut-workers-from-database": cut_workers_from_database,
    "cut-control-from-database": cut_control_from_database,
    "delay-network": delay_network,
    "reset-connections": reset_connections,
    "restart-postgres": restart_postgres,
    "fail-over": fail_over,
    "kill-pooler": kill_pooler,
    "disk-full": fill_disk,
    "clock-step": step_clock,
    "file-limit": limit_files,
    "output-1-gb": flood_output,
    "fork-bomb": explode_processes,
}


def reason_to_skip(name: str, installation: ChaosInstallation) -> str | None:
    return {
        "kill-pooler": installation.no_pooler,
        "disk-full": installation.postgres.no_small_disk,
        "clock-step": installation.postgres.no_clock,
    }.get(name)
