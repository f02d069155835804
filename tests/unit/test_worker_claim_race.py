"""Idle workers race for tasks: the most recently used one wins, and a worker alone never waits."""

from windlass.worker.claim_race import MAX_DELAY_S, ClaimRace


def race(workers: list[ClaimRace], tasks: int = 1) -> list[int]:
    """One notification: the workers with the shortest delay get the tasks. Returns their numbers."""
    for worker in workers:
        worker.notified()
    order = sorted(range(len(workers)), key=lambda number: workers[number].delay_s)
    for place, number in enumerate(order):
        workers[number].claimed(1 if place < tasks else 0, is_busy=False)
    return order[:tasks]


def test_worker_alone_never_waits() -> None:
    worker = ClaimRace()
    for _ in range(100):
        worker.notified()
        assert worker.delay_s == 0
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
    assert 0 < worker.delay_s <= MAX_DELAY_S


def test_poll_without_notification_is_no_lost_race() -> None:
    worker = ClaimRace()
    worker.claimed(0, is_busy=False)
    assert worker.delay_s == 0


def test_busy_worker_without_a_further_task_lost_nothing() -> None:
    worker = ClaimRace()
    worker.notified()
    worker.claimed(0, is_busy=True)
    assert worker.delay_s == 0


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
        delays.append(worker.delay_s)
        worker.claimed(1, is_busy=False)
    assert delays[0] == MAX_DELAY_S
    assert delays[1] == MAX_DELAY_S / 2
    assert delays[-1] == 0
    # Another was faster: the order by billed time counts again.
    worker.notified()
    worker.claimed(0, is_busy=False)
    assert worker.delay_s == MAX_DELAY_S


def test_worker_without_a_better_one_never_waits() -> None:
    worker = ClaimRace()
    worker.set_share(0.0)
    for _ in range(5):
        worker.notified()
        worker.claimed(0, is_busy=False)
        assert worker.delay_s == 0


def test_share_outside_its_range_is_limited() -> None:
    worker = ClaimRace()
    worker.set_share(1000.0)
    assert worker.delay_s == MAX_DELAY_S
    worker.set_share(None)
    assert worker.delay_s == 0
