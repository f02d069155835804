"""Retry loops with exponential back-off and jitter.

`retrying` repeats one call until it succeeds, a time limit passes or the caller stops. `Backoff` counts the failures of
loops that do more than repeat one call. Delays never exceed RECONNECT_CEILING_S. Cancellation is never swallowed.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog

from windlass.model.errors import DatabaseUnavailable
from windlass.policy.backoff import reconnect_delay_s

_Result = TypeVar("_Result")
log = structlog.get_logger(__name__)


class Backoff:
    """Counts consecutive failures and gives the delay before the next attempt. `rng` supplies the jitter."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()  # noqa: S311 - spreads retries, protects nothing
        self.failures = 0

    def next_delay_s(self) -> float:
        """Count one more failure."""
        self.failures += 1
        return reconnect_delay_s(self.failures, self._rng.random())

    def reset(self) -> None:
        """Call after a success: the next failure is the first again."""
        self.failures = 0


async def retrying(
    call: Callable[[], Awaitable[_Result]],
    event: str,
    *,
    retry_on: type[Exception] | tuple[type[Exception], ...] = DatabaseUnavailable,
    timeout_s: float = float("inf"),
    is_stopped: Callable[[], bool] = lambda: False,
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    rng: random.Random | None = None,
    **fields: Any,
) -> _Result:
    """Return the result of `call`, repeating it with back-off after each error of `retry_on`.

    The error is raised instead once `timeout_s` has passed since the first attempt, or when `is_stopped()` is true.
    Each retry logs `event` as a warning with `fields`, the error and the number of failures. `pause` waits between
    attempts; pass one that returns early if the caller can be woken or stopped.
    """
    give_up_at = time.monotonic() + timeout_s
    backoff = Backoff(rng)
    while True:
        try:
            return await call()
        except retry_on as error:
            delay_s = backoff.next_delay_s()
            if is_stopped() or time.monotonic() >= give_up_at:
                raise
            log.warning(event, **fields, error=str(error) or type(error).__name__, failures=backoff.failures)
            last_error = error
        await pause(delay_s)
        if is_stopped():
            raise last_error
