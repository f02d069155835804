"""Machines that one provider object created or deleted, so that a cached or lagging list can be corrected."""

import asyncio

from windlass.model.machine import Machine


class RecentChanges:
    def __init__(self) -> None:
        # Machine id to the time of the change, by the event loop's clock, and the machine. None: deleted.
        self._changes: dict[str, tuple[float, Machine | None]] = {}

    def __contains__(self, machine_id: str) -> bool:
        return machine_id in self._changes

    def record(self, machine_id: str, machine: Machine | None) -> None:
        """`machine` was created; None: the machine with this id is gone."""
        self._changes[machine_id] = (asyncio.get_running_loop().time(), machine)

    def is_deleted(self, machine_id: str) -> bool:
        return machine_id in self._changes and self._changes[machine_id][1] is None

    def discard_before(self, time: float) -> None:
        """Forget the changes that a list requested at this time already shows."""
        self._changes = {id_: change for id_, change in self._changes.items() if change[0] >= time}

    def apply(self, machines: dict[str, Machine], requested_at: float) -> tuple[Machine, ...]:
        """The machines of a list requested at this time, with the changes made since."""
        merged = dict(machines)
        for id_, (changed_at, machine) in self._changes.items():
            if changed_at < requested_at:
                continue
            if machine is None:
                merged.pop(id_, None)
            else:
                merged.setdefault(id_, machine)
        return tuple(merged.values())
