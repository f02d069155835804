"""Plans after a change of provider, account or API key."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from support.snapshots import (
    GPU,
    NOW,
    ago,
    fleet,
    kinds,
    machines_of,
    of_kind,
    only,
    snapshot,
    task,
    worker,
)
from windlass.model.action import (
    Delete,
    RaiseAlert,
    Spawn,
)
from windlass.model.machine import ProviderTraits
from windlass.model.snapshot import Hold
from windlass.model.worker import WorkerStatus
from windlass.policy.plan import plan

# ------------------------------------------------------------------------------------------ providers and accounts


@pytest.mark.parametrize(
    ("before", "now", "is_held"),
    [("runpod", "hetzner", True), ("hetzner", "local", True), ("local", "ray-local", False), ("local", "local", False)],
)
def test_workers_of_former_provider_hold_all_actions(before: str, now: str, is_held: bool) -> None:
    views = (
        worker("a", 0, "error", provider=before),
        worker("b", 1, "terminating", terminating=50, provider=before),
        worker("c", 2, created=200, heartbeat=700, provider=before),
    )
    engine = {"engine": "ray"} if now == "ray-local" else {}
    planned = plan(snapshot(*views, machines=(), queued=9), fleet(provider=now, handler="a:b", **engine))
    if not is_held:
        assert planned.hold is None
        assert of_kind(planned.actions, Delete)
        return
    assert planned.hold is not None
    assert (planned.hold.code, planned.hold.is_total) == ("OTHER_PROVIDER", True)
    assert f"provider is {now}, but 3 workers run on machines of {before}" in only(planned, RaiseAlert).reason


def test_live_workers_without_listed_machines_hold_all_actions() -> None:
    lagging = ProviderTraits(absence_grace_s=60, is_remote=True)
    views = (worker("a", 0, created=900), worker("b", 1, "terminating", created=900, terminating=50, heartbeat=40))
    state = {"missing_since": {"a": ago(60), "b": ago(60)}}
    planned = plan(snapshot(*views, machines=(), traits=lagging, state=state), GPU)
    assert planned.hold is not None
    assert (planned.hold.code, planned.hold.is_total) == ("OTHER_ACCOUNT", True)
    assert (
        "local lists none of the fleet's machines (m-a), but 1 of its workers send heartbeats"
        in only(planned, RaiseAlert).reason
    )
    # A listed machine proves the account.
    again = plan(snapshot(*views, machines=machines_of(views[:1]), traits=lagging, state=state), GPU)
    assert again.hold is None
    assert [delete.worker_id for delete in of_kind(again.actions, Delete)] == ["b"]
    # Within the absence grace there is no hold.
    state = {"missing_since": {"a": ago(59), "b": ago(59)}}
    assert plan(snapshot(*views, machines=(), traits=lagging, state=state), GPU).hold is None


def test_one_missing_machine_is_no_account_change_without_list() -> None:
    cloud = ProviderTraits(absence_grace_s=60, is_remote=True)
    views = (worker("a", 0, created=900), worker("b", 1, created=900))
    state = {"missing_since": {"a": ago(90)}}
    assert plan(snapshot(*views, machines=None, traits=cloud, state=state), GPU).hold is None


def test_changed_key_holds_until_it_lists_a_machine() -> None:
    cloud = ProviderTraits(absence_grace_s=60, is_remote=True, key_hash="new")
    booting = worker("a", 0, "spawning", created=5, heartbeat=None)
    state = {"key_hash": "old"}
    seen = snapshot(booting, machines=(), traits=cloud, queued=9, state=state)
    planned = plan(seen, fleet(max_workers=9))
    assert planned.hold is not None
    assert (planned.hold.code, planned.hold.is_total) == ("OTHER_ACCOUNT", True)
    assert "changed, and the new one lists none of the fleet's machines (m-a)" in only(planned, RaiseAlert).reason
    assert (kinds(planned), planned.planner_state.account.key_hash) == (["alert"], "old")
    # Without a list the account is unknown: no alert yet.
    unlisted = plan(replace(seen, machines=None), fleet(max_workers=9))
    assert unlisted.hold is not None
    assert (unlisted.hold.code, unlisted.hold.is_total, kinds(unlisted)) == ("KEY_CHANGED", True, [])
    # An unanswered create call may have created a machine.
    unanswered = worker("a", 0, "spawning", created=5, heartbeat=None, machine_id=None)
    assert plan(replace(seen, workers=(unanswered,)), fleet(max_workers=9)).planner_state.account.key_hash == "old"
    # The key is accepted if it lists a machine, or if no machine can exist.
    refused = worker("a", 0, "spawning", created=5, heartbeat=None, machine_id=None, creation="refused")
    for known in (
        replace(seen, machines=machines_of((booting,))),
        replace(seen, workers=()),
        replace(seen, workers=(refused,)),
    ):
        taken_over = plan(known, fleet(max_workers=9))
        assert (taken_over.hold, taken_over.planner_state.account.key_hash) == (None, "new")
        assert of_kind(taken_over.actions, Spawn)


def test_one_missing_machine_is_no_account_change() -> None:
    cloud = ProviderTraits(absence_grace_s=60, is_remote=True, key_hash="same")
    unlisted = worker("a", 0, created=900, heartbeat=1)
    state: dict[str, Any] = {"key_hash": "same", "missing_since": {"a": ago(90)}}
    seen = snapshot(unlisted, machines=(), traits=cloud, state=state | {"own_listed_at": ago(80)})
    assert plan(seen, fleet()).hold is None
    # Machines that are missing since the last list of any machine do count.
    seen = snapshot(unlisted, machines=(), traits=cloud, state=state | {"own_listed_at": ago(100)})
    hold = plan(seen, fleet()).hold
    assert hold is not None
    assert hold.code == "OTHER_ACCOUNT"
    # A list with a machine of the fleet proves the key.
    both = snapshot(unlisted, worker("b", 1), machines=machines_of((worker("b", 1),)), traits=cloud, state=state)
    assert plan(both, fleet()).planner_state.account.own_listed_at == NOW


@pytest.mark.parametrize("is_key_new", [True, False], ids=["key changed", "live workers unlisted"])
def test_fleet_restart_abandons_machines_of_other_account(is_key_new: bool) -> None:
    cloud = ProviderTraits(absence_grace_s=60, is_remote=True, key_hash="new")
    leaving = [worker(f"w{n}", n, "terminating", created=900, terminating=5, heartbeat=1) for n in range(5)]
    state = {
        "key_hash": "old" if is_key_new else "new",
        "missing_since": {view.id: ago(9000) for view in leaving},
        "hold": Hold("OTHER_ACCOUNT", "they are not listed", ago(9000), is_total=True),
    }
    seen = snapshot(*leaving, machines=(), traits=cloud, state=state, queued=9)
    held = plan(seen, fleet(max_workers=9))
    assert held.hold is not None
    assert "lists none of the fleet's machines (m-w0, m-w1, m-w2 and 2 more)" in held.hold.reason
    assert held.planner_state.account.key_hash == state["key_hash"]
    # No abandonment: restarted before the hold, only a slot, not all workers yet, or without a list.
    staying = (replace(leaving[0], status=WorkerStatus.ACTIVE, terminating_at=None), *leaving[1:])
    for other in (
        replace(seen, restarted_at=ago(9001)),
        replace(seen, reset_at=ago(5), restarted_at=ago(9001)),
        replace(seen, restarted_at=ago(5), workers=staying),
        replace(seen, restarted_at=ago(5), machines=None),
    ):
        still = plan(other, fleet(max_workers=9))
        assert still.hold is not None
        assert (still.hold.code, of_kind(still.actions, Delete)) == ("OTHER_ACCOUNT", [])
    abandoned = plan(replace(seen, restarted_at=ago(5)), fleet(max_workers=9))
    assert (abandoned.hold, abandoned.planner_state.account.key_hash) == (None, "new")
    assert len(of_kind(abandoned.actions, Delete)) == 5
    left = [alert for alert in of_kind(abandoned.actions, RaiseAlert) if alert.code == "ABANDONED"]
    assert [alert.worker_id for alert in left] == [view.id for view in leaving]
    assert left[0].reason == (
        "m-w0 was abandoned by hand: the key for local does not list it, and its former account may still be charged"
    )
    # No second hold for workers that take time to terminate.
    state_then = abandoned.planner_state
    for after_s in (10, 600):
        now = NOW + timedelta(seconds=after_s)
        live = tuple(replace(view, last_heartbeat=now, running=(task(n),)) for n, view in enumerate(leaving))
        later = replace(seen, now=now, planner_state=state_then, restarted_at=ago(5), workers=live)
        planned = plan(later, fleet(max_workers=9, stop_timeout_s=9999))
        assert planned.hold is None
        state_then = planned.planner_state
