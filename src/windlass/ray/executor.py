"""Runs one attempt through Ray, from its claim to its outcome. Implements worker/executor.py.

The attempt waits for a seat and begins after the database has assigned its task to the seat's node (seat_pool.py). Its
time limit counts from then. At the time limit, or when the claim or the node is lost, its process is killed.
"""

import asyncio
from functools import partial

from windlass.model.errors import BadInput
from windlass.model.ray import RaySettings, frozen
from windlass.model.task import Claim
from windlass.model.worker_log import AttemptKey
from windlass.ray.resources import resolve_needs
from windlass.ray.seat_pool import SeatPool
from windlass.ray.seat_state import SeatAttempt
from windlass.worker.executor import AttemptFailure, Outcome, timeout_failure
from windlass.worker.handler import ReportProgress
from windlass.worker.output_buffer import OutputBuffer


class RayExecutor:
    def __init__(self, pool: SeatPool, settings: RaySettings, output: OutputBuffer | None = None) -> None:
        """`output` gets the lines that attempts print, which the worker of this executor begins and ends there."""
        self._pool = pool
        self._settings = settings
        self._output = output

    async def start(self) -> None:
        """Nothing to load here: the first seat finds out whether there is a handler."""

    async def close(self) -> None:
        """Nothing to close: `run` ends its attempt."""

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        try:
            needs = frozen(resolve_needs(claim, self._settings))
        except BadInput as error:
            return AttemptFailure("BAD_RESOURCES", str(error), retry=False)
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        timeout = asyncio.timeout(None)
        attempt = SeatAttempt(claim, needs, report, partial(self._add_output, claim), outcome, timeout)
        try:
            self._pool.add(attempt)
            async with timeout:
                return await outcome
        except TimeoutError:
            await self._pool.kill(attempt)
            return attempt.failure or timeout_failure(claim.timeout_s or 0)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self._pool.kill(attempt)))
            raise
        finally:
            self._pool.remove(attempt)

    def _add_output(self, claim: Claim, lines: bytes, dropped: int) -> None:
        if self._output is not None:
            self._output.add(lines, AttemptKey(claim.task_id, claim.attempt), dropped)
