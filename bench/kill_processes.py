"""Kill and stop processes of a real `windlass up` under load: is a task lost or run twice, and how long is the gap?

    python -m bench.kill_processes                               # 5 rounds of each scenario, about 6 minutes
    python -m bench.kill_processes --rounds 1 --scenarios kill-server

Real `windlass worker --url` processes run tasks over HTTP, probes ask for /healthz on new connections and send
heartbeats on open ones. Scenarios: SIGKILL of a server process, SIGKILL of the control process, SIGSTOP of a server
process, SIGSTOP of the control process. A server has recovered when as many server processes as before serve again; the
control loop when a new process has ended a cycle as leader. Goals: no task lost, no request that takes longer than
10 s, recovery from a kill within 3 s. Exits with 1 if a goal is missed.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.bench_server import connected, open_bench_server
from bench.figures import report_goals, table
from bench.heartbeats import VITALS, enqueue
from bench.installation import QUEUE, ROOT, Installation, api_token, installation, worker_token
from bench.raw_http import RawConnection, call_once, get_request, open_raw, post_request
from windlass.model.auth import Role
from windlass.ports import http

WORKERS = 4
CONCURRENCY = 4
# Simulated workers, whose heartbeats are probes.
BEATING = 8
TASKS_PER_S = 150.0
PROBE_INTERVAL_S = 0.05
HEARTBEAT_INTERVAL_S = 0.25
# A request that takes longer counts as this long.
REQUEST_LIMIT_S = 30.0
RECOVERY_LIMIT_S = 60.0
# Load before and after each kill.
STEADY_S = 3.0
STOPPED_CONTROL_S = 10.0
# Lost claims return after a lease, then their tasks run.
LEASE_S = 15.0
DRAIN_LIMIT_S = 120.0
GOAL_RECOVERY_S = 3.0
GOAL_REQUEST_S = 10.0
SCENARIOS = ("kill-server", "kill-control", "stop-server", "stop-control")
UNFINISHED = "select count(*) from windlass.tasks where status not in ('complete', 'failed')"
OUTCOMES = "select status::text, count(*) from windlass.tasks group by status"


@dataclass
class Probes:
    """When each request began, how long it took to succeed or fail, and whether it succeeded."""

    requests: list[tuple[float, float, bool]] = field(default_factory=list)
    # Requests in flight, by start.
    pending: set[float] = field(default_factory=set)

    @contextmanager
    def request(self) -> Iterator[None]:
        began = time.monotonic()
        self.pending.add(began)
        is_answered = False
        try:
            yield
            is_answered = True
        except (OSError, TimeoutError):
            pass
        finally:
            self.pending.discard(began)
            self.requests.append((began, time.monotonic() - began, is_answered))

    def longest_s(self, since: float) -> float:
        now = time.monotonic()
        ended = [took for began, took, _ in self.requests if began + took >= since]
        return max([*ended, *(now - began for began in self.pending)], default=0.0)

    def outage_s(self, since: float) -> float:
        """From the first failed request after `since` to the end of the last failed one."""
        failed = [
            (began, began + took) for began, took, is_answered in self.requests if began >= since and not is_answered
        ]
        return max(end for _, end in failed) - since if failed else 0.0


async def probe_health(port: int, probes: Probes) -> None:
    async def one() -> None:
        with probes.request():
            reply = await call_once(port, get_request("/healthz"), REQUEST_LIMIT_S)
            if reply.status != 200:
                raise ConnectionError(f"status {reply.status}")

    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(one())
            await asyncio.sleep(PROBE_INTERVAL_S)


async def probe_heartbeats(port: int, number: int, probes: Probes) -> None:
    request = post_request(http.HEARTBEAT, worker_token(number), VITALS)
    connection: RawConnection | None = None
    while True:
        with probes.request():
            async with asyncio.timeout(REQUEST_LIMIT_S):
                if connection is None or not connection.is_open:
                    connection = await open_raw(port)
                reply = await connection.call(request)
                if reply.status != 200:
                    raise ConnectionError(f"status {reply.status}")
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)


@contextmanager
def real_workers(running: Installation) -> Iterator[None]:
    """`windlass worker --url` processes, stopped at the end."""
    token_file = running.folder / "token"
    token_file.write_text(api_token(Role.WORKER))
    environment = {key: value for key, value in os.environ.items() if key not in ("DATABASE_URL", "PYTHONPATH")}
    command = [sys.executable, "-m", "windlass", "worker", "--url", running.url, "--token-file", str(token_file)]
    command += ["--queue", QUEUE, "--handler", "bench.handlers:record_run", "--inline", "-c", str(CONCURRENCY)]
    command += ["--chdir", str(ROOT), "--heartbeat-interval", "2", "--lease", str(LEASE_S)]
    processes = []
    for number in range(WORKERS):
        with (running.folder / f"worker-{number}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    command,
                    env={**environment, "BENCH_RUNS": str(running.folder / "runs")},
                    cwd=running.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
    try:
        yield
        for number, process in enumerate(processes):
            if process.poll() is not None:
                tail = (running.folder / f"worker-{number}.log").read_text()[-2_000:]
                raise ChildProcessError(f"a worker exited with {process.returncode}\n{tail}")
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def read_runs(path: Path) -> list[tuple[float, int, int]]:
    """When, which worker process, which task."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(at), int(pid), int(task_id)) for at, pid, task_id in map(str.split, lines)]


def longest_gap_s(running: Installation, since: float) -> float:
    """The longest time in which one worker process started no task."""
    now = time.monotonic()
    starts: dict[int, list[float]] = {}
    for at, pid, _ in read_runs(running.folder / "runs"):
        starts.setdefault(pid, []).append(at)
    gaps = []
    for times in starts.values():
        before = max((at for at in times if at < since), default=since)
        moments = [before, *sorted(at for at in times if at >= since), now]
        gaps += [later - earlier for earlier, later in itertools.pairwise(moments)]
    return max(gaps, default=float("inf"))


@dataclass(frozen=True, slots=True)
class Round:
    # None: did not recover within RECOVERY_LIMIT_S. Of a stopped process: until it was replaced.
    recovery_s: float | None
    # From the signal until no probe failed any more.
    outage_s: float
    longest_request_s: float
    longest_gap_s: float
    tasks_per_s_before: float
    tasks_per_s_after: float


async def run_round(running: Installation, scenario: str, probes: Probes) -> Round:
    action, role = scenario.split("-")
    await asyncio.sleep(STEADY_S)
    running.check()
    roles = await running.roles()
    victims = roles.get(role)
    if not victims:
        raise RuntimeError(f"`windlass up` has no process of role {role}: {roles}")
    victim, count = victims[0], len(victims)
    signalled = time.monotonic()
    os.kill(victim, signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    try:
        if scenario == "stop-control":
            # Workers go on without it. Whether it is replaced meanwhile is up to the supervisor.
            await asyncio.sleep(STOPPED_CONTROL_S)
            recovery_s = _new_leader_s(running, victim, signalled)
        else:
            recovery_s = await _recovery_s(running, role, victim, count, signalled)
        await asyncio.sleep(STEADY_S)
        ended = time.monotonic()
        starts = [at for at, _, _ in read_runs(running.folder / "runs")]
        return Round(
            recovery_s,
            probes.outage_s(signalled),
            probes.longest_s(signalled),
            longest_gap_s(running, signalled),
            sum(signalled - STEADY_S <= at < signalled for at in starts) / STEADY_S,
            sum(signalled <= at for at in starts) / (ended - signalled),
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)


async def _recovery_s(running: Installation, role: str, victim: int, count: int, since: float) -> float | None:
    while time.monotonic() < since + RECOVERY_LIMIT_S:
        running.check()
        if role == "control":
            recovered = _new_leader_s(running, victim, since)
            if recovered is not None:
                return recovered
        else:
            serving = [pid for pid in (await running.roles()).get("server", []) if pid != victim and _is_listening(pid)]
            if len(serving) >= count:
                return time.monotonic() - since
        await asyncio.sleep(0.02)
    return None


def _new_leader_s(running: Installation, victim: int, since: float) -> float | None:
    ends = [cycle.ended_at - since for cycle in running.cycles() if cycle.is_leader and cycle.pid != victim]
    return min((end for end in ends if end > 0), default=None)


def _is_listening(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and any(
            connection.status == psutil.CONN_LISTEN for connection in process.net_connections("tcp")
        )
    except psutil.Error:
        return False


@asynccontextmanager
async def background(*jobs: "asyncio._CoroutineLike[None]") -> AsyncIterator[None]:
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()  # raises
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def drained(running: Installation) -> tuple[dict[str, int], int]:
    """Tasks by status once none is left, and the number of tasks that ran more than once."""
    deadline = time.monotonic() + DRAIN_LIMIT_S
    async with connected(running.dsn) as connection:
        while await connection.fetchval(UNFINISHED) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        outcomes = dict(map(tuple, await connection.fetch(OUTCOMES)))
    runs = Counter(task_id for _, _, task_id in read_runs(running.folder / "runs"))
    return outcomes, sum(count > 1 for count in runs.values())


async def run(given: argparse.Namespace) -> bool:
    rounds: dict[str, list[Round]] = {scenario: [] for scenario in given.scenarios}
    with open_bench_server() as server:
        async with installation(server, "kills", workers=BEATING, processes=given.processes) as running:
            probes = Probes()
            with real_workers(running):
                async with background(
                    enqueue(running.dsn, TASKS_PER_S),
                    probe_health(running.port, probes),
                    *(probe_heartbeats(running.port, number, probes) for number in range(BEATING)),
                ):
                    await _wait_for_runs(running)
                    for _ in range(given.rounds):
                        for scenario in given.scenarios:
                            rounds[scenario].append(await run_round(running, scenario, probes))
                outcomes, repeated = await drained(running)
    return report(given, rounds, outcomes, repeated)


async def _wait_for_runs(running: Installation) -> None:
    deadline = time.monotonic() + 60.0
    while len({pid for _, pid, _ in read_runs(running.folder / "runs")}) < WORKERS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all workers run tasks\n{(running.folder / 'worker-0.log').read_text()[-2_000:]}")
        await asyncio.sleep(0.1)


def report(given: argparse.Namespace, rounds: dict[str, list[Round]], outcomes: dict[str, int], repeated: int) -> bool:
    print(
        f"{given.processes} server processes, {WORKERS} real workers over HTTP, {TASKS_PER_S:g} tasks per second, "
        f"{given.rounds} rounds, {os.cpu_count()} cores; median (highest)\n"
    )
    rows = [
        [
            scenario,
            _recovery(scenario, measured),
            _highest([r.outage_s for r in measured]),
            _highest([r.longest_request_s for r in measured]),
            _highest([r.longest_gap_s for r in measured]),
            f"{statistics.median(r.tasks_per_s_before for r in measured):.0f}",
            f"{statistics.median(r.tasks_per_s_after for r in measured):.0f}",
        ]
        for scenario, measured in rounds.items()
    ]
    head = ["scenario", "recovered after", "probes failed for", "longest request", "longest gap of a worker"]
    print(table([*head, "tasks/s before", "after"], rows))
    print(f"\ntasks: {outcomes}; run more than once: {repeated}")
    lost = sum(count for status, count in outcomes.items() if status != "complete")
    kills = [r for scenario, measured in rounds.items() if scenario.startswith("kill") for r in measured]
    everything = [r for measured in rounds.values() for r in measured]
    return report_goals(
        {
            "no task is lost or runs twice": not lost and not repeated,
            f"a killed process is replaced within {GOAL_RECOVERY_S:g} s": all(
                r.recovery_s is not None and r.recovery_s <= GOAL_RECOVERY_S for r in kills
            ),
            f"no request takes longer than {GOAL_REQUEST_S:g} s": all(
                r.longest_request_s <= GOAL_REQUEST_S for r in everything
            ),
            "a stopped server is replaced": all(r.recovery_s is not None for r in rounds.get("stop-server", [])),
        }
    )


def _recovery(scenario: str, measured: list[Round]) -> str:
    recovered = [r.recovery_s for r in measured if r.recovery_s is not None]
    missing = len(measured) - len(recovered)
    if scenario == "stop-control" and missing:
        return f"not replaced within {STOPPED_CONTROL_S:g} s in {missing} of {len(measured)}"
    return _highest(recovered) + (f", never in {missing}" if missing else "")


def _highest(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({max(values):.2f}) s" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kill_processes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2, help="number of server processes")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    is_good = asyncio.run(run(parser.parse_args()))
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
