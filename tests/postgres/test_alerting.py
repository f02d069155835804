"""Alerting: each alert is sent once, also with failing notifiers, several orchestrators and restarts."""

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
from dataclasses import replace
from datetime import UTC, datetime
from email import message_from_string
from email.policy import default as default_policy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from structlog.testing import capture_logs

from support.stores import PostgresStores
from windlass.control.alerting import (
    MAX_ATTEMPTS,
    MAX_CONCURRENT_SENDS,
    MESSAGE_LEASE_S,
    SETTLING_S,
    STREAK_TTL_S,
    AlertManager,
)
from windlass.control.summary import Summary
from windlass.control.unconfigured_fleets import CARETAKER
from windlass.model.action import Plan, RaiseAlert
from windlass.model.alert import Message, MessageKind, Severity
from windlass.model.config import Retention
from windlass.model.errors import NotDelivered
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.snapshot import Cadence, Hold, PlannerState
from windlass.notify import webhook
from windlass.notify.command import CommandNotifier
from windlass.notify.email import EmailNotifier
from windlass.notify.webhook import SlackNotifier, WebhookNotifier
from windlass.server.server import listen
from windlass.store.alerts import MAX_REASONS, QUERIES, REASONS_S

ANN = Candidate("ann", ttl_s=1e6)
FLEET = FleetConfig(queues=("a",), handler="app:work", poll_interval_s=10)
SECRET = "s3cr3t"
GRACE_S = 60.0
MESSAGE = Message(
    1, "webhook", MessageKind.FIRING, 1, 1, None, "NO_LEADER", Severity.CRITICAL, "nobody", datetime.now(UTC), None
)


@pytest.fixture
async def store(dsn: str, clock: Any) -> AsyncIterator[PostgresStores]:
    async with PostgresStores(dsn, virtual_now=clock) as store:
        yield store


async def plan(
    store: PostgresStores,
    *alerts: RaiseAlert,
    hold: Hold | None = None,
    fleet: str = "gpus",
    next_plan_in_s: float | None = 1e6,
) -> None:
    """A cycle that had this to tell."""
    observed = await store.observe(ANN, fleet, FLEET)
    assert isinstance(observed, tuple)
    term, snapshot = observed
    told = {f"{alert.code} {alert.about}".rstrip(): snapshot.now for alert in alerts}
    cadence = Cadence(planned_at=snapshot.now, next_plan_in_s=next_plan_in_s)
    state = PlannerState(cadence=cadence, alerts=told, hold=hold)
    await store.commit_plan(ANN, term, snapshot, Plan(alerts, state, "x"), [])


class Inbox:
    """A real server that refuses as often as it is told to."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.refusals = 0
        self.url = ""

    async def take(self, request: Request) -> Response:
        if self.refusals > 0:
            self.refusals -= 1
            return Response("no", 503)
        self.received.append(json.loads(await request.body()))
        return Response(status_code=204)


@asynccontextmanager
async def inbox_of() -> AsyncIterator[Inbox]:
    inbox = Inbox()
    listener = listen("127.0.0.1", 0)
    app = Starlette(routes=[Route(f"/{SECRET}", inbox.take, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    inbox.url = f"http://127.0.0.1:{listener.getsockname()[1]}/{SECRET}"
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield inbox
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
async def inbox() -> AsyncIterator[Inbox]:
    async with inbox_of() as inbox:
        yield inbox


def make_manager(store: PostgresStores, *notifiers: Any, **other: Any) -> AlertManager:
    """Of a process that has run for a while, unless `settling_s` is given."""
    settled = {"dead_letters_allowed": 0, "leader_grace_s": GRACE_S, "settling_s": 0.0, "rng": Random(1)}  # noqa: S311
    return AlertManager(store, notifiers, **{**settled, **other})


def starting_manager(store: PostgresStores, *notifiers: Any) -> AlertManager:
    """Of a process that has just begun."""
    return make_manager(store, *notifiers, settling_s=SETTLING_S)


async def run_for(
    store: PostgresStores,
    manager: AlertManager,
    clock: Any,
    for_s: int,
    *alerts: RaiseAlert,
    hold: Hold | None = None,
) -> None:
    """Cycles that have this to tell, and looks at them."""
    for _ in range(0, for_s, 5):
        await manager.evaluate()
        await manager.send_due()
        clock.advance(5)
        await plan(store, *alerts, hold=hold, next_plan_in_s=10)
    await manager.evaluate()
    await manager.send_due()


def received(inbox: Inbox) -> list[tuple[str, str]]:
    return [(message["status"], message["code"]) for message in inbox.received]


async def test_alert_fires_once_and_resolves_once(store: PostgresStores, inbox: Inbox, clock: Any) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url))
    await plan(store, RaiseAlert("SLOT_FAILED", "slot 3 is failed", about="3"))
    for _ in range(3):
        await manager.evaluate()
        await manager.send_due()
        clock.advance(5)
    assert received(inbox) == [("firing", "SLOT_FAILED")]
    (message,) = inbox.received
    assert (message["fleet"], message["reason"], message["severity"]) == ("gpus", "slot 3 is failed", "critical")
    assert "windlass restart" in message["advice"]
    await plan(store)
    await manager.evaluate()
    assert await manager.send_due() == 0  # it may come back at once
    clock.advance(61)
    await manager.evaluate()
    await manager.send_due()
    assert received(inbox) == [("firing", "SLOT_FAILED"), ("resolved", "SLOT_FAILED")]
    assert inbox.received[1]["alert_id"] == inbox.received[0]["alert_id"]


@asynccontextmanager
async def dripping(begin: bytes) -> AsyncIterator[tuple[str, list[asyncio.Task[None]]]]:
    """A receiver that answers this, and then a byte now and then for as long as anybody is there. Who is there, too."""
    callers: list[asyncio.Task[None]] = []

    async def drip(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(begin)
            while True:
                writer.write(b".")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()

    def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.append(asyncio.create_task(drip(writer)))

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server, asyncio.timeout(20):
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/{SECRET}", callers
        await asyncio.gather(*callers)


async def test_slow_response_does_not_delay_the_next_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhook, "DEADLINE_S", 3.0)
    async with dripping(b"HTTP/1.1 200 OK\r\nX-Slowly: ") as (url, callers):
        slow = WebhookNotifier(url)
        for _ in range(2):
            with pytest.raises(NotDelivered, match="webhook did not answer within 3 s"):
                await slow.send(MESSAGE)
        assert len(callers) == 2


async def test_hanging_name_lookup_does_not_exceed_the_deadline(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "DEADLINE_S", 1.5)
    look_up, is_over, asked = socket.getaddrinfo, threading.Event(), 0

    def hang(host: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal asked
        if host in ("localhost", b"localhost"):
            asked += 1
            is_over.wait(30)
        return look_up(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    hook = WebhookNotifier(inbox.url.replace("127.0.0.1", "localhost"))
    threads = threading.active_count()
    try:
        async with asyncio.timeout(10):
            for _ in range(2):
                with pytest.raises(NotDelivered, match=r"webhook did not answer within 1\.5 s"):
                    await hook.send(MESSAGE)
        # Ours, the resolver's and the one that waits for it; nothing is looked up while it still is.
        assert asked == 1
        assert threading.active_count() - threads <= 3
    finally:
        is_over.set()
    # And it is used again, as soon as names are found.
    monkeypatch.setattr(webhook, "DEADLINE_S", 20.0)
    await hook.send(MESSAGE)
    assert inbox.received[-1]["code"] == "NO_LEADER"


async def test_only_the_status_of_a_response_is_awaited() -> None:
    async with dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n") as (url, callers):
        await SlackNotifier(url).send(MESSAGE)
        assert len(callers) == 1


async def test_each_slot_has_its_own_alert(store: PostgresStores, inbox: Inbox) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url))
    await plan(store, RaiseAlert("SLOT_FAILED", "slot 3 is failed", about="3"))
    await manager.evaluate()
    await plan(
        store,
        RaiseAlert("SLOT_FAILED", "slot 3 is failed", about="3"),
        RaiseAlert("SLOT_FAILED", "slot 4 is failed", about="4"),
    )
    await manager.evaluate()
    await manager.send_due()
    assert sorted(message["reason"] for message in inbox.received) == ["slot 3 is failed", "slot 4 is failed"]


async def test_restart_neither_repeats_nor_loses_messages(store: PostgresStores, inbox: Inbox, clock: Any) -> None:
    await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    first = make_manager(store, WebhookNotifier(inbox.url))
    await first.evaluate()
    inbox.refusals = 1
    await first.send_due()
    assert received(inbox) == []
    after = make_manager(store, WebhookNotifier(inbox.url))  # another process, later
    clock.advance(60)
    await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await after.evaluate()
    await after.send_due()
    await after.evaluate()
    await after.send_due()
    assert received(inbox) == [("firing", "NEAR_MAX")]


@pytest.mark.parametrize("absence", ["killed", "stopped in good order", "without a database"])
async def test_outage_neither_fires_nor_resolves_alerts(
    store: PostgresStores, inbox: Inbox, clock: Any, absence: str
) -> None:
    failed = RaiseAlert("SLOT_FAILED", "slot 3 is failed", about="3")
    manager = starting_manager(store, WebhookNotifier(inbox.url))
    await run_for(store, manager, clock, 20, failed, hold=Hold("NO_CAPACITY", "none", clock()))
    if absence == "stopped in good order":
        await plan(store, failed, next_plan_in_s=None)
    await store.release_lease(ANN)
    clock.advance(3600)
    if absence != "without a database":
        manager = starting_manager(store, WebhookNotifier(inbox.url))
    # It looks before its fleet's first cycle, while another process may or may not lead already.
    await manager.evaluate()
    await plan(store, fleet="other")
    clock.advance(5)
    await manager.evaluate()
    await run_for(store, manager, clock, 200, failed, hold=Hold("NO_CAPACITY", "none", clock()))
    assert sorted(received(inbox)) == [("firing", "NO_CAPACITY"), ("firing", "SLOT_FAILED")]


async def test_alert_that_ended_during_an_outage_resolves(store: PostgresStores, inbox: Inbox, clock: Any) -> None:
    await run_for(
        store, starting_manager(store, WebhookNotifier(inbox.url)), clock, 20, RaiseAlert("NEAR_MAX", "9 of 10")
    )
    clock.advance(3600)
    await run_for(store, starting_manager(store, WebhookNotifier(inbox.url)), clock, 80)
    assert received(inbox) == [("firing", "NEAR_MAX"), ("resolved", "NEAR_MAX")]


async def test_a_fleet_that_gets_no_cycle_is_told_after_a_while_and_what_is_known_of_it_lasts(
    store: PostgresStores, inbox: Inbox, clock: Any
) -> None:
    await run_for(
        store, starting_manager(store, WebhookNotifier(inbox.url)), clock, 20, RaiseAlert("NEAR_MAX", "9 of 10")
    )
    clock.advance(3 * 3600)  # the words that it was told in are not looked for that far back
    manager = starting_manager(store, WebhookNotifier(inbox.url))
    for looks, unattended in ((10, []), (30, [("firing", "UNATTENDED")])):
        for _ in range(looks):
            await manager.evaluate()
            await manager.send_due()
            clock.advance(5)
        assert received(inbox) == [("firing", "NEAR_MAX"), *unattended]
    assert {alert.key: alert.reason for alert in (await store.alert_inputs()).open}["NEAR_MAX"] == "9 of 10"
    await run_for(store, manager, clock, 80, RaiseAlert("NEAR_MAX", "9 of 10"))
    assert received(inbox)[2:] == [("resolved", "UNATTENDED")]


async def test_provider_errors_stay_one_alert_over_a_restart(store: PostgresStores, inbox: Inbox, clock: Any) -> None:
    lists_fail = Summary("gpus", True, "", provider_calls=(("list", "error", 1),))
    for _ in range(2):
        manager = starting_manager(store, WebhookNotifier(inbox.url))
        await manager.evaluate()
        clock.advance(1)
        for _ in range(5):
            # As seldom as clouds are asked.
            manager.record_cycle(lists_fail)
            await run_for(store, manager, clock, 30)
        clock.advance(3600)
    assert received(inbox) == [("firing", "PROVIDER_ERRORS")]
    await manager.evaluate()
    manager.record_cycle(NOTHING_TO_CREATE)
    await run_for(store, manager, clock, 80)
    assert received(inbox) == [("firing", "PROVIDER_ERRORS"), ("resolved", "PROVIDER_ERRORS")]


async def test_more_of_a_kind_end_none_of_those_that_were_told_apart(
    store: PostgresStores, inbox: Inbox, clock: Any
) -> None:
    def failed(*slots: int) -> list[RaiseAlert]:
        return [RaiseAlert("SLOT_FAILED", f"slot {slot} is failed", about=str(slot)) for slot in slots]

    def told() -> list[tuple[str, str]]:
        return [(message["status"], message["reason"]) for message in inbox.received]

    manager = starting_manager(store, WebhookNotifier(inbox.url))
    await run_for(store, manager, clock, 80, *failed(0, 1, 2))
    began = [("firing", f"slot {slot} is failed") for slot in range(3)]
    assert sorted(told()) == began
    await run_for(store, manager, clock, 80, *failed(0, 1, 2, 3))
    assert told()[3:] == [("firing", "4 at once (0, 1, 2, ...): slot 0 is failed")]
    # Three are left: of slot 3 it was told with the others, and their alert lasts as long as it does.
    await run_for(store, manager, clock, 80, *failed(0, 1, 3))
    assert told()[4:] == [("resolved", "slot 2 is failed")]
    await run_for(store, manager, clock, 80, *failed(3))
    assert sorted(told()[5:]) == [("resolved", "slot 0 is failed"), ("resolved", "slot 1 is failed")]
    await run_for(store, manager, clock, 80)
    assert told()[7:] == [("resolved", "1 left (3): slot 3 is failed")]
    # And the next is told by itself.
    await run_for(store, manager, clock, 10, *failed(3))
    assert told()[8:] == [("firing", "slot 3 is failed")]


async def test_a_thousand_queues_with_dead_letters_are_one_message(
    store: PostgresStores, inbox: Inbox, clock: Any
) -> None:
    await plan(store)
    async with store.database.connection("failing tasks") as connection:
        await connection.execute(
            "insert into windlass.tasks (queue, status, finished_at, error_code)"
            " select 'q' || n, 'failed', windlass.now(), 'HANDLER_ERROR' from generate_series(1, 1000) as n"
        )
    manager = make_manager(store, WebhookNotifier(inbox.url))
    await manager.evaluate()
    await manager.send_due()
    (message,) = inbox.received
    assert message["code"] == "DEAD_LETTERS"
    assert message["reason"] == "1000 at once (q1, q2, q3, ...): 1 task in queue q1 failed permanently in the last hour"
    clock.advance(3601)
    for _ in range(2):
        await manager.evaluate()
        await manager.send_due()
        clock.advance(61)
    assert received(inbox) == [("firing", "DEAD_LETTERS"), ("resolved", "DEAD_LETTERS")]


async def test_workers_that_never_became_ready_raise_an_alert(store: PostgresStores, inbox: Inbox) -> None:
    await plan(store)
    failures = [
        ("slow", "SPAWNING_TIMEOUT", None),
        ("silent", "NO_HEARTBEAT", None),
        ("outside Ray", "NODE_NOT_JOINED", None),
        ("never ready", "STARTUP_NEVER_READY", None),
        ("unreachable", "SSH_UNREACHABLE", "SSH_UNREACHABLE"),
        ("without a GPU", "GPU_NOT_DETECTED", "GPU_NOT_DETECTED"),
        ("lost its GPU", "GPU_NOT_DETECTED", None),
        ("fell silent", "STALE_HEARTBEAT_IDLE", None),
    ]
    async with store.database.connection("failing workers") as connection:
        await connection.executemany(
            "insert into windlass.workers (id, fleet, status, failed_at, code, prepare_code)"
            " values ($1, 'gpus', 'error', windlass.now(), $2, $3)",
            failures,
        )
    (fleet,) = (await store.alert_inputs()).fleets
    assert set(fleet.provisioning_timeouts) == {worker_id for worker_id, *_ in failures[:6]}
    manager = make_manager(store, WebhookNotifier(inbox.url))
    await manager.evaluate()
    await manager.send_due()
    (message,) = inbox.received
    assert message["code"] == "PROVISIONING_TIMEOUT"
    assert message["reason"] == "6 workers (never ready, outside Ray, silent, ...) were created and never became ready"


async def test_what_was_over_long_ago_is_forgotten_whether_or_not_anybody_looks_at_it(
    store: PostgresStores, clock: Any
) -> None:
    async with store.database.connection("ending alerts") as connection:
        await connection.execute(
            "insert into windlass.alerts (key, code, severity, reason, resolved_at)"
            " select 'X ' || n, 'X', 'warning', 'x', windlass.now() from generate_series(1, 2500) as n;"
            "insert into windlass.messages (alert_id, notifier, kind)"
            " select id, 'webhook', 'firing' from windlass.alerts"
        )
    clock.advance(Retention().events_s + 1)

    async def left() -> int:
        async with store.database.connection("counting") as connection:
            return int(await connection.fetchval("select count(*) from windlass.messages"))

    running = asyncio.create_task(make_manager(store).run())
    async with asyncio.timeout(20):
        while await left():
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_several_orchestrators_send_each_message_once(
    dsn: str, store: PostgresStores, inbox: Inbox, clock: Any
) -> None:
    await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"), hold=Hold("NO_CAPACITY", "none", clock()))
    async with PostgresStores(dsn, virtual_now=clock) as other:
        managers = [make_manager(each, WebhookNotifier(inbox.url)) for each in (store, other)]
        await asyncio.gather(*(manager.evaluate() for manager in managers for _ in range(3)))
        await asyncio.gather(*(manager.send_due() for manager in managers))
    assert sorted(received(inbox)) == [("firing", "NEAR_MAX"), ("firing", "NO_CAPACITY")]


async def test_failing_notifier_is_retried_up_to_the_limit(store: PostgresStores, inbox: Inbox, clock: Any) -> None:
    outcomes: list[tuple[str, str]] = []
    manager = make_manager(store, WebhookNotifier(inbox.url), on_message=lambda *outcome: outcomes.append(outcome))
    await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await manager.evaluate()
    inbox.refusals = 1_000
    for _ in range(MAX_ATTEMPTS + 3):
        await manager.send_due()
        clock.advance(900)
    assert outcomes.count(("webhook", "retrying")) == MAX_ATTEMPTS - 1
    assert outcomes.count(("webhook", "failed")) == 1
    assert inbox.refusals == 1_000 - MAX_ATTEMPTS


async def test_silent_notifier_does_not_delay_others(store: PostgresStores, inbox: Inbox, clock: Any) -> None:
    nowhere = SlackNotifier("http://127.0.0.1:9/nobody-listens")
    manager = make_manager(store, nowhere, WebhookNotifier(inbox.url))
    await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await manager.evaluate()
    assert await manager.send_due() == 2
    assert received(inbox) == [("firing", "NEAR_MAX")]


async def test_alert_resolved_before_sending_is_not_sent(store: PostgresStores, inbox: Inbox, clock: Any) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url))
    await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await manager.evaluate()
    await plan(store)
    clock.advance(61)
    await manager.evaluate()
    assert await manager.send_due() == 0


@pytest.mark.parametrize("is_given_up", [False, True], ids=["tried in vain", "given up"])
async def test_resolution_goes_only_to_notifiers_that_got_the_alert(
    store: PostgresStores, inbox: Inbox, clock: Any, is_given_up: bool
) -> None:
    async with inbox_of() as other:
        manager = make_manager(store, WebhookNotifier(inbox.url), SlackNotifier(other.url))
        await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"))
        await manager.evaluate()
        inbox.refusals = 1_000
        for _ in range(MAX_ATTEMPTS if is_given_up else 2):
            await manager.send_due()
            clock.advance(900)
            await manager.evaluate()
        await plan(store)
        clock.advance(61)
        await manager.evaluate()
        inbox.refusals = 0
        for _ in range(2):
            await manager.send_due()
            clock.advance(900)
        assert received(inbox) == []
        assert [message["text"].split("]")[0] for message in other.received] == ["*[warning", "*[resolved"]


async def test_what_is_being_told_when_it_is_over_is_ended_once_it_has_arrived(
    store: PostgresStores, clock: Any
) -> None:
    manager = make_manager(store, WebhookNotifier("http://127.0.0.1:9/"))
    await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await manager.evaluate()
    (firing,) = await store.take_messages(["webhook"], 120, 10)  # on its way
    await plan(store)
    clock.advance(61)
    await manager.evaluate()
    assert await store.take_messages(["webhook"], 120, 10) == []
    await store.message_delivered(firing.id)
    (resolved,) = await store.take_messages(["webhook"], 120, 10)
    assert (resolved.kind, resolved.alert_id) == ("resolved", firing.alert_id)


class Silent:
    """A receiver that takes for ever."""

    name = "webhook"

    async def send(self, _message: Message) -> None:
        await asyncio.Event().wait()


async def test_run_once_keeps_its_time_limit(store: PostgresStores, inbox: Inbox, clock: Any) -> None:
    await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    async with asyncio.timeout(20):
        await make_manager(store, Silent()).run_once(0.5)
    clock.advance(MESSAGE_LEASE_S + 1)
    for _ in range(2):
        await make_manager(store, WebhookNotifier(inbox.url)).run_once(30)
    assert received(inbox) == [("firing", "NEAR_MAX")]


async def test_ignored_codes_are_not_sent(store: PostgresStores, inbox: Inbox) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url), ignored=["NEAR_MAX"])
    await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await manager.evaluate()
    assert await manager.send_due() == 0


async def test_provider_errors_dead_letters_and_a_missing_leader(
    store: PostgresStores, inbox: Inbox, clock: Any
) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url))
    await plan(store)
    for _ in range(3):
        manager.record_cycle(Summary("gpus", True, "", provider_calls=(("create", "error", 1), ("list", "ok", 1))))
    async with store.database.connection("failing a task") as connection:
        await connection.execute(
            "insert into windlass.tasks (queue, status, finished_at, error_code) values"
            " ('a', 'failed', windlass.now(), 'HANDLER_ERROR'), ('b', 'failed', windlass.now(), 'CANCELLED')"
        )
    await manager.evaluate()
    await store.release_lease(ANN)
    await manager.evaluate()
    await manager.send_due()
    assert ("firing", "NO_LEADER") not in received(inbox)  # another may take over
    clock.advance(GRACE_S)
    await manager.evaluate()
    await manager.send_due()
    assert sorted(received(inbox)) == [
        ("firing", "DEAD_LETTERS"),
        ("firing", "NO_LEADER"),
        ("firing", "PROVIDER_ERRORS"),
    ]


async def test_where_nobody_leads_but_somebody_looks_after_it_the_fleet_is_what_is_told_of(
    store: PostgresStores, inbox: Inbox, clock: Any
) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url))
    await plan(store, next_plan_in_s=10)
    await store.release_lease(ANN)
    clock.advance(3600)
    await store.acquire_lease(replace(ANN, lease=CARETAKER))
    await manager.evaluate()
    await manager.send_due()
    assert received(inbox) == [("firing", "UNATTENDED")]


CREATES_FAIL = Summary("gpus", True, "", provider_calls=(("create", "error", 3), ("list", "ok", 1)))
NOTHING_TO_CREATE = Summary("gpus", True, "", provider_calls=(("list", "ok", 1),))
ANOTHER_LEADS = Summary("gpus", False, "")


@pytest.mark.parametrize(("next_summary", "later_s"), [(ANOTHER_LEADS, 0), (NOTHING_TO_CREATE, STREAK_TTL_S)])
async def test_provider_errors_resolve_on_standby_or_without_calls(
    store: PostgresStores, inbox: Inbox, clock: Any, next_summary: Summary, later_s: float
) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url), clock=lambda: clock().timestamp())
    await plan(store)
    manager.record_cycle(CREATES_FAIL)
    await manager.evaluate()
    await manager.send_due()
    clock.advance(later_s)
    manager.record_cycle(next_summary)
    for _ in range(2):
        await manager.evaluate()
        await manager.send_due()
        clock.advance(61)
    assert received(inbox) == [("firing", "PROVIDER_ERRORS"), ("resolved", "PROVIDER_ERRORS")]


async def test_manager_runs_until_cancelled(store: PostgresStores, inbox: Inbox) -> None:
    await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    running = asyncio.create_task(make_manager(store, WebhookNotifier(inbox.url)).run())
    async with asyncio.timeout(20):
        while not inbox.received:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert received(inbox) == [("firing", "NEAR_MAX")]


async def test_many_alerts_of_one_code_are_one_message(store: PostgresStores, inbox: Inbox, clock: Any) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url))
    await plan(
        store, *(RaiseAlert("VRAM_STALE", "its GPU is silent", about=f"w{number:03}") for number in range(1_000))
    )
    await manager.evaluate()
    assert await manager.send_due() == 1
    assert inbox.received[0]["reason"] == "1000 at once (w000, w001, w002, ...): its GPU is silent"
    await plan(store)
    clock.advance(61)
    await manager.evaluate()
    await manager.send_due()
    assert received(inbox) == [("firing", "VRAM_STALE"), ("resolved", "VRAM_STALE")]


async def test_the_words_of_alerts_are_found_without_reading_all_that_happened(store: PostgresStores) -> None:
    async with store.database.connection("looking at a plan") as connection:
        await connection.execute(
            "insert into windlass.events (code, reason) select 'TASK_ERROR', 'x' from generate_series(1, 20000);"
            "insert into windlass.events (code, reason) select 'ALERT', 'x' from generate_series(1, 10);"
            "analyze windlass.events"
        )
        lines = await connection.fetch(f"explain {QUERIES['alert_reasons']}", REASONS_S, MAX_REASONS)
    assert any("events_alert" in line[0] for line in lines), lines


# ------------------------------------------------------------------------------------------------------ other receivers


async def test_slack_receives_text(store: PostgresStores, inbox: Inbox) -> None:
    await plan(store, RaiseAlert("NEAR_MAX", "9 of <10> & more"))
    manager = make_manager(store, SlackNotifier(inbox.url))
    await manager.evaluate()
    await manager.send_due()
    (message,) = inbox.received
    title, reason, advice = message["text"].splitlines()
    assert (title, reason) == ("*[warning] NEAR_MAX in fleet gpus*", "9 of &lt;10&gt; &amp; more.")
    assert advice.startswith("What to do: raise max_workers")


class MailServer:
    """Just enough SMTP to be spoken to by the standard library. It is busy as often as it is told to be."""

    def __init__(self) -> None:
        self.letters: list[str] = []
        self.refusals = 0
        # Addresses that it knows nothing of.
        self.unknown: tuple[str, ...] = ()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready\r\n")
        while line := (await reader.readline()).decode().strip():
            verb = line.split()[0].upper()
            if verb == "MAIL" and self.refusals > 0:
                self.refusals -= 1
                writer.write(b"451 busy\r\n")
            elif verb == "RCPT" and any(f"<{address}>" in line for address in self.unknown):
                writer.write(f"550 {SECRET}: nobody of that name\r\n".encode())
            elif verb == "DATA":
                writer.write(b"354 go on\r\n")
                self.letters.append((await reader.readuntil(b"\r\n.\r\n")).decode())
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
        await plan(store, RaiseAlert("SLOT_FAILED", "slot 3 is failed", about="3"))
        await manager.evaluate()
        await manager.send_due()
        assert server.letters == []
        clock.advance(30)
        await manager.send_due()
    (letter,) = server.letters
    assert "Subject: windlass [critical] SLOT_FAILED in fleet gpus" in letter
    assert "To: ops@example.com" in letter
    assert "slot 3 is failed." in letter


async def test_whom_the_mail_server_refuses_is_logged_and_counted_and_the_others_are_told_once(
    store: PostgresStores, clock: Any
) -> None:
    server, outcomes = MailServer(), list[tuple[str, str]]()
    server.unknown = ("gone@example.com",)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        url = f"smtp://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        email = EmailNotifier(url, "windlass@example.com", ("gone@example.com", "ops@example.com"))
        manager = make_manager(store, email, on_message=lambda *outcome: outcomes.append(outcome))
        await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"))
        await manager.evaluate()
        with capture_logs() as lines:
            for _ in range(3):
                await manager.send_due()
                clock.advance(900)
    assert len(server.letters) == 1
    assert sorted(outcomes) == [("email", "delivered"), ("email", "refused")]
    (line,) = (line for line in lines if line["event"] == "message delivered in part")
    assert line["error"] == "mail server 127.0.0.1 refused gone@example.com (550)"
    assert SECRET not in str(lines)


async def test_mails_of_one_alert_form_one_thread(store: PostgresStores, clock: Any) -> None:
    server = MailServer()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        url = f"smtp://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        manager = make_manager(store, EmailNotifier(url, "windlass@example.com", ("ops@example.com",)))
        await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"))
        await manager.evaluate()
        await manager.send_due()
        await plan(store)
        clock.advance(61)
        await manager.evaluate()
        await manager.send_due()
    begun, over = (message_from_string(letter, policy=default_policy) for letter in server.letters)
    assert "References" not in begun
    assert over["References"] == over["In-Reply-To"] == begun["Message-ID"]
    assert over["Message-ID"] != begun["Message-ID"]
    for letter in (begun, over):
        assert abs((letter["Date"].datetime - datetime.now(UTC)).total_seconds()) < 60


async def test_silent_mail_server_delays_only_mails(store: PostgresStores, inbox: Inbox) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    is_over = asyncio.Event()

    async def say_nothing(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await is_over.wait()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        email = EmailNotifier(f"smtp://127.0.0.1:{port}", "windlass@example.com", ("ops@example.com",))
        manager = make_manager(store, email, WebhookNotifier(inbox.url))
        await plan(
            store, *(RaiseAlert(f"CAUSE_{number}", "it is the matter") for number in range(MAX_CONCURRENT_SENDS + 2))
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


async def test_webhook_uses_no_thread_of_the_loop(store: PostgresStores, inbox: Inbox) -> None:
    is_over = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    taken = asyncio.create_task(asyncio.to_thread(is_over.wait, 30))
    try:
        # A name, not a number: it has to be looked up.
        manager = make_manager(store, WebhookNotifier(inbox.url.replace("127.0.0.1", "localhost")))
        await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"))
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
    script = tmp_path / "tell"
    # Fails the first time; shows what it got, and what it knows of our secrets.
    script.write_text(f'#!/bin/sh\ncd {tmp_path}\nmkdir once 2>/dev/null && exit 7\ncat > got\necho "$OUR_KEY" > env\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setitem(os.environ, "OUR_KEY", SECRET)
    manager = make_manager(store, CommandNotifier(f"{script} --now", ("OUR_KEY",)))
    await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await manager.evaluate()
    await manager.send_due()
    assert not (tmp_path / "got").exists()
    clock.advance(30)
    await manager.send_due()
    assert json.loads((tmp_path / "got").read_text())["code"] == "NEAR_MAX"
    assert (tmp_path / "env").read_text() == "\n"


async def test_notifier_errors_do_not_repeat_the_url(store: PostgresStores, inbox: Inbox, clock: Any) -> None:
    inbox.refusals = 1
    url = inbox.url
    manager = make_manager(
        store,
        WebhookNotifier(url),
        SlackNotifier(f"http://127.0.0.1:9/{SECRET}"),
        CommandNotifier(f"/nowhere/{SECRET[:0]}x"),
    )
    await plan(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await manager.evaluate()
    await manager.send_due()
    async with store.database.connection("reading messages") as connection:
        errors = [row["error"] for row in await connection.fetch("select error from windlass.messages order by error")]
    assert errors == [
        "/nowhere/x did not start (No such file or directory)",
        "slack is unreachable (ConnectError)",
        "webhook answered 503",
    ]
