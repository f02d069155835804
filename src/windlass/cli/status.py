"""`windlass status`: queues, fleets, workers and the results of the last hour, once or as a live view."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from windlass.cli.options import AsJson, ConfigFile, DataDir, QueueFilter, command, load
from windlass.cli.output import TextTable, one_line, print_json, print_text_table, rich_table, to_plain
from windlass.cli.queues import check_queue_is_known
from windlass.control.explanation import no_orchestrator_reason
from windlass.model.cycle import Cycle, Fleet
from windlass.model.cycle_actions import done_actions, done_note
from windlass.model.errors import DatabaseUnavailable
from windlass.model.event import QueueDepth
from windlass.model.node import NodeView
from windlass.model.task import TaskStatus
from windlass.model.text_format import duration
from windlass.model.worker import Worker, WorkerKind
from windlass.operations import OperationStore
from windlass.rollouts import count_versions, versions_text
from windlass.wiring import stores

# Rich takes longer to import than the rest of the command, and only the live view needs it.
if TYPE_CHECKING:
    from rich.console import Group

LAST_HOUR_S = 3_600.0
WATCH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class StatusReport:
    at: datetime
    depths: list[QueueDepth]
    # Each fleet with its last cycle.
    fleets: list[tuple[Fleet, Cycle | None]]
    workers: list[Worker]
    # Worker id to the ids of its running tasks.
    running: dict[str, list[int]]
    finished: dict[TaskStatus, int]
    # Queues that a fleet or a live worker serves.
    served: frozenset[str] = frozenset()
    queue: str | None = None


@command
async def status(
    queue: QueueFilter = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh every second until Ctrl-C; with --json, one line per second.")
    ] = False,
    all_: Annotated[bool, typer.Option("--all", help="Include fleets that are no longer configured or run.")] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show queues, fleets, workers and the results of the last hour."""
    loaded = load(config, data_dir).config
    async with stores.store(loaded, may_create=False) as store:
        await check_queue_is_known(store, queue)

        async def read() -> StatusReport:
            return await read_status(store, queue, configured=None if all_ else set(loaded.fleets))

        if watch and as_json:
            await _stream(read)
        if watch:
            await _watch(read)
        report = await read()
    if as_json:
        print_json(_plain(report))
        return
    for table, empty in _tables(report):
        if table.rows:
            print_text_table(table)
        elif empty:
            print(empty)
    print(_last_hour(report))
    for url in _ray_dashboards(report):
        print(f"Ray dashboard: {url}")


async def read_status(
    store: OperationStore, queue: str | None = None, *, configured: set[str] | None = None
) -> StatusReport:
    """`configured`: the names of the configured fleets. If given, fleets that are no longer used are left out."""
    known = [fleet for fleet in await store.fleets() if queue is None or queue in fleet.queues]
    workers, now = await store.workers(), await store.now()
    staffed = {worker.fleet for worker in workers}
    attended = {fleet.name for fleet in known if fleet.planned_at and fleet.without_orchestrator_s(now) is None}
    fleets = [
        fleet
        for fleet in known
        if configured is None
        or fleet.name in configured | staffed | attended
        # Without any configured or running fleet, those that ran before are shown: one of them may be started again.
        or (fleet.planned_at is not None and not configured and not attended)
    ]
    return StatusReport(
        depths=[depth for depth in await store.queue_depths() if queue in (None, depth.queue)],
        fleets=[(fleet, next(iter(await store.cycles(fleet.name, 1)), None)) for fleet in fleets],
        workers=[worker for worker in workers if queue is None or queue in worker.queues],
        running=await store.running_tasks(),
        finished=await store.finished_since(LAST_HOUR_S),
        served=frozenset(
            name for queues in [*(f.queues for f in known), *(w.queues for w in workers)] for name in queues
        ),
        at=await store.now(),
        queue=queue,
    )


async def _stream(read: Callable[[], Awaitable[StatusReport]]) -> NoReturn:
    """Print one line of JSON per second, with an error while the database is unavailable."""
    while True:
        try:
            line = to_plain(_plain(await read()))
        except DatabaseUnavailable as error:
            line = {"error": str(error)}
        print(json.dumps(line, ensure_ascii=False), flush=True)
        await asyncio.sleep(WATCH_INTERVAL_S)


async def _watch(read: Callable[[], Awaitable[StatusReport]]) -> NoReturn:
    """Refresh every second. While the database is unavailable, the last view stays, with the error above it."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    shown = Group()
    # On a terminal the view uses the alternate screen. Elsewhere only the last view is printed.
    with Live(shown, auto_refresh=False, screen=sys.stdout.isatty()) as live:
        while True:
            try:
                shown = render(await read())
                live.update(shown, refresh=True)
            except DatabaseUnavailable as error:
                live.update(Group(Text(str(error), style="red"), shown), refresh=True)
            await asyncio.sleep(WATCH_INTERVAL_S)


def render(report: StatusReport) -> "Group":
    """The live view."""
    from rich.console import Group
    from rich.text import Text

    tables = [rich_table(table) if table.rows else Text(empty) for table, empty in _tables(report, is_short=True)]
    return Group(*[part for table in tables for part in (table, Text())], Text(_last_hour(report)))


def _tables(report: StatusReport, *, is_short: bool = False) -> list[tuple[TextTable, str]]:
    """Each table with the text to print if it is empty."""
    no_workers = "no workers"
    if not any(fleet.is_led for fleet, _ in report.fleets):
        no_workers += "; start some with `windlass up` or `windlass worker`"
    return [
        (_queue_table(report), "no queued or running tasks"),
        (_fleet_table(report, is_short=is_short), ""),
        (_worker_table(report, is_short=is_short), no_workers),
        (_node_table(report), ""),
    ]


def _queue_table(report: StatusReport) -> TextTable:
    numbers = ("queued", "scheduled", "retrying", "running", "oldest queued")
    rows = [
        (
            d.queue if d.queue in report.served else f"{d.queue} (not served)",
            d.queued,
            d.scheduled,
            d.retrying,
            d.running,
            duration(d.oldest_queued_age_s),
        )
        for d in report.depths
    ]
    return TextTable(rows, ("queue", *numbers), numbers)


def _fleet_table(report: StatusReport, *, is_short: bool) -> TextTable:
    rows = [
        (
            fleet.name,
            sum(worker.fleet == fleet.name and worker.slot is not None for worker in report.workers),
            f"{fleet.min_workers} to {fleet.max_workers}",
            _notes(fleet, report, decided),
            duration((report.at - (cycle.repeated_at or cycle.started_at)).total_seconds()) if cycle else "never",
            decided,
        )
        # A fleet without a plan exists only because of workers started by hand; the table of workers has those.
        for fleet, cycle in report.fleets
        if fleet.planned_at is not None
        for decided in [_decided(cycle, is_short=is_short) if cycle is not None else None]
    ]
    headings = ("fleet", "workers", "limits", "notes", "last cycle", "decision")
    return TextTable(rows, headings, ("workers", "last cycle"))


def _decided(cycle: Cycle, *, is_short: bool) -> str:
    """What the cycle decided, and what it did."""
    decision = one_line(cycle.decision, 80) if is_short else cycle.decision
    return f"{decision}{done_note(cycle)}"


def _notes(fleet: Fleet, report: StatusReport, decided: str | None) -> str | None:
    """Workers started by hand, and what keeps the fleet from spawning.

    The reason of a hold is omitted if the decision contains it, and shortened: `explain` and --json have all of it.
    """
    parts = []
    by_hand = sum(worker.fleet == fleet.name and worker.is_by_hand for worker in report.workers)
    if by_hand:
        parts.append(f"{by_hand} more started by hand")
    without_orchestrator_s = fleet.without_orchestrator_s(report.at)
    if without_orchestrator_s is not None:
        parts.append(f"no orchestrator: {no_orchestrator_reason(fleet, without_orchestrator_s)}")
    old, total = count_versions(fleet, report.workers)
    if old:
        parts.append(versions_text(old, total))
    if fleet.is_paused:
        parts.append("paused")
    if fleet.hold is not None:
        reason = "" if fleet.hold.reason in (decided or "") else f": {one_line(fleet.hold.reason, 80)}"
        parts.append(f"hold {fleet.hold.code}{reason}")
    if fleet.failed_slots:
        parts.append(f"failed slots {', '.join(map(str, fleet.failed_slots))}")
    return "; ".join(parts) or None


def _worker_table(report: StatusReport, *, is_short: bool) -> TextTable:
    columns: dict[str, Callable[[Worker], object]] = {
        "worker": lambda worker: worker.id,
        "status": lambda worker: _state(worker, report.at),
        "queues": lambda worker: ", ".join(worker.queues),
        "concurrency": lambda worker: None if worker.kind is WorkerKind.DISPATCHER else worker.concurrency,
        "heartbeat": lambda worker: duration(_silent_s(worker, report.at)),
        "gpu memory": _vram,
        "running tasks": lambda worker: ", ".join(map(str, report.running.get(worker.id, ()))),
    }
    if is_short:
        for name in ("queues", "concurrency"):
            del columns[name]
    rows = [[column(worker) for column in columns.values()] for worker in report.workers]
    return TextTable(rows, tuple(columns), ("concurrency", "heartbeat", "gpu memory"))


def _node_table(report: StatusReport) -> TextTable:
    """The state that Ray reports for each node."""
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
            duration((report.at - worker.node.at).total_seconds()),
        )
        for worker in report.workers
        if worker.node is not None
    ]
    numbers = ("cpus", "gpus", "memory")
    return TextTable(rows, ("node", "state in ray", *numbers, "other", "reported"), (*numbers, "reported"))


def _used(node: NodeView, name: str) -> str | None:
    total, used = node.total.get(name), node.used.get(name, 0.0)
    if total is None:
        return None
    if name == "memory":
        return f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB"
    return f"{used:g} of {total:g}"


def _last_hour(report: StatusReport) -> str:
    counts = ", ".join(f"{count:,} {status.value}" for status, count in report.finished.items())
    return f"last hour{' (all queues)' if report.queue else ''}: {counts}"


def _ray_dashboards(report: StatusReport) -> list[str]:
    reported = (worker.metadata.get("ray_dashboard") for worker in report.workers)
    return sorted({url for url in reported if isinstance(url, str) and url})


def _plain(report: StatusReport) -> dict[str, Any]:
    return {
        "at": report.at,
        "queues": report.depths,
        "fleets": [
            {
                **to_plain(fleet),
                "without_orchestrator_s": fleet.without_orchestrator_s(report.at),
                "outdated_workers": count_versions(fleet, report.workers)[0],
                "decision": cycle.decision if cycle else None,
                "done": done_actions(cycle) if cycle else [],
                "cycle_id": cycle.id if cycle else None,
                "cycle_at": (cycle.repeated_at or cycle.started_at) if cycle else None,
            }
            for fleet, cycle in report.fleets
        ],
        "workers": [
            {
                **to_plain(worker),
                "heartbeat_age_s": _silent_s(worker, report.at),
                "is_silent": _is_silent(worker, report.at),
                "task_ids": report.running.get(worker.id, []),
            }
            for worker in report.workers
        ],
        "ray_dashboards": _ray_dashboards(report),
        "last_hour": {status.value: count for status, count in report.finished.items()},
    }


def _state(worker: Worker, now: datetime) -> str:
    notes = [] if worker.kind is WorkerKind.WORKER else [worker.kind.value]
    if worker.is_by_hand:
        notes.append("started by hand")
    if worker.is_paused:
        notes.append("paused")
    if _is_silent(worker, now):
        notes.append("silent")
    return ", ".join([worker.status.value, *notes])


def _silent_s(worker: Worker, now: datetime) -> float | None:
    return (now - worker.last_heartbeat).total_seconds() if worker.last_heartbeat is not None else None


def _is_silent(worker: Worker, now: datetime) -> bool:
    """Whether its last heartbeat is older than its lease, so that its tasks will be requeued."""
    silent_s = _silent_s(worker, now)
    return silent_s is not None and silent_s > worker.lease_s


def _vram(worker: Worker) -> str | None:
    if worker.vram_total_mb is None:
        return None
    return f"{worker.vram_used_mb or 0:,} of {worker.vram_total_mb:,} MB"
