"""Heartbeats of 10,000 workers over HTTP while tasks flow and a dashboard listens, against a real `windlass up`.

    python -m bench.heartbeats                                   # 5 minutes of load, about 7 minutes in all
    python -m bench.heartbeats --seconds 60 --workers 2000

Four phases: quiet; heartbeats alone; heartbeats, tasks and an event stream; quiet again. A heartbeat is missed if it is
not answered with 200 within 10 s of its due time. The database must agree: no last_heartbeat may be older than an
interval and a few seconds. Cycles under load are compared with those of the two quiet phases. Memory is taken at the
start and at the end of the load. Goals: no missed heartbeat, tasks that flow at the wanted rate, a dashboard that
receives updates, cycles that take at most 1.2 times as long, flat memory, and less than a quarter of one core for the
heartbeats: CPU time of servers and PostgreSQL together, in the second phase, above that of the first. Exits with 1 if a
goal is missed.

The workers share some hundred connections, as behind a reverse proxy, because a server accepts a limited number.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from bench.bench_server import connected, open_bench_server
from bench.figures import percentile, report_goals, table
from bench.http_load import FIRST_CALL, NEXT_CALL
from bench.installation import FILL_TASKS, Installation, Usage, api_token, installation, worker_token
from bench.raw_http import CLAIM, HOST, RawConnection, get_request, open_raw, post_prefix, post_request, with_body
from windlass.model.auth import Role
from windlass.ports import http

ANSWER_TIMEOUT_S = 10.0
# A heartbeat in the database may be older than the interval by this much: time in flight, and the age of the sample.
FRESH_MARGIN_S = 5.0
HEARTBEATS_ALONE_S = 20.0
GOAL_CYCLE_RATIO = 1.2
# CPU seconds per second, at this many heartbeats per second.
GOAL_CORES = 0.25
GOAL_CORES_AT_PER_S = 500.0
# The least share of the wanted rate. The first call of each worker finishes no task.
GOAL_TASK_SHARE = 0.95
# The dashboard gets a new overview about once a second.
GOAL_EVENTS_PER_S = 0.5
# Memory is flat if a process grows by at most this share and this many MiB: garbage and buffers vary by as much.
GOAL_GROWTH, GOAL_GROWTH_MIB = 0.05, 8.0
ENQUEUE_INTERVAL_S = 0.1
SAMPLE_INTERVAL_S = 2.0
OLDEST = "select extract(epoch from clock_timestamp() - min(last_heartbeat))::float8 from windlass.workers"
VITALS = {"claims": [], "vitals": {"pid": 4242, "idle_s": 0.0, "ram_used_mb": 812, "disk_free_mb": 51_000}}


@dataclass
class Calls:
    """Responses of one kind of call. Latencies count from the due time."""

    latencies_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def row(self, name: str) -> list[str]:
        values = self.latencies_s or [float("nan")]
        figures = [percentile(values, 0.5), percentile(values, 0.99), max(values)]
        return [name, f"{len(self.latencies_s):,}", f"{len(self.failures):,}", *(f"{1000 * f:.1f}" for f in figures)]


async def timed_call(connection: RawConnection | None, request: bytes, due: float, calls: Calls) -> bytes:
    """Send one request. Returns the body of the response, empty after a failure."""
    try:
        async with asyncio.timeout(max(0.1, due + ANSWER_TIMEOUT_S - time.monotonic())):
            if connection is None or not connection.is_open:
                raise ConnectionRefusedError("no connection")
            reply = await connection.call(request)
    except asyncio.CancelledError:
        # The measurement ends first. The response would have come later still.
        calls.latencies_s.append(time.monotonic() - due)
        raise
    except (OSError, TimeoutError) as error:
        calls.failures.append(f"{type(error).__name__}: {error}")
        if connection is not None:
            connection.close()
        return b""
    if reply.status != 200:
        calls.failures.append(f"status {reply.status}: {reply.body[:200]!r}")
        return b""
    calls.latencies_s.append(time.monotonic() - due)
    return reply.body


async def reopened(connection: RawConnection | None, port: int) -> RawConnection | None:
    """The connection, or a new one. A server may close a connection between two calls; that is no failed call."""
    if connection is not None and connection.is_open:
        return connection
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await open_raw(port)
    return None


async def send_heartbeats(port: int, workers: int, interval_s: float, connections: int, calls: Calls) -> None:
    """Each worker's heartbeat once per interval, evenly spread, until cancelled."""
    requests = [post_request(http.HEARTBEAT, worker_token(number), VITALS) for number in range(workers)]
    started = time.monotonic()

    def due_heartbeats() -> Iterator[tuple[float, bytes]]:
        for number in itertools.count():
            yield started + number * interval_s / workers, requests[number % workers]

    due = due_heartbeats()

    async def one_after_another() -> None:
        connection: RawConnection | None = None
        for at, request in due:  # shared: the next free connection takes the next heartbeat
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            connection = await reopened(connection, port)
            await timed_call(connection, request, at, calls)

    await _all(*(one_after_another() for _ in range(connections)))


async def work(port: int, number: int, calls_per_s: float, calls: Calls) -> None:
    """One worker that finishes its task and claims the next at a fixed rate, until cancelled."""
    prefix, body = post_prefix(http.FINISH, worker_token(number)), FIRST_CALL
    connection: RawConnection | None = None
    started = time.monotonic()
    for count in itertools.count(1):
        due = started + count / calls_per_s
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        connection = await reopened(connection, port)
        reply = await timed_call(connection, with_body(prefix, body), due, calls)
        found = CLAIM.search(reply)
        body = NEXT_CALL % (found[1], found[2]) if found is not None else FIRST_CALL


async def enqueue(dsn: str, tasks_per_s: float) -> None:
    async with connected(dsn) as connection:
        started, sent = time.monotonic(), 0
        while True:
            wanted = int((time.monotonic() - started) * tasks_per_s)
            await connection.execute(FILL_TASKS, wanted - sent)
            sent = wanted
            await asyncio.sleep(ENQUEUE_INTERVAL_S)


async def count_events(port: int, received: list[float]) -> None:
    """Listen to the event stream as a dashboard does, until cancelled, and connect again if it ends."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 24)
            writer.write(get_request("/api/v1/stream", api_token(Role.VIEWER)))
            try:
                while line := await reader.readline():
                    if line.startswith(b"event:"):
                        received.append(time.monotonic())
            finally:
                writer.close()
        await asyncio.sleep(1.0)


async def sample_ages(dsn: str, ages: list[float]) -> None:
    """The age of the oldest heartbeat in the database, every few seconds."""
    async with connected(dsn) as connection:
        while True:
            ages.append(await connection.fetchval(OLDEST))
            await asyncio.sleep(SAMPLE_INTERVAL_S)


async def _all(*jobs: "asyncio._CoroutineLike[None]") -> None:
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(job)


@dataclass
class Phase:
    """What one phase used and how long its cycles took."""

    name: str
    seconds: float
    cycles_s: list[float]
    used: Usage
    heartbeats: int = 0
    tasks: int = 0

    @property
    def serving_cores(self) -> float:
        return (self.used.server_s + self.used.postgres_s) / self.seconds

    def row(self) -> list[str]:
        took_s = self.cycles_s or [float("inf")]
        cycles = [statistics.median(took_s), percentile(took_s, 0.95), max(took_s)]
        return [
            self.name,
            f"{self.seconds:.0f}",
            str(len(self.cycles_s)),
            *(f"{1000 * took:.0f}" for took in cycles),
            *(f"{share / self.seconds:.0%}" for share in self.used),
        ]


async def measure_phase(running: Installation, name: str, seconds: float, beats: Calls, tasks: Calls) -> Phase:
    started, before = time.monotonic(), await running.usage()
    answered, finished = len(beats.latencies_s), len(tasks.latencies_s)
    await asyncio.sleep(seconds)
    running.check()
    ended, used = time.monotonic(), (await running.usage()).since(before)
    heartbeats, calls = len(beats.latencies_s) - answered, len(tasks.latencies_s) - finished
    cycles = [
        cycle.took_s
        for cycle in running.cycles()
        if cycle.is_leader and started <= cycle.ended_at - cycle.took_s and cycle.ended_at <= ended
    ]
    return Phase(name, ended - started, cycles, used, heartbeats, calls)


async def run(given: argparse.Namespace) -> bool:
    beats, tasks, events, ages = Calls(), Calls(), list[float](), list[float]()
    with open_bench_server() as server:
        async with installation(
            server, "heartbeats", workers=given.workers, processes=given.processes, poll_interval_s=given.poll_interval
        ) as running:
            await asyncio.sleep(5.0)  # the first cycles warm caches and plans
            phases = [await measure_phase(running, "quiet", given.quiet_seconds, beats, tasks)]
            heartbeats = asyncio.create_task(
                send_heartbeats(running.port, given.workers, given.interval, given.connections, beats)
            )
            await asyncio.sleep(given.interval)  # every connection is open, and every heartbeat was sent once
            phases.append(await measure_phase(running, "heartbeats", HEARTBEATS_ALONE_S, beats, tasks))
            load = asyncio.create_task(
                _all(
                    sample_ages(running.dsn, ages),
                    enqueue(running.dsn, given.tasks),
                    count_events(running.port, events),
                    *(work(running.port, n, given.tasks / given.busy, tasks) for n in range(given.busy)),
                )
            )
            await asyncio.sleep(min(15.0, given.seconds / 4))
            at_start = await running.memory_mib()
            phases.append(await measure_phase(running, "heartbeats, tasks, dashboard", given.seconds, beats, tasks))
            at_end = await running.memory_mib()
            for job in (load, heartbeats):
                if job.done():
                    job.result()  # raises what ended it
                job.cancel()
            await asyncio.gather(load, heartbeats, return_exceptions=True)
            await asyncio.sleep(2.0)
            phases.append(await measure_phase(running, "quiet again", given.quiet_seconds, beats, tasks))
    return report(given, phases, beats, tasks, events, ages, (at_start, at_end))


def report(
    given: argparse.Namespace,
    phases: list[Phase],
    beats: Calls,
    tasks: Calls,
    events: list[float],
    ages: list[float],
    memory: tuple[dict[str, float], dict[str, float]],
) -> bool:
    print(
        f"{given.workers:,} workers, a heartbeat each {given.interval:g} s, {given.tasks:g} tasks per second, "
        f"{given.connections} connections, {os.cpu_count()} cores\n"
    )
    head = ["phase", "s", "cycles", "cycle p50 ms", "p95", "highest", "server CPU", "control CPU", "PostgreSQL CPU"]
    print(table(head, [phase.row() for phase in phases]))
    quiet = phases[0].cycles_s + phases[-1].cycles_s
    if not quiet:
        print("no cycle ended in the quiet phases: raise --quiet-seconds", file=sys.stderr)
    ratio = statistics.median(phases[2].cycles_s or [float("inf")]) / statistics.median(quiet or [float("nan")])
    print(f"\ncycles under load to quiet: **{ratio:.2f}**\n")
    alone = phases[1]
    # At least one, so that a machine without time for any prints its figures too.
    cores, per_s = alone.serving_cores - phases[0].serving_cores, max(alone.heartbeats, 1) / alone.seconds
    print(
        f"heartbeats alone: **{cores:.3f}** of one core for servers and PostgreSQL at {per_s:.0f} per second, "
        f"{1e6 * cores / per_s:.0f} us each\n"
    )
    head = ["calls", "answered", "failed", "p50 ms", "p99", "highest"]
    print(table(head, [beats.row("heartbeat"), tasks.row("finish and claim")]))
    oldest = max(ages)
    is_fresh = oldest <= given.interval + FRESH_MARGIN_S
    print(f"\noldest heartbeat in the database: {oldest:.1f} s; events received by the dashboard: {len(events)}\n")
    names = [name for name in memory[0] if name in memory[1]]
    rows = [[name, f"{memory[0][name]:.0f}", f"{memory[1][name]:.0f}"] for name in names]
    print(table(["memory, MiB", f"start of {given.seconds:g} s", "end"], rows))
    for failure, count in statistics_of(beats.failures + tasks.failures):
        print(f"{count} times: {failure}", file=sys.stderr)
    loaded = phases[2]
    is_flat = all(memory[1][name] <= memory[0][name] * (1 + GOAL_GROWTH) + GOAL_GROWTH_MIB for name in names)
    tasks_flow = not tasks.failures and loaded.tasks >= GOAL_TASK_SHARE * given.tasks * loaded.seconds
    is_cheap = alone.heartbeats > 0 and cores <= GOAL_CORES * max(1.0, per_s / GOAL_CORES_AT_PER_S)
    return report_goals(
        {
            "no heartbeat is missed": not beats.failures and is_fresh,
            f"{given.tasks:g} tasks per second flow": tasks_flow,
            "the dashboard receives updates": len(events) >= GOAL_EVENTS_PER_S * loaded.seconds,
            "memory is flat": is_flat,
            f"cycles under load take at most {GOAL_CYCLE_RATIO} times as long": ratio <= GOAL_CYCLE_RATIO,
            f"{GOAL_CORES_AT_PER_S:g} heartbeats per second take at most {GOAL_CORES} of one core": is_cheap,
        }
    )


def statistics_of(failures: list[str]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for failure in failures:
        counts[failure] = counts.get(failure, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])[:10]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.heartbeats", description=__doc__)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--interval", type=float, default=20.0, help="seconds between two heartbeats of a worker")
    parser.add_argument("--tasks", type=float, default=500.0, help="tasks per second")
    parser.add_argument("--busy", type=int, default=50, help="workers that finish and claim them")
    parser.add_argument("--seconds", type=float, default=300.0, help="length of the load")
    parser.add_argument("--quiet-seconds", type=float, default=30.0)
    parser.add_argument("--connections", type=int, default=400, help="connections for heartbeats")
    parser.add_argument("--poll-interval", type=float, default=2.0, help="seconds between two cycles")
    parser.add_argument("--processes", type=int, default=None, help="number of server processes")
    is_good = asyncio.run(run(parser.parse_args()))
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
