"""Hostile clients against a real `windlass up`: do health checks, honest heartbeats and cycles stay on time?

    python -m bench.hostile_clients                    # 10 s calm, 30 s of attacks, 10 s after, three rounds: 4 minutes
    python -m bench.hostile_clients --rounds 1 --seconds 10

All at once: 4 connections without a token post 6 MiB of JSON, 60 send slow bodies, and 10 use one worker's token to
report 30,000 made-up claims each. With the token of another worker 100 connections wait for work, and with that of a
third two send the largest legal results and output, as often as its limit of requests allows. The attackers run in a
process of their own, which starts at most ATTACKS_PER_S on each connection. It uses the cores of this machine, which
real attackers would not: the report says how much. Goals: p99 of /healthz under 100 ms, honest heartbeats under 1 s,
cycles on time. Exits with 1 if a goal is missed.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any
from uuid import uuid4

from bench.bench_server import open_bench_server
from bench.figures import percentile, report_goals, table
from bench.heartbeats import VITALS, Calls, reopened, timed_call
from bench.installation import QUEUE, Installation, api_token, installation, worker_token
from bench.raw_http import HOST, RawConnection, get_request, open_raw, post_prefix, post_request, with_body
from windlass.model.auth import Role
from windlass.model.worker_log import MAX_CALL_LINES
from windlass.ports import http

WORKERS = 50
# Workers that send heartbeats once per second. The tokens of the last three workers are stolen.
HONEST = 20
HEALTH_INTERVAL_S = 0.05
HEARTBEAT_INTERVAL_S = 1.0
CYCLE_INTERVAL_S = 1.0
GOAL_HEALTH_S = 0.1
GOAL_HEARTBEAT_S = 1.0
# A cycle is late if it ends more than this after its due time.
CYCLE_MARGIN_S = 1.0
LARGE_BODIES = 4
SLOW_BODIES = 60
FORGERS = 10
MADE_UP_CLAIMS = 30_000
WAITERS = 100
# The largest legal calls: 5 MB of results, 0.8 MB of output.
RESULT_BYTES = 5_000
LINE_BYTES = 30
# Per connection. Without it, the attackers would compete with the server for this machine's cores.
ATTACKS_PER_S = 10.0
REPORT_TIMEOUT_S = 60.0
BODY_BYTES = (6 << 20) - 300


# -------------------------------------------------------------------------------------------------------- the attackers


def large_body() -> bytes:
    """6 MiB of `[[],[],...]`, which is slow to parse, without a token."""
    return with_body(post_prefix("/api/v1/tasks"), b"[" + b"[]," * (BODY_BYTES // 3) + b"[]]")


def made_up_claims() -> bytes:
    claims = [{"task_id": number, "token": str(uuid4()), "result": "1"} for number in range(MADE_UP_CLAIMS)]
    call = {"finished": claims, "queues": [], "limit": 0}
    return with_body(post_prefix(http.FINISH, worker_token(WORKERS - 1)), json.dumps(call).encode())


async def send_body(port: int, name: str, request: bytes, outcomes: Counter[str]) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        outcomes[f"{name}: sent"] += 1
        writer.write(request)
        # A server that refuses early answers, and may close, while the body is still being sent.
        line = await reader.readline()
        outcomes[f"{name}: {line[9:12].decode() or 'closed'}"] += 1
    finally:
        writer.transport.abort()


async def send_slow_body(port: int, outcomes: Counter[str]) -> None:
    """Announce 6 MB and send a byte per second; half of them with a viewer's token on a path of workers."""
    is_viewer = bool(outcomes["slow body: sent"] % 2)
    outcomes["slow body: sent"] += 1
    token = api_token(Role.VIEWER) if is_viewer else None
    path = http.FINISH if is_viewer else "/api/v1/tasks"
    reader, writer = await asyncio.open_connection(HOST, port)
    answer = asyncio.create_task(reader.readline())
    try:
        writer.write(post_prefix(path, token) + b"6000000\r\n\r\n[")
        while not answer.done():
            writer.write(b" ")
            await writer.drain()
            await asyncio.wait([answer], timeout=1.0)
        outcomes[f"slow body: {answer.result()[9:12].decode() or 'closed'}"] += 1
    finally:
        answer.cancel()
        writer.transport.abort()


def legal_results() -> bytes:
    """As many results as a call may have, of claims that the worker does not hold."""
    result = json.dumps("x" * RESULT_BYTES)
    finished = [{"task_id": number, "token": str(uuid4()), "result": result} for number in range(http.MAX_FINISHED)]
    return post_request(http.FINISH, worker_token(WORKERS - 3), {"finished": finished})


def legal_output() -> bytes:
    chunk = {"lines": ["x" * LINE_BYTES] * MAX_CALL_LINES, "ages_ms": [1_000] * MAX_CALL_LINES}
    return post_request(http.LOGS, worker_token(WORKERS - 3), {"batch_id": str(uuid4()), "chunks": [chunk]})


async def wait_for_work(port: int, outcomes: Counter[str]) -> None:
    """Wait again and again on one connection, as long as the server keeps it."""
    connection, cursor = await open_raw(port), None
    try:
        while True:
            outcomes["wait: sent"] += 1
            call = {"queues": [QUEUE], "timeout_s": http.MAX_WAIT_S, "cursor": cursor}
            reply = await connection.call(post_request(http.WAIT, worker_token(WORKERS - 2), call))
            outcomes[f"wait: {reply.status}"] += 1
            if reply.status != 200:
                return
            cursor = json.loads(reply.body)
    finally:
        connection.close()


async def attack_for(seconds: float, port: int, on_ready: Callable[[], None]) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    large, forged, results, output = large_body(), made_up_claims(), legal_results(), legal_output()
    on_ready()

    async def repeat(name: str, attack: Callable[[], Awaitable[None]]) -> None:
        while True:
            next_at = time.monotonic() + 1 / ATTACKS_PER_S
            try:
                await attack()
            except OSError as error:
                # The server closed the connection while the body was being sent.
                outcomes[f"{name}: {type(error).__name__}"] += 1
            await asyncio.sleep(next_at - time.monotonic())

    attacks: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        *[("large body", lambda: send_body(port, "large body", large, outcomes))] * LARGE_BODIES,
        *[("slow body", lambda: send_slow_body(port, outcomes))] * SLOW_BODIES,
        *[("made-up claims", lambda: send_body(port, "made-up claims", forged, outcomes))] * FORGERS,
        *[("wait", lambda: wait_for_work(port, outcomes))] * WAITERS,
        ("legal results", lambda: send_body(port, "legal results", results, outcomes)),
        ("legal output", lambda: send_body(port, "legal output", output, outcomes)),
    ]
    jobs = [asyncio.create_task(repeat(name, attack)) for name, attack in attacks]
    await asyncio.wait(jobs, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for job in jobs:
        if job.done():
            job.result()  # raises
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    return outcomes


def _attacker(port: int, seconds: float, results: Connection) -> None:
    # Linux with autogroups divides the processor between sessions. The clients that measure must not share the
    # attackers' part.
    os.setsid()
    outcomes = asyncio.run(attack_for(seconds, port, lambda: results.send("ready")))
    outcomes["CPU ms of the attackers"] = round(1_000 * time.process_time())
    results.send(outcomes)


# --------------------------------------------------------------------------------------------------- the honest clients


async def check_health(port: int, calls: Calls) -> None:
    """Ask like a load balancer: each time on a new connection, and on time even if earlier ones were not answered."""
    async with asyncio.TaskGroup() as group:
        due = time.monotonic()
        while True:
            group.create_task(_check_once(port, due, calls))
            due += HEALTH_INTERVAL_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))


async def _check_once(port: int, due: float, calls: Calls) -> None:
    connection = await reopened(None, port)
    await timed_call(connection, get_request("/healthz"), due, calls)
    if connection is not None:
        connection.close()


async def send_honest_heartbeats(port: int, number: int, calls: Calls) -> None:
    request = post_request(http.HEARTBEAT, worker_token(number), VITALS)
    due = time.monotonic() + HEARTBEAT_INTERVAL_S * number / HONEST
    connection: RawConnection | None = None
    while True:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        connection = await reopened(connection, port)
        await timed_call(connection, request, due, calls)
        due += HEARTBEAT_INTERVAL_S


@dataclass(frozen=True, slots=True)
class Observed:
    health: Calls
    heartbeats: Calls
    # Seconds between the ends of two cycles, the last of them up to the end of the observation.
    cycle_gaps_s: list[float]
    memory_mib: float


async def observe(running: Installation, seconds: float) -> Observed:
    health, heartbeats = Calls(), Calls()
    started = time.monotonic()
    jobs = [asyncio.create_task(check_health(running.port, health))]
    jobs += [asyncio.create_task(send_honest_heartbeats(running.port, n, heartbeats)) for n in range(HONEST)]
    highest_mib = 0.0
    while time.monotonic() < started + seconds:
        await asyncio.sleep(0.5)
        highest_mib = max(highest_mib, await _memory_mib(running))
    running.check()
    ended = time.monotonic()
    for job in jobs:
        if job.done():
            job.result()
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    ends = [started, *(c.ended_at for c in running.cycles() if c.is_leader and started < c.ended_at < ended), ended]
    return Observed(health, heartbeats, [b - a for a, b in itertools.pairwise(ends)], highest_mib)


async def _memory_mib(running: Installation) -> float:
    return sum(value for name, value in (await running.memory_mib()).items() if name != "postgres")


async def under_attack(running: Installation, seconds: float) -> tuple[Observed, Counter[str]]:
    context = multiprocessing.get_context("fork")
    received, sent = context.Pipe(duplex=False)
    attacker = context.Process(target=_attacker, args=(running.port, seconds, sent))
    attacker.start()
    try:
        await asyncio.to_thread(_receive, received)
        observed = await observe(running, seconds)
        outcomes = await asyncio.to_thread(_receive, received)
    finally:
        attacker.kill()
        attacker.join()
    names = ("large body", "slow body", "made-up claims", "wait", "legal results", "legal output")
    missing = {f"{name}: sent" for name in names} - set(outcomes)
    if missing:
        raise RuntimeError(f"the attackers had no time for an attack: {outcomes}")
    return observed, outcomes


def _receive(results: Connection) -> Any:
    if not results.poll(REPORT_TIMEOUT_S):
        raise TimeoutError(f"no report of the attackers for {REPORT_TIMEOUT_S:g} s")
    return results.recv()


# -------------------------------------------------------------------------------------------------------------- figures


async def run(given: argparse.Namespace) -> bool:
    observed: dict[str, list[Observed]] = {"calm": [], "attack": [], "after": []}
    attacks: Counter[str] = Counter()
    with open_bench_server() as server:
        async with installation(
            server, "hostile", workers=WORKERS, processes=given.processes, poll_interval_s=CYCLE_INTERVAL_S
        ) as running:
            await asyncio.sleep(3.0)
            for _ in range(given.rounds):
                observed["calm"].append(await observe(running, given.calm_seconds))
                during, outcomes = await under_attack(running, given.seconds)
                observed["attack"].append(during)
                attacks += outcomes
                observed["after"].append(await observe(running, given.calm_seconds))
    return report(given, observed, attacks)


def report(given: argparse.Namespace, observed: dict[str, list[Observed]], attacks: Counter[str]) -> bool:
    print(f"{given.rounds} rounds of {given.seconds:g} s of attacks; median over rounds (lowest to highest)\n")
    rows = [
        [
            name,
            _spread([1000 * percentile(o.health.latencies_s or [float("inf")], 0.99) for o in phases], "ms"),
            _spread([1000 * max(o.health.latencies_s or [float("inf")]) for o in phases], "ms"),
            _spread([1000 * percentile(o.heartbeats.latencies_s or [float("inf")], 0.99) for o in phases], "ms"),
            _spread([1000 * max(o.heartbeats.latencies_s or [float("inf")]) for o in phases], "ms"),
            str(sum(len(o.health.failures) + len(o.heartbeats.failures) for o in phases)),
            _spread([max(o.cycle_gaps_s) for o in phases], "s", 1),
            _spread([o.memory_mib for o in phases], "MiB"),
        ]
        for name, phases in observed.items()
    ]
    head = ["phase", "/healthz p99", "highest", "heartbeat p99", "highest", "failed", "longest cycle gap", "memory"]
    print(table(head, rows))
    print("\nWhat the attackers received: " + ", ".join(f"{name} {count:,}" for name, count in sorted(attacks.items())))
    for failure, count in Counter(
        failure for o in observed["attack"] for failure in o.health.failures + o.heartbeats.failures
    ).most_common(5):
        print(f"{count} times: {failure}", file=sys.stderr)
    worst = observed["attack"]
    health_p99 = statistics.median(percentile(o.health.latencies_s or [float("inf")], 0.99) for o in worst)
    slowest = max(max(o.heartbeats.latencies_s or [float("inf")]) for o in worst)
    return report_goals(
        {
            f"p99 of /healthz under attack is below {1000 * GOAL_HEALTH_S:g} ms": health_p99 < GOAL_HEALTH_S,
            f"every honest heartbeat takes less than {GOAL_HEARTBEAT_S:g} s": slowest < GOAL_HEARTBEAT_S,
            "no honest request fails": not any(o.health.failures or o.heartbeats.failures for o in worst),
            "cycles are on time": all(max(o.cycle_gaps_s) < CYCLE_INTERVAL_S + CYCLE_MARGIN_S for o in worst),
        }
    )


def _spread(values: list[float], unit: str, digits: int = 0) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f}) {unit}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hostile_clients", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the attacks in one round")
    parser.add_argument("--calm-seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=None, help="number of server processes")
    is_good = asyncio.run(run(parser.parse_args()))
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
