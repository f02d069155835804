"""An event loop whose clock jumps to the next timer when nothing is ready.

Deterministic: nothing in it depends on the world's time, and callbacks run in the order in which they became ready.
When nothing is ready and no timer is set, everybody waits for somebody else: Deadlock. When time stands still however
often the loop turns, somebody spins: Livelock. It does no input or output.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

T = TypeVar("T")
# When virtual time begins. Any moment will do; this one is easy to tell from the world's.
EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
# Turns of the loop without time going by. A step of a simulation takes a few dozen.
MAX_IDLE_TURNS = 50_000


class Deadlock(RuntimeError):
    """Everybody waits and nobody will ever wake anybody."""


class Livelock(RuntimeError):
    """Somebody is always ready, and time does not go by."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumper = _Jumper()
        super().__init__(self._jumper)
        # Timers less than this apart are due together; below a microsecond no clock of ours can tell them apart.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._jumper.now


class _Jumper(selectors.SelectSelector):
    """Waits by turning the clock forward."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._idle_turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"at {self.now:.3f} s everybody waits and no timer is set")
        if timeout > 0:
            self.now += timeout
            self._idle_turns = 0
        else:
            self._idle_turns += 1
            if self._idle_turns > MAX_IDLE_TURNS:
                raise Livelock(f"at {self.now:.3f} s somebody spins: time does not go by")
        return []


def to_datetime(at: float) -> datetime:
    """A time of the loop's clock as everybody else knows it, in whole microseconds."""
    return EPOCH + timedelta(seconds=at)


def virtual_now() -> datetime:
    return to_datetime(asyncio.get_running_loop().time())


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run it to its end in virtual time; whatever it left running is cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
