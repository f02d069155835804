"""Drain requests of a worker, and their deadline."""

import asyncio
import contextlib
import contextvars
import time
from dataclasses import dataclass, field

import structlog

FOREVER = float("inf")
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class ShutdownState:
    """Drain requests. `changed` wakes the session's loop: after a request, an ended attempt or a new status."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    # Exit without waiting for anything.
    is_urgent: asyncio.Event = field(default_factory=asyncio.Event)
    is_draining: bool = False
    deadline: float = FOREVER
    # The log context of the current worker. Signal handlers run outside of it.
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    def drain(self, reason: str, limit_s: float) -> None:
        if not self.is_draining or limit_s == 0:
            log.info("drain worker", reason=reason, limit_s=limit_s)
            self.is_draining = True
            self.deadline = time.monotonic() + limit_s
            self.changed.set()
        if limit_s == 0:
            self.is_urgent.set()

    async def pause(self, seconds: float) -> None:
        """Wait, but not longer than until exit is urgent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.is_urgent.wait()
