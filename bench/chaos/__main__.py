"""Faults against a real installation, one after another: are the promises kept, and how long does recovery take?

    python -m bench.chaos                                   # 10 minutes, all faults in random order
    python -m bench.chaos --minutes 2 --only kill-server --only fail-over
    python -m bench.chaos --seed 7

After each fault the run waits until tasks complete in every queue, a cycle ends, and all workers and processes work. At
the end every accepted task must be finished exactly once; no task may have run twice at a time within a lease; never
more machines than allowed may have existed, and no process or machine may be left. Exits with 1 if a promise is broken.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import asyncpg

from bench.bench_server import connected
from bench.chaos.faults import FAULTS, FaultContext, reason_to_skip
from bench.chaos.installation import FLEET, START_TIMEOUT_S, ChaosInstallation
from bench.chaos.observer import Observer, Recovery
from bench.chaos.promises import Evidence, collect_evidence
from bench.chaos.task_stream import TaskStream
from bench.figures import percentile, table

RECOVERY_LIMIT_S = 60.0
# For the start, and for the last tasks and the shutdown: no fault begins later than this before the end.
RESERVED_S = 45.0
STEADY_S = 1.0
DRAIN_LIMIT_S = 120.0
LEFT_PROCESSES_LIMIT_S = 20.0
# Beyond the chosen time, for the drain, the shutdown and the removal of the files.
GRACE_S = 300.0
UNFINISHED = "select count(*) from windlass.tasks where status not in ('complete', 'failed')"
LIVE_ROWS = "select count(*) from windlass.workers where fleet = $1 and slot is not null and status <> 'terminated'"


class ChaosRun:
    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given = given
        self.installation = ChaosInstallation(folder)
        self.observer = Observer(self.installation)
        self.stream = TaskStream(self.installation, given.seed)
        self.trials: dict[str, list[Recovery]] = {}
        self.skipped: dict[str, str] = {}
        self.broken: list[str] = []

    async def run(self, ends_at: float) -> Evidence:
        await self.installation.open()
        background = asyncio.create_task(self.observer.run())
        stream = asyncio.create_task(self.stream.run())
        try:
            start = await self.observer.recovery(time.monotonic(), START_TIMEOUT_S)
            if start.total_s is None:
                logs = "\n".join(f"--- {n}\n{s.log_tail()}" for n, s in self.installation.services.items())
                raise TimeoutError(f"the installation does not work before any fault: {start.parts}\n{logs}")
            print(f"everything works {start.total_s:.1f} s after the start", flush=True)
            await self._inject_faults(ends_at, (background, stream))
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
            await self._drain()
            await self._check_machines()
            evidence = await collect_evidence(
                self.installation.dsn, self.stream.accepted, self.installation.runs, self.observer
            )
        finally:
            for job in (stream, background):
                job.cancel()
            await asyncio.gather(stream, background, return_exceptions=True)
        await self._shut_down()
        self.broken += evidence.broken_promises()
        return evidence

    async def _inject_faults(self, ends_at: float, jobs: Sequence["asyncio.Task[None]"]) -> None:
        chance = random.Random(self._given.seed)
        context = FaultContext(self.installation, self.stream, chance)
        names = self._given.only or list(FAULTS)
        while True:
            order = chance.sample(names, len(names))
            for name in order:
                reason = reason_to_skip(name, self.installation)
                if reason is not None:
                    self.skipped[name] = reason
                    continue
                if time.monotonic() > ends_at - RESERVED_S:
                    return
                await self._one_fault(name, context)
                for job in jobs:
                    if job.done():
                        job.result()  # raises
            if set(names) <= set(self.skipped):
                return

    async def _one_fault(self, name: str, context: FaultContext) -> None:
        began = time.monotonic()
        await FAULTS[name](context)
        recovery = await self.observer.recovery(time.monotonic(), RECOVERY_LIMIT_S)
        self.trials.setdefault(name, []).append(recovery)
        parts = ", ".join(f"{part} {'never' if s is None else f'{s:.1f}'}" for part, s in recovery.parts.items())
        print(f"{time.strftime('%H:%M:%S')} {name}: {time.monotonic() - began:.1f} s; {parts}", flush=True)
        if recovery.total_s is None:
            self.broken.append(f"no recovery from {name} within {RECOVERY_LIMIT_S:g} s: {parts}")
        await self.installation.postgres.attach_standby()
        await asyncio.sleep(STEADY_S)

    async def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_LIMIT_S
        async with connected(self.installation.dsn) as connection:
            while await connection.fetchval(UNFINISHED) and time.monotonic() < deadline:
                await asyncio.sleep(0.2)

    async def _check_machines(self) -> None:
        """At rest, every machine has a row and every row a machine."""
        deadline = time.monotonic() + RECOVERY_LIMIT_S
        while True:
            async with connected(self.installation.dsn) as connection:
                rows = await connection.fetchval(LIVE_ROWS, FLEET)
            machines = len(self.installation.local_workers())
            if rows == machines:
                return
            if time.monotonic() > deadline:
                self.broken.append(f"{machines} machines and {rows} live rows at rest")
                return
            await asyncio.sleep(0.2)

    async def _shut_down(self) -> None:
        """SIGTERM to everything. No process may remain."""
        installation = self.installation
        for name, service in installation.services.items():
            code = await service.stop()
            if code is None:
                self.broken.append(f"{name} did not stop within its time")
        if installation.pooler is not None:
            await installation.pooler.stop()
        deadline = time.monotonic() + LEFT_PROCESSES_LIMIT_S
        while (left := installation.marked_processes()) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        for process in left:
            with suppress(Exception):
                self.broken.append(f"process {process.pid} is left: {' '.join(process.cmdline())[:200]}")


def report(run: ChaosRun, evidence: Evidence) -> None:
    rows = []
    for name in FAULTS:
        if name in run.skipped:
            rows.append([name, "0", *([""] * 7)])
            continue
        trials = run.trials.get(name, [])
        if trials:
            totals = [RECOVERY_LIMIT_S if r.total_s is None else r.total_s for r in trials]
            worst = [max(_known(r.parts[part]) for r in trials) for part in trials[0].parts]
            figures = [percentile(totals, 0.5), percentile(totals, 0.99), max(totals), *worst]
            rows.append([name, str(len(trials)), *(f"{figure:.1f}" for figure in figures)])
    head = ["fault", "trials", "p50 s", "p99", "max", "max completions", "max cycle", "max workers", "max processes"]
    print("\n" + table(head, rows))
    for name, reason in run.skipped.items():
        print(f"skipped {name}: {reason}")
    attempts = Counter(row["attempts"] for row in evidence.tasks.values())
    overlaps = evidence.overlapping_runs()
    lost = len(evidence.runs) - sum(1 for row in evidence.transitions if row["after"] in ("complete", "failed"))
    print(
        f"\n{len(evidence.accepted.queues):,} accepted tasks, {len(evidence.runs):,} runs of handlers, "
        f"{lost} of them without an accepted result; tasks by attempts: {dict(sorted(attempts.items()))}; "
        f"{len(overlaps)} overlapping runs after a lease; at most {run.observer.most_machines} machines "
        f"in {run.observer.samples} samples"
    )
    for promise in run.broken[:50]:
        print(f"BROKEN {promise}")
    print("\npromises: " + ("broken" if run.broken else "kept"))


def _known(seconds: float | None) -> float:
    return RECOVERY_LIMIT_S if seconds is None else seconds


async def main_async(given: argparse.Namespace) -> bool:
    ends_at = time.monotonic() + given.minutes * 60
    main = asyncio.current_task()
    assert main is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    load = os.getloadavg()[0]
    print(f"seed {given.seed}, {given.minutes:g} minutes, {os.cpu_count()} cores, load {load:.1f}", flush=True)
    with tempfile.TemporaryDirectory(prefix="windlass-chaos-", ignore_cleanup_errors=True) as name:
        run = ChaosRun(given, Path(name))
        try:
            async with asyncio.timeout(given.minutes * 60 + GRACE_S):
                evidence = await run.run(ends_at)
        except (TimeoutError, OSError, asyncpg.PostgresError):
            for service_name, service in run.installation.services.items():
                print(f"--- {service_name}\n{service.log_tail()}", file=sys.stderr)
            raise
        finally:
            await run.installation.close()
            if given.keep is not None:
                run.installation.keep_logs(given.keep)
    report(run, evidence)
    return not run.broken


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="order and details of the faults")
    parser.add_argument("--only", action="append", choices=list(FAULTS), help="this fault; may be repeated")
    parser.add_argument("--keep", type=Path, default=None, help="folder for the logs and the record of runs")
    sys.exit(0 if asyncio.run(main_async(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
