"""`windlass doctor --live`: rents one machine as a fleet would, runs one built-in task on it, and deletes it.

A `windlass up` of its own runs the fleet `doctor-FLEET`: the fleet's own settings, with one worker, a queue and a
handler of its own. It uses the configured database, so that an interrupted rehearsal leaves no machine behind: the next
`windlass up` shuts the fleet down. It refuses to run while an orchestrator leads, which would do that at once.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from windlass.config_sources import ENVIRONMENT_ALIASES, FLEET_PREFIX, fields, variable_of
from windlass.cost.report import read_meter
from windlass.model.config import Config
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.money import with_currency
from windlass.model.snapshot import BootTimes
from windlass.model.task import Task, TaskStatus, new_task
from windlass.model.worker import Worker, WorkerStatus
from windlass.policy.boot import boot_limit
from windlass.providers.diagnostic import Diagnostic
from windlass.wiring import stores

HANDLER = "windlass.worker.rehearsal:answer"
PREFIX = "doctor-"
POLL_S = 1.0
# Time for the request of a machine, and for a task on a worker that is ready.
MARGIN_S = 300.0
# Time to drain, to delete the machine and to stop; a provider's deletion takes a minute at most.
STOP_TIMEOUT_S = 300.0
LOG_LINES = 5
# Phases of a boot, in order: check, field of the worker, what it proves.
PHASES = (
    ("boot", "running_at", "the machine runs"),
    ("reach", "reachable_at", "it reached the control plane, or the control plane it"),
    ("join", "joined_at", "it joined"),
    ("ready", "activated_at", "its worker is active"),
)


async def rehearse(config: Config, name: str) -> AsyncGenerator[Diagnostic, None]:
    """One diagnostic per step. Raises BadInput if it cannot begin."""
    fleet = config.fleets.get(name)
    if fleet is None:
        known = ", ".join(config.fleets) or "none"
        raise BadInput(f"fleet {name} is not configured. Fleets: {known}.")
    if fleet.provider == "ray":
        raise BadInput(f"fleet {name} rents no machines: its Ray cluster is run by others.")
    rehearsed = f"{PREFIX}{name}"
    async with stores.store(config) as store:
        leader = await store.leader()
        if leader is not None:
            raise BadInput(f"an orchestrator leads ({leader}): stop `windlass up` for the time of the rehearsal.")
        task_id = await store.enqueue(new_task(rehearsed, max_attempts=1))
        started_at = await store.now()
        async with _orchestrator(config, rehearsed, fleet) as (process, log):
            watch = _Watch(started_at)
            limit_s = boot_limit(fleet, BootTimes()).total_s + MARGIN_S
            try:
                async with asyncio.timeout(limit_s):
                    while process.returncode is None:
                        workers = [w for w in await store.workers(include_terminated=True) if w.fleet == rehearsed]
                        task = await store.task(task_id)
                        for found in watch.new_steps(workers, task):
                            yield found
                        if task is None or task.finished_at is not None or watch.has_failed:
                            break
                        await asyncio.sleep(POLL_S)
                if process.returncode is not None:
                    yield Diagnostic("up", f"`windlass up` ended: {_tail(log)}", is_error=True)
            except TimeoutError:
                yield Diagnostic("timeout", f"no result within {limit_s:.0f} s; {watch.last}", is_error=True)
        for found in watch.end(
            [w for w in await store.workers(include_terminated=True) if w.fleet == rehearsed], await store.now()
        ):
            yield found
        # Without effect on a task that is finished.
        await store.cancel_task(task_id, "the rehearsal ended")


class _Watch:
    """Turns what the database shows into steps, each reported once."""

    def __init__(self, started_at: datetime) -> None:
        self._started_at = started_at
        self._reported: set[str] = set()
        # By worker: the seconds from its creation to the end of its last reported step.
        self._elapsed_s: dict[str, int] = {}
        self.has_failed = False
        self.last = "no machine was requested"

    def new_steps(self, workers: list[Worker], task: Task | None) -> list[Diagnostic]:
        # Workers of earlier rehearsals are older.
        workers = [worker for worker in workers if worker.created_at >= self._started_at]
        found: list[Diagnostic] = []
        if not workers:
            return found
        worker = workers[-1]
        if worker.machine_id is not None and self._mark_reported("create"):
            where = f" ({worker.instance_type} in {worker.place})" if worker.instance_type is not None else ""
            found.append(Diagnostic("create", f"machine {worker.machine_id}{where} exists"))
        moments = [getattr(worker, field) for _, field, _ in PHASES]
        for number, (check, _, proof) in enumerate(PHASES):
            # A phase that no cycle saw ended before the next one began.
            moment = next((later for later in moments[number:] if later is not None), None)
            if moment is not None and self._mark_reported(check):
                found.append(Diagnostic(check, f"{proof} {self._after(worker, moment)}"))
        if worker.boot_step is not None:
            self.last = f"its last step: {worker.boot_step}"
        if task is not None and task.finished_at is not None and self._mark_reported("task"):
            if task.status is TaskStatus.COMPLETE:
                found.append(Diagnostic("task", f"complete {self._after(worker, task.finished_at)}: {task.result}"))
            else:
                self.has_failed = True
                found.append(Diagnostic("task", f"failed: {task.error}", is_error=True))
        if worker.status in (WorkerStatus.ERROR, WorkerStatus.TERMINATED) and "task" not in self._reported:
            self.has_failed = True
            if self._mark_reported("failure"):
                found.append(Diagnostic("worker", f"{worker.code}: {worker.reason}; {self.last}", is_error=True))
        return found

    def end(self, workers: list[Worker], now: datetime) -> list[Diagnostic]:
        found: list[Diagnostic] = []
        for worker in (worker for worker in workers if worker.created_at >= self._started_at):
            if worker.machine_id is None:
                continue
            if worker.terminated_at is None:
                advice = "run `windlass up`, which deletes it, or delete it in the provider's console"
                found.append(Diagnostic("delete", f"machine {worker.machine_id} still exists", advice, is_error=True))
            else:
                found.append(Diagnostic("delete", f"the machine is gone {self._after(worker, worker.terminated_at)}"))
            if worker.bill is not None:
                meter = read_meter(worker.bill, now)
                price = with_currency(meter.micros_per_hour, meter.currency)
                cost = with_currency(meter.cost_micros, meter.currency)
                found.append(Diagnostic("cost", f"{cost} at {price} per hour"))
            else:
                found.append(Diagnostic("cost", "the machine has no price"))
        return found

    def _after(self, worker: Worker, moment: datetime) -> str:
        """Whole seconds since the worker was created, and since the end of its steps before. A cycle may see that the
        machine runs later than that it reached the control plane."""
        total_s, before_s = round((moment - worker.created_at).total_seconds()), self._elapsed_s.get(worker.id, 0)
        self._elapsed_s[worker.id] = max(total_s, before_s)
        return f"after {total_s} s, {max(0, total_s - before_s)} s of them for this step"

    def _mark_reported(self, check: str) -> bool:
        """False if the check was reported before."""
        is_new = check not in self._reported
        self._reported.add(check)
        return is_new


@asynccontextmanager
async def _orchestrator(
    config: Config, name: str, fleet: FleetConfig
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Path]]:
    """A `windlass up` with this fleet only. Stopping it deletes the machine.

    It is stopped at the end of the context, and when this process ends, whatever ends it."""
    with tempfile.TemporaryDirectory(prefix="windlass-doctor-") as folder:
        file, log = Path(folder) / "windlass.toml", Path(folder) / "up.log"
        # The folder is readable by this user only: the environment of workers may hold secrets.
        file.write_text(f"[fleets.{json.dumps(name)}]\n{_fleet_settings(name, fleet)}")
        with log.open("wb") as stream:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "windlass.wiring.bound_process", str(os.getpid())),
                *(sys.executable, "-m", "windlass", "up", "--config", str(file)),
                env=_environment(config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        try:
            yield process, log
        finally:
            await asyncio.shield(_stop(process))


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _fleet_settings(name: str, fleet: FleetConfig) -> str:
    """The fleet's own settings, except what it runs and how many."""
    given = fleet.model_dump(mode="json", exclude_unset=True)
    given |= {
        "provider": fleet.provider,
        "queues": [name],
        "handler": HANDLER,
        "min_workers": 0,
        "max_workers": 1,
        "policy": "buffered",
        "poll_interval_s": min(fleet.poll_interval_s, 5.0),
        # The task takes a second, and the machine must be deleted within STOP_TIMEOUT_S.
        "stop_timeout_s": min(fleet.stop_timeout_s, 60.0),
    }
    for setting in ("exec", "engine", "ray", "is_inline", "idle_buffer"):
        given.pop(setting, None)
    return "".join(f"{key} = {_toml(value)}\n" for key, value in given.items() if value is not None)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items() if each is not None)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    # Numbers, texts and booleans are written as in JSON.
    return json.dumps(value)


def _environment(config: Config) -> dict[str, str]:
    """Our environment without settings of fleets, and with all other settings as variables: the child reads no file of
    ours."""
    fleet_names = {name for name, key in ENVIRONMENT_ALIASES.items() if key[0] == "fleets"}
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in fleet_names and not name.startswith(FLEET_PREFIX)
    }
    given: dict[str, str] = {}
    for key, _ in fields(Config):
        value: Any = config
        for part in key:
            value = getattr(value, part)
        if isinstance(value, SecretStr):
            value = value.get_secret_value()
        if value is None or isinstance(value, BaseModel) or value == ():
            continue
        given[variable_of(key)] = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return {name: value for name, value in inherited.items() if name not in ENVIRONMENT_ALIASES} | given


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return " | ".join(lines[-LOG_LINES:]) or "no output"
