"""A fleet on the dashboard: its card on the overview, and its own page with settings, budgets and history."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from re import compile as pattern
from typing import Any

from windlass.dashboard.alerts import AttentionItem
from windlass.dashboard.charts import Chart, ChartRange, fleet_charts
from windlass.dashboard.cost import BudgetView
from windlass.dashboard.cycles import CycleLine, cycle_lines, split_decision
from windlass.dashboard.filters import counted
from windlass.dashboard.rendering import PageContext, render
from windlass.dashboard.workers import SlotMap
from windlass.model.cycle import Cycle
from windlass.model.event import Event
from windlass.model.fleet import FleetConfig
from windlass.model.listing import HostRecord
from windlass.model.overview import BootQuantiles, FleetOverview, Sample
from windlass.model.provider_defaults import PROVIDER_DEFAULTS, policy_by_settings
from windlass.model.redaction import shown_settings

# Labels of the phases of a boot, each with what is reached then.
BOOT_PHASES = {
    "running": ("Running", "The vendor reports that the machine runs"),
    "reachable": ("Reachable", "The machine reached the control plane, or the control plane reached it"),
    "joined": ("Joined", "Its worker has joined"),
    "first_claim": ("First claim", "Its worker claimed its first task"),
}
_NUMBER = pattern(r"\d[\d,.]*")


@dataclass(frozen=True, slots=True)
class FleetCard:
    overview: FleetOverview
    charts: list[Chart]
    state: str
    state_label: str
    decision: str
    justification: str
    # The decision without numbers. Screen readers announce it when it changes.
    decision_kind: str


@dataclass(frozen=True, slots=True)
class FleetSetting:
    name: str
    value: str
    description: str
    is_default: bool


def fleet_card(
    overview: FleetOverview, samples: Sequence[Sample], now: datetime, changes: Sequence[Cycle] = ()
) -> FleetCard:
    fleet = overview.fleet
    decision, justification = split_decision(overview.decision or "")
    if fleet.without_orchestrator_s(now) is not None:
        state, label = "unattended", "no orchestrator"
    elif fleet.hold is not None:
        state, label = "hold", "on hold"
    elif fleet.is_paused:
        state, label = "paused", "paused"
    elif overview.is_by_hand:
        state, label = "steady", f"{counted(overview.by_hand, 'worker')} started by hand"
    elif fleet.planned_at is None:
        state, label = "queued", "no cycle yet"
    elif decision.startswith("spawn"):
        state, label = "spawning", "spawning"
    else:
        state, label = "steady", "running"
    kind = " ".join(_NUMBER.sub("", decision).split()) or "no cycle yet"
    charts = fleet_charts(overview, now, samples, changes)
    return FleetCard(overview, charts, state, label, decision, justification, kind)


def settings_of(config: FleetConfig) -> list[FleetSetting]:
    """All settings without secrets; first those that differ from the defaults of the fleet's provider, then by name."""
    shown: Mapping[str, Any] = shown_settings(config.model_dump(mode="json"))
    fields = FleetConfig.model_fields
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    # The provider itself is a choice.
    defaults |= PROVIDER_DEFAULTS.get(config.provider, {})
    given = {name for name, default in defaults.items() if getattr(config, name) != default} - {"policy"}
    defaults["policy"] = policy_by_settings(config.provider, given)
    found = []
    for name, field in fields.items():
        is_default = getattr(config, name) == defaults[name]
        found.append(FleetSetting(name, _value_text(shown[name]), field.description or "", is_default))
    return sorted(found, key=lambda setting: (setting.is_default, setting.name))


def _value_text(value: Any) -> str:
    if value is None or value in ([], {}, ""):
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ", ".join(value)
    if isinstance(value, Mapping | list):
        return json.dumps(value, indent=2, ensure_ascii=False)
    return f"{value:g}" if isinstance(value, float) else str(value)


def fleet_page(
    page_context: PageContext,
    card: FleetCard,
    *,
    items: Sequence[AttentionItem],
    chosen: ChartRange | None,
    settings: Sequence[FleetSetting] | None,
    budgets: Sequence[BudgetView],
    slots: SlotMap,
    changes: Sequence[Cycle],
    events: Sequence[Event],
    places: Sequence[HostRecord],
    boots: Sequence[BootQuantiles],
) -> str:
    """`settings` None: no cycle with settings is stored.

    `places`: where its machines were. `boots`: how long they took to start."""
    lines: list[CycleLine] = cycle_lines(changes)
    return render(
        "fleet.html",
        page_context,
        here="overview",
        card=card,
        items=items,
        chosen=chosen.value if chosen is not None else None,
        settings=settings,
        budgets=budgets,
        map=slots,
        changes=lines,
        events=events,
        places=places,
        boots=[(*BOOT_PHASES[boot.phase], boot) for boot in boots],
    )
