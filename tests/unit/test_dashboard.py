"""What pages are made of, without a browser: words, charts, the slot map, what needs attention, replay."""

import gzip
import json
import re
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from windlass.dashboard import filters as words
from windlass.dashboard import pages
from windlass.dashboard.alerts import attention
from windlass.dashboard.attempts import attempts_of
from windlass.dashboard.charts import day_bars, fleet_charts, round_up
from windlass.dashboard.render import PageContext, Viewer, assets, in_code, query
from windlass.dashboard.replay import decide_again, knobs
from windlass.dashboard.slots import MAX_CELLS, SlotMap, slot_map
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
from windlass.policy.alerts import LOOK_INTERVAL_S, RESOLVE_AFTER_S
from windlass.policy.plan import plan

NOW = datetime(2026, 11, 15, 18, 30, tzinfo=UTC)
SETTING = PageContext(now=NOW, version="1.0", viewer=Viewer(may_act=True, csrf="secret"))
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
        "hired": 1,
        "paused": 0,
        "silent": 0,
        "idle": 0,
        "free_slots": 0,
        "decision": "hiring 3: 41 waiting",
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
def test_a_duration_reads_as_people_say_it(seconds: float, read: str) -> None:
    assert words.duration(seconds) == read


def test_the_browser_counts_ages_on_in_the_same_words() -> None:
    script = next(asset for address, asset in assets().items() if "/windlass-" in address and address.endswith(".js"))
    source = script.content.decode()
    begin = source.index("function duration(")
    function = source[begin : source.index("\n  }\n", begin) + 4]
    program = f"{function}\nconsole.log(JSON.stringify({json.dumps(list(DURATIONS))}.map(duration)))"
    try:
        done = subprocess.run(["node", "-e", program], capture_output=True, check=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("no node here: the browser tests see the same")
    assert json.loads(done.stdout) == list(DURATIONS.values())


@pytest.mark.parametrize(
    ("seconds", "read"),
    {None: words.UNKNOWN, 0.042: "0.04 s", 8.13: "8.1 s", 42: "42 s", 200: "3.3 min", 9_000: "2.5 h"}.items(),
)
def test_a_figure_has_as_many_digits_as_mean_something(seconds: float | None, read: str) -> None:
    assert words.brief(seconds) == read


def test_what_was_not_counted_to_its_end_says_so() -> None:
    assert (words.count(1_204), words.count(100_000)) == ("1,204", "100,000+")


def test_no_control_character_of_a_log_reaches_the_page() -> None:
    assert words.plain("a\x1b[31mb\nc\x00") == "a\\x1b[31mb\nc\\x00"


def test_a_payload_is_set_in_lines_and_every_value_is_as_it_was_written() -> None:
    text = r'{"a": [1, {"b": "x,{[\"\\"}], "c": {}, "d": [], "e": null}'
    assert words.indented_json(text) == json.dumps(json.loads(text), indent=2)
    assert words.indented_json("[1e-400, 1.50]") == "[\n  1e-400,\n  1.50\n]"
    assert words.indented_json("9" * 5_000) == "9" * 5_000


@pytest.mark.parametrize(
    "text",
    ["[" * 7_900 + "]" * 7_900, "[" * 8 + "0" + ", 0" * 5_200 + "]" * 8, "[" * 500_000 + "]" * 500_000],
    ids=["deep", "long below some depth", "a megabyte"],
)
def test_no_payload_grows_far_beyond_its_size_when_it_is_shown(text: str) -> None:
    assert len(words.indented_json(text)) <= min(len(text) * 8, 130_000)


def test_backticks_become_code_and_nothing_else_becomes_markup() -> None:
    assert in_code("run `a <b>` & <i>") == "run <code>a &lt;b&gt;</code> &amp; &lt;i&gt;"


def test_an_address_names_only_what_was_asked_for() -> None:
    assert query({"queue": "a b", "which": None, "cursor": "x="}, "/tasks") == "/tasks?queue=a+b&cursor=x%3D"


# --------------------------------------------------------------------------------------------------------------- charts


def sample(seconds: int, **changed: Any) -> Sample:
    plain = dict.fromkeys(Sample.__dataclass_fields__, 0.0) | {"at": NOW + timedelta(seconds=seconds), "currency": None}
    return Sample(**{**plain, **changed})


def test_a_fleet_without_prices_shows_what_it_completes_instead_of_what_it_costs() -> None:
    titles = [chart.title for chart in fleet_charts(standing(fleet()), NOW, [sample(-5)])]
    assert titles == ["Tasks", "Workers", "Completed per minute"]
    priced = fleet_charts(standing(fleet(), burn=(Burn("EUR", 2_500_000, 1),)), NOW, [])
    assert priced[2].title == "Cost per hour, EUR"
    assert json.loads(priced[2].drawing)["series"][0]["values"] == [2.5]


def test_a_chart_says_what_it_shows_to_whoever_cannot_see_it() -> None:
    now = standing(fleet(), work=Work(queued=41, running=2))
    chart = fleet_charts(now, NOW, [sample(-600, queued=57), sample(-300, queued=50)])[0]
    assert chart.summary == "Tasks over the last 10 minutes: now waiting 41, running 2; at most waiting 57, running 2."


def test_the_bars_of_days_are_as_high_as_what_was_paid() -> None:
    days = ["2026-11-13", "2026-11-14", "2026-11-15"]
    costs = [Cost(days[0], "EUR", task_micros=3_000_000, idle_micros=1_000_000), Cost(days[2], "EUR", 2_000_000)]
    (bars,) = day_bars(days, costs)
    heights = [sum(piece.height for piece in bar.pieces) for bar in bars.bars]
    assert heights[0] == pytest.approx(2 * heights[2], rel=0.01)
    assert heights[1] == 0
    assert all(piece.x + piece.width <= bars.width for bar in bars.bars for piece in bar.pieces)


@pytest.mark.parametrize(("number", "next_one"), {0: 1, 1: 1, 3: 5, 5.5: 10, 190: 200, 501: 1_000}.items())
def test_an_axis_ends_at_a_number_that_reads_well(number: float, next_one: int) -> None:
    assert round_up(number) == next_one


# ---------------------------------------------------------------------------------------------------------------- slots


def test_the_slot_map_shows_every_place_and_who_is_in_it() -> None:
    found = slot_map(
        fleet(failed_slots=(4,)),
        [worker(0, running_tasks=1, task_id=9), worker(1), worker(2, is_paused=True), worker(7)],
    )
    assert [cell.state for cell in found.cells] == ["busy", "idle", "paused", "empty", "failed", "empty", "idle"]
    assert found.cells[0].words == "Slot 0: w0, busy, task 9"
    assert found.cells[-1].slot == 7, "a maximum that was lowered leaves workers beyond it"


def test_of_a_fleet_of_thousands_only_who_is_there_is_drawn() -> None:
    found = slot_map(fleet(max_workers=10_000), [worker(slot) for slot in range(MAX_CELLS)])
    assert (len(found.cells), found.is_whole) == (MAX_CELLS, False)


# ------------------------------------------------------------------------------------------------------------ attention


def test_when_all_is_well_nothing_needs_attention() -> None:
    assert attention(overview(standing(fleet()))) == []


MATTERS = {
    "nobody leads": (overview(standing(fleet()), leader=None), "Nobody runs the control loop"),
    "a hold": (overview(standing(fleet(hold=Hold("FAILURE_RATE", "5 of 6 failed", NOW)))), "on hold: 5 of 6 failed."),
    "a failed slot": (overview(standing(fleet(failed_slots=(3,)))), "1 slot of fleet renders failed"),
    "a pause": (overview(standing(fleet(is_paused=True))), "paused"),
    "dead letters": (overview(standing(fleet(), work=Work(dead=2))), "2 dead letters"),
    "silence": (overview(standing(fleet(), silent=1)), "1 worker of fleet renders fell silent"),
    "nobody runs it": (overview(standing(fleet(planned_at=NOW - timedelta(hours=1)))), "Nobody has run fleet renders"),
}


@pytest.mark.parametrize(("seen", "told"), MATTERS.values(), ids=MATTERS)
def test_what_needs_attention_is_told_once_with_what_to_do(seen: Overview, told: str) -> None:
    (matter,) = attention(seen)
    assert told in matter.what
    assert matter.advice


def test_an_alert_that_is_not_seen_any_more_is_told_of_as_past() -> None:
    lately, seen_at = NOW - timedelta(seconds=2 * LOOK_INTERVAL_S), NOW - timedelta(seconds=RESOLVE_AFTER_S - 20)
    alert = OpenAlert(1, "renders", "ALL_CRASHED", "critical", "all 3 workers crashed", lately, lately, None)
    (matter,) = attention(overview(standing(fleet(), alerts=(alert,))))
    assert (matter.what, matter.is_bad) == ("Fleet renders: all 3 workers crashed.", True)
    alert = OpenAlert(1, "renders", "ALL_CRASHED", "critical", "all 3 workers crashed", seen_at, seen_at, None)
    (matter,) = attention(overview(standing(fleet(), alerts=(alert,))))
    assert matter.what == f"Until {seen_at:%H:%M:%S} UTC: Fleet renders: all 3 workers crashed."
    assert not matter.is_bad
    assert f"after {RESOLVE_AFTER_S:g} s without it" in matter.advice
    # And does not keep what lasts from being told.
    held = fleet(hold=Hold("ALL_CRASHED", "all 3 workers crashed", NOW))
    assert [matter.id for matter in attention(overview(standing(held, alerts=(alert,))))] == ["hold-renders", "alert-1"]


def test_what_an_alert_tells_is_not_told_again() -> None:
    alert = OpenAlert(1, "renders", "FAILURE_RATE", "critical", "5 of 6 failed", NOW, NOW, None)
    held = standing(fleet(hold=Hold("FAILURE_RATE", "5 of 6 failed", NOW)), alerts=(alert,))
    (matter,) = attention(overview(held))
    assert (matter.is_bad, matter.restarts, matter.gives_up) == (True, "renders", False)


def test_machines_of_another_account_can_be_given_up_and_that_they_may_cost_is_said() -> None:
    reason = "its key for hetzner has changed"
    alert = OpenAlert(1, "renders", "OTHER_ACCOUNT", "critical", reason, NOW, NOW, None)
    held = fleet(hold=Hold("OTHER_ACCOUNT", reason, NOW, is_total=True))
    for alerts in ((), (alert,)):
        (matter,) = attention(overview(standing(held, alerts=alerts)))
        assert (matter.restarts, matter.gives_up) == ("renders", True)
        assert matter.advice.endswith("give them up with `windlass restart FLEET`: they may still be charged.")
    # Whoever presses a button that gives them up is asked with that in view.
    operator = PageContext(NOW, "1", Viewer(may_act=True))
    for now, told in ((held, 2), (fleet(hold=Hold("FAILURE_RATE", "5 of 6 failed", NOW)), 0)):
        page = pages.overview_page(operator, overview(standing(now)), {}, ())
        assert page.count("Machines that its key does not list are given up: they may still be charged.") == told


# ------------------------------------------------------------------------------------------------------------- attempts


def test_attempts_are_told_newest_first_with_how_each_ended() -> None:
    done = Task(
        **summary(status=TaskStatus.COMPLETE, attempts=2, started_at=NOW, finished_at=NOW, worker_id="w2"),
        payload="null",
        result=None,
    )
    failed = Event(1, NOW, "TASK_ERROR", "attempt 1", None, "w1", 5, {"attempt": 1, "error_code": "E", "error": "boom"})
    told = attempts_of(done, [failed])
    assert [(a.number, a.worker_id, a.outcome, a.error) for a in told] == [
        (2, "w2", "complete", None),
        (1, "w1", "failed", "boom"),
    ]


# --------------------------------------------------------------------------------------------------------------- replay

SETTINGS = FleetConfig(queues=("renders",), handler="app:work", max_workers=4)
SEEN = Snapshot(NOW, "renders", QueueView(queued=8), machines=(), listed_at=NOW, settings=SETTINGS)


def stored() -> CycleDetail:
    made = plan(SEEN, SETTINGS)
    return CycleDetail(Cycle(1, "renders", 1, NOW, NOW, made.decision, made.actions, None, 0, None), SEEN)


def test_deciding_again_with_the_same_settings_comes_to_the_same() -> None:
    given = {knob.name: knob.value for knob in knobs(SETTINGS, {})}
    again = decide_again(stored(), SETTINGS, given)
    assert again.is_same
    assert {step.change for step in again.then + again.now} == {"same"}


def test_other_settings_show_what_would_have_been() -> None:
    again = decide_again(stored(), SETTINGS, {"max_workers": "1"})
    assert [step.change for step in again.then].count("gone") == 3
    assert len(again.now) == 1


@pytest.mark.parametrize(
    "given", [{"max_workers": "many"}, {"min_workers": "9"}, {"policy": "astrology"}, {"max_workers": ""}]
)
def test_settings_that_cannot_be_are_refused_in_a_sentence(given: dict[str, str]) -> None:
    with pytest.raises(BadInput, match=r"\w+.*\.$"):
        decide_again(stored(), SETTINGS, given)


# ---------------------------------------------------------------------------------------------------------------- pages


def test_the_first_page_is_below_100_kb_with_all_it_loads() -> None:
    samples = [sample(30 * n, queued=n % 57, running=n % 7, active=n % 5, currency="EUR") for n in range(120)]
    fleets = [standing(fleet(name=f"fleet-{n}")) for n in range(5)]
    page = pages.overview_page(SETTING, overview(*fleets), {s.fleet.name: samples for s in fleets}, [])
    total = len(gzip.compress(page.encode())) + sum(len(asset.compressed) for asset in assets().values())
    assert total < LIMIT_BYTES


def test_a_history_counts_attempts_and_not_everything_that_happened() -> None:
    row = TaskRow(**dict.fromkeys(TaskRow.__dataclass_fields__) | summary(attempts=2) | {"ready_at": NOW})
    happened = [
        event("TASK_ERROR", "first", attempt=1),
        event("TASK_RETRIED", "by hand"),
        event("TASK_FAILED", "second", attempt=1),
    ]
    page = pages.tasks_page(
        SETTING, Page((row,), None), queues=[], has_more_queues=False, queue=None, which="failed", search=None,
        histories={row.id: happened}, is_first=True,
    )  # fmt: skip
    assert "History, 2 attempts" in page
    assert "by hand" in page


@pytest.mark.parametrize(
    ("changed", "waited"),
    [
        ({"attempts": 1, "started_at": NOW + timedelta(seconds=7)}, 7.0),
        ({"attempts": 2, "started_at": NOW + timedelta(seconds=700)}, None),
        ({"attempts": 1, "started_at": NOW - timedelta(seconds=7)}, None),
        ({"attempts": 0}, None),
    ],
    ids=["a first attempt", "a further attempt", "waiting for its second", "none yet"],
)
def test_a_wait_is_that_of_the_first_attempt_from_when_it_could_begin(
    changed: dict[str, Any], waited: float | None
) -> None:
    fields = dict.fromkeys(TaskRow.__dataclass_fields__) | {"created_at": NOW - timedelta(days=1), "ready_at": NOW}
    assert pages.waited_s(TaskRow(**fields | changed)) == waited


def test_nothing_that_people_or_workers_wrote_becomes_markup() -> None:
    evil = "<script>alert(1)</script>"
    row = TaskRow(**dict.fromkeys(TaskRow.__dataclass_fields__) | summary(unique_key=evil, error=evil, error_code=evil))
    listed = pages.tasks_page(
        SETTING,
        Page((row,), None),
        queues=["q"],
        has_more_queues=True,
        queue=None,
        which="failed",
        search=evil,
        histories={5: [event("TASK_FAILED", evil)]},
        is_first=True,
    )
    of_worker = pages.worker_page(
        SETTING, worker(1, reason=evil), answer=[evil], history=[(NOW, evil)], tasks=[], log=[evil], log_problem=None,
        ray_dashboard=None,
    )  # fmt: skip
    assert evil not in listed + of_worker
    assert "&lt;script&gt;" in listed
    assert "and more: write queue=NAME into the address" in listed
    assert "&lt;script&gt;" in of_worker


def announced(page: str) -> dict[str, str]:
    return dict(re.findall(r'id="([^"]+)" data-announce="([^"]*)"', page))


def test_screen_readers_hear_what_became_something_else_and_not_each_number() -> None:
    def page(queued: int, decision: str, **changed: Any) -> str:
        seen = standing(fleet(**changed), work=Work(queued=queued, dead=queued), decision=decision)
        return pages.overview_page(SETTING, overview(seen), {}, [])

    before = announced(page(41, "hiring 3: 41 waiting, clears in 9 min"))
    assert before == {"decision-renders": "hiring", "matter-dead-renders": "there"}
    assert announced(page(1_234, "hiring 1,200: 1,234 waiting, clears in 2 h")) == before
    assert announced(page(41, "nothing to do: 41 waiting")) != before
    paused = announced(page(41, "hiring 3: 41 waiting", is_paused=True))
    assert paused.keys() - before.keys() == {"matter-paused-renders"}


NODE = NodeView(NodeState.ALIVE, NOW, NOW, "n1", {"memory": 4 * 2**30, "disk": 2.0, "CPU": 4.0}, {"CPU": 3.0})


@pytest.mark.parametrize(
    ("node", "state"),
    [
        (NODE, "Ray: alive"),
        (replace(NODE, state=NodeState.DEAD, note="its raylet is gone"), "Ray: dead"),
        (NodeView(NodeState.ABSENT, NOW, NOW), "Ray: not joined"),
    ],
)
def test_a_ray_node_says_whether_ray_has_it_and_what_of_it_is_in_use(node: NodeView, state: str) -> None:
    row = worker(0, kind=WorkerKind.NODE, node=node)
    url = "http://127.0.0.1:8265"
    of_worker = pages.worker_page(
        SETTING, row, answer=["x"], history=[], tasks=[], log=None, log_problem="none", ray_dashboard=url
    )
    listed = pages.workers_page(
        SETTING, Page((row,), None), fleets=["renders"], maps=[], counts={},
        ray_dashboards={"renders": url, "other": "x"}, fleet="renders", is_ended=False, is_first=True,
    )  # fmt: skip
    assert state in of_worker
    assert state in listed
    assert f'href="{url}"' in of_worker
    assert listed.count("dashboard of") == 1
    assert ("CPU 3 of 4" in listed) == bool(node.total)
    assert ("0.0 of 4.0 GiB in use" in of_worker) == bool(node.total)
    assert (node.note or "x") in of_worker


def test_no_page_has_a_script_or_a_style_of_its_own() -> None:
    page = pages.overview_page(SETTING, overview(standing(fleet())), {"renders": [sample(0)]}, [])
    assert "style=" not in page
    assert page.count("<script") == page.count('<script src="/static/')


def test_whoever_may_not_act_sees_no_button_that_does() -> None:
    seen = overview(standing(fleet()))
    assert "csrf" in pages.overview_page(SETTING, seen, {}, [])
    assert "csrf" not in pages.overview_page(PageContext(now=NOW, version="1.0"), seen, {}, [])


def test_a_budget_says_how_much_of_it_is_used_and_what_happens_then() -> None:
    spent = Cost(None, "EUR", task_micros=9_000_000)
    budget = pages.BudgetView("renders", "day", "EUR", 9_000_000, 10_000_000, "stop-spawning")
    page = pages.cost_page(
        SETTING,
        since=NOW,
        chosen_days=1,
        fleet=None,
        days=["2026-11-15"],
        by_day=[],
        by_fleet=[],
        by_queue=[],
        totals=[spent],
        forecasts=[],
        budgets=[budget],
    )
    assert "per day: EUR 9.00 of 10.00" in page
    assert "90 % of the budget used" in page
    assert "stop-spawning" in page
    assert budget.weight == "warn"


def test_a_large_slot_map_leads_on_to_its_next_page() -> None:
    first = slot_map(fleet(max_workers=10_000), [worker(slot) for slot in range(3)], next_cursor="c1")
    last = slot_map(fleet(max_workers=10_000), [worker(slot) for slot in range(3, 5)], is_first_page=False)

    def page(of: SlotMap) -> str:
        return pages.workers_page(
            SETTING, Page((worker(0),), None), fleets=["renders"], maps=[of], counts={}, ray_dashboards={},
            fleet=None, is_ended=False, is_first=True,
        )  # fmt: skip

    assert "slots 0 to 2" in page(first)
    assert 'href="/workers?fleet=renders&amp;slots=c1" rel="next"' in page(first)
    assert "slots 3 to 4" in page(last)
    assert 'rel="next"' not in page(last)
    assert '<a class="button small" href="/workers?fleet=renders">First page</a>' in page(last)


def test_every_file_that_is_served_names_where_it_is_from() -> None:
    licence = Path(pages.__file__).with_name("static") / "uplot.LICENSE.txt"
    assert "MIT" in licence.read_text()
