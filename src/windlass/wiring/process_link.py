"""The connection between a supervisor and one of its processes, and how such a process runs.

A process sends a ping from its event loop, reports that it is ready or why it failed, and leaves a note for its
successor. It receives requests to stop and to reload, and configurations. It does what its supervisor says and ignores
signals, which often reach the whole group. It never outlives its supervisor.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import structlog

from windlass.model.config import Config
from windlass.model.errors import WindlassError
from windlass.model.redaction import masked

PING_INTERVAL_S = 0.5
# A configuration is some kilobytes per fleet.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# Time for the last messages of a process that ends.
CLOSE_TIMEOUT_S = 2.0
EXIT_DEFECT = 1
EXIT_BAD_INPUT = 2
EXIT_TERMINATED = 143
_HEADER = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1
log = structlog.get_logger(__name__)

# The first element says what it is: "ping", "ready", "failed" (text, is_defect), "note" (ProcessNote), "config"
# (Config), "stop", "reload".
Message = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ProcessNote:
    """What a process leaves to its successor: its record in the database, and the name under which it held leases."""

    process_id: UUID
    holder: str | None = None


@dataclass(frozen=True, slots=True)
class StartOrder:
    """`reason`: why the predecessor had to be replaced; None for the first process of a role.

    `predecessors`: the last one, and before it the last that was ready, whose leases it may not have released.
    """

    config: Config
    reason: str | None = None
    predecessors: tuple[ProcessNote, ...] = ()


def encode(message: Message) -> bytes:
    content = pickle.dumps(message)
    return _HEADER.pack(len(content)) + content


class MessageReader:
    """Splits received bytes into messages. Both ends are processes of one program, so pickle is safe here."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length:,} bytes")
            if len(self._buffer) < _HEADER.size + length:
                return
            content = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
            del self._buffer[: _HEADER.size + length]
            yield pickle.loads(content)  # noqa: S301 - see above


class ProcessLink:
    """What a process hears from its supervisor. By itself it has no supervisor: tests and callers set the events."""

    def __init__(self) -> None:
        self.reload_requested = asyncio.Event()
        self.stop_requested = asyncio.Event()
        # Receives each stop, also repeated ones.
        self.on_stop: Callable[[], None] | None = None
        self._config: Config | None = None
        self._on_config: Callable[[Config], None] = lambda _config: None

    def stop(self) -> None:
        self.stop_requested.set()
        if self.on_stop is not None:
            self.on_stop()

    def set_config(self, config: Config) -> None:
        self._config = config
        self._on_config(config)

    def receive_configs(self, on_config: Callable[[Config], None]) -> None:
        """Give each new configuration to `on_config`, also one that came while the process started."""
        self._on_config = on_config
        if self._config is not None:
            on_config(self._config)

    def send(self, *message: Any) -> None:
        """Send a message to the supervisor. Never blocks."""

    def report_ready(self) -> None:
        """The process has started: what it has built lives as long as it does."""


class SupervisorLink(ProcessLink):
    """`cancel_start` is called by a stop that comes before `on_stop` is set."""

    def __init__(self, cancel_start: Callable[[], object]) -> None:
        super().__init__()
        self._cancel_start = cancel_start
        self._reader = MessageReader()
        self._transport: asyncio.WriteTransport | None = None

    async def open(self, connection: socket.socket) -> None:
        link = self

        class Protocol(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                for message in link._reader.feed(data):
                    link._receive(message)

            def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
                # The supervisor is gone. Linux kills this process in that case; other systems do not.
                if not link._is_closing:
                    os._exit(EXIT_DEFECT)

        self._is_closing = False
        transport, _ = await asyncio.get_running_loop().create_unix_connection(Protocol, sock=connection)
        self._transport = transport

    async def ping(self) -> None:
        while True:
            # Without a queue: a supervisor that is stopped reads nothing.
            if self._transport is not None and not self._transport.get_write_buffer_size():
                self.send("ping")
            await asyncio.sleep(PING_INTERVAL_S)

    def send(self, *message: Any) -> None:
        if self._transport is not None:
            self._transport.write(encode(message))

    def report_ready(self) -> None:
        # Otherwise the garbage of requests causes collections that visit every object of the program: 20 ms each, in
        # which a server answers no request.
        gc.collect()
        gc.freeze()
        self.send("ready")

    async def close(self) -> None:
        """Wait until the last messages are sent, for CLOSE_TIMEOUT_S at most."""
        self._is_closing = True
        if self._transport is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._transport.get_write_buffer_size():  # noqa: ASYNC110 - transports have no such event
                    await asyncio.sleep(0.01)
        self._transport.abort()

    def _receive(self, message: Message) -> None:
        match message:
            case ("stop",):
                self.stop()
                if self.on_stop is None:
                    self._cancel_start()
            case ("reload",):
                self.reload_requested.set()
            case ("config", config):
                self.set_config(config)


ProcessMain = Callable[[ProcessLink, StartOrder], Coroutine[Any, Any, None]]
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run_process(
    connection: socket.socket,
    supervisor_pid: int,
    name: str,
    main: ProcessMain,
    order: StartOrder,
    loop_factory: LoopFactory | None = None,
) -> int:
    """Run `main` in this process, which was just forked. Returns the exit code."""
    _die_with(supervisor_pid)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Not SIG_IGN, which the programs that this process starts would inherit.
        signal.signal(number, lambda *_: None)
    structlog.contextvars.bind_contextvars(process=name)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_run(connection, main, order))


async def _run(connection: socket.socket, main: ProcessMain, order: StartOrder) -> int:
    task: asyncio.Task[None] | None = None

    def cancel() -> None:
        if task is not None:
            task.cancel()

    link = SupervisorLink(cancel)
    await link.open(connection)
    pinging = asyncio.create_task(link.ping())
    task = asyncio.create_task(main(link, order))
    try:
        await asyncio.wait([task])
        return _exit_code(task, link)
    finally:
        pinging.cancel()
        await link.close()


def _exit_code(task: "asyncio.Task[None]", link: ProcessLink) -> int:
    if task.cancelled():
        return EXIT_TERMINATED
    error = task.exception()
    if error is None:
        return 0
    while isinstance(error, ExceptionGroup):
        # Several concurrent calls failed: report one of them, an internal error before an expected one.
        error = min(error.exceptions, key=lambda one: isinstance(one, WindlassError))
    if isinstance(error, WindlassError):
        link.send("failed", str(error), False)
        return EXIT_BAD_INPUT
    log.error("run process failed", exc_info=error)
    link.send("failed", masked(f"{type(error).__name__}: {error}"), True)
    return EXIT_DEFECT


def _die_with(supervisor_pid: int) -> None:
    """End this process when its supervisor ends, even by SIGKILL. Elsewhere than on Linux, its event loop notices."""
    if not signal_at_end_of_parent(supervisor_pid, signal.SIGKILL):
        os._exit(EXIT_DEFECT)


def signal_at_end_of_parent(parent_pid: int, number: signal.Signals) -> bool:
    """Get this signal when the parent process ends, on Linux. A program that replaces this one keeps it. False if the
    parent has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return os.getppid() == parent_pid
