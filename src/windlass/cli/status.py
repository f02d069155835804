"""`windlass status`: what waits, who decides, who works, how the last hour went. Once, or live."""

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from windlass.cli.common import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import TextTable, duration, print_json, print_text_table, rich_table, shortened, to_plain
from windlass.cli.queues import check_queue_is_known
from windlass.cli.tasks import Queue
from windlass.model.errors import DatabaseUnavailable
from windlass.model.worker import WorkerKind

if TYPE_CHECKING:
    from rich.console import Group

    from windlass.model.cycle import Cycle, Fleet
    from windlass.model.event import QueueDepth
    from windlass.model.node import NodeView
    from windlass.model.task import TaskStatus
    from windlass.model.worker import Worker
    from windlass.store.control import PostgresControlStore

LAST_HOUR_S = 3_600.0
WATCH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class StatusReport:
    """How everything stands at one moment."""

    at: datetime
    depths: list["QueueDepth"]
    # With the last cycle of each.
    fleets: list[tuple["Fleet", "Cycle | None"]]
    workers: list["Worker"]
    # Worker id to the tasks it has at hand.
    at_hand: dict[str, list[int]]
    finished: dict["TaskStatus", int]
    # Queues that some fleet, or a worker that is there, takes tasks of.
    served: frozenset[str] = frozenset()
    queue: str | None = None


@command
async def status(
    queue: Queue = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on showing it, until Ctrl-C; with --json, a line each second.")
    ] = False,
    all_: Annotated[bool, typer.Option("--all", help="Fleets too that nobody runs any more.")] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show the queues, the fleets, the workers and the last hour."""
    from windlass.wiring import stores

    loaded = load(config, data_dir).config
    async with stores.control_store(loaded, may_create=False) as store:
        await check_queue_is_known(store, queue)

        async def look_now() -> StatusReport:
            return await look(store, queue, configured=None if all_ else set(loaded.fleets))

        if watch and as_json:
            await _stream(look_now)
        if watch:
            await _watch(look_now)
        standing = await look_now()
    if as_json:
        print_json(_plain(standing))
    else:
        _print(standing)


async def look(
    store: "PostgresControlStore", queue: str | None = None, *, configured: "set[str] | None" = None
) -> StatusReport:
    """With the names of those that are configured here, fleets that are over are left out."""
    known = [fleet for fleet in await store.fleets() if queue is None or queue in fleet.queues]
    workers, now = await store.workers(), await store.now()
    staffed = {worker.fleet for worker in workers}
    attended = {fleet.name for fleet in known if fleet.planned_at and fleet.without_orchestrator_s(now) is None}
    fleets = [
        fleet
        for fleet in known
        if configured is None
        or fleet.name in configured | staffed | attended
        or _is_waited_for(fleet, configured, attended)
    ]
    return StatusReport(
        depths=[depth for depth in await store.queue_depths() if queue in (None, depth.queue)],
        fleets=[(fleet, next(iter(await store.cycles(fleet.name, 1)), None)) for fleet in fleets],
        workers=[worker for worker in workers if queue is None or queue in worker.queues],
        at_hand=await store.running_tasks(),
        finished=await store.finished_since(LAST_HOUR_S),
        served=frozenset(
            name for queues in [*(f.queues for f in known), *(w.queues for w in workers)] for name in queues
        ),
        at=await store.now(),
        queue=queue,
    )


def _is_waited_for(fleet: "Fleet", configured: set[str], attended: set[str]) -> bool:
    """Whether a fleet without workers that nobody runs may come back: nobody runs, or has configured, any other."""
    return fleet.planned_at is not None and not configured and not attended


async def _stream(look_now: "Callable[[], Awaitable[StatusReport]]") -> "NoReturn":
    """For programs: how everything stands, a line of JSON each second; while the database is away, that it is."""
    import asyncio
    import json

    while True:
        try:
            line = to_plain(_plain(await look_now()))
        except DatabaseUnavailable as error:
            line = {"error": str(error)}
        print(json.dumps(line, ensure_ascii=False), flush=True)
        await asyncio.sleep(WATCH_INTERVAL_S)


async def _watch(look_now: "Callable[[], Awaitable[StatusReport]]") -> "NoReturn":
    """A new picture every second. While the database is away the old one stays, and says so."""
    import asyncio

    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    shown = Group()
    # On a terminal the view has the screen to itself and gives it back; elsewhere only the last picture is printed.
    with Live(shown, auto_refresh=False, screen=sys.stdout.isatty()) as live:
        while True:
            try:
                shown = picture(await look_now())
                live.update(shown, refresh=True)
            except DatabaseUnavailable as error:
                live.update(Group(Text(str(error), style="red"), shown), refresh=True)
            await asyncio.sleep(WATCH_INTERVAL_S)


def picture(standing: StatusReport) -> "Group":
    """For a live view."""
    from rich.console import Group
    from rich.text import Text

    tables = [rich_table(table) if table.rows else Text(empty) for table, empty in _tables(standing, is_short=True)]
    return Group(*[part for table in tables for part in (table, Text())], Text(_last_hour(standing)))


def _print(standing: StatusReport) -> None:
    for table, empty in _tables(standing):
        if table.rows:
            print_text_table(table)
        elif empty:
            print(empty)
    print(_last_hour(standing))
    for url in _ray_dashboards(standing):
        print(f"Ray's dashboard: {url}")


def _tables(standing: StatusReport, *, is_short: bool = False) -> list[tuple[TextTable, str]]:
    """Each with what to say when it is empty."""
    return [
        (_queues(standing), "nothing waits and nothing runs"),
        (_fleets(standing, is_short=is_short), ""),
        (_workers(standing, is_short=is_short), _no_workers(standing)),
        (_nodes(standing), ""),
    ]


def _no_workers(standing: StatusReport) -> str:
    if any(fleet.is_led for fleet, _ in standing.fleets):
        return "no workers"
    return "no workers; start some with `windlass up` or `windlass worker`"


def _queues(standing: StatusReport) -> TextTable:
    numbers = ("queued", "scheduled", "retrying", "running", "oldest waits")
    rows = [
        (
            _queue(d.queue, standing),
            d.queued,
            d.scheduled,
            d.retrying,
            d.running,
            duration(d.oldest_queued_age_s),
        )
        for d in standing.depths
    ]
    return TextTable(rows, ("queue", *numbers), numbers)


def _queue(name: str, standing: StatusReport) -> str:
    return name if name in standing.served else f"{name} (nobody serves it)"


def _fleets(standing: StatusReport, *, is_short: bool) -> TextTable:
    rows = [
        (
            fleet.name,
            sum(worker.fleet == fleet.name and worker.slot is not None for worker in standing.workers),
            # One that only workers started by hand belong to has none.
            f"{fleet.min_workers} to {fleet.max_workers}" if fleet.planned_at else None,
            _brake(fleet, standing.at, decided),
            duration((standing.at - (cycle.repeated_at or cycle.started_at)).total_seconds()) if cycle else "never",
            decided,
        )
        for fleet, cycle in standing.fleets
        for decided in [(shortened(cycle.decision, 80) if is_short else cycle.decision) if cycle else None]
    ]
    return TextTable(
        rows, ("fleet", "workers", "limits", "brake", "last cycle", "it decided"), ("workers", "last cycle")
    )


def _brake(fleet: "Fleet", now: datetime, decided: str | None) -> str | None:
    """What keeps it from hiring; without the reason where the decision beside it says it."""
    parts = []
    without_orchestrator_s = fleet.without_orchestrator_s(now)
    if without_orchestrator_s is not None:
        from windlass.control.explain import no_orchestrator_reason

        parts.append(f"nobody runs this fleet: {no_orchestrator_reason(fleet, without_orchestrator_s)}")
    if fleet.is_paused:
        parts.append("paused")
    if fleet.hold is not None:
        is_said = fleet.hold.reason in (decided or "")
        parts.append(f"hold {fleet.hold.code}" + ("" if is_said else f": {fleet.hold.reason}"))
    if fleet.failed_slots:
        parts.append(f"failed slots {', '.join(map(str, fleet.failed_slots))}")
    return "; ".join(parts) or None


def _workers(standing: StatusReport, *, is_short: bool) -> TextTable:
    columns: dict[str, Callable[[Worker], object]] = {
        "worker": lambda worker: worker.id,
        "status": lambda worker: _state(worker, standing.at),
        "queues": lambda worker: ", ".join(worker.queues),
        "tasks at once": lambda worker: None if worker.kind is WorkerKind.DISPATCHER else worker.concurrency,
        "last heard": lambda worker: duration(_silent_s(worker, standing.at)),
        "gpu memory": _vram,
        "at work on": lambda worker: ", ".join(map(str, standing.at_hand.get(worker.id, ()))),
    }
    if is_short:
        for name in ("queues", "tasks at once"):
            del columns[name]
    rows = [[column(worker) for column in columns.values()] for worker in standing.workers]
    return TextTable(rows, tuple(columns), ("tasks at once", "last heard", "gpu memory"))


def _nodes(standing: StatusReport) -> TextTable:
    """What Ray says of the workers whose tasks it places."""
    rows = [
        (
            worker.id,
            worker.node.state.value + (f": {worker.node.note}" if worker.node.note else ""),
            *(_used(worker.node, name) for name in ("CPU", "GPU", "memory")),
            ", ".join(
                f"{name} {_used(worker.node, name)}"
                for name in worker.node.total
                if name not in ("CPU", "GPU", "memory")
            ),
            duration((standing.at - worker.node.at).total_seconds()),
        )
        for worker in standing.workers
        if worker.node is not None
    ]
    numbers = ("cpus", "gpus", "memory")
    return TextTable(rows, ("node", "in ray", *numbers, "other", "said"), (*numbers, "said"))


def _used(node: "NodeView", name: str) -> str | None:
    total, used = node.total.get(name), node.used.get(name, 0.0)
    if total is None:
        return None
    if name == "memory":
        return f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB"
    return f"{used:g} of {total:g}"


def _last_hour(standing: StatusReport) -> str:
    counts = ", ".join(f"{count:,} {status.value}" for status, count in standing.finished.items())
    return f"last hour{' (all queues)' if standing.queue else ''}: {counts}"


def _ray_dashboards(standing: StatusReport) -> list[str]:
    return sorted({url for worker in standing.workers if (url := worker.metadata.get("ray_dashboard"))})


def _plain(standing: StatusReport) -> dict[str, Any]:
    return {
        "at": standing.at,
        "queues": standing.depths,
        "fleets": [
            {
                **to_plain(fleet),
                "without_orchestrator_s": fleet.without_orchestrator_s(standing.at),
                "decision": cycle.decision if cycle else None,
                "cycle_id": cycle.id if cycle else None,
                "cycle_at": (cycle.repeated_at or cycle.started_at) if cycle else None,
            }
            for fleet, cycle in standing.fleets
        ],
        "workers": [
            {
                **to_plain(worker),
                "heartbeat_age_s": _silent_s(worker, standing.at),
                "is_silent": _is_silent(worker, standing.at),
                "task_ids": standing.at_hand.get(worker.id, []),
            }
            for worker in standing.workers
        ],
        "ray_dashboards": _ray_dashboards(standing),
        "last_hour": {status.value: count for status, count in standing.finished.items()},
    }


def _state(worker: "Worker", now: datetime) -> str:
    notes = [] if worker.kind is WorkerKind.WORKER else [worker.kind.value]
    if worker.is_paused:
        notes.append("paused")
    if _is_silent(worker, now):
        notes.append("silent")
    return ", ".join([worker.status.value, *notes])


def _silent_s(worker: "Worker", now: datetime) -> float | None:
    return (now - worker.last_heartbeat).total_seconds() if worker.last_heartbeat is not None else None


def _is_silent(worker: "Worker", now: datetime) -> bool:
    """For longer than its lease: its tasks are about to go to others."""
    silent_s = _silent_s(worker, now)
    return silent_s is not None and silent_s > worker.lease_s


def _vram(worker: "Worker") -> str | None:
    if worker.vram_total_mb is None:
        return None
    return f"{worker.vram_used_mb or 0:,} of {worker.vram_total_mb:,} MB"
