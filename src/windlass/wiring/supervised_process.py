"""A process under supervision: its role, which outlives it, and its state."""

import contextlib
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from windlass.model.process import ProcessKind
from windlass.wiring.process_link import MessageReader, ProcessMain, ProcessNote, encode


@dataclass(frozen=True, slots=True, eq=False)
class ProcessRole:
    """A process that always runs. `closes`: inherited sockets that it has no use for."""

    kind: ProcessKind
    number: int
    main: ProcessMain
    silence_limit_s: float
    max_memory_bytes: int | None = None
    closes: tuple[socket.socket, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}" if self.kind is ProcessKind.SERVER else str(self.kind)


@dataclass(slots=True, eq=False)
class SupervisedProcess:
    """A running process. `reason`: why it was killed. `replaces`: the process that stops when this one is ready."""

    role: ProcessRole
    pid: int
    connection: socket.socket
    replaces: "SupervisedProcess | None" = None
    reader: MessageReader = field(default_factory=MessageReader)
    started_at: float = field(default_factory=time.monotonic)
    silent_ticks: int = 0
    has_pinged: bool = False
    is_ready: bool = False
    is_stopping: bool = False
    kill_at: float = float("inf")
    reason: str = "exited"
    note: ProcessNote | None = None
    # Text, and whether it is a defect.
    failure: tuple[str, bool] | None = None

    def send(self, *message: Any) -> None:
        """A process that reads nothing is silent too, and is killed for that."""
        with contextlib.suppress(OSError):
            self.connection.sendall(encode(message))
