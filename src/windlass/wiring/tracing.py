"""OpenTelemetry traces of cycles and attempts, by OTLP over HTTP. Needs the extra windlass[otel].

A span is created when its cycle or attempt has ended, so tracing delays nothing. Spans wait in the SDK's bounded queue
and are sent by its own thread. Spans that do not fit or do not arrive are lost.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from windlass.control.summary import Summary
from windlass.model.config import Config
from windlass.model.errors import ConfigError
from windlass.model.task import Claim
from windlass.worker.executor import AttemptFailure, Executor, Outcome
from windlass.worker.handler import ReportProgress

# Limit for sending the remaining spans when the process ends.
FLUSH_TIMEOUT_MS = 3_000
# An endpoint that does not answer blocks the SDK's thread for this long, and nothing else.
SEND_TIMEOUT_S = 5


class Tracer:
    """Creates spans. `exporter`, if given, receives them instead of the endpoint."""

    def __init__(self, endpoint: str, service: str, version: str, exporter: Any = None) -> None:
        """Raises ConfigError if OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(
                "logs.traces_endpoint is set, but OpenTelemetry is not installed. Run pip install 'windlass[otel]'."
            ) from None
        # The setting names the endpoint of all signals, like OTEL_EXPORTER_OTLP_ENDPOINT.
        url = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
        resource = Resource.create({"service.name": service, "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=url, timeout=SEND_TIMEOUT_S))
        )
        self._tracer = self._provider.get_tracer("windlass", version)

    def add_span(self, name: str, duration_s: float, attributes: Mapping[str, Any], error: str | None = None) -> None:
        """Add a span that ends now. Attributes without a value are left out."""
        from opentelemetry.trace import Status, StatusCode

        ended_ns = time.time_ns()
        span = self._tracer.start_span(name, start_time=ended_ns - int(duration_s * 1e9))
        for key, value in attributes.items():
            if value is not None:
                span.set_attribute(f"windlass.{key}", value)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(ended_ns)

    def add_cycle(self, summary: Summary) -> None:
        if summary.is_leader:
            about = {"fleet": summary.fleet, "cycle.id": summary.cycle_id, "decision": summary.decision}
            counts = {**(summary.actions or {}), **(summary.status or {})}
            self.add_span("cycle", summary.duration_s, {**about, **counts}, summary.hold)

    def close(self) -> None:
        self._provider.force_flush(FLUSH_TIMEOUT_MS)
        self._provider.shutdown()


class TracedExecutor:
    """Wraps an executor and adds a span for every attempt."""

    def __init__(self, executor: Executor, tracer: Tracer) -> None:
        self._executor = executor
        self._tracer = tracer

    async def start(self) -> None:
        await self._executor.start()

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:
        started = time.monotonic()
        error: str | None = "cancelled"
        try:
            outcome = await self._executor.run(claim, report)
            error = outcome.code if isinstance(outcome, AttemptFailure) else None
            return outcome
        finally:
            # Without payload and error text: both may hold secrets of users.
            about = {"task.id": claim.task_id, "task.queue": claim.queue, "task.attempt": claim.attempt}
            self._tracer.add_span("task", time.monotonic() - started, about, error)

    async def close(self) -> None:
        await self._executor.close()


@asynccontextmanager
async def trace_attempts(config: Config, version: str | None) -> AsyncIterator[Callable[[Executor], Executor]]:
    """Yields a function that wraps an executor, or returns it unchanged if tracing is not configured."""
    async with _tracer(config, "windlass-worker", version or "") as tracer:
        yield lambda executor: executor if tracer is None else TracedExecutor(executor, tracer)


@asynccontextmanager
async def trace_cycles(config: Config, version: str, listeners: list[Callable[[Summary], None]]) -> AsyncIterator[None]:
    """Adds a listener that traces every cycle, if tracing is configured."""
    async with _tracer(config, "windlass", version) as tracer:
        if tracer is not None:
            listeners.append(tracer.add_cycle)
        yield


@asynccontextmanager
async def _tracer(config: Config, service: str, version: str) -> AsyncIterator[Tracer | None]:
    if config.logs.traces_endpoint is None:
        yield None
        return
    tracer = Tracer(config.logs.traces_endpoint, service, version)
    try:
        yield tracer
    finally:
        # Sends the remaining spans.
        await asyncio.to_thread(tracer.close)
