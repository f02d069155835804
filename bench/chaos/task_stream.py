"""A steady stream of tasks, and which of them were accepted.

A task is accepted once its enqueue was confirmed. An enqueue without an answer is repeated with the same unique key, so
that it adds one task at most. Tasks of queue `http` are enqueued over HTTP, all others in the database.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from bench.chaos.installation import ChaosInstallation
from bench.installation import api_token
from bench.raw_http import RawConnection, open_raw, post_request
from windlass.model.auth import Role

TASKS_PER_S = 2.0
# Durations per queue: most tasks are short, some run for several heartbeats.
LONG_SHARE = 0.25
SHORT_S, LONG_S = (0.02, 0.2), (1.0, 3.0)
# More attempts than a task can lose in a run. Tasks that are meant to fail have one.
MAX_ATTEMPTS = 50
ENQUEUE_TIMEOUT_S = 10.0
RETRY_INTERVAL_S = 0.2
ENQUEUE = """
select windlass.enqueue($1, $2, p_unique_key => $3, p_max_attempts => $4, p_timeout_s => $5)
"""


@dataclass
class Accepted:
    """Confirmed tasks with their queues, and those that are meant to fail."""

    queues: dict[int, str] = field(default_factory=dict)
    meant_to_fail: set[int] = field(default_factory=set)


class TaskStream:
    def __init__(self, installation: ChaosInstallation, seed: int) -> None:
        self._installation = installation
        self._chance = random.Random(seed)
        self.accepted = Accepted()

    async def run(self) -> None:
        """Enqueue into every queue until cancelled."""
        async with asyncio.TaskGroup() as group:
            for queue in self._installation.queues:
                group.create_task(self._fill(queue))

    async def add_failing_task(self, queue: str, kind: str, timeout_s: float) -> int:
        producer = _Producer(self._installation, queue)
        task_id = await producer.enqueue({"kind": kind, "seconds": 0}, kind + str(time.monotonic()), 1, timeout_s)
        self.accepted.queues[task_id] = queue
        self.accepted.meant_to_fail.add(task_id)
        return task_id

    async def _fill(self, queue: str) -> None:
        producer = _Producer(self._installation, queue)
        started = time.monotonic()
        number = 0
        while True:
            # A stream that was held up goes on at its rate, and does not catch up.
            started = max(started, time.monotonic() - 1.0)
            await asyncio.sleep(max(0.0, started - time.monotonic()))
            started += 1 / TASKS_PER_S
            bounds = LONG_S if self._chance.random() < LONG_SHARE else SHORT_S
            payload = {"seconds": round(self._chance.uniform(*bounds), 3)}
            task_id = await producer.enqueue(payload, f"{queue}-{number}", MAX_ATTEMPTS, None)
            self.accepted.queues[task_id] = queue
            number += 1


class _Producer:
    def __init__(self, installation: ChaosInstallation, queue: str) -> None:
        self._installation = installation
        self._queue = queue
        self._database: asyncpg.Connection | None = None
        self._http: RawConnection | None = None

    async def enqueue(self, payload: Any, key: str, max_attempts: int, timeout_s: float | None) -> int:
        send = self._over_http if self._queue == "http" else self._in_database
        while True:
            try:
                async with asyncio.timeout(ENQUEUE_TIMEOUT_S):
                    return await send(payload, key, max_attempts, timeout_s)
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                self._disconnect()
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _in_database(self, payload: Any, key: str, max_attempts: int, timeout_s: float | None) -> int:
        if self._database is None or self._database.is_closed():
            self._database = await asyncpg.connect(self._installation.dsn)
        text = json.dumps(payload)
        found: int = await self._database.fetchval(ENQUEUE, self._queue, text, key, max_attempts, timeout_s)
        return found

    async def _over_http(self, payload: Any, key: str, max_attempts: int, timeout_s: float | None) -> int:
        if self._http is None or not self._http.is_open:
            self._http = await open_raw(self._installation.server_port)
        body = {"queue": self._queue, "payload": payload, "unique_key": key, "max_attempts": max_attempts}
        if timeout_s is not None:
            body["timeout_s"] = timeout_s
        reply = await self._http.call(post_request("/api/v1/tasks", api_token(Role.PRODUCER), body))
        if reply.status not in (200, 201):
            raise ConnectionError(f"status {reply.status}: {reply.body[:200]!r}")
        found: int = json.loads(reply.body)["task_id"]
        return found

    def _disconnect(self) -> None:
        if self._database is not None:
            self._database.terminate()
            self._database = None
        if self._http is not None:
            self._http.close()
            self._http = None
