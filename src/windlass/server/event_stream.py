"""How everything stands, looked up once for all who want to know, and told to those who listen.

Asking is shared: whoever asks gets what is at most a second old, or four times as old as it takes to look it up, and
what was changed here is looked at as soon as that allows. So no number of callers, nor of changes, takes more than a
quarter of one connection. Listeners are told of every event, and how things stand, while there are any; without them
nothing is looked up. One that does not keep up, or may not look any more, is let go. It may come again: it names the
last event it saw and misses none that are still kept.

An event may become visible after later ones, when its transaction took longer. So all listeners are told in the order
in which events were found here, which is mostly that of their ids, and the last event that one saw stands for all that
were found before it. Another server may have found them in another order: whoever goes from one to the other, or comes
back after a restart, is not told of an event that became visible meanwhile and bears an older id.
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
from windlass.model.overview import Overview
from windlass.ports.queries import QueryStore
from windlass.server.errors import unavailable

# What is younger than this is good enough.
FRESH_S = 1.0
# And at most this share of the time is spent on looking it up; so much of it may be saved up, so that what a person
# does now and then is seen at once.
LOOK_UP_SHARE = 0.25
SAVED_UP_S = 5.0
# From one look for events to the next.
LOOK_INTERVAL_S = 0.5
# A connection without a word for this long is cut by proxies.
BEAT_S = 15.0
# A browser comes back after this time.
RETRY_MS = 2_000
# Listeners at once: each holds a connection and is written to every second. And of one caller, so that nobody keeps the
# others out: more tabs than a person looks at.
MAX_LISTENERS = 200
MAX_LISTENERS_OF_CALLER = 20
# Messages that a listener may be behind.
MAX_BEHIND = 64
# Events looked up at once; whoever missed more looks at the list.
MAX_EVENTS = 500
# An event may become visible after later ones, by as many as are being written at once: so many are looked at again.
LOOK_BACK = 200
# Events remembered, in the order in which they were found: all that a look may find again (twice LOOK_BACK), and what
# somebody misses who comes back soon.
MAX_REMEMBERED = MAX_EVENTS + LOOK_BACK
log = structlog.get_logger(__name__)

_OVERVIEW = TypeAdapter(Overview)
_EVENT = TypeAdapter(Event)


class OverviewFeed:
    """`configured`: the fleets that are run here."""

    def __init__(
        self,
        reading: QueryStore,
        configured: Callable[[], frozenset[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reading = reading
        self._configured = configured
        self._clock = clock
        self._looking = asyncio.Lock()
        self._overview: Overview | None = None
        self._fresh_until = float("-inf")
        # Something changed since the look began; and until when the time spent on looking is paid for.
        self._is_stale = False
        self._paid_until = float("-inf")
        self._listeners: set[StreamListener] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._poked = asyncio.Event()
        # By id, in the order in which they were found; looked for by one at a time.
        self._found: OrderedDict[int, Event] = OrderedDict()
        self._last_event_id = 0
        self._finding = asyncio.Lock()
        self._is_closed = False

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    async def overview(self) -> Overview:
        """Raises DatabaseUnavailable."""
        if self._is_due():
            async with self._looking:  # whoever waited here finds what the first one found
                if self._is_due():
                    await self._look()
        assert self._overview is not None  # noqa: S101
        return self._overview

    def _is_due(self) -> bool:
        now = self._clock()
        return self._overview is None or now >= self._fresh_until or (self._is_stale and self._rest_s(now) <= 0)

    def _rest_s(self, now: float) -> float:
        """For how long nothing is to be looked up only because something changed."""
        return self._paid_until - SAVED_UP_S - now

    def _spend(self, started: float) -> None:
        ended = self._clock()
        self._paid_until = max(self._paid_until, started) + (ended - started) / LOOK_UP_SHARE

    async def _look(self) -> None:
        started, self._is_stale = self._clock(), False
        try:
            self._overview = await self._reading.overview(self._configured())
        except BaseException:
            self._is_stale = True  # as far as anybody knows
            raise
        self._spend(started)
        ended = self._clock()
        self._fresh_until = max(ended + FRESH_S, started + (ended - started) / LOOK_UP_SHARE)

    def poke(self) -> None:
        """Something was changed: what is known of it is old."""
        self._is_stale = True
        self._poked.set()

    async def listen(
        self, last_event_id: int | None, caller: str = "", may_look: Callable[[], Awaitable[bool]] | None = None
    ) -> "StreamListener":
        """Server-sent events, until the listener is let go. Raises an ApiError if there are too many.

        `may_look` is asked now and then: who may not look any more is told nothing more.
        """
        self._check_room(caller)
        overview = await self.overview()
        async with self._finding:  # from here on nothing is found of which it is not told
            if self._watcher is None:
                await self._resume_finding(overview.last_event_id)
            if last_event_id is None:
                missed = [event for event in self._found.values() if event.id > overview.last_event_id]
            else:
                missed = await self._missed(last_event_id)
            self._check_room(caller)  # others came meanwhile
            listener = StreamListener(caller, may_look, self._listeners.discard, missed, overview)
            self._listeners.add(listener)
            if self._watcher is None:
                self._watcher = asyncio.create_task(self._watch())
        return listener

    async def _missed(self, last_event_id: int) -> list[Event]:
        await self._find_events()  # it may come from another server, that has looked since we did
        found = list(self._found.values())
        if last_event_id in self._found:
            return found[list(self._found).index(last_event_id) + 1 :]
        older = await self._reading.events_after(last_event_id, MAX_EVENTS)
        # What a look finds again is left to it: it is remembered, or everybody will be told.
        beyond = [e for e in older if e.id <= self._last_event_id - LOOK_BACK and e.id not in self._found]
        return beyond + [event for event in found if event.id > last_event_id]

    def _check_room(self, caller: str) -> None:
        if self._is_closed or len(self._listeners) >= MAX_LISTENERS:
            raise unavailable(f"{MAX_LISTENERS} listen already: ask again, or look at /api/v1/overview.")
        if sum(listener.caller == caller for listener in self._listeners) >= MAX_LISTENERS_OF_CALLER:
            raise unavailable(f"you listen {MAX_LISTENERS_OF_CALLER} times already: end one of them.")

    async def close(self) -> None:
        """Everybody who listens is let go, and nobody listens any more."""
        self._is_closed = True
        for listener in list(self._listeners):
            listener.end()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    async def _watch(self) -> None:
        told_until = float("-inf")
        while self._listeners:
            started, rest_s = self._clock(), 0.0
            self._poked.clear()
            try:
                async with self._finding:
                    await self._find_events()
                self._spend(started)
                overview = await self.overview()
                if self._fresh_until > told_until:
                    self._tell(_overview_message(overview))
                    told_until = self._fresh_until
                rest_s = max(0.0, self._rest_s(self._clock()))
            except WindlassError as error:
                log.warning("listeners are told nothing", error=str(error))
                self._tell(_message("trouble", json.dumps({"detail": "the database does not answer; trying again."})))
            except Exception:
                # Whoever listens has a right to hear more than nothing for ever.
                log.exception("looking for news failed")
            await asyncio.sleep(rest_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_INTERVAL_S - rest_s):
                    await self._poked.wait()
        self._watcher = None

    async def _resume_finding(self, last_event_id: int) -> None:
        """What happened while nobody listened is remembered, if it is not too much, and news to nobody who is new."""
        if abs(last_event_id - self._last_event_id) > MAX_EVENTS:
            self._found.clear()
            self._last_event_id = last_event_id
        await self._find_events()

    async def _find_events(self) -> None:
        """And tell everybody. For whoever holds `_finding`."""
        found = await self._reading.events_after(self._last_event_id - LOOK_BACK, LOOK_BACK + MAX_EVENTS)
        new = [event for event in found if event.id not in self._found]
        if not new:
            return
        self._found.update((event.id, event) for event in new)
        self._last_event_id = max(self._last_event_id, *(event.id for event in new))
        while len(self._found) > MAX_REMEMBERED:
            self._found.popitem(last=False)
        self._is_stale = True
        self._tell("".join(map(_event_message, new)))

    def _tell(self, message: str) -> None:
        for listener in list(self._listeners):
            listener.tell(message)


class StreamListener:
    """One who listens: an iterator of messages, that others fill."""

    def __init__(
        self,
        caller: str,
        may_look: Callable[[], Awaitable[bool]] | None,
        on_end: Callable[["StreamListener"], None],
        missed: Sequence[Event],
        overview: Overview,
    ) -> None:
        """It first hears of what it missed, and how things stand. `on_end` is told as soon as it is over, whatever its
        connection does then."""
        self.caller = caller
        self._may_look = may_look
        self._on_end = on_end
        self._messages: asyncio.Queue[str | None] = asyncio.Queue(MAX_BEHIND)
        self._first = f"retry: {RETRY_MS}\n\n{''.join(map(_event_message, missed))}{_overview_message(overview)}"
        self._looked_at = time.monotonic()
        self.is_let_go = False
        # Breaks off what is being sent; set by whoever sends.
        self.break_off: Callable[[], object] = lambda: None

    def tell(self, message: str) -> None:
        try:
            self._messages.put_nowait(message)
        except asyncio.QueueFull:
            self._let_go()

    def end(self) -> None:
        """What it has not heard yet it hears; then there is an end."""
        self._on_end(self)
        try:
            self._messages.put_nowait(None)
        except asyncio.QueueFull:
            self._let_go()

    def _let_go(self) -> None:
        """It does not keep up: perhaps nobody reads at the other end, and nothing that is sent would ever arrive."""
        self._on_end(self)
        self.is_let_go = True
        self.break_off()

    async def messages(self) -> AsyncIterator[str]:
        try:
            yield self._first
            while (message := await self._next()) is not None:
                yield message
        finally:
            self._on_end(self)

    async def _next(self) -> str | None:
        """The next message, a sign of life if there is none for long, None at the end."""
        if self.is_let_go:
            return None
        if time.monotonic() >= self._looked_at + BEAT_S:
            self._looked_at = time.monotonic()
            if self._may_look is not None and not await self._may_look():
                return None
        try:
            async with asyncio.timeout(BEAT_S):
                return await self._messages.get()
        except TimeoutError:
            return ": still here\n\n"


class EventStream(StreamingResponse):
    """What a listener hears, as an answer: broken off when the listener is let go, also in the middle of sending."""

    def __init__(self, listener: StreamListener) -> None:
        super().__init__(listener.messages(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(super().__call__(scope, receive, send))
        self._listener.break_off = sending.cancel
        try:
            await sending
        except asyncio.CancelledError:
            ourselves = asyncio.current_task()
            if not self._listener.is_let_go or (ourselves is not None and ourselves.cancelling()):
                raise
        finally:
            sending.cancel()


def _message(kind: str, data: str, event_id: int | None = None) -> str:
    return f"{f'id: {event_id}' + chr(10) if event_id is not None else ''}event: {kind}\ndata: {data}\n\n"


def _overview_message(overview: Overview) -> str:
    return _message("overview", _OVERVIEW.dump_json(overview).decode())


def _event_message(event: Event) -> str:
    return _message("event", _EVENT.dump_json(event).decode(), event.id)
