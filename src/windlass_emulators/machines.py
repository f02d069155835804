"""What runs inside an emulated machine: nothing, in virtual time; a real local process otherwise."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class MachineHost(Protocol):
    """Where machines run. No call waits for a machine: a start or a stop is on its way when it returns."""

    def start(self, server_id: int, name: str, user_data: str) -> None:
        """Boot it. The first boot, and the first after `erase`, installs what user_data says. No effect if it runs."""

    def stop(self, server_id: int, *, is_sudden: bool = False) -> None:
        """Turn it off: asked first and then made to, or at once when sudden. Its disk stays."""

    def erase(self, server_id: int) -> None:
        """Turn it off and forget its disk."""

    def is_running(self, server_id: int) -> bool:
        """Whether its program runs. A machine whose program has ended is still a machine, and is still paid for."""


@dataclass(frozen=True, slots=True)
class Booted:
    server_id: int
    name: str
    user_data: str


class VirtualHost:
    """Records who runs. `on_start` and `on_stop` tell a simulation, which puts its own workers inside."""

    def __init__(
        self,
        on_start: Callable[[Booted], None] = lambda _: None,
        on_stop: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.running: dict[int, Booted] = {}
        self._on_start = on_start
        self._on_stop = on_stop

    def start(self, server_id: int, name: str, user_data: str) -> None:
        if server_id not in self.running:
            self.running[server_id] = Booted(server_id, name, user_data)
            self._on_start(self.running[server_id])

    def stop(self, server_id: int, *, is_sudden: bool = False) -> None:  # noqa: ARG002 - all are equally fast here
        if self.running.pop(server_id, None) is not None:
            self._on_stop(server_id)

    def erase(self, server_id: int) -> None:
        self.stop(server_id)

    def is_running(self, server_id: int) -> bool:
        return server_id in self.running
