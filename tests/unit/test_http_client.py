"""The worker's HTTP client against servers that answer in unusual ways, fail, or are no control plane."""

import asyncio
import gzip
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

import pytest

from windlass.model.errors import BadInput, ControlPlaneUnavailable
from windlass.model.task import Finished
from windlass.worker import http_client, http_transport
from windlass.worker.http_transport import ControlPlaneClient, HttpTransport, WorkerCredentials

LIMIT_S = 30.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RawServer:
    """Calls `answer` for each connection and keeps the requests that `read_request` has read."""

    def __init__(self) -> None:
        self.url = ""
        self.connections = 0
        self.open_connections = 0
        self.most_open_connections = 0
        self.requests: list[tuple[str, bytes]] = []

    async def read_request(self, reader: asyncio.StreamReader) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line.partition(":")[2] for line in head.split("\r\n") if line.startswith("Content-Length:")]
        self.requests.append((head, await reader.readexactly(int(lengths[0]) if lengths else 0)))


@asynccontextmanager
async def raw_server(make_answer: Callable[[RawServer], Answer]) -> AsyncIterator[RawServer]:
    server = RawServer()
    answer = make_answer(server)
    tasks: set[asyncio.Task[Any] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        server.connections += 1
        server.open_connections += 1
        server.most_open_connections = max(server.most_open_connections, server.open_connections)
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            await answer(reader, writer)
        writer.close()
        with suppress(ConnectionError, asyncio.CancelledError):
            await writer.wait_closed()
        server.open_connections -= 1

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for task in filter(None, tasks):
            task.cancel()
        await asyncio.gather(*filter(None, tasks))


def responses(*scripts: Sequence[bytes]) -> Callable[[RawServer], Answer]:
    """One script per connection, the last for all further ones: a response per request, then the connection closes."""

    def make_answer(server: RawServer) -> Answer:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for response in scripts[min(server.connections, len(scripts)) - 1]:
                await server.read_request(reader)
                writer.write(response)
                await writer.drain()

        return answer

    return make_answer


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[ControlPlaneClient]:
    client = ControlPlaneClient(url, "secret", tls=False)
    try:
        yield client
    finally:
        await client.close()


def transport_of(url: str) -> HttpTransport:
    return HttpTransport(WorkerCredentials("w0", url, "secret"), False)


async def get(client: ControlPlaneClient, timeout_s: float = LIMIT_S) -> bytes:
    return await client.call("asking", "GET", "/thing", timeout_s=timeout_s)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("response", "body"),
    [
        pytest.param(OK, b"{}", id="with a length"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-LENGTH: 0\r\n\r\n", b"", id="empty"),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", b"", id="without content"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1;x=y\r\n}\r\n0\r\nA: b\r\n\r\n",
            b"{}",
            id="in chunks",
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}", b"{}", id="ended by the connection"),
        pytest.param(b"HTTP/1.0 200 OK\r\n\r\n{}", b"{}", id="HTTP/1.0"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + OK, b"{}", id="after 1xx"),
    ],
)
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "byte by byte"])
async def test_response_is_read(response: bytes, body: bytes, is_split: bool) -> None:
    def make_answer(server: RawServer) -> Answer:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.read_request(reader)
            for part in [bytes([byte]) for byte in response] if is_split else [response]:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)

        return answer

    async with raw_server(make_answer) as server, client_of(server.url) as client:
        assert await get(client) == body


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        pytest.param(b"", "closed the connection without an answer", id="nothing"),
        pytest.param(b"SSH-2.0-OpenSSH_9\r\n", "is not HTTP", id="another protocol"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Le", "in the middle", id="half of the head"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "in the middle", id="half of the body"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{}", "is not HTTP", id="length not a number"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nz\r\n", "is not HTTP", id="invalid chunk"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", "in the middle", id="missing chunk"
        ),
        pytest.param(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "", id="upgrade"
        ),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n", "in the middle", id="only 1xx"),
    ],
)
async def test_broken_response_is_no_answer(response: bytes, reason: str) -> None:
    async with raw_server(responses([response])) as server, client_of(server.url) as client:
        with pytest.raises(ControlPlaneUnavailable, match="asking: the control plane at .* did not answer") as caught:
            await get(client)
    assert reason in str(caught.value)
    # On a new connection nothing is repeated: the caller decides.
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "endless", [b"HTTP/1.1 200 OK\r\nA: " + b"x" * 1_000, b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n"]
)
async def test_too_large_response_is_refused(endless: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_transport, "MAX_ANSWER_BYTES", 10_000)

    def make_answer(server: RawServer) -> Answer:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.read_request(reader)
            writer.write(endless)
            while True:
                writer.write(b"x" * 10_000)
                await writer.drain()

        return answer

    async with raw_server(make_answer) as server, client_of(server.url) as client:
        with pytest.raises(ControlPlaneUnavailable, match="more than 75,536 bytes"):
            await get(client)


async def test_calls_of_a_worker_share_one_connection() -> None:
    """A handshake per heartbeat would be most of the control plane's load."""
    async with raw_server(responses([OK] * 5)) as server, client_of(server.url) as client:
        for _ in range(5):
            assert await get(client) == b"{}"
    assert (len(server.requests), server.connections) == (5, 1)


async def test_closed_kept_connection_is_replaced() -> None:
    async with raw_server(responses([OK])) as server, client_of(server.url) as client:
        for _ in range(3):
            assert await get(client) == b"{}"
    assert (len(server.requests), server.connections) == (3, 3)


async def test_request_on_a_dying_kept_connection_is_repeated_once() -> None:
    """The server reads the request and closes, as when it restarts."""
    async with raw_server(responses([OK, b""], [OK, b""], [b""])) as server, client_of(server.url) as client:
        assert await get(client) == b"{}"
        assert await get(client) == b"{}"
        assert (len(server.requests), server.connections) == (3, 2)
        with pytest.raises(ControlPlaneUnavailable, match="without an answer"):
            await get(client)
        assert (len(server.requests), server.connections) == (5, 3)


async def test_request_with_half_a_response_is_not_repeated() -> None:
    async with raw_server(responses([OK, b"HTTP/1.1 200 OK\r\n"])) as server, client_of(server.url) as client:
        await get(client)
        with pytest.raises(ControlPlaneUnavailable, match="in the middle"):
            await get(client)
    assert (len(server.requests), server.connections) == (2, 1)


async def test_connection_that_idled_too_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "KEEP_ALIVE_S", 0.0)
    async with raw_server(responses([OK] * 5)) as server, client_of(server.url) as client:
        await get(client)
        await get(client)
    assert server.connections == 2


@pytest.mark.parametrize("header", [b"Connection: close\r\n", b""], ids=["close", "two responses at once"])
async def test_connection_is_not_kept(header: bytes) -> None:
    extra = b"" if header else b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong"
    response = b"HTTP/1.1 200 OK\r\n" + header + b"Content-Length: 2\r\n\r\n{}" + extra
    async with raw_server(responses([response] * 5)) as server, client_of(server.url) as client:
        assert await get(client) == b"{}"
        assert await get(client) == b"{}"
    assert server.connections == 2


async def test_response_without_request_is_not_taken_for_the_next() -> None:
    sent = asyncio.Event()

    def make_answer(server: RawServer) -> Answer:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.read_request(reader)
            writer.write(OK)
            await sent.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong")
            assert await reader.read() == b""

        return answer

    async with raw_server(make_answer) as server, client_of(server.url) as client:
        assert await get(client) == b"{}"
        sent.set()
        await until(lambda: server.open_connections == 0)
        assert await get(client) == b"{}"
    assert server.connections == 2


def silent(server: RawServer) -> Answer:
    async def answer(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await server.read_request(reader)
        await reader.read()

    return answer


async def test_silent_server_times_out() -> None:
    async with raw_server(silent) as server, client_of(server.url) as client:
        with pytest.raises(ControlPlaneUnavailable, match=r"did not answer \(no answer within 0.05 s\)"):
            await get(client, 0.05)
        await until(lambda: server.open_connections == 0)


async def test_connecting_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "CONNECT_TIMEOUT_S", 0.05)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        # Linux queues one more connection than asked for, then drops the packets.
        with socket.create_connection(address):
            fillers = []
            for _ in range(3):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(address)
                fillers.append(filler)
            async with client_of("http://{}:{}".format(*address)) as client:
                with pytest.raises(ControlPlaneUnavailable, match=r"no connection within 0.05 s"):
                    await get(client)
            for filler in fillers:
                filler.close()


async def test_cancelled_request_closes_its_connection() -> None:
    async with raw_server(silent) as server, client_of(server.url) as client:
        task = asyncio.create_task(get(client))
        await until(lambda: bool(server.requests))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.open_connections == 0)


async def test_closing_the_client_ends_its_requests() -> None:
    async with raw_server(silent) as server:
        async with client_of(server.url) as client:
            task = asyncio.create_task(get(client))
            await until(lambda: bool(server.requests))
        with pytest.raises(ControlPlaneUnavailable):
            await task
        await until(lambda: server.open_connections == 0)


async def test_worker_has_at_most_four_connections() -> None:
    release = asyncio.Event()

    def make_answer(server: RawServer) -> Answer:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                await server.read_request(reader)
                await release.wait()
                writer.write(OK)

        return answer

    async with raw_server(make_answer) as server, client_of(server.url) as client:
        calls = [asyncio.create_task(get(client)) for _ in range(10)]
        await until(lambda: len(server.requests) == 4)
        release.set()
        assert await asyncio.gather(*calls) == [b"{}"] * 10
    assert (server.most_open_connections, len(server.requests)) == (4, 10)


async def test_request_names_host_token_and_path(monkeypatch: pytest.MonkeyPatch) -> None:
    # A proxy is meant for the handler.
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with raw_server(responses([OK])) as server, client_of(f"{server.url}/prefix") as client:
        await client.call("asking", "POST", "/thing", b"body")
    (head, body), *_ = server.requests
    line, *headers = head.strip().split("\r\n")
    assert line == "POST /prefix/thing HTTP/1.1"
    assert {"Host: " + server.url.removeprefix("http://"), "Authorization: Bearer secret", "Content-Length: 4"} <= set(
        headers
    )
    assert body == b"body"


async def test_unreachable_control_plane_is_named() -> None:
    async with client_of("http://127.0.0.1:1") as client:
        with pytest.raises(ControlPlaneUnavailable, match=r"127.0.0.1:1 did not answer \(.*Connect call failed"):
            await get(client)


async def test_retry_after_delays_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_transport, "MAX_RETRY_AFTER_S", 0.2)
    busy = b"HTTP/1.1 503 Busy\r\nRETRY-After: 99\r\nContent-Length: 0\r\n\r\n"
    async with raw_server(responses([busy, OK])) as server, client_of(server.url) as client:
        began = time.monotonic()
        with pytest.raises(ControlPlaneUnavailable, match="could not answer"):
            await get(client)
        await get(client)
        assert time.monotonic() - began >= 0.2
    assert server.connections == 1


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, b"<html>"),
        (410, b""),
        (502, b'{"error": "bad gateway"}'),
        (200, b"hello"),
        (200, b"\xff"),
        (200, b"[" * 100_000),
        (403, b"null"),
        (500, b"[" * 100_000),
        (302, b"\xff"),
    ],
)
async def test_refusal_of_another_server_does_not_end_the_worker(status: int, body: bytes) -> None:
    """Such as a proxy's login page, a load balancer's 410, or another server on the port."""
    response = b"HTTP/1.1 %d .\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
    async with raw_server(responses([response] * 2)) as server, transport_of(server.url) as transport:
        with pytest.raises(ControlPlaneUnavailable):
            await transport.heartbeat("w0")
        with pytest.raises(ControlPlaneUnavailable):
            await transport.claim("w0", ("a",))


async def test_result_is_sent_exactly_as_written() -> None:
    answer = b'{"claims": [], "lost": []}'
    response = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer)
    result = json.dumps({"é": '"\\', "n": 1e400, "text": "\u2028 \U0001f600"}, ensure_ascii=False)
    token = uuid4()
    async with raw_server(responses([response])) as server, transport_of(server.url) as transport:
        await transport.finish_and_claim("w0", [Finished(7, token, result)], ("a",), 2)
    ((_, body),) = server.requests
    finished = [{"task_id": 7, "token": str(token), "result": result}]
    assert json.loads(body) == {"finished": finished, "queues": ["a"], "limit": 2}


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), object(), b"x", "\ud800"],
    ids=["NaN", "infinity", "object", "bytes", "half pair"],
)
async def test_value_that_is_not_json_is_refused(value: Any) -> None:
    async with transport_of("http://127.0.0.1:1") as transport:
        with pytest.raises(BadInput, match="sending a heartbeat: a value cannot be sent"):
            await transport.heartbeat("w0", vitals={"value": value})


PRINTABLE = [chr(code) for code in range(35, 127) if chr(code) != "\\"]
NOTHING_CLAIMED = b'HTTP/1.1 200 OK\r\nContent-Length: 23\r\n\r\n{"claims":[],"lost":[]}'


def finished_texts(server: RawServer) -> list[tuple[bool, Any]]:
    """For each request: whether it was compressed, and its first result."""
    found = []
    for head, body in server.requests:
        is_gzip = "\r\nContent-Encoding: gzip\r\n" in head
        found.append((is_gzip, json.loads(gzip.decompress(body) if is_gzip else body)["finished"][0]["result"]))
    return found


@pytest.mark.parametrize(
    ("result", "is_gzip"),
    [
        pytest.param("1" * 10_000, False, id="small"),
        pytest.param("12345678" * 10_000, True, id="large"),
        pytest.param("".join(random.Random(1).choices(PRINTABLE, k=80_000)), False, id="hardly compressible"),  # noqa: S311
        # The control plane refuses it, as it could be an attack on its memory.
        pytest.param("1" * 2_000_000, False, id="compressible beyond belief"),
    ],
)
async def test_large_results_are_compressed(result: str, is_gzip: bool) -> None:
    async with raw_server(responses([NOTHING_CLAIMED])) as server, transport_of(server.url) as transport:
        await transport.finish_and_claim("w0", [Finished(7, uuid4(), result)], ("a",), 1)
    assert finished_texts(server) == [(is_gzip, result)]


async def test_refused_compression_is_not_tried_again() -> None:
    refusal = b"HTTP/1.1 415 Unsupported Media Type\r\nContent-Length: 0\r\n\r\n"
    script = [refusal, NOTHING_CLAIMED, NOTHING_CLAIMED]
    result = "12345678" * 10_000
    async with raw_server(responses(script)) as server, transport_of(server.url) as transport:
        for _ in range(2):
            await transport.finish_and_claim("w0", [Finished(7, uuid4(), result)], ("a",), 1)
    assert finished_texts(server) == [(True, result), (False, result), (False, result)]


def test_worker_does_not_import_httpx() -> None:
    """It would cost every worker memory and start-up time."""
    modules = (
        "windlass.wiring.worker, windlass.worker.joining, windlass.worker.lifecycle, windlass.worker.self_registration"
    )
    code = f"import sys, {modules}; print('httpx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
