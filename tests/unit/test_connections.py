"""Whoever connects and asks nothing, against a real server with little room."""

import asyncio
import contextlib
import functools
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import psutil
import pytest
import structlog

from windlass.server import connections, server
from windlass.server.connections import FILES_KEPT, MAX_CONNECTIONS, MAX_FILES, ConnectionTracker, Timeouts
from windlass.server.server import MAX_LINES, listen, serving

ROOM = 20
HALF_A_HEADER = b"GET /healthz HTTP/1.1\r\nHost: here\r\nX-Half:"
BODY_BYTES = 100
HALF_A_REQUEST = b"POST /healthz HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % BODY_BYTES
WAIT_S = 10.0


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """`ok`, or as many bytes as the path says."""
    size = scope["path"].removeprefix("/bytes/")
    body = b"x" * int(size) if size.isdigit() else b"ok"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second for each thing that is waited for."""
    patience = Timeouts(header_s=0.5, body_s=0.5, answer_s=0.5)
    monkeypatch.setattr(server, "ConnectionTracker", functools.partial(ConnectionTracker, patience=patience))


@pytest.fixture
def some_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds for any part of an answer."""
    monkeypatch.setattr(connections, "TAKEN_BYTES", 1)
    monkeypatch.setattr(
        server, "ConnectionTracker", functools.partial(ConnectionTracker, patience=Timeouts(answer_s=2.0))
    )


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """Of a server with room for so many."""
    monkeypatch.setattr(server, "room_for_connections", lambda: ROOM)
    # Whoever counted lines before is of another test.
    monkeypatch.setattr(logging.getLogger("asyncio"), "handlers", [])
    listener = listen("127.0.0.1", 0)
    # What is not read stays with the server, and is not hidden in the system's buffers.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    async with serving(answer, listener):
        yield listener.getsockname()[1]


class Caller:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def get(self) -> bytes:
        self.say(b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n")
        return await self.answer()

    async def answer(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            answered = await self._reader.readuntil(b"\r\n\r\n")
            assert await self._reader.readexactly(2) == b"ok"
        return answered.split(b"\r\n")[0]

    async def line(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self._reader.readline()

    def say(self, words: bytes) -> None:
        self._writer.write(words)

    async def is_cut(self) -> None:
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


async def all_that_comes(deaf: socket.socket) -> int:
    size = 0
    with contextlib.suppress(ConnectionResetError):
        while piece := await asyncio.get_running_loop().sock_recv(deaf, 65_536):
            size += len(piece)
    return size


class Crowd(AsyncExitStack):
    async def caller(self, port: int, address: str = "127.0.0.1") -> Caller:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        self.callback(writer.close)
        return Caller(reader, writer)


@pytest.mark.usefixtures("impatience")
@pytest.mark.parametrize("words", [b"", HALF_A_HEADER], ids=["nothing", "half a header"])
async def test_a_connection_without_a_whole_header_is_cut(port: int, words: bytes) -> None:
    async with Crowd() as crowd:
        silent = await crowd.caller(port)
        silent.say(words)
        await silent.is_cut()


@pytest.mark.usefixtures("impatience")
async def test_a_byte_now_and_then_gains_no_time(port: int) -> None:
    async with Crowd() as crowd:
        dripping = await crowd.caller(port)

        async def drip() -> None:
            for byte in HALF_A_HEADER * 100:
                dripping.say(bytes([byte]))
                await asyncio.sleep(0.05)

        drops = asyncio.create_task(drip())
        await dripping.is_cut()
        drops.cancel()


@pytest.mark.usefixtures("impatience")
async def test_a_further_request_has_its_header_in_time_too_and_may_be_long_in_coming(port: int) -> None:
    async with Crowd() as crowd:
        idle, half = await crowd.caller(port), await crowd.caller(port)
        await idle.get()
        await half.get()
        half.say(HALF_A_HEADER)
        await half.is_cut()
        assert await idle.get() == b"HTTP/1.1 200 OK"


@pytest.mark.usefixtures("impatience")
async def test_a_body_arrives_in_time_though_it_was_answered_before(port: int) -> None:
    async with Crowd() as crowd:
        dripping = await crowd.caller(port)
        dripping.say(HALF_A_REQUEST)
        assert await dripping.answer() == b"HTTP/1.1 200 OK"

        async def drip() -> None:
            for _ in range(200):
                dripping.say(b"x")
                await asyncio.sleep(0.05)

        drops = asyncio.create_task(drip())
        await dripping.is_cut()
        drops.cancel()


@pytest.mark.usefixtures("impatience")
async def test_a_body_that_was_answered_before_is_followed_by_further_requests(port: int) -> None:
    async with Crowd() as crowd:
        early, watch = await crowd.caller(port), await crowd.caller(port)
        early.say(HALF_A_REQUEST)
        assert await early.answer() == b"HTTP/1.1 200 OK"
        early.say(b"x" * BODY_BYTES)
        # Longer than a header may take: this one has begun none.
        watch.say(HALF_A_HEADER)
        await watch.is_cut()
        assert await early.get() == b"HTTP/1.1 200 OK"


@pytest.mark.usefixtures("impatience")
@pytest.mark.parametrize(
    ("size", "last_words"),
    [(1_000_000, b""), (1_000_000, b"Connection: close\r\n"), (60_000, b"Connection: close\r\n")],
    ids=["much", "much, then the end", "some, then the end"],
)
async def test_who_takes_no_answer_is_cut(port: int, size: int, last_words: bytes) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        deaf.setblocking(False)
        await loop.sock_connect(deaf, ("127.0.0.1", port))
        await loop.sock_sendall(deaf, b"GET /bytes/%d HTTP/1.1\r\nHost: here\r\n%b\r\n" % (size, last_words))
        async with asyncio.timeout(WAIT_S):
            while is_connected_to(port):
                await asyncio.sleep(0.05)
        assert 0 < await all_that_comes(deaf) < size


@pytest.mark.usefixtures("impatience")
async def test_who_takes_all_but_the_end_of_the_last_answer_is_cut(port: int) -> None:
    """Less is left then than a server stops writing for, and it closes when all is taken."""
    loop = asyncio.get_running_loop()
    get = b"GET /bytes/51000 HTTP/1.1\r\nHost: here\r\n%b\r\n"
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        deaf.setblocking(False)
        await loop.sock_connect(deaf, ("127.0.0.1", port))
        await loop.sock_sendall(deaf, get % b"" + get % b"Connection: close\r\n")
        taken = 0
        while taken < 80_000:
            taken += len(await loop.sock_recv(deaf, 1_000))
        async with asyncio.timeout(WAIT_S):
            while is_connected_to(port):
                await asyncio.sleep(0.05)


@pytest.mark.usefixtures("some_patience")
async def test_who_takes_an_answer_at_a_fair_pace_gets_all_of_it(port: int) -> None:
    """Longer than nothing may be taken; that some was is seen whenever that time is over."""
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


async def test_half_a_body_makes_room_for_whoever_asks(port: int) -> None:
    async with Crowd() as crowd:
        for _ in range(2 * ROOM):
            (await crowd.caller(port)).say(HALF_A_REQUEST)
        assert await (await crowd.caller(port)).get() == b"HTTP/1.1 200 OK"


async def test_silent_connections_make_room_for_whoever_asks(port: int) -> None:
    async with Crowd() as crowd:
        for _ in range(3 * ROOM):
            silent = await crowd.caller(port)
        asking = await crowd.caller(port)
        assert await asking.get() == b"HTTP/1.1 200 OK"
        assert silent.is_open  # the ones who waited longest went


async def test_one_address_leaves_half_of_the_room_to_others(port: int) -> None:
    async with Crowd() as crowd:
        greedy = [await crowd.caller(port, "127.0.0.2") for _ in range(ROOM // 2)]
        for caller in greedy:
            await caller.get()
        refused = await crowd.caller(port, "127.0.0.2")
        await refused.is_cut()
        assert await (await crowd.caller(port, "127.0.0.3")).get() == b"HTTP/1.1 200 OK"
        assert all(caller.is_open for caller in greedy)


def test_the_limit_of_files_is_raised_and_leaves_room_for_everything_else() -> None:
    """In a process of its own: the limit is the process's."""
    code = (
        "import resource\n"
        "from windlass.server.connections import raise_file_limit, room_for_connections\n"
        "print(room_for_connections())\n"
        "raise_file_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], room_for_connections())\n"
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
    assert before == 1_024 - FILES_KEPT
    assert raised == min(MAX_FILES, hard)
    assert after == min(MAX_CONNECTIONS, raised - FILES_KEPT)


async def test_what_the_loop_and_the_server_log_becomes_lines_of_ours_and_not_too_many(port: int) -> None:
    with structlog.testing.capture_logs() as lines:
        for _ in range(3 * MAX_LINES):
            logging.getLogger("asyncio").error("socket.accept() out of system resource")
    assert len(lines) == MAX_LINES
    assert {(line["event"], line["log_level"], line["of"], line["message"]) for line in lines} == {
        ("event loop", "error", "asyncio", "socket.accept() out of system resource")
    }
    assert not logging.getLogger("asyncio").propagate


async def test_nonsense_is_answered_and_the_next_request_too(port: int) -> None:
    async with httpx.AsyncClient(trust_env=False) as client, Crowd() as crowd:
        odd = await crowd.caller(port)
        with structlog.testing.capture_logs() as lines:
            odd.say(b"\x16\x03\x01 is no HTTP\r\n\r\n")
            assert (await odd.line()).startswith(b"HTTP/1.1 400 ")
        assert [(line["event"], line["log_level"]) for line in lines] == [("http server", "warning")]
        assert (await client.get(f"http://127.0.0.1:{port}/")).text == "ok"
