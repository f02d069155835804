"""One version apart over HTTP: fixed requests of an old worker, and fixed replies of an old control plane.

The recordings are what the first release sends and answers. They may not be edited within contract 1: a change here is
a change that breaks deployed workers. A fixed request differs from a real one only in the task and claim token.
"""

import json
import signal
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from fastapi import FastAPI, Response

from support import next_release
from support.api_fixture import ApiFixture
from support.asgi_server import serve_asgi
from support.command_line import CommandLine
from support.queue_sql import connected
from support.worker_harness import until
from windlass.model.task import Claim, Finished, new_task
from windlass.model.worker import HeldClaim, Registration, WorkerStatus
from windlass.worker.http_transport import HttpTransport, WorkerCredentials

LIMIT_S = 90.0
HANDLER = """
import time
from pathlib import Path

def work(task):
    while task.payload and not Path(task.payload["go"]).exists():
        time.sleep(0.01)
    return task.attempt
"""
TOKEN = UUID("5a4e46ac-94c5-4cd4-a7d8-1b0c9e1f2d3a")
# The bodies that a worker of contract 1 sends, by path.
REGISTER = (
    b'{"worker_id":"w","queues":["a"],"fleet":"gpus","concurrency":1,"lease_s":30.0,"host":"old","pid":1,'
    b'"version":"0.1.0","kind":"worker","start_id":"one"}'
)
CLAIM = b'{"queues":["a"],"limit":1}'
FIRST_HEARTBEAT = b'{"claims":[],"vitals":{"cpu_percent":1.0}}'
HEARTBEAT = b'{"claims":[{"task_id":TASK,"token":"TOKEN","progress":0.5,"note":"half"}],"vitals":{"cpu_percent":1.0}}'
FINISH = b'{"finished":[{"task_id":TASK,"token":"TOKEN","result":"{\\"by\\": \\"old\\"}"}],"queues":["a"],"limit":1}'
FAIL = b'{"task_id":TASK,"token":"TOKEN","error":"it broke","code":"HANDLER_ERROR","retry":false,"jitter":null}'
RELEASE = b'{"task_id":TASK,"token":"TOKEN","reason":"it stops","delay_s":0.0}'
DEREGISTER = b'{"reason":"stopped"}'
# The least that a control plane of contract 1 answers. Fields that were added later are optional for a client.
OLD_CLAIM = (
    b'{"task_id":7,"token":"5a4e46ac-94c5-4cd4-a7d8-1b0c9e1f2d3a","queue":"a","payload":"{}","attempt":1,'
    b'"max_attempts":3,"timeout_s":null,"priority":0,"created_at":"2026-11-18T12:00:00Z"}'
)
OLD_REPLIES = {
    "register": b'"active"',
    "claim": b"[" + OLD_CLAIM + b"]",
    "finish": b'{"claims":[' + OLD_CLAIM + b'],"lost":[]}',
    "heartbeat": b'{"status":"active","is_paused":false,"lost":[]}',
}


class RecordedWorker:
    """Sends fixed bodies, for the task that it claimed last."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._task = b""
        self._token = b""

    async def send(self, path: str, body: bytes) -> Any:
        content = body.replace(b"TASK", self._task).replace(b"TOKEN", self._token)
        headers = {"Content-Type": "application/json"}
        response = await self._client.post(f"/internal/worker/{path}", content=content, headers=headers)
        assert response.is_success, (path, response.text)
        return response.json() if response.content else None

    def hold(self, claim: dict[str, Any]) -> None:
        # All fields that an old worker reads.
        assert json.loads(OLD_CLAIM).keys() <= claim.keys()
        self._task, self._token = str(claim["task_id"]).encode(), claim["token"].encode()


async def test_fixed_requests_of_an_old_worker_are_served(api: ApiFixture) -> None:
    first, second, third, fourth = [await api.store.enqueue(new_task("a", {"n": n})) for n in range(4)]
    worker = RecordedWorker(await api.join_worker())
    assert await worker.send("register", REGISTER) == "spawning"
    await worker.send("heartbeat", FIRST_HEARTBEAT)
    await api.run_cycle()
    (claim,) = await worker.send("claim", CLAIM)
    assert (claim["task_id"], json.loads(claim["payload"])) == (first, {"n": 0})
    worker.hold(claim)
    beat = await worker.send("heartbeat", HEARTBEAT)
    assert (beat["status"], beat["is_paused"], beat["lost"]) == ("active", False, [])
    finished = await worker.send("finish", FINISH)
    assert finished["lost"] == []
    for task_id, path, body, answer in (
        (second, "fail", FAIL, "failed"),
        (third, "release", RELEASE, True),
    ):
        (claim,) = finished["claims"] if task_id == second else await worker.send("claim", CLAIM)
        assert claim["task_id"] == task_id
        worker.hold(claim)
        assert await worker.send(path, body) == answer
    assert await worker.send("deregister", DEREGISTER) is None
    tasks = [await api.store.task(each) for each in (first, second, third, fourth)]
    assert [task.status for task in tasks if task] == ["complete", "failed", "queued", "queued"]
    assert tasks[0] is not None
    assert json.loads(tasks[0].result or "") == {"by": "old"}


async def test_worker_reads_replies_of_old_and_of_newer_control_planes() -> None:
    """Without later fields, and with a field that this version does not know."""
    newer = {
        "claim": OLD_REPLIES["claim"].replace(b'"attempt"', b'"colour":"red","attempt"'),
        "finish": OLD_REPLIES["finish"].replace(b'"lost"', b'"colour":"red","lost"'),
        "heartbeat": OLD_REPLIES["heartbeat"].replace(b'"lost"', b'"colour":"red","lost"'),
    }
    claim = Claim(7, TOKEN, "a", "{}", 1, 3, None, 0, datetime(2026, 11, 18, 12, tzinfo=UTC))
    for replies in (OLD_REPLIES, OLD_REPLIES | newer):
        async with (
            serve_asgi(control_plane_with(replies)) as url,
            HttpTransport(WorkerCredentials("w", url, "wlw_" + "0" * 64), False) as transport,
        ):
            assert await transport.register(Registration("w", ("a",))) is WorkerStatus.ACTIVE
            assert await transport.claim("w", ("a",)) == [claim]
            reply = await transport.heartbeat("w", [HeldClaim(7, TOKEN)])
            assert (reply.status, reply.is_paused, reply.lost) == (WorkerStatus.ACTIVE, False, frozenset())
            result = await transport.finish_and_claim("w", [Finished(7, TOKEN, "1")], ("a",), 1)
            assert (result.claims, result.lost) == ([claim], [])


def control_plane_with(replies: dict[str, bytes]) -> FastAPI:
    app = FastAPI()

    @app.post("/internal/worker/{call}")
    async def answer(call: str) -> Response:
        return Response(replies[call], media_type="application/json")

    return app


@pytest.mark.slow
async def test_worker_of_the_next_release_works_for_this_control_plane(dsn: str, tmp_path: Path) -> None:
    """Both are processes. The control plane is killed and started again while a task runs."""
    (tmp_path / "app.py").write_text(HANDLER)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn, "WINDLASS_DATA_DIR": str(tmp_path / "data")})
    token = windlass("tokens", "create", "next", "--role", "worker", "--queue", "r", "--json").json["token"]
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("w") as log:

        def start_up() -> "subprocess.Popen[str]":
            return windlass.start(
                "up", "--queue", "other", "--handler", "app:work", "--port", str(port), stdout=log, stderr=log
            )

        async def count(status: str) -> int:
            async with connected(dsn) as sql:
                return int(await sql.fetchval("select count(*) from windlass.tasks where status = $1", status))

        async def wait_for(status: str, number: int) -> None:
            async def is_reached() -> bool:
                return await count(status) == number

            await until(is_reached, f"{number} tasks {status}\n{(tmp_path / 'log').read_text()[-3000:]}", LIMIT_S)

        async def is_ready() -> bool:
            async with httpx.AsyncClient() as client:
                try:
                    return (await client.get(f"{url}/readyz")).is_success
                except httpx.TransportError:
                    return False

        up = start_up()
        await until(is_ready, "the control plane answers", LIMIT_S)
        worker = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, next_release.__file__, "worker", "--url", url,
             "--queue", "r", "--handler", "app:work"],
            cwd=tmp_path, env=CommandLine(tmp_path, {"WINDLASS_TOKEN": token}).environment(), stdout=log, stderr=log,
        )  # fmt: skip
        try:
            async with connected(dsn) as sql:
                await sql.execute("select windlass.enqueue('r') from generate_series(1, 10)")
                await wait_for("complete", 10)
                slow = json.dumps({"go": str(tmp_path / "go")})
                await sql.execute("select windlass.enqueue('r', $1::jsonb)", slow)
                await wait_for("running", 1)
                up.kill()
                up.wait()
                await sql.execute("select windlass.enqueue('r') from generate_series(1, 10)")
                (tmp_path / "go").touch()
                up = start_up()
                await wait_for("complete", 21)
                assert await sql.fetchval("select max(attempts) from windlass.tasks") == 1
                workers = await sql.fetchval("select count(distinct worker_id) from windlass.tasks")
                assert workers == 1, "the worker went on"
        finally:
            for process in (worker, up):
                process.send_signal(signal.SIGTERM)
            for process in (worker, up):
                process.wait(LIMIT_S)
