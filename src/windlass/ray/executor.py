"""One attempt, seen through Ray from its claim to its outcome.

It waits for a seat, becomes the task of that seat's node in the database, and only then begins: `seats.py`. Its time
limit counts from the beginning; when it is over, or the claim is gone, or the node, the attempt's process is ended.
"""

import asyncio

from windlass.model.errors import BadInput
from windlass.model.ray import RaySettings, frozen
from windlass.model.task import Claim
from windlass.ray.resources import needs_of
from windlass.ray.seat_pool import SeatAttempt, Seats
from windlass.worker.executor import AttemptFailure, Outcome, timeout_failure
from windlass.worker.handler import ReportProgress


class RayExecutor:
    def __init__(self, seats: Seats, settings: RaySettings) -> None:
        self._seats = seats
        self._settings = settings

    async def start(self) -> None:
        """Nothing to get ready: whether there is a handler, the first node tells."""

    async def close(self) -> None:
        """Attempts are ended one by one."""

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        try:
            needs = frozen(needs_of(claim, self._settings))
        except BadInput as error:
            return AttemptFailure("BAD_RESOURCES", str(error), retry=False)
        over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        limit = asyncio.timeout(None)
        attempt = SeatAttempt(claim, needs, report, over, limit)
        try:
            self._seats.admit(attempt)
            async with limit:
                return await over
        except TimeoutError:
            await self._seats.end(attempt)
            return attempt.failure or timeout_failure(claim.timeout_s or 0)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self._seats.end(attempt)))
            raise
        finally:
            self._seats.dismiss(attempt)
