"""What a worker reports in its heartbeats cannot make a cycle, a list, a page or a view fail."""

import json
from typing import Any

import asyncpg
import pytest

from support.api_fixture import API, ApiFixture
from support.queue_sql import connected
from windlass.model.auth import Role

VALUES = [
    '"n/a"', '"Infinity"', '"NaN"', '""', "1e400", "-1e400", "1e-400", "1e600", "-1", "true", "null", "[]", "{}",
    '{"idle_s": [1e400]}',
]  # fmt: skip
REPORTED = ("idle_s", "storage_used_bytes", "storage_free_bytes", "ray_dashboard", "gpu", "load")
NUMBERED = ("pid", "vram_total_mb", "vram_used_mb")


@pytest.mark.parametrize("value", VALUES)
async def test_hostile_metadata_breaks_no_reader(api: ApiFixture, dsn: str, value: str) -> None:
    workers = await api.spawn_active_workers()
    vitals = f"{{{', '.join(f'{json.dumps(name)}: {value}' for name in REPORTED)}}}"
    async with connected(dsn) as sql:
        for worker_id in workers:
            await sql.execute("select * from windlass.heartbeat($1, '[]', $2)", worker_id, vitals)
        await check_every_reader(api, sql, sorted(workers)[0])


@pytest.mark.parametrize("value", ["2147483647", "-2147483648", "0"])
async def test_extreme_vram_and_pid_break_no_reader(api: ApiFixture, dsn: str, value: str) -> None:
    workers = await api.spawn_active_workers()
    vitals = json.dumps({name: int(value) for name in NUMBERED})
    async with connected(dsn) as sql:
        for worker_id in workers:
            await sql.execute("select * from windlass.heartbeat($1, '[]', $2)", worker_id, vitals)
        await check_every_reader(api, sql, sorted(workers)[0])


@pytest.mark.parametrize(
    "vitals",
    ["[1]", '"text"', "7", f'{{"a": {"[" * 1500}{"]" * 1500}}}', '{"pid": "n/a"}', '{"vram_total_mb": 1e400}'],
    ids=["array", "text", "number", "nested", "pid", "vram"],
)
async def test_vitals_that_no_client_could_read_are_refused(api: ApiFixture, dsn: str, vitals: str) -> None:
    worker_id = sorted(await api.spawn_active_workers())[0]
    async with connected(dsn) as sql:
        with pytest.raises(asyncpg.PostgresError):
            await sql.execute("select * from windlass.heartbeat($1, '[]', $2)", worker_id, vitals)
        await check_every_reader(api, sql, worker_id)


async def check_every_reader(api: ApiFixture, sql: Any, worker_id: str) -> None:
    await api.run_cycle()
    viewer = await api.client_as(Role.VIEWER)
    for path in ("workers", f"workers/{worker_id}", "overview", "fleets"):
        response = await viewer.get(f"{API}/{path}")
        assert response.status_code == 200, (path, response.text)
    for page in ("/", "/workers", f"/workers/{worker_id}", "/metrics"):
        response = await viewer.get(page)
        assert response.status_code == 200, (page, response.text)
    views = await sql.fetch("select table_name from information_schema.views where table_schema = 'windlass'")
    for view in views:
        await sql.fetch(f"select * from windlass.{view['table_name']}")  # noqa: S608
