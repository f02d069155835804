"""A host from start to good night, in virtual time: what stops, what stays, and what a signal means when."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from windlass.control.cycle import FleetCycle, run_once
from windlass.control.orchestrator import (
    SHUTDOWN_MARGIN_S,
    SHUTDOWN_PER_MACHINE_S,
    SWEEP_INTERVAL_S,
    Orchestrator,
)
from windlass.control.unconfigured_fleets import CHECK_INTERVAL_S, GRACE_S
from windlass.model.errors import DatabaseUnavailable, WindlassError
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.task import NewTask
from windlass.model.worker import Registration, Worker, WorkerStatus
from windlass.simulator.cloud import MachineRecord, SimulatedCloud
from windlass.simulator.loop import run, virtual_now
from windlass.simulator.processes import SimulatedProcess, track_processes
from windlass.simulator.scenario import fleet_config
from windlass.simulator.trace import Trace
from windlass.simulator.workers import SimulatedWorker, TaskProfile, WorkerFaults
from windlass.store.memory.stores import MemoryStores

TTL_S = 20.0
STOP_S = 20.0
# A few cycles: for what should happen to have happened.
SOON_S = 15.0
LONG_S = 10_000.0


def config(fleet: str, **changes: Any) -> FleetConfig:
    settings = {"queues": (fleet,), "min_workers": 1, "max_workers": 2, "stop_timeout_s": STOP_S}
    return fleet_config(**(settings | changes))


class ClosingCloud(SimulatedCloud):
    """Counts how often it was closed."""

    closed = 0

    async def close(self) -> None:
        self.closed += 1


class Bed:
    """Two fleets, a store, clouds whose machines are workers, and orchestrators that are signalled."""

    def __init__(self) -> None:
        track_processes(asyncio.get_running_loop())
        self.store = MemoryStores(virtual_now, chance=Random(1))  # noqa: S311
        self.trace = Trace()
        self.fleets = {name: config(name) for name in ("red", "blue")}
        self.clouds = {name: self._make_cloud(name) for name in self.fleets}
        self.orchestrators = 0

    def _make_cloud(self, name: str) -> ClosingCloud:
        cloud = ClosingCloud(name, Random(2), self.trace)  # noqa: S311

        def start_worker(entry: MachineRecord) -> SimulatedWorker:
            process, habits = SimulatedProcess(entry.name), TaskProfile(duration_s=(LONG_S, LONG_S))
            faults, rng = WorkerFaults(boots_s=1.0), Random(3)  # noqa: S311
            fleet = self.fleets.get(name, config(name))
            worker = SimulatedWorker(entry, cloud, fleet, self.store, process, faults, habits, rng, self.trace)
            worker.start()
            return worker

        cloud.start_worker = start_worker
        return cloud

    def start(self, *, stops_when_empty: bool = False) -> "Running":
        self.orchestrators += 1
        candidate = Candidate(f"o{self.orchestrators}", TTL_S)

        def make_cycle(name: str, fleet: FleetConfig) -> FleetCycle:
            return FleetCycle(name, fleet, self.store, self.clouds[name], candidate, Random(4))  # noqa: S311

        up = Orchestrator(self.store, candidate, make_cycle, lambda name, _: self.clouds[name], lambda _: None)
        return Running(up, asyncio.ensure_future(up.run(self.fleets, stops_when_empty=stops_when_empty)))

    async def cycle(self) -> bool:
        """One of each fleet, as from cron on another host. Whether it found the lead free."""
        cron = Candidate("cron", TTL_S)
        cycles = [
            FleetCycle(name, fleet, self.store, self.clouds[name], cron, Random(4))  # noqa: S311
            for name, fleet in self.fleets.items()
        ]
        summaries = await run_once(cycles)
        await self.store.release_lease(cron)
        return all(summary.is_leader for summary in summaries)

    async def unfinished(self) -> list[str]:
        """Fleets that somebody has run, and nobody has wound down."""
        return [fleet.name for fleet in await self.store.fleets() if fleet.next_plan_in_s is not None]

    async def workers(self, fleet: str | None = None) -> list[Worker]:
        return [worker for worker in await self.store.workers() if fleet in (None, worker.fleet)]

    async def active(self, fleet: str) -> list[str]:
        return [worker.id for worker in await self.workers(fleet) if worker.status is WorkerStatus.ACTIVE]

    def make_immortal(self, fleet: str, deletions: int = 1000) -> None:
        for _ in range(deletions):
            self.clouds[fleet].next_delete(raises=RuntimeError("not now"), takes_effect=False)


class Running:
    def __init__(self, up: Orchestrator, task: "asyncio.Future[None]") -> None:
        self.up = up
        self.task = task

    async def ends_within(self, seconds: float) -> float:
        """How long it took."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        await asyncio.wait_for(self.task, seconds)
        return loop.time() - started


def in_a_bed(live: Callable[[Bed], Awaitable[None]]) -> None:
    async def main() -> None:
        await live(Bed())

    run(main())


def test_told_to_stop_it_lets_everybody_go_and_ends() -> None:
    async def live(bed: Bed) -> None:
        up = bed.start()
        await asyncio.sleep(SOON_S)
        assert len(await bed.active("red")) == len(await bed.active("blue")) == 1
        up.up.stop()
        await up.ends_within(10.0)
        assert await bed.workers() == []
        assert [cloud.billed_machines() for cloud in bed.clouds.values()] == [[], []]
        codes = {worker.code for worker in await bed.store.workers(include_terminated=True)}
        assert codes == {"SHUT_DOWN"}
        assert [cloud.closed for cloud in bed.clouds.values()] == [1, 1]

    in_a_bed(live)


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.5, 2.0])
def test_told_to_stop_in_its_very_first_cycle_it_leaves_nobody_behind(after_s: float) -> None:
    async def live(bed: Bed) -> None:
        up = bed.start()
        await asyncio.sleep(after_s)
        up.up.stop()
        await up.ends_within(10.0)
        assert [cloud.billed_machines() for cloud in bed.clouds.values()] == [[], []]

    in_a_bed(live)


def test_whoever_stands_by_leaves_without_touching_anybody() -> None:
    async def live(bed: Bed) -> None:
        leader = bed.start()
        await asyncio.sleep(SOON_S)
        before = await bed.workers()
        standby = bed.start()
        await asyncio.sleep(SOON_S)
        standby.up.stop()
        await standby.ends_within(1.0)
        await asyncio.sleep(SOON_S)
        assert [(w.id, w.status) for w in await bed.workers()] == [(w.id, w.status) for w in before]
        assert not leader.task.done()

    in_a_bed(live)


def test_whoever_loses_the_lead_while_it_winds_down_leaves_the_rest_to_the_next() -> None:
    async def live(bed: Bed) -> None:
        first = bed.start()
        await asyncio.sleep(SOON_S)
        bed.make_immortal("red")
        first.up.stop()
        await asyncio.sleep(2.0)
        other = Candidate("other", TTL_S)
        await bed.store.release_lease(Candidate("o1", TTL_S))
        assert isinstance(await bed.store.acquire_lease(other), int)
        await first.ends_within(5.0)

    in_a_bed(live)


def test_a_fleet_left_out_of_the_configuration_is_wound_down_and_no_other() -> None:
    async def live(bed: Bed) -> None:
        up = bed.start()
        await asyncio.sleep(SOON_S)
        red = await bed.active("red")
        up.up.reconfigure({"red": bed.fleets["red"]})
        await asyncio.sleep(SOON_S)
        assert await bed.workers("blue") == []
        assert await bed.active("red") == red
        assert bed.clouds["blue"].closed == 1

    in_a_bed(live)


def test_a_fleet_that_was_left_out_and_does_not_end_is_not_given_up_and_stops_nobody_else() -> None:
    async def live(bed: Bed) -> None:
        up = bed.start()
        await asyncio.sleep(SOON_S)
        bed.make_immortal("blue")
        up.up.reconfigure({"red": bed.fleets["red"]})
        await asyncio.sleep(STOP_S + SHUTDOWN_MARGIN_S + SOON_S)
        asked = bed.clouds["blue"].delete_calls
        for worker_id in await bed.active("red"):
            await bed.store.terminate_worker(worker_id, "killed")
        await asyncio.sleep(SOON_S)
        assert not up.task.done()
        assert len(await bed.active("red")) == 1, "the dead are replaced"
        assert bed.clouds["blue"].delete_calls > asked, "its machines are paid for as long as they are there"

    in_a_bed(live)


def test_the_first_signal_to_stop_is_the_first_whatever_was_left_out_before() -> None:
    async def live(bed: Bed) -> None:
        up = bed.start()
        await asyncio.sleep(SOON_S)
        bed.make_immortal("blue")
        up.up.reconfigure({"red": bed.fleets["red"]})
        await asyncio.sleep(1.0)
        up.up.stop()
        took_s = await up.ends_within(STOP_S + SHUTDOWN_MARGIN_S + 2 * SHUTDOWN_PER_MACHINE_S)
        assert took_s > STOP_S, "what was left out before has its whole time"
        assert await bed.workers("red") == []
        assert len(await bed.workers("blue")) == 1

    in_a_bed(live)


def test_a_fleet_that_is_put_back_stays_and_hires_again() -> None:
    async def live(bed: Bed) -> None:
        up = bed.start()
        await asyncio.sleep(SOON_S)
        before = await bed.active("blue")
        bed.make_immortal("blue", 5)
        up.up.reconfigure({"red": bed.fleets["red"]})
        await asyncio.sleep(1.0)
        up.up.reconfigure(bed.fleets)
        await asyncio.sleep(STOP_S + SHUTDOWN_MARGIN_S + SOON_S)
        after = await bed.active("blue")
        assert len(after) == 1
        assert after != before

    in_a_bed(live)


async def without_blue(bed: Bed) -> Running:
    """Started again, after a stop that left the workers, with a file that lacks a fleet."""
    up = bed.start()
    await asyncio.sleep(SOON_S)
    up.up.stop(keeps_workers=True)
    await up.ends_within(10.0)
    bed.fleets = {"red": bed.fleets["red"]}
    again = bed.start()
    await asyncio.sleep(TTL_S + GRACE_S / 2)
    assert len(await bed.active("blue")) == 1, "a wrong file is noticed in time"
    return again


def test_a_fleet_that_is_missing_at_the_start_is_wound_down_after_a_while() -> None:
    async def live(bed: Bed) -> None:
        up = await without_blue(bed)
        await asyncio.sleep(GRACE_S / 2 + 2 * CHECK_INTERVAL_S + SOON_S)
        assert await bed.workers("blue") == []
        assert bed.clouds["blue"].billed_machines() == []
        assert len(await bed.active("red")) == 1
        assert up.up.fleets == ("red",)

    in_a_bed(live)


def test_a_fleet_that_is_missing_at_the_start_and_put_back_in_time_keeps_its_workers() -> None:
    async def live(bed: Bed) -> None:
        up = await without_blue(bed)
        before = await bed.active("blue")
        up.up.reconfigure({**bed.fleets, "blue": config("blue")})
        await asyncio.sleep(GRACE_S + 2 * CHECK_INTERVAL_S)
        assert await bed.active("blue") == before

    in_a_bed(live)


def test_a_fleet_whose_settings_nobody_knows_any_more_is_told_of() -> None:
    async def live(bed: Bed) -> None:
        with capture_logs() as lines:
            await without_blue(bed)
            bed.store.tables.cycles.rows.clear()
            await asyncio.sleep(GRACE_S / 2 + 3 * CHECK_INTERVAL_S)
        assert len(await bed.active("blue")) == 1
        told = [line for line in lines if line["event"].startswith("shut down unconfigured fleet failed")]
        assert [line["fleet"] for line in told] == ["blue"]

    in_a_bed(live)


@pytest.mark.parametrize("read", ["workers", "cycle"])
def test_what_cannot_be_read_of_a_missing_fleet_is_read_again(read: str) -> None:
    """As a cycle that was written by a version with other settings."""

    async def live(bed: Bed) -> None:
        with capture_logs() as lines:
            await without_blue(bed)
            readable = getattr(bed.store, read)

            async def unreadable(*_: object) -> Any:
                raise ValueError("a setting of another version")

            setattr(bed.store, read, unreadable)
            await asyncio.sleep(GRACE_S / 2 + 3 * CHECK_INTERVAL_S)
            assert bed.clouds["blue"].billed_machines() != []
            setattr(bed.store, read, readable)
            await asyncio.sleep(GRACE_S + 2 * CHECK_INTERVAL_S + SOON_S)
        assert bed.clouds["blue"].billed_machines() == []
        assert any(line["log_level"] == "error" and ("exc_info" in line or "ValueError" in str(line)) for line in lines)

    in_a_bed(live)


async def without_any(bed: Bed) -> Running:
    """Started again, after a stop that left the workers, with a file that has no fleet any more."""
    up = bed.start()
    await asyncio.sleep(SOON_S)
    up.up.stop(keeps_workers=True)
    await up.ends_within(10.0)
    bed.fleets = {}
    again = bed.start(stops_when_empty=True)
    await asyncio.sleep(TTL_S + GRACE_S / 2)
    assert len(await bed.active("red")) == len(await bed.active("blue")) == 1, "a wrong file is noticed in time"
    return again


def test_the_last_fleets_that_left_the_file_are_wound_down_after_a_while_and_then_it_ends() -> None:
    async def live(bed: Bed) -> None:
        up = await without_any(bed)
        await up.ends_within(GRACE_S / 2 + 4 * CHECK_INTERVAL_S)
        assert await bed.workers() == []
        assert [cloud.billed_machines() for cloud in bed.clouds.values()] == [[], []]
        assert [cloud.closed for cloud in bed.clouds.values()] == [2, 2]

    in_a_bed(live)


def test_the_last_fleets_put_back_in_time_keep_their_workers_and_it_stays() -> None:
    async def live(bed: Bed) -> None:
        up = await without_any(bed)
        before = await bed.active("blue")
        up.up.reconfigure({"blue": config("blue"), "red": config("red")})
        await asyncio.sleep(GRACE_S + 4 * CHECK_INTERVAL_S)
        assert await bed.active("blue") == before
        assert not up.task.done()
        up.up.stop()
        await up.ends_within(10.0)
        assert await bed.workers() == []

    in_a_bed(live)


def test_without_a_fleet_of_its_own_it_touches_nobody_while_another_leads() -> None:
    async def live(bed: Bed) -> None:
        leader = bed.start()
        await asyncio.sleep(SOON_S)
        before = [(worker.id, worker.status) for worker in await bed.workers()]
        bed.fleets = {}
        standby = bed.start(stops_when_empty=True)
        await asyncio.sleep(2 * GRACE_S)
        assert [(worker.id, worker.status) for worker in await bed.workers()] == before
        standby.up.stop()
        assert await standby.ends_within(1.0) == 0.0
        assert not leader.task.done()

    in_a_bed(live)


def test_without_a_fleet_of_its_own_it_leaves_those_alone_whose_cycles_are_far_apart() -> None:
    """Whoever runs them holds the lead for a moment in ten minutes only, and must find it free then."""

    async def live(bed: Bed) -> None:
        bed.fleets = {"red": config("red", poll_interval_s=600.0)}
        bed.start()
        await asyncio.sleep(SOON_S)
        (hired,) = await bed.workers()
        bed.fleets = {}
        bed.start(stops_when_empty=True)
        counts = count_cycles(bed)
        await asyncio.sleep(3600.0)
        assert await bed.active("red") == [hired.id]
        assert counts["red"] >= 5

    in_a_bed(live)


@pytest.mark.parametrize("every_s", [300.0, 900.0])
@pytest.mark.parametrize("begins_s", [0.0, 7.0, 14.0])
def test_without_a_fleet_of_its_own_it_keeps_no_single_cycle_from_running(begins_s: float, every_s: float) -> None:
    """Though they come less often than the poll interval says: how often they do is what counts."""

    async def live(bed: Bed) -> None:
        bed.fleets = {"red": config("red", poll_interval_s=30.0)}
        for _ in range(3):  # so many tell how far apart they are
            await asyncio.sleep(every_s)
            assert await bed.cycle()
        await asyncio.sleep(begins_s)
        (hired,) = await bed.workers("red")
        mine, bed.fleets = bed.fleets, {}
        up = bed.start()
        bed.fleets = mine
        for _ in range(12):
            await asyncio.sleep(every_s)
            assert await bed.cycle()
        assert await bed.active("red") == [hired.id]
        up.up.stop()
        await up.ends_within(1.0)

    in_a_bed(live)


@pytest.mark.parametrize("away_s", [0.0, 2 * GRACE_S])
def test_without_a_fleet_of_its_own_it_grants_each_absence_of_the_leader_the_whole_time(away_s: float) -> None:
    """Also where the database was away: until just now nobody could run a cycle."""

    async def live(bed: Bed) -> None:
        lead, is_away = bed.store.acquire_lease, False

        async def lead_if_there(candidate: Candidate) -> Any:
            if is_away:
                raise DatabaseUnavailable("away")
            return await lead(candidate)

        bed.store.acquire_lease = lead_if_there  # type: ignore[method-assign]
        fleets = bed.fleets
        leader = bed.start()
        await asyncio.sleep(SOON_S)
        before = [(worker.id, worker.status) for worker in await bed.workers()]
        bed.fleets = {}
        bed.start()
        bed.fleets = fleets
        for without_database_s in (0.0, away_s, away_s):
            await asyncio.sleep(3600.0)
            leader.up.stop(keeps_workers=True)
            await leader.ends_within(10.0)
            is_away = without_database_s > 0
            await asyncio.sleep(without_database_s)
            is_away = False
            await asyncio.sleep(GRACE_S / 2)
            leader = bed.start()
            await asyncio.sleep(SOON_S)
            assert [(worker.id, worker.status) for worker in await bed.workers()] == before

    in_a_bed(live)


def test_whoever_has_fleets_grants_each_absence_of_others_the_whole_time() -> None:
    """As where two hosts have different files, and one runs its cycles from cron."""

    async def live(bed: Bed) -> None:
        red, blue = {"red": config("red", poll_interval_s=600.0)}, {"blue": config("blue")}
        bed.fleets = red
        up = bed.start()
        await asyncio.sleep(TTL_S + SOON_S)
        bed.fleets = blue
        ran = 0
        for _ in range(36):
            ran += await bed.cycle()
            await asyncio.sleep(280.0)
        assert ran > 30, "its lease runs out between its own cycles"
        assert len(await bed.active("blue")) == 1
        assert up.up.fleets == ("red",)

    in_a_bed(live)


def test_without_a_fleet_somebody_is_there_all_the_while_and_a_stop_leaves_the_workers() -> None:
    """Nobody is told that none leads, nor waits for the lease of one that has nothing to do."""

    async def live(bed: Bed) -> None:
        up = await without_any(bed)
        for _ in range(40):
            assert all(fleet.is_led for fleet in await bed.store.fleets())
            await asyncio.sleep(TTL_S / 10)
        up.up.stop()
        assert await up.ends_within(1.0) == 0.0
        assert not any(fleet.is_led for fleet in await bed.store.fleets())
        assert len(await bed.workers()) == 2

    in_a_bed(live)


def test_the_last_fleet_whose_settings_nobody_knows_any_more_is_told_of_and_it_stays() -> None:
    async def live(bed: Bed) -> None:
        with capture_logs() as lines:
            up = await without_any(bed)
            rows = bed.store.tables.cycles.rows
            for row_id in [row_id for row_id, row in rows.items() if row.cycle.fleet == "blue"]:
                del rows[row_id]
            await asyncio.sleep(GRACE_S / 2 + 5 * CHECK_INTERVAL_S)
        assert await bed.workers("red") == []
        assert len(await bed.active("blue")) == 1
        assert not up.task.done()
        told = [line for line in lines if line["event"].startswith("shut down unconfigured fleet failed")]
        assert [line["fleet"] for line in told] == ["blue"]

    in_a_bed(live)


async def without_workers(bed: Bed) -> None:
    """Two fleets that nobody works for were run until a kill; one of them is left in the file."""
    bed.fleets = {name: config(name, min_workers=0) for name in bed.fleets}
    up = bed.start()
    await asyncio.sleep(SOON_S)
    up.up.stop(keeps_workers=True)
    await up.ends_within(10.0)
    assert (await bed.workers(), await bed.unfinished()) == ([], ["blue", "red"])
    bed.fleets = {"red": bed.fleets["red"]}
    await asyncio.sleep(3600.0)


def test_a_fleet_without_workers_that_is_missing_at_the_start_is_wound_down_too() -> None:
    """What is the matter with it would never be over, nor that nobody runs it."""

    async def live(bed: Bed) -> None:
        await without_workers(bed)
        up = bed.start()
        await asyncio.sleep(GRACE_S)
        assert await bed.unfinished() == ["blue", "red"], "a wrong file is noticed in time"
        counts = count_cycles(bed)
        await asyncio.sleep(2 * CHECK_INTERVAL_S)
        assert await bed.unfinished() == ["red"]
        assert up.up.fleets == ("red",)
        assert counts["blue"] == 1
        await asyncio.sleep(LONG_S)
        assert counts["blue"] == 1, "what is over is left alone"

    in_a_bed(live)


def test_the_last_fleet_without_workers_is_wound_down_before_it_ends() -> None:
    async def live(bed: Bed) -> None:
        await without_workers(bed)
        bed.fleets = {}
        up = bed.start(stops_when_empty=True)
        assert await up.ends_within(GRACE_S + 2 * CHECK_INTERVAL_S) >= GRACE_S
        assert await bed.unfinished() == []

    in_a_bed(live)


@pytest.mark.parametrize("stops_when_empty", [False, True])
def test_a_fleet_without_workers_whose_provider_cannot_be_made_is_told_of_once_an_hour(stops_when_empty: bool) -> None:
    """As one whose key is gone. It is no reason to stay where nothing else is left to do."""

    async def live(bed: Bed) -> None:
        await without_workers(bed)
        bed.fleets = {} if stops_when_empty else bed.fleets
        del bed.clouds["blue"]
        with capture_logs() as lines:
            up = bed.start(stops_when_empty=stops_when_empty)
            await asyncio.sleep(GRACE_S + 2 * 3600.0)
        told = [line["fleet"] for line in lines if line["event"].startswith("shut down unconfigured fleet failed")]
        assert told == (["blue"] if stops_when_empty else ["blue", "blue"])
        assert up.task.done() == stops_when_empty
        assert "blue" in await bed.unfinished()

    in_a_bed(live)


def test_fleets_that_nobody_ever_ran_or_that_others_run_are_left_alone() -> None:
    async def live(bed: Bed) -> None:
        await bed.store.register(Registration("by-hand", ("green",), fleet="green", lease_s=LONG_S))
        bed.fleets = {"blue": config("blue", min_workers=0, poll_interval_s=30.0)}
        assert await bed.cycle()
        mine, bed.fleets = bed.fleets, {}
        with capture_logs() as lines:
            up = bed.start()
            bed.fleets = mine
            for _ in range(36):
                await asyncio.sleep(300.0)
                assert await bed.cycle()
                assert await bed.unfinished() == ["blue"]
        assert up.up.fleets == ()
        assert not [line for line in lines if line["event"] == "shut down unconfigured fleet"]
        assert [worker.status for worker in await bed.workers("green")] == [WorkerStatus.ACTIVE]

    in_a_bed(live)


def test_where_nobody_is_hired_here_it_stays_all_the_same_until_it_is_told_to_stop() -> None:
    """As where all fleets' machines are others': what is beside the cycles goes on."""

    async def live(bed: Bed) -> None:
        bed.fleets = {}
        up = bed.start()
        await asyncio.sleep(LONG_S)
        assert not up.task.done()
        up.up.reconfigure({"red": config("red")})
        await asyncio.sleep(SOON_S)
        assert len(await bed.active("red")) == 1
        up.up.reconfigure({})
        await asyncio.sleep(10 * CHECK_INTERVAL_S)
        assert await bed.workers() == []
        assert not up.task.done()
        up.up.stop()
        assert await up.ends_within(1.0) == 0.0

    in_a_bed(live)


def test_a_fleet_whose_provider_cannot_be_made_changes_nothing_and_leaves_nothing_open() -> None:
    async def live(bed: Bed) -> None:
        up = bed.start()
        await asyncio.sleep(SOON_S)
        made = bed.clouds["green"] = bed._make_cloud("red")
        with pytest.raises(KeyError):
            up.up.reconfigure({**bed.fleets, "green": config("green"), "grey": config("grey")})
        await asyncio.sleep(1)
        assert (up.up.fleets, made.closed) == (("red", "blue"), 1)

    in_a_bed(live)


def test_a_machine_that_no_worker_has_is_ended_before_its_fleet_is_wound_down() -> None:
    async def live(bed: Bed) -> None:
        red = bed.clouds["red"]
        red.max_list_age_s = 10.0
        up = bed.start()
        await asyncio.sleep(SOON_S)
        red.machines["m9-red"] = MachineRecord("m9-red", "red-9-nobody", "red", 9, asyncio.get_running_loop().time())
        up.up.stop()
        await up.ends_within(STOP_S + SHUTDOWN_MARGIN_S)
        assert red.billed_machines() == []

    in_a_bed(live)


def test_a_second_signal_ends_it_at_once_whatever_is_under_way() -> None:
    async def live(bed: Bed) -> None:
        up = bed.start()
        await asyncio.sleep(SOON_S)
        for cloud in bed.clouds.values():
            cloud.next_delete(never_answers=True, takes_effect=False)
        up.up.stop()
        await asyncio.sleep(3.0)
        assert not up.task.done()
        up.up.stop()
        assert await up.ends_within(1.0) == 0.0
        assert len(await bed.workers()) == 2

    in_a_bed(live)


def test_told_to_leave_its_workers_it_waits_only_so_long_for_what_is_under_way() -> None:
    async def live(bed: Bed) -> None:
        for cloud in bed.clouds.values():
            cloud.next_create(takes_s=50.0)
        up = bed.start()
        await asyncio.sleep(1.0)
        up.up.stop(keeps_workers=True)
        await up.ends_within(25.0)

    in_a_bed(live)


def test_a_worker_that_a_person_started_keeps_nobody_from_ending() -> None:
    async def live(bed: Bed) -> None:
        up = bed.start()
        await bed.store.register(Registration("by-hand", ("red",), fleet="red", lease_s=LONG_S))
        await asyncio.sleep(SOON_S)
        up.up.stop()
        await up.ends_within(10.0)
        assert [(worker.id, worker.status) for worker in await bed.workers()] == [("by-hand", WorkerStatus.ACTIVE)]

    in_a_bed(live)


def test_a_worker_that_a_person_started_does_not_hide_that_nobody_was_hired() -> None:
    """A task that finds nobody hired wakes the fleet at once, whoever else is there."""

    async def live(bed: Bed) -> None:
        bed.fleets["red"] = config("red", min_workers=0, poll_interval_s=600.0)
        await bed.store.register(Registration("by-hand", ("else",), fleet="red", lease_s=LONG_S))
        bed.start()
        await asyncio.sleep(SOON_S)
        await bed.store.enqueue(NewTask("red"))
        await asyncio.sleep(3.0)
        assert len(await bed.workers("red")) == 2

    in_a_bed(live)


def count_cycles(bed: Bed) -> Counter[str]:
    """Of each fleet, from now on."""
    counts: Counter[str] = Counter()
    for name, cloud in bed.clouds.items():
        original = cloud.list_machines

        async def listed(name: str = name, original: Any = original) -> Any:
            counts[name] += 1
            return await original()

        cloud.list_machines = listed  # type: ignore[method-assign]
    return counts


def test_tasks_of_one_fleet_wake_no_other_and_an_empty_fleet_only_when_one_waits() -> None:
    """Neither where the store tells of each arrival, nor where all it can do is to wait a second."""

    async def live(bed: Bed) -> None:
        bed.fleets["red"] = config("red", poll_interval_s=600.0)
        bed.fleets["blue"] = config("blue", min_workers=0, poll_interval_s=600.0)
        wait = bed.store.wait_for_work
        bed.start()
        await asyncio.sleep(SOON_S)
        counts = count_cycles(bed)
        for _ in range(40):
            await bed.store.enqueue(NewTask("red"))
            await asyncio.sleep(0.5)
        assert counts == {}

        async def wait_like_a_pooler(_queues: Sequence[str], timeout_s: float) -> None:
            await asyncio.sleep(min(1.0, timeout_s))

        bed.store.wait_for_work = wait_like_a_pooler  # type: ignore[method-assign]
        await wait(("red", "blue"), 60.0)  # until the one under way has ended
        await asyncio.sleep(60.0)
        assert counts == {}
        await bed.store.enqueue(NewTask("blue"))
        await asyncio.sleep(5.0)
        assert len(await bed.workers("blue")) == 1
        assert set(counts) == {"blue"}

    in_a_bed(live)


def test_a_fleet_that_may_not_hire_is_not_woken_by_every_task() -> None:
    async def live(bed: Bed) -> None:
        bed.fleets = {"red": config("red", min_workers=0, poll_interval_s=600.0)}
        bed.start()
        await asyncio.sleep(SOON_S)
        await bed.store.pause_fleet("red", True)
        counts = count_cycles(bed)
        for _ in range(40):
            await bed.store.enqueue(NewTask("red"))
            await asyncio.sleep(0.5)
        assert counts == {"red": 1}

    in_a_bed(live)


def test_a_changed_fleet_keeps_what_is_under_way_and_its_old_provider_until_that_has_ended() -> None:
    async def live(bed: Bed) -> None:
        bed.fleets = {"red": config("red", max_workers=1)}
        bed.clouds["red"].next_create(takes_s=30.0)
        old = bed.clouds["red"]
        up = bed.start()
        await asyncio.sleep(1.0)
        # The same account, as another object: what a changed table makes of it.
        bed.clouds["red"] = new = bed._make_cloud("red")
        new.machines, new.workers = old.machines, old.workers
        up.up.reconfigure({"red": config("red", max_workers=1, idle_timeout_s=99.0)})
        await asyncio.sleep(SOON_S)
        assert (old.create_calls, new.create_calls, old.closed) == (1, 0, 0)
        await asyncio.sleep(30.0)
        assert (old.closed, new.closed) == (1, 0)
        assert len(await bed.active("red")) == 1
        up.up.stop()
        await up.ends_within(10.0)
        assert (old.closed, new.closed, new.create_calls) == (1, 1, 0)

    in_a_bed(live)


def test_a_cycle_ends_with_the_provider_it_began_with() -> None:
    """Or what it decided of one provider's machines would be asked of another."""

    async def live(bed: Bed) -> None:
        bed.fleets = {"red": config("red", max_workers=1)}
        old = bed.clouds["red"]
        old.next_list(takes_s=3.0)
        up = bed.start()
        await asyncio.sleep(1.0)
        bed.clouds["red"] = new = bed._make_cloud("red")
        new.machines, new.workers = old.machines, old.workers
        changed = config("red", max_workers=1, idle_timeout_s=99.0)
        up.up.reconfigure({"red": changed})
        assert up.up.fleet("red") == changed
        await asyncio.sleep(SOON_S)
        assert (old.create_calls, new.create_calls, old.closed) == (1, 0, 1)
        assert new.list_calls > 0

    in_a_bed(live)


def test_a_configuration_of_which_one_provider_cannot_be_made_changes_nothing() -> None:
    async def live(bed: Bed) -> None:
        up = bed.start()
        await asyncio.sleep(SOON_S)
        changed = {"red": config("red", max_workers=1), "green": config("green")}
        with pytest.raises(KeyError, match="green"):
            up.up.reconfigure(changed)
        assert {name: up.up.fleet(name) for name in up.up.fleets} == bed.fleets
        await asyncio.sleep(SOON_S)
        assert len(await bed.active("blue")) == 1, "left out, but not wound down"

    in_a_bed(live)


def test_retention_goes_on_after_whatever_went_wrong_with_it() -> None:
    async def live(bed: Bed) -> None:
        problems = [ValueError("timestamp out of range"), DatabaseUnavailable("away")]
        calls = 0

        async def sweep(**_: Any) -> Any:
            nonlocal calls
            calls += 1
            if problems:
                raise problems.pop(0)

        bed.store.sweep = sweep  # type: ignore[method-assign]
        with capture_logs() as lines:
            bed.start()
            await asyncio.sleep(4.5 * SWEEP_INTERVAL_S)
        assert calls == 4
        assert [line["log_level"] for line in lines if line["event"] == "apply retention failed"] == ["error"]

    in_a_bed(live)


def test_a_configuration_that_comes_too_late_changes_nothing() -> None:
    async def live(bed: Bed) -> None:
        up = bed.start()
        await asyncio.sleep(SOON_S)
        up.up.stop()
        for _ in range(2):
            with pytest.raises(WindlassError, match="orchestrator is stopping"):
                up.up.reconfigure(bed.fleets)
            await up.ends_within(10.0)
        with suppress(asyncio.CancelledError):
            await up.task
        assert await bed.workers() == []

    in_a_bed(live)
