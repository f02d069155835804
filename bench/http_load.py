"""Finish-and-claim over HTTP: calls per second, CPU per call and latency of a real `windlass up`.

    python -m bench.http_load                          # 1 and 2 server processes, 5 rounds of 5 s
    python -m bench.http_load --processes 1 --seconds 10 --rounds 3

Each connection is a spawned worker that finishes its task and claims the next as fast as it gets replies. Requests are
prepared bytes. Installations with different numbers of server processes run at the same time, each on a database of its
own; in each round each of them alone gets load. CPU time is that of the server processes and PostgreSQL. Goals: 2,000
calls per second at no more than 300 microseconds of server CPU per call with one process, and no less with two. Exits
with 1 if a goal is missed.
"""

import argparse
import asyncio
import multiprocessing
import os
import select
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench.bench_server import connected, open_bench_server
from bench.figures import percentile, report_goals, table
from bench.installation import QUEUE, Installation, installation, worker_token
from bench.raw_http import CLAIM, HOST, post_prefix, split_reply, with_body
from windlass.ports import http

# Upper bound of the rate, used to fill the queue: it must not run empty.
MAX_CALLS_PER_S = 6_000
GOAL_CALLS_PER_S = 2_000
GOAL_SERVER_US = 300
# Rate of two processes to one. Rates of two windows differ by this much without a cause.
GOAL_RATIO = 0.95
WARM_UP_S = 1.0
# A call without a response for this long ends the measurement.
CALL_TIMEOUT_S = 20.0
FIRST_CALL = b'{"finished":[],"queues":["%b"],"limit":1}' % QUEUE.encode()
NEXT_CALL = b'{"finished":[{"task_id":%b,"token":"%b","result":"1"}],"queues":["' + QUEUE.encode() + b'"],"limit":1}'
LAST_CALL = b'{"finished":[{"task_id":%b,"token":"%b","result":"1"}],"queues":[],"limit":0}'


@dataclass(frozen=True, slots=True)
class Window:
    """One measured window of one installation."""

    calls: int
    seconds: float
    latencies_s: list[float]
    server_cpu_s: float
    postgres_cpu_s: float
    generator_cpu_s: float

    @property
    def rate(self) -> float:
        return self.calls / self.seconds


class WorkerSocket:
    """One worker: a connection that always has one call in flight."""

    def __init__(self, port: int, token: str) -> None:
        self._prefix = post_prefix(http.FINISH, token)
        self.socket = socket.create_connection((HOST, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = b""
        self._held: tuple[bytes, bytes] | None = None
        self.sent_at = 0.0
        self._send(FIRST_CALL)

    def receive(self) -> bool:
        """Read what has arrived. True if the call was answered; then the next one must be sent."""
        chunk = self.socket.recv(65_536)
        if not chunk:
            raise ConnectionResetError("the server closed a connection")
        self._data += chunk
        reply = split_reply(self._data)
        if reply is None:
            return False
        self._data = self._data[reply[1] :]
        if reply[0].status != 200:
            raise RuntimeError(f"status {reply[0].status}: {reply[0].body[:300]!r}")
        found = CLAIM.search(reply[0].body)
        self._held = (found[1], found[2]) if found is not None else None
        return True

    def send_next(self) -> None:
        if self._held is None:
            raise RuntimeError("the queue ran empty: raise MAX_CALLS_PER_S")
        self._send(NEXT_CALL % self._held)

    def finish(self) -> None:
        """Finish the held task, so that none is left running. Blocks."""
        if self._held is not None:
            self._send(LAST_CALL % self._held)
            while not self.receive():
                pass
        self.socket.close()

    def _send(self, body: bytes) -> None:
        request = with_body(self._prefix, body)
        self.sent_at = time.perf_counter()
        if self.socket.send(request) != len(request):
            raise RuntimeError("a request was sent only in part")


def drive(port: int, numbers: Sequence[int], seconds: float) -> tuple[int, float, list[float], float]:
    """Calls, seconds, latencies and own CPU seconds of these workers. Runs in a process of its own."""
    workers = {worker.socket.fileno(): worker for worker in (WorkerSocket(port, worker_token(n)) for n in numbers)}
    poll = select.epoll()
    for descriptor in workers:
        poll.register(descriptor, select.EPOLLIN)
    started, own_cpu_s = time.perf_counter(), time.process_time()
    until, now, latencies = started + seconds, started, list[float]()
    while workers:
        ready = poll.poll(CALL_TIMEOUT_S)
        if not ready:
            raise TimeoutError(f"no response for {CALL_TIMEOUT_S:g} s")
        for descriptor, _ in ready:
            worker = workers[descriptor]
            if not worker.receive():
                continue
            now = time.perf_counter()
            if now < until:
                latencies.append(now - worker.sent_at)
                worker.send_next()
            else:
                poll.unregister(descriptor)
                workers.pop(descriptor).finish()
    return len(latencies), seconds, latencies, time.process_time() - own_cpu_s


async def measure(running: Installation, connections: int, generators: int, seconds: float) -> Window:
    running.check()
    shares = [range(connections)[number::generators] for number in range(generators)]
    loop = asyncio.get_running_loop()
    with multiprocessing.get_context("fork").Pool(generators) as pool:
        before = await running.usage()
        jobs = [pool.apply_async(drive, (running.port, share, seconds)) for share in shares]
        results = [await loop.run_in_executor(None, job.get, seconds + 60.0) for job in jobs]
        used = (await running.usage()).since(before)
    latencies = [latency for result in results for latency in result[2]]
    return Window(
        sum(result[0] for result in results),
        seconds,
        latencies,
        used.server_s,
        used.postgres_s,
        sum(result[3] for result in results),
    )


async def check_finished(running: Installation, calls: int) -> None:
    """Each call but a worker's first finishes a task; the database must contain as many, and none still running."""
    async with connected(running.dsn) as connection:
        rows = await connection.fetch("select status::text, count(*) from windlass.tasks group by status")
    counts = dict(map(tuple, rows))
    if counts.get("complete", 0) < calls or counts.get("running", 0):
        raise RuntimeError(f"{calls:,} calls were answered, but the database contains {counts}")


async def run(arguments: argparse.Namespace) -> bool:
    tasks = int(MAX_CALLS_PER_S * (arguments.seconds * arguments.rounds + WARM_UP_S * 2))
    windows: dict[int, list[Window]] = {count: [] for count in arguments.processes}
    with open_bench_server() as server:
        async with AsyncExitStack() as stack:
            installations = {
                count: await stack.enter_async_context(
                    installation(server, f"http_{count}", workers=arguments.connections, tasks=tasks, processes=count)
                )
                for count in arguments.processes
            }
            for running in installations.values():
                await measure(running, arguments.connections, arguments.generators, WARM_UP_S)
            await server.checkpoint()
            for _ in range(arguments.rounds):
                for count, running in installations.items():
                    window = await measure(running, arguments.connections, arguments.generators, arguments.seconds)
                    windows[count].append(window)
            for count, running in installations.items():
                await check_finished(running, sum(window.calls for window in windows[count]))
                print(f"{count} configured: {await running.roles()}", file=sys.stderr)
    return report(windows, arguments)


def report(windows: dict[int, list[Window]], arguments: argparse.Namespace) -> bool:
    print(
        f"finish-and-claim over HTTP, {arguments.connections} workers, {arguments.rounds} rounds of "
        f"{arguments.seconds:g} s, {os.cpu_count()} cores; median (lowest to highest)\n"
    )
    rows = []
    for count, measured in windows.items():
        latencies = [latency for window in measured for latency in window.latencies_s]
        rows.append(
            [
                str(count),
                _spread([window.rate for window in measured]),
                _spread([1e6 * window.server_cpu_s / window.calls for window in measured]),
                _spread([1e6 * window.postgres_cpu_s / window.calls for window in measured]),
                _spread([1e6 * window.generator_cpu_s / window.calls for window in measured]),
                f"{1000 * percentile(latencies, 0.5):.1f}",
                f"{1000 * percentile(latencies, 0.99):.1f}",
            ]
        )
    head = [
        "server processes",
        "calls/s",
        "server us",
        "PostgreSQL us",
        "generator us",
        "p50 ms",
        "p99 ms",
    ]
    print(table(head, rows))
    goals = {}
    if 1 in windows:
        one = windows[1]
        goals[f"one process: {GOAL_CALLS_PER_S:,} calls per second"] = (
            statistics.median(window.rate for window in one) >= GOAL_CALLS_PER_S
        )
        goals[f"one process: at most {GOAL_SERVER_US} us of server CPU per call"] = (
            statistics.median(1e6 * window.server_cpu_s / window.calls for window in one) <= GOAL_SERVER_US
        )
    if 1 in windows and 2 in windows:
        ratios = [two.rate / one.rate for one, two in zip(windows[1], windows[2], strict=True)]
        print(f"\ntwo to one: **{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})")
        goals["two processes: as many calls per second as one"] = statistics.median(ratios) >= GOAL_RATIO
    return report_goals(goals)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.http_load", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of server processes")
    parser.add_argument("--connections", type=int, default=16, help="workers, each with one connection")
    parser.add_argument("--generators", type=int, default=1, help="processes that generate load")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one window")
    parser.add_argument("--rounds", type=int, default=5)
    sys.exit(0 if asyncio.run(run(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
