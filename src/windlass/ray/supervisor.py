"""Keeps programs running: starts them, restarts them with back-off when they exit, and stops them.

Each program has its own process, because Ray kills the process of a driver whose head is gone. If this process dies,
even by SIGKILL, its programs are killed too.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
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


class ProgramSupervisor:
    def __init__(self) -> None:
        self._supervised: dict[str, tuple[SupervisedProgram, asyncio.Event, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def programs(self) -> dict[str, SupervisedProgram]:
        return {name: program for name, (program, _, _) in self._supervised.items()}

    def set_programs(self, programs: Mapping[str, SupervisedProgram]) -> None:
        """Start new programs, restart changed ones, stop the others. Returns at once."""
        for name in self._supervised.keys() | programs.keys():
            program, previous = programs.get(name), None
            if name in self._supervised:
                if self._supervised[name][0] == program:
                    continue
                _, stop, previous = self._supervised.pop(name)
                stop.set()
            if program is not None:
                stop = asyncio.Event()
                task = asyncio.create_task(_run_until_stopped(name, program, stop, previous))
                self._supervised[name] = program, stop, task
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop all programs and wait for their end."""
        self.set_programs({})
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _run_until_stopped(
    name: str, program: SupervisedProgram, stop: asyncio.Event, previous: asyncio.Task[None] | None
) -> None:
    """Starts after `previous`, the task of the program that it replaces, has ended."""
    if previous is not None:
        await asyncio.wait([previous])
    backoff = Backoff()
    while not stop.is_set():
        started = time.monotonic()
        try:
            group = await start_group(program.command, env=program.env, limits_output=False)
        except OSError as error:
            # The host is out of processes or memory, which may be temporary.
            exit_description = f"did not start ({error})"
        else:
            exit_description = await _wait_for_exit(group, stop, program.stop_timeout_s + STOP_MARGIN_S)
        if stop.is_set():
            return
        if time.monotonic() - started > HEALTHY_AFTER_S:
            backoff.reset()
        delay_s = backoff.next_delay_s()
        log.warning("restart program", program=name, exit=exit_description, delay_s=round(delay_s, 1))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await stop.wait()


async def _wait_for_exit(group: ProcessGroup, stop: asyncio.Event, stop_timeout_s: float) -> str:
    """Wait until the program exits. When `stop` is set, send SIGTERM, and kill the program after the timeout."""
    exiting, stopping = asyncio.create_task(group.wait()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((exiting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not exiting.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(group.pid, signal.SIGTERM)
            await asyncio.wait((exiting,), timeout=stop_timeout_s)
    finally:
        exiting.cancel()
        stopping.cancel()
        await group.end()
    return "was stopped" if group.returncode is None else describe_exit(group.returncode)
