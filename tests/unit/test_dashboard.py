"""Pages and view models of the dashboard, without a browser."""

import gzip
import json
import re
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from windlass.dashboard import filters, rendering
from windlass.dashboard.alerts import attention_items
from windlass.dashboard.charts import fleet_charts
from windlass.dashboard.cost import BudgetView, cost_page, day_charts, round_up
from windlass.dashboard.cycles import cycle_lines, replay_cycle, replay_options
from windlass.dashboard.fleets import fleet_card, fleet_page
from windlass.dashboard.overview import overview_page
from windlass.dashboard.rendering import PageContext, Viewer, in_code, query
from windlass.dashboard.tasks import attempts_of, tasks_page, waited_s
from windlass.dashboard.workers import MAX_CELLS, SlotMap, slot_map, worker_page, workers_page
from windlass.model.action import Delete, Spawn
from windlass.model.cost import Cost
from windlass.model.cycle import Cycle, CycleDetail, Fleet
from windlass.model.errors import BadInput
from windlass.model.event import Event
from windlass.model.fleet import FleetConfig
from windlass.model.listing import Page, TaskRow, WorkerRow
from windlass.model.node import NodeState, NodeView
from windlass.model.overview import Burn, FleetOverview, Leader, OpenAlert, Overview, Sample, Work
from windlass.model.snapshot import Hold, QueueView, Snapshot
from windlass.model.task import Task, TaskStatus, TaskSummary
from windlass.model.worker import WorkerKind, WorkerStatus
from windlass.model.worker_log import WorkerLogLine
from windlass.policy.alerts import EVALUATION_INTERVAL_S, RESOLVE_AFTER_S
from windlass.policy.plan import plan

NOW = datetime(2026, 11, 15, 18, 30, tzinfo=UTC)
PAGE = PageContext(now=NOW, version="1.0", viewer=Viewer(is_operator=True, csrf="secret"))
STATIC = Path(rendering.__file__).with_name("static")
# Files that the overview loads.
ASSETS = ("windlass.css", "windlass.js", "charts.js", "idiomorph.js", "uplot.js", "icon.svg")
LIMIT_BYTES = 100_000


def fleet(**changed: Any) -> Fleet:
    plain: dict[str, Any] = {
        "name": "renders",
        "provider": "local",
        "queues": ("renders",),
        "min_workers": 0,
        "max_workers": 6,
        "is_paused": False,
        "requested_workers": 0,
        "hold": None,
        "failed_slots": (),
        "created_at": NOW,
        "planned_at": NOW,
        "next_plan_in_s": 10.0,
        "is_led": True,
    }
    return Fleet(**{**plain, **changed})


def standing(of: Fleet, **changed: Any) -> FleetOverview:
    plain: dict[str, Any] = {
        "fleet": of,
        "work": Work(),
        "workers": {WorkerStatus.ACTIVE: 1},
        "managed": 1,
        "paused": 0,
        "silent": 0,
        "idle": 0,
        "free_slots": 0,
        "decision": "spawn 3: 41 queued",
        "cycle_id": 7,
        "decided_at": NOW,
        "burn": (),
        "alerts": (),
    }
    return FleetOverview(**{**plain, **changed})


def overview(*standings: FleetOverview, leader: Leader | None = Leader("us", 1, 20.0), alerts: Any = ()) -> Overview:
    queues = {name: standing.work for standing in standings for name in standing.fleet.queues}
    return Overview(NOW, standings, queues, tuple(alerts), leader, 0)


def worker(slot: int, **changed: Any) -> WorkerRow:
    plain = dict.fromkeys(WorkerRow.__dataclass_fields__)
    plain |= {"id": f"w{slot}", "fleet": "renders", "slot": slot, "status": WorkerStatus.ACTIVE, "queues": ("renders",)}
    plain |= {"is_paused": False, "is_silent": False, "running_tasks": 0, "concurrency": 1, "created_at": NOW}
    plain |= {"restarts": 0, "late_results": 0, "metadata": {}, "is_slot_failed": False, "lease_s": 30.0}
    plain |= {"kind": WorkerKind.WORKER}
    return WorkerRow(**{**plain, **changed})


def summary(**changed: Any) -> dict[str, Any]:
    plain = dict.fromkeys(TaskSummary.__dataclass_fields__)
    plain |= {"id": 5, "queue": "renders", "status": TaskStatus.QUEUED, "priority": 0, "attempts": 0, "max_attempts": 3}
    return {**plain, "created_at": NOW - timedelta(seconds=60), **changed}


def event(code: str, reason: str, **detail: Any) -> Event:
    return Event(1, NOW, code, reason, None, None, 5, detail or None)


# ---------------------------------------------------------------------------------------------------------------- words

DURATIONS = {
    -3: "0 s",
    0.9: "0 s",
    59.9: "59 s",
    60: "1 min 0 s",
    185: "3 min 5 s",
    3_599: "59 min 59 s",
    3_600: "1 h 0 min",
    86_399: "23 h 59 min",
    86_400: "1 d 0 h",
    200_000: "2 d 7 h",
}


@pytest.mark.parametrize(("seconds", "read"), DURATIONS.items())
def test_duration_format(seconds: float, read: str) -> None:
    assert filters.duration(seconds) == read


def test_script_formats_durations_like_the_server() -> None:
    source = (STATIC / "windlass.js").read_text()
    begin = source.index("function duration(")
    function = source[begin : source.index("\n  }\n", begin) + 4]
    program = f"{function}\nconsole.log(JSON.stringify({json.dumps(list(DURATIONS))}.map(duration)))"
    try:
        done = subprocess.run(["node", "-e", program], capture_output=True, check=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("node is not installed; the browser tests cover it")
    assert json.loads(done.stdout) == list(DURATIONS.values())


@pytest.mark.parametrize(
    ("seconds", "read"),
    {None: filters.UNKNOWN, 0.042: "0.04 s", 8.13: "8.1 s", 42: "42 s", 200: "3.3 min", 9_000: "2.5 h"}.items(),
)
def test_brief_durations_have_two_significant_digits(seconds: float | None, read: str) -> None:
    assert filters.brief(seconds) == read


def test_count_at_the_limit_is_marked() -> None:
    assert (filters.count(1_204), filters.count(100_000)) == ("1,204", "100,000+")


def test_control_characters_of_logs_are_escaped() -> None:
    assert filters.plain("a\x1b[31mb\nc\x00") == "a\\x1b[31mb\nc\\x00"


def test_json_is_indented_and_values_are_unchanged() -> None:
    text = r'{"a": [1, {"b": "x,{[\"\\"}], "c": {}, "d": [], "e": null}'
    assert filters.indented_json(text) == json.dumps(json.loads(text), indent=2)
    assert filters.indented_json("[1e-400, 1.50]") == "[\n  1e-400,\n  1.50\n]"
    assert filters.indented_json("9" * 5_000) == "9" * 5_000


@pytest.mark.parametrize(
    "text",
    ["[" * 7_900 + "]" * 7_900, "[" * 8 + "0" + ", 0" * 5_200 + "]" * 8, "[" * 500_000 + "]" * 500_000],
    ids=["deep", "long below some depth", "a megabyte"],
)
def test_indented_json_is_bounded(text: str) -> None:
    assert len(filters.indented_json(text)) <= min(len(text) * 8, 130_000)


def test_backticks_become_code_and_markup_is_escaped() -> None:
    assert in_code("run `a <b>` & <i>") == "run <code>a &lt;b&gt;</code> &amp; &lt;i&gt;"


def test_query_leaves_out_empty_parameters() -> None:
    assert query({"queue": "a b", "which": None, "cursor": "x="}, "/tasks") == "/tasks?queue=a+b&cursor=x%3D"


# --------------------------------------------------------------------------------------------------------------- charts


def sample(seconds: int, **changed: Any) -> Sample:
    plain = dict.fromkeys(Sample.__dataclass_fields__, 0.0) | {"at": NOW + timedelta(seconds=seconds), "currency": None}
    return Sample(**{**plain, **changed})


def test_fleet_without_prices_has_a_throughput_chart() -> None:
    titles = [chart.title for chart in fleet_charts(standing(fleet()), NOW, [sample(-5)])]
    assert titles == ["Tasks", "Workers", "Completed per minute"]
    priced = fleet_charts(standing(fleet(), burn=(Burn("EUR", 2_500_000, 1),)), NOW, [])
    assert priced[2].title == "Cost per hour, EUR"
    assert json.loads(priced[2].data)["series"][0]["values"] == [2.5]


def test_chart_has_a_text_summary() -> None:
    now = standing(fleet(), work=Work(queued=41, running=2))
    chart = fleet_charts(now, NOW, [sample(-600, queued=57), sample(-300, queued=50)])[0]
    assert chart.summary == "Tasks over the last 10 min: now queued 41, running 2; at most queued 57, running 2."


def test_day_bars_are_proportional_to_cost() -> None:
    days = ["2026-11-13", "2026-11-14", "2026-11-15"]
    costs = [Cost(days[0], "EUR", task_micros=3_000_000, idle_micros=1_000_000), Cost(days[2], "EUR", 2_000_000)]
    (bars,) = day_charts(days, costs)
    heights = [sum(piece.height for piece in bar.pieces) for bar in bars.bars]
    assert heights[0] == pytest.approx(2 * heights[2], rel=0.01)
    assert heights[1] == 0
    assert all(piece.x + piece.width <= bars.width for bar in bars.bars for piece in bar.pieces)


@pytest.mark.parametrize("most", [1, 999_000, 9_990_000, 10_000_000, 42_600_000, 61_000_000])
def test_highest_bar_fills_more_than_half_of_the_chart(most: int) -> None:
    (chart,) = day_charts(["2026-06-01"], [Cost("2026-06-01", "EUR", most)])
    (lowest, *_, highest), ((piece,), *_) = chart.lines, [bar.pieces for bar in chart.bars]
    assert 0.5 <= piece.height / (lowest[0] - highest[0]) <= 1
    assert len(chart.lines) <= 6


@pytest.mark.parametrize(("number", "next_one"), {0: 1, 1: 1, 3: 5, 5.5: 10, 190: 200, 501: 1_000}.items())
def test_axis_ends_at_a_round_number(number: float, next_one: int) -> None:
    assert round_up(number) == next_one


# ---------------------------------------------------------------------------------------------------------------- slots


def test_slot_map_shows_every_slot_and_its_worker() -> None:
    found = slot_map(
        fleet(failed_slots=(4,)),
        [worker(0, running_tasks=1, task_id=9), worker(1), worker(2, is_paused=True), worker(7)],
    )
    assert [cell.state for cell in found.cells] == ["busy", "idle", "paused", "empty", "failed", "empty", "idle"]
    assert found.cells[0].label == "Slot 0: w0, busy, task 9"
    assert found.cells[-1].slot == 7, "a worker above a lowered max_workers"


@pytest.mark.parametrize(("node", "state"), [("dead", "error"), ("alive", "idle"), ("absent", "idle")])
def test_worker_whose_ray_node_is_dead_is_not_idle(node: str, state: str) -> None:
    found = slot_map(fleet(), [worker(0, kind=WorkerKind.NODE, node=NodeView(NodeState(node), NOW, NOW))])
    assert found.cells[0].state == state


def test_slot_map_of_large_fleet_shows_occupied_slots_only() -> None:
    found = slot_map(fleet(max_workers=10_000), [worker(slot) for slot in range(MAX_CELLS)])
    assert (len(found.cells), found.is_whole) == (MAX_CELLS, False)


# ------------------------------------------------------------------------------------------------------------ attention


def test_healthy_fleet_needs_no_attention() -> None:
    assert attention_items(overview(standing(fleet()))) == []


ATTENTION = {
    "no leader": (overview(standing(fleet()), leader=None), "No orchestrator runs the control loop"),
    "hold": (overview(standing(fleet(hold=Hold("FAILURE_RATE", "5 of 6 failed", NOW)))), "on hold: 5 of 6 failed."),
    "failed slot": (overview(standing(fleet(failed_slots=(3,)))), "1 slot of fleet renders reached max_restarts"),
    "paused fleet": (overview(standing(fleet(is_paused=True))), "paused"),
    "failed tasks": (overview(standing(fleet(), work=Work(dead=2))), "2 failed tasks"),
    "silent worker": (overview(standing(fleet(), silent=1)), "1 worker of fleet renders sent no heartbeat"),
    "fleet without cycles": (
        overview(standing(fleet(planned_at=NOW - timedelta(hours=1)))),
        "Fleet renders has had no cycle",
    ),
}


@pytest.mark.parametrize(("seen", "expected"), ATTENTION.values(), ids=ATTENTION)
def test_each_condition_is_listed_once_with_advice(seen: Overview, expected: str) -> None:
    (item,) = attention_items(seen)
    assert expected in item.what
    assert item.advice


def test_unconfirmed_alert_is_shown_as_past() -> None:
    lately, seen_at = NOW - timedelta(seconds=2 * EVALUATION_INTERVAL_S), NOW - timedelta(seconds=RESOLVE_AFTER_S - 20)
    alert = OpenAlert(1, "renders", "ALL_CRASHED", "critical", "all 3 workers crashed", lately, lately, None)
    (item,) = attention_items(overview(standing(fleet(), alerts=(alert,))))
    assert (item.what, item.is_critical) == ("Fleet renders: all 3 workers crashed.", True)
    alert = OpenAlert(1, "renders", "ALL_CRASHED", "critical", "all 3 workers crashed", seen_at, seen_at, None)
    (item,) = attention_items(overview(standing(fleet(), alerts=(alert,))))
    assert item.what == f"Until {seen_at:%H:%M:%S} UTC: Fleet renders: all 3 workers crashed."
    assert not item.is_critical
    assert f"after {RESOLVE_AFTER_S:g} s without confirmation" in item.advice
    # It does not hide the hold.
    held = fleet(hold=Hold("ALL_CRASHED", "all 3 workers crashed", NOW))
    assert [item.id for item in attention_items(overview(standing(held, alerts=(alert,))))] == [
        "hold-renders",
        "alert-1",
    ]


def test_condition_covered_by_an_alert_is_not_listed_again() -> None:
    alert = OpenAlert(1, "renders", "FAILURE_RATE", "critical", "5 of 6 failed", NOW, NOW, None)
    held = standing(fleet(hold=Hold("FAILURE_RATE", "5 of 6 failed", NOW)), alerts=(alert,))
    (item,) = attention_items(overview(held))
    assert (item.is_critical, item.restart_fleet, item.abandons_machines) == (True, "renders", False)


def test_restart_that_abandons_machines_warns_about_billing() -> None:
    reason = "its key for hetzner has changed"
    alert = OpenAlert(1, "renders", "OTHER_ACCOUNT", "critical", reason, NOW, NOW, None)
    held = fleet(hold=Hold("OTHER_ACCOUNT", reason, NOW, is_total=True))
    for alerts in ((), (alert,)):
        (item,) = attention_items(overview(standing(held, alerts=alerts)))
        assert (item.restart_fleet, item.abandons_machines) == ("renders", True)
        assert item.advice.endswith("abandon them with `windlass restart renders`: they may still be charged.")
    # The confirmation of the button says so.
    operator = PageContext(NOW, "1", Viewer(is_operator=True))
    for now, expected in ((held, 2), (fleet(hold=Hold("FAILURE_RATE", "5 of 6 failed", NOW)), 0)):
        page = overview_page(operator, overview(standing(now)), {}, ())
        assert page.count("Machines that its API key does not list are abandoned and may still be billed.") == expected


# ------------------------------------------------------------------------------------------------------------- attempts


def test_attempts_are_listed_newest_first_with_outcome() -> None:
    done = Task(
        **summary(status=TaskStatus.COMPLETE, attempts=2, started_at=NOW, finished_at=NOW, worker_id="w2"),
        payload="null",
        result=None,
    )
    failed = Event(1, NOW, "TASK_ERROR", "attempt 1", None, "w1", 5, {"attempt": 1, "error_code": "E", "error": "boom"})
    attempts = attempts_of(done, [failed])
    assert [(a.number, a.worker_id, a.outcome, a.error) for a in attempts] == [
        (2, "w2", "complete", None),
        (1, "w1", "failed", "boom"),
    ]


# --------------------------------------------------------------------------------------------------------------- replay

SETTINGS = FleetConfig(queues=("renders",), handler="app:work", max_workers=4, policy="buffered")
SEEN = Snapshot(NOW, "renders", QueueView(queued=8), machines=(), listed_at=NOW, settings=SETTINGS)


def stored() -> CycleDetail:
    made = plan(SEEN, SETTINGS)
    return CycleDetail(Cycle(1, "renders", 1, NOW, NOW, made.decision, made.actions, None, 0, None), SEEN)


def test_replay_with_same_settings_gives_same_decision() -> None:
    given = {option.name: option.value for option in replay_options(SETTINGS, {})}
    again = replay_cycle(stored(), SETTINGS, given)
    assert again.is_same
    assert {step.change for step in again.then + again.now} == {"same"}


def test_replay_with_other_settings_shows_differences() -> None:
    again = replay_cycle(stored(), SETTINGS, {"max_workers": "1"})
    assert [step.change for step in again.then].count("gone") == 3
    assert len(again.now) == 1


@pytest.mark.parametrize(
    "given", [{"max_workers": "many"}, {"min_workers": "9"}, {"policy": "astrology"}, {"max_workers": ""}]
)
def test_replay_refuses_invalid_settings(given: dict[str, str]) -> None:
    with pytest.raises(BadInput, match=r"\w+.*\.$"):
        replay_cycle(stored(), SETTINGS, given)


# ---------------------------------------------------------------------------------------------------------------- pages


def test_overview_page_with_its_files_is_below_100_kb() -> None:
    samples = [sample(30 * n, queued=n % 57, running=n % 7, active=n % 5, currency="EUR") for n in range(120)]
    fleets = [standing(fleet(name=f"fleet-{n}")) for n in range(5)]
    page = overview_page(PAGE, overview(*fleets), {s.fleet.name: samples for s in fleets}, [])
    total = len(gzip.compress(page.encode())) + sum(len(gzip.compress((STATIC / name).read_bytes())) for name in ASSETS)
    assert total < LIMIT_BYTES


def test_history_of_failed_task_counts_attempts_only() -> None:
    row = TaskRow(**dict.fromkeys(TaskRow.__dataclass_fields__) | summary(attempts=2) | {"ready_at": NOW})
    events = [
        event("TASK_ERROR", "first", attempt=1),
        event("TASK_RETRIED", "by hand"),
        event("TASK_FAILED", "second", attempt=1),
    ]
    page = tasks_page(
        PAGE, Page((row,), None), work=Work(), queues=[], has_more_queues=False, queue=None, which="failed",
        search=None, histories={row.id: events}, is_first=True,
    )  # fmt: skip
    assert "History, 2 attempts" in page
    assert "by hand" in page


@pytest.mark.parametrize(
    ("changed", "waited"),
    [
        ({"attempts": 1, "started_at": NOW + timedelta(seconds=7)}, 7.0),
        ({"attempts": 2, "started_at": NOW + timedelta(seconds=700)}, None),
        ({"attempts": 1, "started_at": NOW - timedelta(seconds=7)}, None),
        ({"attempts": 1, "started_at": NOW + timedelta(seconds=7), "status": TaskStatus.ERROR}, None),
        ({"attempts": 0}, None),
    ],
    ids=["first attempt", "later attempt", "queued for the second attempt", "retrying", "not started"],
)
def test_waiting_time_is_that_of_the_first_attempt(changed: dict[str, Any], waited: float | None) -> None:
    fields = dict.fromkeys(TaskRow.__dataclass_fields__) | {"created_at": NOW - timedelta(days=1), "ready_at": NOW}
    assert waited_s(TaskRow(**fields | changed)) == waited


def test_user_content_is_escaped() -> None:
    script = "<script>alert(1)</script>"
    row = TaskRow(
        **dict.fromkeys(TaskRow.__dataclass_fields__) | summary(unique_key=script, error=script, error_code=script)
    )
    listed = tasks_page(
        PAGE,
        Page((row,), None),
        work=Work(),
        queues=["q"],
        has_more_queues=True,
        queue=None,
        which="failed",
        search=script,
        histories={5: [event("TASK_FAILED", script)]},
        is_first=True,
    )
    worker_html = worker_page(
        PAGE, worker(1, reason=script), answer=[script], history=[(NOW, script)], tasks=[],
        log=[WorkerLogLine(NOW, script, "w1")], diagnostics={"last_lines": [script]}, ray_dashboard=None,
    )  # fmt: skip
    assert script not in listed + worker_html
    assert "&lt;script&gt;" in listed
    assert "more queues: add queue=NAME to the address" in listed
    assert "&lt;script&gt;" in worker_html


def announced(page: str) -> dict[str, str]:
    return dict(re.findall(r'id="([^"]+)" data-announce-key="([^"]*)"', page))


def test_screen_readers_announce_changes_and_not_numbers() -> None:
    def page(queued: int, decision: str, **changed: Any) -> str:
        seen = standing(fleet(**changed), work=Work(queued=queued, dead=queued), decision=decision)
        return overview_page(PAGE, overview(seen), {}, [])

    before = announced(page(41, "spawn 3: 41 queued, clears in 9 min"))
    assert before == {"decision-renders": "spawn", "item-failed-renders": "shown"}
    assert announced(page(1_234, "spawn 1,200: 1,234 queued, clears in 2 h")) == before
    assert announced(page(41, "no change: 41 queued")) != before
    paused = announced(page(41, "spawn 3: 41 queued", is_paused=True))
    assert paused.keys() - before.keys() == {"item-paused-renders"}


NODE = NodeView(NodeState.ALIVE, NOW, NOW, "n1", {"memory": 4 * 2**30, "disk": 2.0, "CPU": 4.0}, {"CPU": 3.0})


@pytest.mark.parametrize(
    ("node", "state"),
    [
        (NODE, "Ray: alive"),
        (replace(NODE, state=NodeState.DEAD, note="its raylet is gone"), "Ray: dead"),
        (NodeView(NodeState.ABSENT, NOW, NOW), "Ray: not joined"),
    ],
)
def test_ray_node_shows_membership_and_resource_use(node: NodeView, state: str) -> None:
    row = worker(0, kind=WorkerKind.NODE, node=node)
    url = "http://127.0.0.1:8265"
    worker_html = worker_page(PAGE, row, answer=["x"], history=[], tasks=[], log=(), ray_dashboard=url)
    listed = workers_page(
        PAGE, Page((row,), None), fleets=["renders"], maps=[], counts={},
        ray_dashboards={"renders": url, "other": "x"}, fleet="renders", is_terminated=False, is_first=True,
    )  # fmt: skip
    assert state in worker_html
    assert state in listed
    assert f'href="{url}"' in worker_html
    assert listed.count("dashboard of") == 1
    assert ("CPU 3 of 4" in listed) == bool(node.total)
    assert ("0.0 of 4.0 GiB in use" in worker_html) == bool(node.total)
    assert (node.note or "x") in worker_html


def test_pages_contain_no_inline_script_or_style() -> None:
    page = overview_page(PAGE, overview(standing(fleet())), {"renders": [sample(0)]}, [])
    assert "style=" not in page
    assert page.count("<script") == page.count('<script src="/static/')


def test_viewers_see_no_buttons() -> None:
    seen = overview(standing(fleet()))
    assert "csrf" in overview_page(PAGE, seen, {}, [])
    assert "csrf" not in overview_page(PageContext(now=NOW, version="1.0"), seen, {}, [])


def test_budget_shows_used_share_and_action() -> None:
    spent = Cost(None, "EUR", task_micros=9_000_000)
    budget = BudgetView("renders", "day", "EUR", 9_000_000, 10_000_000, "stop-spawning")
    page = cost_page(
        PAGE,
        since=NOW,
        chosen_days=1,
        fleet=None,
        days=["2026-11-15"],
        by_day=[],
        by_fleet=[],
        by_queue=[],
        totals=[spent],
        forecasts=[],
        volumes=[],
        budgets=[budget],
    )
    assert "per day: EUR 9.00 of 10.00" in page
    assert "90 % of the budget used" in page
    assert "When used up: no worker is spawned" in page
    assert budget.level == "warn"


def test_large_slot_map_has_a_next_page() -> None:
    first = slot_map(fleet(max_workers=10_000), [worker(slot) for slot in range(3)], next_cursor="c1")
    last = slot_map(fleet(max_workers=10_000), [worker(slot) for slot in range(3, 5)], is_first_page=False)

    def page(of: SlotMap) -> str:
        return workers_page(
            PAGE, Page((worker(0),), None), fleets=["renders"], maps=[of], counts={}, ray_dashboards={},
            fleet=None, is_terminated=False, is_first=True,
        )  # fmt: skip

    assert "slots 0 to 2" in page(first)
    assert 'href="/workers?fleet=renders&amp;slots=c1" rel="next"' in page(first)
    assert "slots 3 to 4" in page(last)
    assert 'rel="next"' not in page(last)
    assert '<a class="button small" href="/workers?fleet=renders">First page</a>' in page(last)


@pytest.mark.parametrize(("script", "license_name"), [("uplot", "MIT"), ("idiomorph", "Zero-Clause BSD")])
def test_vendored_script_has_its_license(script: str, license_name: str) -> None:
    assert (STATIC / f"{script}.js").stat().st_size > 0
    assert license_name in (STATIC / f"{script}.LICENSE.txt").read_text()


def test_event_does_not_repeat_its_label() -> None:
    events = [event("WORKER_REGISTERED", "registered on vm"), event("WORKER_ACTIVATED", "heartbeat 0 s ago")]
    page = overview_page(PAGE, overview(standing(fleet())), {}, events)
    assert "registered</strong> on vm<" in page
    assert "activated</strong>: heartbeat 0 s ago<" in page


def test_card_and_head_of_a_fleet_show_what_was_done() -> None:
    done = ("spawned 1 of 3", "2 refused: no capacity")
    standing_fleet = standing(fleet(), decision="spawn 3: 3 queued", done=done)
    note = '<strong>spawn 3</strong>: 3 queued <span class="soft">(spawned 1 of 3, 2 refused: no capacity)</span>'
    assert note in overview_page(PAGE, overview(standing_fleet), {}, [])
    card = fleet_card(standing_fleet, [], NOW)
    assert note in fleet_page(
        PAGE, card, items=[], chosen=None, settings=None, budgets=[], slots=slot_map(fleet(), []), changes=[],
        events=[], places=[], boots=[],
    )  # fmt: skip
    # What screen readers announce is the decision alone: results follow within seconds.
    assert card.decision_kind == "spawn"


def test_list_of_cycles_shows_what_was_done_not_what_was_planned() -> None:
    """Defect 6 of the cloud review: planned spawns and deletions were shown as done."""
    planned = (Spawn(0, "wanted"), Spawn(1, "wanted"), Spawn(2, "wanted"), Delete("w9", "m9", "IDLE", "idle"))
    decision = "spawn 3: 3 queued"
    unconfirmed = Cycle(1, "renders", 1, NOW, NOW, decision, planned, None, 0, None)
    partly = Cycle(
        2, "renders", 1, NOW, NOW, decision, planned, {"workers_spawned": 2, "workers_terminated": 1}, 0, None
    )
    lines = [line.actions for line in cycle_lines([unconfirmed, partly])]
    assert lines == ["3 spawns not confirmed, 1 deletion not confirmed", "spawned 2 of 3, deleted 1"]
