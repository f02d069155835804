"""Fleets whose time is paid by the hour: who is kept, who goes and when; and what budgets do."""

from dataclasses import replace
from typing import Any

import pytest

from support.snapshots import Clockwork, ago, beating, fleet, kinds, of_kind, snapshot, task, worker
from windlass.model.action import Drain, Plan, RaiseAlert, Spawn
from windlass.model.cost import Bill, Spending, Tariff
from windlass.model.fleet import FleetConfig
from windlass.model.machine import ProviderTraits
from windlass.model.snapshot import Snapshot, WorkerView
from windlass.policy.plan import plan

POLICIES = ["threshold", "buffered", "clear-time"]
HOURLY = ProviderTraits(billing_unit_s=3600)
TARIFF = Tariff(1_000_000, "EUR", 3600)


def paid(id_: str, slot: int, lived: float, *, tariff: Tariff = TARIFF, **rest: Any) -> WorkerView:
    """A worker whose machine is so many seconds old."""
    return replace(worker(id_, slot, created=lived, **rest), bill=Bill(tariff, ago(lived)))


def seen(*workers: WorkerView, **rest: Any) -> Snapshot:
    return snapshot(*workers, traits=rest.pop("traits", HOURLY), idle=rest.pop("idle", 41), **rest)


def let_go(planned: Plan) -> list[str]:
    return [drain.worker_id for drain in of_kind(planned.actions, Drain)]


# ------------------------------------------------------------------------------------------------------ the paid hour


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("lived", "goes"),
    [
        pytest.param(120, False, id="its hour has just begun"),
        pytest.param(2880, False, id="four fifths of it are over"),
        pytest.param(3539, False, id="a moment before the time to leave"),
        pytest.param(3540, True, id="three cycles and a deletion before the end"),
        pytest.param(3560, True, id="the last moment that is safe"),
        pytest.param(3561, False, id="too late: the next hour would be paid, so it stays for it"),
        pytest.param(3605, False, id="in its second hour"),
        pytest.param(3 * 3600 - 50, True, id="shortly before the end of its third"),
    ],
)
def test_an_idle_worker_is_kept_until_shortly_before_its_hour_ends(policy: str, lived: float, goes: bool) -> None:
    planned = plan(seen(paid("w0", 0, lived)), fleet(policy=policy))
    assert let_go(planned) == ["w0"] * goes
    if not goes:
        assert "1 idle kept, first billed until" in planned.decision


def known_pace(*gaps_s: float) -> dict[str, Any]:
    """The memory of a fleet that was planned so many seconds apart, up to now."""
    *before, last = gaps_s
    return {"gaps_s": tuple(before), "planned_at": ago(last)}


@pytest.mark.parametrize(
    ("gaps_s", "opens", "closes"),
    [
        pytest.param((10, 10), 3540, 3560, id="as often as they are meant to be"),
        pytest.param((10.4, 9.7), 3540, 3560, id="nearly as often"),
        pytest.param((10, 2), 3540, 3560, id="sooner, for something that rang"),
        pytest.param((60, 60, 1), 3390, 3510, id="once more than every minute"),
        pytest.param((60, 61), 3390, 3510, id="every minute"),
        pytest.param((300, 300), 2670, 3270, id="every five minutes"),
        pytest.param((300,), 3540, 3560, id="one gap may be an outage"),
        pytest.param((10, 7200), 3540, 3560, id="an outage of two hours"),
        pytest.param((7200, 10), 3540, 3560, id="after the outage"),
    ],
)
def test_the_time_to_leave_is_as_wide_as_cycles_are_really_apart(
    gaps_s: tuple[float, ...], opens: float, closes: float
) -> None:
    def goes(lived: float) -> bool:
        return let_go(plan(seen(paid("w0", 0, lived), state=known_pace(*gaps_s)), fleet())) == ["w0"]

    assert [goes(lived) for lived in (60, opens - 1, opens, closes, closes + 1)] == [False, False, True, True, False]


def test_cycles_farther_apart_than_any_window_do_not_wait_for_the_hour() -> None:
    (drain,) = of_kind(plan(seen(paid("w0", 0, 60), state=known_pace(1200, 1200)), fleet()).actions, Drain)
    assert drain.code == "IDLE"


def test_of_many_whose_hours_end_together_the_first_go_early_enough_for_the_last() -> None:
    """A hundred at a third of a deletion a second take five minutes."""
    traits = replace(HOURLY, deletions_per_s=1 / 3)
    config = fleet(max_workers=100, max_changes_per_cycle=100)

    def going(lived: float) -> int:
        workers = [paid(f"w{slot:02}", slot, lived) for slot in range(100)]
        return len(let_go(plan(seen(*workers, traits=traits), config)))

    assert going(3600 - 60 - 3 * 99 - 1) == 0
    assert going(3600 - 60 - 3 * 99) == 1
    assert going(3600 - 60 - 3 * 49) == 51
    assert going(3600 - 60) == 100


def test_who_has_to_stay_keeps_nobody_waiting_for_its_turn() -> None:
    traits = replace(HOURLY, deletions_per_s=1 / 3)
    workers = [paid(f"w{slot:02}", slot, 3600 - 61) for slot in range(100)]
    planned = plan(seen(*workers, traits=traits), fleet(max_workers=100, min_workers=99))
    assert let_go(planned) == []


def test_the_reason_says_how_long_it_was_idle_and_when_its_hour_ends() -> None:
    (drain,) = of_kind(plan(seen(paid("w0", 0, 3541)), fleet()).actions, Drain)
    assert (drain.code, drain.reason) == ("BILLING_HOUR_END", "idle 41 s, billing hour ends in 59 s, queue empty")


def test_a_unit_that_is_no_hour_is_not_called_one() -> None:
    traits = ProviderTraits(billing_unit_s=600)
    (drain,) = of_kind(plan(seen(paid("w0", 0, 550), traits=traits), fleet()).actions, Drain)
    assert drain.reason == "idle 41 s, billing period ends in 50 s, queue empty"


def test_where_seconds_are_paid_idle_workers_go_after_their_time_out_as_ever() -> None:
    planned = plan(seen(paid("w0", 0, 120, tariff=replace(TARIFF, unit_s=1)), traits=ProviderTraits()), fleet())
    (drain,) = of_kind(planned.actions, Drain)
    assert (drain.code, drain.reason) == ("IDLE", "idle 41 s, 0 queued, 0 busy, 1 idle, 0 wanted")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_busy_worker_is_never_ended_for_billing_and_is_judged_again_an_hour_later(policy: str) -> None:
    config = fleet(policy=policy)
    busy = paid("w0", 0, 3545, claimed=500, running=(task(started=500),))
    assert plan(seen(busy), config).actions == ()
    done = paid("w0", 0, 3605, claimed=560)
    assert plan(seen(done), config).actions == ()
    assert let_go(plan(seen(replace(done, bill=Bill(TARIFF, ago(7145)))), config)) == ["w0"]


def test_of_several_the_one_whose_hour_ends_first_goes_first() -> None:
    """Two of three are needed as a buffer: the one that goes is not the longest idle but the next to be paid for."""
    views = [
        paid("w0", 0, 600, idle_s=900.0, claimed=500),
        paid("w1", 1, 3545, idle_s=50.0, claimed=500),
        paid("w2", 2, 3000, idle_s=500.0, claimed=500),
    ]
    config = fleet(idle_buffer=2)
    assert let_go(plan(seen(*views), config)) == ["w1"]
    assert plan(seen(views[0], views[2]), config).actions == ()


def test_with_room_for_one_at_a_time_the_soonest_boundary_is_first() -> None:
    views = [paid("w0", 0, 3545), paid("w1", 1, 3555), paid("w2", 2, 3550)]
    planned = plan(seen(*views), fleet(max_changes_per_cycle=1))
    assert let_go(planned) == ["w1"]
    assert planned.is_cut_short


def test_the_idle_time_out_does_not_buy_another_hour_but_a_pause_between_tasks_is_not_idleness() -> None:
    config = fleet(idle_timeout_s=600)
    assert let_go(plan(seen(paid("w0", 0, 3545), idle=11), config)) == ["w0"]
    assert let_go(plan(seen(paid("w0", 0, 3545), idle=9), config)) == []
    assert let_go(plan(seen(paid("w0", 0, 3545), idle=9), fleet(idle_timeout_s=5))) == ["w0"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("grace_s", [0, 180])
def test_somebody_who_starts_does_not_cost_a_spare_worker_another_hour(policy: str, grace_s: float) -> None:
    """A boot lasts longer than the occasion to leave."""
    config = fleet(policy=policy, spawn_grace_s=grace_s)
    starting = worker("w1", 1, "spawning", created=30, heartbeat=None)
    assert let_go(plan(seen(paid("w0", 0, 3545), starting), config)) == ["w0"]
    assert let_go(plan(seen(paid("w0", 0, 2000), starting), config)) == []
    assert let_go(plan(seen(paid("w0", 0, 3545), starting, queued=1), config)) == [], "that one waits for it"


def test_the_minimum_is_not_left_to_somebody_who_is_only_starting() -> None:
    starting = worker("w1", 1, "spawning", created=30, heartbeat=None)
    assert let_go(plan(seen(paid("w0", 0, 3545), starting), fleet(min_workers=1))) == []


def test_the_minimum_stays_hour_after_hour() -> None:
    assert plan(seen(paid("w0", 0, 3545)), fleet(min_workers=1)).actions == ()


def test_a_kept_worker_claims_what_comes_and_nobody_is_hired_for_it() -> None:
    config = fleet()
    assert plan(seen(paid("w0", 0, 2000), queued=1), config).actions == ()
    assert plan(seen(paid("w0", 0, 3545), queued=1), config).actions == ()


def test_a_worker_above_a_lowered_maximum_goes_at_once_whatever_is_paid() -> None:
    views = [paid("w0", 0, 100), paid("w1", 1, 200)]
    (drain,) = of_kind(plan(seen(*views), fleet(max_workers=1)).actions, Drain)
    assert (drain.worker_id, drain.code) == ("w1", "OVER_MAX")


def test_a_machine_whose_beginning_is_not_known_is_counted_from_when_we_knew_of_it() -> None:
    config = fleet()
    known = worker("w0", 0, created=3700, machine_at=3550)
    assert let_go(plan(seen(known), config)) == ["w0"]
    assert let_go(plan(seen(worker("w0", 0, created=3550)), config)) == ["w0"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("unit_s", [600, 3600])
def test_when_the_work_is_done_everybody_goes_late_in_their_unit_and_in_time(policy: str, unit_s: int) -> None:
    config = fleet(policy=policy, max_workers=6, poll_interval_s=10)
    views = [paid(f"w{n}", n, 97.0 * n, claimed=1, tariff=replace(TARIFF, unit_s=unit_s)) for n in range(6)]
    world = Clockwork(config, seen(*views, traits=ProviderTraits(billing_unit_s=unit_s)), beating)
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
        pytest.param({"budget_per_hour": "1"}, spent(1, 5, 9), "EUR 1.00 of 1.00 spent this hour", id="an hour's"),
        pytest.param({"budget_per_day": "10"}, spent(1, 10.2, 99), "EUR 10.20 of 10.00 spent today", id="a day's"),
        pytest.param({"budget_per_month": "9"}, spent(1, 5, 9), "EUR 9.00 of 9.00 spent this month", id="a month's"),
        pytest.param(
            {"budget_per_month": "50", "budget_per_day": "4"}, spent(1, 5, 51), "EUR 5.00 of 4.00 spent today",
            id="of two the one that is farther over",
        ),
    ],
)  # fmt: skip
def test_a_spent_budget_stops_hiring(settings: dict[str, Any], spending: tuple[Spending, ...], reason: str) -> None:
    config = fleet(min_workers=2, **settings)
    planned = plan(seen(queued=9, requested=1, spending=spending), config)
    assert set(kinds(planned)) == {"alert"}
    assert planned.hold is not None
    assert (planned.hold.code, planned.hold.reason, planned.hold.is_total) == ("BUDGET", reason, False)
    assert planned.decision.startswith(f"hold: {reason}; would spawn 4")


@pytest.mark.parametrize(
    ("day", "codes"),
    [
        pytest.param(7.99, [], id="below four fifths nothing is said"),
        pytest.param(8.0, ["BUDGET_NEAR"], id="from four fifths on a person knows"),
        pytest.param(9.99, ["BUDGET_NEAR"], id="nearly spent"),
        pytest.param(10.0, ["BUDGET"], id="spent"),
    ],
)
@pytest.mark.parametrize("action", ["warn", "stop-spawning", "drain"])
def test_a_person_is_told_in_time(day: float, codes: list[str], action: str) -> None:
    config = fleet(budget_per_day="10.00", budget_action=action)
    planned = plan(seen(spending=spent(day=day)), config)
    assert [alert.code for alert in of_kind(planned.actions, RaiseAlert)] == codes
    if codes == ["BUDGET_NEAR"]:
        assert of_kind(planned.actions, RaiseAlert)[0].reason == f"EUR {day:.2f} of 10.00 spent today"
    assert plan(replace(seen(spending=spent(day=day)), planner_state=planned.planner_state), config).actions == ()


def test_a_budget_that_only_warns_does_not_stop_anybody() -> None:
    config = fleet(budget_per_day="10", budget_action="warn")
    planned = plan(seen(queued=1, spending=spent(day=99)), config)
    assert kinds(planned) == ["alert", "spawn"]
    assert planned.hold is None


def test_what_has_begun_is_spent_though_the_ledger_has_not_closed_it() -> None:
    """At noon: an hour that is closed, and three that began at half past eleven, one of them on a machine now gone."""
    living, ended = paid("w0", 0, 1800), Bill(TARIFF, ago(1800), ago(60))
    half_settled = paid("w1", 1, 5400)
    assert half_settled.bill is not None
    half_settled = replace(half_settled, bill=replace(half_settled.bill, settled_until=ago(1800)))
    config = fleet(budget_per_day="5", budget_per_hour="5", budget_per_month="5")
    planned = plan(seen(living, half_settled, ended_bills=(ended,), spending=spent(0, 1, 1)), config)
    assert [alert.reason for alert in of_kind(planned.actions, RaiseAlert)] == [
        "EUR 4.00 of 5.00 spent today", "EUR 4.00 of 5.00 spent this month",
    ]  # fmt: skip


def test_nobody_is_hired_whom_the_budget_cannot_pay() -> None:
    config = fleet(budget_per_day="5", max_workers=9)
    planned = plan(seen(paid("w0", 0, 100, claimed=50, running=(task(),)), queued=9, spending=spent(day=1)), config)
    assert len(of_kind(planned.actions, Spawn)) == 3
    assert planned.decision.endswith("; budget leaves no room for more")
    starting = [worker(f"s{n}", n + 1, "spawning", created=1, heartbeat=None, machine_id=None) for n in range(3)]
    traits = replace(HOURLY, creation_lateness_s=60)
    again = plan(seen(paid("w0", 0, 100), *starting, queued=9, spending=spent(day=1), traits=traits), config)
    assert again.actions == ()
    assert again.hold is not None
    assert again.hold.reason == "EUR 2.00 of 5.00 spent today, too little left for another worker"


def test_as_long_as_no_price_is_known_one_worker_is_hired_to_learn_it() -> None:
    config = fleet(budget_per_day="5")
    first = plan(seen(queued=9), config)
    assert kinds(first) == ["spawn"]
    assert first.decision.endswith("; price unknown, the first machine shows it")
    on_its_way = worker("s0", 0, "spawning", created=1, heartbeat=None, machine_id=None)
    traits = replace(HOURLY, creation_lateness_s=60)
    assert plan(seen(on_its_way, queued=9, traits=traits), config).actions == ()
    known = replace(on_its_way, machine_id="m-s0", bill=Bill(TARIFF, ago(1)))
    assert kinds(plan(seen(known, queued=9), config)) == ["spawn"] * 3
    priceless = replace(on_its_way, machine_id="m-s0")
    assert kinds(plan(seen(priceless, queued=9), config)) == ["spawn"] * 3


def test_rented_machines_whose_price_is_not_known_do_not_lift_the_budget() -> None:
    config = fleet(budget_per_day="5", max_workers=9)
    rented = replace(HOURLY, is_remote=True)
    unpriced = worker("s0", 0, claimed=50, running=(task(),))
    alone = plan(seen(unpriced, queued=9, traits=rented), config)
    assert alone.actions == ()
    assert alone.hold is not None
    assert alone.hold.code == "BUDGET"
    beside = plan(seen(unpriced, paid("w1", 1, 100), queued=9, spending=spent(day=1), traits=rented), config)
    assert len(of_kind(beside.actions, Spawn)) == 2, "3 are left, and one of them may be what the other costs"


def test_a_drain_by_budget_lets_everybody_go_when_what_is_paid_is_used_up() -> None:
    config = fleet(budget_per_day="5", budget_action="drain", min_workers=4, stop_timeout_s=600)
    views = [
        paid("fresh", 0, 100),
        paid("idle", 1, 3545),
        paid("busy", 2, 2945, claimed=500, running=(task(1),)),
        paid("later", 3, 2900, claimed=500, running=(task(2),)),
    ]
    planned = plan(seen(*views, queued=9, spending=spent(day=5)), config)
    drains = of_kind(planned.actions, Drain)
    assert [(drain.worker_id, drain.code) for drain in drains] == [("idle", "BUDGET"), ("busy", "BUDGET")]
    assert drains[0].reason == "EUR 9.00 of 5.00 spent today"


def test_where_seconds_are_paid_a_drain_by_budget_is_at_once_and_busy_workers_may_finish() -> None:
    config = fleet(budget_per_day="5", budget_action="drain", stop_timeout_s=600)
    tariff = replace(TARIFF, unit_s=1)
    views = [paid("idle", 0, 100, tariff=tariff), paid("busy", 1, 100, tariff=tariff, running=(task(),), claimed=50)]
    planned = plan(seen(*views, queued=9, spending=spent(day=5), traits=ProviderTraits()), config)
    assert let_go(planned) == ["idle", "busy"]
    assert "delete" not in kinds(planned)


def test_a_new_day_ends_the_hold() -> None:
    config = fleet(budget_per_day="5")
    held = plan(seen(queued=1, spending=spent(day=5, month=5)), config)
    assert held.hold is not None
    after = plan(seen(queued=1, spending=spent(month=5), state={"hold": held.hold}), config)
    assert after.hold is None
    assert kinds(after) == ["spawn"]


def test_each_currency_is_compared_with_the_limit() -> None:
    config = fleet(budget_per_day="5")
    planned = plan(seen(queued=1, spending=(*spent(day=1), *spent(day=6, currency="USD"))), config)
    assert planned.hold is not None
    assert planned.hold.reason == "USD 6.00 of 5.00 spent today"


@pytest.mark.parametrize("amount", ["0", "-1", "0.0000001", "ten", "nan"])
def test_a_budget_that_is_no_amount_is_refused(amount: str) -> None:
    with pytest.raises(ValueError, match="budget_per_day"):
        FleetConfig.model_validate({"budget_per_day": amount})
