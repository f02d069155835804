"""How many more tasks a dispatcher may claim."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.model.ray import frozen
from windlass.ray.capacity import InFlightKind, NodeCapacity, count_capacity, count_fitting, count_free_slots

CPU = {"CPU": 1.0}


@pytest.mark.parametrize(
    ("free", "needs", "count"),
    [
        ({"CPU": 4.0}, CPU, 4),
        ({"CPU": 4.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 0.5}, 2),
        ({"CPU": 4.0}, {"CPU": 1.0, "GPU": 1.0}, 0),
        ({"CPU": 0.3}, {"CPU": 0.1}, 3),
        ({"CPU": -1.0}, CPU, 0),
        ({}, {}, 100),
    ],
    ids=[
        "whole CPUs",
        "the scarcest resource decides",
        "a missing resource",
        "decimal fractions",
        "overcommitted",
        "no needs",
    ],
)
def test_count_of_tasks_that_fit_on_a_node(free: dict[str, float], needs: dict[str, float], count: int) -> None:
    assert count_fitting(free, needs) == count


def test_free_slots_exclude_all_usage_and_include_the_margin() -> None:
    nodes = {"a": NodeCapacity({"CPU": 4.0}, {"CPU": 1.0}), "b": NodeCapacity({"CPU": 2.0})}
    assert count_free_slots(nodes, {}, CPU, margin=2) == 5 + 2
    in_flight = {InFlightKind(frozen(CPU), "a"): 2, InFlightKind(frozen(CPU)): 2}
    assert count_free_slots(nodes, in_flight, CPU, margin=2) == 1 + 2


def test_waiting_tasks_beyond_capacity_use_up_the_margin() -> None:
    nodes = {"a": NodeCapacity({"CPU": 1.0})}
    free = [count_free_slots(nodes, {InFlightKind(frozen(CPU)): count}, CPU, margin=2) for count in range(5)]
    assert free == [3, 2, 1, 0, 0]


def test_no_slots_are_free_if_no_node_could_hold_a_task() -> None:
    assert count_free_slots({}, {}, CPU, margin=5) == 0
    assert count_free_slots({"a": NodeCapacity({"CPU": 4.0})}, {}, {"GPU": 1.0}, margin=5) == 0
    # A full node could hold one: its resources become free.
    assert count_free_slots({"a": NodeCapacity(CPU, CPU)}, {}, CPU, margin=5) == 5


def test_tasks_that_fit_on_no_node_take_no_slots_from_others() -> None:
    nodes = {"a": NodeCapacity({"CPU": 2.0})}
    too_large = {InFlightKind(frozen({"CPU": 8.0})): 12}
    assert count_free_slots(nodes, too_large, CPU, margin=2) == count_free_slots(nodes, {}, CPU, margin=2) == 4


def test_up_to_the_margin_is_claimed_for_a_cluster_that_may_grow() -> None:
    waiting = [{InFlightKind(frozen(CPU)): count} for count in range(4)]
    assert [count_free_slots({}, in_flight, CPU, margin=2, may_grow=True) for in_flight in waiting] == [2, 1, 0, 0]
    assert count_free_slots({}, {}, CPU, margin=0, may_grow=True) == 1
    # Waiting tasks of other kinds do not count: the cluster may never grow for them.
    others = {InFlightKind(frozen({"CPU": 1e6})): 8, InFlightKind(frozen({"GPU": 1.0})): 1}
    assert count_free_slots({}, others, {"GPU": 1.0}, margin=8, may_grow=True) == 7
    full = {"a": NodeCapacity(CPU, CPU)}
    assert count_free_slots(full, {}, CPU, margin=2, may_grow=False) == 2


@pytest.mark.parametrize("needs", [{}, {"disk": 0.001}], ids=["no needs", "a tiny amount"])
def test_tasks_without_processor_are_limited_per_node(needs: dict[str, float]) -> None:
    nodes = {"a": NodeCapacity({"CPU": 2.0, "disk": 10.0}), "b": NodeCapacity({"CPU": 2.0, "disk": 10.0})}
    in_flight: Counter[InFlightKind] = Counter()
    for number in range(1000):
        if not count_free_slots(nodes, in_flight, needs, margin=3):
            break
        in_flight[InFlightKind(frozen(needs), ("a", "b", None)[number % 3])] += 1
    assert in_flight.total() == 2 * 100 + 3
    # Tasks that need a CPU are not affected.
    assert count_free_slots(nodes, in_flight, CPU, margin=0) == 4 - 3


def test_task_on_a_lost_node_takes_no_slot() -> None:
    assert count_free_slots({"a": NodeCapacity(CPU)}, {InFlightKind(frozen(CPU), "gone"): 1}, CPU, margin=0) == 1


@given(
    cpus=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    needs=st.lists(st.sampled_from([0.5, 1.0, 2.0]), max_size=40),
    margin=st.integers(0, 5),
)
def test_claims_never_exceed_capacity_plus_margin(cpus: list[int], needs: list[float], margin: int) -> None:
    """Tasks of any needs are claimed one by one while slots are free."""
    nodes = {str(number): NodeCapacity({"CPU": float(count)}) for number, count in enumerate(cpus)}
    in_flight: Counter[InFlightKind] = Counter()
    for need in needs:
        if count_free_slots(nodes, in_flight, {"CPU": need}, margin):
            in_flight[InFlightKind(frozen({"CPU": need}))] += 1
    assert in_flight.total() <= count_capacity(nodes, {"CPU": 0.5}) + margin
