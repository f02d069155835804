"""Silent and slow clients, against a real server with few connections."""

import asyncio
import contextlib
import functools
import logging
import os
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import structlog

from support.certificates import new_authority
from windlass.server import connections, server
from windlass.server.connections import MAX_CONNECTIONS, MAX_FILES, RESERVED_FILES, ConnectionTracker, Timeouts
from windlass.server.server import MAX_LINES, listen, serving
from windlass.server.tls import ReloadingTls, TlsFiles

CONNECTIONS = 20
HALF_A_HEADER = b"GET /healthz HTTP/1.1\r\nHost: here\r\nX-Half:"
# The header of a TLS record that announces 512 bytes.
HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01"
BODY_BYTES = 100
HALF_A_REQUEST = b"POST /healthz HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % BODY_BYTES
WAIT_S = 10.0


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answers `ok`, or the number of bytes in the path."""
    size = scope["path"].removeprefix("/bytes/")
    body = b"x" * int(size) if size.isdigit() else b"ok"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second for headers, bodies and responses."""
    timeouts = Timeouts(header_s=0.5, body_s=0.5, response_s=0.5)
    monkeypatch.setattr(server, "ConnectionTracker", functools.partial(ConnectionTracker, timeouts=timeouts))


@pytest.fixture
def response_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds for any progress of a response."""
    monkeypatch.setattr(connections, "MIN_RESPONSE_PROGRESS_BYTES", 1)
    monkeypatch.setattr(
        server, "ConnectionTracker", functools.partial(ConnectionTracker, timeouts=Timeouts(response_s=2.0))
    )


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    port: int
    # For clients. None: without TLS.
    tls: ssl.SSLContext | None = None


@pytest.fixture(params=["http", "https"])
async def site(request: pytest.FixtureRequest, few_connections: None, tmp_path: Path) -> AsyncIterator[ServerUnderTest]:
    """A server with CONNECTIONS connections, without and with TLS."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    if request.param == "http":
        async with serving(answer, listener):
            yield ServerUnderTest(port)
        return
    authority = new_authority()
    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    authority.issue(files.certificate, files.key)
    context = ssl.create_default_context(cafile=authority.write(tmp_path / "ca.pem"))
    async with serving(answer, listener, tls=ReloadingTls(files)):
        yield ServerUnderTest(port, context)


@pytest.fixture
def few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "connection_limit", lambda: CONNECTIONS)
    # Handlers of earlier tests have counted their lines.
    for name in ("asyncio", "uvicorn"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])


@pytest.fixture
async def port(few_connections: None) -> AsyncIterator[int]:
    """Port of a server with CONNECTIONS connections."""
    listener = listen("127.0.0.1", 0)
    # Small system buffers, so that the server notices unread bytes.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    async with serving(answer, listener):
        yield listener.getsockname()[1]


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def get(self) -> bytes:
        self.send(b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n")
        return await self.answer()

    async def answer(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            answered = await self._reader.readuntil(b"\r\n\r\n")
            assert await self._reader.readexactly(2) == b"ok"
        return answered.split(b"\r\n")[0]

    async def line(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self._reader.readline()

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def is_closed(self) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                assert await self._reader.read() == b""
        except ConnectionResetError:
            pass

    @property
    def is_open(self) -> bool:
        return not self._reader.at_eof() and self._reader.exception() is None


def is_connected_to(port: int) -> bool:
    """Whether the server has a connection on this port, as the system sees it."""
    return any(
        found.laddr and found.laddr.port == port and found.status != psutil.CONN_LISTEN
        for found in psutil.Process().net_connections("tcp4")
    )


async def count_received_bytes(unread: socket.socket) -> int:
    size = 0
    with contextlib.suppress(ConnectionResetError):
        while piece := await asyncio.get_running_loop().sock_recv(unread, 65_536):
            size += len(piece)
    return size


class Clients(AsyncExitStack):
    async def connect(self, port: int, address: str = "127.0.0.1", *, tls: ssl.SSLContext | None = None) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0), ssl=tls)
        self.callback(writer.close)
        return Client(reader, writer)


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize("data", [b"", HALF_A_HEADER], ids=["nothing sent", "half a header"])
async def test_connection_without_complete_header_is_closed(site: ServerUnderTest, data: bytes) -> None:
    async with Clients() as clients:
        silent = await clients.connect(site.port, tls=site.tls)
        silent.send(data)
        await silent.is_closed()


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize("data", [b"", HALF_A_HELLO], ids=["nothing sent", "half a hello"])
@pytest.mark.parametrize("site", ["https"], indirect=True)
async def test_connection_without_complete_tls_handshake_is_closed(site: ServerUnderTest, data: bytes) -> None:
    async with Clients() as clients:
        silent = await clients.connect(site.port)
        silent.send(data)
        await silent.is_closed()


@pytest.mark.usefixtures("short_timeouts")
async def test_single_bytes_do_not_extend_the_header_timeout(port: int) -> None:
    async with Clients() as clients:
        dripping = await clients.connect(port)

        async def drip() -> None:
            for byte in HALF_A_HEADER * 100:
                dripping.send(bytes([byte]))
                await asyncio.sleep(0.05)

        drops = asyncio.create_task(drip())
        await dripping.is_closed()
        drops.cancel()


@pytest.mark.usefixtures("short_timeouts")
async def test_header_timeout_applies_to_further_requests_not_to_idling(port: int) -> None:
    async with Clients() as clients:
        idle, half = await clients.connect(port), await clients.connect(port)
        await idle.get()
        await half.get()
        half.send(HALF_A_HEADER)
        await half.is_closed()
        assert await idle.get() == b"HTTP/1.1 200 OK"


@pytest.mark.usefixtures("short_timeouts")
async def test_body_timeout_applies_after_an_early_response(port: int) -> None:
    async with Clients() as clients:
        dripping = await clients.connect(port)
        dripping.send(HALF_A_REQUEST)
        assert await dripping.answer() == b"HTTP/1.1 200 OK"

        async def drip() -> None:
            for _ in range(200):
                dripping.send(b"x")
                await asyncio.sleep(0.05)

        drops = asyncio.create_task(drip())
        await dripping.is_closed()
        drops.cancel()


@pytest.mark.usefixtures("short_timeouts")
async def test_connection_is_reused_after_an_early_response(port: int) -> None:
    async with Clients() as clients:
        early, watch = await clients.connect(port), await clients.connect(port)
        early.send(HALF_A_REQUEST)
        assert await early.answer() == b"HTTP/1.1 200 OK"
        early.send(b"x" * BODY_BYTES)
        # Longer than the header timeout, but `early` has not started another header.
        watch.send(HALF_A_HEADER)
        await watch.is_closed()
        assert await early.get() == b"HTTP/1.1 200 OK"


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize(
    ("size", "last_header"),
    [(1_000_000, b""), (1_000_000, b"Connection: close\r\n"), (60_000, b"Connection: close\r\n")],
    ids=["large response", "large response, then close", "small response, then close"],
)
async def test_client_that_reads_nothing_is_closed(port: int, size: int, last_header: bytes) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        unread.setblocking(False)
        await loop.sock_connect(unread, ("127.0.0.1", port))
        await loop.sock_sendall(unread, b"GET /bytes/%d HTTP/1.1\r\nHost: here\r\n%b\r\n" % (size, last_header))
        async with asyncio.timeout(WAIT_S):
            while is_connected_to(port):
                await asyncio.sleep(0.05)
        assert 0 < await count_received_bytes(unread) < size


@pytest.mark.usefixtures("short_timeouts")
async def test_client_that_leaves_the_end_unread_is_closed(port: int) -> None:
    """The rest is below the write limit of the server, which closes when all is read."""
    loop = asyncio.get_running_loop()
    get = b"GET /bytes/51000 HTTP/1.1\r\nHost: here\r\n%b\r\n"
    with socket.socket() as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        unread.setblocking(False)
        await loop.sock_connect(unread, ("127.0.0.1", port))
        await loop.sock_sendall(unread, get % b"" + get % b"Connection: close\r\n")
        taken = 0
        while taken < 80_000:
            taken += len(await loop.sock_recv(unread, 1_000))
        async with asyncio.timeout(WAIT_S):
            while is_connected_to(port):
                await asyncio.sleep(0.05)


@pytest.mark.usefixtures("response_timeout")
async def test_slow_reader_with_steady_progress_gets_whole_response(port: int) -> None:
    """The whole takes longer than the timeout, which restarts with every progress."""
    loop, size, taken = asyncio.get_running_loop(), 1_000_000, 0
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        slow.setblocking(False)
        await loop.sock_connect(slow, ("127.0.0.1", port))
        await loop.sock_sendall(slow, b"GET /bytes/%d HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n" % size)
        until = loop.time() + 2.5
        while piece := await loop.sock_recv(slow, 20_000):
            taken += len(piece)
            if loop.time() < until:
                await asyncio.sleep(0.05)
    assert taken > size


async def test_incomplete_bodies_are_closed_for_new_connections(site: ServerUnderTest) -> None:
    async with Clients() as clients:
        for _ in range(2 * CONNECTIONS):
            (await clients.connect(site.port, tls=site.tls)).send(HALF_A_REQUEST)
        assert await (await clients.connect(site.port, tls=site.tls)).get() == b"HTTP/1.1 200 OK"


async def test_silent_connections_are_closed_for_new_connections(site: ServerUnderTest) -> None:
    async with Clients() as clients:
        silent = [await clients.connect(site.port) for _ in range(3 * CONNECTIONS)]
        asking = await clients.connect(site.port, tls=site.tls)
        assert await asking.get() == b"HTTP/1.1 200 OK"
        assert silent[-1].is_open  # the longest waiting connections were closed
        for client in silent[: 2 * CONNECTIONS]:
            await client.is_closed()


async def test_one_address_gets_at_most_half_of_the_connections(site: ServerUnderTest) -> None:
    async with Clients() as clients:
        greedy = [await clients.connect(site.port, "127.0.0.2", tls=site.tls) for _ in range(CONNECTIONS // 2)]
        for client in greedy:
            await client.get()
        refused = await clients.connect(site.port, "127.0.0.2")
        await refused.is_closed()
        other = await clients.connect(site.port, "127.0.0.3", tls=site.tls)
        assert await other.get() == b"HTTP/1.1 200 OK"
        assert all(client.is_open for client in greedy)


@pytest.mark.parametrize("site", ["https"], indirect=True)
async def test_silent_tls_clients_of_one_address_get_its_share(site: ServerUnderTest) -> None:
    async with Clients() as clients:
        silent = [await clients.connect(site.port, "127.0.0.2") for _ in range(CONNECTIONS)]
        for client in silent[CONNECTIONS // 2 :]:
            await client.is_closed()
        assert all(client.is_open for client in silent[: CONNECTIONS // 2])


def test_file_limit_is_raised_and_files_are_reserved() -> None:
    """In a subprocess, because the limit applies to the process."""
    code = (
        "import resource\n"
        "from windlass.server.connections import raise_file_limit, connection_limit\n"
        "print(connection_limit())\n"
        "raise_file_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], connection_limit())\n"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, hard))

    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=few,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
        timeout=30,
    )
    before, raised, after = map(int, done.stdout.split())
    assert before == 1_024 - RESERVED_FILES
    assert raised == min(MAX_FILES, hard)
    assert after == min(MAX_CONNECTIONS, raised - RESERVED_FILES)


async def test_library_logs_are_passed_to_structlog_with_a_limit(port: int) -> None:
    with structlog.testing.capture_logs() as lines:
        for _ in range(3 * MAX_LINES):
            logging.getLogger("asyncio").error("socket.accept() out of system resource")
    assert len(lines) == MAX_LINES
    assert {(line["event"], line["log_level"], line["logger_name"], line["message"]) for line in lines} == {
        ("report event loop problem", "error", "asyncio", "socket.accept() out of system resource")
    }
    assert not logging.getLogger("asyncio").propagate


async def test_invalid_http_is_answered_and_does_not_stop_the_server(port: int) -> None:
    async with httpx.AsyncClient(trust_env=False) as client, Clients() as clients:
        odd = await clients.connect(port)
        with structlog.testing.capture_logs() as lines:
            odd.send(b"\x16\x03\x01 not HTTP\r\n\r\n")
            assert (await odd.line()).startswith(b"HTTP/1.1 400 ")
        assert [(line["event"], line["log_level"]) for line in lines] == [("report http server problem", "warning")]
        assert (await client.get(f"http://127.0.0.1:{port}/")).text == "ok"
