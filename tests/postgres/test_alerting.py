"""Alerting: each alert is sent once, also with failing notifiers, several orchestrators and restarts."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from support.alerting_fixture import (
    ANN,
    GRACE_S,
    WebhookServer,
    commit_cycle,
    make_manager,
    make_starting_manager,
    received,
    run_for,
    webhook_server,
)
from support.stores import PostgresStores
from windlass.control.alerting import (
    MAX_ATTEMPTS,
    MESSAGE_LEASE_S,
    STREAK_TTL_S,
)
from windlass.control.summary import Summary
from windlass.control.unconfigured_fleets import CARETAKER
from windlass.model.action import RaiseAlert
from windlass.model.alert import Message
from windlass.model.config import Retention
from windlass.model.snapshot import Hold
from windlass.notify.webhook import SlackNotifier, WebhookNotifier
from windlass.store.alerts import MAX_REASONS, QUERIES, REASONS_S


@pytest.fixture
async def store(dsn: str, clock: Any) -> AsyncIterator[PostgresStores]:
    async with PostgresStores(dsn, virtual_now=clock) as store:
        yield store


@pytest.fixture
async def inbox() -> AsyncIterator[WebhookServer]:
    async with webhook_server() as inbox:
        yield inbox


async def test_alert_fires_once_and_resolves_once(store: PostgresStores, inbox: WebhookServer, clock: Any) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url))
    await commit_cycle(store, RaiseAlert("SLOT_FAILED", "slot 3 is failed", about="3"))
    for _ in range(3):
        await manager.evaluate()
        await manager.send_due()
        clock.advance(5)
    assert received(inbox) == [("firing", "SLOT_FAILED")]
    (message,) = inbox.received
    assert (message["fleet"], message["reason"], message["severity"]) == ("gpus", "slot 3 is failed", "critical")
    assert "windlass restart" in message["advice"]
    await commit_cycle(store)
    await manager.evaluate()
    assert await manager.send_due() == 0  # the condition may return within the settling time
    clock.advance(61)
    await manager.evaluate()
    await manager.send_due()
    assert received(inbox) == [("firing", "SLOT_FAILED"), ("resolved", "SLOT_FAILED")]
    assert inbox.received[1]["alert_id"] == inbox.received[0]["alert_id"]


async def test_each_slot_has_its_own_alert(store: PostgresStores, inbox: WebhookServer) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url))
    await commit_cycle(store, RaiseAlert("SLOT_FAILED", "slot 3 is failed", about="3"))
    await manager.evaluate()
    await commit_cycle(
        store,
        RaiseAlert("SLOT_FAILED", "slot 3 is failed", about="3"),
        RaiseAlert("SLOT_FAILED", "slot 4 is failed", about="4"),
    )
    await manager.evaluate()
    await manager.send_due()
    assert sorted(message["reason"] for message in inbox.received) == ["slot 3 is failed", "slot 4 is failed"]


async def test_restart_neither_repeats_nor_loses_messages(
    store: PostgresStores, inbox: WebhookServer, clock: Any
) -> None:
    await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    first = make_manager(store, WebhookNotifier(inbox.url))
    await first.evaluate()
    inbox.refusals = 1
    await first.send_due()
    assert received(inbox) == []
    restarted = make_manager(store, WebhookNotifier(inbox.url))  # another process, later
    clock.advance(60)
    await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await restarted.evaluate()
    await restarted.send_due()
    await restarted.evaluate()
    await restarted.send_due()
    assert received(inbox) == [("firing", "NEAR_MAX")]


@pytest.mark.parametrize("absence", ["killed", "stopped", "without a database"])
async def test_outage_neither_fires_nor_resolves_alerts(
    store: PostgresStores, inbox: WebhookServer, clock: Any, absence: str
) -> None:
    failed = RaiseAlert("SLOT_FAILED", "slot 3 is failed", about="3")
    manager = make_starting_manager(store, WebhookNotifier(inbox.url))
    await run_for(store, manager, clock, 20, failed, hold=Hold("NO_CAPACITY", "none", clock()))
    if absence == "stopped":
        await commit_cycle(store, failed, next_plan_in_s=None)
    await store.release_lease(ANN)
    clock.advance(3600)
    if absence != "without a database":
        manager = make_starting_manager(store, WebhookNotifier(inbox.url))
    # It evaluates before its fleet's first cycle.
    await manager.evaluate()
    await commit_cycle(store, fleet="other")
    clock.advance(5)
    await manager.evaluate()
    await run_for(store, manager, clock, 200, failed, hold=Hold("NO_CAPACITY", "none", clock()))
    assert sorted(received(inbox)) == [("firing", "NO_CAPACITY"), ("firing", "SLOT_FAILED")]


async def test_alert_that_ended_during_an_outage_resolves(
    store: PostgresStores, inbox: WebhookServer, clock: Any
) -> None:
    await run_for(
        store, make_starting_manager(store, WebhookNotifier(inbox.url)), clock, 20, RaiseAlert("NEAR_MAX", "9 of 10")
    )
    clock.advance(3600)
    await run_for(store, make_starting_manager(store, WebhookNotifier(inbox.url)), clock, 80)
    assert received(inbox) == [("firing", "NEAR_MAX"), ("resolved", "NEAR_MAX")]


async def test_fleet_without_cycles_is_unattended_and_keeps_its_alerts(
    store: PostgresStores, inbox: WebhookServer, clock: Any
) -> None:
    await run_for(
        store, make_starting_manager(store, WebhookNotifier(inbox.url)), clock, 20, RaiseAlert("NEAR_MAX", "9 of 10")
    )
    clock.advance(3 * 3600)  # longer than reasons of past alerts are read
    manager = make_starting_manager(store, WebhookNotifier(inbox.url))
    for evaluations, unattended in ((10, []), (30, [("firing", "UNATTENDED")])):
        for _ in range(evaluations):
            await manager.evaluate()
            await manager.send_due()
            clock.advance(5)
        assert received(inbox) == [("firing", "NEAR_MAX"), *unattended]
    assert {alert.key: alert.reason for alert in (await store.alert_inputs()).open}["NEAR_MAX"] == "9 of 10"
    await run_for(store, manager, clock, 80, RaiseAlert("NEAR_MAX", "9 of 10"))
    assert received(inbox)[2:] == [("resolved", "UNATTENDED")]


async def test_provider_errors_stay_one_alert_over_a_restart(
    store: PostgresStores, inbox: WebhookServer, clock: Any
) -> None:
    lists_fail = Summary("gpus", True, "", provider_calls=(("list", "error", 1),))
    for _ in range(2):
        manager = make_starting_manager(store, WebhookNotifier(inbox.url))
        await manager.evaluate()
        clock.advance(1)
        for _ in range(5):
            # The interval at which clouds are listed.
            manager.record_cycle(lists_fail)
            await run_for(store, manager, clock, 30)
        clock.advance(3600)
    assert received(inbox) == [("firing", "PROVIDER_ERRORS")]
    await manager.evaluate()
    manager.record_cycle(NOTHING_TO_CREATE)
    await run_for(store, manager, clock, 80)
    assert received(inbox) == [("firing", "PROVIDER_ERRORS"), ("resolved", "PROVIDER_ERRORS")]


async def test_group_message_does_not_resolve_single_alerts(
    store: PostgresStores, inbox: WebhookServer, clock: Any
) -> None:
    def failed(*slots: int) -> list[RaiseAlert]:
        return [RaiseAlert("SLOT_FAILED", f"slot {slot} is failed", about=str(slot)) for slot in slots]

    def messages() -> list[tuple[str, str]]:
        return [(message["status"], message["reason"]) for message in inbox.received]

    manager = make_starting_manager(store, WebhookNotifier(inbox.url))
    await run_for(store, manager, clock, 80, *failed(0, 1, 2))
    fired = [("firing", f"slot {slot} is failed") for slot in range(3)]
    assert sorted(messages()) == fired
    await run_for(store, manager, clock, 80, *failed(0, 1, 2, 3))
    assert messages()[3:] == [("firing", "4 at once (0, 1, 2, ...): slot 0 is failed")]
    # Slot 3 fired with the group, so the group's alert stays open for it.
    await run_for(store, manager, clock, 80, *failed(0, 1, 3))
    assert messages()[4:] == [("resolved", "slot 2 is failed")]
    await run_for(store, manager, clock, 80, *failed(3))
    assert sorted(messages()[5:]) == [("resolved", "slot 0 is failed"), ("resolved", "slot 1 is failed")]
    await run_for(store, manager, clock, 80)
    assert messages()[7:] == [("resolved", "1 left (3): slot 3 is failed")]
    # The next failure of slot 3 is a single alert again.
    await run_for(store, manager, clock, 10, *failed(3))
    assert messages()[8:] == [("firing", "slot 3 is failed")]


async def test_failed_tasks_of_a_thousand_queues_are_one_message(
    store: PostgresStores, inbox: WebhookServer, clock: Any
) -> None:
    await commit_cycle(store)
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


async def test_workers_that_never_became_ready_raise_an_alert(store: PostgresStores, inbox: WebhookServer) -> None:
    await commit_cycle(store)
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


async def test_manager_without_notifiers_purges_old_messages(store: PostgresStores, clock: Any) -> None:
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
    dsn: str, store: PostgresStores, inbox: WebhookServer, clock: Any
) -> None:
    await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"), hold=Hold("NO_CAPACITY", "none", clock()))
    async with PostgresStores(dsn, virtual_now=clock) as other:
        managers = [make_manager(each, WebhookNotifier(inbox.url)) for each in (store, other)]
        await asyncio.gather(*(manager.evaluate() for manager in managers for _ in range(3)))
        await asyncio.gather(*(manager.send_due() for manager in managers))
    assert sorted(received(inbox)) == [("firing", "NEAR_MAX"), ("firing", "NO_CAPACITY")]


async def test_failing_notifier_is_retried_up_to_the_limit(
    store: PostgresStores, inbox: WebhookServer, clock: Any
) -> None:
    outcomes: list[tuple[str, str]] = []
    manager = make_manager(store, WebhookNotifier(inbox.url), on_message=lambda *outcome: outcomes.append(outcome))
    await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await manager.evaluate()
    inbox.refusals = 1_000
    for _ in range(MAX_ATTEMPTS + 3):
        await manager.send_due()
        clock.advance(900)
    assert outcomes.count(("webhook", "retrying")) == MAX_ATTEMPTS - 1
    assert outcomes.count(("webhook", "failed")) == 1
    assert inbox.refusals == 1_000 - MAX_ATTEMPTS


async def test_unreachable_notifier_does_not_stop_others(
    store: PostgresStores, inbox: WebhookServer, clock: Any
) -> None:
    unreachable = SlackNotifier("http://127.0.0.1:9/closed-port")
    manager = make_manager(store, unreachable, WebhookNotifier(inbox.url))
    await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await manager.evaluate()
    assert await manager.send_due() == 2
    assert received(inbox) == [("firing", "NEAR_MAX")]


async def test_alert_resolved_before_sending_is_not_sent(
    store: PostgresStores, inbox: WebhookServer, clock: Any
) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url))
    await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await manager.evaluate()
    await commit_cycle(store)
    clock.advance(61)
    await manager.evaluate()
    assert await manager.send_due() == 0


@pytest.mark.parametrize("has_failed", [False, True], ids=["retrying", "failed"])
async def test_resolution_goes_only_to_notifiers_that_got_the_alert(
    store: PostgresStores, inbox: WebhookServer, clock: Any, has_failed: bool
) -> None:
    async with webhook_server() as other:
        manager = make_manager(store, WebhookNotifier(inbox.url), SlackNotifier(other.url))
        await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"))
        await manager.evaluate()
        inbox.refusals = 1_000
        for _ in range(MAX_ATTEMPTS if has_failed else 2):
            await manager.send_due()
            clock.advance(900)
            await manager.evaluate()
        await commit_cycle(store)
        clock.advance(61)
        await manager.evaluate()
        inbox.refusals = 0
        for _ in range(2):
            await manager.send_due()
            clock.advance(900)
        assert received(inbox) == []
        assert [message["text"].split("]")[0] for message in other.received] == ["*[warning", "*[resolved"]


async def test_alert_resolved_during_sending_is_resolved_after_delivery(store: PostgresStores, clock: Any) -> None:
    manager = make_manager(store, WebhookNotifier("http://127.0.0.1:9/"))
    await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await manager.evaluate()
    (firing,) = await store.take_messages(["webhook"], 120, 10)  # being sent
    await commit_cycle(store)
    clock.advance(61)
    await manager.evaluate()
    assert await store.take_messages(["webhook"], 120, 10) == []
    await store.message_delivered(firing.id)
    (resolved,) = await store.take_messages(["webhook"], 120, 10)
    assert (resolved.kind, resolved.alert_id) == ("resolved", firing.alert_id)


class HangingNotifier:
    """A notifier that never finishes sending."""

    name = "webhook"

    async def send(self, _message: Message) -> None:
        await asyncio.Event().wait()


async def test_run_once_keeps_its_time_limit(store: PostgresStores, inbox: WebhookServer, clock: Any) -> None:
    await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    async with asyncio.timeout(20):
        await make_manager(store, HangingNotifier()).run_once(0.5)
    clock.advance(MESSAGE_LEASE_S + 1)
    for _ in range(2):
        await make_manager(store, WebhookNotifier(inbox.url)).run_once(30)
    assert received(inbox) == [("firing", "NEAR_MAX")]


async def test_ignored_codes_are_not_sent(store: PostgresStores, inbox: WebhookServer) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url), ignored=["NEAR_MAX"])
    await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    await manager.evaluate()
    assert await manager.send_due() == 0


async def test_provider_errors_failed_tasks_and_missing_leader_fire(
    store: PostgresStores, inbox: WebhookServer, clock: Any
) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url))
    await commit_cycle(store)
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
    assert ("firing", "NO_LEADER") not in received(inbox)  # another orchestrator may take over
    clock.advance(GRACE_S)
    await manager.evaluate()
    await manager.send_due()
    assert sorted(received(inbox)) == [
        ("firing", "DEAD_LETTERS"),
        ("firing", "NO_LEADER"),
        ("firing", "PROVIDER_ERRORS"),
    ]


async def test_caretaker_without_leader_raises_unattended_not_no_leader(
    store: PostgresStores, inbox: WebhookServer, clock: Any
) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url))
    await commit_cycle(store, next_plan_in_s=10)
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
    store: PostgresStores, inbox: WebhookServer, clock: Any, next_summary: Summary, later_s: float
) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url), clock=lambda: clock().timestamp())
    await commit_cycle(store)
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


async def test_manager_runs_until_cancelled(store: PostgresStores, inbox: WebhookServer) -> None:
    await commit_cycle(store, RaiseAlert("NEAR_MAX", "9 of 10"))
    running = asyncio.create_task(make_manager(store, WebhookNotifier(inbox.url)).run())
    async with asyncio.timeout(20):
        while not inbox.received:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert received(inbox) == [("firing", "NEAR_MAX")]


async def test_many_alerts_of_one_code_are_one_message(store: PostgresStores, inbox: WebhookServer, clock: Any) -> None:
    manager = make_manager(store, WebhookNotifier(inbox.url))
    await commit_cycle(
        store, *(RaiseAlert("VRAM_STALE", "its GPU is silent", about=f"w{number:03}") for number in range(1_000))
    )
    await manager.evaluate()
    assert await manager.send_due() == 1
    assert inbox.received[0]["reason"] == "1000 at once (w000, w001, w002, ...): its GPU is silent"
    await commit_cycle(store)
    clock.advance(61)
    await manager.evaluate()
    await manager.send_due()
    assert received(inbox) == [("firing", "VRAM_STALE"), ("resolved", "VRAM_STALE")]


async def test_alert_reasons_are_read_with_an_index(store: PostgresStores) -> None:
    async with store.database.connection("explaining a query") as connection:
        await connection.execute(
            "insert into windlass.events (code, reason) select 'TASK_ERROR', 'x' from generate_series(1, 20000);"
            "insert into windlass.events (code, reason) select 'ALERT', 'x' from generate_series(1, 10);"
            "analyze windlass.events"
        )
        lines = await connection.fetch(f"explain {QUERIES['alert_reasons']}", REASONS_S, MAX_REASONS)
    assert any("events_alert" in line[0] for line in lines), lines
