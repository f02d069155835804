"""Counts the boots of machines for metrics: each phase of each worker once, by the leader."""

import asyncio

import structlog

from windlass.control.summary import Summary
from windlass.model.counters import BOOT_PHASE_SECONDS, CounterBuffer
from windlass.model.errors import WindlassError
from windlass.store.overview import PostgresOverview

# Shorter than the interval at which metrics are usually scraped. The query reads the last workers of each fleet.
INTERVAL_S = 15.0
log = structlog.get_logger(__name__)


class BootCounter:
    """Phases that were reached before the first observation, or while another process led, are not counted."""

    def __init__(self, store: PostgresOverview, counters: CounterBuffer) -> None:
        self._store = store
        self._counters = counters
        self._is_leader = False
        # Worker and phase of the boots that were observed, per fleet. None before the first observation.
        self._observed: dict[str, set[tuple[str, str]]] | None = None

    def record_cycle(self, summary: Summary) -> None:
        self._is_leader = summary.is_leader

    async def run(self) -> None:
        while True:
            try:
                await self.observe()
            except WindlassError:
                pass  # the cycles log it
            except Exception:
                # A defect. Without this loop the metric would end.
                log.exception("observe boot times failed")
            await asyncio.sleep(INTERVAL_S)

    async def observe(self) -> None:
        measures = await self._store.fleet_metrics()
        before, self._observed = self._observed, {}
        for measure in measures:
            seen = self._observed[measure.fleet] = {(boot.worker_id, boot.phase) for boot in measure.boots}
            known = seen if before is None or not self._is_leader else before.get(measure.fleet, set())
            for boot in measure.boots:
                if (boot.worker_id, boot.phase) not in known:
                    self._counters.observe(BOOT_PHASE_SECONDS, (measure.fleet, boot.phase), boot.seconds)
