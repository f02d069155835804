"""Ten minutes of load against a real `windlass up`: do memory, cycle time, tables, indexes and dead rows stay flat?

    python -m bench.soak                                         # 10 minutes
    python -m bench.soak --minutes 3 --burst 20000               # too short to judge tables
    python -m bench.soak --json figures.json

1,000 HTTP workers send 500 heartbeats per second, finish tasks and claim the next. A steady stream of tasks arrives,
a burst of 100,000 at the start of each quarter, and 20 slow clients send a byte per second. Finished tasks are deleted
after a short time. The first half is warm-up. Each later quarter has one burst, so that their means compare: a figure
is flat if it grows by no more than its allowance from the third quarter to the fourth. Exits with 1 if a goal is
missed.

The workers share some connections, as behind a reverse proxy, and all of this runs in one process of this machine.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.bench_server import connected, open_bench_server
from bench.figures import percentile, report_goals, table
from bench.heartbeats import VITALS, Calls, count_events, enqueue, reopened, statistics_of, timed_call
from bench.installation import FILL_TASKS, QUEUE, Installation, api_token, installation, worker_token
from bench.raw_http import CLAIM, HOST, RawConnection, post_prefix, post_request, with_body
from windlass.model.auth import Role
from windlass.ports import http

WORKERS = 1_000
HEARTBEATS_PER_S = 500.0
HEARTBEAT_CONNECTIONS = 50
WORK_CONNECTIONS = 20
# Tasks of one claim. A worker takes its turn on a connection, so that each holds its tasks for some time.
CLAIM_LIMIT = 20
IDLE_WAIT_S = 0.5
STEADY_TASKS_PER_S = 50.0
SLOW_CLIENTS = 20
SAMPLE_INTERVAL_S = 2.0
POLL_INTERVAL_S = 2.0
QUARTERS = 4
GROWING = "of these, "
# The control process deletes old tasks once a minute. Quarters that are not much longer cannot be compared.
MIN_QUARTER_S = 120.0
RETENTION_S = 30.0
# Share and absolute amount by which a mean may grow from the third quarter to the fourth.
MEMORY_ALLOWANCE = (0.05, 8.0)
CYCLE_ALLOWANCE = (0.2, 20.0)
TABLE_ALLOWANCE = (0.1, 4.0)
DEAD_ROWS_ALLOWANCE = (0.2, 5_000.0)
# History that is kept for weeks grows. Named if it grew by more than this.
NAMED_GROWTH_MIB = 0.5
GOAL_ANSWERED = 0.999
# The least share of the wanted heartbeats: the first come only after the start.
GOAL_SENT = 0.95

SETTINGS = f"""
[retention]
complete_s = {RETENTION_S}
events_s = {RETENTION_S}
cycles_s = {RETENTION_S}
"""
SIZES = """
select
  pg_table_size('windlass.tasks') / 1048576.0 as tasks_table,
  pg_indexes_size('windlass.tasks') / 1048576.0 as tasks_indexes,
  (
    select sum(pg_total_relation_size(s.relid)) / 1048576.0 from pg_stat_user_tables s
    where s.schemaname = 'windlass' and s.relname <> 'tasks'
  ) as other_tables,
  (select sum(s.n_dead_tup) from pg_stat_user_tables s where s.schemaname = 'windlass') as dead_rows,
  (select count(*) from windlass.tasks t where t.status in ('queued', 'running', 'error')) as unfinished
"""


OTHER_TABLES = """
select s.relname as name, pg_total_relation_size(s.relid) / 1048576.0 as mebibytes from pg_stat_user_tables s
where s.schemaname = 'windlass' and s.relname <> 'tasks'
"""


@dataclass
class Samples:
    """Values of each figure, with the time since the start of the load."""

    values: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, name: str, at: float, value: float) -> None:
        self.values.setdefault(name, []).append((at, value))

    def quarters(self, name: str, quarter_s: float) -> list[float]:
        """The mean of each quarter; NaN without samples."""
        parts: list[list[float]] = [[] for _ in range(QUARTERS)]
        for at, value in self.values.get(name, []):
            parts[min(int(at / quarter_s), QUARTERS - 1)].append(value)
        return [statistics.fmean(part) if part else float("nan") for part in parts]


def shares(connections: int) -> list[list[int]]:
    """The workers of each connection."""
    return [list(range(number, WORKERS, connections)) for number in range(connections)]


async def work_in_turn(port: int, workers: list[int], calls: Calls, finished: Counter[str]) -> None:
    """Workers that share a connection: each finishes what it claimed in its last turn, and claims again."""
    prefixes = {number: post_prefix(http.FINISH, worker_token(number)) for number in workers}
    claimed: dict[int, list[tuple[bytes, bytes]]] = {number: [] for number in workers}
    connection: RawConnection | None = None
    idle = 0
    for number in itertools.cycle(workers):
        results = b",".join(b'{"task_id":%b,"token":"%b","result":"1"}' % claim for claim in claimed[number])
        body = b'{"finished":[%b],"queues":["%b"],"limit":%d}' % (results, QUEUE.encode(), CLAIM_LIMIT)
        connection = await reopened(connection, port)
        reply = await timed_call(connection, with_body(prefixes[number], body), time.monotonic(), calls)
        if reply:
            finished["tasks"] += len(claimed[number])
            claimed[number] = [(found[1], found[2]) for found in CLAIM.finditer(reply)]
        idle = 0 if claimed[number] else idle + 1
        if idle >= len(workers):
            idle = 0
            await asyncio.sleep(IDLE_WAIT_S)


async def send_heartbeats_in_turn(port: int, workers: list[int], interval_s: float, calls: Calls) -> None:
    """Workers that share a connection, each once per interval. Heartbeats that are late by one are skipped."""
    requests = [post_request(http.HEARTBEAT, worker_token(number), VITALS) for number in workers]
    connection: RawConnection | None = None
    due = time.monotonic()
    for request in itertools.cycle(requests):
        due = max(due + interval_s / len(workers), time.monotonic() - interval_s)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        connection = await reopened(connection, port)
        await timed_call(connection, request, time.monotonic(), calls)


async def add_bursts(dsn: str, tasks: int, quarter_s: float, started: float) -> None:
    async with connected(dsn) as connection:
        for number in range(QUARTERS):
            await asyncio.sleep(max(0.0, started + number * quarter_s - time.monotonic()))
            await connection.execute(FILL_TASKS, tasks, timeout=120.0)


async def be_slow(port: int, outcomes: Counter[str]) -> None:
    """Post a task a byte per second, with a valid token, until the server has had enough, again and again."""
    request = post_prefix("/api/v1/tasks", api_token(Role.PRODUCER)) + b"100000\r\n\r\n{"
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(HOST, port)
            answer = asyncio.create_task(reader.readline())
            try:
                writer.write(request)
                while not answer.done():
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.wait([answer], timeout=1.0)
                outcomes[answer.result()[9:12].decode() or "closed"] += 1
            finally:
                answer.cancel()
                writer.transport.abort()
        await asyncio.sleep(1.0)


async def sample(running: Installation, started: float, samples: Samples) -> None:
    async with connected(running.dsn) as connection:
        for number in itertools.count(1):
            await asyncio.sleep(max(0.0, started + number * SAMPLE_INTERVAL_S - time.monotonic()))
            at = time.monotonic() - started
            for name, mebibytes in (await running.memory_mib()).items():
                samples.add(f"memory of {name}, MiB", at, mebibytes)
            row = await connection.fetchrow(SIZES)
            samples.add("table tasks, MiB", at, float(row["tasks_table"]))
            samples.add("indexes of tasks, MiB", at, float(row["tasks_indexes"]))
            samples.add("other tables, MiB", at, float(row["other_tables"]))
            for other in await connection.fetch(OTHER_TABLES):
                samples.add(f"{GROWING}{other['name']}, MiB", at, float(other["mebibytes"]))
            samples.add("dead rows", at, float(row["dead_rows"]))
            samples.add("unfinished tasks", at, float(row["unfinished"]))


async def run(given: argparse.Namespace) -> bool:
    seconds = given.minutes * 60
    quarter_s = seconds / QUARTERS
    beats, calls, samples = Calls(), Calls(), Samples()
    slow, finished, events = Counter[str](), Counter[str](), list[float]()
    load_before = os.getloadavg()[0]
    with open_bench_server() as server:
        async with installation(
            server, "soak", workers=WORKERS, poll_interval_s=POLL_INTERVAL_S, lease_s=120.0, settings=SETTINGS
        ) as running:
            started = time.monotonic()
            interval_s = WORKERS / HEARTBEATS_PER_S
            jobs = [
                asyncio.create_task(job)
                for job in (
                    *(
                        send_heartbeats_in_turn(running.port, part, interval_s, beats)
                        for part in shares(HEARTBEAT_CONNECTIONS)
                    ),
                    *(work_in_turn(running.port, part, calls, finished) for part in shares(WORK_CONNECTIONS)),
                    enqueue(running.dsn, STEADY_TASKS_PER_S),
                    add_bursts(running.dsn, given.burst, quarter_s, started),
                    *(be_slow(running.port, slow) for _ in range(SLOW_CLIENTS)),
                    count_events(running.port, events),
                    sample(running, started, samples),
                )
            ]
            try:
                while time.monotonic() < started + seconds:
                    await asyncio.sleep(0.5)
                    running.check()
                    for job in jobs:
                        if job.done():
                            job.result()  # raises
            finally:
                for job in jobs:
                    job.cancel()
                await asyncio.gather(*jobs, return_exceptions=True)
            for cycle in running.cycles():
                if cycle.is_leader and 0 < cycle.ended_at - started < seconds:
                    samples.add("cycle, ms", cycle.ended_at - started, 1000 * cycle.took_s)
    loads = (load_before, os.getloadavg()[0])
    return report(given, samples, beats, calls, finished["tasks"], slow, len(events), loads)


def report(
    given: argparse.Namespace,
    samples: Samples,
    beats: Calls,
    calls: Calls,
    finished: int,
    slow: Counter[str],
    events: int,
    loads: tuple[float, float],
) -> bool:
    seconds = given.minutes * 60
    quarter_s = seconds / QUARTERS
    means = {name: samples.quarters(name, quarter_s) for name in samples.values}
    most = {name: max(value for _, value in values) for name, values in samples.values.items()}
    print(
        f"{given.minutes:g} minutes, {WORKERS:,} workers, {HEARTBEATS_PER_S:g} heartbeats per second, "
        f"{QUARTERS} bursts of {given.burst:,} tasks and {STEADY_TASKS_PER_S:g} per second, "
        f"{SLOW_CLIENTS} slow clients, "
        f"{os.cpu_count()} cores, load {loads[0]:.1f} before and {loads[1]:.1f} after\n"
    )
    rows = [
        [
            name,
            *(f"{mean:,.1f}" for mean in quarters),
            f"{most[name]:,.1f}",
            f"{_slope_per_h(quarters, quarter_s):+,.1f}",
        ]
        for name, quarters in means.items()
        if not name.startswith(GROWING) or quarters[3] > quarters[2] + NAMED_GROWTH_MIB
    ]
    print(table(["mean of", "quarter 1", "2", "3", "4", "highest", "slope per hour, 3 to 4"], rows) + "\n")
    print(
        table(
            ["calls", "answered", "failed", "p50 ms", "p99", "highest"],
            [beats.row("heartbeat"), calls.row("finish and claim")],
        )
    )
    print(
        f"\n{finished:,} tasks finished, {finished / seconds:.0f} per second; {events} events of the dashboard; "
        "slow clients received " + ", ".join(f"{status} ({count} times)" for status, count in sorted(slow.items()))
    )
    for failure, count in statistics_of(beats.failures + calls.failures):
        print(f"{count} times: {failure}", file=sys.stderr)
    if given.json is not None:
        given.json.write_text(
            json.dumps(
                {
                    "minutes": given.minutes,
                    "burst": given.burst,
                    "load": loads,
                    "quarters": means,
                    "highest": most,
                    "heartbeat_p99_ms": 1000 * percentile(beats.latencies_s or [float("nan")], 0.99),
                    "finish_p99_ms": 1000 * percentile(calls.latencies_s or [float("nan")], 0.99),
                    "failed": len(beats.failures) + len(calls.failures),
                    "tasks_finished": finished,
                },
                indent=1,
            )
        )
    return report_goals(_goals(means, quarter_s, beats, calls))


def _slope_per_h(quarters: list[float], quarter_s: float) -> float:
    return (quarters[3] - quarters[2]) / quarter_s * 3600


def _goals(means: dict[str, list[float]], quarter_s: float, beats: Calls, calls: Calls) -> dict[str, bool]:
    def is_flat(name: str, allowance: tuple[float, float]) -> bool:
        before, after = means[name][2:]
        # A process that did not run all the time fails too: NaN compares as false.
        return after <= before * (1 + allowance[0]) + allowance[1]

    memory = [name for name in means if name.startswith("memory")]
    answered = len(beats.latencies_s) + len(calls.latencies_s)
    wanted_beats = HEARTBEATS_PER_S * QUARTERS * quarter_s
    failed = len(beats.failures) + len(calls.failures)
    goals = {
        "memory of each process is flat": all(is_flat(name, MEMORY_ALLOWANCE) for name in memory),
        "cycle time is flat": is_flat("cycle, ms", CYCLE_ALLOWANCE),
        f"{GOAL_ANSWERED:.1%} of the calls are answered": answered >= GOAL_ANSWERED * (answered + failed),
        f"{HEARTBEATS_PER_S:g} heartbeats per second are sent": len(beats.latencies_s) >= GOAL_SENT * wanted_beats,
    }
    if quarter_s < MIN_QUARTER_S:
        print(f"\nQuarters of {quarter_s:g} s are too short to judge tables: at least {MIN_QUARTER_S:g} s are needed.")
        return goals
    return {
        **goals,
        "table and indexes of tasks are flat": all(
            is_flat(name, TABLE_ALLOWANCE) for name in ("table tasks, MiB", "indexes of tasks, MiB")
        ),
        "dead rows are flat": is_flat("dead rows", DEAD_ROWS_ALLOWANCE),
        "the queue is no longer than a quarter before": is_flat("unfinished tasks", DEAD_ROWS_ALLOWANCE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--burst", type=int, default=100_000, help="tasks at the start of each quarter")
    parser.add_argument("--json", type=Path, default=None, help="file for the figures")
    is_good = asyncio.run(run(parser.parse_args()))
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
