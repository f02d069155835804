"""Decides how long an idle worker waits before it claims after a notification, so that the preferred one wins.

All idle workers of a queue are notified of a new task at once. Which one is preferred depends on the billing:

- By the second: the most recently used. A worker whose last wake-up brought a task claims at once. A worker that woke
  up for nothing, because another was faster, waits a little longer each time, up to MAX_DELAY_S.
- By the hour: the one with most billed time left. The reply to a heartbeat says which share of MAX_DELAY_S to wait: 0
  for the preferred worker. A worker that gets tasks despite its delay halves it until it loses a race or the next
  reply arrives, because the preferred workers are busy.

A worker that runs a task and has a free slot never waits: its machine cannot be deleted anyway. Where hours are billed,
idle workers that woke up for nothing wait MAX_STEPS_BY_HOUR steps more, so that such workers are faster.

Tasks therefore go to few workers, and the others become idle for long enough to drain. No coordinator is asked on the
way to a task. The only idle worker of a queue never waits; busy workers claim with the result of their last task and
are not delayed at all.
"""

# Longer than the spread of notifications over a local network, shorter than people notice.
STEP_S = 0.002
MAX_DELAY_S = 0.02
# Few, so that idle workers that all lost keep their order by billed time.
MAX_STEPS_BY_HOUR = 3


class ClaimRace:
    def __init__(self) -> None:
        self._lost = 0
        self._is_race = False
        # Share from the reply to the last heartbeat. None: the most recently used worker is preferred.
        self._share: float | None = None
        # Races that an idle worker won since it lost one.
        self._won = 0

    def delay_s(self, *, is_busy: bool) -> float:
        """How long to wait before the claim that follows a notification. `is_busy`: it runs a task."""
        if is_busy:
            return 0.0
        delay_s = self._lost * STEP_S
        if self._share is not None:
            delay_s = min(delay_s + self._share * MAX_DELAY_S / 2.0**self._won, MAX_DELAY_S)
        return delay_s if delay_s >= STEP_S / 2 else 0.0

    def set_share(self, share: float | None) -> None:
        """The reply to a heartbeat: which share of the longest delay to wait."""
        self._share = min(max(share, 0.0), 1.0) if share is not None else None
        self._won = 0

    def notified(self) -> None:
        """The next claim follows a notification: other workers may be faster."""
        self._is_race = True

    def claimed(self, count: int, *, is_busy: bool) -> None:
        """A claim was answered with this many tasks. `is_busy`: it ran one before, so that it did not wait.

        A busy worker that gets no further task has lost nothing.
        """
        is_hourly = self._share is not None
        if self._is_race and not is_busy:
            most = MAX_STEPS_BY_HOUR if is_hourly else round(MAX_DELAY_S / STEP_S)
            self._won = min(self._won + 1, 10) if count else 0
            # By the hour, one race that is won by chance does not make a worker the fastest.
            self._lost = (max(self._lost - 1, 0) if is_hourly else 0) if count else min(self._lost + 1, most)
        elif count and not is_hourly:
            self._lost = 0
        self._is_race = False
