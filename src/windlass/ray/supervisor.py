"""Keeps programs running: starts them, restarts them with back-off when they exit, and stops them.

Each program has its own process, because Ray kills the process of a driver whose head is gone. If this process dies,
even by SIGKILL, its programs are killed too.
"""

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from windlass.retry import Backoff
from windlass.worker.process import ProcessGroup, describe_exit, start_group

# A program that ran for this long has started well: its next exit counts as the first failure.
HEALTHY_AFTER_S = 30.0
# In addition to the program's own stop timeout: for releasing the tasks that it could not finish.
STOP_MARGIN_S = 15.0
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SupervisedProgram:
    """Command and environment are all the settings of a program. If they change, it restarts."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    stop_timeout_s: float


@dataclass(frozen=True, slots=True)
class _Supervision:
    program: SupervisedProgram
    stop: asyncio.Event
    task: asyncio.Task[None]


class ProgramSupervisor:
    def __init__(self) -> None:
        self._supervised: dict[str, _Supervision] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def programs(self) -> dict[str, SupervisedProgram]:
        return {name: supervision.program for name, supervision in self._supervised.items()}

    def set_programs(self, programs: Mapping[str, SupervisedProgram]) -> None:
        """Start new programs, restart changed ones, stop the others. Returns at once."""
        for name in self._supervised.keys() | programs.keys():
            current, program = self._supervised.get(name), programs.get(name)
            if current is not None and current.program == program:
                continue
            if current is not None:
                del self._supervised[name]
                current.stop.set()
            if program is not None:
                stop = asyncio.Event()
                previous = None if current is None else current.task
                task = asyncio.create_task(_run_until_stopped(name, program, stop, previous))
                self._supervised[name] = _Supervision(program, stop, task)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop all programs and wait for their end."""
        self.set_programs({})
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _run_until_stopped(
    name: str, program: SupervisedProgram, stop: asyncio.Event, previous: asyncio.Task[None] | None
) -> None:
    """Starts after `previous`, the supervision of the program that it replaces, has ended."""
    if previous is not None:
        await asyncio.wait([previous])
    if not stop.is_set():
        async with running_program(name, program):
            await stop.wait()


@asynccontextmanager
async def running_program(name: str, program: SupervisedProgram) -> AsyncIterator[None]:
    """Keep a program running inside the context. At its end send SIGTERM, and kill the program after its timeout."""
    runner = _ProgramRunner(name, program)
    task = asyncio.create_task(runner.run_forever())
    try:
        yield
    finally:
        await runner.stop(program.stop_timeout_s + STOP_MARGIN_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _ProgramRunner:
    def __init__(self, name: str, program: SupervisedProgram) -> None:
        self._name = name
        self._program = program
        self._group: ProcessGroup | None = None
        # Held during a start: the program may already be working before its process is known here.
        self._starting = asyncio.Lock()
        self._is_stopping = False

    async def run_forever(self) -> None:
        backoff = Backoff()
        while not self._is_stopping:
            started = time.monotonic()
            exit_description = await self._run_once()
            if self._is_stopping:
                return
            if time.monotonic() - started > HEALTHY_AFTER_S:
                backoff.reset()
            delay_s = backoff.next_delay_s()
            log.warning("program exited, restarting", program=self._name, exit=exit_description, delay_s=delay_s)
            await asyncio.sleep(delay_s)

    async def _run_once(self) -> str:
        try:
            async with self._starting:
                group = self._group = await start_group(
                    self._program.command, env=self._program.env, max_output_bytes=math.inf
                )
        except OSError as error:
            # The host is out of processes or memory, which may be temporary.
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
