"""Records a process in the database while it runs, and adds what it counts to the counters there."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from uuid import UUID, uuid4

import psutil
import structlog

from windlass.background import background_task
from windlass.model.counters import PROCESS_RESTARTS, CounterBuffer
from windlass.model.errors import DatabaseUnavailable, WindlassError
from windlass.model.process import PROCESS_TTL_S, ProcessKind, ProcessRecord
from windlass.ports.processes import ProcessStore
from windlass.wiring.process_link import ProcessNote, StartOrder

# A record is renewed several times per TTL, so that one late or lost write does not remove the process.
RENEWALS_PER_TTL = 4
# The last counts of a process that stops.
FLUSH_TIMEOUT_S = 2.0
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessRecorder:
    """`record` gives the current state: it is called with every renewal."""

    store: ProcessStore
    counters: CounterBuffer
    process_id: UUID
    record: Callable[[], ProcessRecord]

    async def write(self) -> None:
        await self.store.record_process(self.record())
        await self.flush()

    async def flush(self) -> None:
        increments = self.counters.take()
        try:
            await self.store.add_counters(increments)
        except WindlassError:
            self.counters.put_back(increments)
            raise

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PROCESS_TTL_S / RENEWALS_PER_TTL)
            try:
                await self.write()
            except DatabaseUnavailable:
                continue  # other calls log it
            except Exception:
                # A defect. Without this loop the process would seem dead.
                log.exception("record process failed")


def new_record(kind: ProcessKind, number: int, version: str) -> ProcessRecord:
    """A record of this process."""
    return ProcessRecord(uuid4(), kind, number, socket.gethostname(), os.getpid(), version)


@asynccontextmanager
async def recorded(
    store: ProcessStore,
    process: ProcessRecord,
    order: StartOrder,
    counters: CounterBuffer,
    *,
    details: Callable[[ProcessRecord], ProcessRecord] = lambda record: record,
    gauges: Callable[[], Mapping[str, float]] = dict,
) -> AsyncIterator[None]:
    """Keep the process recorded until the context exits. `details` adds what changes while it runs."""

    def record() -> ProcessRecord:
        return replace(details(process), gauges={**_own_memory(), **gauges()})

    recorder = ProcessRecorder(store, counters, process.id, record)
    if order.reason is not None:
        counters.add(PROCESS_RESTARTS, (process.kind, order.reason))
    await recorder.write()
    try:
        async with background_task(recorder.run()):
            yield
    finally:
        with contextlib.suppress(DatabaseUnavailable, TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await recorder.flush()
                await store.remove_process(process.id)


async def clear_remains(store: ProcessStore, predecessors: Sequence[ProcessNote]) -> None:
    """Remove what dead predecessors left in the database: records, and leases, which would delay this process."""
    for predecessor in predecessors:
        if predecessor.holder is not None:
            await store.release_leases(predecessor.holder)
        await store.remove_process(predecessor.process_id)


def _own_memory() -> dict[str, float]:
    """Empty if it cannot be read: a process without free file descriptors still runs, and must stay recorded."""
    try:
        return {"memory_bytes": psutil.Process().memory_info().rss}
    except (OSError, psutil.Error):
        return {}
