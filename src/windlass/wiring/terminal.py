"""What SIGHUP means: a reload, or the end of the terminal in which the program runs.

Closing a terminal sends SIGHUP, as `windlass reload` does. Without its terminal the program would run on unseen, with
the machines it pays for, so it then stops as with SIGTERM. A program that had no terminal (a service) or was started
with nohup reloads.
"""

import os
import signal

# The kernel may send the signal just before it takes the terminal away: ask again for this long.
SETTLE_S = 0.5


class ControllingTerminal:
    """Created before a handler for SIGHUP is set."""

    def __init__(self) -> None:
        self.is_watched = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

    @property
    def is_gone(self) -> bool:
        """Whether there was one at the start, and it was closed."""
        return self.is_watched and not _has_terminal()


def _has_terminal() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    os.close(terminal)
    return True
