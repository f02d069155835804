"""The orchestrator in virtual time: start, reload, stop and wake-up."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from support.orchestrator_fixture import (
    LONG_S,
    SOON_S,
    STOP_S,
    TTL_S,
    OrchestratorFixture,
    config,
    count_cycles,
    run_in_virtual_time,
)
from support.simulator.cloud import MachineRecord
from windlass.control.orchestrator import (
    SHUTDOWN_MARGIN_S,
    SHUTDOWN_PER_MACHINE_S,
    SWEEP_INTERVAL_S,
)
from windlass.model.cycle_actions import done_actions
from windlass.model.errors import (
    DatabaseUnavailable,
    LimitReached,
    NoCapacity,
    ProviderUnreachable,
    Unavailable,
    WindlassError,
)
from windlass.model.lease import Candidate
from windlass.model.task import NewTask
from windlass.model.worker import Registration, WorkerStatus


def test_stop_drains_all_workers_and_ends() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = fixture.start()
        await asyncio.sleep(SOON_S)
        assert len(await fixture.active("red")) == len(await fixture.active("blue")) == 1
        running.orchestrator.stop()
        await running.ends_within(10.0)
        assert await fixture.workers() == []
        assert [cloud.billed_machines() for cloud in fixture.clouds.values()] == [[], []]
        codes = {worker.code for worker in await fixture.store.workers(include_terminated=True)}
        assert codes == {"SHUT_DOWN"}
        assert [cloud.closed for cloud in fixture.clouds.values()] == [1, 1]

    run_in_virtual_time(scenario)


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.5, 2.0])
def test_stop_in_the_first_cycle_leaves_no_machine_running(after_s: float) -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = fixture.start()
        await asyncio.sleep(after_s)
        running.orchestrator.stop()
        await running.ends_within(10.0)
        assert [cloud.billed_machines() for cloud in fixture.clouds.values()] == [[], []]

    run_in_virtual_time(scenario)


def test_stop_during_start_up_starts_no_fleet() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = fixture.start()
        # The task has not begun: the signal came while the program was still opening its server and pools.
        running.orchestrator.stop()
        await running.ends_within(1.0)
        assert await fixture.store.workers(include_terminated=True) == []

    run_in_virtual_time(scenario)


def test_standby_stops_without_touching_workers() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        leader = fixture.start()
        await asyncio.sleep(SOON_S)
        before = await fixture.workers()
        standby = fixture.start()
        await asyncio.sleep(SOON_S)
        standby.orchestrator.stop()
        await standby.ends_within(1.0)
        await asyncio.sleep(SOON_S)
        assert [(w.id, w.status) for w in await fixture.workers()] == [(w.id, w.status) for w in before]
        assert not leader.task.done()

    run_in_virtual_time(scenario)


def test_shutdown_ends_when_another_orchestrator_leads() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        first = fixture.start()
        await asyncio.sleep(SOON_S)
        fixture.refuse_deletions("red")
        first.orchestrator.stop()
        await asyncio.sleep(2.0)
        other = Candidate("other", TTL_S)
        await fixture.store.release_lease(Candidate("o1", TTL_S))
        assert isinstance(await fixture.store.acquire_lease(other), int)
        await first.ends_within(5.0)

    run_in_virtual_time(scenario)


def test_fleet_removed_by_reload_is_shut_down_alone() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = fixture.start()
        await asyncio.sleep(SOON_S)
        red = await fixture.active("red")
        running.orchestrator.reconfigure({"red": fixture.fleets["red"]})
        await asyncio.sleep(SOON_S)
        assert await fixture.workers("blue") == []
        assert await fixture.active("red") == red
        assert fixture.clouds["blue"].closed == 1

    run_in_virtual_time(scenario)


def test_removed_fleet_that_cannot_end_does_not_stop_others() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = fixture.start()
        await asyncio.sleep(SOON_S)
        fixture.refuse_deletions("blue")
        running.orchestrator.reconfigure({"red": fixture.fleets["red"]})
        await asyncio.sleep(STOP_S + SHUTDOWN_MARGIN_S + SOON_S)
        asked = fixture.clouds["blue"].delete_calls
        for worker_id in await fixture.active("red"):
            await fixture.store.terminate_worker(worker_id, "killed")
        await asyncio.sleep(SOON_S)
        assert not running.task.done()
        assert len(await fixture.active("red")) == 1, "the terminated worker is replaced"
        assert fixture.clouds["blue"].delete_calls > asked, (
            "deletions are requested again, because the machines cost money"
        )

    run_in_virtual_time(scenario)


def test_first_stop_after_a_reload_still_waits_for_workers() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = fixture.start()
        await asyncio.sleep(SOON_S)
        fixture.refuse_deletions("blue")
        running.orchestrator.reconfigure({"red": fixture.fleets["red"]})
        await asyncio.sleep(1.0)
        running.orchestrator.stop()
        took_s = await running.ends_within(STOP_S + SHUTDOWN_MARGIN_S + 2 * SHUTDOWN_PER_MACHINE_S)
        assert took_s > STOP_S, "the removed fleet gets its full time limit"
        assert await fixture.workers("red") == []
        assert len(await fixture.workers("blue")) == 1

    run_in_virtual_time(scenario)


def test_fleet_put_back_by_reload_keeps_running() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = fixture.start()
        await asyncio.sleep(SOON_S)
        before = await fixture.active("blue")
        fixture.refuse_deletions("blue", 5)
        running.orchestrator.reconfigure({"red": fixture.fleets["red"]})
        await asyncio.sleep(1.0)
        running.orchestrator.reconfigure(fixture.fleets)
        await asyncio.sleep(STOP_S + SHUTDOWN_MARGIN_S + SOON_S)
        after = await fixture.active("blue")
        assert len(after) == 1
        assert after != before

    run_in_virtual_time(scenario)


def test_failed_reload_closes_what_it_made() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = fixture.start()
        await asyncio.sleep(SOON_S)
        made = fixture.clouds["green"] = fixture.new_cloud("red")
        with pytest.raises(KeyError):
            running.orchestrator.reconfigure({**fixture.fleets, "green": config("green"), "grey": config("grey")})
        await asyncio.sleep(1)
        assert (running.orchestrator.fleets, made.closed) == (("red", "blue"), 1)

    run_in_virtual_time(scenario)


def test_shutdown_deletes_orphaned_machines() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        red = fixture.clouds["red"]
        red.max_list_age_s = 10.0
        running = fixture.start()
        await asyncio.sleep(SOON_S)
        red.machines["m9-red"] = MachineRecord("m9-red", "red-9-orphan", "red", 9, asyncio.get_running_loop().time())
        running.orchestrator.stop()
        await running.ends_within(STOP_S + SHUTDOWN_MARGIN_S)
        assert red.billed_machines() == []

    run_in_virtual_time(scenario)


@pytest.mark.parametrize("creation", ["refused", "unclear"])
def test_shutdown_with_nothing_created_ends_at_once(creation: str) -> None:
    """The provider is unreachable. Only a creation that may have taken effect is a reason to wait for a list."""

    async def scenario(fixture: OrchestratorFixture) -> None:
        for cloud in fixture.clouds.values():
            for _ in range(100):
                cloud.next_list(raises=Unavailable("listing machines: Name or service not known"))
                if creation == "refused":
                    cloud.next_create(raises=ProviderUnreachable("creating machine: Name or service not known", 5.0))
                else:
                    cloud.next_create(fails_without_effect=True)
        running = fixture.start()
        await asyncio.sleep(SOON_S)
        spawned = await fixture.store.workers(include_terminated=True)
        assert {worker.code for worker in spawned} == ({"UNREACHABLE"} if creation == "refused" else {None})
        running.orchestrator.stop()
        if creation == "refused":
            await running.ends_within(5.0)
        else:
            await asyncio.sleep(STOP_S)
            assert not running.task.done()

    run_in_virtual_time(scenario)


def test_cycle_is_stored_with_its_refused_creations() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        fixture.fleets = {"red": config("red", min_workers=3, max_workers=3)}
        red = fixture.clouds["red"]
        red.next_create(raises=NoCapacity("no capacity"))
        red.next_create()
        red.next_create(raises=LimitReached("limit reached"))
        fixture.start()
        await asyncio.sleep(3.0)
        first = (await fixture.store.cycles("red", 20))[-1]
        assert first.decision.startswith("spawn 3")
        assert first.summary is not None
        assert first.summary["creations_refused"] == {"NO_CAPACITY": 1, "LIMIT_REACHED": 1}
        assert done_actions(first) == ["spawned 1 of 3", "1 refused: limit reached", "1 refused: no capacity"]

    run_in_virtual_time(scenario)


def test_shutdown_without_a_list_waits_for_known_orphans() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        red = fixture.clouds["red"]
        red.max_list_age_s = LONG_S
        red.machines["m9-red"] = MachineRecord("m9-red", "red-9-orphan", "red", 9, asyncio.get_running_loop().time())
        running = fixture.start()
        await asyncio.sleep(SOON_S)
        for _ in range(100):
            red.next_list(raises=Unavailable("listing machines: no answer"))
        running.orchestrator.stop()
        await asyncio.sleep(STOP_S)
        assert await fixture.workers("red") == []
        assert not running.task.done()

    run_in_virtual_time(scenario)


def test_second_stop_ends_now() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = fixture.start()
        await asyncio.sleep(SOON_S)
        for cloud in fixture.clouds.values():
            cloud.next_delete(never_answers=True, takes_effect=False)
        running.orchestrator.stop()
        await asyncio.sleep(3.0)
        assert not running.task.done()
        running.orchestrator.stop()
        assert await running.ends_within(1.0) == 0.0
        assert len(await fixture.workers()) == 2

    run_in_virtual_time(scenario)


def test_stop_that_keeps_workers_bounds_the_wait_for_calls() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        for cloud in fixture.clouds.values():
            cloud.next_create(duration_s=50.0)
        running = fixture.start()
        await asyncio.sleep(1.0)
        running.orchestrator.stop(keeps_workers=True)
        await running.ends_within(25.0)

    run_in_virtual_time(scenario)


def test_manual_worker_does_not_delay_shutdown() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = fixture.start()
        await fixture.store.register(Registration("by-hand", ("red",), fleet="red", lease_s=LONG_S))
        await asyncio.sleep(SOON_S)
        running.orchestrator.stop()
        await running.ends_within(10.0)
        assert [(worker.id, worker.status) for worker in await fixture.workers()] == [("by-hand", WorkerStatus.ACTIVE)]

    run_in_virtual_time(scenario)


def test_manual_worker_does_not_keep_an_idle_fleet_from_waking() -> None:
    """A task wakes a fleet without managed workers at once."""

    async def scenario(fixture: OrchestratorFixture) -> None:
        fixture.fleets["red"] = config("red", min_workers=0, poll_interval_s=600.0)
        await fixture.store.register(Registration("by-hand", ("else",), fleet="red", lease_s=LONG_S))
        fixture.start()
        await asyncio.sleep(SOON_S)
        await fixture.store.enqueue(NewTask("red"))
        await asyncio.sleep(3.0)
        assert len(await fixture.workers("red")) == 2

    run_in_virtual_time(scenario)


def test_task_wakes_only_the_idle_fleet_of_its_queue() -> None:
    """With a store that notifies of each task, and with one that can only wait a second."""

    async def scenario(fixture: OrchestratorFixture) -> None:
        fixture.fleets["red"] = config("red", poll_interval_s=600.0)
        fixture.fleets["blue"] = config("blue", min_workers=0, poll_interval_s=600.0)
        wait = fixture.store.wait_for_work
        fixture.start()
        await asyncio.sleep(SOON_S)
        counts = count_cycles(fixture)
        for _ in range(40):
            await fixture.store.enqueue(NewTask("red"))
            await asyncio.sleep(0.5)
        assert counts == {}

        async def wait_like_a_pooler(_queues: Sequence[str], timeout_s: float) -> None:
            await asyncio.sleep(min(1.0, timeout_s))

        fixture.store.wait_for_work = wait_like_a_pooler  # type: ignore[method-assign]
        await wait(("red", "blue"), 60.0)  # until the one under way has ended
        await asyncio.sleep(60.0)
        assert counts == {}
        await fixture.store.enqueue(NewTask("blue"))
        await asyncio.sleep(5.0)
        assert len(await fixture.workers("blue")) == 1
        assert set(counts) == {"blue"}

    run_in_virtual_time(scenario)


def test_fleet_that_may_not_spawn_is_woken_once() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        fixture.fleets = {"red": config("red", min_workers=0, poll_interval_s=600.0)}
        fixture.start()
        await asyncio.sleep(SOON_S)
        await fixture.store.pause_fleet("red", True)
        counts = count_cycles(fixture)
        for _ in range(40):
            await fixture.store.enqueue(NewTask("red"))
            await asyncio.sleep(0.5)
        assert counts == {"red": 1}

    run_in_virtual_time(scenario)


def test_fleet_is_woken_by_an_operation_for_it_and_not_by_a_flood() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        fixture.fleets = {name: config(name, min_workers=0, poll_interval_s=600.0) for name in ("red", "blue")}
        running = fixture.start()
        await asyncio.sleep(SOON_S)
        counts = count_cycles(fixture)
        await fixture.store.request_workers("red", 1)
        running.orchestrator.wake("red")
        await asyncio.sleep(SOON_S)
        assert set(counts) == {"red"}
        assert len(await fixture.workers("red")) == 1
        await asyncio.sleep(10 * SOON_S)
        counts.clear()
        for _ in range(1_000):
            running.orchestrator.wake("red")
            running.orchestrator.wake("unknown")
            await asyncio.sleep(0.01)
        assert set(counts) == {"red"}
        assert counts["red"] <= 40, "a few cycles per second"

    run_in_virtual_time(scenario)


def test_reload_keeps_the_old_provider_until_its_calls_end() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        fixture.fleets = {"red": config("red", max_workers=1)}
        fixture.clouds["red"].next_create(duration_s=30.0)
        old = fixture.clouds["red"]
        running = fixture.start()
        await asyncio.sleep(1.0)
        # The same account as another object, as after a change of the fleet's table.
        fixture.clouds["red"] = new = fixture.new_cloud("red")
        new.machines, new.workers = old.machines, old.workers
        running.orchestrator.reconfigure({"red": config("red", max_workers=1, idle_timeout_s=99.0)})
        await asyncio.sleep(SOON_S)
        assert (old.create_calls, new.create_calls, old.closed) == (1, 0, 0)
        await asyncio.sleep(30.0)
        assert (old.closed, new.closed) == (1, 0)
        assert len(await fixture.active("red")) == 1
        running.orchestrator.stop()
        await running.ends_within(10.0)
        assert (old.closed, new.closed, new.create_calls) == (1, 1, 0)

    run_in_virtual_time(scenario)


def test_cycle_uses_one_provider_from_start_to_end() -> None:
    """Otherwise it would call one provider for decisions about the machines of another."""

    async def scenario(fixture: OrchestratorFixture) -> None:
        fixture.fleets = {"red": config("red", max_workers=1)}
        old = fixture.clouds["red"]
        old.next_list(duration_s=3.0)
        running = fixture.start()
        await asyncio.sleep(1.0)
        fixture.clouds["red"] = new = fixture.new_cloud("red")
        new.machines, new.workers = old.machines, old.workers
        new_lists = count_cycles(fixture)
        changed = config("red", max_workers=1, idle_timeout_s=99.0)
        running.orchestrator.reconfigure({"red": changed})
        assert running.orchestrator.fleet("red") == changed
        await asyncio.sleep(SOON_S)
        assert (old.create_calls, new.create_calls, old.closed) == (1, 0, 1)
        assert new_lists["red"] > 0

    run_in_virtual_time(scenario)


def test_failed_reload_changes_no_fleet() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = fixture.start()
        await asyncio.sleep(SOON_S)
        changed = {"red": config("red", max_workers=1), "green": config("green")}
        with pytest.raises(KeyError, match="green"):
            running.orchestrator.reconfigure(changed)
        assert {name: running.orchestrator.fleet(name) for name in running.orchestrator.fleets} == fixture.fleets
        await asyncio.sleep(SOON_S)
        assert len(await fixture.active("blue")) == 1, "removed, but not shut down"

    run_in_virtual_time(scenario)


def test_retention_continues_after_errors() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        problems = [ValueError("timestamp out of range"), DatabaseUnavailable("away")]
        calls = 0

        async def sweep(**_: Any) -> Any:
            nonlocal calls
            calls += 1
            if problems:
                raise problems.pop(0)

        fixture.store.sweep = sweep  # type: ignore[method-assign]
        with capture_logs() as lines:
            fixture.start()
            await asyncio.sleep(4.5 * SWEEP_INTERVAL_S)
        assert calls == 4
        assert [line["log_level"] for line in lines if line["event"] == "apply retention failed"] == ["error"]

    run_in_virtual_time(scenario)


def test_reload_while_stopping_is_refused() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = fixture.start()
        await asyncio.sleep(SOON_S)
        running.orchestrator.stop()
        for _ in range(2):
            with pytest.raises(WindlassError, match="orchestrator is stopping"):
                running.orchestrator.reconfigure(fixture.fleets)
            await running.ends_within(10.0)
        with suppress(asyncio.CancelledError):
            await running.task
        assert await fixture.workers() == []

    run_in_virtual_time(scenario)
