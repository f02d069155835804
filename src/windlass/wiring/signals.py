"""What SIGTERM and Ctrl-C mean to programs that run until they are told to stop."""

import asyncio
import signal
from collections.abc import Callable

from windlass.model.worker import SAME_SIGNAL_S


def on_stop_signals(stop: Callable[[], None]) -> None:
    """From now on it is called at the first, and at each that comes later than the first's echo."""
    loop = asyncio.get_running_loop()
    echoes_until: float | None = None

    def heed() -> None:
        nonlocal echoes_until
        if echoes_until is None:
            echoes_until = loop.time() + SAME_SIGNAL_S
        elif loop.time() < echoes_until:
            return
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, heed)
