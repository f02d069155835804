"""The overview shared by all readers, and the stream of server-sent events.

`OverviewFeed.overview` returns a cached overview. It is at most one second old, or four times as old as it takes to
load; after a change by this server it is reloaded as soon as that bound allows. So readers and changes together use at
most a quarter of one database connection. While there are listeners, they receive every event and each new overview.
A listener that falls behind, or whose access was revoked, is disconnected. It may reconnect with the id of its last
event and then misses none that are still stored.

An event can become visible after events with higher ids, when its transaction took longer. Listeners receive events in
the order in which this server found them. Another server may have found them in another order: a listener that changes
servers, or reconnects after a restart, may miss an event that became visible late.
"""

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import structlog
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter
from starlette.types import Receive, Scope, Send

from windlass.model.errors import WindlassError
from windlass.model.event import Event
from windlass.model.masked_values import masked_json
from windlass.model.overview import Overview
from windlass.ports.queries import QueryStore
from windlass.server.errors import unavailable

# A younger overview is not reloaded.
FRESH_S = 1.0
# Share of the time that may be spent on loading. Unused time accumulates up to LOAD_CREDIT_S, so that an operator sees
# the result of an occasional change at once.
LOAD_SHARE = 0.25
LOAD_CREDIT_S = 5.0
# Interval between two searches for events.
POLL_INTERVAL_S = 0.5
# Proxies close connections that are silent for longer.
KEEP_ALIVE_S = 15.0
# Browsers reconnect after this time.
RECONNECT_MS = 2_000
# Each listener holds a connection and is sent an overview every second. The limit per caller is more than the tabs of
# one person, and leaves room for other callers.
MAX_LISTENERS = 200
MAX_LISTENERS_PER_CALLER = 20
# Messages that a listener may fall behind before it is disconnected.
MAX_BACKLOG = 64
# Events loaded at once. A listener that missed more has to read the list.
MAX_EVENTS = 500
# Events below the newest id that each search reads again, for those that became visible late.
OVERLAP = 200
# Events kept in memory, in the order in which they were found: what a search may find again, and what a listener missed
# that reconnects soon.
MAX_KEPT_EVENTS = MAX_EVENTS + OVERLAP
log = structlog.get_logger(__name__)

_OVERVIEW = TypeAdapter(Overview)
_EVENT = TypeAdapter(Event)


class OverviewFeed:
    """`configured_fleets`: the fleets that this process runs. Fleets that no process runs any more are left out.

    `redact_event` removes what pages do not show. A stream is the same for all its listeners.
    """

    def __init__(
        self,
        store: QueryStore,
        configured_fleets: Callable[[], frozenset[str]],
        clock: Callable[[], float] = time.monotonic,
        redact_event: Callable[[Event], Event] = lambda event: event,
    ) -> None:
        self._store = store
        self._configured_fleets = configured_fleets
        self._clock = clock
        self._redact_event = redact_event
        self._loading = asyncio.Lock()
        self._overview: Overview | None = None
        self._fresh_until = float("-inf")
        # Something changed since the last load began.
        self._is_stale = False
        # The time spent on loading, divided by LOAD_SHARE, is used up at this moment.
        self._loading_spent_until = float("-inf")
        self._listeners: set[StreamListener] = set()
        self._publisher: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        # By id, in the order in which they were found. `_finding` serialises the searches.
        self._found: OrderedDict[int, Event] = OrderedDict()
        self._last_event_id = 0
        self._finding = asyncio.Lock()
        self._is_closed = False

    @property
    def listener_count(self) -> int:
        return len(self._listeners)

    @property
    def is_publishing(self) -> bool:
        return self._publisher is not None

    async def overview(self) -> Overview:
        """Raises DatabaseUnavailable."""
        if self._is_load_due():
            async with self._loading:  # callers that waited here use what the first one loaded
                if self._is_load_due():
                    await self._load()
        assert self._overview is not None  # noqa: S101
        return self._overview

    def _is_load_due(self) -> bool:
        now = self._clock()
        return self._overview is None or now >= self._fresh_until or (self._is_stale and self._rest_s(now) <= 0)

    def _rest_s(self, now: float) -> float:
        """Time until a change may cause the next load."""
        return self._loading_spent_until - LOAD_CREDIT_S - now

    def _account_for_load(self, started: float) -> None:
        spent_s = self._clock() - started
        self._loading_spent_until = max(self._loading_spent_until, started) + spent_s / LOAD_SHARE

    async def _load(self) -> None:
        started, self._is_stale = self._clock(), False
        try:
            self._overview = await self._store.overview(self._configured_fleets())
        except BaseException:
            self._is_stale = True
            raise
        self._account_for_load(started)
        ended = self._clock()
        self._fresh_until = max(ended + FRESH_S, started + (ended - started) / LOAD_SHARE)

    def mark_changed(self) -> None:
        """Reload the overview soon: this server has changed something."""
        self._is_stale = True
        self._changed.set()

    async def listen(
        self,
        last_event_id: int | None,
        caller: str = "",
        is_still_allowed: Callable[[], Awaitable[bool]] | None = None,
    ) -> "StreamListener":
        """Open a stream. Raises ApiError above the limits. `is_still_allowed` is asked with every keep-alive."""
        self._check_limits(caller)
        overview = await self.overview()
        async with self._finding:  # events found from here on are sent to the new listener
            if self._publisher is None:
                await self._resume_finding(overview.last_event_id)
            if last_event_id is None:
                missed = [event for event in self._found.values() if event.id > overview.last_event_id]
            else:
                missed = await self._missed_events(last_event_id)
            self._check_limits(caller)  # other listeners came meanwhile
            listener = StreamListener(caller, is_still_allowed, self._listeners.discard, missed, overview)
            self._listeners.add(listener)
            if self._publisher is None:
                self._publisher = asyncio.create_task(self._publish())
        return listener

    async def _missed_events(self, last_event_id: int) -> list[Event]:
        await self._find_events()  # the listener may come from another server that searched more recently
        found = list(self._found.values())
        if last_event_id in self._found:
            return found[list(self._found).index(last_event_id) + 1 :]
        older = await self._events_after(last_event_id, MAX_EVENTS)
        # Events within the overlap are left out: they are in `found`, or the next search sends them to all listeners.
        older = [e for e in older if e.id <= self._last_event_id - OVERLAP and e.id not in self._found]
        return older + [event for event in found if event.id > last_event_id]

    async def _events_after(self, event_id: int, limit: int) -> list[Event]:
        return list(map(self._redact_event, await self._store.events_after(event_id, limit)))

    def _check_limits(self, caller: str) -> None:
        if self._is_closed or len(self._listeners) >= MAX_LISTENERS:
            raise unavailable(f"{MAX_LISTENERS} streams are open: retry later, or poll /api/v1/overview")
        if sum(listener.caller == caller for listener in self._listeners) >= MAX_LISTENERS_PER_CALLER:
            raise unavailable(f"you have {MAX_LISTENERS_PER_CALLER} open streams: close one")

    async def close(self) -> None:
        """Disconnect all listeners and accept no others."""
        self._is_closed = True
        for listener in list(self._listeners):
            listener.end()
        if self._publisher is not None:
            self._publisher.cancel()
            await asyncio.gather(self._publisher, return_exceptions=True)

    async def _publish(self) -> None:
        published_until = float("-inf")
        while self._listeners:
            started, rest_s = self._clock(), 0.0
            self._changed.clear()
            try:
                async with self._finding:
                    await self._find_events()
                self._account_for_load(started)
                overview = await self.overview()
                if self._fresh_until > published_until:
                    self._send(_overview_message(overview))
                    published_until = self._fresh_until
                rest_s = max(0.0, self._rest_s(self._clock()))
            except WindlassError as error:
                log.warning("update event stream failed", error=str(error))
                self._send(_message("unavailable", json.dumps({"detail": "database unavailable; retrying"})))
            except Exception:
                # A defect. The loop must go on, or listeners would never receive anything again.
                log.exception("update event stream failed")
            await asyncio.sleep(rest_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S - rest_s):
                    await self._changed.wait()
        self._publisher = None

    async def _resume_finding(self, last_event_id: int) -> None:
        """After a time without listeners, load the events since then, unless there are too many."""
        if abs(last_event_id - self._last_event_id) > MAX_EVENTS:
            self._found.clear()
            self._last_event_id = last_event_id
        await self._find_events()

    async def _find_events(self) -> None:
        """Load new events and send them to the listeners. The caller holds `_finding`."""
        found = await self._events_after(self._last_event_id - OVERLAP, OVERLAP + MAX_EVENTS)
        new = [event for event in found if event.id not in self._found]
        if not new:
            return
        self._found.update((event.id, event) for event in new)
        self._last_event_id = max(self._last_event_id, *(event.id for event in new))
        while len(self._found) > MAX_KEPT_EVENTS:
            self._found.popitem(last=False)
        self._is_stale = True
        self._send("".join(map(_event_message, new)))

    def _send(self, message: str) -> None:
        for listener in list(self._listeners):
            listener.send(message)


class StreamListener:
    """One open stream: an iterator over messages that the feed puts in.

    It begins with the missed events and the overview. `on_end` is called as soon as the stream ends, whatever happens
    to its connection after that.
    """

    def __init__(
        self,
        caller: str,
        is_still_allowed: Callable[[], Awaitable[bool]] | None,
        on_end: Callable[["StreamListener"], None],
        missed: Sequence[Event],
        overview: Overview,
    ) -> None:
        self.caller = caller
        self._is_still_allowed = is_still_allowed
        self._on_end = on_end
        self._messages: asyncio.Queue[str | None] = asyncio.Queue(MAX_BACKLOG)
        self._first = f"retry: {RECONNECT_MS}\n\n{''.join(map(_event_message, missed))}{_overview_message(overview)}"
        self._checked_at = time.monotonic()
        self.is_dropped = False
        # Cancels the response that is being sent. Set by EventStream.
        self.cancel_response: Callable[[], object] = lambda: None

    def send(self, message: str) -> None:
        try:
            self._messages.put_nowait(message)
        except asyncio.QueueFull:
            self._drop()

    def end(self) -> None:
        """End the stream after the messages that are already queued."""
        self._on_end(self)
        try:
            self._messages.put_nowait(None)
        except asyncio.QueueFull:
            self._drop()

    def _drop(self) -> None:
        """Disconnect a listener that fell behind. Its client may read nothing at all, so the response is cancelled."""
        self._on_end(self)
        self.is_dropped = True
        self.cancel_response()

    async def messages(self) -> AsyncIterator[str]:
        try:
            yield self._first
            while (message := await self._next()) is not None:
                yield message
        finally:
            self._on_end(self)

    async def _next(self) -> str | None:
        """The next message, or a keep-alive. None at the end."""
        if self.is_dropped:
            return None
        if time.monotonic() >= self._checked_at + KEEP_ALIVE_S:
            self._checked_at = time.monotonic()
            if self._is_still_allowed is not None and not await self._is_still_allowed():
                return None
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                return await self._messages.get()
        except TimeoutError:
            return ": keep-alive\n\n"


class EventStream(StreamingResponse):
    """The response that sends a listener's messages. Cancelled when the listener is dropped, even while sending."""

    def __init__(self, listener: StreamListener) -> None:
        super().__init__(listener.messages(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(super().__call__(scope, receive, send))
        self._listener.cancel_response = sending.cancel
        try:
            await sending
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not self._listener.is_dropped or (current is not None and current.cancelling()):
                raise
        finally:
            sending.cancel()


def _message(kind: str, data: str, event_id: int | None = None) -> str:
    return f"{f'id: {event_id}' + chr(10) if event_id is not None else ''}event: {kind}\ndata: {data}\n\n"


def _overview_message(overview: Overview) -> str:
    return _message("overview", masked_json(lambda shown: _OVERVIEW.dump_json(shown).decode(), overview))


def _event_message(event: Event) -> str:
    return _message("event", masked_json(lambda shown: _EVENT.dump_json(shown).decode(), event), event.id)
