"""Workers as processes of this host.

What it promises:
- A worker is found again by whoever looks, whatever became of the orchestrator that started it. It carries a mark in
  its environment, and so does everything it starts; its own command line carries it too. The process table is searched
  for that mark, there is no list of pids to lose. The mark names the database, the fleet and the worker, so another
  windlass on this host, or another fleet of this one, is never seen nor touched.
- A machine's id is its host, and the pid and the start time of its process. Nothing is signalled that is not exactly
  that process, carries the mark, or descends from one that does.
- `delete` asks politely for a moment, then kills the worker and all that belongs to it, and returns when nothing of it
  is left. Out of reach is only what cleared its environment, made a session of its own and lost its parent.
- A process that ended is listed as exited for a while, with the reason, as far as we can know it: of our own children
  the exit code or signal, of others only that they are gone, and of both the last words in the log.
- Workers are not ended with us. They go on, and the next orchestrator finds them.

An orchestrator sees the processes of its own host. A machine's id names the host, so that one that leads elsewhere
knows which it cannot see: those it judges by their heartbeats alone, and to end one is to let the database tell it so.
"""

import asyncio
import contextlib
import errno
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from windlass.model.errors import Ambiguous, NoCapacity, Refused, Unavailable
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineRequest, MachineState, Preparation, ProviderTraits
from windlass.model.redaction import Mask
from windlass.ports.provider import OnHostKey
from windlass.providers.local.logs import log_folder, safe_name
from windlass.providers.local.processes import HOST, Process, ProcessTable, is_alive, process_table, send_signal

# Whatever a worker starts inherits it, `windlass` commands too, and to them a name that begins WINDLASS_ is a setting.
MARK = "_WINDLASS_MACHINE"
# The worker is told by these who it is and where its tasks are, and takes them out of its environment.
WORKER_ID = "WINDLASS_WORKER_ID"
FLEET = "WINDLASS_FLEET"
NEEDS_GPU = "WINDLASS_NEEDS_GPU"
DATABASE_URL = "WINDLASS_SPAWN_DATABASE_URL"

# Any of these takes milliseconds. Longer, and something is wrong with the host: what happened is then found out later.
CREATE_TIMEOUT_S = 5.0
LIST_TIMEOUT_S = 20.0
# A worker that has nothing to do ends within this time; one that is at work has had its time before delete is called.
STOP_GRACE_S = 5.0
# Asked a second time, a worker does not wait for the task at hand but gives it back.
ASK_AGAIN_S = 1.0
# From SIGKILL to the end of the process. Longer only in uninterruptible I/O.
KILL_TIMEOUT_S = 10.0
POLL_S = 0.02
EXEC_POLL_S = 0.0005
# For how long a process that ended is listed: some cycles, so that one lost to a database outage is not the last.
EXITED_LISTED_S = 20.0
PRUNE_INTERVAL_S = 60.0

# `create` forks within its own time limit or not at all, so nothing appears later than that; the rest is margin.
_CREATION_LATENESS_S = 2 * CREATE_TIMEOUT_S
# Longer than EXITED_LISTED_S: a worker that left in good order is listed for that long after its row has ended, and
# ending it would only make a noise. What runs on without a row for this long is not about to end by itself.
_STRAY_GRACE_S = 30.0

# The host has no room for another process, or we may have no more: that can change.
_NO_ROOM = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC})
Result = TypeVar("Result")


class _ChildProcess(subprocess.Popen[bytes]):
    """A process that may outlive us, and that is no mistake; Popen would warn of it."""

    def __del__(self) -> None:
        pass


# By machine id. Being the parent is a matter of this process, whichever provider object was at it.
_children: dict[str, _ChildProcess] = {}


@dataclass(slots=True)
class _LocalGroup:
    """The living processes that carry the mark of one worker."""

    # Those that were started as that worker: one, unless something went very wrong.
    leaders: list[Process] = field(default_factory=list)
    others: list[Process] = field(default_factory=list)

    def set_forks_aside(self) -> None:
        """A fork of a worker has its command line until it starts a program of its own, and may lead a session by
        then: every handler's process begins so. But its parent is one of us, and a worker's is not."""
        pids = {process.pid for process in (*self.leaders, *self.others)}
        self.others += [process for process in self.leaders if process.parent_pid in pids]
        self.leaders = [process for process in self.leaders if process.parent_pid not in pids]


@dataclass(slots=True)
class _EndedProcess:
    machine: Machine
    # Since when it has been listed.
    since: float | None = None


class LocalProvider:
    """The processes of one fleet on this host. `identity` is the database's: see ControlStore.instance_id."""

    traits = ProviderTraits(
        # The process table does not lag.
        absence_grace_s=0.0,
        creation_lateness_s=_CREATION_LATENESS_S,
        orphan_grace_s=_STRAY_GRACE_S,
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
        """Workers use the database at `database_url`, or the embedded one in `data_dir`.

        `settings` is all they are told beyond their command line, as environment: they read no file, which might have
        changed since. `withheld`: names in our environment that are none of their business. `program` is a Python
        module and its first arguments. `mask`: for what is told of their logs.
        """
        self._fleet = fleet
        self._config = config
        self._database_url = database_url
        self._data_dir = data_dir
        self._settings = dict(settings or {})
        self._withheld = frozenset(withheld)
        self._program = tuple(program)
        self._stop_grace_s = stop_grace_s
        self._table = table or process_table()
        self._logs = log_folder(state_dir.absolute(), fleet, mask or Mask())
        instance = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._prefix = f"{instance}/{safe_name(fleet)}/"
        # Worker and process by machine id. What was ours once stays ours, even if it overwrites its environment.
        self._known: dict[str, tuple[str, Process]] = {}
        self._ended: dict[str, _EndedProcess] = {}
        self._pruned_at = 0.0
        # Everything that looks and then acts on what it saw.
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------------------------------ the contract

    async def create(self, request: MachineRequest) -> Machine:
        doing = f"creating worker {request.name}"
        give_up_at = time.monotonic() + CREATE_TIMEOUT_S
        try:
            async with asyncio.timeout(CREATE_TIMEOUT_S):
                return await asyncio.to_thread(self._create, request, doing, give_up_at)
        except TimeoutError:
            raise Ambiguous(f"{doing}: the host did not start a process within {CREATE_TIMEOUT_S:g} s") from None

    async def list_machines(self) -> tuple[Machine, ...]:
        return await self._look(f"listing the processes of fleet {self._fleet}", self._list)

    async def delete(self, machine: Machine) -> None:
        doing = f"ending worker {machine.name} (process {machine.id})"
        if "/" not in machine.id:
            # Whoever has such a one, it is not known here that it is gone.
            raise Refused(f"{doing}: that is no process: look for it where the fleet's machines were before.")
        if not machine.id.startswith(f"{HOST}/"):
            # It hears from the database that it is over. One that does not listen is a stray to whoever leads there.
            return
        # Looked up while it lives: some can be found only by their parents.
        processes = await self._look(doing, lambda: self._belonging(machine))
        for process in processes:
            if process.id == machine.id:
                await self._ask_to_end(process, doing)
        await self._kill_all(machine, processes, doing)
        await self._look(doing, lambda: self._forget(machine))

    async def prepare(self, machine: Machine, host_key: str | None, on_host_key: OnHostKey) -> Preparation:  # noqa: ARG002
        """Nothing to do: processes are workers from the first moment."""
        return Preparation()

    async def close(self) -> None:
        """Nothing to do: workers go on without us."""

    async def _look(self, doing: str, function: Callable[[], Result]) -> Result:
        """Something that reads the process table, in a thread and within its time."""
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                return await asyncio.to_thread(function)
        except TimeoutError:
            raise Unavailable(f"{doing}: reading the process table took more than {LIST_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise Unavailable(f"{doing}: the process table cannot be read ({error})") from error

    # ------------------------------------------------------------------------------------------------------ create

    def _create(self, request: MachineRequest, doing: str, give_up_at: float) -> Machine:
        environment = self._environment(request)
        problem = why_not_startable(self._fleet, self._config, environment.get("PATH"))
        if problem is not None:
            raise Refused(f"{doing}: {problem}")
        with self._lock:
            try:
                for running in self._groups().get(request.name, _LocalGroup()).leaders:
                    return self._machine(request.name, running)
            except OSError as error:
                raise Ambiguous(f"{doing}: whether it runs already cannot be read ({error})") from error
            log = self._open_log(request.name, doing)
            try:
                child = self._start(request, environment, log, doing, give_up_at)
            except BaseException:
                self._logs.discard(request.name)
                raise
            finally:
                os.close(log)
            # It is our child and was not waited for, so it can be read even if it has ended.
            process = self._table.read(child.pid)
            if process is None:
                raise Ambiguous(f"{doing}: process {child.pid} was started and cannot be found")
            _children[process.id] = child
            self._known[process.id] = (request.name, process)
            self._wait_until_marked(process, give_up_at)
            return self._machine(request.name, process)

    def _open_log(self, name: str, doing: str) -> int:
        try:
            return self._logs.create(name)
        except FileExistsError:
            raise Ambiguous(f"{doing}: a process was started for it before, and is not there now") from None
        except OSError as error:
            message = f"{doing}: {self._logs.path_of(name)} cannot be written ({error.strerror})"
            raise (NoCapacity if error.errno in _NO_ROOM else Refused)(message) from error

    def _wait_until_marked(self, process: Process, give_up_at: float) -> None:
        """The kernel says that a program was started a moment before others can read its environment. Whoever hears
        of this machine from us must be able to find it."""
        mark = f"{MARK}={self._prefix}".encode()
        while mark not in (self._table.environment(process.pid) or b"") and self._lives(process):
            if time.monotonic() > give_up_at:
                return  # so others find it later; we know it
            time.sleep(EXEC_POLL_S)

    def _start(
        self, request: MachineRequest, environment: dict[str, str], log: int, doing: str, give_up_at: float
    ) -> _ChildProcess:
        if time.monotonic() > give_up_at:
            # Nobody waits for it any more. To start it now would be to start it behind everybody's back.
            raise Unavailable(f"{doing}: it took too long")
        try:
            return _ChildProcess(
                self._command(request),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise NoCapacity(f"{doing}: this host has no room for another process ({error.strerror})") from error
            raise Refused(f"{doing}: {sys.executable} cannot be started ({error.strerror}).") from error
        except ValueError as error:
            raise Refused(f"{doing}: its environment or command is not one ({error}): check env and exec.") from error

    def _command(self, request: MachineRequest) -> list[str]:
        config = self._config
        command = [
            sys.executable,
            # The folder we happen to be in is no place to import windlass from.
            "-P",
            *self._mark_argument(request.name),
            "-m",
            "windlass.providers.local.launch",
            str(self._logs.path_of(request.name)),
            *self._program,
        ]
        for queue in config.queues:
            command += ["--queue", queue]
        if config.handler is not None:
            command += ["--handler", config.handler]
        if config.exec is not None:
            command += ["--exec", config.exec]
        if config.is_inline:
            command += ["--inline"]
        if config.chdir is not None:
            command += ["--chdir", str(config.chdir.absolute())]
        command += ["--concurrency", str(config.concurrency)]
        command += ["--heartbeat-interval", f"{config.heartbeat_interval_s:g}"]
        command += ["--lease", f"{config.heartbeat_timeout_s:g}"]
        command += ["--config", os.devnull]
        if self._data_dir is not None:
            command += ["--data-dir", str(self._data_dir.absolute())]
        return command

    def _mark_argument(self, name: str) -> list[str]:
        # Python takes any -X and passes none of its own invention on: the worker has it, what it starts has not.
        return ["-X", f"windlass={self._prefix}{name}"]

    def _environment(self, request: MachineRequest) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in self._withheld}
        environment = {**inherited, **self._settings, **self._config.env}
        # For the worker's own drain: what the control loop grants it, and no more.
        environment["WINDLASS_WORKER__DRAIN_TIMEOUT_S"] = f"{self._config.stop_timeout_s:g}"
        if self._database_url is not None:
            # Not on the command line, which everybody on this host can read; nor as DATABASE_URL, which handlers read:
            # there is what stands in our environment or the fleet's, and not what only our windlass.toml has.
            environment[DATABASE_URL] = self._database_url
        if self._config.has_gpu and self._config.engine is None:
            # What a node has is its engine's word.
            environment[NEEDS_GPU] = "yes"
        return environment | {
            MARK: f"{self._prefix}{request.name}",
            WORKER_ID: request.name,
            FLEET: self._fleet,
        }

    # -------------------------------------------------------------------------------------------------------- list

    def _list(self) -> tuple[Machine, ...]:
        with self._lock:
            groups = self._groups()
            running = {leader.id: (name, leader) for name, group in groups.items() for leader in group.leaders}
            for machine_id, (name, process) in self._known.items():
                if machine_id not in running:
                    self._ended[machine_id] = _EndedProcess(self._exited(name, process))
            self._known = running
            if time.monotonic() - self._pruned_at > PRUNE_INTERVAL_S:
                self._pruned_at = time.monotonic()
                self._logs.prune()
            alive = [self._machine(name, process) for name, process in running.values()]
            return (*alive, *self._listed_as_exited(groups))

    def _listed_as_exited(self, groups: dict[str, _LocalGroup]) -> list[Machine]:
        now = time.monotonic()
        for ended in self._ended.values():
            ended.since = now if ended.since is None else ended.since
        self._ended = {id_: ended for id_, ended in self._ended.items() if now - (ended.since or now) < EXITED_LISTED_S}
        machines = [ended.machine for ended in self._ended.values()]
        named = {machine.name for machine in machines}
        # Their worker is gone and nobody knows since when. They must be found, or they would stay for ever.
        for name, group in groups.items():
            if not group.leaders and name not in named:
                oldest = min(group.others, key=lambda process: process.started)
                note = f"the worker is gone, and left {len(group.others)} of its processes behind"
                machines.append(replace(self._machine(name, oldest), state=MachineState.EXITED, note=note))
        return machines

    def _groups(self) -> dict[str, _LocalGroup]:
        """All living processes that carry our mark, by worker. Raises OSError."""
        if self._table.environment(os.getpid()) is None:
            # If we cannot even see our own, not seeing others means nothing.
            raise PermissionError("environments are not to be read here")
        groups: dict[str, _LocalGroup] = {}
        entry = f"{MARK}={self._prefix}".encode()
        for pid in self._table.pids():
            environment = self._table.environment(pid)
            if environment is not None and entry in environment:
                self._sort_in(pid, entry, groups)
        for group in groups.values():
            group.set_forks_aside()
        leaders = {process.id for group in groups.values() for process in group.leaders}
        others = {process.id for group in groups.values() for process in group.others}
        for machine_id, (name, process) in self._known.items():
            # One that is marked and yet no worker runs another program now; a child of ours may also be just ending.
            is_worker = machine_id in _children or machine_id not in others
            if machine_id not in leaders and is_worker and self._lives(process):
                groups.setdefault(name, _LocalGroup()).leaders.append(process)
        return groups

    def _lives(self, process: Process) -> bool:
        child = _children.get(process.id)
        # Of its own children a parent is told for certain, and how they ended in the same breath.
        return is_alive(self._table, process) if child is None else child.poll() is None

    def _sort_in(self, pid: int, entry: bytes, groups: dict[str, _LocalGroup]) -> None:
        process = self._table.read(pid)
        # Read again, since this pid may have changed hands between the two.
        name = _value_of(entry, self._table.environment(pid) or b"")
        if process is None or process.is_zombie or name is None:
            return
        group = groups.setdefault(name, _LocalGroup())
        mark = [word.encode() for word in self._mark_argument(name)]
        is_leader = process.session == process.pid and self._table.arguments(pid)[2:4] == mark
        (group.leaders if is_leader else group.others).append(process)

    def _machine(self, name: str, process: Process) -> Machine:
        return Machine(
            id=process.id,
            name=name,
            state=MachineState.RUNNING,
            created_at=self._table.created_at(process),
            place=HOST,
        )

    def _exited(self, name: str, process: Process) -> Machine:
        code = _reap(process.id)
        note = "its process is gone, and only the orchestrator that started it could know why"
        if code is not None:
            note = f"its process {_how_it_ended(code)}"
        words = self._logs.last_words(name)
        if words:
            note += f"; {words}"
        return replace(self._machine(name, process), state=MachineState.EXITED, note=note)

    # ------------------------------------------------------------------------------------------------------ delete

    async def _ask_to_end(self, worker: Process, doing: str) -> None:
        """SIGTERM, twice if need be. Returns when it has ended or its time is up."""
        started = time.monotonic()
        for wait_s in (min(ASK_AGAIN_S, self._stop_grace_s), self._stop_grace_s):
            _signal(self._table, worker, signal.SIGTERM, doing)
            while self._lives(worker):
                if time.monotonic() - started >= wait_s:
                    break
                await asyncio.sleep(POLL_S)
            else:
                return

    async def _kill_all(self, machine: Machine, seen: Sequence[Process], doing: str) -> None:
        """SIGKILL to all that is left of it, again and again: what is killed may have forked a moment before."""
        give_up_at = time.monotonic() + KILL_TIMEOUT_S
        while left := await self._look(doing, lambda: self._belonging(machine, seen)):
            if time.monotonic() > give_up_at:
                pids = ", ".join(str(process.pid) for process in left)
                raise Unavailable(f"{doing}: {pids} still there {KILL_TIMEOUT_S:g} s after SIGKILL")
            for process in left:
                _signal(self._table, process, signal.SIGKILL, doing)
            await asyncio.sleep(POLL_S)

    def _belonging(self, machine: Machine, seen: Sequence[Process] = ()) -> list[Process]:
        """Every living process of this machine: the worker, what carries its mark, and what `seen` remembers, with
        all that descends from one of these or is in its session."""
        with self._lock:
            group = self._groups().get(machine.name, _LocalGroup())
        roots = [*group.leaders, *group.others]
        if any(leader.id != machine.id for leader in group.leaders):
            # Another machine of the same worker lives, and the mark does not say whose the others are.
            roots = [leader for leader in group.leaders if leader.id == machine.id]
        roots += [process for process in seen if is_alive(self._table, process)]
        ours = {process.pid: process for process in roots}
        everybody = [process for pid in self._table.pids() if (process := self._table.read(pid)) is not None]
        is_growing = bool(ours)
        while is_growing:
            found = {p.pid: p for p in everybody if (p.parent_pid in ours or p.session in ours) and not p.is_zombie}
            is_growing = not found.keys() <= ours.keys()
            ours = found | ours
        ours.pop(os.getpid(), None)  # a handler may run an orchestrator, if it must
        return list(ours.values())

    def _forget(self, machine: Machine) -> None:
        with self._lock:
            _reap(machine.id)
            self._known.pop(machine.id, None)
            self._ended.pop(machine.id, None)


def why_not_startable(fleet: str, config: FleetConfig, path: str | None) -> str | None:
    """Why a worker could only fail, in a sentence. (Whether a handler can be imported, only its process can tell.)

    `path`: the PATH of its environment.
    """
    if config.handler is None and config.exec is None:
        return f"fleet {fleet} has neither handler nor exec: say what its workers run."
    folder = Path() if config.chdir is None else config.chdir
    if not folder.is_dir():
        return f"there is no folder {folder}: check chdir of fleet {fleet}."
    if not os.access(folder, os.X_OK):
        return f"the folder {folder} may not be entered: check chdir of fleet {fleet}."
    if config.exec is None:
        return None
    try:
        words = shlex.split(config.exec)
    except ValueError as error:
        return f"the command {config.exec!r} cannot be read ({error}): check exec of fleet {fleet}."
    name = words[0] if words else ""
    # A name with a slash is meant from the folder the worker works in, any other is looked for in its PATH.
    place = str(folder / name) if "/" in name else name
    if not name or shutil.which(place, path=path) is None:
        return f"there is no command {name!r}: check exec of fleet {fleet}, and the PATH of its workers."
    return None


def _reap(machine_id: str) -> int | None:
    """How a child of ours ended; None if it was none. Its entry leaves the process table."""
    child = _children.get(machine_id)
    code = None if child is None else child.poll()
    if code is not None:
        _children.pop(machine_id, None)
    return code


def _value_of(entry: bytes, environment: bytes) -> str | None:
    """What follows `entry` in the variable that begins with it; None if none does."""
    for variable in environment.split(b"\0"):
        if variable.startswith(entry):
            return os.fsdecode(variable[len(entry) :])
    return None


def _signal(table: ProcessTable, process: Process, number: signal.Signals, doing: str) -> None:
    try:
        send_signal(table, process, number)
    except PermissionError as error:
        raise Refused(f"{doing}: {number.name} to process {process.pid} is not allowed ({error.strerror})") from error


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        number = signal.Signals(-code)
        return f"was killed by {number.name}" + (" (out of memory?)" if number is signal.SIGKILL else "")
    return f"was killed by signal {-code}"
