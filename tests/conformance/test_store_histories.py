"""The same random histories over PostgreSQL and memory: after every step both must be in the same state.

Hypothesis generates histories of claims, failures, silence, pauses, recoveries and late results. Both stores run them
in the same virtual time, and everything that can be read from them is compared. A difference is printed as the shortest
program that shows it. A second test sends the worker calls to PostgreSQL over HTTP.

`WINDLASS_HISTORIES=5000 pytest tests/conformance/test_store_histories.py` runs that many new histories. Without it the
same few run every time.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from random import Random
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from support.http_transport_fixture import OverHttp, over_http
from support.memory_store.stores import MemoryStores
from support.provider_fixtures import RETENTION, empty_tables, spawn_in_memory, spawn_in_postgres
from support.stores import AnyStore, PostgresStores
from windlass.model.errors import BadInput, UnknownWorker
from windlass.model.event import Event
from windlass.model.task import Claim, Finished, NewTask, Task, TaskStatus
from windlass.model.worker import HeldClaim, Registration, WorkerStatus

MORE = int(os.environ.get("WINDLASS_HISTORIES", "0"))
HISTORIES = MORE or 40
# Over HTTP a history takes twice as long, and only worker calls can differ.
HISTORIES_OVER_HTTP = MORE or 20
STEPS = 50
# Above the number of rows of any history.
ALL = 100_000

QUEUES = ("a", "b")
# One worker at a time per place. Two places are slots of a fleet: their workers are spawned.
PLACES = ("w1", "w2", "w3", "h1", "h2")
SLOTS = {"h1": 0, "h2": 1}

queues = st.sampled_from([("a",), ("b",), ("a", "b"), ("b", "a", "b")])
places = st.sampled_from(PLACES)
# Index of a task or claim, counted from the newest.
ordinals = st.integers(0, 15)
# From this ordinal on all claims are counted, most of them stale; below it only valid ones.
LAST_VALID_ORDINAL = 10
flags = st.booleans()
tasks = st.builds(
    NewTask,
    queue=st.sampled_from(QUEUES),
    payload=st.sampled_from(["null", '{"a": [1, 2.5, "ü"]}']),
    priority=st.integers(-1, 1),
    run_after=st.none(),
    max_attempts=st.integers(1, 3),
    timeout_s=st.none(),
    unique_key=st.sampled_from([None, None, "k1", "k2"]),
)
# Near the first retry, near leases, near retention.
pauses_s = st.sampled_from([0.000001, 1.0, 2.5, 5.0, 30.0, 31.0, 900.0, 3601.0, 7201.0])


class Histories(RuleBasedStateMachine):
    """The test sets the event loop and a PostgreSQL store on it before use."""

    runner: asyncio.Runner
    postgres: Any  # directly, or as workers see it over HTTP
    eye: Any  # a plain connection, for what no store shows
    dsn: str
    clock: Any
    start: datetime

    def __init__(self) -> None:
        super().__init__()
        self.clock.now = self.start
        # Spawned workers have bills, so the ledger is compared too.
        self.memory = MemoryStores(self.clock, RETENTION, Random(1))  # noqa: S311
        # PostgreSQL's ids and tokens to those in memory.
        self.task_ids: dict[int, int] = {}
        self.tokens: dict[UUID | None, UUID | None] = {None: None}
        # Every claim so far, most of them stale: (worker, PostgreSQL's, memory's).
        self.claims: list[tuple[str, Claim, Claim]] = []
        # Number of ended workers per place. It is part of the id of the next worker.
        self.ended = dict.fromkeys(PLACES, 0)
        self.completed: dict[int, Task] = {}
        self.seen: dict[int, TaskStatus] = {}
        self.run(empty_tables(self.dsn))

    # ------------------------------------------------------------------------------------------------- both stores

    def run(self, awaitable: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await awaitable

        return self.runner.run(wait())

    def both(self, in_postgres: Awaitable[Any], in_memory: Awaitable[Any]) -> tuple[Any, Any]:
        return self.run(outcome(in_postgres)), self.run(outcome(in_memory))

    def same(self, act: Callable[[AnyStore], Awaitable[Any]]) -> Any:
        one, other = self.both(act(self.postgres), act(self.memory))
        assert one == other
        return other

    def learn(self, worker_id: str, theirs: list[Claim], ours: list[Claim]) -> None:
        """Check new claims: the same tasks in the same order, with new tokens."""
        assert not {claim.token for claim in theirs} & self.tokens.keys()
        self.tokens |= {one.token: other.token for one, other in zip(theirs, ours, strict=True)}
        self.claims += [(worker_id, one, other) for one, other in zip(theirs, ours, strict=True)]
        assert [self.translated(claim) for claim in theirs] == [with_parsed_json(claim) for claim in ours]

    def translated(self, claim: Claim) -> Claim:
        return with_parsed_json(
            replace(claim, task_id=self.task_ids[claim.task_id], token=self.tokens[claim.token] or claim.token)
        )

    def worker_at(self, place: str) -> str:
        return f"{place}-{self.ended[place]}"

    def some_claim(self, ordinal: int) -> tuple[str, Claim, Claim] | None:
        claims = self.claims if ordinal > LAST_VALID_ORDINAL else list(filter(self.is_valid, self.claims))
        return claims[-1 - ordinal % len(claims)] if claims else None

    def is_valid(self, claim: tuple[str, Claim, Claim]) -> bool:
        row = self.memory.tables.tasks.rows.get(claim[2].task_id)
        return row is not None and row.is_held_by(claim[2].token)

    def some_task(self, ordinal: int) -> tuple[int, int] | None:
        return list(self.task_ids.items())[-1 - ordinal % len(self.task_ids)] if self.task_ids else None

    def held_by(self, worker_id: str, ordinals_left_out: set[int]) -> list[tuple[Claim, Claim]]:
        """The last few claims of a worker, valid or not, except dropped ones."""
        mine = [(one, other) for holder, one, other in self.claims if holder == worker_id][-6:]
        return [pair for ordinal, pair in enumerate(mine) if ordinal not in ordinals_left_out]

    # ---------------------------------------------------------------------------------------------------- rules

    @initialize()
    def two_workers_and_a_task(self) -> None:
        self.register("w1", 30.0, QUEUES, is_new=False)
        self.register("w2", 30.0, QUEUES, is_new=False)
        self.enqueue(NewTask("a"), None)

    @rule(task=tasks, delay_s=st.sampled_from([None, None, -1.0, 0.0, 3.0, 60.0]))
    def enqueue(self, task: NewTask, delay_s: float | None) -> None:
        if delay_s is not None:
            task = task._replace(run_after=self.clock() + timedelta(seconds=delay_s))
        one, other = self.both(self.postgres.enqueue(task), self.memory.enqueue(task))
        assert self.task_ids.setdefault(one, other) == other

    @rule(many=st.lists(tasks, max_size=4))
    def enqueue_many(self, many: list[NewTask]) -> None:
        count = self.same(lambda store: store.enqueue_many(many))
        theirs, ours = self.both(self.postgres.tasks(limit=ALL), self.memory.tasks(limit=ALL))
        newest = [(one.id, other.id) for one, other in zip(theirs[:count], ours[:count], strict=True)]
        self.task_ids |= dict(reversed(newest))

    @rule(place=places, lease_s=st.sampled_from([30.0, 30.0, 60.0]), queues=queues, is_new=flags)
    def register(self, place: str, lease_s: float, queues: tuple[str, ...], is_new: bool) -> None:
        """Register a worker, maybe again. A place gets a new worker only after its last one ended."""
        before = self.run(self.memory.worker(self.worker_at(place)))
        if is_new and before is not None and before.status is WorkerStatus.TERMINATED:
            self.ended[place] += 1
            before = None
        worker_id = self.worker_at(place)
        if place in SLOTS and before is None:
            self.run(spawn_in_postgres(self.dsn, self.clock(), worker_id, "gpus", SLOTS[place]))
            spawn_in_memory(self.memory, worker_id, "gpus", SLOTS[place])
        self.same(lambda store: store.register(Registration(worker_id, queues, lease_s=lease_s, start_id="first")))

    @rule(place=places, queues=queues, limit=st.integers(0, 3))
    def claim(self, place: str, queues: tuple[str, ...], limit: int) -> None:
        worker_id = self.worker_at(place)
        theirs, ours = self.both(
            self.postgres.claim(worker_id, queues, limit), self.memory.claim(worker_id, queues, limit)
        )
        if isinstance(theirs, type):
            assert theirs is ours
        else:
            self.learn(worker_id, theirs, ours)

    @rule(place=places, task=tasks)
    def a_new_worker_claims_all_tasks(self, place: str, task: NewTask) -> None:
        """Without this, most histories would have only workers that cannot claim and empty queues."""
        self.enqueue(task, None)
        self.register(place, 30.0, QUEUES, is_new=True)
        self.claim(place, QUEUES, 5)

    @rule(silent=places, judge=places, task=tasks)
    def a_worker_falls_silent_under_its_tasks(self, silent: str, judge: str, task: NewTask) -> None:
        self.register(judge, 30.0, QUEUES, is_new=True)
        self.a_new_worker_claims_all_tasks(silent, task)
        self.time_passes_with_heartbeats({judge}, 5, judge)

    @rule(place=places, chosen=st.lists(ordinals, max_size=4), queues=queues, limit=st.integers(0, 2))
    def finish_and_claim(self, place: str, chosen: list[int], queues: tuple[str, ...], limit: int) -> None:
        worker_id = self.worker_at(place)
        picked = [claim for ordinal in chosen if (claim := self.some_claim(ordinal)) is not None]
        # One result per claim: which of two results for the same claim counts is undefined.
        results = [json.dumps(one.attempt) for _, one, _ in picked]
        theirs, ours = self.both(
            self.postgres.finish_and_claim(worker_id, finished([one for _, one, _ in picked], results), queues, limit),
            self.memory.finish_and_claim(
                worker_id, finished([other for _, _, other in picked], results), queues, limit
            ),
        )
        if isinstance(theirs, type):
            assert theirs is ours
            return
        assert Counter(self.tokens[token] for token in theirs.lost) == Counter(ours.lost)
        self.learn(worker_id, theirs.claims, ours.claims)

    @rule(ordinal=ordinals, retry=flags, jitter=st.sampled_from([0.0, 0.25, 1 / 3, 1.0]))
    def fail(self, ordinal: int, retry: bool, jitter: float) -> None:
        if (claim := self.some_claim(ordinal)) is None:
            return
        worker_id, one, other = claim
        theirs, ours = self.both(
            self.postgres.fail(worker_id, one.task_id, one.token, "it broke", retry=retry, jitter=jitter),
            self.memory.fail(worker_id, other.task_id, other.token, "it broke", retry=retry, jitter=jitter),
        )
        assert theirs == ours

    @rule(ordinal=ordinals)
    def release(self, ordinal: int) -> None:
        if (claim := self.some_claim(ordinal)) is None:
            return
        worker_id, one, other = claim
        theirs, ours = self.both(
            self.postgres.release(worker_id, one.task_id, one.token, "not now"),
            self.memory.release(worker_id, other.task_id, other.token, "not now"),
        )
        assert theirs == ours

    @rule(place=places, forgotten=st.sets(st.integers(0, 5)), progress=st.sampled_from([None, 0.0, 0.1, 1.0]))
    def heartbeat(self, place: str, forgotten: set[int], progress: float | None) -> None:
        worker_id = self.worker_at(place)
        pairs = self.held_by(worker_id, forgotten)
        note = None if progress is None else f"{progress:.0%}"
        vitals = {} if progress is None else {"pid": 7, "vram_used_mb": 10, "load": progress}
        theirs, ours = self.both(
            self.postgres.heartbeat(
                worker_id, [HeldClaim(one.task_id, one.token, progress, note) for one, _ in pairs], vitals
            ),
            self.memory.heartbeat(
                worker_id, [HeldClaim(other.task_id, other.token, progress, note) for _, other in pairs], vitals
            ),
        )
        assert replace(theirs, lost=frozenset(self.tokens[token] for token in theirs.lost)) == ours

    @rule(seconds=pauses_s)
    def time_passes_in_silence(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(place=places, forgotten=st.sets(st.integers(0, 2)), seconds=st.sampled_from([10.0, 30.0, 30.000001, 60.0]))
    def a_worker_sends_heartbeat_after(self, place: str, forgotten: set[int], seconds: float) -> None:
        """Near the length of a lease, where a microsecond decides about its claims and its right to judge."""
        self.heartbeat(place, set(), None)
        self.clock.advance(seconds)
        self.heartbeat(place, forgotten, None)
        self.recover(place)

    @rule(alive=st.sets(places, min_size=1, max_size=3), beats=st.integers(1, 7), judge=places)
    def time_passes_with_heartbeats(self, alive: set[str], beats: int, judge: str) -> None:
        for _ in range(beats):
            self.clock.advance(10.0)
            for place in sorted(alive):
                self.heartbeat(place, set(), None)
        self.recover(judge)

    @rule(ordinal=ordinals)
    def cancel(self, ordinal: int) -> None:
        if (task := self.some_task(ordinal)) is not None:
            theirs, ours = self.both(
                self.postgres.cancel_task(task[0], "not wanted"), self.memory.cancel_task(task[1], "not wanted")
            )
            assert theirs == ours

    @rule(ordinal=ordinals)
    def retry(self, ordinal: int) -> None:
        if (task := self.some_task(ordinal)) is not None:
            theirs, ours = self.both(self.postgres.retry_task(task[0]), self.memory.retry_task(task[1]))
            assert theirs == ours

    @rule(chosen=st.lists(places, max_size=2))
    def pause(self, chosen: list[str]) -> None:
        self.same(lambda store: store.set_paused([self.worker_at(place) for place in chosen], True))

    @rule()
    def resume_all(self) -> None:
        self.same(lambda store: store.set_paused([self.worker_at(place) for place in PLACES], False))

    @rule(chosen=st.lists(places, max_size=1))
    def terminate(self, chosen: list[str]) -> None:
        self.same(lambda store: store.set_terminating([self.worker_at(place) for place in chosen], "enough"))

    @rule(place=places)
    def leave(self, place: str) -> None:
        self.same(lambda store: store.deregister(self.worker_at(place), "done"))

    @rule(judge=places)
    def recover(self, judge: str) -> None:
        self.same(lambda store: store.recover_lost_workers(self.worker_at(judge)))

    @rule()
    def sweep(self) -> None:
        self.same(lambda store: store.sweep())

    @rule(
        queue=st.sampled_from([None, "a"]),
        statuses=st.sampled_from([(TaskStatus.COMPLETE,), (TaskStatus.FAILED, TaskStatus.COMPLETE)]),
        older_than_s=st.sampled_from([0.0, 60.0]),
    )
    def purge(self, queue: str | None, statuses: tuple[TaskStatus, ...], older_than_s: float) -> None:
        self.same(lambda store: store.purge(queue, statuses, older_than_s))

    # --------------------------------------------------------------------------------------------- invariants

    @invariant()
    def both_tell_the_same_story(self) -> None:
        self.both_show_the_same()
        self.both_have_the_same_hidden_state()
        self.a_running_task_has_exactly_one_valid_claim()

    def both_show_the_same(self) -> None:
        theirs, ours = self.both(self.postgres.tasks(limit=ALL), self.memory.tasks(limit=ALL))
        theirs = [with_parsed_json(replace(task, id=self.task_ids[task.id])) for task in theirs]
        ours = [with_parsed_json(task) for task in ours]
        assert theirs == ours
        self.same(lambda store: store.workers(include_terminated=True))
        self.same(lambda store: store.queue_depths())
        self.same(lambda store: store.next_run_after(QUEUES))
        self.same(lambda store: store.finished_since(60.0))
        their_events, our_events = self.both(self.postgres.events(limit=ALL), self.memory.events(limit=ALL))
        their_events = [self.with_our_task_ids(event) for event in their_events]
        assert stories(their_events) == stories(our_events)
        self.no_task_is_lost(ours)

    def with_our_task_ids(self, event: Event) -> Event:
        """An event of the database, with the task ids that the memory store gave."""
        detail = event.detail
        if detail is not None and "task_ids" in detail:
            detail = {**detail, "task_ids": [self.task_ids[task_id] for task_id in detail["task_ids"]]}
        return replace(event, task_id=event.task_id and self.task_ids[event.task_id], detail=detail)

    def both_have_the_same_hidden_state(self) -> None:
        """State that no call returns but later replies depend on: claim tokens, and the start of gapless heartbeats."""
        rows = self.run(self.eye.fetch("select id, claim_token from windlass.tasks"))
        theirs = {self.task_ids[row["id"]]: self.tokens[row["claim_token"]] for row in rows}
        assert theirs == {row.id: row.token for row in self.memory.tables.tasks.rows.values()}
        rows = self.run(self.eye.fetch("select id, heartbeat_gapless_since from windlass.workers"))
        gapless: dict[str, datetime | None] = dict(map(tuple, rows))
        assert gapless == {row.id: row.heartbeat_gapless_since for row in self.memory.tables.workers.rows.values()}

    def no_task_is_lost(self, tasks: list[Task]) -> None:
        """Each task has exactly one state, only finished tasks are deleted, and complete ones never change."""
        seen = {task.id: task.status for task in tasks}
        assert len(seen) == len(tasks)
        gone = self.seen.keys() - seen.keys()
        assert all(self.seen[task_id] in (TaskStatus.COMPLETE, TaskStatus.FAILED) for task_id in gone)
        self.seen = seen
        for task in tasks:
            if task.status is TaskStatus.COMPLETE:
                assert self.completed.setdefault(task.id, task) == task

    def a_running_task_has_exactly_one_valid_claim(self) -> None:
        """Its holder is a worker that has not ended."""
        rows = {row.id: row for row in self.memory.tables.tasks.rows.values()}
        valid = Counter(
            other.task_id
            for _, _, other in self.claims
            if other.task_id in rows and rows[other.task_id].is_held_by(other.token)
        )
        running = [row for row in rows.values() if row.status is TaskStatus.RUNNING]
        assert valid == Counter(row.id for row in running)
        live = {worker.id for worker in self.run(self.memory.workers())}
        assert {row.worker_id for row in running} <= live


async def outcome(call: Awaitable[Any]) -> Any:
    """The reply, or the type of the exception."""
    try:
        return await call
    except (BadInput, UnknownWorker) as error:
        return type(error)


def finished(claims: list[Claim], results: list[str]) -> list[Finished]:
    return [Finished(claim.task_id, claim.token, result) for claim, result in zip(claims, results, strict=True)]


def with_parsed_json(row: Any) -> Any:
    """PostgreSQL formats JSON differently, with the same meaning."""
    row = replace(row, payload=json.loads(row.payload))
    if isinstance(row, Task) and row.result is not None:
        row = replace(row, result=json.loads(row.result))
    return row


def stories(events: list[Event]) -> tuple[Counter[str], dict[int, list[str]]]:
    """All events, and the events of each task in order. Within one call the order of tasks is undefined."""
    by_task: dict[int, list[str]] = {}
    everything: Counter[str] = Counter()
    for event in events:
        detail = dict(event.detail or {})
        if "started_at" in detail:  # one time has several notations
            detail["started_at"] = datetime.fromisoformat(detail["started_at"]).isoformat()
        if "task_ids" in detail:
            detail["task_ids"] = sorted(detail["task_ids"])
        words = f"{replace(event, id=0, detail=None)} {json.dumps(detail, sort_keys=True)}"
        everything[words] += 1
        if event.task_id is not None:
            by_task.setdefault(event.task_id, []).append(words)
    return everything, by_task


@asynccontextmanager
async def seen_postgres(dsn: str, clock: Any, *, is_over_http: bool) -> AsyncIterator[Any]:
    async with PostgresStores(dsn, retention=RETENTION, virtual_now=clock, max_connections=1) as postgres:
        if not is_over_http:
            yield postgres
            return
        async with over_http(postgres) as seen:
            yield seen


@pytest.fixture(params=["directly", "over http"])
def histories(request: pytest.FixtureRequest, shared_dsn: str, clock: Any) -> Iterator[type[Histories]]:
    opening = seen_postgres(shared_dsn, clock, is_over_http=request.param == "over http")
    with asyncio.Runner() as runner:
        eye = runner.run(connect(shared_dsn))
        postgres = runner.run(opening.__aenter__())
        try:
            world = {"runner": runner, "postgres": postgres, "eye": eye, "dsn": shared_dsn, "clock": clock}
            yield type("Histories", (Histories,), {**world, "start": clock()})
        finally:
            runner.run(opening.__aexit__(None, None, None))
            runner.run(eye.close())


async def connect(dsn: str) -> Any:
    return await asyncpg.connect(dsn)


@pytest.mark.slow
# After a failure Hypothesis takes up to five minutes to shrink the history.
@pytest.mark.timeout(0 if MORE else 600)
def test_both_stores_agree_on_random_histories(histories: type[Histories]) -> None:
    run_state_machine_as_test(
        histories,
        settings=settings(
            max_examples=HISTORIES_OVER_HTTP if isinstance(histories.postgres, OverHttp) else HISTORIES,
            stateful_step_count=STEPS,
            derandomize=not MORE,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
