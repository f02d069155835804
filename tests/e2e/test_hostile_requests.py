"""Requests of strangers and of stolen tokens against a real `windlass up`.

C1, H1, H4, M1 and M2 are the findings of a penetration test. The tests of a finding send what it describes, as bytes.
Each finding has tests that fail on the version that had it; the others state limits that held before.
"""

import asyncio
import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from support.command_line import CommandLine
from windlass.model.auth import API_PREFIX, WORKER_PREFIX, hash_of

# Far above the time for an answer, also on a busy machine, and below the time limit of a body.
ANSWER_S = 40.0
START_S = 60.0
LARGE_BYTES = 6_000_000
# Results in one call, characters of a reason, bytes of the log: as documented in docs/api.md.
MAX_RESULTS = 1_000
MAX_REASON = 8_000
TOML = """
[fleets.default]
queues = ["q"]
exec = "true"
"""
TOKENS = {
    **{role: API_PREFIX + hash_of(role).hex() for role in ("viewer", "producer", "worker")},
    **{name: WORKER_PREFIX + hash_of(name).hex() for name in ("w1", "w2")},
}
INSERT_TOKEN = "insert into windlass.tokens (name, role, hash) values ($1::text, $1::text, $2)"
INSERT_WORKER = """
insert into windlass.workers (id, fleet, status, queues, token_hash, joined_at, activated_at)
values ($1, 'default', 'active', '{q}', $2, now(), now())
"""


class ControlPlane:
    def __init__(self, folder: Path, dsn: str) -> None:
        self.dsn = dsn
        self.log = folder / "log"
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port: int = taken.getsockname()[1]
        (folder / "windlass.toml").write_text(TOML)
        self.windlass = CommandLine(folder, {"DATABASE_URL": dsn})

    async def sql(self, query: str, *arguments: Any) -> Any:
        connection = await asyncpg.connect(self.dsn, timeout=ANSWER_S)
        try:
            return await connection.fetchval(query, *arguments, timeout=ANSWER_S)
        finally:
            await connection.close()

    async def prepare(self) -> None:
        await self.sql("insert into windlass.fleets (name, queues) values ('default', '{q}')")
        for role in ("viewer", "producer", "worker"):
            await self.sql(INSERT_TOKEN, role, hash_of(TOKENS[role]))
        for name in ("w1", "w2"):
            await self.sql(INSERT_WORKER, name, hash_of(TOKENS[name]))

    async def is_ready(self) -> bool:
        try:
            return (await self.send(request("GET", "/readyz")))[0] == 200
        except OSError:
            return False

    async def send(self, data: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. TimeoutError if there is none."""
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(data)
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                _, _, length = head.partition("content-length:")
                size = int(length.split("\r\n")[0] or 0)
                return int(head.split(" ")[1]), await reader.readexactly(size)
            finally:
                writer.close()

    async def call(self, path: str, token: str, body: Any) -> tuple[int, Any]:
        content = json.dumps(body).encode()
        status, answer = await self.send(request("POST", path, token, len(content)) + content)
        return status, json.loads(answer) if answer else None


def request(method: str, path: str, token: str | None = None, content_bytes: int = 0) -> bytes:
    """The header of a request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines += [f"Authorization: Bearer {token}"] if token else []
    lines += [f"Content-Length: {content_bytes}"] if method != "GET" else []
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, embedded_server: Any) -> Iterator[ControlPlane]:
    with embedded_server.migrated_database() as dsn:
        plane = ControlPlane(tmp_path_factory.mktemp("plane"), dsn)
        asyncio.run(plane.prepare())
        with plane.log.open("wb") as log:
            up = plane.windlass.start("up", "--port", plane.port, stdout=log, stderr=subprocess.STDOUT)
        try:
            asyncio.run(_until_ready(plane, up))
            yield plane
        finally:
            up.send_signal(signal.SIGTERM)
            try:
                up.wait(START_S)
            finally:
                up.kill()


async def _until_ready(plane: ControlPlane, up: "subprocess.Popen[str]") -> None:
    async with asyncio.timeout(START_S):
        while not await plane.is_ready():
            assert up.poll() is None, plane.log.read_text()
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("path", "caller", "status"),
    [
        ("/api/v1/tasks", None, 401),
        ("/api/v1/tasks/1/cancel", None, 401),
        ("/api/v1/workers/x/terminate", None, 401),
        ("/fleets/x/pause", None, 401),
        ("/internal/worker/finish", None, 401),
        ("/api/v1/tasks", "viewer", 403),
        ("/internal/worker/finish", "viewer", 403),
        ("/internal/workers", "viewer", 403),
        ("/no/such/path", None, 404),
        ("/healthz", None, 405),
    ],
)
async def test_c1_refusal_does_not_wait_for_the_body(
    plane: ControlPlane, path: str, caller: str | None, status: int
) -> None:
    token = TOKENS[caller] if caller else None
    assert (await plane.send(request("POST", path, token, LARGE_BYTES)))[0] == status


async def test_h1_size_of_a_payload_is_judged_before_it_is_sent(plane: ControlPlane) -> None:
    assert (await plane.send(request("POST", "/api/v1/tasks", TOKENS["producer"], LARGE_BYTES)))[0] == 413


async def test_h1_payload_of_many_values_is_stored_as_it_was_sent(plane: ControlPlane) -> None:
    payload = [[]] * 300_000
    content = b'{"queue":"other","payload":[' + b"[]," * (len(payload) - 1) + b"[]]}"
    status, answer = await plane.send(request("POST", "/api/v1/tasks", TOKENS["producer"], len(content)) + content)
    assert status == 201, answer
    stored = await plane.sql("select jsonb_array_length(payload) from windlass.tasks where queue = 'other'")
    assert stored == len(payload)


async def test_h4_made_up_claims_write_one_event_in_ten_seconds(plane: ControlPlane) -> None:
    def made_up(count: int) -> dict[str, Any]:
        return {"finished": [{"task_id": 10**9 + n, "token": str(uuid4()), "result": None} for n in range(count)]}

    status, problem = await plane.call("/internal/worker/finish", TOKENS["w1"], made_up(30_000))
    assert (status, problem["code"]) == (400, "BAD_INPUT")
    began = time.monotonic()
    calls = [plane.call("/internal/worker/finish", TOKENS["w1"], made_up(MAX_RESULTS)) for _ in range(10)]
    replies = await asyncio.gather(*calls)
    # A worker sends at most two large bodies at the same time.
    assert {status for status, _ in replies} <= {200, 429}
    accepted = [reply["lost"] for status, reply in replies if status == 200]
    assert {len(lost) for lost in accepted} == {MAX_RESULTS}
    for _ in range(100):
        status, reply = await plane.call("/internal/worker/finish", TOKENS["w1"], made_up(1))
        assert (status, len(reply["lost"])) == (200, 1)
    events = await plane.sql("select count(*) from windlass.events where code = 'LATE_RESULT'")
    assert 1 <= events <= 1 + (time.monotonic() - began) // 10
    late_results = await plane.sql("select late_results from windlass.workers where id = 'w1'")
    assert late_results == len(accepted) * MAX_RESULTS + 100


async def test_h4_heartbeat_names_a_bounded_number_of_claims(plane: ControlPlane) -> None:
    claims = [{"task_id": n, "token": str(uuid4())} for n in range(30_000)]
    for count, refusal in ((30_000, (413, "TOO_LARGE")), (600, (400, "BAD_INPUT"))):
        status, problem = await plane.call("/internal/worker/heartbeat", TOKENS["w1"], {"claims": claims[:count]})
        assert (status, problem["code"]) == refusal


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/internal/worker/heartbeat", {"vitals": {"report": "x" * 5_000}}),
        ("/internal/worker/register", {"worker_id": "w1", "queues": ["q"], "host": "h" * 300}),
        ("/internal/worker/register", {"worker_id": "w1", "queues": ["q"], "version": "v" * 300}),
        ("/internal/worker/register", {"worker_id": "w1", "queues": ["q"], "start_id": "s" * 300}),
    ],
    ids=["vitals", "host", "version", "start_id"],
)
async def test_m1_long_text_of_a_worker_is_refused(plane: ControlPlane, path: str, body: dict[str, Any]) -> None:
    status, problem = await plane.call(path, TOKENS["w1"], body)
    assert (status, problem["code"]) == (400, "BAD_INPUT")


@pytest.mark.parametrize("lease_s", [1e300, 1e9, 0.001])
async def test_h2_lease_of_a_worker_is_1_to_86400_seconds(plane: ControlPlane, lease_s: float) -> None:
    body = {"worker_id": "w1", "queues": ["q"], "lease_s": lease_s}
    status, problem = await plane.call("/internal/worker/register", TOKENS["w1"], body)
    assert (status, problem["code"]) == (400, "BAD_INPUT")


@pytest.mark.parametrize("kind", ["dispatcher", "node"])
async def test_l5_worker_over_http_cannot_register_as_another_kind(plane: ControlPlane, kind: str) -> None:
    registration = {"worker_id": "w1", "queues": ["q"], "kind": kind}
    assert (await plane.call("/internal/worker/register", TOKENS["w1"], registration))[0] == 200
    new = f"posing-as-{kind}"
    body = {"token": WORKER_PREFIX + hash_of(new).hex(), "registration": registration | {"worker_id": new}}
    assert (await plane.call("/internal/workers", TOKENS["worker"], body))[0] == 200
    again = registration | {"worker_id": new, "start_id": "another"}
    assert (await plane.call("/internal/worker/register", body["token"], again))[0] == 200
    kinds = "select array_agg(kind order by id) from windlass.workers where id = any ($1)"
    assert await plane.sql(kinds, [new, "w1"]) == ["worker", "worker"]
    await plane.sql("delete from windlass.workers where id = $1", new)


@pytest.mark.parametrize("queue", ["<x>", "q" * 64, "\x1b[2J"])
async def test_m1_queue_names_of_a_worker_are_checked(plane: ControlPlane, queue: str) -> None:
    registration = {"worker_id": "anywhere", "queues": [queue]}
    body = {"token": WORKER_PREFIX + hash_of("anywhere").hex(), "registration": registration}
    for path, token, given in (
        ("/internal/worker/register", TOKENS["w1"], registration | {"worker_id": "w1"}),
        ("/internal/workers", TOKENS["worker"], body),
    ):
        status, problem = await plane.call(path, token, given)
        assert (status, problem["code"]) == (400, "BAD_INPUT")
    assert await plane.sql("select count(*) from windlass.workers where id = 'anywhere'") == 0
    # The name alone was refused.
    registration["queues"] = ["q"]
    assert (await plane.call("/internal/workers", TOKENS["worker"], body))[0] == 200
    await plane.sql("delete from windlass.workers where id = 'anywhere'")


async def test_m1_reason_of_a_worker_is_cut(plane: ControlPlane) -> None:
    status, _ = await plane.call("/internal/worker/deregister", TOKENS["w2"], {"reason": "r" * 60_000})
    assert status == 204
    lengths = "select max(length(reason)) from windlass.events where worker_id = 'w2'"
    assert 0 < await plane.sql(lengths) <= MAX_REASON


async def test_m2_long_paths_do_not_fill_the_log(plane: ControlPlane) -> None:
    before = plane.log.stat().st_size
    for number in range(100):
        assert (await plane.send(request("GET", f"/healthz{number:a>10000}")))[0] in (404, 429)
    assert plane.log.stat().st_size - before < 50_000


async def test_m2_malformed_request_logs_no_traceback(plane: ControlPlane) -> None:
    header = b"POST /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    for _ in range(20):
        status, _body = await plane.send(header + b"5;\x00\x01\r\nhello\r\n0\r\n\r\n")
        assert 400 <= status < 500
    assert (await plane.send(request("GET", "/healthz")))[0] == 200
    assert "Traceback" not in plane.log.read_text()
    assert "exception" not in plane.log.read_text()
