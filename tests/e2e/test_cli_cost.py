"""`windlass cost`, and the cost of a task: two machines billed by the hour, over one morning."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from support.command_line import CommandLine
from support.stores import PostgresStores
from windlass.cost.ledger import settle
from windlass.model.action import Plan, Promote
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, Standby
from windlass.model.machine import Machine, MachineState, Volume
from windlass.model.outcome import Created, Deleted, Intent
from windlass.model.snapshot import PlannerState
from windlass.model.task import Finished, NewTask

ANN = Candidate("ann", 100_000.0)
FLEET = FleetConfig(queues=("renders", "mail"), max_workers=4)
PRICED = Machine("m", "w", MachineState.RUNNING, price_micros_per_hour=3_600_000, currency="EUR")
MORNING = datetime(2030, 1, 31, 8, tzinfo=UTC)


class Clock:
    def __init__(self) -> None:
        self.now = MORNING

    def __call__(self) -> datetime:
        return self.now

    def advance(self, **span: float) -> None:
        self.now += timedelta(**span)


async def spawn(store: PostgresStores, clock: Clock, worker_id: str, slot: int) -> None:
    observed = await store.observe(ANN, "red", FLEET)
    assert not isinstance(observed, Standby)
    term, seen = observed
    intent = Intent(worker_id, slot, "wanted", 30.0)
    await store.commit_plan(ANN, term, seen, Plan((), PlannerState(), "spawn"), [intent])
    machine = replace(PRICED, id=f"m{slot}", name=worker_id, created_at=clock())
    await store.record_outcomes("red", 1, [Created(worker_id, machine, billing_unit_s=3600)], None)
    clock.advance(minutes=1)
    await store.commit_plan(ANN, term, seen, Plan((Promote(worker_id, "first heartbeat"),), PlannerState(), "up"), [])


async def work(store: PostgresStores, clock: Clock, worker_id: str, queue: str, minutes: float) -> None:
    await store.enqueue(NewTask(queue))
    (claim,) = await store.claim(worker_id, (queue,), 1)
    clock.advance(minutes=minutes)
    await store.finish_and_claim(worker_id, [Finished(claim.task_id, claim.token, None)], (), 0)


async def record_a_morning(dsn: str) -> datetime:
    """w0: billed for an hour, with 1 min of boot, 20 of renders, 9 of mail, 20 idle, deleted after 50. w1: started 30
    min ago, and has run its task for 19 min."""
    clock = Clock()
    async with PostgresStores(dsn, virtual_now=clock) as store:
        await spawn(store, clock, "w0", 0)
        await work(store, clock, "w0", "renders", 20)
        await work(store, clock, "w0", "mail", 9)
        clock.advance(minutes=20)
        await store.record_outcomes("red", 1, [Deleted("w0", "m0", "IDLE", "idle")], None)
        clock.advance(minutes=2)
        accounts = await store.accounts_to_settle("red", 10)
        assert await store.settle([settle(account, clock()) for account in accounts]) == 1
        await spawn(store, clock, "w1", 1)
        clock.advance(minutes=10)
        await store.enqueue(NewTask("renders"))
        assert len(await store.claim("w1", ("renders",), 1)) == 1
        clock.advance(minutes=19)
    return clock()


@pytest.fixture
async def windlass(tmp_path: Path, dsn: str) -> CommandLine:
    now = await record_a_morning(dsn)
    connection = await asyncpg.connect(dsn)
    try:
        # The clock of all later connections.
        name = await connection.fetchval("select current_database()")
        await connection.execute(f"alter database {name} set windlass.now = '{now.isoformat()}'")
    finally:
        await connection.close()
    return CommandLine(tmp_path, {"DATABASE_URL": dsn})


def test_spread_cost_of_tasks_adds_up_to_the_bill(windlass: CommandLine) -> None:
    done = windlass("cost", "--by", "task", "--spread", "--json")
    assert (done.code, done.err) == (0, "")
    report = done.json
    costs = {cost["key"]: cost["total_micros"] for cost in report["costs"]}
    assert sum(costs.values()) == report["total"][0]["total_micros"] == 7_200_000
    # The hour of w0 cost 3.60: 20 min of renders and 9 of mail, and every other minute spread over both.
    assert (costs["1"], costs["2"], costs["3"]) == (2_482_758, 1_117_242, 3_600_000)
    refused = windlass("cost", "--spread")
    assert (refused.code, "--spread needs --by task" in refused.err) == (2, True)


async def test_workers_show_price_cost_billed_until_address_and_phases(windlass: CommandLine, dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("update windlass.workers set address = '203.0.113.7' where id = 'w1'")
    finally:
        await connection.close()
    listed = windlass("workers", "list")
    header, row = listed.out.splitlines()[:2]
    assert "price/h" in header and "billed until" in header and "cost" in header
    assert "address" in header and "203.0.113.7" in row
    assert "EUR 3.60" in row and " UTC" in row
    shown = windlass("workers", "show", "w1")
    for name in ("price_per_hour", "billed_until", "running_at", "activated_at"):
        assert name in shown.out
    assert ["address", "203.0.113.7"] in [line.split() for line in shown.out.splitlines()]
    (worker,) = windlass("workers", "list", "--json").json
    assert worker["meter"]["cost_micros"] == 3_600_000
    assert worker["address"] == windlass("workers", "show", "w1", "--json").json["worker"]["address"] == "203.0.113.7"
    assert worker["running_at"] is not None


def test_cost_by_day_shows_kinds_of_use_and_a_forecast(windlass: CommandLine) -> None:
    done = windlass("cost")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].split() == ["day", "currency", "task", "boot", "idle", "tail", "ahead", "total", "wasted"]
    # 20 + 9 + 19 min of tasks, 2 of boot, 20 + 10 idle, 10 of tail; 30 min are billed ahead.
    assert lines[1].split() == ["2030-01-31", "EUR", "2.88", "0.12", "1.80", "0.60", "1.80", "~7.20", "47%"]
    assert lines[2].split() == ["total", "EUR", "2.88", "0.12", "1.80", "0.60", "1.80", "~7.20", "47%"]
    assert lines[3] == "this month: EUR 7.20 so far, EUR 61.20 at month end with 1 worker at 3.60 per hour"


async def test_volume_of_two_fleets_has_one_line_and_a_total(windlass: CommandLine, dsn: str) -> None:
    clock = Clock()
    async with PostgresStores(dsn, virtual_now=clock) as store:
        for _ in range(2):
            for fleet in ("red", "blue"):
                await store.record_volume(fleet, Volume("vol-1", 500, 1_000_000, "EUR"))
            clock.advance(minutes=30)
    lines = windlass("cost", "--since", "1d").out.splitlines()
    begun = "since 2030-01-30 09:00 UTC"
    assert lines[4] == f"volume vol-1 of fleets blue, red: 500 GB, EUR 0.50 {begun}, EUR 720.00 per month"
    assert lines[5] == f"machines and volumes: ~EUR 7.70 {begun}"
    report = windlass("cost", "--json").json
    assert (report["volumes"][0]["fleets"], report["volumes"][0]["amount_micros"]) == (["blue", "red"], 500_000)
    assert report["sums"][0]["total_micros"] == 7_700_000


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("fleet", {"red": (2_880_000, 7_200_000)}),
        ("queue", {"renders": (2_340_000, 2_340_000), "mail": (540_000, 540_000), None: (0, 4_320_000)}),
        ("worker", {"w0": (1_740_000, 3_600_000), "w1": (1_140_000, 3_600_000)}),
        ("task", {"1": (1_200_000, 1_200_000), "2": (540_000, 540_000), "3": (1_140_000, 1_140_000),
                  None: (0, 4_320_000)}),
    ],
)  # fmt: skip
def test_cost_is_grouped_by_fleet_queue_worker_or_task(
    windlass: CommandLine, by: str, expected: dict[str | None, tuple[int, int]]
) -> None:
    report = windlass("cost", "--by", by, "--json").json
    assert {cost["key"]: (cost["task_micros"], cost["total_micros"]) for cost in report["costs"]} == expected
    (total,) = report["total"]
    assert (total["total_micros"], total["is_estimate"]) == (7_200_000, True)
    (forecast,) = report["forecast"]
    assert (forecast["spent_micros"], forecast["rest_micros"], forecast["month_micros"]) == (
        7_200_000,
        54_000_000,
        61_200_000,
    )


def test_limit_keeps_the_largest_rows_and_the_full_total(windlass: CommandLine) -> None:
    report = windlass("cost", "--by", "task", "--limit", 1, "--json").json
    assert len(report["costs"]) == 1
    assert report["total"][0]["total_micros"] == 7_200_000


def test_since_excludes_earlier_costs(windlass: CommandLine) -> None:
    report = windlass("cost", "--since", "20m", "--by", "worker", "--json").json
    assert report["since"] == "2030-01-31T09:00:00+00:00"
    assert report["costs"] == []
    later = windlass("cost", "--since", "2030-02-01T00:00Z")
    assert later.out.startswith("no costs since 2030-02-01 00:00 UTC")


def test_task_shows_its_cost(windlass: CommandLine) -> None:
    assert "cost           EUR 1.20\n" in windlass("tasks", "show", 1).out
    assert "cost           ~EUR 1.14\n" in windlass("tasks", "show", 3).out
    cost = windlass("tasks", "show", 1, "--json").json["cost"]
    assert (cost["total_micros"], cost["currency"], cost["is_estimate"]) == (1_200_000, "EUR", False)


def test_unknown_fleet_is_refused(windlass: CommandLine) -> None:
    done = windlass("cost", "--fleet", "blue")
    assert (done.code, done.err) == (2, "windlass: fleet blue not found; known fleets: red.\n")
    assert windlass("cost", "--fleet", "red").code == 0


def test_no_costs_without_prices(tmp_path: Path, dsn: str) -> None:
    plain: Any = CommandLine(tmp_path, {"DATABASE_URL": dsn})
    assert plain("cost").out.startswith("no costs since ")
    assert plain("cost", "--json").json["costs"] == []
    plain("enqueue", "q", "{}")
    assert plain("tasks", "show", 1, "--json").json["cost"] is None
