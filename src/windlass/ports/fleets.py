"""Fleets, workers, events and cycles for people: reads, and the changes an operator makes.

None of it needs the lease; the next cycle sees every change. A fleet without any cycle is unknown: BadInput.
"""

from collections.abc import Sequence
from typing import Protocol

from windlass.model.cycle import Cycle, CycleDetail, Fleet
from windlass.model.event import Event
from windlass.model.listing import HostRecord, Page
from windlass.model.worker import Worker
from windlass.ports.clock import DatabaseClock

# `ready_before` counts up to here.
MAX_AHEAD = 10_000


class FleetQueries(DatabaseClock, Protocol):
    async def fleets(self) -> list[Fleet]:
        """By name."""

    async def leader(self) -> str | None:
        """The holder of the orchestrators' lease, as in model/lease.py; None if no orchestrator leads."""

    async def worker(self, worker_id: str) -> Worker | None: ...

    async def workers(self, *, include_terminated: bool = False) -> list[Worker]: ...

    async def machine_hosts(self, fleet: str | None = None) -> list[HostRecord]:
        """Places and hosts of rented machines, by fleet, worst first. Machines that retention deleted do not count."""

    async def machine_places(self, fleet: str | None = None) -> list[HostRecord]:
        """The same with all hosts of a place together. Their host is None."""

    async def events(
        self, *, task_id: int | None = None, worker_id: str | None = None, limit: int = 200
    ) -> list[Event]:
        """The newest `limit` events, oldest first."""

    async def audit_page(self, *, actor: str | None = None, limit: int = 50, cursor: str | None = None) -> Page[Event]:
        """Events with an actor, or with this one, newest first. BadInput for an invalid cursor."""

    async def cycles(self, fleet: str, limit: int = 20) -> list[Cycle]:
        """Newest first."""

    async def cycle(self, cycle_id: int) -> CycleDetail | None: ...

    async def last_cycle_with(self, fleet: str, worker_id: str) -> CycleDetail | None:
        """The newest cycle whose snapshot has this worker, among the last few before it terminated."""

    async def running_tasks(self) -> dict[str, list[int]]:
        """Ids of running tasks by worker id."""

    async def queues_with_tasks(self, queues: Sequence[str]) -> set[str]:
        """Which of these queues have a queued task, counted as an observation counts it. One cheap query."""

    async def ready_before(self, task_id: int) -> int:
        """How many ready tasks of its queue come before this one; MAX_AHEAD + 1 if there are more than MAX_AHEAD."""


class Operations(Protocol):
    async def restart_slots(self, fleet: str, slot: int | None = None) -> int:
        """Clear the restart counts of one slot, or of all, and the fleet's failure-rate state.

        Failed slots can be filled again. For all slots, it also abandons machines of another account that hold the
        fleet. Returns how many slots were failed. BadInput for a slot outside the fleet.
        """

    async def request_workers(self, fleet: str, count: int) -> int:
        """Request `count` more workers; a negative count withdraws requests. Returns the number of open requests.

        Requests never exceed the free slots: slots that are not failed and have no spawning or active worker. Requests
        that no slot can take when the next plan is committed are dropped.
        """

    async def request_deploy(self, fleet: str, surge: int, max_unavailable: int, *, is_immediate: bool) -> int:
        """Ask for the replacement of all workers by workers of the current version. Returns the request's id."""

    async def abort_deploy(self, fleet: str) -> bool:
        """Ask to abort the running rollout, or the last request. False if there is none, or it was aborted before."""

    async def pause_fleet(self, fleet: str, is_paused: bool) -> int:
        """Pause or resume all its workers, also future ones. Returns how many changed. A paused fleet spawns none."""

    async def set_paused(self, worker_ids: Sequence[str], is_paused: bool) -> int:
        """Pause or resume live workers. Returns how many changed."""

    async def set_terminating(self, worker_ids: Sequence[str], reason: str) -> int:
        """Drain spawning and active workers: they finish their tasks and deregister. Returns how many changed."""

    async def terminate_worker(self, worker_id: str, reason: str) -> bool:
        """Terminate a live worker at once, code MANUAL. Its tasks are requeued, and no restart is counted.

        False if it was not live.
        """
