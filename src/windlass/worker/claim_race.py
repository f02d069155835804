"""Decides how long an idle worker waits before it claims after a notification, so that the preferred one wins.

All idle workers of a queue hear of a new task at the same moment. Which one is preferred depends on the billing:

- By the second: the most recently used. A worker whose last wake-up brought a task claims at once. A worker that woke
  up for nothing, because another was faster, waits a little longer each time, up to MAX_DELAY_S.
- By the hour: the one with most billed time left. The reply to a heartbeat says which share of MAX_DELAY_S to wait: 0
  for the preferred worker. A worker that gets tasks in spite of its delay halves it until it loses a race or the next
  reply arrives, because the preferred workers are busy.

Tasks therefore go to few workers, and the others become idle for long enough to drain. No coordinator is asked on the
way to a task. The only idle worker of a queue never waits; busy workers claim with the result of their last task and
are not delayed at all.
"""

# Longer than the spread of notifications over a local network, shorter than people notice.
STEP_S = 0.002
MAX_DELAY_S = 0.02


class ClaimRace:
    def __init__(self) -> None:
        self._lost = 0
        self._is_race = False
        # Share from the reply to the last heartbeat. None: the most recently used worker is preferred.
        self._share: float | None = None
        self._won = 0

    @property
    def delay_s(self) -> float:
        """How long to wait before the claim that follows a notification."""
        if self._share is not None:
            delay_s = self._share * MAX_DELAY_S / 2.0**self._won
            return delay_s if delay_s >= STEP_S / 2 else 0.0
        return min(self._lost * STEP_S, MAX_DELAY_S)

    def set_share(self, share: float | None) -> None:
        """The reply to a heartbeat: which share of the longest delay to wait."""
        self._share = min(max(share, 0.0), 1.0) if share is not None else None
        self._won = 0

    def notified(self) -> None:
        """The next claim follows a notification: other workers may be faster."""
        self._is_race = True

    def claimed(self, count: int, *, is_busy: bool) -> None:
        """A claim was answered with this many tasks. A busy worker that gets no further task has lost nothing."""
        if count:
            self._lost = 0
            self._won = min(self._won + 1, 10) if self._is_race else self._won
        elif self._is_race and not is_busy:
            self._lost = min(self._lost + 1, round(MAX_DELAY_S / STEP_S))
            self._won = 0
        self._is_race = False
