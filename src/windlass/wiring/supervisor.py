"""Keeps processes running: starts them as forks of this one, replaces those that fail, and stops them.

A process that exits is restarted at once, then with back-off. One whose event loop is silent is killed and replaced.
A server that uses too much memory is replaced before it is stopped, so that there is no outage. Signals for the whole
program end here: SIGTERM and Ctrl-C stop, a second one ends now, SIGHUP reloads, the end of the terminal stops.

Forks share the memory of what is imported, start in milliseconds, and run the version that was imported, whatever is
installed meanwhile. The supervisor therefore has no event loop and opens no connection.
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import structlog

from windlass.model.config import Config
from windlass.model.errors import WindlassError
from windlass.model.process import ProcessKind
from windlass.model.worker import SAME_SIGNAL_S
from windlass.retry import Backoff
from windlass.wiring.process_link import EXIT_DEFECT, StartOrder, run_process
from windlass.wiring.supervised_process import TICK_S, ProcessRole, SupervisedProcess
from windlass.wiring.terminal import SETTLE_S, ControllingTerminal
from windlass.worker.nonblocking_stderr import standard_error
from windlass.worker.process import describe_exit

# A process that ran for this long has started well: its next exit counts as the first failure.
HEALTHY_AFTER_S = 10.0
MEMORY_CHECK_INTERVAL_S = 2.0
# A server is replaced for its memory at most this often.
MEMORY_PAUSE_S = 60.0
# For a server that stops: its requests have a time limit of their own, which is shorter.
SERVER_STOP_S = 15.0
READ_BYTES = 1 << 16
NOT_SHUT_DOWN = "machines may still run and cost money: start `windlass up` again, then stop it"
log = structlog.get_logger("windlass.supervisor")


class ProcessFailed(WindlassError):
    """A process could not start; the text says why."""


class Supervisor:
    """`reload` loads the configuration, if no control process does it."""

    def __init__(
        self,
        roles: Sequence[ProcessRole],
        config: Config,
        *,
        reload: Callable[[], Config],
        terminal: ControllingTerminal,
    ) -> None:
        self._roles = roles
        self._config = config
        self._reload = reload
        self._terminal = terminal
        # Until when a SIGHUP may still turn out to be the end of the terminal.
        self._hangup_settled_at: float | None = None
        self._has_control = any(role.kind is ProcessKind.CONTROL for role in roles)
        self._processes: dict[int, SupervisedProcess] = {}
        self._backoffs = {role: Backoff() for role in roles}
        # When the next process of a role starts, why, and what its predecessor left.
        self._due: dict[ProcessRole, tuple[float, StartOrder]] = {}
        self._memory_replaced_at: dict[ProcessRole, float] = {}
        self._memory_checked_at = float("-inf")
        self._has_been_ready = False
        self._is_reload_pending = False
        self._stops = 0
        self._first_stop_at = float("-inf")
        # A control process that fails while it stops is replaced once.
        self._is_stop_repeated = False
        self._exit_code: int | None = None
        self._failure: tuple[str, bool] | None = None
        self._signals: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_writer = socket.socketpair()

    def run(self) -> int:
        """Run until stopped, or until the control process ends by itself. Returns the exit code.

        Raises ProcessFailed if the first process cannot start for a reason that a user can fix.
        """
        with self._handled_signals():
            try:
                for role in self._roles:
                    self._start(role, StartOrder(self._config))
                next_tick = time.monotonic() + TICK_S
                while self._processes or (self._due and self._exit_code is None):
                    self._wait(min([next_tick, *(due for due, _ in self._due.values())]))
                    self._reap()
                    self._handle_signals()
                    if time.monotonic() >= next_tick:
                        self._tick()
                        next_tick = time.monotonic() + TICK_S
                    self._start_due()
            finally:
                self._kill_all()
        if self._failure is not None:
            text, is_defect = self._failure
            raise RuntimeError(text) if is_defect else ProcessFailed(text)
        return self._exit_code or 0

    # -------------------------------------------------------------------------------------------------------- signals

    @contextlib.contextmanager
    def _handled_signals(self) -> Iterator[None]:
        for end in (self._wakeup, self._wakeup_writer):
            end.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        previous_fd = signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
        previous = {number: signal.signal(number, lambda n, _: self._signals.append(n)) for number in numbers}
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_fd)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._selector.close()
            self._wakeup.close()
            self._wakeup_writer.close()

    def request_reload(self) -> None:
        """Reload as after SIGHUP."""
        self._signals.append(signal.SIGHUP)

    def _handle_signals(self) -> None:
        received, self._signals = self._signals, []
        for number in received:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop_by_signal()
            elif number == signal.SIGHUP:
                self._hangup_settled_at = time.monotonic() + (SETTLE_S if self._terminal.is_watched else 0.0)
        if self._hangup_settled_at is not None:
            if self._terminal.is_gone:
                self._hangup_settled_at = None
                self._stop_by_signal()
            elif time.monotonic() >= self._hangup_settled_at:
                self._hangup_settled_at = None
                self._is_reload_pending = True
        if self._is_reload_pending and not self._stops:
            self._forward_reload()

    def _stop_by_signal(self) -> None:
        now = time.monotonic()
        if not self._stops:
            self._first_stop_at = now
        elif now < self._first_stop_at + SAME_SIGNAL_S:
            return  # one Ctrl-C may arrive several times: from the terminal, and forwarded by a parent process
        self._stops += 1
        if self._has_control and self._exit_code is None:
            self._stop_control()
            return
        self._due.clear()
        if self._stops == 1:
            self._stop_servers()
        else:
            self._kill_all()
        if self._exit_code is None:
            self._exit_code = 0

    def _stop_control(self) -> None:
        """The servers go on, and failed ones are replaced: remote workers that finish their tasks need them."""
        control = self._of_kind(ProcessKind.CONTROL)
        for process in control:
            self._add_stop(process)
        waiting = [role for role in self._due if role.kind is ProcessKind.CONTROL]
        if waiting and self._stops == 1:
            # Without a control process no fleet would be shut down.
            for role in waiting:
                self._due[role] = (time.monotonic(), self._due[role][1])
        elif not control:
            log.error("stop control process failed", error="it did not start", hint=NOT_SHUT_DOWN)
            self._end(EXIT_DEFECT)

    def _add_stop(self, process: SupervisedProcess) -> None:
        """A restarted control process stops when it is ready, and thus shuts the fleets down. A second stop cancels it.

        The first control process may be stopped while it starts: it has no fleet yet.
        """
        process.is_stopping = True
        process.unsent_stops += 1
        if process.is_ready or not process.may_have_fleets or self._stops > 1:
            self._send_stops(process)

    def _send_stops(self, process: SupervisedProcess) -> None:
        while process.unsent_stops:
            process.unsent_stops -= 1
            process.send("stop")

    def _stop_servers(self) -> None:
        for process in self._of_kind(ProcessKind.SERVER):
            self._stop(process)

    def _stop(self, process: SupervisedProcess) -> None:
        process.is_stopping = True
        process.kill_at = time.monotonic() + SERVER_STOP_S
        process.send("stop")

    def _forward_reload(self) -> None:
        if self._has_control:
            control = [process for process in self._of_kind(ProcessKind.CONTROL) if process.is_ready]
            for process in control:
                process.send("reload")
            self._is_reload_pending = not control
            return
        self._is_reload_pending = False
        try:
            self._set_config(self._reload())
        except WindlassError as error:
            log.error("reload configuration failed", error=str(error))
        else:
            log.info("reloaded configuration")

    def _set_config(self, config: Config) -> None:
        self._config = config
        for process in self._of_kind(ProcessKind.SERVER):
            process.send("config", config)

    # ------------------------------------------------------------------------------------------------------ processes

    def _of_kind(self, kind: ProcessKind) -> list[SupervisedProcess]:
        return [process for process in self._processes.values() if process.role.kind is kind]

    def _start(self, role: ProcessRole, order: StartOrder, replaces: SupervisedProcess | None = None) -> None:
        ours, theirs = socket.socketpair()
        supervisor_pid = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            log.error("start process failed", process=role.name, error=str(error))
            self._schedule(role, order)
            return
        if pid == 0:
            self._run_fork(theirs, ours, supervisor_pid, role, order)
        theirs.close()
        ours.setblocking(False)
        process = SupervisedProcess(role, pid, ours, order, replaces)
        self._processes[pid] = process
        self._selector.register(ours, selectors.EVENT_READ, process)
        if order.reason is not None:
            log.info("restarted process", process=role.name, pid=pid, reason=order.reason)
        if self._stops and role.kind is ProcessKind.CONTROL:
            self._add_stop(process)

    def _run_fork(
        self, theirs: socket.socket, ours: socket.socket, supervisor_pid: int, role: ProcessRole, order: StartOrder
    ) -> None:
        """Never returns."""
        code = EXIT_DEFECT
        try:
            self._selector.close()
            others = [process.connection for process in self._processes.values()]
            for each in (ours, self._wakeup, self._wakeup_writer, *others, *role.closes):
                each.close()
            code = run_process(theirs, supervisor_pid, role.name, role.main, order, role.loop_factory)
        except BaseException:
            log.exception("run process failed", process=role.name)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            standard_error.drain()
            os._exit(code)

    def _schedule(self, role: ProcessRole, order: StartOrder) -> None:
        self._due[role] = (time.monotonic() + self._backoffs[role].next_delay_s(), order)

    def _start_due(self) -> None:
        for role, (due, order) in list(self._due.items()):
            if time.monotonic() >= due and self._exit_code is None:
                del self._due[role]
                self._start(role, StartOrder(self._config, order.reason, order.predecessors))

    def _wait(self, until: float) -> None:
        for process in self._processes.values():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.outgoing else 0)
            with contextlib.suppress(KeyError):  # it closed its end
                if self._selector.get_key(process.connection).events != events:
                    self._selector.modify(process.connection, events, process)
        for key, events in self._selector.select(max(0.0, until - time.monotonic())):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    while self._wakeup.recv(READ_BYTES):
                        pass
            else:
                if events & selectors.EVENT_WRITE:
                    key.data.flush()
                if events & selectors.EVENT_READ:
                    self._read(key.data)

    def _read(self, process: SupervisedProcess) -> None:
        try:
            data = process.connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(process.connection)
            return
        process.silent_ticks = 0
        process.has_pinged = True
        for message in process.reader.feed(data):
            self._receive(process, message)

    def _receive(self, process: SupervisedProcess, message: tuple[Any, ...]) -> None:
        match message:
            case ("ready",):
                process.is_ready = True
                # A server that is ready says nothing about a control process that cannot start.
                self._has_been_ready |= process.role.kind is ProcessKind.CONTROL or not self._has_control
                self._send_stops(process)
                if process.replaces is not None:
                    self._stop(process.replaces)
            case ("note", note):
                process.note = note
            case ("failed", text, is_defect):
                process.failure = (text, is_defect)
            case ("config", config):
                self._set_config(config)

    def _reap(self) -> None:
        while True:
            try:
                # Wait for any child: the first process of a container also gets processes that lost their parent.
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            process = self._processes.pop(pid, None)
            if process is not None:
                self._on_exit(process, os.waitstatus_to_exitcode(status))

    def _on_exit(self, process: SupervisedProcess, code: int) -> None:
        self._processes[process.pid] = process  # messages that it sent at the end may concern all
        with contextlib.suppress(OSError):
            while data := process.connection.recv(READ_BYTES):
                for message in process.reader.feed(data):
                    self._receive(process, message)
        del self._processes[process.pid]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(process.connection)
        process.connection.close()
        role, is_control = process.role, process.role.kind is ProcessKind.CONTROL
        error, exit_ = process.failure[0] if process.failure is not None else None, describe_exit(code)
        if is_control and (process.is_stopping or code == 0):
            if code != 0 and process.may_have_fleets:
                log.error("stop control process failed", exit=exit_, error=error, hint=NOT_SHUT_DOWN)
                if self._stops == 1 and not self._is_stop_repeated:
                    # It may have died just before it was stopped.
                    self._is_stop_repeated = True
                    self._due[role] = (time.monotonic(), StartOrder(self._config, process.reason, process.notes()))
                    return
            self._end(code if code >= 0 else EXIT_DEFECT)
        elif self._exit_code is not None or process.is_stopping or self._has_successor(role):
            return
        elif process.failure is not None and not self._has_been_ready and (is_control or not self._has_control):
            self._failure = process.failure
            self._end(EXIT_DEFECT)
        else:
            if time.monotonic() - process.started_at >= HEALTHY_AFTER_S:
                self._backoffs[role].reset()
            log.error("lost process", process=role.name, pid=process.pid, exit=exit_, error=error)
            self._schedule(role, StartOrder(self._config, process.reason, process.notes()))

    def _has_successor(self, role: ProcessRole) -> bool:
        return any(process.role is role and not process.is_stopping for process in self._processes.values())

    def _end(self, code: int) -> None:
        """The program ends with this exit code once all servers have stopped."""
        self._exit_code = code
        self._due.clear()
        self._stop_servers()
        for process in self._of_kind(ProcessKind.CONTROL):
            process.kill()

    # --------------------------------------------------------------------------------------------------------- checks

    def _tick(self) -> None:
        now = time.monotonic()
        for process in list(self._processes.values()):
            process.silent_ticks += 1
            if now >= process.kill_at:
                process.kill()
            elif process.is_stalled():
                log.error(
                    "kill stalled process", process=process.role.name, pid=process.pid,
                    silent_s=process.silent_ticks * TICK_S,
                )  # fmt: skip
                process.reason = "stalled"
                process.silent_ticks = 0
                process.kill()
        if now >= self._memory_checked_at + MEMORY_CHECK_INTERVAL_S:
            self._memory_checked_at = now
            for process in list(self._processes.values()):
                self._check_memory(process, now)

    def _check_memory(self, process: SupervisedProcess, now: float) -> None:
        limit, role = process.role.max_memory_bytes, process.role
        is_due = now >= self._memory_replaced_at.get(role, float("-inf")) + MEMORY_PAUSE_S
        if limit is None or not process.is_ready or process.is_stopping or not is_due or self._exit_code is not None:
            return
        with contextlib.suppress(psutil.Error):
            used = psutil.Process(process.pid).memory_info().rss
            if used > limit:
                log.warning(
                    "replace process for its memory", process=role.name, pid=process.pid, used_bytes=used, limit=limit
                )
                self._memory_replaced_at[role] = now
                self._start(role, StartOrder(self._config, "memory"), replaces=process)

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        # A killed process ends at once, unless the system is at fault.
        deadline = time.monotonic() + SERVER_STOP_S
        while self._processes and time.monotonic() < deadline:
            for pid in list(self._processes):
                with contextlib.suppress(ChildProcessError):
                    if os.waitpid(pid, os.WNOHANG)[0] == 0:
                        continue
                self._processes.pop(pid).connection.close()
            time.sleep(0.01)
