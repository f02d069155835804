"""SIGTERM and Ctrl-C during a simulation, which occupies the main thread and its event loop until it is complete."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def ending_at_signals() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the code in this context at once.

    The handlers of the event loop, which are restored after it, would run only when a simulation is complete.
    """
    handlers = {signal.SIGTERM: _on_sigterm, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_sigterm(_number: int, _frame: FrameType | None) -> NoReturn:
    # What a command raises whose task SIGTERM has cancelled: wiring/signals.py.
    raise asyncio.CancelledError
