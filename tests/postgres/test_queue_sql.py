import asyncpg
import pytest
@pytest.mark.parametrize("n", range(5))
async def test_x(n, each_dsn):
    c = await asyncpg.connect(each_dsn)
    print(await c.fetchval("select version()"), await c.fetchval("show fsync"))
    await c.close()
async def test_y(empty_dsn): pass
