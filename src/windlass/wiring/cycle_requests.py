"""Answers of a control process to requests for cycles, which servers write into the database.

A standby answers only requests that no leader has answered for a while, so that the answer is that of the leader.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog

from windlass.background import background_task
from windlass.control.summary import Summary
from windlass.model.errors import WindlassError
from windlass.ports.processes import ProcessStore

# Interval of the search for requests, if notifications arrive and if they do not.
SEARCH_INTERVAL_S, BLIND_SEARCH_INTERVAL_S = 10.0, 1.0
# A standby waits this long for the leader's answer.
STANDBY_WAIT_S = 5.0
log = structlog.get_logger(__name__)


@asynccontextmanager
async def answered_cycle_requests(
    store: ProcessStore,
    cycle_now: Callable[[], Awaitable[list[Summary]]],
    wake: Callable[[str], None],
    has_begun: asyncio.Event,
) -> AsyncIterator[None]:
    """Answer requests until the context exits, once the fleets run (`has_begun`).

    `wake` gets the name of a fleet for which a person requested something, so that its next cycle starts at once.
    """
    has_request, is_listening = asyncio.Event(), False

    def set_listening(value: bool) -> None:
        nonlocal is_listening
        is_listening = value
        has_request.set()  # one may have come before

    def receive(fleet: str) -> None:
        if fleet:
            wake(fleet)
        else:
            has_request.set()

    async def answer_forever() -> None:
        await has_begun.wait()
        while True:
            has_request.clear()
            try:
                await _answer_open_requests(store, cycle_now)
            except (WindlassError, TimeoutError) as error:
                log.warning("answer requests for cycles failed", error=str(error) or type(error).__name__)
            except Exception:
                # A defect. The loop must continue, or no later request would be answered.
                log.exception("answer requests for cycles failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SEARCH_INTERVAL_S if is_listening else BLIND_SEARCH_INTERVAL_S):
                    await has_request.wait()

    async with (
        background_task(store.watch_cycle_requests(set_listening, receive)),
        background_task(answer_forever()),
    ):
        yield


async def _answer_open_requests(store: ProcessStore, cycle_now: Callable[[], Awaitable[list[Summary]]]) -> None:
    request_ids = await store.open_cycle_requests()
    if not request_ids:
        return
    summaries = await cycle_now()
    if summaries and not any(summary.is_leader for summary in summaries):
        await asyncio.sleep(STANDBY_WAIT_S)
    await store.answer_cycle_requests(request_ids, [summary.to_plain() for summary in summaries])
