"""SIGTERM and Ctrl-C for programs that run until they are stopped, and SIGHUP for one that must not end halfway."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from windlass.model.worker import SAME_SIGNAL_S

_Result = TypeVar("_Result")


async def run_until_terminated(work: Coroutine[Any, Any, _Result]) -> _Result:
    """SIGTERM cancels the work as Ctrl-C does, so that it can clean up, for example stop an embedded server."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


def survive_hangup() -> None:
    """SIGHUP, also from a terminal that was closed, ends nothing: the work of this program is bounded.

    Python's handler does nothing. The programs that this one starts do not inherit it, unlike an ignored signal.
    """
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: None)


def on_stop_signals(stop: Callable[[], None]) -> None:
    """Call `stop` at the first signal, and at each one that comes SAME_SIGNAL_S or more after the first.

    One Ctrl-C may arrive several times within that time: from the terminal, and forwarded by a parent process.
    """
    loop = asyncio.get_running_loop()
    repeats_until: float | None = None

    def on_signal() -> None:
        nonlocal repeats_until
        if repeats_until is None:
            repeats_until = loop.time() + SAME_SIGNAL_S
        elif loop.time() < repeats_until:
            return
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
