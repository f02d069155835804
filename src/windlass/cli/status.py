"""`windlass status`: what waits, who works, how the last hour went."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

from windlass.cli.common import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import duration, print_json, print_table
from windlass.cli.queues import check_queue_is_known
from windlass.cli.tasks import Queue

if TYPE_CHECKING:
    from windlass.model.event import QueueDepth
    from windlass.model.worker import Worker

LAST_HOUR_S = 3_600.0


@command
async def status(
    queue: Queue = None, config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Show the queues, the workers and the last hour."""
    from windlass import wire

    async with wire.store(load(config, data_dir).config) as store:
        await check_queue_is_known(store, queue)
        depths = [depth for depth in await store.queue_depths() if queue in (None, depth.queue)]
        workers = [worker for worker in await store.workers() if queue is None or queue in worker.queues]
        finished = await store.finished_since(LAST_HOUR_S)
        now = await store.now()
    if as_json:
        print_json(
            {
                "at": now,
                "queues": depths,
                "workers": [_plain(worker, now) for worker in workers],
                "last_hour": {status.value: count for status, count in finished.items()},
            }
        )
        return
    _print_queues(depths)
    _print_workers(workers, now)
    counts = ", ".join(f"{count:,} {status.value}" for status, count in finished.items())
    print(f"last hour{' (all queues)' if queue else ''}: {counts}")


def _print_queues(depths: list["QueueDepth"]) -> None:
    if not depths:
        print("nothing waits and nothing runs")
        return
    rows = [
        (d.queue, d.queued, d.scheduled, d.waiting_for_retry, d.running, duration(d.oldest_queued_age_s))
        for d in depths
    ]
    numbers = ("queued", "scheduled", "retrying", "running", "oldest waits")
    print_table(rows, "queue", *numbers, right=numbers)


def _print_workers(workers: list["Worker"], now: datetime) -> None:
    if not workers:
        print("no workers; start one with `windlass worker`")
        return
    rows = [
        (
            worker.id,
            _state(worker, now),
            ", ".join(worker.queues),
            worker.concurrency,
            duration(_silent_s(worker, now)),
            _vram(worker),
        )
        for worker in workers
    ]
    numbers = ("tasks at once", "last heard", "gpu memory")
    print_table(rows, "worker", "status", "queues", *numbers, right=numbers)


def _plain(worker: "Worker", now: datetime) -> dict[str, Any]:
    from windlass.cli.output import to_plain

    return {**to_plain(worker), "heartbeat_age_s": _silent_s(worker, now), "is_silent": _is_silent(worker, now)}


def _state(worker: "Worker", now: datetime) -> str:
    notes = ["paused"] if worker.is_paused else []
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
