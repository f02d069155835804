"""What is counted of a cycle: every outcome there is has a name."""

from typing import get_args

from support.snapshots import snapshot
from windlass.control.summary import Summary, call_of, count_actions, count_calls, count_status
from windlass.model.action import Plan
from windlass.model.outcome import Outcome, VolumeGrown, VolumeNotGrown
from windlass.model.snapshot import PlannerState


def test_every_outcome_is_counted_as_a_call_that_went_some_way() -> None:
    for kind in get_args(Outcome):
        call, how = call_of(object.__new__(kind))
        assert call in ("create", "delete", "prepare", "grow"), kind
        assert how in ("ok", "refused", "error"), kind


def test_a_summary_of_one_that_stands_by_has_every_key_that_one_of_a_leader_has() -> None:
    did = count_actions(Plan((), PlannerState(), "steady"), [], 0)
    led = Summary("f", is_leader=True, timestamp="", actions=did, status=count_status(snapshot())).to_plain()
    stood_by = Summary("f", is_leader=False, timestamp="", standby_s=7.0).to_plain()
    assert stood_by.keys() == led.keys()
    assert stood_by["actions"] == dict.fromkeys(led["actions"], 0)
    assert stood_by["status"] == dict.fromkeys(led["status"])


def test_storage_that_grows_is_counted_and_so_is_storage_that_does_not() -> None:
    outcomes = [VolumeGrown("v", 150, "full"), VolumeNotGrown("v", 150, "no answer"), VolumeGrown("u", 20, "full")]
    assert count_calls(True, [*outcomes]) == (("grow", "error", 1), ("grow", "ok", 2), ("list", "ok", 1))
