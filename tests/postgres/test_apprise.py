"""Alerts through Apprise: a real HTTP endpoint by json://, refusals, time limits, and secrets."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from support.alerting_fixture import SECRET, WebhookServer, commit_cycle, make_manager, webhook_server
from support.command_line import CommandLine
from support.stores import PostgresStores
from windlass.config_loader import load_config, secrets_of
from windlass.model.action import RaiseAlert
from windlass.model.alert import Message, MessageKind, Severity
from windlass.model.errors import ConfigError, NotDelivered
from windlass.model.redaction import HIDDEN
from windlass.notify import apprise as apprise_module
from windlass.notify.apprise import AppriseNotifier
from windlass.wiring.notifiers import make_notifiers

pytest.importorskip("apprise", reason="the extra apprise is not installed: pip install 'windlass[apprise]'")
# Apprise loads all of its services, and some import deprecated modules.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MESSAGE = Message(
    1,
    "apprise-1",
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


def apprise_url(inbox: WebhookServer) -> str:
    return inbox.url.replace("http://", "json://")


async def test_message_reaches_a_service(inbox: WebhookServer) -> None:
    notifier = AppriseNotifier(apprise_url(inbox), 1)
    await notifier.send(MESSAGE)
    resolved_at = MESSAGE.since + timedelta(minutes=3)
    await notifier.send(replace(MESSAGE, kind=MessageKind.RESOLVED, resolved_at=resolved_at))
    fired, resolved = inbox.received
    assert fired["title"] == f"windlass {MESSAGE.title}"
    assert "no orchestrator leads." in fired["message"] and "What to do: " in fired["message"]
    assert (fired["type"], resolved["type"]) == ("failure", "success")
    assert resolved["message"].startswith("Resolved after 3 minutes")


async def test_refused_message_is_retried_by_the_manager(store: PostgresStores, inbox: WebhookServer) -> None:
    inbox.refusals = 1
    outcomes: list[tuple[str, str]] = []
    notifiers = [AppriseNotifier(apprise_url(inbox), position) for position in (1, 2)]
    manager = make_manager(store, *notifiers, on_message=lambda *outcome: outcomes.append(outcome))
    await commit_cycle(store, RaiseAlert("LIMIT_REACHED", "no more servers"))
    with capture_logs() as lines:
        await manager.evaluate()
        await manager.send_due()
    assert sorted(outcome for _, outcome in outcomes) == ["delivered", "retrying"]
    assert {name for name, _ in outcomes} == {"apprise-1", "apprise-2"}
    (failed,) = [line for line in lines if line["event"] == "send message failed"]
    assert failed["error"] == f"{failed['notifier']} did not accept it"
    assert SECRET not in repr(lines)


async def test_unreachable_service_names_no_url(capfd: pytest.CaptureFixture[str]) -> None:
    notifier = AppriseNotifier(f"json://127.0.0.1:1/{SECRET}", 3)
    with pytest.raises(NotDelivered) as refused:
        await notifier.send(MESSAGE)
    assert str(refused.value) == "apprise-3 did not accept it"
    assert SECRET not in "".join(capfd.readouterr())


async def test_silent_service_does_not_exceed_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apprise_module, "DEADLINE_S", 1.0)
    opened: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        await reader.read()
        writer.close()

    threads = threading.active_count()
    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        notifier = AppriseNotifier(f"json://127.0.0.1:{port}/{SECRET}", 1)
        for _ in range(2):
            with pytest.raises(NotDelivered, match=r"apprise-1 did not answer within 1 s"):
                await notifier.send(MESSAGE)
        assert threading.active_count() - threads <= 1, "one thread, whatever it waits for"
        for writer in opened:
            writer.close()


async def test_failing_plugin_repeats_no_text(monkeypatch: pytest.MonkeyPatch, inbox: WebhookServer) -> None:
    notifier = AppriseNotifier(apprise_url(inbox), 1)

    def fail(**_: Any) -> bool:
        raise RuntimeError(inbox.url)

    monkeypatch.setattr(notifier._service, "notify", fail)
    with pytest.raises(NotDelivered, match=r"^apprise-1 failed \(RuntimeError\)$"):
        await notifier.send(MESSAGE)


def configure(folder: Path, value: str) -> Path:
    file = folder / "windlass.toml"
    file.write_text(f'[alerts]\napprise_urls = "{value}"\n')
    return file


def test_each_url_is_a_notifier_and_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_config(configure(tmp_path, "json://one.example/t0ken json://two.example/t1ken"))
    notifiers = make_notifiers(loaded.config)
    assert [notifier.name for notifier in notifiers] == ["apprise-1", "apprise-2"]
    assert {"json://one.example/t0ken", "json://two.example/t1ken"} <= secrets_of(loaded.config)
    shown = CommandLine(tmp_path)("config", "show", "--json")
    assert "t0ken" not in shown.out and shown.json["alerts.apprise_urls"]["value"] == HIDDEN, shown.out


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        pytest.param("s3cr3t", "number 1 is not a URL such as discord://id/token", id="no scheme"),
        pytest.param(" ", "write 1 to 10 URLs, separated by spaces", id="only spaces"),
        pytest.param("json://h/s3cr3t " * 11, "write 1 to 10 URLs, separated by spaces", id="too many"),
    ],
)
def test_bad_urls_are_refused_without_repeating_them(tmp_path: Path, value: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        load_config(configure(tmp_path, value))
    assert SECRET not in str(refused.value)


def test_unknown_service_is_refused_by_its_position(tmp_path: Path) -> None:
    config = load_config(configure(tmp_path, f"json://h/x nosuchservice://{SECRET}")).config
    with pytest.raises(ConfigError, match=r"URL 2 of alerts\.apprise_urls is not one that Apprise") as refused:
        make_notifiers(config)
    assert SECRET not in str(refused.value)


def test_missing_extra_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(configure(tmp_path, "json://h/x")).config
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(ConfigError, match=r"Apprise is not installed\. Run pip install 'windlass\[apprise\]'\."):
        make_notifiers(config)
