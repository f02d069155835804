"""Leases: one holder, terms, renewal, release, and writes of a former holder."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from support.control_actions import (
    ANN,
    BOB,
    FLEET,
    ControlStores,
    Leader,
    VirtualClock,
    intent,
    machine,
)
from windlass.model.action import (
    Drain,
    Promote,
    RaiseAlert,
)
from windlass.model.lease import LeaseLost, Standby
from windlass.model.outcome import (
    Created,
    Deleted,
)
from windlass.model.snapshot import (
    Cadence,
    PlannerState,
)
from windlass.model.worker import WorkerStatus


async def test_first_candidate_gets_lease_and_others_its_expiry(store: ControlStores, clock: VirtualClock) -> None:
    assert await store.acquire_lease(ANN) == 1
    clock.advance(10)
    assert await store.acquire_lease(BOB) == Standby(20.0, clock(), ANN.holder)
    assert await store.observe(BOB, "f", FLEET) == Standby(20.0, clock(), ANN.holder)


async def test_renewed_lease_keeps_its_term(store: ControlStores, clock: VirtualClock) -> None:
    assert await store.acquire_lease(ANN) == 1
    clock.advance(29)
    assert await store.acquire_lease(ANN) == 1
    clock.advance(29)
    assert await store.acquire_lease(BOB) == Standby(1.0, clock(), ANN.holder)


async def test_expired_lease_goes_to_next_holder_with_new_term(store: ControlStores, clock: VirtualClock) -> None:
    assert await store.acquire_lease(ANN) == 1
    clock.advance(30)
    assert await store.acquire_lease(BOB) == 2
    assert await store.acquire_lease(ANN) == Standby(30.0, clock(), BOB.holder)
    clock.advance(30)
    assert await store.acquire_lease(ANN) == 3


async def test_released_lease_is_free_at_once(store: ControlStores) -> None:
    assert await store.acquire_lease(ANN) == 1
    await store.release_lease(BOB)
    assert isinstance(await store.acquire_lease(BOB), Standby)
    await store.release_lease(ANN)
    assert await store.acquire_lease(BOB) == 2


async def test_leases_of_different_names_are_independent(store: ControlStores) -> None:
    assert await store.acquire_lease(ANN) == 1
    assert await store.acquire_lease(replace(BOB, lease="other")) == 1


async def lose_by_time(store: ControlStores, clock: VirtualClock) -> None:
    clock.advance(30)


async def lose_to_another(store: ControlStores, clock: VirtualClock) -> None:
    clock.advance(30)
    assert await store.acquire_lease(BOB) == 2


async def lose_and_win_back(store: ControlStores, clock: VirtualClock) -> None:
    await lose_to_another(store, clock)
    clock.advance(30)
    assert await store.acquire_lease(ANN) == 3


async def lose_by_resigning(store: ControlStores, clock: VirtualClock) -> None:
    await store.release_lease(ANN)


LOSSES = [lose_by_time, lose_to_another, lose_and_win_back, lose_by_resigning]


@pytest.mark.parametrize("lose", LOSSES)
async def test_plan_without_lease_changes_nothing(
    store: ControlStores, clock: VirtualClock, ann: Leader, lose: Callable[..., Awaitable[None]]
) -> None:
    await ann.spawn_worker(0)
    await ann.observe()
    await lose(store, clock)
    before = await store.events(limit=1000), await store.workers(), await store.cycles("f"), await store.fleets()
    with pytest.raises(LeaseLost):
        await ann.commit(
            Promote("w0", "first heartbeat"),
            Drain("w0", "IDLE", "idle"),
            RaiseAlert("X", "x"),
            intents=(intent("w1", 1),),
            planner_state=PlannerState(Cadence(cycle=9)),
        )
    after = await store.events(limit=1000), await store.workers(), await store.cycles("f"), await store.fleets()
    assert after == before


@pytest.mark.parametrize("lose", LOSSES)
async def test_outcomes_are_recorded_without_lease(
    store: ControlStores, clock: VirtualClock, ann: Leader, lose: Callable[..., Awaitable[None]]
) -> None:
    await ann.spawn_worker(0, 1)
    await lose(store, clock)
    await ann.report(Created("w0", machine(1)), Deleted("w1", None, "X", "gone"))
    view = (await Leader(store, replace(ANN, lease="other")).observe()).workers
    assert [(worker.id, worker.machine_id) for worker in view] == [("w0", "m1")]
    assert (await store.worker("w1")).status is WorkerStatus.TERMINATED
