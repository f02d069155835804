"""Counters of a cycle summary."""

from typing import get_args

from support.snapshots import snapshot
from windlass.control.summary import Summary, call_of, count_actions, count_calls, count_status
from windlass.model.action import Plan
from windlass.model.outcome import Outcome, VolumeGrown, VolumeNotGrown
from windlass.model.snapshot import PlannerState


def test_every_outcome_is_counted() -> None:
    for kind in get_args(Outcome):
        call, how = call_of(object.__new__(kind))
        assert call in ("create", "delete", "prepare", "grow"), kind
        assert how in ("ok", "refused", "error"), kind


def test_standby_summary_has_all_keys_of_leader_summary() -> None:
    did = count_actions(Plan((), PlannerState(), "steady"), [], 0)
    led = Summary("f", is_leader=True, timestamp="", actions=did, status=count_status(snapshot())).to_plain()
    stood_by = Summary("f", is_leader=False, timestamp="", standby_s=7.0).to_plain()
    assert stood_by.keys() == led.keys()
    assert stood_by["actions"] == dict.fromkeys(led["actions"], 0)
    assert stood_by["status"] == dict.fromkeys(led["status"])


def test_volume_growth_and_its_failure_are_counted() -> None:
    outcomes = [VolumeGrown("v", 150, "full"), VolumeNotGrown("v", 150, "no answer"), VolumeGrown("u", 20, "full")]
    assert count_calls(True, [*outcomes]) == (("grow", "error", 1), ("grow", "ok", 2), ("list", "ok", 1))
