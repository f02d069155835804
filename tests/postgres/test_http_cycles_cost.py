"""Routes and pages about cycles and cost."""

import asyncio
import contextlib
import re
import threading
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from support.api_fixture import API, FLEET, ApiFixture, problem_of
from windlass.model.machine import Volume
from windlass.server.cpu_executor import SerialExecutor
from windlass.server.errors import ApiError
from windlass.store.connection import connected


async def test_cycle_is_replayed_with_other_settings(api: ApiFixture) -> None:
    await api.spawn_active_workers()
    first = (await api.localhost.get(f"{API}/cycles")).json()["items"][-1]
    assert first["actions"][0]["kind"] == "spawn"
    same = (await api.localhost.get(f"{API}/cycles/{first['id']}/replay")).json()
    assert same["is_same"]
    fewer = (await api.localhost.get(f"{API}/cycles/{first['id']}/replay", params={"set": ["max_workers=1"]})).json()
    assert (len(fewer["then"]["actions"]), len(fewer["again"]["actions"])) == (2, 1)
    for wrong in (
        *("max_workers", "nonsense=1", "max_workers=-1", "policy=psychic", "min_workers=9"),
        # Values beyond what a plan can compute with.
        *("max_workers=99999999999", "max_changes_per_cycle=100001", "tasks_per_worker=1e-320", "stop_timeout_s=1e300"),
        *("scale_up_multiplier=1e308", "poll_interval_s=inf"),
    ):
        refused = await api.localhost.get(f"{API}/cycles/{first['id']}/replay", params={"set": wrong})
        assert problem_of(refused) == (400, "BAD_INPUT"), wrong
    assert problem_of(await api.localhost.get(f"{API}/cycles/99")) == (404, "NOT_FOUND")


async def test_executor_runs_one_call_at_a_time_with_a_timeout() -> None:
    executor = SerialExecutor(timeout_s=0.05)
    started, may_end = threading.Event(), threading.Event()
    threads = set()

    def block() -> None:
        threads.add(threading.get_ident())
        started.set()
        may_end.wait(30)

    for _ in range(2):  # the second call times out while it waits for the first
        with pytest.raises(ApiError, match="took too long"):
            await executor.run(block)
    assert started.is_set()
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    may_end.set()
    patient = SerialExecutor(timeout_s=30)
    assert await asyncio.gather(*(patient.run(lambda number=number: number) for number in range(3))) == [0, 1, 2]  # type: ignore[misc]
    result = None
    while result is None:  # until the blocked call has ended
        with contextlib.suppress(ApiError):
            result = await executor.run(lambda: "again")
    assert result == "again"


async def test_cost_page_is_loaded_once_for_concurrent_readers(
    api: ApiFixture, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.spawn_active_workers()
    clock.advance(3700)
    await api.run_cycle()
    asked: list[Any] = []
    accounts, costs = api.store.open_accounts, api.store.costs

    async def counted_accounts(**which: Any) -> Any:
        asked.append("accounts")
        return await accounts(**which)

    async def counted_costs(by: str, *arguments: Any, **which: Any) -> Any:
        asked.append(str(by))
        return await costs(by, *arguments, **which)

    monkeypatch.setattr(api.store, "open_accounts", counted_accounts)
    monkeypatch.setattr(api.store, "costs", counted_costs)
    pages = await asyncio.gather(*(api.localhost.get("/cost?days=7") for _ in range(5)))
    assert {page.status_code for page in pages} == {200}
    assert "By queue" in pages[0].text
    # The queries of one report, for all five requests.
    assert sorted(asked) == ["accounts", "day", "fleet", "fleet", "queue"]
    assert 'data-refresh-ms="10000"' in pages[0].text
    reports = [await api.localhost.get(f"{API}/cost", params={"by": "queue"}) for _ in range(3)]
    assert len(asked) == 9
    assert reports[0].json()["costs"] == reports[2].json()["costs"]


async def test_cost_page_without_cost_in_its_period_shows_the_month(api: ApiFixture, clock: Any) -> None:
    assert "No cost yet" in (await api.localhost.get("/cost?days=7")).text
    async with connected(api.dsn, "adding cost") as connection:
        await connection.execute(
            "insert into windlass.spending (fleet, hour, currency, task_micros) values ('gpus', $1, 'EUR', 7000000)",
            clock(),
        )
    clock.advance(10 * 86_400)
    page = (await api.localhost.get("/cost?days=1")).text
    assert "No cost yet" not in page
    assert re.search(r"<dt>Cost</dt><dd>0 <small>EUR</small></dd><dd class=\"note\">none in this period", page)
    assert re.search(r"<dt>This month</dt><dd>7.00 <small>EUR</small></dd>", page)


async def test_cost_page_shows_every_day_in_each_currency(api: ApiFixture, clock: Any) -> None:
    async with connected(api.dsn, "adding cost") as connection:
        await connection.execute(
            "insert into windlass.spending (fleet, hour, currency, task_micros)"
            " select 'gpus', $1::timestamptz - day * interval '1 day', currency, 1000000"
            " from generate_series(0, 6) as day, unnest(array['EUR', 'USD']) as currency",
            clock(),
        )
    page = (await api.localhost.get("/cost?days=7")).text
    for days_ago in range(7):
        day = f"{clock() - timedelta(days=days_ago):%Y-%m-%d}"
        assert page.count(f'<th scope="row">{day}</th>') == 2


async def test_shared_volume_is_shown_once_with_the_total(api: ApiFixture, clock: Any) -> None:
    await api.run_cycle()
    for _ in range(2):
        for fleet in ("gpus", "other"):
            await api.store.record_volume(fleet, Volume("vol-1", 500, 2_000_000, "USD"))
        clock.advance(3600)
    async with connected(api.dsn, "adding cost") as connection:
        await connection.execute(
            "insert into windlass.spending (fleet, hour, currency, task_micros) values ('gpus', $1, 'USD', 3000000)",
            clock(),
        )
    found = (await api.localhost.get(f"{API}/cost")).json()
    assert found["volumes"] == [
        {
            "volume_id": "vol-1",
            "fleets": ["gpus", "other"],
            "size_gb": 500,
            "currency": "USD",
            "amount_micros": 2_000_000,
            "price_micros_per_hour": 2_000_000,
            "month_micros": 1_440_000_000,
        }
    ]
    assert found["total"][0]["total_micros"] == 3_000_000
    assert found["sums"] == [
        {
            "currency": "USD",
            "machines_micros": 3_000_000,
            "volumes_micros": 2_000_000,
            "is_estimate": False,
            "total_micros": 5_000_000,
        }
    ]
    page = (await api.localhost.get("/cost")).text
    assert page.count('<th scope="row">vol-1</th>') == 1
    assert '<a href="/fleets/gpus">gpus</a>, <a href="/fleets/other">other</a>' in page
    assert "<dd>5.00 <small>USD</small></dd>" in page
    assert "3.00 for tasks, 2.00 for volumes" in page


async def test_cost_page_shows_volumes_without_machines(api: ApiFixture, clock: Any) -> None:
    await api.run_cycle()
    for _ in range(2):
        await api.store.record_volume("gpus", Volume("vol-1", 500, 2_000_000, "USD"))
        clock.advance(3600)
    page = (await api.localhost.get("/cost")).text
    assert "<dd>2.00 <small>USD</small></dd>" in page
    assert "No cost yet" not in page


async def test_cost_page_shows_unused_budget(api: ApiFixture) -> None:
    await api.run_cycle()
    api.control.fleets["gpus"] = FLEET.model_copy(update={"budget_per_day": Decimal(10)})
    page = (await api.localhost.get("/cost")).text
    assert "per day: 0.00 of 10.00" in page
    assert "No cost" in page
