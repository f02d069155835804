"""Diagnostics of workers whose text takes several bytes per character."""

import asyncpg


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
