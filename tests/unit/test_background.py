"""Background tasks: their failures are logged when they happen."""

import asyncio

from structlog.testing import capture_logs

from windlass.background import background_task

LIMIT_S = 60.0


async def fail() -> None:
    raise RuntimeError("a defect")


async def test_failure_is_logged_while_the_context_is_open() -> None:
    with capture_logs() as logs:
        async with asyncio.timeout(LIMIT_S), background_task(fail()):
            while not logs:
                await asyncio.sleep(0)
    assert [(entry["event"], entry["task"], str(entry["exc_info"])) for entry in logs] == [
        ("run background task failed", "fail", "a defect")
    ]


async def test_end_of_the_context_is_no_failure() -> None:
    with capture_logs() as logs:
        async with background_task(asyncio.sleep(LIMIT_S)):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert logs == []
