"""What must hold at the end of a fault run, from three records: the database, the handlers' file, and the observer."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from bench.chaos.installation import LEASE_S, LOCAL_WORKERS
from bench.chaos.observer import Observer
from bench.chaos.task_stream import Accepted

# The observer sees a heartbeat this much later than the database, at most, on a busy machine.
OBSERVER_LAG_S = 1.5
MAX_LISTED = 10

TASKS = "select id, status::text as status, result #>> '{}' as result, attempts from windlass.tasks"
TRANSITIONS = "select task_id, before, after, token::text as token, worker_id from audit.transitions order by id"


@dataclass
class HandlerRun:
    """One run of a handler, from its record. `seen_until` is the last sign of life; killed runs have no end."""

    task_id: int
    token: str
    began: float
    seen_until: float
    has_ended: bool = False


def read_runs(path: Path) -> tuple[list[HandlerRun], list[str]]:
    """All runs by their beginning, and tokens that began more than once."""
    runs: dict[str, HandlerRun] = {}
    repeated = []
    for line in path.read_text().splitlines() if path.exists() else []:
        kind, at, task_id, _, token, _ = line.split()
        if kind == "S":
            if token in runs:
                repeated.append(token)
            runs[token] = HandlerRun(int(task_id), token, float(at), float(at))
        else:
            runs[token].seen_until = float(at)
            runs[token].has_ended |= kind == "E"
    return sorted(runs.values(), key=lambda run: run.began), repeated


@dataclass
class Evidence:
    accepted: Accepted
    tasks: Mapping[int, asyncpg.Record]
    transitions: list[asyncpg.Record]
    runs: list[HandlerRun]
    repeated_tokens: list[str]
    observer: Observer

    def broken_promises(self) -> list[str]:
        return [
            *self._unfinished_tasks(),
            *self._completions(),
            *self._overlaps(),
            *(f"claim {token} ran more than once" for token in self.repeated_tokens),
            *(
                f"{count} {what}, at most {LOCAL_WORKERS} are allowed"
                for what, count in (("machines", self.observer.most_machines), ("rows", self.observer.most_rows))
                if count > LOCAL_WORKERS
            ),
        ]

    def _unfinished_tasks(self) -> list[str]:
        found = []
        for task_id in self.accepted.queues:
            task = self.tasks.get(task_id)
            if task is None:
                found.append(f"accepted task {task_id} is lost")
            elif task_id in self.accepted.meant_to_fail:
                if task["status"] != "failed":
                    found.append(f"task {task_id}, which cannot succeed, is {task['status']}")
            elif task["status"] != "complete":
                found.append(f"accepted task {task_id} is {task['status']} after {task['attempts']} attempts")
        return found

    def _completions(self) -> list[str]:
        """Each task ends once, and a completed one with the result of a run that ended, under the accepted claim."""
        ended: dict[int, list[asyncpg.Record]] = defaultdict(list)
        found = []
        for row in self.transitions:
            if row["before"] in ("complete", "failed"):
                found.append(f"task {row['task_id']} changed from {row['before']} to {row['after']}")
            if row["after"] in ("complete", "failed"):
                ended[row["task_id"]].append(row)
        finished_runs = {run.token for run in self.runs if run.has_ended}
        for task_id, rows in ended.items():
            if len(rows) > 1:
                found.append(f"task {task_id} ended {len(rows)} times")
            elif rows[0]["after"] == "complete":
                token = rows[0]["token"]
                if token not in finished_runs:
                    found.append(f"task {task_id} is complete without a finished run")
                elif self.tasks[task_id]["result"] != token:
                    found.append(f"task {task_id} has the result of another attempt")
        return found

    def overlapping_runs(self) -> list[tuple[HandlerRun, HandlerRun]]:
        by_task: dict[int, list[HandlerRun]] = defaultdict(list)
        for run in self.runs:
            by_task[run.task_id].append(run)
        return [
            (first, second)
            for runs in by_task.values()
            for position, second in enumerate(runs)
            for first in runs[:position]
            if first.seen_until > second.began
        ]

    def _overlaps(self) -> list[str]:
        """Two runs of a task overlap only if the worker of the first had been silent for its lease."""
        worker_of = {row["token"]: row["worker_id"] for row in self.transitions if row["after"] == "running"}
        found = []
        for first, second in self.overlapping_runs():
            silence_s = self.observer.silence_s(worker_of.get(first.token, ""), second.began)
            if silence_s < LEASE_S - OBSERVER_LAG_S:
                found.append(
                    f"task {first.task_id} ran twice at the same time, {silence_s:.1f} s after a heartbeat of "
                    f"{worker_of.get(first.token)}"
                )
        return found


async def collect_evidence(dsn: str, accepted: Accepted, runs_file: Path, observer: Observer) -> Evidence:
    connection = await asyncpg.connect(dsn)
    try:
        tasks = {row["id"]: row for row in await connection.fetch(TASKS)}
        transitions = list(await connection.fetch(TRANSITIONS))
    finally:
        await connection.close()
    runs, repeated = read_runs(runs_file)
    return Evidence(accepted, tasks, transitions, runs, repeated, observer)
