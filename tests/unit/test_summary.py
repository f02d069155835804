"""The summary of a cycle: its keys, and how outcomes are counted as provider calls."""

from typing import get_args

import pytest

from support.snapshots import snapshot
from windlass.control.summary import Summary, call_of, summarize
from windlass.model.action import Plan
from windlass.model.outcome import Committed, Outcome, VolumeGrown, VolumeNotGrown
from windlass.model.snapshot import PlannerState


def leader_summary(*outcomes: Outcome) -> Summary:
    plan, committed = Plan((), PlannerState(), "steady"), Committed(1, frozenset(), 0)
    return summarize(snapshot(), plan, [*outcomes], committed, duration_s=0.1, refused_choices=())


def test_every_outcome_counts_as_a_provider_call() -> None:
    for kind in get_args(Outcome):
        call, result = call_of(object.__new__(kind))
        assert call in ("create", "delete", "prepare", "grow"), kind
        assert result in ("ok", "refused", "error"), kind


def test_standby_summary_has_every_key_of_a_leader_summary() -> None:
    leader = leader_summary().to_plain()
    standby = Summary("f", is_leader=False, timestamp="", standby_s=7.0).to_plain()
    assert standby.keys() == leader.keys()
    assert standby["actions"] == dict.fromkeys(leader["actions"], 0)
    assert standby["status"] == dict.fromkeys(leader["status"])


def test_provider_calls_are_counted_by_call_and_result() -> None:
    outcomes = (VolumeGrown("v", 150, "full"), VolumeNotGrown("v", 150, "no answer"), VolumeGrown("u", 20, "full"))
    calls = leader_summary(*outcomes).provider_calls
    assert calls == (("grow", "error", 1), ("grow", "ok", 2), ("list", "ok", 1))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (None, "standby: pid 17 on host gpu-1 leads for 7 s more"),
        (
            "http://127.0.0.1:8080",
            "standby: pid 17 on host gpu-1 (dashboard: http://127.0.0.1:8080) leads for 7 s more",
        ),
    ],
)
def test_standby_names_the_leader_and_its_dashboard(url: str | None, shown: str) -> None:
    summary = Summary("f", is_leader=False, timestamp="", standby_s=7.0, leader="gpu-1-17-a0b1c2", leader_url=url)
    assert summary.standby_reason == shown
