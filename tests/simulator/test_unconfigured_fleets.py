"""The orchestrator and fleets that are no longer in its configuration, in virtual time."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from support.orchestrator_fixture import (
    LONG_S,
    SOON_S,
    TTL_S,
    OrchestratorFixture,
    RunningOrchestrator,
    config,
    count_cycles,
    run_in_virtual_time,
)
from windlass.control.unconfigured_fleets import CHECK_INTERVAL_S, GRACE_S
from windlass.model.errors import DatabaseUnavailable
from windlass.model.lease import Candidate
from windlass.model.worker import Registration, WorkerStatus


async def without_blue(fixture: OrchestratorFixture) -> RunningOrchestrator:
    """Restart, after a stop that kept the workers, with a configuration that lacks a fleet."""
    running = fixture.start()
    await asyncio.sleep(SOON_S)
    running.orchestrator.stop(keeps_workers=True)
    await running.ends_within(10.0)
    fixture.fleets = {"red": fixture.fleets["red"]}
    again = fixture.start()
    await asyncio.sleep(TTL_S + GRACE_S / 2)
    assert len(await fixture.active("blue")) == 1, "the operator has time to notice a wrong file"
    return again


def test_unconfigured_fleet_is_shut_down_after_grace() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = await without_blue(fixture)
        await asyncio.sleep(GRACE_S / 2 + 2 * CHECK_INTERVAL_S + SOON_S)
        assert await fixture.workers("blue") == []
        assert fixture.clouds["blue"].billed_machines() == []
        assert len(await fixture.active("red")) == 1
        assert running.orchestrator.fleets == ("red",)

    run_in_virtual_time(scenario)


def test_unconfigured_fleet_put_back_in_time_keeps_its_workers() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = await without_blue(fixture)
        before = await fixture.active("blue")
        running.orchestrator.reconfigure({**fixture.fleets, "blue": config("blue")})
        await asyncio.sleep(GRACE_S + 2 * CHECK_INTERVAL_S)
        assert await fixture.active("blue") == before

    run_in_virtual_time(scenario)


def test_unconfigured_fleet_without_stored_settings_is_logged() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        with capture_logs() as lines:
            await without_blue(fixture)
            fixture.store.tables.cycles.rows.clear()
            await asyncio.sleep(GRACE_S / 2 + 3 * CHECK_INTERVAL_S)
        assert len(await fixture.active("blue")) == 1
        logged = [line for line in lines if line["event"].startswith("shut down unconfigured fleet failed")]
        assert [line["fleet"] for line in logged] == ["blue"]

    run_in_virtual_time(scenario)


@pytest.mark.parametrize("read", ["workers", "cycle"])
def test_unreadable_unconfigured_fleet_is_retried(read: str) -> None:
    """For example a cycle stored by a version with other settings."""

    async def scenario(fixture: OrchestratorFixture) -> None:
        with capture_logs() as lines:
            await without_blue(fixture)
            readable = getattr(fixture.store, read)

            async def unreadable(*_: object) -> Any:
                raise ValueError("a setting of another version")

            setattr(fixture.store, read, unreadable)
            await asyncio.sleep(GRACE_S / 2 + 3 * CHECK_INTERVAL_S)
            assert fixture.clouds["blue"].billed_machines() != []
            setattr(fixture.store, read, readable)
            await asyncio.sleep(GRACE_S + 2 * CHECK_INTERVAL_S + SOON_S)
        assert fixture.clouds["blue"].billed_machines() == []
        assert any(line["log_level"] == "error" and ("exc_info" in line or "ValueError" in str(line)) for line in lines)

    run_in_virtual_time(scenario)


async def without_any(fixture: OrchestratorFixture) -> RunningOrchestrator:
    """Restart, after a stop that kept the workers, with a configuration without fleets."""
    running = fixture.start()
    await asyncio.sleep(SOON_S)
    running.orchestrator.stop(keeps_workers=True)
    await running.ends_within(10.0)
    fixture.fleets = {}
    again = fixture.start(stops_when_empty=True)
    await asyncio.sleep(TTL_S + GRACE_S / 2)
    assert len(await fixture.active("red")) == len(await fixture.active("blue")) == 1, (
        "the operator has time to notice a wrong file"
    )
    return again


def test_without_fleets_it_shuts_down_the_unconfigured_and_ends() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = await without_any(fixture)
        await running.ends_within(GRACE_S / 2 + 4 * CHECK_INTERVAL_S)
        assert await fixture.workers() == []
        assert [cloud.billed_machines() for cloud in fixture.clouds.values()] == [[], []]
        assert [cloud.closed for cloud in fixture.clouds.values()] == [2, 2]

    run_in_virtual_time(scenario)


def test_without_fleets_a_reload_in_time_keeps_the_workers() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        running = await without_any(fixture)
        before = await fixture.active("blue")
        running.orchestrator.reconfigure({"blue": config("blue"), "red": config("red")})
        await asyncio.sleep(GRACE_S + 4 * CHECK_INTERVAL_S)
        assert await fixture.active("blue") == before
        assert not running.task.done()
        running.orchestrator.stop()
        await running.ends_within(10.0)
        assert await fixture.workers() == []

    run_in_virtual_time(scenario)


def test_without_fleets_a_standby_touches_no_worker() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        leader = fixture.start()
        await asyncio.sleep(SOON_S)
        before = [(worker.id, worker.status) for worker in await fixture.workers()]
        fixture.fleets = {}
        standby = fixture.start(stops_when_empty=True)
        await asyncio.sleep(2 * GRACE_S)
        assert [(worker.id, worker.status) for worker in await fixture.workers()] == before
        standby.orchestrator.stop()
        assert await standby.ends_within(1.0) == 0.0
        assert not leader.task.done()

    run_in_virtual_time(scenario)


def test_without_fleets_it_leaves_fleets_with_rare_cycles_alone() -> None:
    """Their orchestrator leads for a moment every ten minutes, and must find the lease free then."""

    async def scenario(fixture: OrchestratorFixture) -> None:
        fixture.fleets = {"red": config("red", poll_interval_s=600.0)}
        fixture.start()
        await asyncio.sleep(SOON_S)
        (worker,) = await fixture.workers()
        fixture.fleets = {}
        fixture.start(stops_when_empty=True)
        counts = count_cycles(fixture)
        await asyncio.sleep(3600.0)
        assert await fixture.active("red") == [worker.id]
        assert counts["red"] >= 5

    run_in_virtual_time(scenario)


@pytest.mark.parametrize("every_s", [300.0, 900.0])
@pytest.mark.parametrize("begins_s", [0.0, 7.0, 14.0])
def test_without_fleets_it_never_blocks_cycles_from_cron(begins_s: float, every_s: float) -> None:
    """Cron may run less often than the poll interval; the observed interval counts."""

    async def scenario(fixture: OrchestratorFixture) -> None:
        fixture.fleets = {"red": config("red", poll_interval_s=30.0)}
        for _ in range(3):  # enough to establish the interval
            await asyncio.sleep(every_s)
            assert await fixture.cycle()
        await asyncio.sleep(begins_s)
        (worker,) = await fixture.workers("red")
        mine, fixture.fleets = fixture.fleets, {}
        running = fixture.start()
        fixture.fleets = mine
        for _ in range(12):
            await asyncio.sleep(every_s)
            assert await fixture.cycle()
        assert await fixture.active("red") == [worker.id]
        running.orchestrator.stop()
        await running.ends_within(1.0)

    run_in_virtual_time(scenario)


@pytest.mark.parametrize("away_s", [0.0, 2 * GRACE_S])
def test_without_fleets_each_absence_of_the_leader_gets_full_grace(away_s: float) -> None:
    """An outage of the database, during which no cycle could run, changes nothing."""

    async def scenario(fixture: OrchestratorFixture) -> None:
        lead, is_away = fixture.store.acquire_lease, False

        async def lead_if_there(candidate: Candidate) -> Any:
            if is_away:
                raise DatabaseUnavailable("away")
            return await lead(candidate)

        fixture.store.acquire_lease = lead_if_there  # type: ignore[method-assign]
        fleets = fixture.fleets
        leader = fixture.start()
        await asyncio.sleep(SOON_S)
        before = [(worker.id, worker.status) for worker in await fixture.workers()]
        fixture.fleets = {}
        fixture.start()
        fixture.fleets = fleets
        for without_database_s in (0.0, away_s, away_s):
            await asyncio.sleep(3600.0)
            leader.orchestrator.stop(keeps_workers=True)
            await leader.ends_within(10.0)
            is_away = without_database_s > 0
            await asyncio.sleep(without_database_s)
            is_away = False
            await asyncio.sleep(GRACE_S / 2)
            leader = fixture.start()
            await asyncio.sleep(SOON_S)
            assert [(worker.id, worker.status) for worker in await fixture.workers()] == before

    run_in_virtual_time(scenario)


def test_with_fleets_each_absence_of_others_gets_full_grace() -> None:
    """Two hosts with different configurations, one of which runs its cycles from cron."""

    async def scenario(fixture: OrchestratorFixture) -> None:
        red, blue = {"red": config("red", poll_interval_s=600.0)}, {"blue": config("blue")}
        fixture.fleets = red
        running = fixture.start()
        await asyncio.sleep(TTL_S + SOON_S)
        fixture.fleets = blue
        ran = 0
        for _ in range(36):
            ran += await fixture.cycle()
            await asyncio.sleep(280.0)
        assert ran > 30, "its lease runs out between its own cycles"
        assert len(await fixture.active("blue")) == 1
        assert running.orchestrator.fleets == ("red",)

    run_in_virtual_time(scenario)


def test_without_fleets_it_holds_the_caretaker_lease_until_stopped() -> None:
    """So NO_LEADER does not fire, and no orchestrator waits for the lease of one without fleets."""

    async def scenario(fixture: OrchestratorFixture) -> None:
        running = await without_any(fixture)
        for _ in range(40):
            assert all(fleet.is_led for fleet in await fixture.store.fleets())
            await asyncio.sleep(TTL_S / 10)
        running.orchestrator.stop()
        assert await running.ends_within(1.0) == 0.0
        assert not any(fleet.is_led for fleet in await fixture.store.fleets())
        assert len(await fixture.workers()) == 2

    run_in_virtual_time(scenario)


def test_without_fleets_it_stays_while_a_fleet_cannot_be_shut_down() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        with capture_logs() as lines:
            running = await without_any(fixture)
            rows = fixture.store.tables.cycles.rows
            for row_id in [row_id for row_id, row in rows.items() if row.cycle.fleet == "blue"]:
                del rows[row_id]
            await asyncio.sleep(GRACE_S / 2 + 5 * CHECK_INTERVAL_S)
        assert await fixture.workers("red") == []
        assert len(await fixture.active("blue")) == 1
        assert not running.task.done()
        logged = [line for line in lines if line["event"].startswith("shut down unconfigured fleet failed")]
        assert [line["fleet"] for line in logged] == ["blue"]

    run_in_virtual_time(scenario)


async def without_workers(fixture: OrchestratorFixture) -> None:
    """Two fleets without workers ran until a stop; one of them stays in the configuration."""
    fixture.fleets = {name: config(name, min_workers=0) for name in fixture.fleets}
    running = fixture.start()
    await asyncio.sleep(SOON_S)
    running.orchestrator.stop(keeps_workers=True)
    await running.ends_within(10.0)
    assert (await fixture.workers(), await fixture.unfinished()) == ([], ["blue", "red"])
    fixture.fleets = {"red": fixture.fleets["red"]}
    await asyncio.sleep(3600.0)


def test_unconfigured_fleet_without_workers_is_shut_down() -> None:
    """Otherwise its alerts would never resolve."""

    async def scenario(fixture: OrchestratorFixture) -> None:
        await without_workers(fixture)
        running = fixture.start()
        await asyncio.sleep(GRACE_S)
        assert await fixture.unfinished() == ["blue", "red"], "the operator has time to notice a wrong file"
        counts = count_cycles(fixture)
        await asyncio.sleep(2 * CHECK_INTERVAL_S)
        assert await fixture.unfinished() == ["red"]
        assert running.orchestrator.fleets == ("red",)
        assert counts["blue"] == 1
        await asyncio.sleep(LONG_S)
        assert counts["blue"] == 1, "a fleet that is shut down is left alone"

    run_in_virtual_time(scenario)


def test_without_fleets_it_shuts_down_a_fleet_without_workers() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        await without_workers(fixture)
        fixture.fleets = {}
        running = fixture.start(stops_when_empty=True)
        assert await running.ends_within(GRACE_S + 2 * CHECK_INTERVAL_S) >= GRACE_S
        assert await fixture.unfinished() == []

    run_in_virtual_time(scenario)


@pytest.mark.parametrize("stops_when_empty", [False, True])
def test_blocked_shutdown_is_logged_once_an_hour(stops_when_empty: bool) -> None:
    """For example because its API key is gone. If nothing else is left to do, the orchestrator ends."""

    async def scenario(fixture: OrchestratorFixture) -> None:
        await without_workers(fixture)
        fixture.fleets = {} if stops_when_empty else fixture.fleets
        del fixture.clouds["blue"]
        with capture_logs() as lines:
            running = fixture.start(stops_when_empty=stops_when_empty)
            await asyncio.sleep(GRACE_S + 2 * 3600.0)
        logged = [line["fleet"] for line in lines if line["event"].startswith("shut down unconfigured fleet failed")]
        assert logged == (["blue"] if stops_when_empty else ["blue", "blue"])
        assert running.task.done() == stops_when_empty
        assert "blue" in await fixture.unfinished()

    run_in_virtual_time(scenario)


def test_fleets_of_other_orchestrators_are_left_alone() -> None:
    async def scenario(fixture: OrchestratorFixture) -> None:
        await fixture.store.register(Registration("by-hand", ("green",), fleet="green", lease_s=LONG_S))
        fixture.fleets = {"blue": config("blue", min_workers=0, poll_interval_s=30.0)}
        assert await fixture.cycle()
        mine, fixture.fleets = fixture.fleets, {}
        with capture_logs() as lines:
            running = fixture.start()
            fixture.fleets = mine
            for _ in range(36):
                await asyncio.sleep(300.0)
                assert await fixture.cycle()
                assert await fixture.unfinished() == ["blue"]
        assert running.orchestrator.fleets == ()
        assert not [line for line in lines if line["event"] == "shut down unconfigured fleet"]
        assert [worker.status for worker in await fixture.workers("green")] == [WorkerStatus.ACTIVE]

    run_in_virtual_time(scenario)


def test_without_managed_fleets_it_runs_until_stopped() -> None:
    """For example if all fleets are Ray clusters of others: alerts and the server keep running."""

    async def scenario(fixture: OrchestratorFixture) -> None:
        fixture.fleets = {}
        running = fixture.start()
        await asyncio.sleep(LONG_S)
        assert not running.task.done()
        running.orchestrator.reconfigure({"red": config("red")})
        await asyncio.sleep(SOON_S)
        assert len(await fixture.active("red")) == 1
        running.orchestrator.reconfigure({})
        await asyncio.sleep(10 * CHECK_INTERVAL_S)
        assert await fixture.workers() == []
        assert not running.task.done()
        running.orchestrator.stop()
        assert await running.ends_within(1.0) == 0.0

    run_in_virtual_time(scenario)
