"""One version apart over HTTP: fixed requests of an old worker, and fixed replies of an old control plane.

The recordings are what the first release sends and answers. They may not be edited within contract 1: a change here is
a change that breaks deployed workers. A fixed request differs from a real one only in the task and claim token.
"""

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx
from fastapi import FastAPI, Response

from support.api_fixture import ApiFixture
from support.asgi_server import serve_asgi
from windlass.model.task import Claim, Finished, new_task
from windlass.model.worker import HeldClaim, Registration, WorkerStatus
from windlass.worker.http_transport import HttpTransport, WorkerCredentials

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
