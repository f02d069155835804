"""Fleets with long billing periods, and budgets."""

from dataclasses import replace
from typing import Any

import pytest

from support.snapshots import FleetSimulation, ago, beating, fleet, kinds, of_kind, snapshot, task, worker
from windlass.model.action import Drain, Plan, RaiseAlert, Spawn
from windlass.model.cost import Bill, Spending, Tariff
from windlass.model.fleet import FleetConfig
from windlass.model.machine import ProviderTraits
from windlass.model.snapshot import Snapshot, WorkerView
from windlass.policy.plan import plan

POLICIES = ["threshold", "buffered", "clear-time"]
HOURLY = ProviderTraits(billing_unit_s=3600)
TARIFF = Tariff(1_000_000, "EUR", 3600)


def billed_worker(id_: str, slot: int, lived: float, *, tariff: Tariff = TARIFF, **rest: Any) -> WorkerView:
    """A worker whose machine is this many seconds old."""
    return replace(worker(id_, slot, created=lived, **rest), bill=Bill(tariff, ago(lived)))


def seen(*workers: WorkerView, **rest: Any) -> Snapshot:
    return snapshot(*workers, traits=rest.pop("traits", HOURLY), idle=rest.pop("idle", 41), **rest)


def drained_ids(planned: Plan) -> list[str]:
    return [drain.worker_id for drain in of_kind(planned.actions, Drain)]


# -------------------------------------------------------------------------------------------------------- billing hours


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("lived", "goes"),
    [
        pytest.param(120, False, id="hour has just begun"),
        pytest.param(2880, False, id="four fifths used"),
        pytest.param(3539, False, id="just before the window"),
        pytest.param(3540, True, id="three cycles and a deletion before the end"),
        pytest.param(3560, True, id="last safe moment"),
        pytest.param(3561, False, id="too late: stays for the next hour"),
        pytest.param(3605, False, id="in its second hour"),
        pytest.param(3 * 3600 - 50, True, id="shortly before the end of its third"),
    ],
)
def test_idle_worker_is_kept_until_its_billing_hour_ends(policy: str, lived: float, goes: bool) -> None:
    planned = plan(seen(billed_worker("w0", 0, lived)), fleet(policy=policy))
    assert drained_ids(planned) == ["w0"] * goes
    if not goes:
        assert "1 idle kept, first billed until" in planned.decision


def known_pace(*gaps_s: float) -> dict[str, Any]:
    """Planner state after plans with these gaps, the last one up to now."""
    *before, last = gaps_s
    return {"gaps_s": tuple(before), "planned_at": ago(last)}


@pytest.mark.parametrize(
    ("gaps_s", "opens", "closes"),
    [
        pytest.param((10, 10), 3540, 3560, id="poll interval"),
        pytest.param((10.4, 9.7), 3540, 3560, id="slightly longer"),
        pytest.param((10, 2), 3540, 3560, id="triggered early"),
        pytest.param((60, 60, 1), 3390, 3510, id="one gap over a minute"),
        pytest.param((60, 61), 3390, 3510, id="every minute"),
        pytest.param((300, 300), 2670, 3270, id="every five minutes"),
        pytest.param((300,), 3540, 3560, id="one gap may be an outage"),
        pytest.param((10, 7200), 3540, 3560, id="an outage of two hours"),
        pytest.param((7200, 10), 3540, 3560, id="after the outage"),
    ],
)
def test_termination_window_follows_real_cycle_interval(gaps_s: tuple[float, ...], opens: float, closes: float) -> None:
    def goes(lived: float) -> bool:
        return drained_ids(plan(seen(billed_worker("w0", 0, lived), state=known_pace(*gaps_s)), fleet())) == ["w0"]

    assert [goes(lived) for lived in (60, opens - 1, opens, closes, closes + 1)] == [False, False, True, True, False]


def test_very_slow_cycles_ignore_billing_hours() -> None:
    (drain,) = of_kind(plan(seen(billed_worker("w0", 0, 60), state=known_pace(1200, 1200)), fleet()).actions, Drain)
    assert drain.code == "IDLE"


@pytest.mark.parametrize("policy", [*POLICIES, "adaptive"])
def test_windows_are_staggered_for_slow_deletions(policy: str) -> None:
    """A hundred deletions at one per three seconds take five minutes."""
    traits = replace(HOURLY, deletions_per_s=1 / 3)
    config = fleet(policy=policy, max_workers=100, max_changes_per_cycle=100)

    def going(lived: float) -> int:
        workers = [billed_worker(f"w{slot:02}", slot, lived) for slot in range(100)]
        return len(drained_ids(plan(seen(*workers, traits=traits), config)))

    assert going(3600 - 60 - 3 * 99 - 1) == 0
    assert going(3600 - 60 - 3 * 99) == 1
    assert going(3600 - 60 - 3 * 49) == 51
    assert going(3600 - 60) == 100


def test_needed_workers_do_not_stagger_windows() -> None:
    traits = replace(HOURLY, deletions_per_s=1 / 3)
    workers = [billed_worker(f"w{slot:02}", slot, 3600 - 61) for slot in range(100)]
    planned = plan(seen(*workers, traits=traits), fleet(max_workers=100, min_workers=99))
    assert drained_ids(planned) == []


def test_drain_reason_states_idle_time_and_billing_hour() -> None:
    (drain,) = of_kind(plan(seen(billed_worker("w0", 0, 3541)), fleet()).actions, Drain)
    assert (drain.code, drain.reason) == ("BILLING_HOUR_END", "idle 41 s, billing hour ends in 59 s, queue empty")


def test_drain_reason_names_other_billing_periods() -> None:
    traits = ProviderTraits(billing_unit_s=600)
    (drain,) = of_kind(plan(seen(billed_worker("w0", 0, 550), traits=traits), fleet()).actions, Drain)
    assert drain.reason == "idle 41 s, billing period ends in 50 s, queue empty"


def test_second_billing_drains_after_idle_timeout() -> None:
    planned = plan(
        seen(billed_worker("w0", 0, 120, tariff=replace(TARIFF, unit_s=1)), traits=ProviderTraits()), fleet()
    )
    (drain,) = of_kind(planned.actions, Drain)
    assert (drain.code, drain.reason) == ("IDLE", "idle 41 s, 0 queued, 0 busy, 1 idle, 0 wanted")


@pytest.mark.parametrize("policy", POLICIES)
def test_busy_worker_stays_for_another_billing_hour(policy: str) -> None:
    config = fleet(policy=policy)
    busy = billed_worker("w0", 0, 3545, claimed=500, running=(task(started=500),))
    assert plan(seen(busy), config).actions == ()
    done = billed_worker("w0", 0, 3605, claimed=560)
    assert plan(seen(done), config).actions == ()
    assert drained_ids(plan(seen(replace(done, bill=Bill(TARIFF, ago(7145)))), config)) == ["w0"]


def test_earliest_billing_boundary_drains_first() -> None:
    """Two of three are needed as a buffer: the one billed next drains, not the one idle longest."""
    views = [
        billed_worker("w0", 0, 600, idle_s=900.0, claimed=500),
        billed_worker("w1", 1, 3545, idle_s=50.0, claimed=500),
        billed_worker("w2", 2, 3000, idle_s=500.0, claimed=500),
    ]
    config = fleet(idle_buffer=2)
    assert drained_ids(plan(seen(*views), config)) == ["w1"]
    assert plan(seen(views[0], views[2]), config).actions == ()


def test_earliest_boundary_drains_first_within_change_limit() -> None:
    views = [billed_worker("w0", 0, 3545), billed_worker("w1", 1, 3555), billed_worker("w2", 2, 3550)]
    planned = plan(seen(*views), fleet(max_changes_per_cycle=1))
    assert drained_ids(planned) == ["w1"]
    assert planned.is_cut_short


def test_one_idle_cycle_is_enough_in_the_window() -> None:
    config = fleet(idle_timeout_s=600)
    assert drained_ids(plan(seen(billed_worker("w0", 0, 3545), idle=11), config)) == ["w0"]
    assert drained_ids(plan(seen(billed_worker("w0", 0, 3545), idle=9), config)) == []
    assert drained_ids(plan(seen(billed_worker("w0", 0, 3545), idle=9), fleet(idle_timeout_s=5))) == ["w0"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("grace_s", [0, 180])
def test_starting_worker_does_not_block_drain_in_window(policy: str, grace_s: float) -> None:
    """A boot lasts longer than the window."""
    config = fleet(policy=policy, spawn_grace_s=grace_s)
    starting = worker("w1", 1, "spawning", created=30, heartbeat=None)
    assert drained_ids(plan(seen(billed_worker("w0", 0, 3545), starting), config)) == ["w0"]
    assert drained_ids(plan(seen(billed_worker("w0", 0, 2000), starting), config)) == []
    assert drained_ids(plan(seen(billed_worker("w0", 0, 3545), starting, queued=1), config)) == [], (
        "that one waits for it"
    )


def test_starting_workers_do_not_count_for_minimum_in_window() -> None:
    starting = worker("w1", 1, "spawning", created=30, heartbeat=None)
    assert drained_ids(plan(seen(billed_worker("w0", 0, 3545), starting), fleet(min_workers=1))) == []


def test_minimum_is_kept_across_billing_hours() -> None:
    assert plan(seen(billed_worker("w0", 0, 3545)), fleet(min_workers=1)).actions == ()


def test_kept_worker_replaces_a_spawn() -> None:
    config = fleet()
    assert plan(seen(billed_worker("w0", 0, 2000), queued=1), config).actions == ()
    assert plan(seen(billed_worker("w0", 0, 3545), queued=1), config).actions == ()


def test_lowered_maximum_drains_within_billing_hour() -> None:
    views = [billed_worker("w0", 0, 100), billed_worker("w1", 1, 200)]
    (drain,) = of_kind(plan(seen(*views), fleet(max_workers=1)).actions, Drain)
    assert (drain.worker_id, drain.code) == ("w1", "OVER_MAX")


def test_unknown_creation_time_counts_from_first_sight() -> None:
    config = fleet()
    known = worker("w0", 0, created=3700, machine_at=3550)
    assert drained_ids(plan(seen(known), config)) == ["w0"]
    assert drained_ids(plan(seen(worker("w0", 0, created=3550)), config)) == ["w0"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("unit_s", [600, 3600])
def test_finished_fleet_drains_late_in_each_billing_unit(policy: str, unit_s: int) -> None:
    config = fleet(policy=policy, max_workers=6, poll_interval_s=10)
    views = [billed_worker(f"w{n}", n, 97.0 * n, claimed=1, tariff=replace(TARIFF, unit_s=unit_s)) for n in range(6)]
    world = FleetSimulation(config, seen(*views, traits=ProviderTraits(billing_unit_s=unit_s)), beating)
    gone: dict[str, float] = {}
    born = {view.id: view.created_at for view in views}
    for _ in range(2 * unit_s // 10):
        before = {view.id for view in world.seen.workers}
        now = world.seen.now
        world.cycle()
        for id_ in before - {view.id for view in world.seen.workers}:
            gone[id_] = (now - born[id_]).total_seconds() % unit_s
    assert len(gone) == 6
    assert all(0.8 * unit_s <= used < unit_s for used in gone.values()), gone


# ------------------------------------------------------------------------------------------------------------ budgets


def spent(hour: float = 0, day: float = 0, month: float = 0, currency: str = "EUR") -> tuple[Spending, ...]:
    return (Spending(currency, *(int(amount * 1_000_000) for amount in (hour, day, month))),)


@pytest.mark.parametrize(
    ("settings", "spending", "reason"),
    [
        pytest.param({"budget_per_hour": "1"}, spent(1, 5, 9), "EUR 1.00 of 1.00 spent this hour", id="hour"),
        pytest.param({"budget_per_day": "10"}, spent(1, 10.2, 99), "EUR 10.20 of 10.00 spent today", id="day"),
        pytest.param({"budget_per_month": "9"}, spent(1, 5, 9), "EUR 9.00 of 9.00 spent this month", id="month"),
        pytest.param(
            {"budget_per_month": "50", "budget_per_day": "4"}, spent(1, 5, 51), "EUR 5.00 of 4.00 spent today",
            id="the most used of two",
        ),
    ],
)  # fmt: skip
def test_spent_budget_holds_spawning(settings: dict[str, Any], spending: tuple[Spending, ...], reason: str) -> None:
    config = fleet(min_workers=2, **settings)
    planned = plan(seen(queued=9, requested=1, spending=spending), config)
    assert set(kinds(planned)) == {"alert"}
    assert planned.hold is not None
    assert (planned.hold.code, planned.hold.reason, planned.hold.is_total) == ("BUDGET", reason, False)
    assert planned.decision.startswith(f"hold: {reason}; would spawn 4")


@pytest.mark.parametrize(
    ("day", "codes"),
    [
        pytest.param(7.99, [], id="below four fifths"),
        pytest.param(8.0, ["BUDGET_NEAR"], id="four fifths"),
        pytest.param(9.99, ["BUDGET_NEAR"], id="nearly spent"),
        pytest.param(10.0, ["BUDGET"], id="spent"),
    ],
)
@pytest.mark.parametrize("action", ["warn", "stop-spawning", "drain"])
def test_budget_alerts_fire_from_four_fifths(day: float, codes: list[str], action: str) -> None:
    config = fleet(budget_per_day="10.00", budget_action=action)
    planned = plan(seen(spending=spent(day=day)), config)
    assert [alert.code for alert in of_kind(planned.actions, RaiseAlert)] == codes
    if codes == ["BUDGET_NEAR"]:
        assert of_kind(planned.actions, RaiseAlert)[0].reason == f"EUR {day:.2f} of 10.00 spent today"
    assert plan(replace(seen(spending=spent(day=day)), planner_state=planned.planner_state), config).actions == ()


def test_warn_budget_does_not_stop_spawning() -> None:
    config = fleet(budget_per_day="10", budget_action="warn")
    planned = plan(seen(queued=1, spending=spent(day=99)), config)
    assert kinds(planned) == ["alert", "spawn"]
    assert planned.hold is None


def test_begun_billing_periods_count_as_spent() -> None:
    """At noon: one closed hour, and three that began at 11:30, one of them on a deleted machine."""
    living, ended = billed_worker("w0", 0, 1800), Bill(TARIFF, ago(1800), ago(60))
    half_settled = billed_worker("w1", 1, 5400)
    assert half_settled.bill is not None
    half_settled = replace(half_settled, bill=replace(half_settled.bill, settled_until=ago(1800)))
    config = fleet(budget_per_day="5", budget_per_hour="5", budget_per_month="5")
    planned = plan(seen(living, half_settled, ended_bills=(ended,), spending=spent(0, 1, 1)), config)
    assert [alert.reason for alert in of_kind(planned.actions, RaiseAlert)] == [
        "EUR 4.00 of 5.00 spent today", "EUR 4.00 of 5.00 spent this month",
    ]  # fmt: skip


def test_spawns_are_limited_by_remaining_budget() -> None:
    config = fleet(budget_per_day="5", max_workers=9)
    planned = plan(
        seen(billed_worker("w0", 0, 100, claimed=50, running=(task(),)), queued=9, spending=spent(day=1)), config
    )
    assert len(of_kind(planned.actions, Spawn)) == 3
    assert planned.decision.endswith("; budget leaves no room for more")
    starting = [worker(f"s{n}", n + 1, "spawning", created=1, heartbeat=None, machine_id=None) for n in range(3)]
    traits = replace(HOURLY, creation_lateness_s=60)
    again = plan(seen(billed_worker("w0", 0, 100), *starting, queued=9, spending=spent(day=1), traits=traits), config)
    assert again.actions == ()
    assert again.hold is not None
    assert again.hold.reason == "EUR 2.00 of 5.00 spent today, too little left for another worker"


def test_unknown_price_allows_one_spawn() -> None:
    config = fleet(budget_per_day="5")
    first = plan(seen(queued=9), config)
    assert kinds(first) == ["spawn"]
    assert first.decision.endswith("; price unknown, the first machine shows it")
    spawning = worker("s0", 0, "spawning", created=1, heartbeat=None, machine_id=None)
    traits = replace(HOURLY, creation_lateness_s=60)
    assert plan(seen(spawning, queued=9, traits=traits), config).actions == ()
    known = replace(spawning, machine_id="m-s0", bill=Bill(TARIFF, ago(1)))
    assert kinds(plan(seen(known, queued=9), config)) == ["spawn"] * 3
    without_price = replace(spawning, machine_id="m-s0")
    assert kinds(plan(seen(without_price, queued=9), config)) == ["spawn"] * 3


def test_rented_machines_without_price_keep_the_budget() -> None:
    config = fleet(budget_per_day="5", max_workers=9)
    rented = replace(HOURLY, is_remote=True)
    unpriced = worker("s0", 0, claimed=50, running=(task(),))
    alone = plan(seen(unpriced, queued=9, traits=rented), config)
    assert alone.actions == ()
    assert alone.hold is not None
    assert alone.hold.code == "BUDGET"
    of_both = plan(seen(unpriced, billed_worker("w1", 1, 100), queued=9, spending=spent(day=1), traits=rented), config)
    assert len(of_kind(of_both.actions, Spawn)) == 2, "3 are left, and one of them may be what the other costs"


def test_budget_drain_waits_for_billing_periods() -> None:
    config = fleet(budget_per_day="5", budget_action="drain", min_workers=4, stop_timeout_s=600)
    views = [
        billed_worker("fresh", 0, 100),
        billed_worker("idle", 1, 3545),
        billed_worker("busy", 2, 2945, claimed=500, running=(task(1),)),
        billed_worker("later", 3, 2900, claimed=500, running=(task(2),)),
    ]
    planned = plan(seen(*views, queued=9, spending=spent(day=5)), config)
    drains = of_kind(planned.actions, Drain)
    assert [(drain.worker_id, drain.code) for drain in drains] == [("idle", "BUDGET"), ("busy", "BUDGET")]
    assert drains[0].reason == "EUR 9.00 of 5.00 spent today"


def test_budget_drain_with_second_billing_is_immediate() -> None:
    config = fleet(budget_per_day="5", budget_action="drain", stop_timeout_s=600)
    tariff = replace(TARIFF, unit_s=1)
    views = [
        billed_worker("idle", 0, 100, tariff=tariff),
        billed_worker("busy", 1, 100, tariff=tariff, running=(task(),), claimed=50),
    ]
    planned = plan(seen(*views, queued=9, spending=spent(day=5), traits=ProviderTraits()), config)
    assert drained_ids(planned) == ["idle", "busy"]
    assert "delete" not in kinds(planned)


def test_new_day_ends_budget_hold() -> None:
    config = fleet(budget_per_day="5")
    held = plan(seen(queued=1, spending=spent(day=5, month=5)), config)
    assert held.hold is not None
    after = plan(seen(queued=1, spending=spent(month=5), state={"hold": held.hold}), config)
    assert after.hold is None
    assert kinds(after) == ["spawn"]


def test_budget_applies_to_each_currency() -> None:
    config = fleet(budget_per_day="5")
    planned = plan(seen(queued=1, spending=(*spent(day=1), *spent(day=6, currency="USD"))), config)
    assert planned.hold is not None
    assert planned.hold.reason == "USD 6.00 of 5.00 spent today"


def test_begun_periods_count_in_their_own_currency_only() -> None:
    dollars = replace(TARIFF, currency="USD")
    workers = [billed_worker(f"e{n}", n, 60) for n in range(2)] + [billed_worker("u0", 2, 60, tariff=dollars)]
    planned = plan(seen(*workers), fleet(budget_per_day="3", min_workers=3))
    assert planned.hold is None
    assert of_kind(planned.actions, RaiseAlert) == []


@pytest.mark.parametrize("amount", ["0", "-1", "0.0000001", "ten", "nan"])
def test_invalid_budget_amount_is_rejected(amount: str) -> None:
    with pytest.raises(ValueError, match="budget_per_day"):
        FleetConfig.model_validate({"budget_per_day": amount})
