"""Notifiers: webhook, Slack, mail and command, with slow, silent and failing receivers."""

import asyncio
import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email import message_from_string
from email.policy import default as default_policy
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from support.alerting_fixture import (
    SECRET,
    WebhookServer,
    commit_cycle,
    make_manager,
    received,
    webhook_server,
)
from support.stores import PostgresStores
from windlass.control.alerting import MAX_CONCURRENT_SENDS
from windlass.model.action import RaiseAlert
from windlass.model.alert import Message, MessageKind, Severity
from windlass.model.errors import NotDelivered
from windlass.notify import webhook
from windlass.notify.command import CommandNotifier
from windlass.notify.email import EmailNotifier
from windlass.notify.webhook import SlackNotifier, WebhookNotifier

MESSAGE = Message(
    1,
    "webhook",
    MessageKind.FIRING,
    1,
    1,
    None,
    "NO_LEADER",
    Severity.CRITICAL,
    "no orchestrator leads",
    datetime.now(UTC),
    None,
)


@pytest.fixture
async def store(dsn: str, clock: Any) -> AsyncIterator[PostgresStores]:
    async with PostgresStores(dsn, virtual_now=clock) as store:
        yield store


@pytest.fixture
async def inbox() -> AsyncIterator[WebhookServer]:
    async with webhook_server() as inbox:
        yield inbox


@asynccontextmanager
async def dripping_server(response: bytes) -> AsyncIterator[tuple[str, list[asyncio.Task[None]]]]:
    """A server that answers these bytes, then one byte every 20 ms while the client stays connected.

    Yields its URL and one task for each connection.
    """
    connections: list[asyncio.Task[None]] = []

    async def drip(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(response)
            while True:
                writer.write(b".")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.create_task(drip(writer)))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server, asyncio.timeout(20):
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/{SECRET}", connections
        await asyncio.gather(*connections)


async def test_slow_response_times_out_and_the_next_message_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhook, "DEADLINE_S", 3.0)
    async with dripping_server(b"HTTP/1.1 200 OK\r\nX-Slowly: ") as (url, connections):
        slow = WebhookNotifier(url)
        for _ in range(2):
            with pytest.raises(NotDelivered, match="webhook did not answer within 3 s"):
                await slow.send(MESSAGE)
        assert len(connections) == 2


async def test_hanging_name_lookup_does_not_exceed_the_deadline(
    inbox: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "DEADLINE_S", 1.5)
    resolve, is_over, lookups = socket.getaddrinfo, threading.Event(), 0

    def hang(host: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal lookups
        if host in ("localhost", b"localhost"):
            lookups += 1
            is_over.wait(30)
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    hook = WebhookNotifier(inbox.url.replace("127.0.0.1", "localhost"))
    threads = threading.active_count()
    try:
        async with asyncio.timeout(10):
            for _ in range(2):
                with pytest.raises(NotDelivered, match=r"webhook did not answer within 1\.5 s"):
                    await hook.send(MESSAGE)
        # One thread of the notifier, one of the resolver and one that waits for it. No second lookup starts meanwhile.
        assert lookups == 1
        assert threading.active_count() - threads <= 3
    finally:
        is_over.set()
    # The notifier works again as soon as the lookup ends.
    monkeypatch.setattr(webhook, "DEADLINE_S", 20.0)
    await hook.send(MESSAGE)
    assert inbox.received[-1]["code"] == "NO_LEADER"


async def test_only_the_status_of_a_response_is_awaited() -> None:
    async with dripping_server(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n") as (url, connections):
        await SlackNotifier(url).send(MESSAGE)
        assert len(connections) == 1


async def test_slack_receives_text(store: PostgresStores, inbox: WebhookServer) -> None:
    await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of <10> & more"))
    manager = make_manager(store, SlackNotifier(inbox.url))
    await manager.evaluate()
    await manager.send_due()
    (message,) = inbox.received
    title, reason, advice = message["text"].splitlines()
    assert (title, reason) == ("*[warning] NEAR_MAX in fleet gpus*", "9 of &lt;10&gt; &amp; more.")
    assert advice.startswith("What to do: raise max_workers")


class MailServer:
    """Enough SMTP for smtplib. It answers the next `refusals` mails with 451."""

    def __init__(self) -> None:
        self.mails: list[str] = []
        self.refusals = 0
        # Recipients that it refuses with 550.
        self.unknown: tuple[str, ...] = ()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready\r\n")
        while line := (await reader.readline()).decode().strip():
            verb = line.split()[0].upper()
            if verb == "MAIL" and self.refusals > 0:
                self.refusals -= 1
                writer.write(b"451 busy\r\n")
            elif verb == "RCPT" and any(f"<{address}>" in line for address in self.unknown):
                writer.write(f"550 {SECRET}: no such user\r\n".encode())
            elif verb == "DATA":
                writer.write(b"354 go on\r\n")
                self.mails.append((await reader.readuntil(b"\r\n.\r\n")).decode())
                writer.write(b"250 taken\r\n")
            elif verb == "QUIT":
                writer.write(b"221 bye\r\n")
                break
            else:
                writer.write(b"250 ok\r\n")
            await writer.drain()
        writer.close()


async def test_mail_is_delivered_at_the_second_attempt(store: PostgresStores, clock: Any) -> None:
    server = MailServer()
    server.refusals = 1
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        manager = make_manager(
            store, EmailNotifier(f"smtp://127.0.0.1:{port}", "windlass@example.com", ("ops@example.com",))
        )
        await commit_cycle(store, RaiseAlert("SLOT_FAILED", "slot 3 is failed", about="3"))
        await manager.evaluate()
        await manager.send_due()
        assert server.mails == []
        clock.advance(30)
        await manager.send_due()
    (mail,) = server.mails
    assert "Subject: windlass [critical] SLOT_FAILED in fleet gpus" in mail
    assert "To: ops@example.com" in mail
    assert "slot 3 is failed." in mail


async def test_refused_recipient_is_logged_and_others_get_one_mail(store: PostgresStores, clock: Any) -> None:
    server, outcomes = MailServer(), list[tuple[str, str]]()
    server.unknown = ("gone@example.com",)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        url = f"smtp://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        email = EmailNotifier(url, "windlass@example.com", ("gone@example.com", "ops@example.com"))
        manager = make_manager(store, email, on_message=lambda *outcome: outcomes.append(outcome))
        await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"))
        await manager.evaluate()
        with capture_logs() as lines:
            for _ in range(3):
                await manager.send_due()
                clock.advance(900)
    assert len(server.mails) == 1
    assert sorted(outcomes) == [("email", "delivered"), ("email", "refused")]
    (line,) = (line for line in lines if line["event"] == "deliver message in part")
    assert line["error"] == "mail server 127.0.0.1 refused gone@example.com (550)"
    assert SECRET not in str(lines)


async def test_mails_of_one_alert_form_one_thread(store: PostgresStores, clock: Any) -> None:
    server = MailServer()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        url = f"smtp://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        manager = make_manager(store, EmailNotifier(url, "windlass@example.com", ("ops@example.com",)))
        await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"))
        await manager.evaluate()
        await manager.send_due()
        await commit_cycle(store)
        clock.advance(61)
        await manager.evaluate()
        await manager.send_due()
    firing, resolved = (message_from_string(mail, policy=default_policy) for mail in server.mails)
    assert "References" not in firing
    assert resolved["References"] == resolved["In-Reply-To"] == firing["Message-ID"]
    assert resolved["Message-ID"] != firing["Message-ID"]
    for mail in (firing, resolved):
        assert abs((mail["Date"].datetime - datetime.now(UTC)).total_seconds()) < 60


async def test_silent_mail_server_delays_only_mails(store: PostgresStores, inbox: WebhookServer) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    is_over = asyncio.Event()

    async def never_answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await is_over.wait()
        writer.close()

    async with await asyncio.start_server(never_answer, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        email = EmailNotifier(f"smtp://127.0.0.1:{port}", "windlass@example.com", ("ops@example.com",))
        manager = make_manager(store, email, WebhookNotifier(inbox.url))
        await commit_cycle(
            store, *(RaiseAlert(f"CAUSE_{number}", "a condition") for number in range(MAX_CONCURRENT_SENDS + 2))
        )
        await manager.evaluate()
        try:
            async with asyncio.timeout(10):
                while len(inbox.received) < MAX_CONCURRENT_SENDS + 2:
                    await manager.send_due(is_awaited=False)
                    await asyncio.to_thread(lambda: None)
        finally:
            is_over.set()
            await asyncio.gather(*manager._sending["email"])
    assert len(inbox.received) == MAX_CONCURRENT_SENDS + 2


async def test_webhook_uses_no_thread_of_the_loop(store: PostgresStores, inbox: WebhookServer) -> None:
    is_over = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    taken = asyncio.create_task(asyncio.to_thread(is_over.wait, 30))
    try:
        # A host name, not an address: it must be resolved.
        manager = make_manager(store, WebhookNotifier(inbox.url.replace("127.0.0.1", "localhost")))
        await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"))
        await manager.evaluate()
        async with asyncio.timeout(10):
            await manager.send_due()
    finally:
        is_over.set()
        await taken
    assert received(inbox) == [("firing", "NEAR_MAX")]


async def test_command_receives_json_and_reports_by_exit_code(
    store: PostgresStores, tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "notify"
    # Fails the first time, then records its input and the value of OUR_KEY.
    script.write_text(f'#!/bin/sh\ncd {tmp_path}\nmkdir once 2>/dev/null && exit 7\ncat > got\necho "$OUR_KEY" > env\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setitem(os.environ, "OUR_KEY", SECRET)
    manager = make_manager(store, CommandNotifier(f"{script} --now", ("OUR_KEY",)))
    await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await manager.evaluate()
    await manager.send_due()
    assert not (tmp_path / "got").exists()
    clock.advance(30)
    await manager.send_due()
    assert json.loads((tmp_path / "got").read_text())["code"] == "NEAR_MAX"
    assert (tmp_path / "env").read_text() == "\n"


async def test_notifier_errors_do_not_repeat_the_url(store: PostgresStores, inbox: WebhookServer, clock: Any) -> None:
    inbox.refusals = 1
    url = inbox.url
    manager = make_manager(
        store,
        WebhookNotifier(url),
        SlackNotifier(f"http://127.0.0.1:9/{SECRET}"),
        CommandNotifier(f"/nowhere/{SECRET[:0]}x"),
    )
    await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await manager.evaluate()
    await manager.send_due()
    async with store.database.connection("reading messages") as connection:
        errors = [row["error"] for row in await connection.fetch("select error from windlass.messages order by error")]
    assert errors == [
        "/nowhere/x did not start (No such file or directory)",
        "slack is unreachable (ConnectError)",
        "webhook answered 503",
    ]
