"""An event loop whose clock jumps to the next timer when nothing is ready.

It is deterministic: nothing depends on real time, and callbacks run in the order in which they became ready.
It raises Deadlock when nothing is ready and no timer is set, and Livelock when callbacks keep running while time stands
still. It does no I/O.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

T = TypeVar("T")
# Virtual time starts here. The value is arbitrary; it is in the future so that it is not mistaken for real time.
EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
# Iterations of the loop at one instant of virtual time. A step of a simulation takes a few dozen.
MAX_ITERATIONS_PER_INSTANT = 50_000


class Deadlock(RuntimeError):
    """Every task waits, and no timer will wake one."""


class Livelock(RuntimeError):
    """Tasks keep running while virtual time stands still."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._selector_clock = _SelectorClock()
        super().__init__(self._selector_clock)
        # Timers closer than this are due together. Datetimes have a resolution of one microsecond.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._selector_clock.now


class _SelectorClock(selectors.SelectSelector):
    """Advances the clock by the timeout instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._iterations = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"at {self.now:.3f} s every task waits and no timer is set")
        if timeout > 0:
            self.now += timeout
            self._iterations = 0
        else:
            self._iterations += 1
            if self._iterations > MAX_ITERATIONS_PER_INSTANT:
                raise Livelock(f"at {self.now:.3f} s tasks ran {self._iterations} times without waiting")
        return []


def to_datetime(at: float) -> datetime:
    """The loop's time as a datetime, in whole microseconds."""
    return EPOCH + timedelta(seconds=at)


def virtual_now() -> datetime:
    return to_datetime(asyncio.get_running_loop().time())


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, then cancel the tasks it left running."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
