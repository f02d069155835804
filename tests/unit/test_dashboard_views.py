"""View models of the dashboard: queues that nothing serves, currencies, settings, ranges and marked decisions."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest

from windlass.cost.report import Forecast, TotalCost
from windlass.dashboard.alerts import MAX_UNSERVED_ITEMS, attention_items, fleet_items
from windlass.dashboard.charts import RANGE_S, ChartRange, fleet_charts, history_s
from windlass.dashboard.cost import MIN_CHART_DAYS, BudgetView, cost_page, currency_summaries, days_with_cost
from windlass.dashboard.cycles import REPLAY_SETTINGS, cycles_page, replay_options
from windlass.dashboard.filters import cents
from windlass.dashboard.fleets import fleet_card, fleet_page, settings_of
from windlass.dashboard.overview import overview_page
from windlass.dashboard.queues import queues_page
from windlass.dashboard.rendering import PageContext, Viewer, error_page
from windlass.dashboard.tasks import tasks_page
from windlass.dashboard.workers import slot_map, worker_page, workers_page
from windlass.model.cost import Cost, VolumeCost
from windlass.model.cycle import Cycle, Fleet
from windlass.model.fleet import FleetConfig
from windlass.model.listing import Page, TaskRow, WorkerRow
from windlass.model.overview import FleetOverview, Leader, OpenAlert, Overview, Work
from windlass.model.provider_defaults import IGNORED_BY_ADAPTIVE, POLICY_SETTINGS, reason_without_effect
from windlass.model.task import TaskStatus
from windlass.model.worker import WorkerKind, WorkerStatus
from windlass.policy.stages.budget import CONSEQUENCES

NOW = datetime(2026, 11, 18, 3, 0, tzinfo=UTC)
FLEET = Fleet("gpus", "local", ("renders",), 0, 6, False, 0, None, (), NOW - timedelta(days=9), NOW, 10.0, True)
STANDING = FleetOverview(FLEET, Work(), {WorkerStatus.ACTIVE: 2}, 2, 0, 0, 0, 0, "steady: 0 queued", 7, NOW, (), ())


def overview(queues: dict[str, Work], **changed: Any) -> Overview:
    return replace(Overview(NOW, (STANDING,), queues, (), Leader("us", 1, 20.0), 0), **changed)


def test_queue_with_tasks_that_nothing_serves_needs_attention() -> None:
    queues = {"renders": Work(queued=3), "nosuch": Work(queued=2), "empty": Work(dead=1), "by-hand": Work(queued=1)}
    (item,) = attention_items(overview(queues, workers_by_queue={"by-hand": 1}))
    assert item.what == "No fleet and no worker serves queue nosuch, which has 2 tasks."
    assert (item.link, item.link_label) == ("/queues/nosuch", "View queue")
    # Tasks that wait for later or for their retry have no worker to run them either.
    (item,) = attention_items(overview({"later": Work(scheduled=1, retrying=1)}))
    assert "which has 2 tasks" in item.what


def test_many_unserved_queues_are_one_item() -> None:
    queues = {f"made-up-{number}": Work(queued=1) for number in range(MAX_UNSERVED_ITEMS + 1)}
    (item,) = attention_items(overview(queues))
    assert "4 queues with tasks (made-up-0, made-up-1, made-up-2, ...)" in item.what
    assert item.link == "/queues"


def test_fleet_page_lists_its_own_conditions_only() -> None:
    failed = OpenAlert(1, None, "DEAD_LETTERS", "warning", "6 tasks in queue other failed", NOW, NOW, None)
    paused = replace(STANDING, fleet=replace(FLEET, name="other", is_paused=True))
    seen = overview({"nosuch": Work(queued=1)}, alerts=(failed,), fleets=(STANDING, paused))
    assert len(attention_items(seen)) == 3
    assert fleet_items(seen, "gpus") == []
    assert [item.id for item in fleet_items(seen, "other")] == ["paused-other"]


def test_each_currency_has_its_own_summary() -> None:
    summaries = currency_summaries([Cost(None, "USD", 5), Cost(None, "EUR", 3)], [], [])
    assert [(one.currency, one.total and one.total.task_micros, one.forecast) for one in summaries] == [
        ("EUR", 3, None),
        ("USD", 5, None),
    ]


def test_summary_of_cost_includes_volumes() -> None:
    volumes = [VolumeCost("v1", ("a", "b"), 100, "USD", 7, 1), VolumeCost("v2", ("c",), 10, "GBP", 2, 1)]
    summaries = currency_summaries([Cost(None, "USD", 5, is_estimate=True)], [], volumes)
    assert [one.sum for one in summaries] == [TotalCost("GBP", 0, 2, False), TotalCost("USD", 5, 7, True)]
    assert [one.sum and one.sum.total_micros for one in summaries] == [2, 12]


@pytest.mark.parametrize(
    ("first", "shown"), [(0, 30), (10, 20), (29, MIN_CHART_DAYS), (None, MIN_CHART_DAYS)],
    ids=["all days", "from the tenth", "only today", "no cost"],
)  # fmt: skip
def test_cost_chart_begins_with_the_first_day_that_has_cost(first: int | None, shown: int) -> None:
    days = [f"2026-10-{day:02}" for day in range(1, 31)]
    costs = [Cost(day, "EUR", 1) for day in days[first:]] if first is not None else []
    chosen = days_with_cost(days, costs)
    assert len(chosen) == shown
    assert chosen[-1] == days[-1]


def test_settings_are_masked_and_changed_ones_come_first() -> None:
    config = FleetConfig(queues=("renders",), handler="app:work", max_workers=3, env={"API_KEY": "hunter2hunter2"})
    settings = settings_of(config)
    assert "hunter2" not in repr(settings)
    assert {setting.name for setting in settings} == set(FleetConfig.model_fields)
    changed = [setting.name for setting in settings if not setting.is_default]
    assert {"env", "handler", "max_workers", "queues"} <= set(changed)
    assert [setting.name for setting in settings][: len(changed)] == changed


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        pytest.param({"provider": "hetzner"}, {"provider"}, id="hetzner"),
        pytest.param({"provider": "local"}, set(), id="local"),
        pytest.param({"provider": "ray-local", "engine": "ray"}, {"provider"}, id="ray-local"),
        pytest.param({"provider": "runpod", "runpod": {"image": "app:1"}}, {"provider", "runpod"}, id="runpod"),
        # One is the default of the class, and two that of the provider.
        pytest.param(
            {"provider": "hetzner", "concurrency": 1}, {"provider", "concurrency"}, id="a default of other providers"
        ),
        pytest.param({"provider": "local", "policy": "threshold"}, {"policy"}, id="a policy"),
        # idle_timeout_s selects the policy buffered.
        pytest.param({"provider": "local", "idle_timeout_s": 7}, {"idle_timeout_s"}, id="a policy that follows"),
    ],
)
def test_settings_are_compared_with_the_defaults_of_the_provider(given: dict[str, Any], changed: set[str]) -> None:
    settings = settings_of(FleetConfig.model_validate({"handler": "app:work", **given}))
    assert {setting.name for setting in settings if not setting.is_default} == {"handler", *changed}


POLICIES = get_args(FleetConfig.model_fields["policy"].annotation)


def replayed_fleet(**settings: Any) -> FleetConfig:
    return FleetConfig.model_validate({"queues": ("renders",), "handler": "app:work", **settings})


def test_every_replay_setting_has_a_group_label_and_description() -> None:
    offered = set()
    for policy in POLICIES:
        options = replay_options(replayed_fleet(policy=policy), {})
        offered |= {option.name for option in options}
        assert all(option.group and option.label != option.name and option.description for option in options)
    assert offered == set(REPLAY_SETTINGS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("provider", ["local", "hetzner", "ray"])
def test_replay_offers_the_scaling_settings_that_the_policy_reads(policy: str, provider: str) -> None:
    def is_read(setting: str) -> bool:
        return reason_without_effect(provider, policy, setting, has_gpu=False, has_volume=False) is None

    scaling = {*POLICY_SETTINGS, *IGNORED_BY_ADAPTIVE, "min_scaling_interval_s", "min_workers", "max_workers"}
    read = {setting for setting in scaling if is_read(setting)}
    settings = replayed_fleet(provider=provider, policy=policy, engine="ray" if provider == "ray" else None)
    assert {option.name for option in replay_options(settings, {})} & scaling == read
    # A replay with another policy offers the settings of that policy.
    other = replay_options(settings.model_copy(update={"policy": "threshold"}), {"policy": policy})
    assert {option.name for option in other} & scaling == read


def test_empty_pages_show_commands_as_code() -> None:
    context = PageContext(NOW, "1.0")
    empty: Page[Any] = Page((), None)
    nothing = Overview(NOW, (), {}, (), Leader("us", 1, 20.0), 0)
    pages = [
        overview_page(context, nothing, {}, ()),
        queues_page(context, nothing),
        workers_page(
            context, empty, fleets=[], maps=[], counts={}, ray_dashboards={}, fleet=None, is_terminated=False,
            is_first=True,
        ),
        tasks_page(
            context, empty, work=Work(), queues=[], has_more_queues=False, queue=None, which=None, search=None,
            histories={}, is_first=True,
        ),
        cycles_page(
            context, empty, fleets=[], fleet=None, has_all=False, charts=[], chosen=None, is_first=True
        ),
    ]  # fmt: skip
    for page in pages:
        assert "`" not in page
        assert "<code>windlass" in page


def test_chart_range_is_the_chosen_one_or_the_age_of_the_fleet() -> None:
    young = replace(FLEET, created_at=NOW - timedelta(minutes=10))
    assert history_s(young, NOW) == 600
    assert history_s(FLEET, NOW) == 3_600
    assert {history_s(young, NOW, chosen) for chosen in ChartRange} == set(RANGE_S.values())


def test_decisions_are_marked_in_the_chart_of_workers() -> None:
    def cycle(minutes: int) -> Cycle:
        at = NOW - timedelta(minutes=minutes)
        return Cycle(minutes, "gpus", 1, at, at, f"spawn {minutes}: 9 queued", (), None, 0, None)

    charts = fleet_charts(STANDING, NOW, [], [cycle(0)])
    assert json.loads(charts[0].data)["marks"] == []
    assert json.loads(charts[1].data)["marks"] == [{"at": NOW.timestamp(), "text": "spawn 0: 9 queued"}]
    # Older than the chart.
    charts = fleet_charts(STANDING, NOW, [], [cycle(5)])
    assert json.loads(charts[1].data)["marks"] == []


# ------------------------------------------------------------------------------------------------------ started by hand

OPERATOR = PageContext(NOW, "1.0", Viewer(is_operator=True))
BY_HAND = replace(
    STANDING,
    fleet=replace(FLEET, name="default", queues=(), max_workers=10, planned_at=None, next_plan_in_s=None),
    managed=0,
    by_hand=2,
    decision=None,
    cycle_id=None,
    decided_at=None,
)


def worker(**changed: Any) -> WorkerRow:
    known = {"id": "w", "fleet": "default", "status": WorkerStatus.ACTIVE, "kind": WorkerKind.WORKER, "queues": ("q",)}
    known |= {"is_paused": False, "is_silent": False, "running_tasks": 0, "concurrency": 1, "created_at": NOW}
    known |= {"restarts": 0, "late_results": 0, "metadata": {}, "is_slot_failed": False, "lease_s": 30.0}
    return WorkerRow(**{**dict.fromkeys(WorkerRow.__dataclass_fields__), **known, **changed})


def page_of_fleet(standing: FleetOverview) -> str:
    return fleet_page(
        OPERATOR, fleet_card(standing, [], NOW), items=[], chosen=None, settings=None, budgets=[],
        slots=slot_map(standing.fleet, []), changes=[], events=[], places=[], boots=[],
    )  # fmt: skip


@pytest.mark.parametrize("is_page_of_fleet", [False, True])
def test_fleet_of_workers_started_by_hand_has_no_limits_and_no_buttons(is_page_of_fleet: bool) -> None:
    def page(standing: FleetOverview) -> str:
        if is_page_of_fleet:
            return page_of_fleet(standing)
        return overview_page(OPERATOR, overview({}, fleets=(standing,)), {}, ())

    shown = page(BY_HAND)
    assert "2 workers started by hand" in shown
    assert "Nothing spawns or replaces" in shown
    assert "Started by hand; windlass.toml has no fleet default." in shown
    for wrong in ("windlass up", "of 10", "Add worker", "Deploy", "/fleets/default/pause"):
        assert wrong not in shown
    # A pause can be ended.
    assert "/fleets/default/resume" in page(replace(BY_HAND, fleet=replace(BY_HAND.fleet, is_paused=True)))
    # A fleet of the configuration whose first cycle is about to run, beside a worker started by hand.
    first = page(replace(BY_HAND, is_configured=True))
    assert "Add worker" in first
    assert "2 more started by hand" in first
    assert "No cycle yet." in first
    assert "windlass up" not in first


@pytest.mark.parametrize(
    ("silent", "by_hand", "what", "advice"),
    [
        (1, 0, "within its lease.", "No action needed: its tasks are requeued and the worker is replaced."),
        (2, 0, "within their leases.", "No action needed: their tasks are requeued and the workers are replaced."),
        (1, 1, "within its lease.", "Its tasks are requeued. A worker that was started by hand is not replaced."),
    ],
)
def test_silent_workers_are_promised_a_replacement_only_if_spawned(
    silent: int, by_hand: int, what: str, advice: str
) -> None:
    (item,) = attention_items(overview({}, fleets=(replace(STANDING, silent=silent, by_hand=by_hand),)))
    assert item.what.endswith(what)
    assert item.advice == advice


def test_slots_that_stay_empty_are_counted() -> None:
    def what(*slots: int) -> str:
        failed = replace(STANDING, fleet=replace(FLEET, failed_slots=slots))
        return attention_items(overview({}, fleets=(failed,)))[0].what

    assert what(3) == "1 slot of fleet gpus reached max_restarts and stays empty."
    assert what(3, 4) == "2 slots of fleet gpus reached max_restarts and stay empty."


def test_worker_started_by_hand_is_shown_as_such_and_promises_no_replacement() -> None:
    def pages(row: WorkerRow) -> tuple[str, str]:
        listed = workers_page(
            OPERATOR, Page((row,), None), fleets=["default"], maps=[], counts={}, ray_dashboards={}, fleet=None,
            is_terminated=False, is_first=True,
        )  # fmt: skip
        return listed, worker_page(OPERATOR, row, answer=["x"], history=[], tasks=[], log=(), ray_dashboard=None)

    by_hand, one = pages(worker())
    assert "started by hand" in by_hand
    assert "started by hand" in one
    assert "<dt>Started</dt>" in one
    assert "Nothing replaces it." in one
    assert "registers again under a new id" in one
    for wrong in ("machine", "min_workers", "Restart worker", "is billed"):
        assert wrong not in one
    spawned, one = pages(worker(slot=0))
    assert "started by hand" not in spawned + one
    assert "<dt>Spawned</dt>" in one
    assert "A fleet below min_workers spawns another." in one
    # `windlass up` starts the dispatcher of a Ray fleet, which has no slot.
    dispatcher, one = pages(worker(kind=WorkerKind.DISPATCHER))
    assert "started by hand" not in dispatcher + one
    assert ">dispatcher<" in dispatcher
    for wrong in ("machine", "min_workers", "is billed"):
        assert wrong not in one


# ---------------------------------------------------------------------------------------------------------------- lists


@pytest.mark.parametrize(
    ("statuses", "buttons"),
    [
        ((TaskStatus.COMPLETE,), set()),
        ((TaskStatus.COMPLETE, TaskStatus.QUEUED), {"Cancel"}),
        ((TaskStatus.RUNNING,), {"Cancel"}),
        ((TaskStatus.FAILED,), {"Retry"}),
        ((TaskStatus.ERROR,), {"Retry", "Cancel"}),
    ],
    ids=lambda value: "-".join(sorted(value)) or "none",
)
def test_buttons_for_selected_tasks_are_those_that_change_one(statuses: tuple[Any, ...], buttons: set[str]) -> None:
    known = dict.fromkeys(TaskRow.__dataclass_fields__) | {"id": 1, "queue": "q", "ready_at": NOW, "attempts": 3}
    known |= {"started_at": NOW, "finished_at": NOW, "payload_preview": "1"}
    rows = tuple(TaskRow(**known | {"status": status}) for status in statuses)
    page = tasks_page(
        OPERATOR, Page(rows, None), work=Work(), queues=[], has_more_queues=False, queue=None, which=None, search=None,
        histories={}, is_first=True,
    )  # fmt: skip
    assert {name for name in ("Retry", "Cancel") if f'value="{name} the selected tasks"' in page} == buttons
    assert ("Selected tasks:" in page) == bool(buttons)


def test_lists_of_tasks_have_no_counts_while_searching() -> None:
    def page(search: str | None) -> str:
        return tasks_page(
            OPERATOR, Page((), None), work=Work(queued=41), queues=[], has_more_queues=False, queue=None, which=None,
            search=search, histories={}, is_first=True,
        )  # fmt: skip

    assert "Queued <small>41</small>" in page(None)
    assert "41" not in page("order")


def test_list_of_terminated_workers_is_named_and_has_no_billing_period() -> None:
    def page(*, is_terminated: bool) -> str:
        row = worker(status=WorkerStatus.TERMINATED, terminated_at=NOW) if is_terminated else worker()
        return workers_page(
            OPERATOR, Page((row,), None), fleets=[], maps=[], counts={WorkerStatus.ACTIVE: 16}, ray_dashboards={},
            fleet=None, is_terminated=is_terminated, is_first=True,
        )  # fmt: skip

    live, terminated = page(is_terminated=False), page(is_terminated=True)
    assert ("16 active" in live, "Billing period" in live) == (True, True)
    assert ("16 active" in terminated, "Billing period" in terminated) == (False, False)
    assert '<p class="soft">Terminated workers, newest first</p>' in terminated


@pytest.mark.parametrize("is_unknown", [False, True])
def test_page_without_a_caller_has_no_advice_for_viewers(is_unknown: bool) -> None:
    context = PageContext(NOW, "1.0", Viewer(is_unknown=is_unknown))
    for can_read in (False, True):
        page = error_page(context, "Not found", "No such page.", can_read=can_read)
        assert ("read only" in page, '<a href="/">Overview</a>' in page) == (not is_unknown, can_read)


# ----------------------------------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize(
    ("micros", "text"),
    {0: "0.00", 1: "<0.01", 9_999: "<0.01", 10_000: "0.01", 123_400: "0.12", 1_204_000_000: "1204.00"}.items(),
)
def test_amounts_in_a_table_have_two_decimals(micros: int, text: str) -> None:
    assert cents(micros) == text


def test_cost_page_marks_estimates_and_has_no_waste_of_queues() -> None:
    cost = Cost("q", "EUR", task_micros=9_000_000)

    def page(workers: int, **tables: Any) -> str:
        empty: dict[str, Any] = {"by_day": [], "by_fleet": [], "by_queue": [], "volumes": [], "budgets": []}
        return cost_page(
            OPERATOR, since=NOW, chosen_days=1, fleet=None, days=["2026-11-18"], totals=[cost],
            forecasts=[Forecast("EUR", 7_000_000, workers, 0, 0)], **(empty | tables),
        )  # fmt: skip

    wasted = "Wasted</abbr></th>"
    assert wasted in page(0, by_fleet=[cost])
    assert wasted not in page(0, by_queue=[cost])
    # A machine that still runs is not settled.
    assert ("~7.00" in page(1), "~7.00" in page(0)) == (True, False)


@pytest.mark.parametrize("action", get_args(FleetConfig.model_fields["budget_action"].annotation))
def test_budget_says_what_happens_when_it_is_used_up(action: str) -> None:
    assert BudgetView("gpus", "day", "EUR", 1, 2, action).consequence == CONSEQUENCES[action]
