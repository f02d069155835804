"""The shared overview, the stream of server-sent events, and the samples for charts."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from support.api_fixture import API, ApiFixture, open_api, problem_of
from windlass.model.auth import Role, csrf_token
from windlass.model.errors import DatabaseUnavailable
from windlass.server import event_stream
from windlass.server.errors import ApiError
from windlass.server.event_stream import EventStream, OverviewFeed
from windlass.server.routes.login import create_login_link
from windlass.server.server import listen, serving
from windlass.store import overview as overview_store
from windlass.store.connection import connected
from windlass.wiring import http_server


async def messages_of(stream: Any) -> AsyncIterator[tuple[str, Any, str | None]]:
    """Kind, data and id of each server-sent event."""
    kind, event_id = "", None
    async for part in stream:
        for line in part.splitlines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "id":
                event_id = value
            elif name == "data":
                yield kind, json.loads(value), event_id
                event_id = None


async def test_listener_receives_changes_and_resumes_after_last_event(dsn: str) -> None:
    async with open_api(dsn) as api, asyncio.timeout(30):
        await api.spawn_active_workers()
        # Before the listener: creating a token is an event too.
        headers = await api.auth_headers(Role.OPERATOR)
        messages = messages_of((await api.feed.listen(None)).messages())
        kind, overview, _ = await anext(messages)
        assert kind == "overview"
        assert not overview["fleets"][0]["fleet"]["is_paused"]
        await api.remote.post(f"{API}/fleets/gpus/pause", headers=headers)
        is_seen, event = False, None
        # In either order: the two queries may run before and after the pause.
        while not is_seen or event is None:
            kind, data, event_id = await anext(messages)
            is_seen |= kind == "overview" and data["fleets"][0]["fleet"]["is_paused"]
            event = (data, event_id) if kind == "event" else event
        assert event[0]["code"] == "FLEET_PAUSED"
        await api.store.pause_fleet("gpus", False)
        again = messages_of((await api.feed.listen(int(event[1]))).messages())
        kind, data, _ = await anext(again)
        assert (kind, data["code"]) == ("event", "FLEET_RESUMED")


async def received_until(api: ApiFixture, listener: Any, last: int) -> list[int]:
    """Ids of the events that a listener receives up to `last`. Then the listener ends."""
    received: list[int] = []
    async for kind, _, event_id in messages_of(listener.messages()):
        if kind == "event":
            received.append(int(event_id or 0))
        if last in received:
            break
    listener.end()
    while api.feed.is_publishing:
        await asyncio.sleep(0.01)
    return received


@pytest.mark.parametrize("is_received_late", [True, False], ids=["received late", "missed while disconnected"])
async def test_event_that_becomes_visible_late_is_sent_once(
    dsn: str, monkeypatch: pytest.MonkeyPatch, is_received_late: bool
) -> None:
    monkeypatch.setattr(event_stream, "POLL_INTERVAL_S", 0.01)
    event = "insert into windlass.events (code, reason) values ('X', 'x') returning id"
    async with (
        open_api(dsn) as api,
        connected(dsn, "slowly") as slow,
        connected(dsn, "quickly") as quick,
        asyncio.timeout(30),
    ):
        listener = await api.feed.listen(None)
        transaction = slow.transaction()
        await transaction.start()
        late = await slow.fetchval(event)
        early = await quick.fetchval(event)
        if is_received_late:
            messages = messages_of(listener.messages())
            while (await anext(messages))[2] != str(early):
                pass
            await transaction.commit()
            assert await received_until(api, listener, late) == [late]
        else:
            assert await received_until(api, listener, early) == [early]
            await transaction.commit()
        seen = late if is_received_late else early
        last = await quick.fetchval(event)
        again = await received_until(api, await api.feed.listen(seen), last)
        assert again == ([last] if is_received_late else [late, last])
        # The order in which events were found is kept.
        final = await quick.fetchval(event)
        assert await received_until(api, await api.feed.listen(last), final) == [final]
        # A listener that received none of them gets them all, also when they are no longer in memory.
        all_events = sorted([late, early, last, final])
        assert sorted(await received_until(api, await api.feed.listen(late - 1), final)) == all_events
        api.feed._found.clear()
        assert await received_until(api, await api.feed.listen(late - 1), final) == all_events


async def test_listener_receives_events_that_are_no_longer_in_memory(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"POLL_INTERVAL_S": 0.01, "OVERLAP": 2, "MAX_EVENTS": 20, "MAX_KEPT_EVENTS": 5}.items():
        monkeypatch.setattr(event_stream, name, value)
    async with open_api(dsn) as api, connected(dsn, "events") as connection, asyncio.timeout(30):
        insert = "insert into windlass.events (code, reason) select 'X', 'x' from generate_series(1, $1) returning id"
        first = await connection.fetchval(insert, 1)
        assert (await api.feed.overview()).last_event_id == first
        await connection.execute(insert.removesuffix(" returning id"), 11)
        listener = await api.feed.listen(first)
        last = await connection.fetchval(insert, 1)
        assert await received_until(api, listener, last) == list(range(first + 1, last + 1))


async def test_reconnecting_listener_gets_each_event_once(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "POLL_INTERVAL_S", 0.01)
    async with open_api(dsn) as api, asyncio.timeout(30):
        await api.spawn_active_workers()

        async def add_events() -> int:
            await api.store.pause_fleet("gpus", True)
            await api.store.pause_fleet("gpus", False)
            return (await api.store.events_page(limit=1)).rows[0].id

        first = await api.feed.listen(None)
        seen = (await received_until(api, first, await add_events()))[-1]
        await add_events()
        again = await api.feed.listen(seen)
        last = await add_events()
        assert await received_until(api, again, last) == list(range(seen + 1, last + 1))
        since = (await api.feed.overview()).last_event_id
        new_listener = await api.feed.listen(None)
        last = await add_events()
        received = await received_until(api, new_listener, last)
        assert received[0] > since
        assert received == list(range(received[0], last + 1))


async def test_listeners_are_limited_and_slow_ones_dropped(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_LISTENERS", 2)
    monkeypatch.setattr(event_stream, "MAX_LISTENERS_PER_CALLER", 1)
    monkeypatch.setattr(event_stream, "MAX_BACKLOG", 1)
    monkeypatch.setattr(event_stream, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(event_stream, "FRESH_S", 0.01)
    async with open_api(dsn) as api, asyncio.timeout(30):
        listener = await api.feed.listen(None, "first")
        with pytest.raises(ApiError, match="you have 1 open streams"):
            await api.feed.listen(None, "first")
        sent = 0

        async def send(message: Any) -> None:
            nonlocal sent
            if sent := sent + len(message.get("body", b"")):
                await asyncio.Event().wait()  # the client reads nothing more

        async def receive() -> Any:
            await asyncio.Event().wait()

        stream = EventStream(listener)
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "method": "GET", "path": "/", "headers": []}
        # The response ends although its message is never read, and the listener no longer counts.
        await stream(scope, receive, send)
        assert sent > 0
        assert listener.is_dropped
        assert api.feed.listener_count == 0
        monkeypatch.setattr(event_stream, "MAX_BACKLOG", 10_000)
        await api.feed.listen(None, "first")
        await api.feed.listen(None, "second")
        assert problem_of(await api.localhost.get(f"{API}/stream")) == (503, "UNAVAILABLE")


@pytest.mark.parametrize("kind", ["revoked token", "ended session"])
async def test_stream_ends_when_access_is_revoked(dsn: str, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.05)
    listener = listen("127.0.0.1", 0)
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with (
        open_api(dsn) as api,
        serving(api.app, listener),
        httpx.AsyncClient(trust_env=False, timeout=20, base_url=base) as client,
        asyncio.timeout(30),
    ):
        await api.spawn_active_workers()
        if kind == "revoked token":
            client.headers.update(await api.auth_headers(Role.VIEWER))
        else:
            await client.get(await create_login_link(api.store, base))
        async with client.stream("GET", f"{API}/stream") as response:
            assert response.status_code == 200
            parts = response.aiter_text()
            assert "overview" in await anext(parts)
            if kind == "revoked token":
                (token,) = await api.store.tokens()
                await api.store.revoke_token(token.name)
            else:
                (session,) = client.cookies.values()
                await client.post("/logout", content=f"csrf={csrf_token(session)}")
            async for _ in parts:
                pass  # until the stream ends
        assert api.feed.listener_count == 0


async def test_concurrent_readers_share_one_overview_query(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_api(dsn) as api:
        queries = 0
        overview = api.store.overview

        async def counted(*arguments: Any) -> Any:
            nonlocal queries
            queries += 1
            return await overview(*arguments)

        monkeypatch.setattr(api.store, "overview", counted)
        responses = await asyncio.gather(*(api.localhost.get(f"{API}/status") for _ in range(50)))
        assert {response.status_code for response in responses} == {200}
        assert queries == 1


async def test_changes_use_a_bounded_share_of_time_for_loading() -> None:
    now, loads = 100.0, list[float]()

    class Slow:
        async def overview(self, _configured: Any) -> Any:
            nonlocal now
            loads.append(now)
            now += 0.2
            return len(loads)

    feed = OverviewFeed(Slow(), frozenset, clock=lambda: now)  # type: ignore[arg-type]
    await feed.overview()
    feed.mark_changed()
    assert await feed.overview() == 2  # at once
    while now < 200.0:  # then a change every 10 ms
        feed.mark_changed()
        assert await feed.overview() == len(loads)
        now += 0.01
    assert 0.2 * len(loads) == pytest.approx(0.25 * (100 + event_stream.LOAD_CREDIT_S), rel=0.05)


async def test_sampling_continues_after_errors(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview_store, "SAMPLE_INTERVAL_S", 0.01)
    async with open_api(dsn) as api, asyncio.timeout(30):
        await api.spawn_active_workers()
        errors = iter([ZeroDivisionError("a defect"), DatabaseUnavailable("unavailable")])
        load = api.feed.overview

        async def overview() -> Any:
            if (error := next(errors, None)) is not None:
                raise error
            return await load()

        monkeypatch.setattr(api.feed, "overview", overview)
        with capture_logs() as logs:
            sampling = asyncio.create_task(http_server.take_samples(api.store, api.feed))
            while not await api.store.history("gpus", 60):
                await asyncio.sleep(0.01)
                assert not sampling.done()
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
        assert [line["log_level"] for line in logs if line["event"] == "take sample failed"] == ["error", "warning"]
