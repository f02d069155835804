"""Fleets, workers, events and cycles for people, in memory. Implements ports/fleets.py."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from support.memory_store.constraints import check_limit
from support.memory_store.fleets import SlotRow
from support.memory_store.observe import HOST_CHECKS, queues_with_tasks
from support.memory_store.tables import TableStore
from support.memory_store.workers import MemoryWorker
from windlass.model.cycle import Cycle, CycleDetail, Fleet
from windlass.model.errors import BadInput
from windlass.model.event import Event
from windlass.model.listing import HostRecord, Page
from windlass.model.rollout import DeployRequest
from windlass.model.worker import LIVE, Worker, WorkerStatus
from windlass.ports.fleets import MAX_AHEAD
from windlass.store.cursors import ID, read_cursor, write_cursor


class MemoryFleetQueries(TableStore):
    async def fleets(self) -> list[Fleet]:
        is_led = self._tables.leases.has_leader()
        return [row.as_fleet(is_led=is_led) for _, row in sorted(self._tables.fleets.items())]

    async def leader(self) -> str | None:
        leases = self._tables.leases
        return leases.rows["orchestrator"].holder if leases.is_held("orchestrator") else None

    async def worker(self, worker_id: str) -> Worker | None:
        row = self._workers.get(worker_id)
        return row.as_worker() if row is not None else None

    async def workers(self, *, include_terminated: bool = False) -> list[Worker]:
        rows = self._workers.rows if include_terminated else self._workers.not_terminated
        return [row.as_worker() for row in sorted(rows.values(), key=lambda row: row.age_order)]

    async def machine_hosts(self, fleet: str | None = None) -> list[HostRecord]:
        return self._host_records(fleet, lambda spawned: spawned.machine_host)

    async def machine_places(self, fleet: str | None = None) -> list[HostRecord]:
        return self._host_records(fleet, lambda _spawned: None)

    def _host_records(self, fleet: str | None, host_of: Callable[[Any], str | None]) -> list[HostRecord]:
        groups: dict[tuple[str, str | None, str | None], list[MemoryWorker]] = {}
        for row in self._workers.rows.values():
            spawned = row.spawned
            is_rented = row.slot is not None and spawned.machine_id is not None and spawned.place is not None
            if is_rented and fleet in (None, row.fleet):
                groups.setdefault((row.fleet, spawned.place, host_of(spawned)), []).append(row)
        found = [
            HostRecord(
                *key,
                machines=len(rows),
                lost=sum(row.code == "MACHINE_GONE" for row in rows),
                failed_checks=sum(row.code in HOST_CHECKS for row in rows),
                last_used_at=max(row.created_at for row in rows),
            )
            for key, rows in groups.items()
        ]
        return sorted(
            found, key=lambda each: (each.fleet, -each.lost - each.failed_checks, -each.machines, each.place or "")
        )

    async def events(
        self, *, task_id: int | None = None, worker_id: str | None = None, limit: int = 200
    ) -> list[Event]:
        check_limit("reading events", limit)
        return [self._with_queue(event) for event in self._tables.event_log.latest(task_id, worker_id, limit)]

    def _with_queue(self, event: Event) -> Event:
        task = self._tables.tasks.rows.get(event.task_id) if event.task_id is not None else None
        return replace(event, queue=task.queue) if task is not None else event

    async def audit_page(self, *, actor: str | None = None, limit: int = 50, cursor: str | None = None) -> Page[Event]:
        (before,) = read_cursor(cursor, ID) or (None,)
        events = (
            event
            for event in reversed(self._tables.event_log.events)
            if event.actor is not None
            and (actor is None or _is_by(actor, event.actor))
            and (before is None or event.id < before)
        )
        found = tuple(islice(events, limit))
        return Page(found, write_cursor(found[-1].id) if len(found) == limit else None)

    async def cycles(self, fleet: str, limit: int = 20) -> list[Cycle]:
        return [stored.cycle for stored in islice(self._tables.cycles.of(fleet), limit)]

    async def cycle(self, cycle_id: int) -> CycleDetail | None:
        return self._tables.cycles.rows.get(cycle_id)

    async def last_cycle_with(self, fleet: str, worker_id: str) -> CycleDetail | None:
        worker = self._workers.get(worker_id)
        if worker is None or worker.fleet != fleet:
            return None
        return self._tables.cycles.last_with(worker, self._clock())

    async def running_tasks(self) -> dict[str, list[int]]:
        return {worker_id: sorted(tasks) for worker_id, tasks in self._tasks.running.items() if tasks}

    async def queues_with_tasks(self, queues: Sequence[str]) -> set[str]:
        return queues_with_tasks(self._tables, queues)

    async def ready_before(self, task_id: int) -> int:
        mine = self._tasks.rows.get(task_id)
        if mine is None:
            return 0
        place = (-mine.priority, mine.id)
        rows = self._tasks.queues[mine.queue].unfinished.values()
        before = sum(row.is_ready() and (-row.priority, row.id) < place for row in rows)
        return min(before, MAX_AHEAD + 1)


class MemoryOperations(TableStore):
    async def restart_slots(self, fleet: str, slot: int | None = None) -> int:
        row = self._tables.known_fleet("restarting slots", fleet)
        slots = row.slots
        if slot is not None and slot not in slots and not 0 <= slot < row.max_workers:
            last = row.max_workers - 1
            raise BadInput(f"restarting slots: slot {slot} not found in fleet {fleet}: its slots are 0 to {last}.")
        chosen = [number for number in slots if slot in (None, number)]
        failed = sum(slots[number].is_failed for number in chosen)
        for number in chosen:
            slots[number] = SlotRow()
        row.reset_at = self._clock()
        if slot is None:
            row.restarted_at = row.reset_at
        self._add_event("SLOTS_RESTARTED", "restart counts cleared on request", fleet=fleet, detail={"slot": slot})
        return failed

    async def request_workers(self, fleet: str, count: int) -> int:
        row = self._tables.known_fleet("requesting workers", fleet)
        row.requested_workers = max(0, min(row.requested_workers + count, self._tables.free_slots_for_requests(row)))
        self._add_event("WORKERS_REQUESTED", "on request", fleet=fleet, detail={"count": count})
        return row.requested_workers

    async def request_deploy(self, fleet: str, surge: int, max_unavailable: int, *, is_immediate: bool) -> int:
        row = self._tables.known_fleet("requesting a deploy", fleet)
        id_ = 1 if row.deploy is None else row.deploy.id + 1
        row.deploy = DeployRequest(id_, surge, max_unavailable, is_immediate)
        self._add_event("DEPLOY_REQUESTED", "on request", fleet=fleet, detail={"id": id_})
        return id_

    async def abort_deploy(self, fleet: str) -> bool:
        row = self._tables.known_fleet("aborting a deploy", fleet)
        last = row.deploy or DeployRequest(0, is_aborted=True)
        if last.is_aborted:
            rollout = row.planner_state.rollout
            if rollout is None or not rollout.is_running or row.planner_state.aborted_deploy < last.id:
                return False
            last = replace(last, id=last.id + 1)
        row.deploy = replace(last, is_aborted=True)
        self._add_event("DEPLOY_ABORT_REQUESTED", "on request", fleet=fleet)
        return True

    async def pause_fleet(self, fleet: str, is_paused: bool) -> int:
        self._tables.known_fleet("pausing or resuming a fleet", fleet).is_paused = is_paused
        own = (worker for worker in self._workers.not_terminated.values() if worker.fleet == fleet)
        rows = [worker for worker in own if worker.status in LIVE and worker.is_paused != is_paused]
        for row in rows:
            row.is_paused = is_paused
        self._add_event("FLEET_PAUSED" if is_paused else "FLEET_RESUMED", "on request", fleet=fleet)
        return len(rows)

    async def set_paused(self, worker_ids: Sequence[str], is_paused: bool) -> int:
        named = self._workers.named(worker_ids)
        rows = [row for row in named if row.status in LIVE and row.is_paused is not is_paused]
        for row in rows:
            row.is_paused = is_paused
            code = "WORKER_PAUSED" if is_paused else "WORKER_RESUMED"
            self._add_event(code, "on request", fleet=row.fleet, worker_id=row.id)
        return len(rows)

    async def set_terminating(self, worker_ids: Sequence[str], reason: str) -> int:
        rows = [row for row in self._workers.named(worker_ids) if row.is_staying]
        for row in rows:
            row.move(WorkerStatus.TERMINATING)
            row.code, row.reason = "MANUAL", reason
            row.spawned.terminating_at = self._clock()
            self._add_event("WORKER_TERMINATING", reason, fleet=row.fleet, worker_id=row.id)
        return len(rows)

    async def terminate_worker(self, worker_id: str, reason: str) -> bool:
        worker = self._workers.among(LIVE, worker_id)
        if worker is None:
            return False
        self._tables.fail_worker(worker_id, "MANUAL", reason, counts=False)
        if worker.slot is None:
            self._tables.terminate(worker)
        return True


def _is_by(wanted: str, actor: str) -> bool:
    """`token:NAME` selects all tokens that had the name."""
    return actor == wanted or (actor.startswith("token:") and actor.partition("#")[0] == wanted)
