"""The page "What if": calculated in another process, cached, and limited to the caller's fleets."""

import asyncio
import time
from typing import Any

import asyncpg
import httpx
import pytest

from support.api_fixture import RNG, ApiFixture
from windlass.model.auth import API_PREFIX, Role, TokenScope, hash_of, new_token
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.server import what_if
from windlass.server.what_if import WhatIf
from windlass.simulator.batch import Batch, Comparison, compare

LIMIT_S = 240.0
PAGE = "/fleets/gpus/what-if"
# 300 tasks of 40 s in the last five days, and two machines with boots of 90 s.
PAST = """
insert into windlass.tasks (queue, status, created_at, started_at, finished_at)
select 'a', 'complete', b.at, b.at + interval '5 s', b.at + interval '45 s'
from (
  select windlass.now() - interval '5 days' + make_interval(secs => 1200 * n) as at from generate_series(1, 300) as n
) as b;
insert into windlass.fleets (name) values ('gpus') on conflict do nothing;
insert into windlass.slots (fleet, slot) select 'gpus', n from generate_series(0, 1) as n;
insert into windlass.workers (id, fleet, slot, status, created_at, activated_at, terminated_at, price_micros_per_hour,
  currency, billing_unit_s)
select 'old-' || n, 'gpus', n, 'terminated', b.at, b.at + interval '90 s', b.at + interval '1 hour', 360000, 'EUR', 3600
from generate_series(0, 1) as n cross join lateral (select windlass.now() - interval '3 hours' as at) as b;
"""


async def add_past(api: ApiFixture) -> None:
    connection = await asyncpg.connect(api.dsn)
    try:
        await connection.execute("select set_config('windlass.now', $1, false)", (await api.store.now()).isoformat())
        await connection.execute(PAST)
    finally:
        await connection.close()


async def calculated(client: httpx.AsyncClient) -> str:
    give_up_at = time.monotonic() + LIMIT_S
    while True:
        answer = await client.get(PAGE)
        answer.raise_for_status()
        if 'id="calculating"' not in answer.text:
            return answer.text
        assert time.monotonic() < give_up_at, "no result"
        await asyncio.sleep(0.1)


async def test_page_compares_running_settings_with_two_others(api: ApiFixture) -> None:
    await add_past(api)
    viewer = await api.client_as(Role.VIEWER)
    page = await calculated(viewer)
    assert page.count('<tr><th scope="row">') == 3
    for text in (
        "running: buffered",
        "adaptive",
        "hetzner-recycler",
        "300 tasks over",
        "measured on 2 machines",
        "EUR",
    ):
        assert text in page, text
    assert page.count("<svg xmlns") == 5
    assert "instead of" in page


async def test_result_is_cached(api: ApiFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    await add_past(api)
    viewer = await api.client_as(Role.VIEWER)
    page = await calculated(viewer)
    reads = 0

    async def count(*_: Any) -> Any:
        nonlocal reads
        reads += 1
        raise AssertionError("the history is read again")

    monkeypatch.setattr(api.store, "task_history", count)
    assert page.split("<table>")[1].split("</table>")[0] in (await viewer.get(PAGE)).text
    assert reads == 0


async def test_fleet_without_tasks_says_so(api: ApiFixture) -> None:
    viewer = await api.client_as(Role.VIEWER)
    await api.run_cycle()
    assert "fleet gpus has no finished task since" in await calculated(viewer)


async def test_page_needs_a_login_and_a_configured_fleet(api: ApiFixture) -> None:
    assert (await api.remote.get(PAGE)).status_code == 401
    viewer = await api.client_as(Role.VIEWER)
    assert (await viewer.get("/fleets/other/what-if")).status_code == 404
    worker = await api.client_as(Role.WORKER)
    assert (await worker.get(PAGE)).status_code == 403


async def test_limited_viewer_sees_only_its_fleets(api: ApiFixture) -> None:
    await api.run_cycle()
    statuses = {}
    for fleet in ("gpus", "other"):
        token = new_token(API_PREFIX, RNG)
        await api.store.create_token(f"only-{fleet}", Role.VIEWER, hash_of(token), scope=TokenScope(fleets=(fleet,)))
        limited = api.client("192.0.2.7", Authorization=f"Bearer {token}")
        statuses[fleet] = (await limited.get(PAGE)).status_code, (await limited.get("/what-if")).status_code
    assert statuses == {"gpus": (200, 303), "other": (404, 200)}


class Fleet:
    """A WhatIf over a store with some tasks, and calculations that a test holds or fails."""

    def __init__(self, api: ApiFixture) -> None:
        self.batches: list[Batch] = []
        self.go = asyncio.Event()
        self.error: Exception | None = None
        self.what_if = WhatIf(api.store, self._run)

    async def _run(self, batch: Batch) -> Comparison:
        self.batches.append(batch)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return compare(batch)

    async def result(self, settings: FleetConfig) -> Any:
        give_up_at = time.monotonic() + LIMIT_S
        while (found := self.what_if.get("gpus", settings)) is None:
            assert time.monotonic() < give_up_at, "no result"
            await asyncio.sleep(0.01)
        return found


async def test_changed_settings_are_calculated_anew(api: ApiFixture) -> None:
    await add_past(api)
    fleet = Fleet(api)
    fleet.go.set()
    first = await fleet.result(FleetConfig(queues=("a",), max_workers=3, env={"API_KEY": "hunter2"}))
    assert await fleet.result(FleetConfig(queues=("a",), max_workers=3, env={"API_KEY": "hunter2"})) is first
    second = await fleet.result(FleetConfig(queues=("a",), max_workers=5))
    assert second is not first
    assert [batch.requests[0].config.max_workers for batch in fleet.batches] == [3, 5]
    # The environment of handlers may have secrets, and is not sent.
    assert "hunter2" not in repr(fleet.batches)


async def test_failed_calculation_says_why(api: ApiFixture) -> None:
    await add_past(api)
    fleet = Fleet(api)
    fleet.error = BadInput("The calculation was stopped after 600 s.")
    fleet.go.set()
    found = await fleet.result(FleetConfig(queues=("a",)))
    assert found.problem == "The calculation was stopped after 600 s."
    assert found.comparison is None


async def test_calculation_that_takes_too_long_is_killed(api: ApiFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    original = asyncio.create_subprocess_exec

    async def start(*arguments: str, **options: Any) -> Any:
        process = await original("sleep", "1000", **options)
        started.append(process)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(what_if, "TIMEOUT_S", 0.2)
    await add_past(api)
    slow = WhatIf(api.store)
    give_up_at = time.monotonic() + LIMIT_S
    while (found := slow.get("gpus", FleetConfig(queues=("a",)))) is None:
        assert time.monotonic() < give_up_at, "no result"
        await asyncio.sleep(0.05)
    assert found.problem == "The calculation was stopped after 0.2 s."
    assert started[0].returncode == -9
