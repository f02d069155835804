"""Builds workers: over the database, over HTTP on a joined machine, or over HTTP with an API token."""

import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

import psutil

from windlass.model.auth import SECRET_PREFIX, new_token
from windlass.model.config import Config, LogsConfig, WorkerConfig
from windlass.model.errors import BadInput, HandlerNotFound, WindlassError
from windlass.model.payload_privacy import privacy_of
from windlass.model.redaction import add_known_secrets, secrets_in
from windlass.model.work_order import RayOrder, WorkOrder
from windlass.ray.node import NodeProgram, NodeSettings
from windlass.ray.versions import Versions
from windlass.store.connection import COMMAND_TIMEOUT_S
from windlass.store.doctor_checks import WORKER, dsn_with_role
from windlass.store.transport import PostgresTransport, open_postgres_transport
from windlass.wiring.stores import database
from windlass.wiring.tracing import trace_attempts
from windlass.worker.command import CommandExecutor
from windlass.worker.executor import Executor
from windlass.worker.handler_user import find_handler_user
from windlass.worker.heartbeat import OpenTransport
from windlass.worker.http_transport import HttpTransport, tls_context
from windlass.worker.inline import InlineExecutor
from windlass.worker.isolated import IsolatedExecutor
from windlass.worker.joining import join
from windlass.worker.lifecycle import ExitReason, WorkerRuntime, WorkerSettings
from windlass.worker.output_buffer import OutputBuffer, OutputLimits, captured_output
from windlass.worker.private_errors import PrivateErrors
from windlass.worker.self_registration import SelfRegisteredTransport, new_self_registration

# Default share of the machine's memory for all handlers of a worker together.
MEMORY_SHARE = 0.9
# How long a joined machine retries its registration while the control plane is unavailable.
JOINED_REGISTRATION_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class HandlerChoice:
    """What a worker runs for each task: a Python function or a command."""

    function: str | None
    command: str | None
    is_inline: bool
    run_as: str | None = None
    # Paths of payloads that errors and output must not quote.
    redact: Sequence[str] = ()


async def run_worker(
    config: Config, settings: WorkerSettings, handler: HandlerChoice, *, secret: str | None
) -> ExitReason:
    """Run a worker over the database until it is drained. Without a secret it generates one."""
    executor = _executor(config, settings, handler)
    secret = secret or new_token(SECRET_PREFIX, SystemRandom())
    add_known_secrets([secret])
    async with database(config) as dsn, trace_attempts(config, settings.version) as traced:

        @asynccontextmanager
        async def connect() -> AsyncIterator[PostgresTransport]:
            # Here, because a handler that cannot start is reported before the database is asked.
            async with open_postgres_transport(
                await dsn_with_role(dsn, WORKER),
                secret=secret,
                retention=config.retention,
                # One for the loop, one for the wait for work.
                max_connections=2,
                # After a whole lease, heartbeats release claims that the worker does not know: answer well before.
                command_timeout_s=min(COMMAND_TIMEOUT_S, settings.lease_s / 2),
            ) as transport:
                yield transport

        with worker_output(config.logs, settings.queues, handler.redact) as output:
            return await WorkerRuntime(settings, connect, traced(executor), output=output).run()


@contextlib.contextmanager
def worker_output(logs: LogsConfig, queues: Sequence[str], redact: Sequence[str]) -> Iterator[OutputBuffer | None]:
    """Collect what this process and its handlers print, to be sent; None if that is switched off."""
    limits = output_limits(logs)
    if limits is None:
        yield None
        return
    buffer = OutputBuffer(limits, privacy_of([(queues, redact)]))
    with captured_output(buffer):
        yield buffer


def output_limits(logs: LogsConfig) -> OutputLimits | None:
    """None: output is not sent."""
    return OutputLimits(logs.output_bytes_per_s, logs.output_bytes_per_attempt) if logs.send_output else None


async def run_self_registered_worker(
    config: Config,
    settings: WorkerSettings,
    handler: HandlerChoice,
    *,
    url: str,
    api_token: str,
    ca_file: Path | None,
) -> ExitReason:
    """Run a worker over HTTP that was not spawned until it is drained. Raises TokenRefused for an invalid API token."""
    executor = _executor(config, settings, handler)
    self_registration = new_self_registration(url, api_token, tls_context(url, ca_file))
    async with trace_attempts(config, settings.version) as traced:
        with worker_output(config.logs, settings.queues, handler.redact) as output:
            return await WorkerRuntime(
                settings, lambda: SelfRegisteredTransport(self_registration), traced(executor), output=output
            ).run()


async def run_joined_worker(join_file: Path, version: str) -> ExitReason:
    """Run a worker over HTTP on a joined machine until it is drained. Raises TokenRefused if it is not wanted."""
    add_known_secrets(secrets_in(os.environ))
    credentials, tls, order = await join(join_file)
    add_known_secrets([credentials.token])
    try:
        return await _run_order(order, lambda: HttpTransport(credentials, tls), version)
    except (HandlerNotFound, BadInput) as error:
        # Report the error: the owner of a rented machine cannot read its log. If that fails, the next start repeats it.
        with contextlib.suppress(WindlassError):
            async with HttpTransport(credentials, tls) as transport:
                await transport.report_start_failure(str(error))
        raise


async def _run_order(order: WorkOrder, open_transport: OpenTransport, version: str) -> ExitReason:
    # For handlers and the processes that they start.
    os.environ.update(order.env)
    add_known_secrets(secrets_in(order.env))
    if order.chdir is not None:
        try:
            os.chdir(order.chdir)
        except OSError as error:
            raise BadInput(
                f"cannot change to {order.chdir}: {error.strerror}. Check chdir of fleet {order.fleet}."
            ) from None
    settings = WorkerSettings(
        queues=order.queues,
        fleet=order.fleet,
        concurrency=order.concurrency,
        heartbeat_interval_s=order.heartbeat_interval_s,
        lease_s=order.lease_s,
        timeout_s=order.timeout_s,
        drain_timeout_s=order.drain_timeout_s,
        registration_timeout_s=JOINED_REGISTRATION_TIMEOUT_S,
        worker_id=order.worker_id,
        version=version,
        needs_gpu=order.needs_gpu,
        storage_path=order.storage_path,
    )
    config = Config(
        max_payload_bytes=order.max_payload_bytes,
        worker=WorkerConfig(memory_limit_mb=order.memory_limit_mb),
        # The machine has no windlass.toml, so the fleet's `env` may contain this setting.
        logs=LogsConfig(
            traces_endpoint=os.environ.get("WINDLASS_LOGS__TRACES_ENDPOINT") or None,
            send_output=order.sends_output,
            output_bytes_per_s=order.output_bytes_per_s,
            output_bytes_per_attempt=order.output_bytes_per_attempt,
        ),
    )
    if order.ray is not None:
        with worker_output(config.logs, settings.queues, order.redact) as output:
            return await _run_joined_node(order, order.ray, open_transport, version, output)
    handler = HandlerChoice(order.handler, order.exec, order.is_inline, redact=order.redact)
    executor = _executor(config, settings, handler)
    async with trace_attempts(config, settings.version) as traced:
        with worker_output(config.logs, settings.queues, order.redact) as output:
            return await WorkerRuntime(settings, open_transport, traced(executor), output=output).run()


async def _run_joined_node(
    order: WorkOrder,
    ray: RayOrder,
    open_transport: OpenTransport,
    version: str,
    output: OutputBuffer | None,
) -> ExitReason:
    settings = NodeSettings(
        worker_id=order.worker_id,
        fleet=order.fleet,
        queues=order.queues,
        address=ray.address,
        ray=ray.settings,
        concurrency=order.concurrency,
        heartbeat_interval_s=order.heartbeat_interval_s,
        lease_s=order.lease_s,
        registration_timeout_s=JOINED_REGISTRATION_TIMEOUT_S,
        version=version,
        head_versions=Versions(ray.ray_version, ray.python_version),
    )
    return await NodeProgram(settings, open_transport, output).run()


def _executor(config: Config, settings: WorkerSettings, handler: HandlerChoice) -> Executor:
    executor = _plain_executor(config, settings, handler)
    return PrivateErrors(executor, settings.queues, handler.redact) if handler.redact else executor


def _plain_executor(config: Config, settings: WorkerSettings, handler: HandlerChoice) -> Executor:
    user = find_handler_user(handler.run_as) if handler.run_as is not None else None
    limit_mb = config.worker.memory_limit_mb
    limit_bytes = limit_mb << 20 if limit_mb else int(_memory_bytes() * MEMORY_SHARE) // settings.concurrency
    if handler.command is not None:
        return CommandExecutor(
            handler.command, memory_limit_bytes=limit_bytes, max_result_bytes=config.max_payload_bytes, run_as=user
        )
    if handler.function is None:
        raise BadInput("nothing to run: a worker needs a handler or a command.")
    if handler.is_inline:
        return InlineExecutor(handler.function, max_result_bytes=config.max_payload_bytes)
    return IsolatedExecutor(
        handler.function,
        concurrency=settings.concurrency,
        memory_limit_bytes=limit_bytes,
        max_result_bytes=config.max_payload_bytes,
        run_as=user,
    )


def _memory_bytes() -> int:
    """The memory of the machine, or of the container if that is less."""
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no cgroup, or "max"
        return total
