"""Whether a machine is where the fleet wants it. Pure.

The provider compares the place of a machine with the request (data residency). Here a host is avoided on which the
checks of the fleet's machines failed repeatedly: the next machine there would most likely fail too.
"""

from windlass.model.machine import Machine
from windlass.model.snapshot import WorkerView
from windlass.model.worker import WorkerStatus

MISPLACED = "MISPLACED"
HOST_AVOIDED = "HOST_AVOIDED"


def placement_failure(
    worker: WorkerView, machine: Machine | None, avoided_hosts: tuple[str, ...]
) -> tuple[str, str] | None:
    """Code and reason if a spawning worker's machine must not be used."""
    if machine is None or worker.slot is None:
        return None
    # An active worker may have tasks. If it is misplaced, because a person edited the fleet's places, it drains
    # (stages/draining.py). It has passed its checks, whatever its host did before.
    if worker.status is not WorkerStatus.SPAWNING:
        return None
    if machine.misplaced is not None:
        return MISPLACED, machine.misplaced
    if machine.host in avoided_hosts:
        return HOST_AVOIDED, f"Machines on host {machine.host} failed their checks repeatedly"
    return None
