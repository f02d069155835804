"""Traces of cycles and attempts for OpenTelemetry, by OTLP over HTTP. Only with the extra windlass[otel].

A span is made when what it tells is over, so nothing that is traced waits for it. Spans wait in a bounded queue of the
SDK's and are sent from its own thread; what does not fit, or does not arrive, is lost.
"""

import time
from collections.abc import Mapping
from typing import Any

from windlass.model.errors import ConfigError

# For what waits when the program ends.
FLUSH_TIMEOUT_MS = 3_000
# An endpoint that does not answer holds the SDK's thread for this long, and nobody else.
SEND_TIMEOUT_S = 5


class Traces:
    def __init__(self, endpoint: str, service: str, version: str, exporter: Any = None) -> None:
        """`exporter`, if given, takes the spans instead of the endpoint. Raises ConfigError without OpenTelemetry."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(
                "logs.traces_endpoint is set, but OpenTelemetry is not installed: pip install 'windlass[otel]'."
            ) from None
        resource = Resource.create({"service.name": service, "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        to = exporter or OTLPSpanExporter(endpoint=_traces_url(endpoint), timeout=SEND_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(to))
        self._tracer = self._provider.get_tracer("windlass", version)

    def note(self, name: str, duration_s: float, attributes: Mapping[str, Any], error: str | None = None) -> None:
        """Something that took so long is over."""
        from opentelemetry.trace import Status, StatusCode

        ended_ns = time.time_ns()
        span = self._tracer.start_span(name, start_time=ended_ns - int(duration_s * 1e9))
        for key, value in attributes.items():
            if value is not None:
                span.set_attribute(f"windlass.{key}", value)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(ended_ns)

    def close(self) -> None:
        self._provider.force_flush(FLUSH_TIMEOUT_MS)
        self._provider.shutdown()


def _traces_url(endpoint: str) -> str:
    """The endpoint is that of all signals, as OTEL_EXPORTER_OTLP_ENDPOINT is."""
    return endpoint if endpoint.rstrip("/").endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"
