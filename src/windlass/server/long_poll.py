"""Many workers wait for the same queues; one call waits for all of them.

Each set of queues has a bell. Whoever waits is told how often it has rung, says so when it waits again, and so misses
nothing in between, however many wait and whatever became of an answer. A bell is a hint: it also rings for nothing, and
it is taken down when nobody has listened for a while.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog

from windlass.model.errors import WindlassError

# One look-out of the store; after it the bell rings for nothing.
LOOK_OUT_S = 30.0
# Without a listener for this long a bell is taken down. Longer than any pause of a worker between two waits.
LINGER_S = 60.0
# A database that is away is asked again after this time.
PAUSE_S = 2.0
# Sets of queues: a fleet has one, so this is beyond reason. Who comes after that waits without a bell.
MAX_BELLS = 1_000
WITHOUT_BELL_S = 1.0
log = structlog.get_logger(__name__)

WaitForWork = Callable[[Sequence[str], float], Awaitable[None]]


class LongPollHub:
    def __init__(self, wait_for_work: WaitForWork) -> None:
        self._wait_for_work = wait_for_work
        self._bells: dict[tuple[str, ...], _PollSignal] = {}
        self._is_closed = False

    async def wait(self, queues: Sequence[str], timeout_s: float, cursor: str | None) -> str:
        """Until the bell has rung since `cursor`, or the time is up. Returns the cursor to come back with."""
        names = tuple(sorted(set(queues)))
        bell = self._bells.get(names) or self._hang(names)
        if bell is None:
            await asyncio.sleep(min(timeout_s, WITHOUT_BELL_S))
            return ""
        return await bell.wait(timeout_s, cursor)

    async def close(self) -> None:
        """Everybody who waits is told at once, and nobody waits any more."""
        self._is_closed = True
        bells, self._bells = self._bells, {}
        for bell in bells.values():
            bell.close()
        await asyncio.gather(*(bell.task for bell in bells.values() if bell.task), return_exceptions=True)

    def _hang(self, names: tuple[str, ...]) -> "_PollSignal | None":
        if self._is_closed or len(self._bells) >= MAX_BELLS:
            return None
        bell = self._bells[names] = _PollSignal()
        bell.task = asyncio.create_task(self._keep(names, bell))
        return bell

    async def _keep(self, names: tuple[str, ...], bell: "_PollSignal") -> None:
        while time.monotonic() - bell.listened_at < LINGER_S or bell.listeners:
            try:
                await self._wait_for_work(names, LOOK_OUT_S)
            except WindlassError as error:
                log.warning("not looking out for work", queues=names, error=str(error))
                await asyncio.sleep(PAUSE_S)
            bell.ring()
        self._bells.pop(names, None)


class _PollSignal:
    def __init__(self) -> None:
        # In the cursor, so that one of another bell, or of the control plane before this one, is known as such.
        self._name = secrets.token_hex(4)
        self._rings = 0
        self._ringing = asyncio.Event()
        self.listeners = 0
        self.listened_at = time.monotonic()
        self.task: asyncio.Task[None] | None = None

    @property
    def cursor(self) -> str:
        return f"{self._name}.{self._rings}"

    async def wait(self, timeout_s: float, cursor: str | None) -> str:
        self.listeners += 1
        try:
            if cursor == self.cursor:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await self._ringing.wait()
        finally:
            self.listeners -= 1
            self.listened_at = time.monotonic()
        return self.cursor

    def ring(self) -> None:
        self._rings += 1
        ringing, self._ringing = self._ringing, asyncio.Event()
        ringing.set()

    def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
        self.ring()
