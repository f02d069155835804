"""One scripted provider fault per test. No other fault occurs."""

import asyncio
from typing import Any

import pytest

from support.scripted_simulation import LATE_S, LIST_AGE_S, SLOT_FREED_S, TTL_S, fault_free_simulation, red, script
from support.simulator.cloud import MachineRecord
from support.simulator.orchestrators import SimulatedOrchestrator
from windlass.control.cycle import LIST_SHARE
from windlass.control.executor import CALL_TIMEOUT_S
from windlass.model.errors import (
    Denied,
    InvalidRequest,
    LimitReached,
    NoCapacity,
    Refused,
    Throttled,
    Unavailable,
)
from windlass.model.machine import Machine, MachineRequest

# --------------------------------------------------------------------------------------------------------------- create


@pytest.mark.parametrize(
    "outcome",
    [
        {"times_out_after_taking_effect": True},
        {"takes_effect_late_s": LATE_S},
        {"never_answers": True},
        {"duration_s": CALL_TIMEOUT_S + 5.0},
    ],
    ids=lambda outcome: next(iter(outcome)),
)
def test_create_without_answer_is_not_repeated(outcome: dict[str, Any]) -> None:
    simulation = fault_free_simulation(max_workers=1, min_workers=1, spawn_timeout_s=150.0)
    script(simulation, (0, lambda: red(simulation).next_create(**outcome)))
    simulation.run()
    assert len(red(simulation).machines) == 1


def test_slot_of_ambiguous_create_without_machine_is_freed() -> None:
    simulation = fault_free_simulation(max_workers=1)
    script(simulation, (0, lambda: red(simulation).next_create(fails_without_effect=True)))
    simulation.run()
    (machine,) = red(simulation).machines.values()
    assert SLOT_FREED_S < machine.created_at < SLOT_FREED_S + 20.0


@pytest.mark.parametrize("step_s", [120.0, 3600.0])
@pytest.mark.parametrize("is_restarted", [False, True], ids=["same leader", "new leader"])
def test_clock_set_forward_during_a_creation_keeps_its_slot(step_s: float, is_restarted: bool) -> None:
    """Otherwise a second machine takes the slot, and then the first one appears too."""
    simulation = fault_free_simulation(max_workers=1, min_workers=1, ttl_s=5.0)

    def step() -> None:
        simulation.clock_offset_s += step_s
        simulation.checker.on_clock_step(step_s)
        if is_restarted:
            simulation.orchestrators[0].kill()
            simulation.orchestrators[0].start()

    # The call times out, and the machine appears later.
    creation = {"duration_s": 1.0, "takes_effect_late_s": LATE_S}
    script(simulation, (0, lambda: red(simulation).next_create(**creation)), (15.0, step))
    simulation.run()
    assert simulation.checker.most_billed == {"red": 1}
    first, *_ = red(simulation).machines.values()
    assert first.created_at == pytest.approx(LATE_S + 1.0, abs=1.0)


@pytest.mark.parametrize(
    "problem", [Refused("limit"), NoCapacity("none left")], ids=lambda problem: type(problem).__name__
)
def test_refused_create_is_retried_in_next_cycle(problem: Exception) -> None:
    simulation = fault_free_simulation(max_workers=1)
    script(simulation, (0, lambda: red(simulation).next_create(raises=problem)))
    simulation.run()
    (machine,) = red(simulation).machines.values()
    assert machine.created_at < 15.0


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (Refused("no"), "REFUSED"),
        (LimitReached("no more"), "LIMIT_REACHED"),
        (InvalidRequest("not so"), "INVALID_REQUEST"),
        (Denied("who are you"), "DENIED"),
        (NoCapacity("none left"), "NO_CAPACITY"),
        (Throttled("too many requests", retry_after_s=5.0), "THROTTLED"),
    ],
    ids=str,
)
def test_event_of_refused_create_has_error_code(problem: Exception, code: str) -> None:
    simulation = fault_free_simulation(max_workers=1, lasts_s=900.0)
    script(simulation, (0, lambda: red(simulation).next_create(raises=problem)))
    simulation.run()
    refusals = [event.detail for event in simulation.store.tables.event_log.events if event.code == "MACHINE_REFUSED"]
    assert {"code": code} in refusals
    assert {detail["code"] for detail in refusals if detail} <= {code, "LEASE_LOST"}


def test_throttled_create_waits_for_retry_after() -> None:
    simulation = fault_free_simulation(max_workers=1)
    script(
        simulation, (0, lambda: red(simulation).next_create(raises=Throttled("too many requests", retry_after_s=60.0)))
    )
    simulation.run()
    (machine,) = red(simulation).machines.values()
    assert 60.0 < machine.created_at < 75.0
    assert red(simulation).create_calls == 2


def test_throttled_create_does_not_delay_deletion() -> None:
    """Deletions have their own rate limit: a machine that stays is billed."""
    simulation = fault_free_simulation(max_workers=2, arrivals=((1.0, 2),))

    def refuse_the_second() -> None:
        red(simulation).next_create()
        red(simulation).next_create(raises=Throttled("too many requests", retry_after_s=200.0))

    script(simulation, (0, refuse_the_second))
    simulation.run()
    (machine,) = red(simulation).machines.values()
    assert machine.deleted_at < 150.0


def test_long_throttling_stops_spawning_and_fires_alert() -> None:
    simulation = fault_free_simulation(max_workers=1, lasts_s=1800.0)
    script(
        simulation,
        (0, lambda: red(simulation).next_create(raises=Throttled("too many requests", retry_after_s=1200.0))),
    )
    simulation.run()
    (machine,) = red(simulation).machines.values()
    assert 1200.0 < machine.created_at < 1520.0
    assert red(simulation).create_calls == 2
    assert "PROVIDER_PAUSE" in {
        event.detail["code"] for event in simulation.store.tables.event_log.events if event.code == "ALERT"
    }


def test_throttled_delete_is_retried_after_five_minutes() -> None:
    simulation = fault_free_simulation(max_workers=1, lasts_s=900.0)
    refusal = Throttled("too many requests", retry_after_s=7200.0)
    script(simulation, (0, lambda: red(simulation).next_delete(raises=refusal, takes_effect=False)))
    simulation.run()
    (machine,) = red(simulation).machines.values()
    assert 300.0 < machine.deleted_at < 600.0


def test_adapter_bug_counts_as_ambiguous_create() -> None:
    simulation = fault_free_simulation(max_workers=2)
    script(simulation, (0, lambda: red(simulation).next_create(raises=KeyError("bug"))))
    simulation.run()
    began = sorted(machine.created_at for machine in red(simulation).machines.values())
    assert began[0] < 10.0
    assert len(began) == 1 or began[1] > SLOT_FREED_S


def test_duplicate_machine_is_deleted() -> None:
    simulation = fault_free_simulation(max_workers=1, min_workers=1)
    script(simulation, (0, lambda: red(simulation).next_create(creates_duplicate=True)))
    simulation.run()
    first, double = red(simulation).machines.values()
    assert first.name == double.name
    assert double.deleted_at - double.created_at < 30.0
    assert red(simulation).remaining_machine_ids == [first.id]


def test_orphaned_machine_is_deleted_after_grace() -> None:
    simulation = fault_free_simulation(max_workers=1)

    def add_orphan() -> None:
        red(simulation).machines["orphan"] = MachineRecord("orphan", "red-0-formerly", "red", 0, 0.0, running_at=0.0)

    script(simulation, (0, add_orphan))
    simulation.run()
    orphan = red(simulation).machines["orphan"]
    assert LIST_AGE_S <= orphan.deleted_at < LIST_AGE_S + 15.0
    # The orphaned machine counted towards max_workers while it was billed.
    (other,) = (machine for machine in red(simulation).machines.values() if machine.id != "orphan")
    assert other.created_at >= orphan.deleted_at


def test_create_of_former_leader_does_not_exceed_max_workers() -> None:
    # The call is in flight when another orchestrator takes over, and takes effect just before its timeout.
    simulation = fault_free_simulation(max_workers=1, orchestrators=2, spawn_timeout_s=150.0)
    script(
        simulation,
        (0, lambda: red(simulation).next_create(duration_s=CALL_TIMEOUT_S - 1.0)),
        (5.0, lambda: next(o for o in simulation.orchestrators if o.process.name == simulation.checker.leader).kill()),
    )
    simulation.run()
    assert len(red(simulation).machines) == 1
    assert simulation.checker.takeovers == 2


def test_create_is_not_begun_when_its_row_is_about_to_expire() -> None:
    """Sixteen concurrent calls of 50 s: the last of 40 would begin when its row is about to expire."""
    simulation = fault_free_simulation(
        max_workers=40, min_workers=40, max_changes_per_cycle=40, spawn_timeout_s=200.0, lasts_s=600.0, arrivals=()
    )

    def slow_down() -> None:
        for _ in range(200):
            red(simulation).next_create(duration_s=50.0)

    async def check_not_begun() -> None:
        codes = {worker.code for worker in await simulation.store.workers(include_terminated=True)}
        assert "NOT_BEGUN" in codes
        assert len(red(simulation).billed_machines()) == 40
        red(simulation).clear_scripts()

    script(simulation, (0, slow_down), (599.0, check_not_begun))
    assert simulation.run().most_billed == {"red": 40}


class FreezeAfterCommit:
    """Freezes the leader for three leases after it commits its first spawn, and records every create call."""

    def __init__(self) -> None:
        self.decided: set[str] = set()
        self.created: list[str] = []

    def wrap_service(self, orchestrator: SimulatedOrchestrator, service: Any) -> Any:
        return _FreezingService(self, orchestrator, service)


class _FreezingService:
    def __init__(self, outcome: FreezeAfterCommit, orchestrator: SimulatedOrchestrator, service: Any) -> None:
        self._freeze = outcome
        self._make_orchestrator = orchestrator
        self._service = service

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    async def commit_plan(self, *arguments: Any) -> Any:
        committed = await self._service.commit_plan(*arguments)
        if committed.granted and not self._freeze.decided:
            self._freeze.decided = set(committed.granted)
            process = self._make_orchestrator.process
            assert process is not None
            process.freeze()
            asyncio.get_running_loop().call_later(3 * TTL_S, process.thaw)
            await process.checkpoint()
        return committed

    async def create(self, request: MachineRequest) -> Machine:
        self._freeze.created.append(request.name)
        machine: Machine = await self._service.create(request)
        return machine


def test_leader_frozen_after_commit_creates_nothing_when_thawed() -> None:
    outcome = FreezeAfterCommit()
    simulation = fault_free_simulation(max_workers=2, orchestrators=2)
    simulation.wrap_service = outcome.wrap_service

    async def check_codes() -> None:
        rows = {worker.id: worker for worker in await simulation.store.workers(include_terminated=True)}
        assert {rows[id_].code for id_ in outcome.decided} == {"LEASE_LOST"}

    script(simulation, (250.0, check_codes))
    simulation.run()
    assert len(outcome.decided) == 2
    assert outcome.created
    assert not outcome.decided & set(outcome.created)
    assert simulation.checker.takeovers >= 2


# --------------------------------------------------------------------------------------------------------------- delete


@pytest.mark.parametrize(
    "outcome",
    [
        {"raises": Unavailable("503")},
        {"raises": Unavailable("503"), "takes_effect": False},
        {"raises": KeyError("bug"), "takes_effect": False},
        {"never_answers": True},
        {"never_answers": True, "takes_effect": False},
        {"duration_s": CALL_TIMEOUT_S + 10.0},
        {"answer_delay_s": CALL_TIMEOUT_S + 10.0},
    ],
    ids=lambda outcome: ", ".join(outcome),
)
def test_failed_delete_is_retried(outcome: dict[str, Any]) -> None:
    simulation = fault_free_simulation(max_workers=1)
    script(simulation, (0, lambda: red(simulation).next_delete(**outcome)))
    simulation.run()
    assert red(simulation).remaining_machine_ids == []


def test_slow_delete_does_not_delay_other_workers() -> None:
    """During a slow deletion, another worker is spawned, promoted and works, and the leader keeps its lease."""
    simulation = fault_free_simulation(max_workers=2, arrivals=((1.0, 1), (70.0, 1)), lasts_s=200.0)

    def slow_down_delete() -> None:
        red(simulation).next_delete(duration_s=CALL_TIMEOUT_S - 5.0)

    script(simulation, (0, slow_down_delete))
    simulation.run()
    first, second = red(simulation).machines.values()
    assert first.deleted_at - second.created_at > 20.0
    assert second.created_at < 80.0
    assert all(len(task.claims) == 1 for task in simulation.checker.tasks.values())
    assert red(simulation).delete_calls == 2
    assert simulation.checker.longest_leaderless_s <= 0.0


def test_machine_that_cannot_be_deleted_keeps_its_slot() -> None:
    simulation = fault_free_simulation(max_workers=1, arrivals=((1.0, 1), (100.0, 1)), lasts_s=200.0)

    def deny() -> None:
        for _ in range(8):
            red(simulation).next_delete(raises=Refused("denied"), takes_effect=False)

    script(simulation, (0, deny))
    simulation.run()
    first, second = red(simulation).machines.values()
    assert second.created_at >= first.deleted_at
    assert red(simulation).delete_calls >= 8


# ----------------------------------------------------------------------------------------------------------------- list


@pytest.mark.parametrize(
    "outcome", [{"raises": Unavailable("503")}, {"raises": KeyError("bug")}, {"never_answers": True}], ids=str
)
def test_failed_lists_delete_nothing(outcome: dict[str, Any]) -> None:
    """Unknown is not absent: after ten minutes without a list, no machine is deleted and all workers work."""
    simulation = fault_free_simulation(
        max_workers=2, min_workers=2, arrivals=tuple((10.0 * n, 1) for n in range(1, 55)), lasts_s=700.0
    )

    def fail_lists() -> None:
        for _ in range(400):
            red(simulation).next_list(**outcome)

    def stop_failing() -> None:
        red(simulation).clear_scripts()

    script(simulation, (30.0, fail_lists), (650.0, stop_failing))
    simulation.run()
    assert len(red(simulation).machines) == 2
    assert red(simulation).delete_calls == 0
    assert len(simulation.checker.tasks) == 54


def test_stale_list_deletes_nothing() -> None:
    simulation = fault_free_simulation(max_workers=2, min_workers=2, lasts_s=100.0)

    def return_stale_lists() -> None:
        for _ in range(60):
            red(simulation).next_list(stale_by_s=LIST_AGE_S)

    script(simulation, (0, return_stale_lists))
    simulation.run()
    assert len(red(simulation).machines) == 2


def test_machine_created_during_list_of_new_leader_is_not_missing() -> None:
    """The new leader requested its list before the machine of the former leader was recorded."""
    simulation = fault_free_simulation(
        is_cloud=False, max_workers=1, min_workers=1, orchestrators=2, ttl_s=5.0, task_s=(50.0, 60.0)
    )

    def slow_down() -> None:
        red(simulation).next_list()
        red(simulation).next_create(duration_s=8.0)
        red(simulation).next_list(duration_s=4.5)

    script(simulation, (0, slow_down))
    simulation.run()
    assert len(red(simulation).machines) == 1


def test_slow_list_does_not_prove_newer_machine_absent() -> None:
    """The list was requested before a delayed machine was created, and answered after."""
    simulation = fault_free_simulation(max_workers=1, min_workers=1, spawn_timeout_s=200.0)
    script(
        simulation,
        (0, lambda: red(simulation).next_create(duration_s=CALL_TIMEOUT_S - 1.0, takes_effect_late_s=LATE_S)),
        (0, lambda: simulation.next_worker(boots_s=60.0)),
        (85.5, lambda: red(simulation).next_list(duration_s=LIST_SHARE * TTL_S - 0.5)),
    )
    simulation.run()
    (machine,) = red(simulation).machines.values()
    assert 85.0 < machine.created_at < SLOT_FREED_S


def test_lists_slower_than_lease_do_not_stop_cycles() -> None:
    """The leader cancels the list in time to keep its lease, and plans without it."""
    simulation = fault_free_simulation(
        max_workers=2, orchestrators=2, arrivals=tuple((20.0 * n, 1) for n in range(1, 20)), lasts_s=500.0
    )

    def slow_down() -> None:
        for _ in range(400):
            red(simulation).next_list(duration_s=1.3 * TTL_S)

    def check_progress() -> None:
        assert simulation.checker.unfinished_tasks() == []
        assert simulation.checker.plans > 490 / (LIST_SHARE * TTL_S) - 5
        red(simulation).clear_scripts()

    script(simulation, (0, slow_down), (490.0, check_progress))
    simulation.run()
    assert simulation.checker.takeovers == 1
    assert "list machines failed" in simulation.trace.text(limit=None)
