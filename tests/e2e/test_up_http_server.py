"""`windlass up --port` as whoever watches it has it: a link, live status, metrics, an alert, logs, traces."""

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
from windlass.model.auth import ServerAddress
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.task import new_task
from windlass.server.auth import session_cookie
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


class Outside:
    """Everybody whom it talks to: takes alerts and traces."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        self.spans: list[Any] = []

    async def take_alert(self, request: Request) -> Response:
        self.alerts.append(json.loads(await request.body()))
        return Response()

    async def take_traces(self, request: Request) -> Response:
        sent = ExportTraceServiceRequest.FromString(await _body(request))
        self.spans += [span for r in sent.resource_spans for s in r.scope_spans for span in s.spans]
        return Response()


async def _body(request: Request) -> bytes:
    body = await request.body()
    return gzip.decompress(body) if request.headers.get("content-encoding") == "gzip" else body


@asynccontextmanager
async def outside_of() -> AsyncIterator[tuple[Outside, str]]:
    outside = Outside()
    routes = [
        Route("/alerts", outside.take_alert, methods=["POST"]),
        Route("/v1/traces", outside.take_traces, methods=["POST"]),
    ]
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield outside, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def test_up_shows_itself_to_whoever_watches(tmp_path: Path, dsn: str) -> None:
    async with outside_of() as (outside, inbox), PostgresStores(dsn) as store:
        (tmp_path / "app.py").write_text(APP)
        (tmp_path / "windlass.toml").write_text(TOML.format(inbox=inbox, folder=tmp_path))
        windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn, "OTEL_BSP_SCHEDULE_DELAY": "200"})
        out = (tmp_path / "out").open("w")
        process = windlass.start("up", "--port", "0", stdout=out, stderr=subprocess.STDOUT)
        try:
            await _watch(outside, store, (tmp_path / "out").read_text)
            await _let_another_in(windlass)
        finally:
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.wait, 60)
            out.close()
        assert process.returncode == 0, (tmp_path / "out").read_text()
        names = {span.name for span in outside.spans}
        assert names == {"cycle", "task"}, names
        await _ask_in_vain(windlass, store)


async def test_cycles_run_by_cron_tell_what_is_the_matter_and_when_it_is_over(tmp_path: Path, dsn: str) -> None:
    async with outside_of() as (outside, inbox), PostgresStores(dsn) as store:
        (tmp_path / "app.py").write_text(APP)
        (tmp_path / "windlass.toml").write_text(TOML.format(inbox=inbox, folder=tmp_path))
        windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn})

        async def cycle_after(change: str) -> list[tuple[str, str]]:
            async with store.database.connection("changing what is the matter") as connection:
                await connection.execute(change)
            done = await asyncio.to_thread(windlass, "cycle")
            assert done.json["is_leader"] is True
            return [(alert["status"], alert["code"]) for alert in outside.alerts]

        began = ("firing", "DEAD_LETTERS")
        given_up = "insert into windlass.tasks (queue, status, finished_at) values ('work', 'failed', windlass.now())"
        assert await cycle_after(given_up) == [began]
        assert await cycle_after("update windlass.alerts set seen_at = seen_at - interval '1 hour'") == [began]
        mended = "delete from windlass.tasks; update windlass.alerts set seen_at = seen_at - interval '1 hour'"
        assert await cycle_after(mended) == [began, ("resolved", "DEAD_LETTERS")]
        # While another leads, it is the one who tells.
        await store.observe(Candidate("another", ttl_s=60.0), "default", FleetConfig(queues=("work",), exec="true"))
        async with store.database.connection("changing what is the matter") as connection:
            await connection.execute(given_up)
        assert (await asyncio.to_thread(windlass, "cycle")).json["is_leader"] is False
        assert len(outside.alerts) == 2


async def _watch(outside: Outside, store: PostgresStores, log: Callable[[], str]) -> None:
    async def printed() -> str | None:
        found = re.search(r"^dashboard: (http\S+)$", log(), re.MULTILINE)
        return found.group(1) if found else None

    link = await until(printed, "the link is printed")
    async with httpx.AsyncClient(base_url=link.partition("/login")[0], timeout=30) as browser:
        assert (await browser.get(link)).status_code == 200
        assert browser.cookies[session_cookie(browser.base_url.netloc.decode())]
        task_id = await store.enqueue(new_task("work", "break", max_attempts=1))

        async def shown() -> bool:
            overview = (await browser.get("/api/v1/overview")).json()
            # None before the first cycle.
            return any(fleet["work"]["dead"] and fleet["workers"]["active"] == 1 for fleet in overview["fleets"])

        await until(shown, "the worker and the dead letter are shown")
        task = (await browser.get(f"/api/v1/tasks/{task_id}")).json()
        assert task["error_code"] == "HANDLER_ERROR"

        async def told() -> bool:
            return any(alert["code"] == "DEAD_LETTERS" for alert in outside.alerts)

        await until(told, "the dead letter is told")

        async def counted() -> str | None:
            metrics = (await browser.get("/metrics")).text
            return metrics if f"{DELIVERED} 1.0" in metrics else None

        metrics = await until(counted, "its delivery is counted")
        assert 'windlass_workers{fleet="default",status="active"} 1.0' in metrics

        async def sampled() -> bool:
            return bool((await browser.get("/api/v1/fleets/default/history")).json())

        await until(sampled, "there is a point to draw")

        async def logged() -> bool:
            lines = (await browser.get("/api/v1/logs", params={"limit": 500})).json()["items"]
            return any(line["message"] == "listening" or line["cycle_id"] for line in lines)

        await until(logged, "the log is in the database")
    key = link.partition("key=")[2]
    assert key not in log().replace(f"dashboard: {link}", "")


async def _let_another_in(windlass: CommandLine) -> None:
    """The port was free by chance, and only `windlass up` knows it."""
    made = await asyncio.to_thread(windlass, "tokens", "link", "--role", "viewer", "--json")
    async with httpx.AsyncClient(timeout=30) as browser:
        assert (await browser.get(made.json["link"])).status_code == 200


async def _ask_in_vain(windlass: CommandLine, store: PostgresStores) -> None:
    refused = await asyncio.to_thread(windlass, "tokens", "link")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == (
        "windlass: no running `windlass up --port` was found: start one, or give --url http://127.0.0.1:8080, or set "
        "api.port or api.url.\n"
    )
    await store.record_server(ServerAddress("http://127.0.0.1:8080", "elsewhere"))
    refused = await asyncio.to_thread(windlass, "tokens", "link")
    assert (refused.code, refused.out) == (2, "")
    assert (
        "the dashboard runs at http://127.0.0.1:8080 on host elsewhere: create the link there, or give --url"
        in refused.err
    )
    given = await asyncio.to_thread(windlass, "tokens", "link", "--url", "http://127.0.0.1:1")
    assert given.out.startswith("http://127.0.0.1:1/login?key=wll_")
    await store.record_server(ServerAddress("http://10.0.0.2:8080", "elsewhere"))
    assert (await asyncio.to_thread(windlass, "tokens", "link")).out.startswith("http://10.0.0.2:8080/login?key=wll_")
