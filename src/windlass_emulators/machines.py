"""The contract of hosts for emulated servers, and a host that runs nothing.

`process_host.ProcessHost` runs servers as local processes. `VirtualHost` only records them, for tests in virtual time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class MachineHost(Protocol):
    """Runs machines. Calls start or stop a machine and do not wait for it."""

    def start(self, server_id: int, name: str, user_data: str) -> None:
        """Boot the machine. Its first boot, and the first after `erase`, installs user_data. No effect if it runs."""

    def stop(self, server_id: int, *, is_sudden: bool = False) -> None:
        """Stop the machine: SIGTERM, then SIGKILL; or SIGKILL at once if sudden. Its disk is kept."""

    def erase(self, server_id: int) -> None:
        """Stop the machine and delete its disk."""

    def is_running(self, server_id: int) -> bool:
        """Whether its program runs. A machine whose program has ended still exists and is still billed."""


@dataclass(frozen=True, slots=True)
class BootedMachine:
    server_id: int
    name: str
    user_data: str


class VirtualHost:
    """Records the running machines. Simulations use `on_start` and `on_stop` to run their own workers."""

    def __init__(
        self,
        on_start: Callable[[BootedMachine], None] = lambda _: None,
        on_stop: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.running: dict[int, BootedMachine] = {}
        self._on_start = on_start
        self._on_stop = on_stop

    def start(self, server_id: int, name: str, user_data: str) -> None:
        if server_id not in self.running:
            self.running[server_id] = BootedMachine(server_id, name, user_data)
            self._on_start(self.running[server_id])

    def stop(self, server_id: int, *, is_sudden: bool = False) -> None:  # noqa: ARG002
        if self.running.pop(server_id, None) is not None:
            self._on_stop(server_id)

    def erase(self, server_id: int) -> None:
        self.stop(server_id)

    def is_running(self, server_id: int) -> bool:
        return server_id in self.running
