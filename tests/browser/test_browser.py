"""The dashboard in a real browser: what it shows, that it is live, what its buttons do, and for whom it is made."""

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from support.browser_site import House, NewPage
from support.postgres_servers import Server, wait_until
from windlass.model.task import TaskStatus
from windlass.model.worker import WorkerStatus

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
PATIENCE_S = 20.0
FIRST_PAINT_BYTES = 100_000
PHONE = {"width": 360, "height": 740}


def live(page: Page) -> Page:
    expect(page.locator("#link")).to_have_text("live")
    return page


def confirm(page: Page, button: str, verb: str | None = None) -> None:
    """Press a button, and say yes."""
    page.get_by_role("button", name=button, exact=True).first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    dialog.get_by_role("button", name=verb or button, exact=True).click()
    expect(dialog).to_be_hidden()
    expect(page.locator("#toast")).to_be_visible()


def findings(page: Page) -> list[str]:
    """What axe finds serious, or worse."""
    page.evaluate(AXE)
    found: Any = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{violation['id']}: {violation['help']}: {[node['html'][:160] for node in violation['nodes'][:3]]}"
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
    ]


# ------------------------------------------------------------------------------------------------------------ each page


def everything(house: House) -> dict[str, str]:
    """The path of each kind of page, with something on it."""
    running, dead = house.held_task(), house.dead_letter()
    worker = house.task(running).worker_id
    cycle = house.ask(lambda store: store.cycles("renders", 1))[0]
    return {
        "overview": "/",
        "workers": "/workers",
        "workers of a fleet": "/workers?fleet=cloud",
        "workers that have ended": "/workers?ended=yes",
        "worker": f"/workers/{worker}",
        "tasks": "/tasks",
        "dead letters": "/tasks?which=failed&queue=renders",
        "nothing found": "/tasks?search=nowhere",
        "task": f"/tasks/{running}",
        "dead task": f"/tasks/{dead}",
        "cycles": "/cycles",
        "cycle": f"/cycles/{cycle.id}",
        "replay": f"/cycles/{cycle.id}?replay=yes&max_workers=3",
        "cost": "/cost",
        "not found": "/tasks/999999",
    }


@pytest.mark.parametrize(
    "looks",
    [{"color_scheme": "light"}, {"color_scheme": "dark", "viewport": PHONE}],
    ids=["light", "dark on a phone"],
)
def test_every_page_is_accessible_and_fits_its_screen(house: House, new_page: NewPage, looks: dict[str, Any]) -> None:
    page = new_page("/", may_complain=True, **looks)  # of the page that is not there
    for name, path in everything(house).items():
        page.goto(path)
        assert page.locator("h1").count() == 1, name
        assert findings(page) == [], name
        width = looks.get("viewport", {"width": 1280})["width"]
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} must not scroll sideways"


def test_the_overview_tells_what_is_happening_why_and_what_it_costs(house: House, new_page: NewPage) -> None:
    house.held_task()
    page = live(new_page("/"))
    card = page.locator("#fleet-renders")
    expect(card.locator(".decision")).to_contain_text(re.compile(r"\w+: .*\d"))
    expect(card.locator("canvas")).to_have_count(3)
    page.locator("#chart-renders-tasks").hover()
    expect(card.locator(".readout:visible")).to_contain_text("queued")
    expect(page.locator("#fleet-cloud .fleet-facts")).to_contain_text("EUR 0.0270 / h")
    expect(page.locator(".tile", has_text="Cost now")).to_contain_text("3 machines")


def test_workers_show_slots_memory_tasks_and_the_hour_that_is_paid(house: House, new_page: NewPage) -> None:
    task_id = house.held_task()
    page = live(new_page("/workers"))
    row = page.locator(f"#worker-{house.task(task_id).worker_id}")
    expect(row).to_contain_text("step 2 of 5")
    expect(row.get_by_role("img", name="40 % done")).to_be_visible()
    expect(page.locator("#map-renders .slot")).to_have_count(6)
    expect(page.locator("#map-renders .slot[data-state=busy]").first).to_be_visible()
    priced = page.locator("#worker-cloud-2")
    expect(priced).to_contain_text("15.6 / 24.0 GB")
    expect(priced).to_contain_text(re.compile(r"\d+ min \d+ s left"))
    expect(priced).to_contain_text("EUR 0.00900")


def test_a_phone_shows_every_figure_of_a_worker_and_reaches_every_button_of_a_dead_letter(
    house: House, new_page: NewPage
) -> None:
    def is_on_screen(what: Locator) -> bool:
        box = what.bounding_box()
        return box is not None and box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]

    page = live(new_page("/workers", viewport=PHONE))
    priced = page.locator("#worker-cloud-2")
    for label in ("State", "Heard", "GPU memory", "Paid for", "Cost", "Restarts"):
        figure = priced.locator(f"[data-label='{label}']")
        expect(figure).to_be_visible()
        assert is_on_screen(figure), label
    expect(priced).to_contain_text("15.6 / 24.0 GB")
    # To whoever hears the page it is a table still.
    expect(page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="cloud-2"))).to_have_count(1)
    task_id = house.dead_letter()
    page.goto("/tasks?which=failed")
    retry = page.locator(f"#task-{task_id}").get_by_role("button", name="Retry")
    expect(retry).to_be_visible()
    assert is_on_screen(retry)


def test_a_worker_tells_its_story_and_shows_its_log(house: House, new_page: NewPage) -> None:
    worker = house.active_worker()
    page = live(new_page(f"/workers/{worker.id}"))
    expect(page.locator("#answer")).to_contain_text(f"Worker {worker.id} is active")
    expect(page.locator(".story")).to_contain_text("hired:")
    expect(page.locator("#log")).to_contain_text("worker")


def test_tasks_are_found_by_what_one_knows_of_them(house: House, new_page: NewPage) -> None:
    task_id = house.enqueue("later", unique_key="order-4711")
    page = new_page("/tasks")
    page.get_by_role("searchbox").fill("order-4711")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.locator("tbody").get_by_role("link", name=str(task_id)).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Task {task_id}")
    expect(page.locator("#answer")).to_contain_text("No fleet and no worker serves the queue later")


def test_a_dead_letter_shows_its_history_and_attempts(house: House, new_page: NewPage) -> None:
    task_id = house.dead_letter("the prompt is empty")
    page = new_page("/tasks?which=failed")
    row = page.locator(f"#task-{task_id}")
    expect(row).to_contain_text("the prompt is empty")
    row.get_by_text("History").click()
    expect(row.locator(".story")).to_contain_text("attempt 1 of 1")
    page.goto(f"/tasks/{task_id}")
    page.get_by_text("RuntimeError: the prompt is empty").first.click()
    expect(page.locator("pre.text").first).to_contain_text("Traceback")


def test_a_cycle_can_be_decided_again_with_other_settings(house: House, new_page: NewPage) -> None:
    house.held_task()
    hiring = next(c for c in house.ask(lambda store: store.cycles("renders", 200)) if c.decision.startswith("spawn"))
    page = new_page("/cycles?fleet=renders")
    page.goto(f"/cycles/{hiring.id}")
    expect(page.locator(".plan")).to_contain_text("spawn")
    page.get_by_role("button", name="Replay").click()
    expect(page.get_by_text("Same decision.")).to_be_visible()
    page.get_by_label("min_workers").fill("4")
    page.get_by_role("button", name="Replay").click()
    expect(page.locator("#again li[data-change=new]").first).to_be_visible()
    page.get_by_label("min_workers").fill("99")
    page.get_by_role("button", name="Replay").click()
    expect(page.get_by_role("alert").filter(has_text="min must not exceed max")).to_be_visible()


def test_the_cost_page_says_what_was_paid_and_what_for(new_page: NewPage) -> None:
    page = live(new_page("/cost?days=7"))
    expect(page.locator(".tile", has_text="Wasted")).to_contain_text("boot")
    expect(page.get_by_role("region", name="By fleet")).to_contain_text("cloud")
    expect(page.get_by_role("region", name="By queue")).to_contain_text("clips")
    assert page.locator("svg.bars rect").count() >= 8


# ----------------------------------------------------------------------------------------------------------------- live


def test_what_changes_is_shown_without_a_reload_and_the_reader_is_not_disturbed(
    house: House, new_page: NewPage
) -> None:
    page = live(new_page("/tasks"))
    page.evaluate("window.mark = 'the same page'")
    search = page.get_by_role("searchbox")
    search.fill("half a wo")
    task_id = house.enqueue("later")
    expect(page.locator(f"#task-{task_id}")).to_be_visible()
    assert page.evaluate("window.mark") == "the same page"
    expect(search).to_be_focused()
    expect(search).to_have_value("half a wo")


def test_a_refresh_keeps_what_is_unfolded_and_draws_charts_on(house: House, new_page: NewPage) -> None:
    task_id = house.dead_letter()
    page = live(new_page("/tasks?which=failed"))
    details = page.locator(f"#task-{task_id} details")
    details.locator("summary").click()
    other = house.dead_letter()
    expect(page.locator(f"#task-{other}")).to_be_visible()
    expect(details).to_have_attribute("open", "")
    page.goto("/")
    live(page)
    chart = page.locator("#chart-renders-tasks")
    before = chart.get_attribute("data-series")
    page.evaluate("document.querySelector('#chart-renders-tasks canvas').mark = 'the same canvas'")
    expect(chart).not_to_have_attribute("data-series", before or "", timeout=30_000)
    assert page.evaluate("document.querySelector('#chart-renders-tasks canvas').mark") == "the same canvas"


def test_pausing_in_one_browser_is_seen_in_another(house: House, new_page: NewPage) -> None:
    """How soon is measured by `bench.live`."""
    house.active_worker("idle")
    one = live(new_page(house.another_link(), is_operator=False))
    other = live(new_page(house.another_link("viewer"), is_operator=False))
    expect(other.get_by_text("read only")).to_be_visible()
    assert other.locator("form[data-asks]").count() == 0
    chip = other.locator("#fleet-idle .chip")
    expect(chip).not_to_have_text("paused")
    other.evaluate("window.wasNotLoadedAgain = true")
    confirm_in(one, "#fleet-idle", "Pause")
    expect(chip).to_have_text("paused")
    expect(one.locator("#fleet-idle .chip")).to_have_text("paused")
    # So that who cannot see it hears it; what the next cycle says of it comes after and does not write over it.
    expect(other.locator("#news")).to_contain_text("Fleet idle: paused.")
    expect(other.locator("#news")).to_contain_text("Fleet idle is paused: its workers claim no tasks")
    confirm_in(one, "#fleet-idle", "Resume")
    expect(chip).not_to_have_text("paused")
    assert other.evaluate("window.wasNotLoadedAgain") is True


def test_tabs_in_the_background_hold_no_connection_and_catch_up_when_they_are_looked_at(
    house: House, new_page: NewPage
) -> None:
    first = live(new_page("/"))
    tabs = [first, *(first.context.new_page() for _ in range(6))]
    for tab in tabs:
        # Of a browser without a window every tab is in front: whether one is not is said here.
        tab.add_init_script("Object.defineProperty(document, 'hidden', {get: () => window.isBehind === true})")
        live_tab = live(tab) if tab.goto("/workers") else tab
        if tab is not tabs[-1]:
            live_tab.evaluate("window.isBehind = true; document.dispatchEvent(new Event('visibilitychange'))")
    # Six that listened on would have left the seventh no connection.
    first.evaluate("document.querySelector('h1').textContent = 'as it was left'")
    first.evaluate("window.isBehind = false; document.dispatchEvent(new Event('visibilitychange'))")
    expect(first.get_by_role("heading", name="Workers", exact=True)).to_be_visible()
    live(first)


def confirm_in(page: Page, part: str, button: str, verb: str | None = None) -> None:
    page.locator(part).get_by_role("button", name=button, exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name=verb or button, exact=True).click()
    expect(page.get_by_role("dialog")).to_be_hidden()


# -------------------------------------------------------------------------------------------------------------- actions


def until(is_so: Callable[[], bool], what: str) -> None:
    wait_until(is_so, PATIENCE_S, what)


def test_nothing_is_done_without_a_yes(house: House, new_page: NewPage) -> None:
    worker = house.active_worker()
    page = live(new_page(f"/workers/{worker.id}"))
    button = page.get_by_role("button", name="Pause")
    for leave in (lambda: page.keyboard.press("Escape"), lambda: page.get_by_role("button", name="Cancel").click()):
        button.click()
        expect(page.get_by_role("dialog")).to_be_visible()
        expect(page.get_by_role("dialog").get_by_role("button", name="Cancel")).to_be_focused()
        leave()
        expect(page.get_by_role("dialog")).to_be_hidden()
        expect(button).to_be_focused()
    assert not next(w for w in house.workers() if w.id == worker.id).is_paused


def test_a_worker_is_paused_resumed_restarted_let_go_and_ended(house: House, new_page: NewPage) -> None:
    def state(worker_id: str) -> Any:
        return house.ask(lambda store: store.worker(worker_id))

    worker = house.active_worker()
    page = live(new_page(f"/workers/{worker.id}"))
    confirm(page, "Pause")
    until(lambda: state(worker.id).is_paused, "the pause")
    expect(page.locator(".head .chip", has_text="paused")).to_be_visible()
    confirm(page, "Resume")
    until(lambda: not state(worker.id).is_paused, "the resumption")
    confirm(page, "Restart")
    until(lambda: state(worker.id).status == WorkerStatus.TERMINATED, "the restart")
    expect(page.locator(".head .chip")).to_have_text("terminated")

    leaving = house.active_worker()
    page.goto(f"/workers/{leaving.id}")
    confirm(page, "Drain")
    until(lambda: state(leaving.id).status == WorkerStatus.TERMINATED, "its leave")

    busy = house.held_task()
    ended = house.task(busy).worker_id
    assert ended is not None
    page.goto(f"/workers/{ended}")
    confirm(page, "Terminate now")
    until(lambda: state(ended).status in (WorkerStatus.ERROR, WorkerStatus.TERMINATED), "its end")
    assert state(ended).code == "MANUAL"


def test_a_fleet_is_paused_resumed_grown_and_restarted(house: House, new_page: NewPage) -> None:
    old = house.active_worker("idle").id
    page = live(new_page("/"))
    confirm_in(page, "#fleet-idle", "Pause")
    expect(page.locator("#fleet-idle .chip")).to_have_text("paused")
    expect(page.locator("#item-paused-idle")).to_be_visible()
    confirm_in(page, "#fleet-idle", "Resume")
    expect(page.locator("#item-paused-idle")).to_have_count(0)
    confirm_in(page, "#fleet-idle", "Spawn one", "Spawn")
    until(lambda: len(house.workers("idle")) == 2, "one more")
    confirm_in(page, "#fleet-idle", "Restart")
    until(lambda: old not in [worker.id for worker in house.workers("idle")], "its replacement")


def test_tasks_are_retried_and_cancelled(house: House, new_page: NewPage) -> None:
    dead = house.dead_letter()
    page = live(new_page("/tasks?which=failed"))
    row = page.locator(f"#task-{dead}")
    row.get_by_role("button", name="Retry").click()
    page.get_by_role("dialog").get_by_role("button", name="Retry").click()
    expect(page.locator("#toast")).to_have_text(f"Task {dead} requeued.")
    expect(page.locator("#news")).to_contain_text(f"Task {dead} requeued.")
    events = house.ask(lambda store: store.events(task_id=dead))
    assert "TASK_RETRIED" in [event.code for event in events]

    waiting = house.enqueue("later")
    page.goto(f"/tasks/{waiting}")
    confirm(page, "Cancel", "Cancel the task")
    assert house.until_task(waiting, TaskStatus.FAILED).error_code == "CANCELLED"
    expect(page.locator(".head .chip")).to_have_text("cancelled")

    house.until_task(dead, TaskStatus.FAILED)
    page.goto("/tasks?which=failed&queue=renders")
    confirm(page, "Retry all of renders", "Retry all")
    retried = house.ask(lambda store: store.events(task_id=dead))
    assert [event.code for event in retried].count("TASK_RETRIED") == 2


def test_what_could_not_be_done_is_said_in_the_dialog(house: House, new_page: NewPage) -> None:
    worker = house.active_worker()
    page = live(new_page(f"/workers/{worker.id}", may_complain=True))
    page.route("**/pause", lambda route: route.continue_(post_data="csrf=of-somebody-else&is_confirmed=yes"))
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text(
        "Not done: X-CSRF-Token is missing or wrong"
    )
    assert not next(w for w in house.workers() if w.id == worker.id).is_paused


def test_without_a_script_everything_can_still_be_read_and_done(house: House, new_page: NewPage) -> None:
    house.active_worker("idle")
    page = new_page("/", java_script_enabled=False)
    page.locator("#fleet-idle").get_by_role("button", name="Pause").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Pause fleet idle?")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator(".done")).to_have_text(re.compile("Fleet idle paused, with 1 worker"))
    page.locator("#fleet-idle").get_by_role("button", name="Resume").click()
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".done")).to_have_text(re.compile("Fleet idle resumed"))
    page.reload()
    expect(page.locator(".done")).to_have_count(0)


def test_whoever_did_not_open_the_link_may_look_and_not_touch(house: House, new_page: NewPage) -> None:
    page = live(new_page("/", is_operator=False))
    expect(page.get_by_text("read only")).to_be_visible()
    assert page.locator("form[data-asks]").count() == 0
    answer = httpx.post(f"{house.url}/fleets/idle/pause", data={"is_confirmed": "yes"}, trust_env=False)
    assert answer.status_code == 401
    elsewhere = {"Host": "evil.example"}
    assert httpx.get(f"{house.url}/", headers=elsewhere, trust_env=False).status_code == 401


def test_a_link_lets_one_browser_in_once_and_signing_out_ends_it(
    house: House, new_page: NewPage, chromium: Browser
) -> None:
    page = new_page(house.new_link(), is_operator=False, may_complain=True)
    expect(page.get_by_role("heading", name="Link expired")).to_be_visible()
    context = chromium.new_context(base_url=house.url)
    try:
        inside = context.new_page()
        inside.set_viewport_size(PHONE)
        inside.goto(house.another_link())
        inside.get_by_role("button", name="Sign out").click()
        expect(inside.get_by_role("button", name="Sign out")).to_have_count(0)
    finally:
        context.close()


# ------------------------------------------------------------------------------------------------------------ for whom


def test_light_and_dark_follow_the_system_until_the_reader_chooses(new_page: NewPage) -> None:
    def ground(page: Page) -> Any:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    page = new_page("/cost", color_scheme="dark")
    dark = ground(page)
    page.emulate_media(color_scheme="light")
    light = ground(page)
    assert light != dark
    page.get_by_role("button", name="Switch between light and dark").click()
    assert ground(page) == dark
    page.goto("/workers")
    assert ground(page) == dark, "the choice is kept"
    page.emulate_media(color_scheme="dark")
    page.get_by_role("button", name="Switch between light and dark").click()
    assert ground(page) == light


def test_the_keyboard_reaches_everything(house: House, new_page: NewPage) -> None:
    page = live(new_page("/workers"))
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="All fleets")).to_be_focused()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "one sees where one is"


def test_the_first_paint_is_below_100_kb(house: House, new_page: NewPage) -> None:
    page = new_page("/", may_complain=True)
    loaded = page.evaluate("""
      [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
        .filter((entry) => !entry.name.includes('/api/')).map((entry) => [entry.name, entry.encodedBodySize])
    """)
    assert len(loaded) >= 4, loaded
    assert sum(size for _, size in loaded) < FIRST_PAINT_BYTES, loaded
    assert all(name.startswith(house.url) for name, _ in loaded), "nothing comes from elsewhere"
    again = httpx.get(house.url, headers={"Accept-Encoding": "identity"}, trust_env=False)
    assert len(gzip.compress(again.content)) < FIRST_PAINT_BYTES


# ----------------------------------------------------------------------------------------------- away, back, and huge


def test_a_server_that_goes_away_is_said_and_its_return_is_noticed(house: House, new_page: NewPage) -> None:
    page = live(new_page("/tasks", may_complain=True))
    page.evaluate("window.mark = 'the same page'")
    house.kill()
    expect(page.locator("#link")).to_have_text("disconnected")
    expect(page.locator("#away")).to_contain_text(re.compile(r"Disconnected, showing what was known at \d\d:\d\d"))
    task_id = house.enqueue("later")
    house.up()
    live(page)
    expect(page.locator("#away")).to_be_hidden()
    expect(page.locator(f"#task-{task_id}")).to_be_visible()
    assert page.evaluate("window.mark") == "the same page"


def test_a_database_that_goes_away_is_said_and_its_return_is_noticed(
    house: House, new_page: NewPage, embedded_server: Server
) -> None:
    page = live(new_page("/workers", may_complain=True))
    other = new_page("/cycles", may_complain=True)
    embedded_server.crash()
    try:
        expect(page.locator("#away")).to_contain_text("the database does not answer")
        other.reload()
        expect(other.get_by_role("heading", level=1)).to_have_text("Database unavailable")
    finally:
        embedded_server.start()
    live(page)
    expect(page.locator("#away")).to_be_hidden()


def test_ten_thousand_workers_and_many_tasks_stay_usable(house: House, new_page: NewPage) -> None:
    house.execute("""
        insert into windlass.fleets (name, provider, queues, max_workers, planner_state)
        values ('huge', 'hetzner', '{huge}', 12000,
          jsonb_build_object('cadence', jsonb_build_object('planned_at', now(), 'next_plan_in_s', 3600)));
        insert into windlass.slots (fleet, slot) select 'huge', generate_series(0, 9999);
        insert into windlass.workers (id, fleet, slot, status, queues, activated_at, last_heartbeat, lease_s)
        select 'huge-' || s, 'huge', s, 'active', '{huge}', now(), now(), 86400 from generate_series(0, 9999) as s;
        insert into windlass.tasks (queue) select 'huge' from generate_series(1, 20000);
        analyze windlass.tasks; analyze windlass.workers;
    """)
    page = new_page("/workers?fleet=huge")
    expect(page.locator("tbody tr")).to_have_count(50)
    expect(page.locator("#map-huge .slot")).to_have_count(500)
    page.get_by_role("navigation", name="Pages of workers").get_by_role("link", name="Next page").click()
    expect(page.locator("#worker-huge-50")).to_be_visible()
    page.go_back()
    page.get_by_role("navigation", name="Pages of slots of huge").get_by_role("link", name="Next page").click()
    expect(page.locator("#slot-huge-500")).to_be_visible()
    expect(page.locator("#map-huge .slot")).to_have_count(500)
    page.goto("/tasks?queue=huge&which=queued")
    expect(page.locator("tbody tr")).to_have_count(50)
    page.get_by_role("link", name="Next page").click()
    expect(page.locator("tbody tr")).to_have_count(50)
    page.goto("/")
    expect(page.locator("#fleet-huge .fleet-facts")).to_contain_text("20,000")
