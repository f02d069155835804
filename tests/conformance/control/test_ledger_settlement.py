"""Bills, spans of tasks, settlements and reports of the ledger."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from support.control_actions import (
    FLEET,
    PARTS,
    RETENTION,
    ControlStores,
    Leader,
    VirtualClock,
    do,
    intent,
    reported,
)
from support.stores import PostgresStores
from windlass.cost.ledger import settle
from windlass.model.action import (
    Adopt,
    Fail,
    Promote,
    RecordPrice,
)
from windlass.model.cost import Bill, Span, Spending, Tariff, VolumeCost
from windlass.model.machine import Machine, MachineState, ProviderTraits, Volume
from windlass.model.outcome import (
    Created,
    Deleted,
    OrphanDeleted,
)
from windlass.model.task import Finished, NewTask
from windlass.model.worker import Registration, WorkerStatus

PRICED = Machine("m0", "w0", MachineState.RUNNING, price_micros_per_hour=3_600_000, price_parts=PARTS, currency="EUR")


async def spawn_priced(ann: Leader, clock: VirtualClock, slot: int = 0, unit_s: int = 3600, age_s: float = 0) -> None:
    await ann.observe()
    await ann.spawn_worker(slot)
    made = replace(PRICED, id=f"m{slot}", name=f"w{slot}", created_at=clock() - timedelta(seconds=age_s))
    await ann.report(Created(f"w{slot}", made, billing_unit_s=unit_s))


async def settle_all(store: ControlStores, fleet: str = "f") -> int:
    now = await store.now()
    return await store.settle([settle(account, now) for account in await store.accounts_to_settle(fleet, 100)])


async def test_costs_by_queue_add_up_to_costs_by_fleet(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await spawn_priced(ann, clock)
    await store.register(Registration("w0", ("a", "b"), fleet="f"))
    for queue, seconds in (("a", 1200), ("b", 600), ("a", 1800), ("b", 3600)):
        await do(store, clock, "w0", seconds, queue)
        clock.advance(300)
    assert await settle_all(store) == 1
    by_queue, by_fleet = await reported(store, "queue"), await reported(store, "fleet")
    assert set(by_queue) == {"a", "b", None}
    assert by_queue["a"][1:] == by_queue["b"][1:] == (0, 0, 0)
    assert [sum(parts) for parts in zip(*by_queue.values(), strict=True)] == list(by_fleet["f"])
    if isinstance(store, PostgresStores):
        async with store.database.connection("forgetting the charges themselves") as connection:
            await connection.execute("truncate windlass.charges")
        assert await reported(store, "queue") == by_queue


async def test_priced_machine_is_billed_from_its_creation(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await spawn_priced(ann, clock, age_s=7)
    await ann.spawn_worker(1)
    await ann.report(Created("w1", Machine("m1", "w1", MachineState.RUNNING)))
    priced, free = (await ann.observe()).workers
    assert priced.bill == Bill(Tariff(3_600_000, "EUR", 3600, PARTS), clock() - timedelta(seconds=7))
    assert free.bill is None


async def test_orphaned_machine_is_billed_once(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    orphan = replace(PRICED, id="m9", name="unknown", created_at=clock() - timedelta(seconds=30))
    for _ in range(2):
        await ann.report(OrphanDeleted(orphan, "orphaned", 60, clock() - timedelta(seconds=10)))
    clock.advance(60)
    await settle_all(store)
    assert await reported(store, "worker") == {"orphan-m9": (0, 20_000, 0, 40_000)}
    worker = await store.worker("orphan-m9")
    assert (worker.status, worker.code) == (WorkerStatus.TERMINATED, "ORPHAN")
    assert worker.reason == "machine of unknown: orphaned"


async def test_adopted_machine_is_billed_at_its_listed_price(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0)
    await ann.observe()
    found = replace(PRICED, created_at=clock() - timedelta(seconds=3))
    ann.snapshot = replace(ann.snapshot, machines=(found,), traits=ProviderTraits(billing_unit_s=60))
    await ann.commit(Adopt("w0", "m0", "found"))
    (view,) = (await ann.observe()).workers
    assert view.bill == Bill(Tariff(3_600_000, "EUR", 60, PARTS), clock() - timedelta(seconds=3))


async def test_price_without_currency_is_summed_separately(store: ControlStores, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.report(Created("w0", replace(PRICED, currency=None)))
    (view,) = (await ann.observe()).workers
    assert view.bill is not None
    assert view.bill.tariff.currency == "XXX"  # ISO 4217


async def test_late_price_applies_from_machine_creation(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await ann.spawn_worker(0)
    await ann.report(Created("w0", replace(PRICED, price_micros_per_hour=None)))
    born = clock()
    clock.advance(60)
    await ann.observe()
    listed = replace(PRICED, created_at=born)
    ann.snapshot = replace(ann.snapshot, machines=(listed,), traits=ProviderTraits(billing_unit_s=3600))
    await ann.commit(RecordPrice("w0", "m0", "known now"))
    (view,) = (await ann.observe()).workers
    assert view.bill == Bill(Tariff(3_600_000, "EUR", 3600, PARTS), born)
    ann.snapshot = replace(ann.snapshot, machines=(replace(listed, price_micros_per_hour=1),))
    await ann.commit(RecordPrice("w0", "m0", "dearer"))
    (again,) = (await ann.observe()).workers
    assert again.bill == view.bill, "what was agreed stays"


async def test_price_that_is_known_after_the_end_is_billed(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await ann.spawn_worker(0)
    born = clock()
    unpriced = replace(PRICED, price_micros_per_hour=None, price_parts=(), created_at=born, place="nbg1")
    await ann.report(Created("w0", replace(unpriced, instance_type="cx23"), billing_unit_s=60))
    (view,) = (await ann.observe()).workers
    assert (view.bill, view.machine_created_at, view.instance_type, view.place) == (None, born, "cx23", "nbg1")
    clock.advance(30)
    priced = replace(PRICED, created_at=born)
    await ann.report(Deleted("w0", "m0", "MACHINE_GONE", "gone", clock(), priced, billing_unit_s=60))
    clock.advance(120)
    await settle_all(store)
    assert sum((await reported(store, "worker"))["w0"]) == 60_000


async def test_volume_is_billed_at_each_size_that_it_had(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    since = clock() - timedelta(days=1)
    assert await store.volume_costs(since) == []
    for size_gb, price in ((100, 9_000), (100, 9_000), (200, 18_000), (200, 18_000)):
        await store.record_volume("f", Volume("v1", size_gb, price, "USD"))
        clock.advance(1800)
    # The last half hour was not seen yet.
    (cost,) = await store.volume_costs(since, fleet="f")
    assert cost == VolumeCost("v1", ("f",), 200, "USD", 9_000 + 9_000, 18_000)
    assert await store.volume_costs(since, fleet="other") == []
    (recent,) = await store.volume_costs(clock() - timedelta(seconds=2700))
    assert recent.amount_micros == 4_500


async def test_volume_of_two_fleets_is_billed_once(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    since, small, large = clock(), Volume("v1", 100, 9_000, "USD"), Volume("v1", 200, 18_000, "USD")
    # Fleet b sees the volume half an hour after fleet a, and its new size too.
    for fleet, volume in (("a", small), ("b", small), ("a", large), ("b", large), ("a", large)):
        await store.record_volume(fleet, volume)
        clock.advance(1800)
    await store.record_volume("c", Volume("v2", 10, 1_000, "USD"))
    # An hour at 9,000 and an hour at 18,000.
    shared, own = await store.volume_costs(since)
    assert shared == VolumeCost("v1", ("a", "b"), 200, "USD", 9_000 + 18_000, 18_000)
    assert (own.volume_id, own.fleets, own.amount_micros) == ("v2", ("c",), 0)
    assert await store.volume_costs(since, fleet="b") == [shared]
    (recent,) = await store.volume_costs(since + timedelta(minutes=90), fleet="a")
    assert recent.amount_micros == 9_000
    assert shared.month_micros == 18_000 * 24 * 30


async def test_time_without_a_fleet_of_the_volume_is_not_billed(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    since = clock()
    for fleet in ("a", "b"):
        for _ in range(2):
            await store.record_volume(fleet, Volume("v1", 100, 9_000, "USD"))
            clock.advance(3600)
    (cost,) = await store.volume_costs(since)
    assert (cost.fleets, cost.amount_micros) == (("a", "b"), 18_000)


async def test_hosts_count_lost_machines_and_failed_checks(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    ends = ("MACHINE_GONE", "GPU_NOT_DETECTED", "GPU_NOT_DETECTED", "IDLE")
    for slot, code in enumerate(ends):
        await ann.observe()
        await ann.spawn_worker(slot)
        host = "198.51.100.7" if slot < 3 else "198.51.100.8"
        machine = Machine(f"m{slot}", f"w{slot}", MachineState.RUNNING, place="EU-RO-1", host=host)
        await ann.report(Created(f"w{slot}", machine))
        await ann.observe()
        await ann.commit(Fail(f"w{slot}", code, "because"))
    bad, good = await store.machine_hosts("f")
    assert (bad.place, bad.host, bad.machines, bad.lost, bad.failed_checks) == ("EU-RO-1", "198.51.100.7", 3, 1, 2)
    assert (good.host, good.machines, good.lost, good.loss_rate) == ("198.51.100.8", 1, 0, 0.0)
    (place,) = await store.machine_places("f")
    assert (place.fleet, place.place, place.host, place.machines) == ("f", "EU-RO-1", None, 4)
    assert (place.lost, place.loss_rate, place.failed_checks) == (1, 0.25, 2)
    assert await store.machine_places("other") == []
    assert (await ann.observe()).avoided_hosts == ("198.51.100.7",)


async def test_failed_checks_of_a_host_are_forgotten_with_the_image_and_by_a_restart(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    wide = FLEET.model_copy(update={"max_workers": 5})

    async def fail_check(slot: int, code: str, host: str) -> None:
        await ann.observe(wide)
        await ann.commit(intents=(replace(intent(f"w{slot}", slot), fingerprint="bad image"),))
        place = Machine(f"m{slot}", f"w{slot}", MachineState.RUNNING, place="EU-RO-1", host=host)
        await ann.report(Created(f"w{slot}", place))
        await ann.commit(Fail(f"w{slot}", code, "because"))
        clock.advance(1)

    for slot, code in enumerate(("SSH_UNREACHABLE", "DISK_FULL", "GPU_NOT_DETECTED", "STORAGE_NOT_MOUNTED")):
        await fail_check(slot, code, "198.51.100.7" if slot < 2 else "198.51.100.8")
    assert (await ann.observe(wide)).avoided_hosts == ("198.51.100.7", "198.51.100.8")
    await ann.commit(intents=(replace(intent("w4", 4), fingerprint="good image"),))
    assert (await ann.observe(wide)).avoided_hosts == ("198.51.100.8",), "the image may have had no SSH server"
    clock.advance(1)
    await store.restart_slots("f")
    assert (await ann.observe(wide)).avoided_hosts == ()


async def test_spread_costs_of_tasks_add_up_to_the_bill(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    for slot in (0, 1):
        await spawn_priced(ann, clock, slot)
        await store.register(Registration(f"w{slot}", ("a", "b"), fleet="f"))
    for seconds in (1000, 1, 1700):
        await do(store, clock, "w0", seconds, "a")
        clock.advance(71)
    # An hour without a task.
    clock.advance(3600)
    for slot in (0, 1):
        await ann.report(Deleted(f"w{slot}", f"m{slot}", "IDLE", "done", clock()))
    clock.advance(120)
    while await settle_all(store):
        pass
    since = clock() - timedelta(days=1)
    bill = sum(cost.total_micros for cost in await store.costs("worker", since))
    spread = await store.spread_costs(since)
    assert sum(cost.total_micros for cost in spread) == bill
    tasks = [cost for cost in spread if cost.key is not None]
    assert len(tasks) == 3
    assert all(cost.boot_micros + cost.idle_micros + cost.tail_micros > 0 for cost in tasks if cost.task_micros > 1_000)
    (rest,) = [cost for cost in spread if cost.key is None]
    assert rest.task_micros == 0 and rest.total_micros < bill
    assert [cost.total_micros for cost in spread] == sorted((cost.total_micros for cost in spread), reverse=True)


async def test_billing_period_is_charged_after_worker_ends(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await spawn_priced(ann, clock)
    clock.advance(20)
    await ann.observe()
    clock.advance(20)
    await ann.observe()
    clock.advance(20)
    await ann.observe()
    await ann.commit(Promote("w0", "first heartbeat"))
    first = await do(store, clock, "w0", 100)
    second = await do(store, clock, "w0", 200, "b")
    clock.advance(40)
    await ann.observe()
    await ann.report(Deleted("w0", "m0", "IDLE", "x", clock() - timedelta(seconds=10)))
    assert len((await ann.observe()).ended_bills) == 1
    assert await settle_all(store) == 0, "what it did last may still be on its way"
    clock.advance(60)
    assert (await ann.observe()).is_settlement_due
    assert await settle_all(store) == 1
    assert await settle_all(store) == 0
    snapshot = await ann.observe()
    assert (snapshot.is_settlement_due, snapshot.ended_bills) == (False, ())
    assert snapshot.spending == (Spending("EUR", 3_600_000, 3_600_000, 3_600_000),)
    assert await reported(store, "worker") == {"w0": (300_000, 60_000, 30_000, 3_210_000)}
    assert await reported(store, "fleet") == {"f": (300_000, 60_000, 30_000, 3_210_000)}
    assert await reported(store, "day") == {"2030-01-01": (300_000, 60_000, 30_000, 3_210_000)}
    assert await reported(store, "queue") == {
        "a": (100_000, 0, 0, 0), "b": (200_000, 0, 0, 0), None: (0, 60_000, 30_000, 3_210_000),
    }  # fmt: skip
    assert list(await reported(store, "task")) == [None, str(second), str(first)]
    (charge,) = await store.charges_of_task(second)
    assert (charge.worker_id, charge.queue, charge.amount_micros) == ("w0", "b", 200_000)
    assert await store.open_accounts() == []


async def test_live_worker_is_charged_every_hour(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await spawn_priced(ann, clock)
    await ann.commit(Promote("w0", "first heartbeat"))
    task_id = await store.enqueue(NewTask("a"))
    (claim,) = await store.claim("w0", ("a",), 1)
    clock.advance(3600)
    assert not (await ann.observe()).is_settlement_due
    clock.advance(60)
    assert (await ann.observe()).is_settlement_due
    assert await settle_all(store) == 1
    assert await reported(store, "task") == {str(task_id): (3_600_000, 0, 0, 0)}
    (view,) = (await ann.observe()).workers
    assert view.bill is not None
    assert view.bill.settled_until == view.bill.since + timedelta(hours=1)
    clock.advance(1740)
    await store.finish_and_claim("w0", [Finished(task_id, claim.token, None)], (), 0)
    clock.advance(1860)
    await settle_all(store)
    assert await reported(store, "worker") == {"w0": (5_400_000, 0, 1_800_000, 0)}
    assert [charge.amount_micros for charge in await store.charges_of_task(task_id)] == [3_600_000, 1_800_000]
    assert (await ann.observe()).spending == (Spending("EUR", 0, 7_200_000, 7_200_000),)


async def test_charges_of_later_hours_use_no_budget_of_the_current_one(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    clock.advance(2 * 3600)
    await spawn_priced(ann, clock)
    clock.advance(3660)
    await ann.observe()
    assert await settle_all(store) == 1
    clock.advance(-3660)
    assert (await ann.observe()).spending == (Spending("EUR", 3_600_000, 3_600_000, 3_600_000),)
    clock.advance(-3600)
    assert (await ann.observe()).spending == (), "the clock was set back to before the charged hour"


async def test_monthly_cap_makes_rest_of_month_free(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await spawn_priced(ann, clock)
    clock.advance(5 * 3600)
    await ann.observe()
    await ann.report(Deleted("w0", "m0", "X", "x"))
    clock.advance(60)
    await settle_all(store)
    assert await reported(store, "fleet") == {"f": (0, 9_000_000, 0, 0)}


async def end_by_finish(store: ControlStores, claim: Any, ann: Leader) -> None:
    await store.finish_and_claim("w0", [Finished(claim.task_id, claim.token, None)], ("a",), 1)


async def end_by_finish_alone(store: ControlStores, claim: Any, ann: Leader) -> None:
    await store.finish_and_claim("w0", [Finished(claim.task_id, claim.token, None)], (), 0)


async def end_by_failure(store: ControlStores, claim: Any, ann: Leader) -> None:
    await store.fail("w0", claim.task_id, claim.token, "broke")


async def end_by_release(store: ControlStores, claim: Any, ann: Leader) -> None:
    await store.release("w0", claim.task_id, claim.token, "not now")


async def end_by_cancelling(store: ControlStores, claim: Any, ann: Leader) -> None:
    await store.cancel_task(claim.task_id, "not wanted")


async def end_by_losing_the_worker(store: ControlStores, claim: Any, ann: Leader) -> None:
    await ann.observe()
    await ann.commit(Fail("w0", "CRASHED", "x"))


async def end_by_leaving(store: ControlStores, claim: Any, ann: Leader) -> None:
    await store.deregister("w0", "requested")


WAYS_TO_END = [
    end_by_finish, end_by_finish_alone, end_by_failure, end_by_release, end_by_cancelling, end_by_losing_the_worker,
    end_by_leaving,
]  # fmt: skip


@pytest.mark.parametrize("end", WAYS_TO_END)
@pytest.mark.parametrize("is_priced", [True, False], ids=["priced", "free"])
async def test_every_end_of_attempt_records_billed_span(
    store: ControlStores, clock: VirtualClock, ann: Leader, end: Any, is_priced: bool
) -> None:
    if is_priced:
        await spawn_priced(ann, clock)
    else:
        await ann.spawn_worker(0)
        await ann.report(Created("w0", Machine("m0", "w0", MachineState.RUNNING)))
    await store.enqueue(NewTask("a"))
    (claim,) = await store.claim("w0", ("a",), 1)
    begun = clock()
    clock.advance(10)
    await end(store, claim, ann)
    await end(store, claim, ann)
    accounts = await store.open_accounts(fleet="f")
    spans = [span for account in accounts for span in account.spans]
    assert spans == ([Span(claim.task_id, "a", begun, clock())] if is_priced else [])
    assert await store.open_accounts(worker_id="unknown") == []


async def test_span_before_machine_is_known_is_recorded(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    """A worker may run tasks before its creation is recorded, or before its machine is adopted."""
    await ann.spawn_worker(0)
    begun = clock()
    task_id = await do(store, clock, "w0", 20)
    await ann.report(Created("w0", replace(PRICED, created_at=begun), billing_unit_s=3600))
    (account,) = await store.open_accounts()
    assert account.spans == (Span(task_id, "a", begun, clock()),)


async def test_settlement_of_changed_account_is_skipped(store: ControlStores, clock: VirtualClock, ann: Leader) -> None:
    await spawn_priced(ann, clock)
    clock.advance(3700)
    (account,) = await store.accounts_to_settle("f", 10)
    closed = settle(account, clock())
    await ann.observe()
    await ann.report(Deleted("w0", "m0", "X", "x"))
    assert await store.settle([closed]) == 0
    clock.advance(60)
    assert await settle_all(store) == 1
    assert await store.settle([closed, closed]) == 0
    assert await reported(store, "worker") == {"w0": (0, 3_700_000, 0, 3_500_000)}


async def test_repeated_settlement_of_a_live_worker_charges_once(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await spawn_priced(ann, clock)
    clock.advance(3700)
    (account,) = await store.accounts_to_settle("f", 10)
    closed = settle(account, clock())
    assert await store.settle([closed, closed]) == 1
    charged = await reported(store, "worker")
    assert await store.settle([closed]) == 0
    assert await reported(store, "worker") == charged


async def test_accounts_to_settle_are_bounded_longest_due_first(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await spawn_priced(ann, clock, 1)
    clock.advance(1)
    await spawn_priced(ann, clock, 0)
    clock.advance(4000)
    assert [account.worker_id for account in await store.accounts_to_settle("f", 1)] == ["w1"]
    assert [account.worker_id for account in await store.accounts_to_settle("f", 9)] == ["w1", "w0"]
    assert await store.accounts_to_settle("g", 9) == []


async def test_retention_keeps_workers_with_unsettled_bills(
    store: ControlStores, clock: VirtualClock, ann: Leader
) -> None:
    await spawn_priced(ann, clock)
    await ann.report(Deleted("w0", "m0", "X", "x"))
    clock.advance(RETENTION.events_s + 1)
    await store.sweep()
    assert await store.worker("w0") is not None
    assert await settle_all(store) == 1
    await store.sweep()
    assert await store.worker("w0") is None
    assert await reported(store, "worker") == {"w0": (0, 0, 0, 3_600_000)}
    clock.advance(RETENTION.charges_s)
    await store.sweep()
    assert await reported(store, "worker") == await reported(store, "fleet") == {}
