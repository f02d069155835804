"""The shared retry helper: what it repeats, when it gives up, and how long it waits."""

import asyncio

import pytest
from structlog.testing import capture_logs

from windlass.model.errors import BadInput, DatabaseUnavailable
from windlass.policy.backoff import RECONNECT_CEILING_S
from windlass.retry import Backoff, retrying


class Flaky:
    """Fails a number of times, then returns "done"."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self.failures = failures
        self.calls = 0
        self._error = error or DatabaseUnavailable("connection refused")

    async def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self._error
        return "done"


async def no_pause(_delay_s: float) -> None:
    await asyncio.sleep(0)


async def test_retry_returns_the_first_success_and_logs_each_failure() -> None:
    call = Flaky(2)
    with capture_logs() as lines:
        assert await retrying(call, "register worker failed", pause=no_pause, worker_id="w1") == "done"
    assert call.calls == 3
    assert [(line["event"], line["worker_id"], line["failures"]) for line in lines] == [
        ("register worker failed", "w1", 1),
        ("register worker failed", "w1", 2),
    ]


async def test_retry_raises_errors_it_was_not_asked_to_retry() -> None:
    call = Flaky(1, BadInput("wrong"))
    with pytest.raises(BadInput):
        await retrying(call, "register worker failed", pause=no_pause)
    assert call.calls == 1


@pytest.mark.parametrize(
    "limit",
    [
        pytest.param({"timeout_s": 0.0}, id="the time limit has passed"),
        pytest.param({"is_stopped": lambda: True}, id="the caller stops"),
    ],
)
async def test_retry_raises_the_last_error_when(limit: dict[str, float]) -> None:
    call = Flaky(9)
    with pytest.raises(DatabaseUnavailable):
        await retrying(call, "register worker failed", pause=no_pause, **limit)  # type: ignore[arg-type]
    assert call.calls == 1


async def test_retry_can_be_cancelled_while_it_waits() -> None:
    call = Flaky(9)
    waiting = asyncio.Event()

    async def pause(_delay_s: float) -> None:
        waiting.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(retrying(call, "register worker failed", pause=pause))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.calls == 1


def test_backoff_grows_to_its_ceiling_and_starts_again_after_a_success() -> None:
    backoff = Backoff()
    delays_s = [backoff.next_delay_s() for _ in range(40)]
    assert delays_s[0] <= 0.1
    assert RECONNECT_CEILING_S / 2 <= max(delays_s) <= RECONNECT_CEILING_S
    backoff.reset()
    assert backoff.next_delay_s() <= 0.1
