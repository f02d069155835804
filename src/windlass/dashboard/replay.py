"""Thinking again: what a cycle would have decided with other settings."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError

from windlass.model.action import Plan, actions_to_plain
from windlass.model.cycle import CycleDetail
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.policy.plan import plan

# What is worth turning: how many, when, and with how much patience.
KNOBS = (
    "policy",
    "min_workers",
    "max_workers",
    "max_changes_per_cycle",
    "tasks_per_worker",
    "idle_buffer",
    "scale_up_multiplier",
    "scale_down_multiplier",
    "clear_time_s",
    "min_scaling_interval_s",
    "spawn_grace_s",
    "scale_down_grace_s",
    "idle_timeout_s",
    "heartbeat_timeout_s",
    "spawn_timeout_s",
    "max_failure_rate",
    "max_restarts",
    "budget_per_hour",
)


@dataclass(frozen=True, slots=True)
class ReplayOption:
    name: str
    value: str
    was: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayDiff:
    words: str
    # "same", "gone" or "new".
    change: str


@dataclass(frozen=True, slots=True)
class ReplayResult:
    decision: str
    then: tuple[ReplayDiff, ...]
    now: tuple[ReplayDiff, ...]
    is_same: bool


def knobs(settings: FleetConfig, given: Mapping[str, str]) -> list[ReplayOption]:
    """The settings of then, with what was typed over them."""
    return [
        ReplayOption(
            name,
            given.get(name, _text(getattr(settings, name))).strip(),
            _text(getattr(settings, name)),
            tuple(get_args(FleetConfig.model_fields[name].annotation)) if name == "policy" else (),
        )
        for name in KNOBS
    ]


def decide_again(found: CycleDetail, settings: FleetConfig, given: Mapping[str, str]) -> ReplayResult:
    """Raises BadInput for settings that cannot be."""
    changed = {name: given[name].strip() or None for name in KNOBS if name in given}
    changed = {name: value for name, value in changed.items() if _text(getattr(settings, name)) != (value or "")}
    try:
        other = FleetConfig.model_validate({**settings.model_dump(), **changed})
    except ValidationError as error:
        problem: Any = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the settings"
        raise BadInput(f"{where}: {problem['msg'].removeprefix('Value error, ')}.") from None
    return _compare(found, plan(found.snapshot, other))


def _compare(found: CycleDetail, again: Plan) -> ReplayResult:
    then, now = actions_to_plain(found.cycle.actions), actions_to_plain(again.actions)
    return ReplayResult(
        again.decision,
        tuple(_steps(then, now, "gone")),
        tuple(_steps(now, then, "new")),
        then == now and found.cycle.decision == again.decision,
    )


def _steps(mine: list[dict[str, Any]], others: list[dict[str, Any]], otherwise: str) -> list[ReplayDiff]:
    """The same is done if it is done to the same one, for whatever reason."""
    left = Counter(map(_deed, others))
    steps = []
    for action in mine:
        action_label = _deed(action)
        is_same = left[action_label] > 0
        left[action_label] -= is_same
        steps.append(ReplayDiff(f"{action_label}: {action['reason']}", "same" if is_same else otherwise))
    return steps


def _deed(action: Mapping[str, Any]) -> str:
    whom = action.get("worker_id") or (f"slot {action['slot']}" if "slot" in action else action.get("name", ""))
    return f"{action['kind']} {whom}".strip()


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)
