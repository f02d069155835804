"""Limits the log lines of failed requests: the same failure has one line per interval, with its number of requests.

While the database is down, every request fails for the same reason, also those of anonymous clients. So no client can
fill the disk. The number of different failures is bounded too; those beyond it are counted together.
"""

import asyncio
import time
from collections.abc import Callable

import structlog

# An operator who follows the log sees within this time that requests still fail, and how many.
FAILURE_LOG_INTERVAL_S = 10.0
# Different failures per interval. An outage has one for each kind of statement.
MAX_FAILURES_LOGGED = 50
# Counts all further ones.
OTHER_FAILURES = "other failures"
MAX_FAILURE_CHARACTERS = 500
log = structlog.get_logger("windlass.server")


class FailureLog:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By failure: when its last line was written, and the requests since then.
        self._failures: dict[str, tuple[float, int]] = {}

    def count(self, failure: str) -> int:
        """Count a failed request. Returns how many requests a line stands for that is due now; 0 if none is due."""
        failure, now = failure[:MAX_FAILURE_CHARACTERS], self._clock()
        if failure not in self._failures and len(self._failures) >= MAX_FAILURES_LOGGED:
            failure = OTHER_FAILURES
        logged_at, requests = self._failures.get(failure, (float("-inf"), 0))
        requests += 1
        is_due = now >= logged_at + FAILURE_LOG_INTERVAL_S
        self._failures[failure] = (now, 0) if is_due else (logged_at, requests)
        return requests if is_due else 0

    async def run(self) -> None:
        """Write the counts of failures that do not occur any more."""
        while True:
            await asyncio.sleep(FAILURE_LOG_INTERVAL_S)
            self.report()

    def report(self) -> None:
        """Write a line for each failure whose interval has passed, and forget those without requests."""
        now = self._clock()
        for failure, (logged_at, requests) in list(self._failures.items()):
            if now < logged_at + FAILURE_LOG_INTERVAL_S:
                continue
            if requests:
                log.warning("count failed requests", failure=failure, requests=requests)
                self._failures[failure] = now, 0
            else:
                del self._failures[failure]
