"""Back-off after refusals of the provider."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from support.snapshots import LOCAL, NOW, ago, fleet, kinds, of_kind, snapshot, task, worker
from windlass.model.action import RaiseAlert, Spawn
from windlass.model.machine import ProviderTraits
from windlass.model.snapshot import FailureRateState, PlannerState, ProviderBackoff, ProviderRefusal
from windlass.policy.plan import plan

LIMIT = "creating server red-0-aa: server limit exceeded (resource_limit_exceeded): ask Hetzner for more"


def refusal(code: str = "LIMIT_REACHED", age: float = 1) -> ProviderRefusal:
    return ProviderRefusal(code, LIMIT, ago(age))


@pytest.mark.parametrize("code", ["LIMIT_REACHED", "DENIED", "INVALID_REQUEST", "PROVIDER_PAUSE"])
def test_refusal_holds_and_alerts_with_provider_message(code: str) -> None:
    planned = plan(snapshot(queued=9, refusal=refusal(code)), LOCAL)
    assert kinds(planned) == ["alert"]
    assert of_kind(planned.actions, RaiseAlert)[0] == RaiseAlert(code, LIMIT)
    assert planned.hold is not None
    assert (planned.hold.code, planned.hold.is_total) == (code, False)
    assert planned.hold.reason == f"{LIMIT}; no spawns until 12:04:59 UTC"
    assert planned.decision.startswith("hold: ")


def test_one_probe_after_the_backoff() -> None:
    known = ProviderBackoff("LIMIT_REACHED", 1, ago(1))
    planned = plan(
        snapshot(queued=9, refusal=refusal(age=301), state={"provider_backoff": known}), fleet(max_workers=9)
    )
    assert kinds(planned) == ["spawn"]
    assert "one probe at a time" in planned.decision
    assert planned.planner_state.provider_backoff == known


def test_no_spawn_while_probe_is_in_flight() -> None:
    known = ProviderBackoff("LIMIT_REACHED", 1, ago(1))
    tried = worker("w0", status="spawning", machine_id=None, heartbeat=None, created=1)
    planned = plan(snapshot(tried, queued=9, refusal=refusal(age=301), state={"provider_backoff": known}), LOCAL)
    assert of_kind(planned.actions, Spawn) == []


def test_each_refused_probe_doubles_the_backoff() -> None:
    state, at, backoffs = PlannerState(), NOW, []
    for _ in range(6):
        seen = snapshot(
            queued=1,
            refusal=ProviderRefusal("LIMIT_REACHED", LIMIT, at),
            state={"provider_backoff": state.provider_backoff},
        )
        state = plan(seen, LOCAL).planner_state
        assert state.provider_backoff is not None
        backoffs.append((state.provider_backoff.until - at).total_seconds())
        at = state.provider_backoff.until + timedelta(seconds=5)
    assert backoffs == [300, 600, 1200, 2400, 3600, 3600]


def test_refusals_within_the_backoff_count_once() -> None:
    first = plan(snapshot(queued=9, refusal=refusal(age=10)), LOCAL).planner_state
    later = plan(
        snapshot(queued=9, refusal=refusal(age=2), state={"provider_backoff": first.provider_backoff}), LOCAL
    ).planner_state
    assert later.provider_backoff == first.provider_backoff


def test_created_machine_ends_the_backoff() -> None:
    known = ProviderBackoff("LIMIT_REACHED", 3, ago(-900))
    planned = plan(snapshot(queued=9, state={"provider_backoff": known}), fleet(max_workers=3))
    assert kinds(planned) == ["spawn"] * 3
    assert planned.planner_state.provider_backoff is None


def test_first_missing_capacity_is_retried_at_once() -> None:
    first = plan(snapshot(queued=9, refusal=refusal("NO_CAPACITY", age=5)), LOCAL)
    assert kinds(first) == ["spawn"]
    again = plan(
        snapshot(
            queued=9, refusal=refusal("NO_CAPACITY"), state={"provider_backoff": first.planner_state.provider_backoff}
        ),
        LOCAL,
    )
    assert kinds(again) == ["alert"]
    assert again.hold is not None
    assert again.hold.code == "NO_CAPACITY"
    assert again.planner_state.provider_backoff == ProviderBackoff("NO_CAPACITY", 2, ago(1) + timedelta(seconds=30))


def test_other_refusal_code_restarts_the_backoff() -> None:
    known = ProviderBackoff("NO_CAPACITY", 7, ago(-200))
    planned = plan(snapshot(queued=9, refusal=refusal("DENIED"), state={"provider_backoff": known}), LOCAL)
    assert planned.planner_state.provider_backoff == ProviderBackoff("DENIED", 1, ago(1) + timedelta(seconds=300))


def test_request_spawns_one_probe_under_backoff() -> None:
    planned = plan(snapshot(queued=9, requested=3, refusal=refusal()), LOCAL)
    assert kinds(planned) == ["alert", "spawn"]


def test_idle_workers_drain_under_backoff() -> None:
    idle = [worker(f"w{n}", n, claimed=90, created=200) for n in range(2)]
    planned = plan(snapshot(*idle, idle=100, refusal=refusal()), LOCAL)
    assert "drain" in kinds(planned)


@pytest.mark.parametrize("at", [ago(1), ago(0)])
def test_failure_rate_hold_takes_precedence(at: datetime) -> None:
    guard = FailureRateState(trips=1, until=ago(-100), judged_until=ago(10))
    planned = plan(
        snapshot(queued=1, refusal=ProviderRefusal("DENIED", LIMIT, at), state={"failure_rate": guard}), LOCAL
    )
    assert planned.hold is not None
    assert planned.hold.code == "FAILURE_RATE"


@pytest.mark.parametrize(
    ("spawned", "maximum", "is_remote", "oldest_s", "is_alerted"),
    [
        pytest.param(41, 50, True, 301.0, True, id="more than four fifths"),
        pytest.param(41, 50, True, 299.0, False, id="tasks do not wait long"),
        pytest.param(50, 50, True, None, False, id="full and keeps up"),
        pytest.param(40, 50, True, 301.0, False, id="four fifths"),
        pytest.param(41, 50, False, 301.0, False, id="local processes"),
        pytest.param(5, 5, True, 301.0, True, id="a small fleet"),
        pytest.param(4, 5, True, 301.0, False, id="four fifths of a small fleet"),
    ],
)
def test_rented_fleet_near_maximum_raises_one_alert(
    spawned: int, maximum: int, is_remote: bool, oldest_s: float | None, is_alerted: bool
) -> None:
    views = [worker(f"w{n}", n, claimed=50, running=(task(n),)) for n in range(spawned)]
    seen = snapshot(*views, traits=ProviderTraits(is_remote=is_remote))
    seen = replace(seen, queue=replace(seen.queue, oldest_queued_age_s=oldest_s))
    planned = plan(seen, fleet(max_workers=maximum))
    alerts = of_kind(planned.actions, RaiseAlert)
    why = f"{spawned} of max_workers ({maximum}) exist, and a task has been queued for 301 s"
    assert alerts == ([RaiseAlert("NEAR_MAX", why)] if is_alerted else [])
    assert plan(replace(seen, planner_state=planned.planner_state), fleet(max_workers=maximum)).actions == ()
