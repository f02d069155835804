"""How everything stands, looked up once for all who want to know, and told to those who listen.

Asking is shared: whoever asks gets what is at most a second old, or ten times as old as it takes to look it up, so that
no number of callers takes more than a tenth of one connection. Listeners are told of every event, and how things stand,
while there are any; without them nothing is looked up. One that does not keep up is let go and may come again: it names
the last event it saw and misses none that are still kept.
"""

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

import structlog
from pydantic import TypeAdapter

from windlass.api.errors import unavailable
from windlass.model.errors import WindlassError
from windlass.model.event import Event
from windlass.ports.reading import Overview, Reading

# What is younger than this is good enough.
FRESH_S = 1.0
# And at most this share of the time is spent on looking it up.
LOOK_UP_SHARE = 0.1
# From one look for events to the next.
LOOK_INTERVAL_S = 0.5
# A connection without a word for this long is cut by proxies.
BEAT_S = 15.0
# A browser comes back after this time.
RETRY_MS = 2_000
# Listeners at once: each holds a connection and is written to every second.
MAX_LISTENERS = 200
# Messages that a listener may be behind.
MAX_BEHIND = 64
# Events told at once; whoever missed more looks at the list.
MAX_EVENTS = 500
# An event may become visible after later ones, by as many as are being written at once: so many are looked at again.
LOOK_BACK = 200
log = structlog.get_logger(__name__)

_OVERVIEW = TypeAdapter(Overview)
_EVENT = TypeAdapter(Event)


class Live:
    """`configured`: the fleets that are run here."""

    def __init__(
        self,
        reading: Reading,
        configured: Callable[[], frozenset[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reading = reading
        self._configured = configured
        self._clock = clock
        self._looking = asyncio.Lock()
        self._overview: Overview | None = None
        self._fresh_until = float("-inf")
        self._listeners: set[_Listener] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._poked = asyncio.Event()
        self._told: OrderedDict[int, None] = OrderedDict()
        self._last_event_id = 0
        self._is_closed = False

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    async def overview(self) -> Overview:
        """Raises DatabaseUnavailable."""
        if self._overview is None or self._clock() >= self._fresh_until:
            async with self._looking:  # whoever waited here finds what the first one found
                if self._overview is None or self._clock() >= self._fresh_until:
                    await self._look()
        assert self._overview is not None  # noqa: S101
        return self._overview

    async def _look(self) -> None:
        started = self._clock()
        self._overview = await self._reading.overview(self._configured())
        took_s = self._clock() - started
        self._fresh_until = self._clock() + max(FRESH_S, took_s / LOOK_UP_SHARE)

    def poke(self) -> None:
        """Something was changed: what is known of it is old."""
        self._fresh_until = float("-inf")
        self._poked.set()

    async def listen(self, last_event_id: int | None) -> AsyncIterator[str]:
        """Server-sent events, until the listener is let go. Raises an ApiError if there are too many."""
        if self._is_closed or len(self._listeners) >= MAX_LISTENERS:
            raise unavailable(f"{MAX_LISTENERS} listen already: ask again, or look at /api/v1/overview.")
        overview = await self.overview()
        missed = []
        if last_event_id is not None:
            missed = await self._reading.events_after(last_event_id, MAX_EVENTS)
        listener = _Listener()
        self._listeners.add(listener)
        if self._watcher is None:
            self._last_event_id = overview.last_event_id
            self._watcher = asyncio.create_task(self._watch())
        return self._messages(listener, [*map(_event_message, missed), _overview_message(overview)])

    async def _messages(self, listener: "_Listener", first: list[str]) -> AsyncIterator[str]:
        try:
            yield f"retry: {RETRY_MS}\n\n{''.join(first)}"
            while (message := await listener.next()) is not None:
                yield message
        finally:
            self._listeners.discard(listener)

    async def close(self) -> None:
        """Everybody who listens is let go, and nobody listens any more."""
        self._is_closed = True
        for listener in self._listeners:
            listener.let_go()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    async def _watch(self) -> None:
        told_until = float("-inf")
        while self._listeners:
            try:
                events = await self._new_events()
                if events:
                    self._fresh_until = float("-inf")
                    self._tell("".join(map(_event_message, events)))
                overview = await self.overview()
                if self._fresh_until > told_until:
                    self._tell(_overview_message(overview))
                    told_until = self._fresh_until
            except WindlassError as error:
                log.warning("listeners are told nothing", error=str(error))
                self._tell(_message("trouble", json.dumps({"detail": "the database does not answer; trying again."})))
            except Exception:
                # Whoever listens has a right to hear more than nothing for ever.
                log.exception("looking for news failed")
            self._poked.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poked.wait(), LOOK_INTERVAL_S)
        self._watcher = None

    async def _new_events(self) -> list[Event]:
        found = await self._reading.events_after(self._last_event_id - LOOK_BACK, LOOK_BACK + MAX_EVENTS)
        is_first = not self._told
        new = [event for event in found if event.id not in self._told]
        if is_first:
            # What was there before anybody listened is no news.
            for event in found:
                if event.id <= self._last_event_id:
                    self._told[event.id] = None
            new = [event for event in found if event.id > self._last_event_id]
        for event in new:
            self._told[event.id] = None
        self._last_event_id = max([self._last_event_id, *(event.id for event in new)])
        while len(self._told) > 2 * (LOOK_BACK + MAX_EVENTS):
            self._told.popitem(last=False)
        return new

    def _tell(self, message: str) -> None:
        for listener in self._listeners:
            listener.tell(message)


class _Listener:
    def __init__(self) -> None:
        self._messages: asyncio.Queue[str | None] = asyncio.Queue(MAX_BEHIND)
        self._is_let_go = False

    def tell(self, message: str) -> None:
        try:
            self._messages.put_nowait(message)
        except asyncio.QueueFull:
            self.let_go()

    def let_go(self) -> None:
        self._is_let_go = True
        with contextlib.suppress(asyncio.QueueFull):
            self._messages.put_nowait(None)

    async def next(self) -> str | None:
        """The next message, a sign of life if there is none for long, None at the end."""
        if self._is_let_go:
            return None
        try:
            return await asyncio.wait_for(self._messages.get(), BEAT_S)
        except TimeoutError:
            return ": still here\n\n"


def _message(kind: str, data: str, event_id: int | None = None) -> str:
    return f"{f'id: {event_id}' + chr(10) if event_id is not None else ''}event: {kind}\ndata: {data}\n\n"


def _overview_message(overview: Overview) -> str:
    return _message("overview", _OVERVIEW.dump_json(overview).decode())


def _event_message(event: Event) -> str:
    return _message("event", _EVENT.dump_json(event).decode(), event.id)
