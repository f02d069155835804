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
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from windlass.policy.backoff import reconnect_delay_s
from windlass.worker.process import ProcessGroup, describe_exit, start_group

# Whoever ran for this long has started well: its next end is the first again.
PROVEN_S = 30.0
# Beyond the time that a program allows itself to stop: for what it does then, as giving back what it could not finish.
STOP_MARGIN_S = 15.0
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SupervisedProgram:
    """One whose command or environment changes starts anew: it reads its settings from nowhere else."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    stop_timeout_s: float


class ProgramSupervisor:
    """Programs by name, which are kept running as they are wanted."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[SupervisedProgram, asyncio.Event, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def arrange(self, wanted: Mapping[str, SupervisedProgram]) -> None:
        """From here on these run: new ones start, changed ones end in good order and then start anew, others end."""
        for name in self._kept.keys() | wanted.keys():
            kept, program = self._kept.get(name), wanted.get(name)
            if kept is not None and kept[0] == program:
                continue
            if kept is not None:
                del self._kept[name]
                kept[1].set()
            if program is not None:
                unwanted = asyncio.Event()
                task = asyncio.create_task(_keep(name, program, unwanted, kept[2] if kept is not None else None))
                self._kept[name] = program, unwanted, task
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """All end, in good order."""
        self.arrange({})
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _keep(
    name: str, program: SupervisedProgram, unwanted: asyncio.Event, before: asyncio.Task[None] | None
) -> None:
    """`before`: what keeps the one whose place it takes."""
    if before is not None:
        await asyncio.wait([before])
    if not unwanted.is_set():
        async with kept_running(name, program):
            await unwanted.wait()


@asynccontextmanager
async def kept_running(name: str, program: SupervisedProgram) -> AsyncIterator[None]:
    """At the end it is asked to stop, and ended when it takes longer than it may."""
    keeper = _ProgramKeeper(name, program)
    task = asyncio.create_task(keeper.keep())
    try:
        yield
    finally:
        await keeper.stop(program.stop_timeout_s + STOP_MARGIN_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _ProgramKeeper:
    def __init__(self, name: str, program: SupervisedProgram) -> None:
        self._name = name
        self._program = program
        self._group: ProcessGroup | None = None
        # Held while one is being started: it may be at work before we know who it is.
        self._starting = asyncio.Lock()
        self._is_stopping = False

    async def keep(self) -> None:
        failures = 0
        while not self._is_stopping:
            started = time.monotonic()
            how = await self._run()
            if self._is_stopping:
                return
            failures = 1 if time.monotonic() - started > PROVEN_S else failures + 1
            pause_s = reconnect_delay_s(failures, random.random())  # noqa: S311
            log.warning("ended; starting it again", program=self._name, how=how, pause_s=round(pause_s, 1))
            await asyncio.sleep(pause_s)

    async def _run(self) -> str:
        """From its start to its end. Returns how it ended."""
        try:
            async with self._starting:
                group = self._group = await start_group(
                    self._program.command, env=self._program.env, max_output_bytes=math.inf
                )
        except OSError as error:
            # This host has no process, or no memory, to spare. It may have later.
            return f"did not start ({error})"
        try:
            code = await group.wait()
        finally:
            await group.end()
        return describe_exit(code)

    async def stop(self, timeout_s: float) -> None:
        self._is_stopping = True
        async with self._starting:
            group = self._group
        if group is None or group.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(group.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await group.wait()
        await group.end()
