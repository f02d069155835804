"""Output and diagnostics that the database cannot take as they are."""

import asyncio
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from support.http_transport_fixture import over_http
from support.stores import PostgresStores
from windlass.model.worker import Registration
from windlass.store.transport import open_postgres_transport
from windlass.worker.output_buffer import OutputBuffer
from windlass.worker.output_shipper import OutputShipper


async def test_worker_with_long_text_can_still_be_terminated(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(
            "select windlass.register_worker('w', 'default', '{q}');"
            "update windlass.workers set prepare_code = 'INSTALL_FAILED', prepare_reason = repeat('é', 2000),"
            " metadata = jsonb_build_object('note', repeat('é', 1900));"
            "select windlass.append_logs('w', gen_random_uuid(), jsonb_build_array(jsonb_build_object("
            " 'lines', (select jsonb_agg(repeat('🚀', 500)) from generate_series(1, 20)))));"
        )
        for status in ("error", "terminated"):
            await connection.execute(
                "update windlass.workers set status = $1, reason = repeat('é', 2000), code = 'X'", status
            )
        size, code = await connection.fetchrow(
            "select octet_length(diagnostics::text), diagnostics ->> 'code' from windlass.diagnostics"
        )
        assert size <= 16_384
        assert code == "X"
    finally:
        await connection.close()


REFUSE_POISON = """
create function windlass.refuse_poison() returns trigger language plpgsql as $$
begin
  if new.body like '%poison%' then
    raise exception 'a reason that no program knows' using errcode = 'XX001';
  end if;
  return new;
end
$$;
create trigger refuse_poison before insert on windlass.worker_logs
for each row execute function windlass.refuse_poison();
"""


@pytest.mark.parametrize("is_over_http", [False, True], ids=["database", "http"])
async def test_output_that_the_database_always_refuses_is_dropped_and_counted(
    dsn: str, monkeypatch: pytest.MonkeyPatch, is_over_http: bool
) -> None:
    """Only that batch: the output after it arrives."""
    monkeypatch.setattr("windlass.retry.reconnect_delay_s", lambda *_: 0.01)
    async with PostgresStores(dsn) as store, over_http(store) as over:
        await over.register(Registration("w1", ("q",)))
        async with store.database.connection("refusing output") as connection:
            await connection.execute(REFUSE_POISON)

        def open_transport() -> Any:
            """A connection of its own: the shipper has its own event loop."""
            return over.new_transport("w1") if is_over_http else open_postgres_transport(dsn)

        buffer = OutputBuffer()
        shipper = OutputShipper(open_transport, "w1", buffer, interval_s=0.01)
        with capture_logs() as logs:
            buffer.add(b"poison\nwith it\n")
            shipper.start()
            async with asyncio.timeout(60):
                while not any(entry["event"] == "drop output" for entry in logs):
                    await asyncio.sleep(0.01)
                buffer.add(b"after it\n")
                while not (page := await store.worker_log("w1", 10)).lines:
                    await asyncio.sleep(0.01)
                await shipper.stop()
    assert [(line.text, line.dropped) for line in page.lines] == [
        ("[2 lines dropped: more output than the limits allow]", 2),
        ("after it", 0),
    ]
    (dropped,) = [entry for entry in logs if entry["event"] == "drop output"]
    assert dropped["lines"] == 2
    assert "refused" in dropped["error"]
