"""What-if comparisons of fleets for the dashboard: calculated in another process, one at a time, and cached.

A page never waits for a calculation: `get` starts it and returns what is known. A comparison is kept for an hour, or
until the fleet's settings change. Each server process calculates and keeps its own. The history is read through the
store of users, whose statements have a time limit.
"""

import asyncio
import contextlib
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import structlog

from windlass.model.errors import BadInput, DatabaseUnavailable
from windlass.model.fleet import FleetConfig
from windlass.ports.history import HistoryStore
from windlass.simulator.batch import Batch, Comparison
from windlass.simulator.past import FleetPast, fleet_past, shadow_requests

PERIOD = timedelta(days=7)
# Boots of machines that were requested before the period are better than none.
BOOTS_PERIOD = timedelta(days=35)
# The newest tasks of the period. More would take minutes, and change little.
MAX_TASKS = 200_000
MAX_MACHINES = 20_000
KEPT_S = 3600.0
# A failed calculation is repeated after this time.
RETRY_S = 60.0
# At lowest priority on a busy host, even a short calculation may take minutes.
TIMEOUT_S = 600.0
# Fleets whose comparison is kept.
MAX_ENTRIES = 100
# The environment of the process: nothing of the server's but where Python finds its modules.
KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LANG", "LC_ALL")
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FleetComparison:
    """A finished calculation: the comparison, or why there is none."""

    at: datetime
    past: FleetPast | None = None
    comparison: Comparison | None = None
    problem: str = ""


@dataclass(slots=True)
class _Entry:
    settings: FleetConfig
    expires_at: float
    # None: under way.
    found: FleetComparison | None = None
    task: "asyncio.Task[None] | None" = None


class WhatIf:
    def __init__(
        self,
        store: HistoryStore,
        run: "Callable[[Batch], Coroutine[Any, Any, Comparison]] | None" = None,
    ) -> None:
        self._store = store
        self._run = run or run_in_process
        self._lock = asyncio.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def get(self, fleet: str, settings: FleetConfig) -> FleetComparison | None:
        """The comparison of a fleet. None: it is being calculated."""
        now, entry = asyncio.get_running_loop().time(), self._entries.get(fleet)
        if entry is not None and entry.settings == settings and (entry.found is None or now < entry.expires_at):
            return entry.found
        if entry is not None and entry.task is not None:
            entry.task.cancel()
        entry = self._entries[fleet] = _Entry(settings, now + KEPT_S)
        self._entries.move_to_end(fleet)
        while len(self._entries) > MAX_ENTRIES:
            _, oldest = self._entries.popitem(last=False)
            if oldest.task is not None:
                oldest.task.cancel()
        entry.task = asyncio.create_task(self._calculate(fleet, entry))
        return None

    async def _calculate(self, fleet: str, entry: _Entry) -> None:
        loop = asyncio.get_running_loop()
        async with self._lock:
            problem = ""
            try:
                entry.found = await self._compare(fleet, entry.settings)
                entry.expires_at = loop.time() + KEPT_S
            except BadInput as error:
                problem = str(error)
            except DatabaseUnavailable:
                problem = "The history could not be read from the database."
            except Exception:
                log.exception("compare settings failed", fleet=fleet)
                problem = "The calculation failed. The log of the server has the reason."
            if problem:
                entry.found = FleetComparison(datetime.now().astimezone(), problem=problem)
                entry.expires_at = loop.time() + RETRY_S

    async def _compare(self, fleet: str, settings: FleetConfig) -> FleetComparison:
        now = await self._store.now()
        tasks = await self._store.task_history(settings.queues, now - PERIOD, now, MAX_TASKS)
        machines = await self._store.machine_history(fleet, now - PERIOD, now, MAX_MACHINES)
        if not any(machine.boot_s is not None for machine in machines):
            machines = await self._store.machine_history(fleet, now - BOOTS_PERIOD, now, MAX_MACHINES)
        past = fleet_past(fleet, settings, tasks, machines)
        # Without the environment of handlers: it may have secrets, and no policy reads it.
        requests = shadow_requests(settings.model_copy(update={"env": {}}), past.world)
        comparison = await self._run(Batch(past.trace, tuple(requests)))
        return FleetComparison(now, past, comparison)


async def run_in_process(batch: Batch) -> Comparison:
    """BadInput if it takes too long or needs too much memory."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        # Not the working directory: its modules may have names of the standard library.
        "-P",
        "-c",
        "from windlass.simulator.batch import main; main()",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, errors = await process.communicate(pickle.dumps(batch))
    except TimeoutError:
        raise BadInput(f"The calculation was stopped after {TIMEOUT_S:g} s.") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines()
        log.warning("run simulation failed", code=process.returncode, error=lines[-1][:500] if lines else "")
        raise BadInput("The calculation needs more time or memory than allowed. Use `windlass simulate --shadow`.")
    found: Comparison = pickle.loads(output)  # noqa: S301 - written by the process that was started above
    return found
