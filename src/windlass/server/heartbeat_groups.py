"""Collects the heartbeats of many workers for some milliseconds and records each group in one statement.

A statement and a commit for every single heartbeat would occupy most of a core with some thousand workers. Every caller
gets its own reply or its own error: a group with an invalid heartbeat is divided until only that one fails, and a
worker whose row is locked is recorded alone, so that the others do not wait for it. Groups, their claims, statements
at the same time and waiting heartbeats are bounded. A worker has at most one heartbeat in the database at a time, so
one token cannot occupy more than one statement.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.model.errors import BadInput
from windlass.model.worker import HeartbeatReply, HeartbeatReport
from windlass.server.context import WorkerStore
from windlass.server.errors import unavailable

# How long the first heartbeat of a group waits for others. Workers send one every few seconds, so none notices.
GROUP_DELAY_S = 0.02
# One statement: a few milliseconds of the database, in which the rows of these workers are locked.
MAX_GROUP_HEARTBEATS = 200
MAX_GROUP_CLAIMS = 2_000
# Groups that are recorded at the same time. While the database is slow, the next groups grow instead.
MAX_GROUPS = 2
# Workers with a locked row that are recorded alone at the same time.
MAX_ALONE = 2
# Heartbeats without a reply. More than a server can record before its clients time out.
MAX_PENDING = 20_000


@dataclass(slots=True, eq=False)
class _Pending:
    heartbeat: HeartbeatReport
    reply: "asyncio.Future[HeartbeatReply]"


class HeartbeatGroups:
    def __init__(self, store: WorkerStore, *, delay_s: float = GROUP_DELAY_S) -> None:
        self._store = store
        self._delay_s = delay_s
        # In the order of arrival, without those that are being recorded.
        self._waiting: list[_Pending] = []
        self._recording: set[str] = set()
        self._groups = 0
        self._alone = asyncio.Semaphore(MAX_ALONE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def heartbeat(self, heartbeat: HeartbeatReport) -> HeartbeatReply:
        """Record a heartbeat with others. Raises as the store does, and ApiError 503 if too many are pending."""
        if len(self._waiting) + len(self._recording) >= MAX_PENDING:
            raise unavailable("too many heartbeats are pending: retry")
        loop = asyncio.get_running_loop()
        pending = _Pending(heartbeat, loop.create_future())
        self._waiting.append(pending)
        if len(self._waiting) >= MAX_GROUP_HEARTBEATS:
            self._start_groups()
        elif self._timer is None:
            self._timer = loop.call_later(self._delay_s, self._start_groups)
        return await pending.reply

    def _start_groups(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._groups < MAX_GROUPS and (group := self._take_group()):
            self._groups += 1
            self._start(self._record_group(group))

    def _start(self, recording: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(recording)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take_group(self) -> list[_Pending]:
        """The next heartbeats, one per worker. A worker whose last heartbeat is being recorded waits."""
        group: list[_Pending] = []
        left, claims = [], 0
        for position, pending in enumerate(self._waiting):
            worker_id, count = pending.heartbeat.worker_id, len(pending.heartbeat.claims)
            if pending.reply.done():
                continue  # its client has disconnected
            if len(group) == MAX_GROUP_HEARTBEATS or (group and claims + count > MAX_GROUP_CLAIMS):
                left += self._waiting[position:]
                break
            if worker_id in self._recording:
                left.append(pending)
                continue
            self._recording.add(worker_id)
            group.append(pending)
            claims += count
        self._waiting = left
        return group

    async def _record_group(self, group: Sequence[_Pending]) -> None:
        try:
            await self._record(group)
        finally:
            self._groups -= 1
            # These have waited for a statement already.
            self._start_groups()

    async def _record(self, group: Sequence[_Pending]) -> None:
        try:
            replies = await self._store.heartbeat_many([pending.heartbeat for pending in group])
        except BadInput as error:
            if len(group) == 1:
                self._end(group[0], error)
                return
            middle = len(group) // 2
            await self._record(group[:middle])
            await self._record(group[middle:])
        except Exception as error:
            # No answer from the database, or a defect: the same for every caller.
            for pending in group:
                self._end(pending, error)
        else:
            for pending, reply in zip(group, replies, strict=True):
                if reply is not None:
                    self._end(pending, reply)
                else:
                    self._start(self._record_alone(pending))

    async def _record_alone(self, pending: _Pending) -> None:
        """Wait for the locked row of this worker."""
        outcome: HeartbeatReply | Exception | None
        async with self._alone:
            try:
                (outcome,) = await self._store.heartbeat_many([pending.heartbeat], waits=True)
            except Exception as error:
                outcome = error
        self._end(pending, outcome or unavailable("the worker's row is locked: retry"))
        self._start_groups()

    def _end(self, pending: _Pending, outcome: HeartbeatReply | Exception) -> None:
        self._recording.discard(pending.heartbeat.worker_id)
        if pending.reply.done():
            return  # its client has disconnected
        if isinstance(outcome, Exception):
            pending.reply.set_exception(outcome)
        else:
            pending.reply.set_result(outcome)
