"""Attempts that wait for seats, and pending seats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.model.ray import frozen
from windlass.ray.capacity import Needs
from windlass.ray.wait_list import WaitList

ONE, TWO = frozen({"CPU": 1.0}), frozen({"CPU": 2.0})


def test_oldest_attempt_of_a_kind_is_next_and_a_returned_one_before_it() -> None:
    wait_list: WaitList[str, int] = WaitList()
    for attempt in ("a", "b", "c", "d"):
        wait_list.add(ONE, attempt)
    wait_list.add(TWO, "large")
    assert wait_list.pop(ONE) == "a"
    wait_list.discard(ONE, "c")
    wait_list.discard(ONE, "unknown")
    wait_list.add_first(ONE, "a")
    assert [wait_list.pop(ONE) for _ in range(4)] == ["a", "b", "d", None]
    assert (wait_list.waiting_kinds(), wait_list.has_waiting(ONE), wait_list.has_waiting(TWO)) == ([TWO], False, True)
    assert (wait_list.pop_all(TWO), wait_list.pop_all(TWO), wait_list.waiting_kinds()) == (["large"], [], [])


@pytest.mark.parametrize(
    ("waiting", "seats", "missing", "surplus"),
    [
        (0, [], 0, []),
        (3, [], 3, []),
        (3, [1, 2], 1, []),
        (2, [1, 2], 0, []),
        (1, [1, 2, 3], 0, [2, 3]),
        (0, [1, 2], 0, [1, 2]),
    ],
    ids=[
        "no attempts, no seats",
        "one seat per attempt",
        "one more seat",
        "as many seats as attempts",
        "the newest seats are surplus",
        "all seats are surplus",
    ],
)
def test_missing_and_surplus_seats_match_the_waiting_attempts(
    waiting: int, seats: list[int], missing: int, surplus: list[int]
) -> None:
    wait_list: WaitList[int, int] = WaitList()
    for attempt in range(waiting):
        wait_list.add(ONE, attempt)
    for seat in seats:
        wait_list.add_seat(ONE, seat)
    # Another kind changes nothing.
    wait_list.add(TWO, 100)
    wait_list.add_seat(TWO, 100)
    assert (wait_list.count_missing_seats(ONE), wait_list.surplus_seats()) == (missing, surplus)


STEPS = ["add", "start seat", "pop", "add first", "discard", "cancel surplus"]


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.booleans())))
def test_seats_equal_waiting_attempts_after_surplus_is_cancelled(steps: list[tuple[str, bool]]) -> None:
    """Missing seats are submitted after each step, so there are never too few."""
    wait_list: WaitList[int, int] = WaitList()
    waiting: dict[Needs, list[int]] = {ONE: [], TWO: []}
    for number, (step, is_large) in enumerate(steps):
        kind = TWO if is_large else ONE
        pending = list(wait_list.pending_seats())
        if step == "add":
            wait_list.add(kind, number)
            waiting[kind].append(number)
        elif step == "add first":
            wait_list.add_first(kind, number)
            waiting[kind].insert(0, number)
        elif step == "discard" and waiting[kind]:
            wait_list.discard(kind, waiting[kind].pop())
        elif step == "start seat" and pending:
            wait_list.discard_seat(kind, pending[0])
        elif step == "pop":
            assert wait_list.pop(kind) == (waiting[kind].pop(0) if waiting[kind] else None)
        for each in waiting:
            for count in range(wait_list.count_missing_seats(each)):
                wait_list.add_seat(each, 1000 * (number + 1) + 100 * is_large + count)
            assert not wait_list.count_missing_seats(each)
        if step == "cancel surplus":
            for seat in wait_list.surplus_seats():
                for each in waiting:
                    wait_list.discard_seat(each, seat)
            assert len(list(wait_list.pending_seats())) == sum(map(len, waiting.values()))
    assert set(wait_list.waiting_kinds()) == {kind for kind, queue in waiting.items() if queue}
