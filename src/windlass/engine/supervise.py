"""Programs of ours that must go on: started, and started again when they end, until they are no longer wanted.

Each has its own process, for Ray ends a driver's process when its head is gone. When we are ended, even by SIGKILL, so
are they.
"""

import asyncio
import contextlib
import math
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import structlog

from windlass.policy.backoff import reconnect_delay_s
from windlass.worker.process import Group, describe_exit, start_group

# Whoever ran for this long has started well: its next end is the first again.
PROVEN_S = 30.0
log = structlog.get_logger(__name__)


@asynccontextmanager
async def kept_running(
    name: str, command: Sequence[str], env: Mapping[str, str], stop_timeout_s: float
) -> AsyncIterator[None]:
    """At the end it is asked to stop, and ended when it takes longer than that."""
    keeper = _Keeper(name, command, env)
    task = asyncio.create_task(keeper.keep())
    try:
        yield
    finally:
        await keeper.stop(stop_timeout_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Keeper:
    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._name = name
        self._command = command
        self._env = env
        self._group: Group | None = None
        self._is_stopping = False

    async def keep(self) -> None:
        failures = 0
        while not self._is_stopping:
            started = time.monotonic()
            self._group = await start_group(self._command, env=self._env, max_output_bytes=math.inf)
            try:
                code = await self._group.wait()
            finally:
                await self._group.end()
            if self._is_stopping:
                return
            failures = 1 if time.monotonic() - started > PROVEN_S else failures + 1
            pause_s = reconnect_delay_s(failures, random.random())  # noqa: S311
            log.warning(
                "ended; starting it again", program=self._name, how=describe_exit(code), pause_s=round(pause_s, 1)
            )
            await asyncio.sleep(pause_s)

    async def stop(self, timeout_s: float) -> None:
        self._is_stopping = True
        group = self._group
        if group is None or group.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(group.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(group.wait(), timeout_s)
        await group.end()
