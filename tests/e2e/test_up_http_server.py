"""`windlass up --port` with a browser and receivers: login link, overview, metrics, alerts, logs and traces."""

import asyncio
import gzip
import json
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import uvicorn
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from support.command_line import CommandLine
from support.stores import PostgresStores
from support.worker_harness import until
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.process import ProcessKind, ProcessRecord
from windlass.model.task import new_task
from windlass.server.auth import session_cookie
from windlass.server.routes.login import create_login_link
from windlass.server.server import listen

APP = """
def work(task):
    if task.payload == "break":
        raise ValueError("hunter2 is broken")
    return 1
"""
TOML = """
[alerts]
webhook_url = "{inbox}/alerts"

[logs]
in_database = true
traces_endpoint = "{inbox}"

[fleets.default]
queues = ["work"]
handler = "app:work"
chdir = "{folder}"
poll_interval_s = 0.5
heartbeat_interval_s = 0.3
heartbeat_timeout_s = 20
max_workers = 1
"""


DELIVERED = 'windlass_alert_messages_total{notifier="webhook",outcome="delivered"}'


class Receivers:
    """A server that records alerts and OpenTelemetry spans."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        self.spans: list[Any] = []

    async def receive_alert(self, request: Request) -> Response:
        self.alerts.append(json.loads(await request.body()))
        return Response()

    async def receive_traces(self, request: Request) -> Response:
        sent = ExportTraceServiceRequest.FromString(await _body(request))
        self.spans += [span for r in sent.resource_spans for s in r.scope_spans for span in s.spans]
        return Response()


async def _body(request: Request) -> bytes:
    body = await request.body()
    return gzip.decompress(body) if request.headers.get("content-encoding") == "gzip" else body


@asynccontextmanager
async def receivers_server() -> AsyncIterator[tuple[Receivers, str]]:
    receivers = Receivers()
    routes = [
        Route("/alerts", receivers.receive_alert, methods=["POST"]),
        Route("/v1/traces", receivers.receive_traces, methods=["POST"]),
    ]
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield receivers, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def test_up_serves_dashboard_metrics_alerts_logs_and_traces(tmp_path: Path, dsn: str) -> None:
    async with receivers_server() as (receivers, inbox), PostgresStores(dsn) as store:
        (tmp_path / "app.py").write_text(APP)
        (tmp_path / "windlass.toml").write_text(TOML.format(inbox=inbox, folder=tmp_path))
        windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn, "OTEL_BSP_SCHEDULE_DELAY": "200"})
        out = (tmp_path / "out").open("w")
        process = windlass.start("up", "--port", "0", stdout=out, stderr=subprocess.STDOUT)
        try:
            await _check_as_browser(receivers, store, (tmp_path / "out").read_text)
            await _check_link_command(windlass)
        finally:
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.wait, 60)
            out.close()
        assert process.returncode == 0, (tmp_path / "out").read_text()
        names = {span.name for span in receivers.spans}
        assert names == {"cycle", "task"}, names
        await _check_link_errors(windlass, store)


async def test_cycle_command_sends_firing_and_resolved_alerts(tmp_path: Path, dsn: str) -> None:
    async with receivers_server() as (receivers, inbox), PostgresStores(dsn) as store:
        (tmp_path / "app.py").write_text(APP)
        (tmp_path / "windlass.toml").write_text(TOML.format(inbox=inbox, folder=tmp_path))
        windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn})

        async def cycle_after(change: str) -> list[tuple[str, str]]:
            async with store.database.connection("changing alert conditions") as connection:
                await connection.execute(change)
            done = await asyncio.to_thread(windlass, "cycle")
            assert done.json["is_leader"] is True
            return [(alert["status"], alert["code"]) for alert in receivers.alerts]

        firing = ("firing", "DEAD_LETTERS")
        add_failed_task = (
            "insert into windlass.tasks (queue, status, finished_at) values ('work', 'failed', windlass.now())"
        )
        assert await cycle_after(add_failed_task) == [firing]
        assert await cycle_after("update windlass.alerts set seen_at = seen_at - interval '1 hour'") == [firing]
        remove_failed_task = (
            "delete from windlass.tasks; update windlass.alerts set seen_at = seen_at - interval '1 hour'"
        )
        assert await cycle_after(remove_failed_task) == [firing, ("resolved", "DEAD_LETTERS")]
        # While another orchestrator leads, this one sends no alert.
        await store.observe(Candidate("another", ttl_s=60.0), "default", FleetConfig(queues=("work",), exec="true"))
        async with store.database.connection("changing alert conditions") as connection:
            await connection.execute(add_failed_task)
        assert (await asyncio.to_thread(windlass, "cycle")).json["is_leader"] is False
        assert len(receivers.alerts) == 2


async def _check_as_browser(receivers: Receivers, store: PostgresStores, log: Callable[[], str]) -> None:
    async def printed_address() -> str | None:
        found = re.search(
            r"^dashboard: (http\S+)/ \(`windlass tokens link` prints a login link\)$", log(), re.MULTILINE
        )
        return found.group(1) if found else None

    link = await create_login_link(store, await until(printed_address, "the address"))
    async with httpx.AsyncClient(base_url=link.partition("/login")[0], timeout=30) as browser:
        assert (await browser.get(link)).status_code == 200
        assert browser.cookies[session_cookie(browser.base_url.netloc.decode())]
        task_id = await store.enqueue(new_task("work", "break", max_attempts=1))

        async def is_shown() -> bool:
            overview = (await browser.get("/api/v1/overview")).json()
            # None before the first cycle.
            return any(fleet["work"]["dead"] and fleet["workers"]["active"] == 1 for fleet in overview["fleets"])

        await until(is_shown, "the worker and the failed task in the overview")
        task = (await browser.get(f"/api/v1/tasks/{task_id}")).json()
        assert task["error_code"] == "HANDLER_ERROR"

        async def is_alerted() -> bool:
            return any(alert["code"] == "DEAD_LETTERS" for alert in receivers.alerts)

        await until(is_alerted, "the alert")

        async def metrics_with_delivery() -> str | None:
            metrics = (await browser.get("/metrics")).text
            return metrics if f"{DELIVERED} 1.0" in metrics else None

        metrics = await until(metrics_with_delivery, "the delivery in the metrics")
        assert 'windlass_workers{fleet="default",status="active"} 1.0' in metrics

        async def has_history() -> bool:
            return bool((await browser.get("/api/v1/fleets/default/history")).json())

        await until(has_history, "a sample of the fleet")

        async def is_logged() -> bool:
            lines = (await browser.get("/api/v1/logs", params={"limit": 500})).json()["items"]
            return any(line["message"] == "started server" or line["cycle_id"] for line in lines)

        await until(is_logged, "the log in the database")
        # Without a login nothing can be read, also on this host.
        async with httpx.AsyncClient(base_url=browser.base_url, timeout=30) as stranger:
            assert (await stranger.get("/api/v1/overview")).status_code == 401
    # Others may read the output of a program that does not run in a terminal.
    assert "wll_" not in log()


async def _check_link_command(windlass: CommandLine) -> None:
    """The port is random: the command reads it from the database."""
    created = await asyncio.to_thread(windlass, "tokens", "link", "--role", "viewer", "--json")
    async with httpx.AsyncClient(timeout=30) as browser:
        assert (await browser.get(created.json["link"])).status_code == 200


async def _check_link_errors(windlass: CommandLine, store: PostgresStores) -> None:
    refused = await asyncio.to_thread(windlass, "tokens", "link")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == (
        "windlass: no running `windlass up --port` was found: start one, or give --url http://127.0.0.1:8080, or set "
        "api.port or api.url.\n"
    )

    async def record_server(url: str) -> None:
        await store.record_process(ProcessRecord(uuid4(), ProcessKind.SERVER, 0, "elsewhere", 1, "1.0", url))

    await record_server("http://127.0.0.1:8080")
    refused = await asyncio.to_thread(windlass, "tokens", "link")
    assert (refused.code, refused.out) == (2, "")
    assert (
        "the dashboard runs at http://127.0.0.1:8080 on host elsewhere: create the link there, or give --url"
        in refused.err
    )
    given = await asyncio.to_thread(windlass, "tokens", "link", "--url", "http://127.0.0.1:1")
    assert given.out.startswith("http://127.0.0.1:1/login?key=wll_")
    await record_server("http://10.0.0.2:8080")
    assert (await asyncio.to_thread(windlass, "tokens", "link")).out.startswith("http://10.0.0.2:8080/login?key=wll_")
