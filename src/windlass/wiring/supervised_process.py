"""A process under supervision: its role, which outlives it, and its state."""

import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from windlass.model.process import ProcessKind
from windlass.wiring.process_link import LoopFactory, MessageReader, ProcessMain, ProcessNote, StartOrder, encode

# Silence is counted in ticks of the supervisor, so that a time in which the host was suspended does not count.
TICK_S = 0.25
# A process that waits for a CPU or a disk may be silent for this many times its limit.
BUSY_FACTOR = 4
# Until the first message of a process.
START_LIMIT_S = 60.0
_BUSY = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)


@dataclass(frozen=True, slots=True, eq=False)
class ProcessRole:
    """A process that always runs. `closes`: inherited sockets that it has no use for.

    `loop_factory` makes its event loop, if not that of the standard library.
    """

    kind: ProcessKind
    number: int
    main: ProcessMain
    silence_limit_s: float
    max_memory_bytes: int | None = None
    closes: tuple[socket.socket, ...] = ()
    loop_factory: LoopFactory | None = None

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}" if self.kind is ProcessKind.SERVER else str(self.kind)


@dataclass(slots=True, eq=False)
class SupervisedProcess:
    """A running process. `reason`: why it was killed. `replaces`: the process that stops when this one is ready."""

    role: ProcessRole
    pid: int
    connection: socket.socket
    order: StartOrder
    replaces: "SupervisedProcess | None" = None
    reader: MessageReader = field(default_factory=MessageReader)
    started_at: float = field(default_factory=time.monotonic)
    silent_ticks: int = 0
    has_pinged: bool = False
    is_ready: bool = False
    is_stopping: bool = False
    # Stops that it gets when it is ready.
    unsent_stops: int = 0
    kill_at: float = float("inf")
    reason: str = "exited"
    note: ProcessNote | None = None
    # Text, and whether it is a defect.
    failure: tuple[str, bool] | None = None
    # Rest of the messages that the connection did not take yet.
    outgoing: bytearray = field(default_factory=bytearray)

    def send(self, *message: Any) -> None:
        """Never blocks. A process that reads nothing is silent, too: it is killed, and its messages are lost."""
        self.outgoing += encode(message)
        self.flush()

    def flush(self) -> None:
        """Send as much as the connection takes. Call again when it is writable, or messages would be cut."""
        try:
            while self.outgoing:
                del self.outgoing[: self.connection.send(self.outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self.outgoing.clear()  # the process has ended

    @property
    def may_have_fleets(self) -> bool:
        """For a control process. One that replaces another has its fleets before it is ready."""
        return self.is_ready or self.order.reason is not None

    def notes(self) -> tuple[ProcessNote, ...]:
        """For its successor. A process that was not ready may have cleared nothing of its own predecessors."""
        inherited = () if self.is_ready else self.order.predecessors[:1]
        return (*inherited, self.note) if self.note is not None else inherited

    def is_stalled(self) -> bool:
        silent_s = self.silent_ticks * TICK_S
        limit_s = self.role.silence_limit_s if self.has_pinged else START_LIMIT_S
        if silent_s <= limit_s:
            return False
        if silent_s > limit_s * BUSY_FACTOR:
            return True
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).status() not in _BUSY
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
