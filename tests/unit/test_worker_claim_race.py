"""Idle workers race for tasks: the most recently used one wins, and a worker alone never waits."""

import pytest

from windlass.worker.claim_race import MAX_DELAY_S, MAX_STEPS_BY_HOUR, STEP_S, ClaimRace


def race(workers: list[ClaimRace], tasks: int = 1) -> list[int]:
    """One notification: the workers with the shortest delay get the tasks. Returns their numbers."""
    for worker in workers:
        worker.notified()
    order = sorted(range(len(workers)), key=lambda number: workers[number].delay_s(is_busy=False))
    for place, number in enumerate(order):
        workers[number].claimed(1 if place < tasks else 0, is_busy=False)
    return order[:tasks]


def test_worker_alone_never_waits() -> None:
    worker = ClaimRace()
    for _ in range(100):
        worker.notified()
        assert worker.delay_s(is_busy=False) == 0
        worker.claimed(1, is_busy=False)


def test_most_recently_used_worker_wins_the_next_race() -> None:
    workers = [ClaimRace() for _ in range(5)]
    (winner,) = race(workers)
    for _ in range(20):
        assert race(workers) == [winner]


def test_worker_that_worked_in_a_burst_is_preferred_to_one_that_did_not() -> None:
    workers = [ClaimRace() for _ in range(6)]
    burst = set(race(workers, tasks=3))
    assert set(race(workers, tasks=3)) == burst
    # The first of them is busy: the next of the burst claims, not a worker that was idle all the time.
    idle = [worker for number, worker in enumerate(workers) if number != min(burst)]
    assert workers.index(idle[race(idle)[0]]) in burst


def test_delay_is_bounded() -> None:
    worker = ClaimRace()
    for _ in range(1000):
        worker.notified()
        worker.claimed(0, is_busy=False)
    assert 0 < worker.delay_s(is_busy=False) <= MAX_DELAY_S


def test_poll_without_notification_is_no_lost_race() -> None:
    worker = ClaimRace()
    worker.claimed(0, is_busy=False)
    assert worker.delay_s(is_busy=False) == 0


def test_busy_worker_without_a_further_task_lost_nothing() -> None:
    worker = ClaimRace()
    worker.notified()
    worker.claimed(0, is_busy=True)
    assert worker.delay_s(is_busy=False) == 0


def test_worker_with_most_billed_time_left_wins() -> None:
    """The replies to heartbeats say: nothing for the preferred worker, more for those whose hour has passed further."""
    workers = [ClaimRace() for _ in range(4)]
    shares = (0.9, 0.0, 0.5, 0.2)
    for worker, share in zip(workers, shares, strict=True):
        worker.set_share(share)
    for _ in range(20):
        assert race(workers) == [1]
    # While it is busy, the next one by billed time claims.
    assert race([workers[0], workers[2], workers[3]]) == [2]
    assert race(workers, tasks=2) == [1, 3]


def test_delay_by_billed_time_shrinks_while_preferred_workers_are_busy() -> None:
    worker = ClaimRace()
    worker.set_share(1.0)
    delays = []
    for _ in range(6):
        worker.notified()
        delays.append(worker.delay_s(is_busy=False))
        worker.claimed(1, is_busy=False)
    assert delays[0] == MAX_DELAY_S
    assert delays[1] == MAX_DELAY_S / 2
    assert delays[-1] == 0
    # Another was faster: the order by billed time counts again.
    worker.notified()
    worker.claimed(0, is_busy=False)
    assert worker.delay_s(is_busy=False) == MAX_DELAY_S


def test_worker_without_a_better_one_waits_for_partly_busy_ones_only() -> None:
    worker = ClaimRace()
    worker.set_share(0.0)
    for count, steps in ((1, 0), (1, 0), (0, 1), (0, 2), (0, 3), (0, 3), (1, 2), (1, 1), (1, 0)):
        worker.notified()
        worker.claimed(count, is_busy=False)
        assert worker.delay_s(is_busy=False) == pytest.approx(steps * STEP_S)


def test_share_outside_its_range_is_limited() -> None:
    worker = ClaimRace()
    worker.set_share(1000.0)
    assert worker.delay_s(is_busy=False) == MAX_DELAY_S
    worker.set_share(None)
    assert worker.delay_s(is_busy=False) == 0


@pytest.mark.parametrize("share", [None, 0.0, 1.0])
def test_worker_with_a_task_and_a_free_slot_never_waits(share: float | None) -> None:
    worker = ClaimRace()
    worker.set_share(share)
    worker.notified()
    worker.claimed(0, is_busy=False)
    assert worker.delay_s(is_busy=False) > 0
    assert worker.delay_s(is_busy=True) == 0


def test_idle_workers_leave_a_task_to_a_partly_busy_one_by_the_hour() -> None:
    """The worker with most billed time left waits, too. The order of idle workers by billed time stays the same."""
    preferred, other = ClaimRace(), ClaimRace()
    for worker, share in ((preferred, 0.0), (other, 0.3)):
        worker.set_share(share)
        assert worker.delay_s(is_busy=False) == share * MAX_DELAY_S
        for _ in range(20):
            worker.notified()
            worker.claimed(0, is_busy=False)
        worker.set_share(share)
    assert preferred.delay_s(is_busy=False) == pytest.approx(MAX_STEPS_BY_HOUR * STEP_S)
    assert other.delay_s(is_busy=False) == pytest.approx(MAX_STEPS_BY_HOUR * STEP_S + 0.3 * MAX_DELAY_S)


def test_task_that_a_busy_worker_gets_does_not_shorten_its_delay_as_an_idle_one() -> None:
    worker = ClaimRace()
    worker.set_share(1.0)
    for _ in range(3):
        worker.notified()
        worker.claimed(1, is_busy=True)
    assert worker.delay_s(is_busy=False) == MAX_DELAY_S
