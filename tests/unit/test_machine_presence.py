"""Whether a worker's machine is present, missing or unknown, derived from the provider's list."""

import pytest

from support.snapshots import LAGGING_LIST, LOCAL, ago, machine, snapshot, task, worker
from windlass.model.fleet import FleetConfig
from windlass.model.snapshot import Snapshot
from windlass.policy.planning_context import build_context
from windlass.policy.worker_state import Presence


def presence(seen: Snapshot, config: FleetConfig = LOCAL) -> Presence:
    return build_context(seen, config).states["w0"].presence


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(snapshot(worker()), Presence.PRESENT, id="listed"),
        pytest.param(snapshot(worker(), machines=(machine("w0", "exited"),)), Presence.EXITED, id="listed as exited"),
        pytest.param(snapshot(worker(), machines=None), Presence.UNKNOWN, id="no list: nothing is known"),
        pytest.param(snapshot(worker(), machines=()), Presence.MISSING, id="missing from a list without lag"),
        pytest.param(
            snapshot(worker(heartbeat=20), machines=(), traits=LAGGING_LIST),
            Presence.UNKNOWN,
            id="missing for the first time",
        ),
        pytest.param(
            snapshot(worker(heartbeat=20), machines=(), traits=LAGGING_LIST, state={"missing_since": {"w0": ago(59)}}),
            Presence.UNKNOWN,
            id="missing for less than lists may lag",
        ),
        pytest.param(
            snapshot(worker(heartbeat=20), machines=(), traits=LAGGING_LIST, state={"missing_since": {"w0": ago(60)}}),
            Presence.MISSING,
            id="missing for longer than lists may lag",
        ),
        pytest.param(
            snapshot(worker(heartbeat=2), machines=(), traits=LAGGING_LIST, state={"missing_since": {"w0": ago(900)}}),
            Presence.UNKNOWN,
            id="missing, but with a recent heartbeat",
        ),
        pytest.param(
            snapshot(
                worker(status="terminating", heartbeat=2, terminating=5, running=(task(),)),
                machines=(),
                traits=LAGGING_LIST,
                state={"missing_since": {"w0": ago(60)}},
            ),
            Presence.UNKNOWN,
            id="missing and draining, but with a recent heartbeat",
        ),
        pytest.param(
            snapshot(worker(machine_at=1), machines=(), listed_at=ago(2)),
            Presence.UNKNOWN,
            id="its machine became known after the list was requested",
        ),
        pytest.param(
            snapshot(worker(machine_at=2), machines=(), listed_at=ago(2)), Presence.MISSING, id="known before the list"
        ),
        pytest.param(
            snapshot(worker(machine_id=None, created=119, heartbeat=None), machines=(), traits=LAGGING_LIST),
            Presence.UNKNOWN,
            id="an unanswered creation whose machine may still appear",
        ),
        pytest.param(
            snapshot(worker(machine_id=None, created=120, heartbeat=None), machines=(), traits=LAGGING_LIST),
            Presence.NEVER,
            id="an unanswered creation whose machine can no longer appear",
        ),
        pytest.param(
            snapshot(
                worker(machine_id=None, created=3600, heartbeat=None),
                machines=(),
                traits=LAGGING_LIST,
                state={"planned_at": ago(3600)},
            ),
            Presence.UNKNOWN,
            id="an unanswered creation that only a clock set forward makes old",
        ),
        pytest.param(
            snapshot(
                worker(machine_id=None, created=3600, heartbeat=None),
                machines=(),
                traits=LAGGING_LIST,
                since_plan_s=118.0,
                state={"planned_at": ago(3599)},
            ),
            Presence.UNKNOWN,
            id="an unanswered creation that is young by the leader's own clock",
        ),
        pytest.param(
            snapshot(
                worker(machine_id=None, created=3600, heartbeat=None),
                machines=(),
                traits=LAGGING_LIST,
                since_plan_s=120.0,
                state={"planned_at": ago(3600)},
            ),
            Presence.NEVER,
            id="an unanswered creation that is old by the leader's own clock",
        ),
        pytest.param(
            snapshot(
                worker(machine_id=None, created=3600, heartbeat=None),
                machines=(),
                traits=LAGGING_LIST,
                state={"unproven_s": {"w0": 3481.0}},
            ),
            Presence.UNKNOWN,
            id="an unanswered creation whose age an earlier step of the clock made",
        ),
        pytest.param(
            snapshot(worker(machine_id=None, created=1, heartbeat=None), machines=(), listed_at=ago(2)),
            Presence.UNKNOWN,
            id="an unanswered creation younger than the list",
        ),
        pytest.param(
            snapshot(worker(machine_id=None, created=900, heartbeat=None), machines=None, traits=LAGGING_LIST),
            Presence.UNKNOWN,
            id="an unanswered creation without a list stays unsettled",
        ),
        pytest.param(
            snapshot(worker(machine_id=None, created=1, creation="refused"), machines=None, traits=LAGGING_LIST),
            Presence.NEVER,
            id="a creation that was refused needs no list",
        ),
        pytest.param(
            snapshot(worker(machine_id=None, created=1), machines=(machine("w0"),), traits=LAGGING_LIST),
            Presence.PRESENT,
            id="an unanswered creation whose machine is listed",
        ),
        pytest.param(
            snapshot(
                worker(machine_id=None), machines=(machine("w0", "exited", "a", created=9), machine("w0", id_="b"))
            ),
            Presence.PRESENT,
            id="two machines for one worker: the running one counts",
        ),
        pytest.param(
            snapshot(worker(slot=None), machines=(machine("w0"),)),
            Presence.UNKNOWN,
            id="a manual worker has no machine",
        ),
    ],
)
def test_machine_presence(seen: Snapshot, expected: Presence) -> None:
    assert presence(seen) is expected


def test_clock_set_back_after_a_step_forward_does_not_keep_a_slot_for_the_step() -> None:
    young = worker(machine_id=None, created=20, heartbeat=None)
    seen = snapshot(young, machines=(), traits=LAGGING_LIST, state={"unproven_s": {"w0": 3600.0}})
    assert build_context(seen, LOCAL).planner_state.machines.unproven_s == {"w0": 20.0}
