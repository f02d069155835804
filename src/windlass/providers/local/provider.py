"""Workers as processes of this host.

Guarantees:
- A worker is found again by any later orchestrator on this host. The process table is searched for the mark that the
  worker carries (worker_process.py); there is no list of pids to lose. Processes of other databases or fleets are never
  touched.
- A machine's id is its host, pid and start time. Only that process, processes with its mark, and their descendants are
  ever signalled.
- `delete` sends SIGTERM first, then kills the worker and everything that belongs to it, and returns when nothing is
  left. It cannot reach a process that cleared its environment, created its own session and lost its parent.
- An exited process is listed for a while with its exit code or signal (of our own children) and its last log line.
- Workers outlive the orchestrator.

An orchestrator sees only processes of its own host. Workers on another host are judged by their heartbeats alone, and
terminate when the database says so.
"""

import asyncio
import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TypeVar

from windlass.model.errors import Ambiguous, NoCapacity, Refused, Unavailable
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineExit, MachineRequest, MachineState, Preparation, ProviderTraits
from windlass.model.redaction import Mask
from windlass.ports.provider import OnHostKey
from windlass.providers.local.logs import log_folder, safe_name
from windlass.providers.local.processes import HOST, Process, ProcessTable, is_alive, process_table, send_signal
from windlass.providers.local.worker_process import MARK, OUT_OF_RESOURCES, ChildProcess, WorkerProcess, startup_problem

# Each of these takes milliseconds on a healthy host. After the limit the outcome is settled by the next list.
CREATE_TIMEOUT_S = 5.0
LIST_TIMEOUT_S = 20.0
# An idle worker exits within this time. A busy one has already had its drain time when delete is called.
STOP_GRACE_S = 5.0
# A second SIGTERM makes a worker release its running task instead of finishing it.
SECOND_SIGTERM_S = 1.0
# From SIGKILL to the end of the process. It takes longer only in uninterruptible I/O.
KILL_TIMEOUT_S = 10.0
POLL_S = 0.02
EXEC_POLL_S = 0.0005
# An exited process is listed this long: several cycles, so that one cycle lost to a database outage does not hide it.
EXITED_LISTED_S = 20.0
PRUNE_INTERVAL_S = 60.0
# `create` forks within CREATE_TIMEOUT_S or not at all, so no process appears later; the rest is margin.
_CREATION_LATENESS_S = 2 * CREATE_TIMEOUT_S
# Longer than EXITED_LISTED_S: a worker that deregistered is listed for that long after its row was closed.
_ORPHAN_GRACE_S = 30.0

Result = TypeVar("Result")

# Children of this process by machine id, shared by all provider objects: only the parent can learn an exit code.
children: dict[str, ChildProcess] = {}


@dataclass(slots=True)
class _MarkedProcesses:
    """The live processes that carry the mark of one worker."""

    # Processes started as that worker: normally one.
    leaders: list[Process] = field(default_factory=list)
    others: list[Process] = field(default_factory=list)

    def move_forks_to_others(self) -> None:
        """A fork of a worker has the worker's command line until it executes its own program, and may already lead a
        session: every handler process begins so. Unlike the worker, its parent is one of these processes."""
        pids = {process.pid for process in (*self.leaders, *self.others)}
        self.others += [process for process in self.leaders if process.parent_pid in pids]
        self.leaders = [process for process in self.leaders if process.parent_pid not in pids]


@dataclass(slots=True)
class _ExitedProcess:
    machine: Machine
    first_listed_at: float | None = None


class LocalProvider:
    """The processes of one fleet on this host. `identity` is the database's (ControlStore.instance_id)."""

    traits = ProviderTraits(
        # The process table does not lag.
        absence_grace_s=0.0,
        creation_lateness_s=_CREATION_LATENESS_S,
        orphan_grace_s=_ORPHAN_GRACE_S,
        host=HOST,
    )

    def __init__(
        self,
        fleet: str,
        config: FleetConfig,
        *,
        identity: str,
        state_dir: Path,
        database_url: str | None = None,
        data_dir: Path | None = None,
        settings: Mapping[str, str] | None = None,
        withheld: Collection[str] = (),
        program: Sequence[str] = ("windlass", "worker"),
        mask: Mask | None = None,
        stop_grace_s: float = STOP_GRACE_S,
        table: ProcessTable | None = None,
    ) -> None:
        """Workers use the database at `database_url`, or the embedded one in `data_dir`. See WorkerProcess."""
        self._fleet = fleet
        self._config = config
        self._stop_grace_s = stop_grace_s
        self._table = table or process_table()
        self._logs = log_folder(state_dir.absolute(), fleet, mask or Mask())
        self._prefix = f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}/{safe_name(fleet)}/"
        self._spawn = WorkerProcess(
            fleet, config, self._prefix, database_url, data_dir, dict(settings or {}), frozenset(withheld), program
        )
        # Worker name and process by machine id. A known process stays ours even if it overwrites its environment.
        self._known: dict[str, tuple[str, Process]] = {}
        self._exited: dict[str, _ExitedProcess] = {}
        self._pruned_at = 0.0
        # Held while the process table is read and acted upon.
        self._lock = Lock()

    # ------------------------------------------------------------------------------------------------ the contract

    async def create(self, request: MachineRequest) -> Machine:
        doing = f"creating worker {request.name}"
        deadline = time.monotonic() + CREATE_TIMEOUT_S
        try:
            async with asyncio.timeout(CREATE_TIMEOUT_S):
                return await asyncio.to_thread(self._create, request.name, request.secret, doing, deadline)
        except TimeoutError:
            raise Ambiguous(f"{doing}: the host did not start a process within {CREATE_TIMEOUT_S:g} s") from None

    async def list_machines(self) -> tuple[Machine, ...]:
        return await self._in_thread(f"listing the processes of fleet {self._fleet}", self._list)

    async def delete(self, machine: Machine) -> None:
        doing = f"deleting worker {machine.name} (process {machine.id})"
        if "/" not in machine.id:
            # The machine of another provider: nothing is known about it here.
            raise Refused(f"{doing}: not a process id. Delete the machine at the fleet's former provider.")
        if not machine.id.startswith(f"{HOST}/"):
            # A worker on another host learns from the database that it is terminated. If it does not react, the
            # orchestrator there finds it as an orphan.
            return
        # Collected while the worker lives: some of its processes are found only through their parents.
        processes = await self._in_thread(doing, lambda: self._processes_of(machine))
        for process in processes:
            if process.id == machine.id:
                await self._send_sigterm(process, doing)
        await self._kill_all(machine, processes, doing)
        await self._in_thread(doing, lambda: self._forget(machine))

    async def prepare(self, machine: Machine, host_key: str | None, on_host_key: OnHostKey) -> Preparation:  # noqa: ARG002
        """Nothing to do: a process is a worker from its start."""
        return Preparation()

    async def close(self) -> None:
        """Nothing to do: workers outlive the orchestrator."""

    async def _in_thread(self, doing: str, function: Callable[[], Result]) -> Result:
        """Run a function that reads the process table, in a thread and within LIST_TIMEOUT_S."""
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                return await asyncio.to_thread(function)
        except TimeoutError:
            raise Unavailable(f"{doing}: reading the process table took more than {LIST_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise Unavailable(f"{doing}: cannot read the process table ({error})") from error

    # ------------------------------------------------------------------------------------------------------ create

    def _create(self, name: str, secret: str | None, doing: str, deadline: float) -> Machine:
        problem = startup_problem(self._fleet, self._config, self._spawn.environment(name).get("PATH"))
        if problem is not None:
            raise Refused(f"{doing}: {problem}")
        with self._lock:
            try:
                for running in self._marked_processes().get(name, _MarkedProcesses()).leaders:
                    return self._machine(name, running)
            except OSError as error:
                raise Ambiguous(f"{doing}: cannot tell whether it already runs ({error})") from error
            log = self._open_log(name, doing)
            try:
                child = self._spawn.start(name, secret, self._logs.path_of(name), log, doing, deadline)
            except BaseException:
                self._logs.discard(name)
                raise
            finally:
                os.close(log)
            # Our child was not waited for, so it can be read even if it has already exited.
            process = self._table.read(child.pid)
            if process is None:
                raise Ambiguous(f"{doing}: process {child.pid} was started and is not in the process table")
            children[process.id] = child
            self._known[process.id] = (name, process)
            # The environment of a started program becomes readable a moment later. Other orchestrators must be able to
            # find this machine when they hear of it.
            mark = f"{MARK}={self._prefix}".encode()
            while mark not in (self._table.environment(process.pid) or b"") and self._is_running(process):
                if time.monotonic() > deadline:
                    break
                time.sleep(EXEC_POLL_S)
            return self._machine(name, process)

    def _open_log(self, name: str, doing: str) -> int:
        try:
            return self._logs.create(name)
        except FileExistsError:
            raise Ambiguous(f"{doing}: a process was started for it before and is gone now") from None
        except OSError as error:
            message = f"{doing}: cannot write {self._logs.path_of(name)} ({error.strerror})"
            raise (NoCapacity if error.errno in OUT_OF_RESOURCES else Refused)(message) from error

    # -------------------------------------------------------------------------------------------------------- list

    def _list(self) -> tuple[Machine, ...]:
        with self._lock:
            marked = self._marked_processes()
            running = {leader.id: (name, leader) for name, found in marked.items() for leader in found.leaders}
            for machine_id, (name, process) in self._known.items():
                if machine_id not in running:
                    self._exited[machine_id] = _ExitedProcess(self._exited_machine(name, process))
            self._known = running
            if time.monotonic() - self._pruned_at > PRUNE_INTERVAL_S:
                self._pruned_at = time.monotonic()
                self._logs.prune()
            alive = [self._machine(name, process) for name, process in running.values()]
            return (*alive, *self._exited_machines(marked))

    def _exited_machines(self, marked: dict[str, _MarkedProcesses]) -> list[Machine]:
        now = time.monotonic()
        for exited in self._exited.values():
            exited.first_listed_at = now if exited.first_listed_at is None else exited.first_listed_at
        self._exited = {
            machine_id: exited
            for machine_id, exited in self._exited.items()
            if now - (exited.first_listed_at or now) < EXITED_LISTED_S
        }
        machines = [exited.machine for exited in self._exited.values()]
        names = {machine.name for machine in machines}
        # Processes whose worker is gone must be listed too, or they would never be deleted.
        for name, found in marked.items():
            if not found.leaders and name not in names:
                oldest = min(found.others, key=lambda process: process.started)
                note = f"the worker exited and {len(found.others)} of its processes still run"
                machines.append(replace(self._machine(name, oldest), state=MachineState.EXITED, note=note))
        return machines

    def _marked_processes(self) -> dict[str, _MarkedProcesses]:
        """All live processes that carry our mark, by worker. Raises OSError."""
        if self._table.environment(os.getpid()) is None:
            # If even our own environment is unreadable, an empty result would mean nothing.
            raise PermissionError("process environments cannot be read")
        marked: dict[str, _MarkedProcesses] = {}
        entry = f"{MARK}={self._prefix}".encode()
        for pid in self._table.pids():
            environment = self._table.environment(pid)
            if environment is not None and entry in environment:
                self._add_marked(pid, entry, marked)
        for found in marked.values():
            found.move_forks_to_others()
        leaders = {process.id for found in marked.values() for process in found.leaders}
        others = {process.id for found in marked.values() for process in found.others}
        for machine_id, (name, process) in self._known.items():
            # A marked process that is not a worker runs another program now; our own child may be exiting.
            is_worker = machine_id in children or machine_id not in others
            if machine_id not in leaders and is_worker and self._is_running(process):
                marked.setdefault(name, _MarkedProcesses()).leaders.append(process)
        return marked

    def _add_marked(self, pid: int, entry: bytes, marked: dict[str, _MarkedProcesses]) -> None:
        process = self._table.read(pid)
        # Read the environment again: the pid may have been reused between the two reads.
        variables = (self._table.environment(pid) or b"").split(b"\0")
        name = next((os.fsdecode(each[len(entry) :]) for each in variables if each.startswith(entry)), None)
        if process is None or process.is_zombie or name is None:
            return
        found = marked.setdefault(name, _MarkedProcesses())
        mark = [word.encode() for word in self._spawn.mark_arguments(name)]
        is_leader = process.session == process.pid and self._table.arguments(pid)[2:4] == mark
        (found.leaders if is_leader else found.others).append(process)

    def _is_running(self, process: Process) -> bool:
        child = children.get(process.id)
        # A parent learns the end of its child, and its exit code, in one call.
        return is_alive(self._table, process) if child is None else child.poll() is None

    def _machine(self, name: str, process: Process) -> Machine:
        created_at = self._table.created_at(process)
        return Machine(process.id, name, MachineState.RUNNING, created_at=created_at, place=HOST)

    def _exited_machine(self, name: str, process: Process) -> Machine:
        code = _reap(process.id)
        note, exit_ = "its process is gone; its exit code is known only to the orchestrator that started it", None
        if code is not None:
            note, exit_ = f"its process {_describe_exit(code)}", _exit_of(code)
        last_line = self._logs.last_line(name)
        if last_line:
            note += f"; {last_line}"
        return replace(self._machine(name, process), state=MachineState.EXITED, note=note, exit=exit_)

    # ------------------------------------------------------------------------------------------------------ delete

    async def _send_sigterm(self, worker: Process, doing: str) -> None:
        """Send SIGTERM, a second one after SECOND_SIGTERM_S. Returns when the worker has exited or its time is up."""
        started = time.monotonic()
        for wait_s in (min(SECOND_SIGTERM_S, self._stop_grace_s), self._stop_grace_s):
            _signal(self._table, worker, signal.SIGTERM, doing)
            while self._is_running(worker):
                if time.monotonic() - started >= wait_s:
                    break
                await asyncio.sleep(POLL_S)
            else:
                return

    async def _kill_all(self, machine: Machine, seen: Sequence[Process], doing: str) -> None:
        """Send SIGKILL to everything that is left, repeatedly: a killed process may have forked a moment before."""
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while left := await self._in_thread(doing, lambda: self._processes_of(machine, seen)):
            if time.monotonic() > deadline:
                pids = ", ".join(str(process.pid) for process in left)
                raise Unavailable(f"{doing}: {pids} still running {KILL_TIMEOUT_S:g} s after SIGKILL")
            for process in left:
                _signal(self._table, process, signal.SIGKILL, doing)
            await asyncio.sleep(POLL_S)

    def _processes_of(self, machine: Machine, seen: Sequence[Process] = ()) -> list[Process]:
        """Every live process of this machine: the worker, processes with its mark, processes in `seen`, and all that
        descend from one of these or are in its session."""
        with self._lock:
            found = self._marked_processes().get(machine.name, _MarkedProcesses())
        roots = [*found.leaders, *found.others]
        if any(leader.id != machine.id for leader in found.leaders):
            # Another machine of the same worker lives, and the mark does not say which one the others belong to.
            roots = [leader for leader in found.leaders if leader.id == machine.id]
        roots += [process for process in seen if is_alive(self._table, process)]
        members = {process.pid: process for process in roots}
        table = [process for pid in self._table.pids() if (process := self._table.read(pid)) is not None]
        is_growing = bool(members)
        while is_growing:
            related = {
                each.pid: each
                for each in table
                if (each.parent_pid in members or each.session in members) and not each.is_zombie
            }
            is_growing = not related.keys() <= members.keys()
            members = related | members
        members.pop(os.getpid(), None)  # a handler may itself run an orchestrator
        return list(members.values())

    def _forget(self, machine: Machine) -> None:
        with self._lock:
            _reap(machine.id)
            self._known.pop(machine.id, None)
            self._exited.pop(machine.id, None)


def _reap(machine_id: str) -> int | None:
    """The exit code of our child, removed from the process table; None if it runs or is not our child."""
    child = children.get(machine_id)
    code = None if child is None else child.poll()
    if code is not None:
        children.pop(machine_id, None)
    return code


def _signal(table: ProcessTable, process: Process, number: signal.Signals, doing: str) -> None:
    try:
        send_signal(table, process, number)
    except PermissionError as error:
        raise Refused(f"{doing}: {number.name} to process {process.pid} is not allowed ({error.strerror})") from error


def _exit_of(code: int) -> MachineExit:
    if code >= 0:
        return MachineExit(code=code)
    with contextlib.suppress(ValueError):
        return MachineExit(signal=signal.Signals(-code).name)
    return MachineExit(signal=f"signal {-code}")


def _describe_exit(code: int) -> str:
    ended = _exit_of(code)
    if ended.signal is None:
        return f"exited with code {code}"
    return f"was killed by {ended.signal}" + (" (out of memory?)" if ended.signal == "SIGKILL" else "")
