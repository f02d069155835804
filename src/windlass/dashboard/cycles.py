"""Pages about cycles: the list, and one cycle with its plan and a replay with other settings."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError

from windlass.dashboard.charts import Chart, ChartRange
from windlass.dashboard.rendering import PageContext, next_page_url, render
from windlass.model.action import ACTION_KINDS, DeleteOrphan, FailSlot, RaiseAlert, Spawn, actions_to_plain
from windlass.model.cycle import Cycle, CycleDetail
from windlass.model.cycle_actions import COUNTED_ACTIONS, done_actions
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.listing import Page
from windlass.model.provider_defaults import reason_without_effect
from windlass.model.worker import WorkerStatus
from windlass.policy.plan import plan

# Settings that a replay can change, by group, with their labels. A form offers those that the fleet reads.
REPLAY_GROUPS: Mapping[str, Mapping[str, str]] = {
    "Size": {
        "min_workers": "Minimum workers",
        "max_workers": "Maximum workers",
        "max_changes_per_cycle": "Changes per cycle",
        "budget_per_hour": "Budget per hour",
    },
    "Scaling": {
        "policy": "Policy",
        "wait_goal_s": "Longest wait, s",
        "price_of_waiting": "Price of waiting",
        "tasks_per_worker": "Tasks per worker",
        "idle_buffer": "Idle buffer",
        "scale_up_multiplier": "Scale-up multiplier",
        "scale_down_multiplier": "Scale-down multiplier",
        "clear_time_s": "Clear time, s",
    },
    "Timing": {
        "min_scaling_interval_s": "Scaling interval, s",
        "spawn_grace_s": "Spawn grace, s",
        "scale_down_grace_s": "Scale-down grace, s",
        "idle_timeout_s": "Idle timeout, s",
    },
    "Failures": {
        "heartbeat_timeout_s": "Heartbeat timeout, s",
        "spawn_timeout_s": "Spawn timeout, s",
        "max_failure_rate": "Failure rate",
        "max_restarts": "Restarts of a slot",
    },
}
REPLAY_SETTINGS = tuple(name for group in REPLAY_GROUPS.values() for name in group)


@dataclass(frozen=True, slots=True)
class ReplayOption:
    name: str
    group: str
    label: str
    # From the documentation of the setting.
    description: str
    value: str
    # In the stored cycle.
    original: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayDiff:
    text: str
    # "same", "gone" or "new".
    change: str


@dataclass(frozen=True, slots=True)
class ReplayResult:
    decision: str
    then: tuple[ReplayDiff, ...]
    now: tuple[ReplayDiff, ...]
    is_same: bool


def replay_options(settings: FleetConfig, given: Mapping[str, str]) -> list[ReplayOption]:
    """The stored settings that the fleet reads under the chosen policy, with those in `given` replaced."""
    policy = given.get("policy", settings.policy)
    has_volume = settings.runpod.network_volume_id is not None

    def is_read(name: str) -> bool:
        reason = reason_without_effect(settings.provider, policy, name, has_gpu=settings.has_gpu, has_volume=has_volume)
        return reason is None

    return [
        ReplayOption(
            name,
            group,
            label,
            FleetConfig.model_fields[name].description or "",
            given.get(name, _text(getattr(settings, name))).strip(),
            _text(getattr(settings, name)),
            tuple(get_args(FleetConfig.model_fields[name].annotation)) if name == "policy" else (),
        )
        for group, labels in REPLAY_GROUPS.items()
        for name, label in labels.items()
        if is_read(name)
    ]


def replay_cycle(stored: CycleDetail, settings: FleetConfig, given: Mapping[str, str]) -> ReplayResult:
    """Plan again from the stored snapshot. Raises BadInput for invalid settings."""
    changed = {name: given[name].strip() or None for name in REPLAY_SETTINGS if name in given}
    changed = {name: value for name, value in changed.items() if _text(getattr(settings, name)) != (value or "")}
    try:
        other = FleetConfig.model_validate({**settings.model_dump(), **changed})
    except ValidationError as error:
        problem: Any = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the settings"
        raise BadInput(f"{where}: {problem['msg'].removeprefix('Value error, ')}.") from None
    again = plan(stored.snapshot, other)
    then, now = actions_to_plain(stored.cycle.actions), actions_to_plain(again.actions)
    return ReplayResult(
        again.decision,
        tuple(_compare_actions(then, now, "gone")),
        tuple(_compare_actions(now, then, "new")),
        then == now and stored.cycle.decision == again.decision,
    )


def _compare_actions(mine: list[dict[str, Any]], others: list[dict[str, Any]], otherwise: str) -> list[ReplayDiff]:
    """Actions are the same if kind and target are the same, whatever the reason."""

    def name_of(action: Mapping[str, Any]) -> str:
        target = action.get("worker_id") or (f"slot {action['slot']}" if "slot" in action else action.get("name", ""))
        return f"{action['kind']} {target}".strip()

    remaining = Counter(map(name_of, others))
    diffs = []
    for action in mine:
        name = name_of(action)
        is_same = remaining[name] > 0
        remaining[name] -= is_same
        diffs.append(ReplayDiff(f"{name}: {action['reason']}", "same" if is_same else otherwise))
    return diffs


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class CycleLine:
    cycle: Cycle
    # `spawn 3: 41 queued` is shown as decision and justification.
    decision: str
    justification: str
    # What was done, not what was planned; other actions by kind.
    actions: str


def split_decision(decision: str) -> tuple[str, str]:
    """`spawn 3: 41 queued` as ("spawn 3", ": 41 queued")."""
    head, colon, rest = decision.partition(":")
    return head, colon + rest


def cycle_lines(cycles: Sequence[Cycle]) -> list[CycleLine]:
    lines = []
    for cycle in cycles:
        counted = tuple(kind for kind, *_ in COUNTED_ACTIONS)
        others = Counter(ACTION_KINDS[type(action)] for action in cycle.actions if not isinstance(action, counted))
        actions = [*done_actions(cycle), *(f"{kind} {number}" for kind, number in others.items())]
        lines.append(CycleLine(cycle, *split_decision(cycle.decision), ", ".join(actions)))
    return lines


def cycles_page(
    page_context: PageContext,
    page: Page[Cycle],
    *,
    fleets: Sequence[str],
    fleet: str | None,
    has_all: bool,
    charts: Sequence[Chart],
    chosen: ChartRange | None,
    is_first: bool,
) -> str:
    """`has_all`: also cycles that changed nothing. `charts`: workers of the chosen fleet, with the changes marked."""
    filters = {"fleet": fleet, "all": "yes" if has_all else None, "range": chosen.value if chosen is not None else None}
    return render(
        "cycles.html",
        page_context,
        here="cycles",
        rows=cycle_lines(page.rows),
        next_url=next_page_url("/cycles", page, **filters),
        filters=filters,
        fleets=fleets,
        fleet=fleet,
        has_all=has_all,
        charts=charts,
        chosen=chosen.value if chosen is not None else None,
        is_first=is_first,
    )


def cycle_page(
    page_context: PageContext,
    stored: CycleDetail,
    *,
    options: Sequence[ReplayOption] | None,
    replayed: ReplayResult | None,
    problem: str | None,
) -> str:
    """`options` None: the cycle was stored without its settings. `problem`: why the replay failed."""
    snapshot = stored.snapshot
    decision, justification = split_decision(stored.cycle.decision)
    counts = {status: sum(w.status is status for w in snapshot.workers) for status in WorkerStatus}
    actions = [{"worker_id": None, "code": None, **action} for action in actions_to_plain(stored.cycle.actions)]
    return render(
        "cycle.html",
        page_context,
        here="cycles",
        cycle=stored.cycle,
        snapshot=snapshot,
        decision=decision,
        justification=justification,
        actions=[{**action, "target": _target(action)} for action in actions],
        worker_counts={status: number for status, number in counts.items() if number},
        hold=snapshot.planner_state.hold,
        options=options,
        groups=list(dict.fromkeys(option.group for option in options or ())),
        replayed=replayed,
        problem=problem,
    )


def _target(action: Mapping[str, Any]) -> str:
    """What an action without a worker acts on."""
    kind = action["kind"]
    if kind in (ACTION_KINDS[Spawn], ACTION_KINDS[FailSlot]):
        return f"slot {action['slot']}"
    if kind == ACTION_KINDS[DeleteOrphan]:
        return str(action["name"])
    return "alert" if kind == ACTION_KINDS[RaiseAlert] else ""
