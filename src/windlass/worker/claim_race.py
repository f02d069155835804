"""Decides how long an idle worker waits before it claims after a notification, so that the most recently used one wins.

All idle workers of a queue hear of a new task at the same moment. A worker whose last wake-up brought a task claims at
once. A worker that woke up for nothing, because another was faster, waits a little longer each time, up to
MAX_DELAY_S. Tasks therefore go to the workers that worked last, and the others become idle for long enough to drain.
No coordinator is asked. The only idle worker of a queue never loses, so it never waits; busy workers claim with the
result of their last task and are not delayed at all.
"""

# Longer than the spread of notifications over a local network, shorter than people notice.
STEP_S = 0.002
MAX_DELAY_S = 0.02


class ClaimRace:
    def __init__(self) -> None:
        self._lost = 0
        self._is_race = False

    @property
    def delay_s(self) -> float:
        """How long to wait before the claim that follows a notification."""
        return min(self._lost * STEP_S, MAX_DELAY_S)

    def notified(self) -> None:
        """The next claim follows a notification: other workers may be faster."""
        self._is_race = True

    def claimed(self, count: int, *, is_busy: bool) -> None:
        """A claim was answered with this many tasks. A busy worker that gets no further task has lost nothing."""
        if count:
            self._lost = 0
        elif self._is_race and not is_busy:
            self._lost = min(self._lost + 1, round(MAX_DELAY_S / STEP_S))
        self._is_race = False
