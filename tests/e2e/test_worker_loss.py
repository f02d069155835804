"""Workers and databases that vanish: tasks go to others, results wait, and a claim that is gone touches no row."""

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from support.postgres_servers import reachable_temp_dir
from support.worker_harness import QUEUE, Crew, Hand, MortalServer, is_alive, until
from windlass.model.task import TaskStatus
from windlass.model.worker import WorkerStatus

# Short, so that a lost worker is found soon; long enough for a busy machine.
LEASE_S = 3.0
HEARTBEAT_S = 0.3
SHORT_LEASE = {"heartbeat_s": HEARTBEAT_S, "lease_s": LEASE_S}
LONGEST_SILENCE_S = 1.5


@pytest.fixture
async def crew(dsn: str, tmp_path: Path) -> AsyncIterator[Crew]:
    async with Crew(dsn, tmp_path) as crew:
        yield crew


def gate(folder: Path, attempt: int) -> dict[str, str]:
    return {"running": str(folder / f"running-{attempt}"), "go": str(folder / f"go-{attempt}")}


# ------------------------------------------------------------------------------------------------------- workers


async def test_a_killed_worker_takes_its_child_along_and_its_task_goes_to_another(crew: Crew) -> None:
    hand = await crew.hire(handler="block_the_first_time", **SHORT_LEASE)
    file = crew.folder / "pids"
    task_id = await crew.enqueue({"file": str(file)})
    await until(lambda: file.exists() and len(file.read_text().split()) == 2, "the handler blocks")
    pids = [int(pid) for pid in file.read_text().split()]
    hand.send(signal.SIGKILL)
    # Even though its interpreter cannot move, and with what it forked.
    await until(lambda: not any(map(is_alive, pids)), "the child and its copy are gone", timeout_s=5)

    other = await crew.hire(handler="block_the_first_time", **SHORT_LEASE)
    assert await crew.complete(task_id) == "the second attempt"
    task, row = await crew.task(task_id), await crew.row_of(other)
    assert row is not None
    assert (task.attempts, task.worker_id) == (2, row.id)
    assert await crew.codes(task_id=task_id) == ["TASK_REQUEUED"]
    assert await crew.status_of(hand) is WorkerStatus.TERMINATED


@pytest.mark.parametrize("how", ["hang with a detached family", "leave a detached family"])
async def test_a_killed_worker_takes_along_what_made_sessions_of_its_own(crew: Crew, how: str) -> None:
    hand = await crew.hire(handler="misbehave", **SHORT_LEASE)
    file = crew.folder / "pids"
    task_id = await crew.enqueue({"how": how, "file": str(file)}, max_attempts=1)
    await until(lambda: file.exists() and len(file.read_text().splitlines()) == 3, "three generations live")
    if how.startswith("leave"):
        assert await crew.complete(task_id) == "they live on"
    pids = [int(pid) for pid in file.read_text().split()]
    assert all(map(is_alive, pids))
    hand.send(signal.SIGKILL)
    await until(lambda: not any(map(is_alive, pids)), "nobody of them is left", timeout_s=10)


async def test_a_worker_that_wakes_after_its_lease_touches_no_row_and_joins_again_under_a_new_name(crew: Crew) -> None:
    sleeper = await crew.hire(handler="wait_for_file_of_attempt", **SHORT_LEASE)
    lost_row = await crew.row_of(sleeper)
    assert lost_row is not None
    task_id = await crew.enqueue({str(attempt): gate(crew.folder, attempt) for attempt in (1, 2)})
    await until((crew.folder / "running-1").exists, "the first attempt runs")
    sleeper.send_to_all(signal.SIGSTOP)

    other = await crew.hire(handler="wait_for_file_of_attempt", **SHORT_LEASE)
    await until((crew.folder / "running-2").exists, "the second attempt runs")
    (crew.folder / "go-2").touch()
    assert (await crew.complete(task_id))["attempt"] == 2
    accepted, other_row = await crew.task(task_id), await crew.row_of(other)
    assert other_row is not None
    assert (accepted.attempts, accepted.worker_id) == (2, other_row.id)

    # Its handler ends in the moment it wakes, so that it has a result to deliver.
    (crew.folder / "go-1").touch()
    sleeper.send_to_all(signal.SIGCONT)
    await until(lambda: _is_renamed(crew, sleeper, lost_row.id), "the sleeper has joined again")
    assert await crew.task(task_id) == accepted
    ended = await crew.store.worker(lost_row.id)
    assert ended is not None
    assert ended.status is WorkerStatus.TERMINATED
    assert ended.last_heartbeat is not None
    assert ended.terminated_at is not None
    assert ended.last_heartbeat < ended.terminated_at
    told = ("worker terminated by the control plane", "result rejected: claim lost")
    assert any(words in sleeper.log() for words in told)

    # And it works again.
    other.send(signal.SIGTERM)
    assert await other.exit_code() == 0
    next_id = await crew.enqueue({"1": gate(crew.folder, 1)})
    assert (await crew.complete(next_id))["attempt"] == 1
    new_row = await crew.row_of(sleeper)
    assert new_row is not None
    assert (await crew.task(next_id)).worker_id == new_row.id


async def _is_renamed(crew: Crew, hand: Hand, old_id: str) -> bool:
    row = await crew.row_of(hand)
    return row is not None and row.id != old_id and row.status is WorkerStatus.ACTIVE


async def test_a_task_that_kills_its_process_each_time_ends_as_failed_with_its_history(crew: Crew) -> None:
    hand = await crew.hire(handler="misbehave")
    task_id = await crew.enqueue({"how": "segfault"}, max_attempts=3)
    for attempt in (1, 2):
        await until(lambda attempt=attempt: _waits_after(crew, task_id, attempt), f"attempt {attempt} has failed")
        # Its time has come: waiting is tested elsewhere.
        await crew.sql("update windlass.tasks set run_after = windlass.now() where id = $1", task_id)
        await crew.sql("select pg_notify('windlass_tasks', $1)", QUEUE)
    task = await crew.failed(task_id)
    assert (task.attempts, task.error_code) == (3, "CHILD_DIED")
    assert "SIGSEGV" in (task.error or "")
    events = await crew.store.events(task_id=task_id)
    assert [event.code for event in events] == ["TASK_ERROR", "TASK_ERROR", "TASK_FAILED"]
    assert [event.detail and event.detail["attempt"] for event in events] == [1, 2, 3]
    assert all("SIGSEGV" in event.reason for event in events)
    assert hand.is_running()


async def _waits_after(crew: Crew, task_id: int, attempts: int) -> bool:
    task = await crew.task(task_id)
    return (task.status, task.attempts) == (TaskStatus.ERROR, attempts)


async def test_a_worker_held_up_while_it_looks_after_others_goes_on_beating(crew: Crew) -> None:
    await crew.note_beats()
    # A lost worker, and somebody who has locked what is read to recover its task.
    dead = await crew.hire(handler="block_the_first_time", **SHORT_LEASE)
    file = crew.folder / "pids"
    task_id = await crew.enqueue({"file": str(file)})
    await until(file.exists, "the handler runs")
    dead.send(signal.SIGKILL)
    locker = await asyncpg.connect(crew.dsn)
    try:
        await locker.execute("begin")
        await locker.execute("lock table windlass.leases")
        hand = await crew.hire(handler="block_the_first_time", **SHORT_LEASE)
        begun = await crew.store.now()
        waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = $1"
        database = await locker.fetchval("select current_database()")
        await until(lambda: crew.sql(waiting, database), "recovery waits for the lock")
        blocked = await crew.store.now()
        count = "select count(*) from public.beats where at > $1"
        await until(lambda: _reaches(crew, count, blocked, 10), "ten more beats")
        assert await crew.sql(waiting, database) > 0
        assert await crew.longest_silence_s(hand, begun) < LONGEST_SILENCE_S
    finally:
        await locker.close()
    assert await crew.complete(task_id) == "the second attempt"


async def test_a_worker_whose_database_was_migrated_beyond_it_finishes_and_says_why(crew: Crew) -> None:
    hand = await crew.hire(handler="wait_for_file", **SHORT_LEASE)
    task_id = await crew.enqueue(gate(crew.folder, 1))
    await until((crew.folder / "running-1").exists, "the handler runs")
    await crew.sql("insert into windlass.migrations (version, name, checksum) values (9999, 'from_the_future', '')")
    # The connection of a beat breaks while the beat is under way.
    locker = await asyncpg.connect(crew.dsn)
    try:
        await locker.execute("begin")
        await locker.execute("select from windlass.workers for update")
        beats = "application_name = 'windlass' and datname = current_database() and query like '%heartbeat%'"
        waiting = f"select count(*) from pg_stat_activity where {beats} and wait_event_type = $1"  # noqa: S608
        await until(lambda: crew.sql(waiting, "Lock"), "a beat waits")
        await locker.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where {beats}")  # noqa: S608
    finally:
        await locker.close()
    await until(lambda: "draining" in hand.log(), "it has heard of it")
    (crew.folder / "go-1").touch()
    assert await hand.exit_code() == 2
    said = hand.log().splitlines()[-1]
    assert said.startswith("windlass: the database's schema is at version 9999 and this program knows only")
    assert (await crew.sql("select status from windlass.tasks where id = $1", task_id)) == "complete"
    await crew.sql("delete from windlass.migrations where version = 9999")


async def test_a_claim_that_is_not_answered_within_half_a_lease_is_given_up(crew: Crew) -> None:
    """After a whole one the heartbeat would give back what the worker is about to receive."""
    locker = await asyncpg.connect(crew.dsn)
    try:
        await locker.execute("begin")
        await locker.execute("lock table windlass.tasks in exclusive mode")
        hand = crew.start(handler="echo", **SHORT_LEASE)
        await until(
            lambda: f"claiming tasks: no answer within {LEASE_S / 2:g} s (half of the lease)" in hand.log(),
            "the claim is given up",
            timeout_s=10 * LEASE_S / 2,
        )
    finally:
        await locker.close()
    assert await crew.complete(await crew.enqueue(5)) == 5


async def _reaches(crew: Crew, query: str, since: object, least: int) -> bool:
    return int(await crew.sql(query, since)) >= least


# ----------------------------------------------------------------------------------------------------- databases


@pytest.fixture(scope="module")
def server() -> Iterator[MortalServer]:
    with reachable_temp_dir() as folder:
        server = MortalServer(folder)
        yield server
        server.close()


@pytest.fixture
async def mortal_crew(server: MortalServer, tmp_path: Path) -> AsyncIterator[Crew]:
    server.start()
    async with Crew(server.dsn, tmp_path) as crew:
        yield crew
        server.start()


@pytest.mark.parametrize("how", [signal.SIGQUIT, signal.SIGKILL], ids=["immediate shutdown", "kill -9"])
async def test_a_task_that_ends_while_the_database_is_gone_is_delivered_when_it_returns(
    server: MortalServer, mortal_crew: Crew, how: signal.Signals
) -> None:
    crew = mortal_crew
    hand = await crew.hire(handler="wait_for_file")
    before = await crew.row_of(hand)
    task_id = await crew.enqueue(gate(crew.folder, 1))
    await until((crew.folder / "running-1").exists, "the handler runs")
    server.end(how)
    await until(lambda: '"event": "heartbeat failed"' in hand.log(), "the worker has noticed")
    (crew.folder / "go-1").touch()
    await until(lambda: f'"undelivered": [{task_id}]' in hand.log(), "it has a result and nobody to give it to")
    assert hand.is_running()

    server.start()
    await until(lambda: _is_complete(crew, task_id), "the result is delivered")
    task, after = await crew.task(task_id), await crew.row_of(hand)
    assert before is not None
    assert after is not None
    assert (task.attempts, task.worker_id, after.id) == (1, before.id, before.id)
    assert await crew.codes(task_id=task_id) == []


async def _is_complete(crew: Crew, task_id: int) -> bool:
    return (await crew.task(task_id)).status is TaskStatus.COMPLETE


async def test_an_idle_worker_leaves_when_told_even_if_the_database_is_gone(
    server: MortalServer, mortal_crew: Crew
) -> None:
    hand = await mortal_crew.hire(handler="echo")
    server.end(signal.SIGQUIT)
    await until(lambda: '"event": "delivery failed, retrying"' in hand.log(), "the worker has noticed")
    hand.send(signal.SIGTERM)
    assert await hand.exit_code(timeout_s=15) == 0


async def test_a_worker_told_twice_leaves_its_undelivered_result_and_says_so(
    server: MortalServer, mortal_crew: Crew
) -> None:
    crew = mortal_crew
    hand = await crew.hire(handler="wait_for_file")
    await crew.enqueue(gate(crew.folder, 1))
    await until((crew.folder / "running-1").exists, "the handler runs")
    server.end(signal.SIGQUIT)
    (crew.folder / "go-1").touch()
    await until(lambda: '"undelivered": [' in hand.log(), "it has a result and nobody to give it to")
    hand.send(signal.SIGTERM)
    await until(lambda: '"event": "draining"' in hand.log(), "the worker knows")
    await hand.send_again(signal.SIGTERM)
    assert await hand.exit_code(timeout_s=15) == 2
    assert "windlass: finishing tasks: the database at its local socket cannot be reached" in hand.log()
