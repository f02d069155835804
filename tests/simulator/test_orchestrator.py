"""The orchestrator in virtual time: start, reload, stop, and unconfigured fleets."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from support.memory_store.stores import MemoryStores
from support.simulator.cloud import MachineRecord, SimulatedCloud
from support.simulator.loop import run, virtual_now
from support.simulator.processes import SimulatedProcess, track_processes
from support.simulator.scenario import fleet_config
from support.simulator.trace import Trace
from support.simulator.workers import SimulatedWorker, TaskProfile, WorkerFaults
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

TTL_S = 20.0
STOP_S = 20.0
# A few cycles.
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


class Scene:
    """Two fleets, a store, clouds whose machines are workers, and orchestrators to stop and reload."""

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
        """Run one cycle of each fleet, as from cron on another host. Returns whether it led."""
        cron = Candidate("cron", TTL_S)
        cycles = [
            FleetCycle(name, fleet, self.store, self.clouds[name], cron, Random(4))  # noqa: S311
            for name, fleet in self.fleets.items()
        ]
        summaries = await run_once(cycles)
        await self.store.release_lease(cron)
        return all(summary.is_leader for summary in summaries)

    async def unfinished(self) -> list[str]:
        """Fleets that have run and are not shut down."""
        return [fleet.name for fleet in await self.store.fleets() if fleet.next_plan_in_s is not None]

    async def workers(self, fleet: str | None = None) -> list[Worker]:
        return [worker for worker in await self.store.workers() if fleet in (None, worker.fleet)]

    async def active(self, fleet: str) -> list[str]:
        return [worker.id for worker in await self.workers(fleet) if worker.status is WorkerStatus.ACTIVE]

    def refuse_deletions(self, fleet: str, deletions: int = 1000) -> None:
        for _ in range(deletions):
            self.clouds[fleet].next_delete(raises=RuntimeError("not now"), takes_effect=False)


class Running:
    def __init__(self, up: Orchestrator, task: "asyncio.Future[None]") -> None:
        self.up = up
        self.task = task

    async def ends_within(self, seconds: float) -> float:
        """Returns how long it took."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        await asyncio.wait_for(self.task, seconds)
        return loop.time() - started


def in_scene(live: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        await live(Scene())

    run(main())


def test_stop_drains_all_workers_and_ends() -> None:
    async def live(scene: Scene) -> None:
        up = scene.start()
        await asyncio.sleep(SOON_S)
        assert len(await scene.active("red")) == len(await scene.active("blue")) == 1
        up.up.stop()
        await up.ends_within(10.0)
        assert await scene.workers() == []
        assert [cloud.billed_machines() for cloud in scene.clouds.values()] == [[], []]
        codes = {worker.code for worker in await scene.store.workers(include_terminated=True)}
        assert codes == {"SHUT_DOWN"}
        assert [cloud.closed for cloud in scene.clouds.values()] == [1, 1]

    in_scene(live)


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.5, 2.0])
def test_stop_in_the_first_cycle_leaves_no_machine_running(after_s: float) -> None:
    async def live(scene: Scene) -> None:
        up = scene.start()
        await asyncio.sleep(after_s)
        up.up.stop()
        await up.ends_within(10.0)
        assert [cloud.billed_machines() for cloud in scene.clouds.values()] == [[], []]

    in_scene(live)


def test_standby_stops_without_touching_workers() -> None:
    async def live(scene: Scene) -> None:
        leader = scene.start()
        await asyncio.sleep(SOON_S)
        before = await scene.workers()
        standby = scene.start()
        await asyncio.sleep(SOON_S)
        standby.up.stop()
        await standby.ends_within(1.0)
        await asyncio.sleep(SOON_S)
        assert [(w.id, w.status) for w in await scene.workers()] == [(w.id, w.status) for w in before]
        assert not leader.task.done()

    in_scene(live)


def test_shutdown_ends_when_another_orchestrator_leads() -> None:
    async def live(scene: Scene) -> None:
        first = scene.start()
        await asyncio.sleep(SOON_S)
        scene.refuse_deletions("red")
        first.up.stop()
        await asyncio.sleep(2.0)
        other = Candidate("other", TTL_S)
        await scene.store.release_lease(Candidate("o1", TTL_S))
        assert isinstance(await scene.store.acquire_lease(other), int)
        await first.ends_within(5.0)

    in_scene(live)


def test_fleet_removed_by_reload_is_shut_down_alone() -> None:
    async def live(scene: Scene) -> None:
        up = scene.start()
        await asyncio.sleep(SOON_S)
        red = await scene.active("red")
        up.up.reconfigure({"red": scene.fleets["red"]})
        await asyncio.sleep(SOON_S)
        assert await scene.workers("blue") == []
        assert await scene.active("red") == red
        assert scene.clouds["blue"].closed == 1

    in_scene(live)


def test_removed_fleet_that_cannot_end_does_not_stop_others() -> None:
    async def live(scene: Scene) -> None:
        up = scene.start()
        await asyncio.sleep(SOON_S)
        scene.refuse_deletions("blue")
        up.up.reconfigure({"red": scene.fleets["red"]})
        await asyncio.sleep(STOP_S + SHUTDOWN_MARGIN_S + SOON_S)
        asked = scene.clouds["blue"].delete_calls
        for worker_id in await scene.active("red"):
            await scene.store.terminate_worker(worker_id, "killed")
        await asyncio.sleep(SOON_S)
        assert not up.task.done()
        assert len(await scene.active("red")) == 1, "the terminated worker is replaced"
        assert scene.clouds["blue"].delete_calls > asked, (
            "deletions are requested again, because the machines cost money"
        )

    in_scene(live)


def test_first_stop_after_a_reload_still_waits_for_workers() -> None:
    async def live(scene: Scene) -> None:
        up = scene.start()
        await asyncio.sleep(SOON_S)
        scene.refuse_deletions("blue")
        up.up.reconfigure({"red": scene.fleets["red"]})
        await asyncio.sleep(1.0)
        up.up.stop()
        took_s = await up.ends_within(STOP_S + SHUTDOWN_MARGIN_S + 2 * SHUTDOWN_PER_MACHINE_S)
        assert took_s > STOP_S, "the removed fleet gets its full time limit"
        assert await scene.workers("red") == []
        assert len(await scene.workers("blue")) == 1

    in_scene(live)


def test_fleet_put_back_by_reload_keeps_running() -> None:
    async def live(scene: Scene) -> None:
        up = scene.start()
        await asyncio.sleep(SOON_S)
        before = await scene.active("blue")
        scene.refuse_deletions("blue", 5)
        up.up.reconfigure({"red": scene.fleets["red"]})
        await asyncio.sleep(1.0)
        up.up.reconfigure(scene.fleets)
        await asyncio.sleep(STOP_S + SHUTDOWN_MARGIN_S + SOON_S)
        after = await scene.active("blue")
        assert len(after) == 1
        assert after != before

    in_scene(live)


async def without_blue(scene: Scene) -> Running:
    """Restart, after a stop that kept the workers, with a configuration that lacks a fleet."""
    up = scene.start()
    await asyncio.sleep(SOON_S)
    up.up.stop(keeps_workers=True)
    await up.ends_within(10.0)
    scene.fleets = {"red": scene.fleets["red"]}
    again = scene.start()
    await asyncio.sleep(TTL_S + GRACE_S / 2)
    assert len(await scene.active("blue")) == 1, "the operator has time to notice a wrong file"
    return again


def test_unconfigured_fleet_is_shut_down_after_grace() -> None:
    async def live(scene: Scene) -> None:
        up = await without_blue(scene)
        await asyncio.sleep(GRACE_S / 2 + 2 * CHECK_INTERVAL_S + SOON_S)
        assert await scene.workers("blue") == []
        assert scene.clouds["blue"].billed_machines() == []
        assert len(await scene.active("red")) == 1
        assert up.up.fleets == ("red",)

    in_scene(live)


def test_unconfigured_fleet_put_back_in_time_keeps_its_workers() -> None:
    async def live(scene: Scene) -> None:
        up = await without_blue(scene)
        before = await scene.active("blue")
        up.up.reconfigure({**scene.fleets, "blue": config("blue")})
        await asyncio.sleep(GRACE_S + 2 * CHECK_INTERVAL_S)
        assert await scene.active("blue") == before

    in_scene(live)


def test_unconfigured_fleet_without_stored_settings_is_logged() -> None:
    async def live(scene: Scene) -> None:
        with capture_logs() as lines:
            await without_blue(scene)
            scene.store.tables.cycles.rows.clear()
            await asyncio.sleep(GRACE_S / 2 + 3 * CHECK_INTERVAL_S)
        assert len(await scene.active("blue")) == 1
        logged = [line for line in lines if line["event"].startswith("shut down unconfigured fleet failed")]
        assert [line["fleet"] for line in logged] == ["blue"]

    in_scene(live)


@pytest.mark.parametrize("read", ["workers", "cycle"])
def test_unreadable_unconfigured_fleet_is_retried(read: str) -> None:
    """For example a cycle stored by a version with other settings."""

    async def live(scene: Scene) -> None:
        with capture_logs() as lines:
            await without_blue(scene)
            readable = getattr(scene.store, read)

            async def unreadable(*_: object) -> Any:
                raise ValueError("a setting of another version")

            setattr(scene.store, read, unreadable)
            await asyncio.sleep(GRACE_S / 2 + 3 * CHECK_INTERVAL_S)
            assert scene.clouds["blue"].billed_machines() != []
            setattr(scene.store, read, readable)
            await asyncio.sleep(GRACE_S + 2 * CHECK_INTERVAL_S + SOON_S)
        assert scene.clouds["blue"].billed_machines() == []
        assert any(line["log_level"] == "error" and ("exc_info" in line or "ValueError" in str(line)) for line in lines)

    in_scene(live)


async def without_any(scene: Scene) -> Running:
    """Restart, after a stop that kept the workers, with a configuration without fleets."""
    up = scene.start()
    await asyncio.sleep(SOON_S)
    up.up.stop(keeps_workers=True)
    await up.ends_within(10.0)
    scene.fleets = {}
    again = scene.start(stops_when_empty=True)
    await asyncio.sleep(TTL_S + GRACE_S / 2)
    assert len(await scene.active("red")) == len(await scene.active("blue")) == 1, (
        "the operator has time to notice a wrong file"
    )
    return again


def test_without_fleets_it_shuts_down_the_unconfigured_and_ends() -> None:
    async def live(scene: Scene) -> None:
        up = await without_any(scene)
        await up.ends_within(GRACE_S / 2 + 4 * CHECK_INTERVAL_S)
        assert await scene.workers() == []
        assert [cloud.billed_machines() for cloud in scene.clouds.values()] == [[], []]
        assert [cloud.closed for cloud in scene.clouds.values()] == [2, 2]

    in_scene(live)


def test_without_fleets_a_reload_in_time_keeps_the_workers() -> None:
    async def live(scene: Scene) -> None:
        up = await without_any(scene)
        before = await scene.active("blue")
        up.up.reconfigure({"blue": config("blue"), "red": config("red")})
        await asyncio.sleep(GRACE_S + 4 * CHECK_INTERVAL_S)
        assert await scene.active("blue") == before
        assert not up.task.done()
        up.up.stop()
        await up.ends_within(10.0)
        assert await scene.workers() == []

    in_scene(live)


def test_without_fleets_a_standby_touches_no_worker() -> None:
    async def live(scene: Scene) -> None:
        leader = scene.start()
        await asyncio.sleep(SOON_S)
        before = [(worker.id, worker.status) for worker in await scene.workers()]
        scene.fleets = {}
        standby = scene.start(stops_when_empty=True)
        await asyncio.sleep(2 * GRACE_S)
        assert [(worker.id, worker.status) for worker in await scene.workers()] == before
        standby.up.stop()
        assert await standby.ends_within(1.0) == 0.0
        assert not leader.task.done()

    in_scene(live)


def test_without_fleets_it_leaves_fleets_with_rare_cycles_alone() -> None:
    """Their orchestrator leads for a moment every ten minutes, and must find the lease free then."""

    async def live(scene: Scene) -> None:
        scene.fleets = {"red": config("red", poll_interval_s=600.0)}
        scene.start()
        await asyncio.sleep(SOON_S)
        (worker,) = await scene.workers()
        scene.fleets = {}
        scene.start(stops_when_empty=True)
        counts = count_cycles(scene)
        await asyncio.sleep(3600.0)
        assert await scene.active("red") == [worker.id]
        assert counts["red"] >= 5

    in_scene(live)


@pytest.mark.parametrize("every_s", [300.0, 900.0])
@pytest.mark.parametrize("begins_s", [0.0, 7.0, 14.0])
def test_without_fleets_it_never_blocks_cycles_from_cron(begins_s: float, every_s: float) -> None:
    """Cron may run less often than the poll interval; the observed interval counts."""

    async def live(scene: Scene) -> None:
        scene.fleets = {"red": config("red", poll_interval_s=30.0)}
        for _ in range(3):  # enough to establish the interval
            await asyncio.sleep(every_s)
            assert await scene.cycle()
        await asyncio.sleep(begins_s)
        (worker,) = await scene.workers("red")
        mine, scene.fleets = scene.fleets, {}
        up = scene.start()
        scene.fleets = mine
        for _ in range(12):
            await asyncio.sleep(every_s)
            assert await scene.cycle()
        assert await scene.active("red") == [worker.id]
        up.up.stop()
        await up.ends_within(1.0)

    in_scene(live)


@pytest.mark.parametrize("away_s", [0.0, 2 * GRACE_S])
def test_without_fleets_each_absence_of_the_leader_gets_full_grace(away_s: float) -> None:
    """Also after a database outage, during which no cycle could run."""

    async def live(scene: Scene) -> None:
        lead, is_away = scene.store.acquire_lease, False

        async def lead_if_there(candidate: Candidate) -> Any:
            if is_away:
                raise DatabaseUnavailable("away")
            return await lead(candidate)

        scene.store.acquire_lease = lead_if_there  # type: ignore[method-assign]
        fleets = scene.fleets
        leader = scene.start()
        await asyncio.sleep(SOON_S)
        before = [(worker.id, worker.status) for worker in await scene.workers()]
        scene.fleets = {}
        scene.start()
        scene.fleets = fleets
        for without_database_s in (0.0, away_s, away_s):
            await asyncio.sleep(3600.0)
            leader.up.stop(keeps_workers=True)
            await leader.ends_within(10.0)
            is_away = without_database_s > 0
            await asyncio.sleep(without_database_s)
            is_away = False
            await asyncio.sleep(GRACE_S / 2)
            leader = scene.start()
            await asyncio.sleep(SOON_S)
            assert [(worker.id, worker.status) for worker in await scene.workers()] == before

    in_scene(live)


def test_with_fleets_each_absence_of_others_gets_full_grace() -> None:
    """Two hosts with different configurations, one of which runs its cycles from cron."""

    async def live(scene: Scene) -> None:
        red, blue = {"red": config("red", poll_interval_s=600.0)}, {"blue": config("blue")}
        scene.fleets = red
        up = scene.start()
        await asyncio.sleep(TTL_S + SOON_S)
        scene.fleets = blue
        ran = 0
        for _ in range(36):
            ran += await scene.cycle()
            await asyncio.sleep(280.0)
        assert ran > 30, "its lease runs out between its own cycles"
        assert len(await scene.active("blue")) == 1
        assert up.up.fleets == ("red",)

    in_scene(live)


def test_without_fleets_it_holds_the_caretaker_lease_until_stopped() -> None:
    """So no alert says that there is no leader, and no process waits for the lease of one without fleets."""

    async def live(scene: Scene) -> None:
        up = await without_any(scene)
        for _ in range(40):
            assert all(fleet.is_led for fleet in await scene.store.fleets())
            await asyncio.sleep(TTL_S / 10)
        up.up.stop()
        assert await up.ends_within(1.0) == 0.0
        assert not any(fleet.is_led for fleet in await scene.store.fleets())
        assert len(await scene.workers()) == 2

    in_scene(live)


def test_without_fleets_it_stays_while_a_fleet_cannot_be_shut_down() -> None:
    async def live(scene: Scene) -> None:
        with capture_logs() as lines:
            up = await without_any(scene)
            rows = scene.store.tables.cycles.rows
            for row_id in [row_id for row_id, row in rows.items() if row.cycle.fleet == "blue"]:
                del rows[row_id]
            await asyncio.sleep(GRACE_S / 2 + 5 * CHECK_INTERVAL_S)
        assert await scene.workers("red") == []
        assert len(await scene.active("blue")) == 1
        assert not up.task.done()
        logged = [line for line in lines if line["event"].startswith("shut down unconfigured fleet failed")]
        assert [line["fleet"] for line in logged] == ["blue"]

    in_scene(live)


async def without_workers(scene: Scene) -> None:
    """Two fleets without workers ran until a stop; one of them stays in the configuration."""
    scene.fleets = {name: config(name, min_workers=0) for name in scene.fleets}
    up = scene.start()
    await asyncio.sleep(SOON_S)
    up.up.stop(keeps_workers=True)
    await up.ends_within(10.0)
    assert (await scene.workers(), await scene.unfinished()) == ([], ["blue", "red"])
    scene.fleets = {"red": scene.fleets["red"]}
    await asyncio.sleep(3600.0)


def test_unconfigured_fleet_without_workers_is_shut_down() -> None:
    """Otherwise its alerts would never resolve."""

    async def live(scene: Scene) -> None:
        await without_workers(scene)
        up = scene.start()
        await asyncio.sleep(GRACE_S)
        assert await scene.unfinished() == ["blue", "red"], "the operator has time to notice a wrong file"
        counts = count_cycles(scene)
        await asyncio.sleep(2 * CHECK_INTERVAL_S)
        assert await scene.unfinished() == ["red"]
        assert up.up.fleets == ("red",)
        assert counts["blue"] == 1
        await asyncio.sleep(LONG_S)
        assert counts["blue"] == 1, "a fleet that is shut down is left alone"

    in_scene(live)


def test_without_fleets_it_shuts_down_a_fleet_without_workers() -> None:
    async def live(scene: Scene) -> None:
        await without_workers(scene)
        scene.fleets = {}
        up = scene.start(stops_when_empty=True)
        assert await up.ends_within(GRACE_S + 2 * CHECK_INTERVAL_S) >= GRACE_S
        assert await scene.unfinished() == []

    in_scene(live)


@pytest.mark.parametrize("stops_when_empty", [False, True])
def test_blocked_shutdown_is_logged_once_an_hour(stops_when_empty: bool) -> None:
    """For example because its API key is gone. If nothing else is left to do, the orchestrator ends."""

    async def live(scene: Scene) -> None:
        await without_workers(scene)
        scene.fleets = {} if stops_when_empty else scene.fleets
        del scene.clouds["blue"]
        with capture_logs() as lines:
            up = scene.start(stops_when_empty=stops_when_empty)
            await asyncio.sleep(GRACE_S + 2 * 3600.0)
        logged = [line["fleet"] for line in lines if line["event"].startswith("shut down unconfigured fleet failed")]
        assert logged == (["blue"] if stops_when_empty else ["blue", "blue"])
        assert up.task.done() == stops_when_empty
        assert "blue" in await scene.unfinished()

    in_scene(live)


def test_fleets_of_other_orchestrators_are_left_alone() -> None:
    async def live(scene: Scene) -> None:
        await scene.store.register(Registration("by-hand", ("green",), fleet="green", lease_s=LONG_S))
        scene.fleets = {"blue": config("blue", min_workers=0, poll_interval_s=30.0)}
        assert await scene.cycle()
        mine, scene.fleets = scene.fleets, {}
        with capture_logs() as lines:
            up = scene.start()
            scene.fleets = mine
            for _ in range(36):
                await asyncio.sleep(300.0)
                assert await scene.cycle()
                assert await scene.unfinished() == ["blue"]
        assert up.up.fleets == ()
        assert not [line for line in lines if line["event"] == "shut down unconfigured fleet"]
        assert [worker.status for worker in await scene.workers("green")] == [WorkerStatus.ACTIVE]

    in_scene(live)


def test_without_managed_fleets_it_runs_until_stopped() -> None:
    """For example if all fleets are Ray clusters of others: alerts and the server keep running."""

    async def live(scene: Scene) -> None:
        scene.fleets = {}
        up = scene.start()
        await asyncio.sleep(LONG_S)
        assert not up.task.done()
        up.up.reconfigure({"red": config("red")})
        await asyncio.sleep(SOON_S)
        assert len(await scene.active("red")) == 1
        up.up.reconfigure({})
        await asyncio.sleep(10 * CHECK_INTERVAL_S)
        assert await scene.workers() == []
        assert not up.task.done()
        up.up.stop()
        assert await up.ends_within(1.0) == 0.0

    in_scene(live)


def test_failed_reload_closes_what_it_made() -> None:
    async def live(scene: Scene) -> None:
        up = scene.start()
        await asyncio.sleep(SOON_S)
        made = scene.clouds["green"] = scene._make_cloud("red")
        with pytest.raises(KeyError):
            up.up.reconfigure({**scene.fleets, "green": config("green"), "grey": config("grey")})
        await asyncio.sleep(1)
        assert (up.up.fleets, made.closed) == (("red", "blue"), 1)

    in_scene(live)


def test_shutdown_deletes_orphaned_machines() -> None:
    async def live(scene: Scene) -> None:
        red = scene.clouds["red"]
        red.max_list_age_s = 10.0
        up = scene.start()
        await asyncio.sleep(SOON_S)
        red.machines["m9-red"] = MachineRecord("m9-red", "red-9-nobody", "red", 9, asyncio.get_running_loop().time())
        up.up.stop()
        await up.ends_within(STOP_S + SHUTDOWN_MARGIN_S)
        assert red.billed_machines() == []

    in_scene(live)


def test_second_stop_ends_now() -> None:
    async def live(scene: Scene) -> None:
        up = scene.start()
        await asyncio.sleep(SOON_S)
        for cloud in scene.clouds.values():
            cloud.next_delete(never_answers=True, takes_effect=False)
        up.up.stop()
        await asyncio.sleep(3.0)
        assert not up.task.done()
        up.up.stop()
        assert await up.ends_within(1.0) == 0.0
        assert len(await scene.workers()) == 2

    in_scene(live)


def test_stop_that_keeps_workers_bounds_the_wait_for_calls() -> None:
    async def live(scene: Scene) -> None:
        for cloud in scene.clouds.values():
            cloud.next_create(duration_s=50.0)
        up = scene.start()
        await asyncio.sleep(1.0)
        up.up.stop(keeps_workers=True)
        await up.ends_within(25.0)

    in_scene(live)


def test_manual_worker_does_not_delay_shutdown() -> None:
    async def live(scene: Scene) -> None:
        up = scene.start()
        await scene.store.register(Registration("by-hand", ("red",), fleet="red", lease_s=LONG_S))
        await asyncio.sleep(SOON_S)
        up.up.stop()
        await up.ends_within(10.0)
        assert [(worker.id, worker.status) for worker in await scene.workers()] == [("by-hand", WorkerStatus.ACTIVE)]

    in_scene(live)


def test_manual_worker_does_not_keep_an_idle_fleet_from_waking() -> None:
    """A task wakes a fleet without managed workers at once."""

    async def live(scene: Scene) -> None:
        scene.fleets["red"] = config("red", min_workers=0, poll_interval_s=600.0)
        await scene.store.register(Registration("by-hand", ("else",), fleet="red", lease_s=LONG_S))
        scene.start()
        await asyncio.sleep(SOON_S)
        await scene.store.enqueue(NewTask("red"))
        await asyncio.sleep(3.0)
        assert len(await scene.workers("red")) == 2

    in_scene(live)


def count_cycles(scene: Scene) -> Counter[str]:
    """Cycles of each fleet, from now on."""
    counts: Counter[str] = Counter()
    for name, cloud in scene.clouds.items():
        original = cloud.list_machines

        async def listed(name: str = name, original: Any = original) -> Any:
            counts[name] += 1
            return await original()

        cloud.list_machines = listed  # type: ignore[method-assign]
    return counts


def test_task_wakes_only_the_idle_fleet_of_its_queue() -> None:
    """With a store that notifies of each task, and with one that can only wait a second."""

    async def live(scene: Scene) -> None:
        scene.fleets["red"] = config("red", poll_interval_s=600.0)
        scene.fleets["blue"] = config("blue", min_workers=0, poll_interval_s=600.0)
        wait = scene.store.wait_for_work
        scene.start()
        await asyncio.sleep(SOON_S)
        counts = count_cycles(scene)
        for _ in range(40):
            await scene.store.enqueue(NewTask("red"))
            await asyncio.sleep(0.5)
        assert counts == {}

        async def wait_like_a_pooler(_queues: Sequence[str], timeout_s: float) -> None:
            await asyncio.sleep(min(1.0, timeout_s))

        scene.store.wait_for_work = wait_like_a_pooler  # type: ignore[method-assign]
        await wait(("red", "blue"), 60.0)  # until the one under way has ended
        await asyncio.sleep(60.0)
        assert counts == {}
        await scene.store.enqueue(NewTask("blue"))
        await asyncio.sleep(5.0)
        assert len(await scene.workers("blue")) == 1
        assert set(counts) == {"blue"}

    in_scene(live)


def test_fleet_that_may_not_spawn_is_woken_once() -> None:
    async def live(scene: Scene) -> None:
        scene.fleets = {"red": config("red", min_workers=0, poll_interval_s=600.0)}
        scene.start()
        await asyncio.sleep(SOON_S)
        await scene.store.pause_fleet("red", True)
        counts = count_cycles(scene)
        for _ in range(40):
            await scene.store.enqueue(NewTask("red"))
            await asyncio.sleep(0.5)
        assert counts == {"red": 1}

    in_scene(live)


def test_reload_keeps_the_old_provider_until_its_calls_end() -> None:
    async def live(scene: Scene) -> None:
        scene.fleets = {"red": config("red", max_workers=1)}
        scene.clouds["red"].next_create(duration_s=30.0)
        old = scene.clouds["red"]
        up = scene.start()
        await asyncio.sleep(1.0)
        # The same account as another object, as after a change of the fleet's table.
        scene.clouds["red"] = new = scene._make_cloud("red")
        new.machines, new.workers = old.machines, old.workers
        up.up.reconfigure({"red": config("red", max_workers=1, idle_timeout_s=99.0)})
        await asyncio.sleep(SOON_S)
        assert (old.create_calls, new.create_calls, old.closed) == (1, 0, 0)
        await asyncio.sleep(30.0)
        assert (old.closed, new.closed) == (1, 0)
        assert len(await scene.active("red")) == 1
        up.up.stop()
        await up.ends_within(10.0)
        assert (old.closed, new.closed, new.create_calls) == (1, 1, 0)

    in_scene(live)


def test_cycle_uses_one_provider_from_start_to_end() -> None:
    """Otherwise it would call one provider for decisions about the machines of another."""

    async def live(scene: Scene) -> None:
        scene.fleets = {"red": config("red", max_workers=1)}
        old = scene.clouds["red"]
        old.next_list(duration_s=3.0)
        up = scene.start()
        await asyncio.sleep(1.0)
        scene.clouds["red"] = new = scene._make_cloud("red")
        new.machines, new.workers = old.machines, old.workers
        changed = config("red", max_workers=1, idle_timeout_s=99.0)
        up.up.reconfigure({"red": changed})
        assert up.up.fleet("red") == changed
        await asyncio.sleep(SOON_S)
        assert (old.create_calls, new.create_calls, old.closed) == (1, 0, 1)
        assert new.list_calls > 0

    in_scene(live)


def test_failed_reload_changes_no_fleet() -> None:
    async def live(scene: Scene) -> None:
        up = scene.start()
        await asyncio.sleep(SOON_S)
        changed = {"red": config("red", max_workers=1), "green": config("green")}
        with pytest.raises(KeyError, match="green"):
            up.up.reconfigure(changed)
        assert {name: up.up.fleet(name) for name in up.up.fleets} == scene.fleets
        await asyncio.sleep(SOON_S)
        assert len(await scene.active("blue")) == 1, "removed, but not shut down"

    in_scene(live)


def test_retention_continues_after_errors() -> None:
    async def live(scene: Scene) -> None:
        problems = [ValueError("timestamp out of range"), DatabaseUnavailable("away")]
        calls = 0

        async def sweep(**_: Any) -> Any:
            nonlocal calls
            calls += 1
            if problems:
                raise problems.pop(0)

        scene.store.sweep = sweep  # type: ignore[method-assign]
        with capture_logs() as lines:
            scene.start()
            await asyncio.sleep(4.5 * SWEEP_INTERVAL_S)
        assert calls == 4
        assert [line["log_level"] for line in lines if line["event"] == "apply retention failed"] == ["error"]

    in_scene(live)


def test_reload_while_stopping_is_refused() -> None:
    async def live(scene: Scene) -> None:
        up = scene.start()
        await asyncio.sleep(SOON_S)
        up.up.stop()
        for _ in range(2):
            with pytest.raises(WindlassError, match="orchestrator is stopping"):
                up.up.reconfigure(scene.fleets)
            await up.ends_within(10.0)
        with suppress(asyncio.CancelledError):
            await up.task
        assert await scene.workers() == []

    in_scene(live)
