"""The dashboard in Chromium: contents, live updates, operations, accessibility, outages and large fleets."""

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from support.browser_site import BrowserSite, NewPage
from support.postgres_servers import Server, wait_until
from windlass.model.task import TaskStatus
from windlass.model.worker import WorkerStatus

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
TIMEOUT_S = 20.0
FIRST_LOAD_BYTES = 100_000
PHONE = {"width": 360, "height": 740}


def live(page: Page) -> Page:
    expect(page.locator("#connection")).to_have_text("live")
    return page


def confirm(page: Page, button: str, confirm_button: str | None = None) -> None:
    """Click a button of the page and confirm in the dialog."""
    page.get_by_role("button", name=button, exact=True).first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    dialog.get_by_role("button", name=confirm_button or button, exact=True).click()
    expect(dialog).to_be_hidden()
    expect(page.locator("#toast")).to_be_visible()


def accessibility_violations(page: Page) -> list[str]:
    """Serious and critical violations that axe reports."""
    page.evaluate(AXE)
    found: Any = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{violation['id']}: {violation['help']}: {[node['html'][:160] for node in violation['nodes'][:3]]}"
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
    ]


# ---------------------------------------------------------------------------------------------------------------- pages


def page_paths(site: BrowserSite) -> dict[str, str]:
    """The path of every kind of page, each with content."""
    running, failed = site.start_blocked_task(), site.create_failed_task()
    site.enqueue("nosuch", {"prompt": "a lighthouse " * 30})
    worker = site.task(running).worker_id
    cycle = site.query(lambda store: store.cycles("renders", 1))[0]
    return {
        "overview": "/",
        "overview of a week": "/?range=7d",
        "queues": "/queues",
        "queue": "/queues/renders",
        "queue that nothing serves": "/queues/nosuch",
        "fleet": "/fleets/renders",
        "fleet of a week": "/fleets/cloud?range=7d",
        "errors": "/errors",
        "no errors": "/errors?search=nowhere",
        "workers": "/workers",
        "workers of a fleet": "/workers?fleet=cloud",
        "terminated workers": "/workers?terminated=yes",
        "worker": f"/workers/{worker}",
        "tasks": "/tasks",
        "failed tasks": "/tasks?status=failed&queue=renders",
        "search": "/tasks?search=lighthouse",
        "no search result": "/tasks?search=nowhere",
        "task": f"/tasks/{running}",
        "failed task": f"/tasks/{failed}",
        "cycles": "/cycles",
        "cycles of a fleet": "/cycles?fleet=renders&all=yes",
        "cycle": f"/cycles/{cycle.id}",
        "replay": f"/cycles/{cycle.id}?replay=yes&max_workers=3",
        "cost": "/cost",
        "runbooks": "/runbooks#SLOT_FAILED",
        "what if": "/fleets/renders/what-if",
        "what if without history": "/fleets/idle/what-if",
        "not found": "/tasks/999999",
    }


@pytest.mark.parametrize(
    "options",
    [{"color_scheme": "light"}, {"color_scheme": "dark", "viewport": PHONE}],
    ids=["light", "dark on a phone"],
)
def test_every_page_is_accessible_and_fits_the_screen(
    site: BrowserSite, new_page: NewPage, options: dict[str, Any]
) -> None:
    page = new_page("/", allow_errors=True, **options)  # the 404 is logged
    for name, path in page_paths(site).items():
        page.goto(path)
        assert page.locator("h1").count() == 1, name
        assert accessibility_violations(page) == [], name
        width = options.get("viewport", {"width": 1280})["width"]
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} scrolls sideways"


def test_overview_shows_decisions_charts_and_cost(site: BrowserSite, new_page: NewPage) -> None:
    site.start_blocked_task()
    page = live(new_page("/"))
    card = page.locator("#fleet-renders")
    expect(card.locator(".decision")).to_contain_text(re.compile(r"\w+: .*\d"))
    expect(card.locator("canvas")).to_have_count(3)
    page.locator("#chart-renders-tasks").hover()
    expect(card.locator(".readout:visible")).to_contain_text("queued")
    expect(page.locator("#fleet-cloud .fleet-facts")).to_contain_text("EUR 0.0270 / h")
    expect(page.locator(".tile", has_text="Cost now")).to_contain_text("3 machines")


def test_workers_show_slots_memory_tasks_and_billing_period(site: BrowserSite, new_page: NewPage) -> None:
    task_id = site.start_blocked_task()
    page = live(new_page("/workers"))
    row = page.locator(f"#worker-{site.task(task_id).worker_id}")
    expect(row).to_contain_text("step 2 of 5")
    expect(row.get_by_role("img", name="40 % done")).to_be_visible()
    expect(page.locator("#map-renders .slot")).to_have_count(6)
    expect(page.locator("#map-renders .slot[data-state=busy]").first).to_be_visible()
    priced = page.locator("#worker-cloud-2")
    expect(priced).to_contain_text("15.6 / 24.0 GB")
    expect(priced).to_contain_text(re.compile(r"\d+ min \d+ s left"))
    expect(priced).to_contain_text("EUR 0.00900")


def test_phone_lists_each_worker_and_task_in_a_few_lines(site: BrowserSite, new_page: NewPage) -> None:
    def is_on_screen(what: Locator) -> bool:
        box = what.bounding_box()
        return box is not None and box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]

    def row_height(row: Locator) -> float:
        box = row.bounding_box()
        assert box is not None
        return box["height"]

    page = live(new_page("/workers", viewport=PHONE))
    priced = page.locator("#worker-cloud-2")
    for part in ("c-name", "c-state", "c-main", "c-end"):
        value = priced.locator(f".{part}")
        expect(value).to_be_visible()
        assert is_on_screen(value), part
    assert row_height(priced) < 100
    # For screen readers it is still a table.
    expect(page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="cloud-2"))).to_have_count(1)
    queued = site.enqueue("later", {"prompt": "a lighthouse " * 20})
    page.goto("/tasks?queue=later")
    assert row_height(page.locator(f"#task-{queued}")) < 70
    task_id = site.create_failed_task()
    page.goto("/tasks?status=failed")
    assert is_on_screen(page.locator(".tabs [aria-current]")), "the chosen filter"
    retry = page.locator(f"#task-{task_id}").get_by_role("button", name="Retry")
    expect(retry).to_be_visible()
    assert is_on_screen(retry)


def test_worker_page_shows_state_history_and_log(site: BrowserSite, new_page: NewPage) -> None:
    worker = site.active_worker()
    page = live(new_page(f"/workers/{worker.id}"))
    expect(page.locator("#answer")).to_contain_text(f"Worker {worker.id} is active")
    expect(page.locator(".timeline")).to_contain_text("spawned:")
    expect(page.locator("#log")).to_contain_text("worker")


def test_task_is_found_by_its_unique_key(site: BrowserSite, new_page: NewPage) -> None:
    task_id = site.enqueue("later", unique_key="order-4711")
    page = new_page("/tasks")
    page.get_by_role("searchbox").fill("order-4711")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.locator("tbody").get_by_role("link", name=str(task_id)).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Task {task_id}")
    expect(page.locator("#answer")).to_contain_text("No fleet and no worker serves the queue later")


def test_failed_task_shows_history_and_attempts(site: BrowserSite, new_page: NewPage) -> None:
    task_id = site.create_failed_task("the prompt is empty")
    page = new_page("/tasks?status=failed")
    row = page.locator(f"#task-{task_id}")
    expect(row).to_contain_text("the prompt is empty")
    row.get_by_text("History").click()
    expect(row.locator(".timeline")).to_contain_text("attempt 1 of 1")
    page.goto(f"/tasks/{task_id}")
    page.get_by_text("RuntimeError: the prompt is empty").first.click()
    expect(page.locator("pre.text").first).to_contain_text("Traceback")


def test_cycle_is_replayed_with_other_settings(site: BrowserSite, new_page: NewPage) -> None:
    site.start_blocked_task()
    spawning = next(c for c in site.query(lambda store: store.cycles("renders", 200)) if c.decision.startswith("spawn"))
    page = new_page("/cycles?fleet=renders")
    page.goto(f"/cycles/{spawning.id}")
    expect(page.locator(".plan")).to_contain_text("spawn")
    page.get_by_role("button", name="Replay").click()
    expect(page.get_by_text("Same decision.")).to_be_visible()
    page.get_by_label("min_workers").fill("4")
    page.get_by_role("button", name="Replay").click()
    expect(page.locator("#again li[data-change=new]").first).to_be_visible()
    expect(page.get_by_text("was 1")).to_be_visible()
    sizes = "all => all.map(one => [one.getBoundingClientRect().top, one.getBoundingClientRect().height].join())"
    aligned = page.locator("fieldset", has_text="Minimum workers").locator("input").evaluate_all(sizes)
    assert len(aligned) == 4 and len(set(aligned)) == 1, "a changed field does not move the others"
    page.get_by_label("min_workers").fill("99")
    page.get_by_role("button", name="Replay").click()
    expect(page.get_by_role("alert").filter(has_text="min must not exceed max")).to_be_visible()


def test_cost_page_shows_cost_by_kind_fleet_and_queue(new_page: NewPage) -> None:
    page = live(new_page("/cost?days=7"))
    expect(page.locator(".tile", has_text="Wasted")).to_contain_text("boot")
    expect(page.get_by_role("region", name="By fleet")).to_contain_text("cloud")
    expect(page.get_by_role("region", name="By queue")).to_contain_text("clips")
    assert page.locator("svg.bars rect").count() >= 8


# ----------------------------------------------------------------------------------------------------------------- live


def test_refresh_adds_new_tasks_and_keeps_focus_and_typed_text(site: BrowserSite, new_page: NewPage) -> None:
    page = live(new_page("/tasks"))
    page.evaluate("window.mark = 'the same page'")
    search = page.get_by_role("searchbox")
    search.fill("half a wo")
    task_id = site.enqueue("later")
    expect(page.locator(f"#task-{task_id}")).to_be_visible()
    assert page.evaluate("window.mark") == "the same page"
    expect(search).to_be_focused()
    expect(search).to_have_value("half a wo")


def test_refresh_keeps_open_details_and_charts(site: BrowserSite, new_page: NewPage) -> None:
    task_id = site.create_failed_task()
    page = live(new_page("/tasks?status=failed"))
    details = page.locator(f"#task-{task_id} details")
    details.locator("summary").click()
    other = site.create_failed_task()
    expect(page.locator(f"#task-{other}")).to_be_visible()
    expect(details).to_have_attribute("open", "")
    page.goto("/")
    live(page)
    chart = page.locator("#chart-renders-tasks")
    before = chart.get_attribute("data-series")
    page.evaluate("document.querySelector('#chart-renders-tasks canvas').mark = 'the same canvas'")
    expect(chart).not_to_have_attribute("data-series", before or "", timeout=30_000)
    assert page.evaluate("document.querySelector('#chart-renders-tasks canvas').mark") == "the same canvas"


def test_refresh_keeps_scroll_position(new_page: NewPage) -> None:
    page = live(new_page("/cost?days=7", viewport=PHONE))
    chart = page.get_by_role("region", name="Chart of cost by day")
    assert chart.evaluate("chart => chart.scrollLeft") > 0, "the phone shows today first"
    chart.evaluate("chart => { chart.scrollLeft = 50; }")
    shown_at = page.locator("#main").get_attribute("data-now")
    expect(page.locator("#main")).not_to_have_attribute("data-now", shown_at or "", timeout=60_000)
    assert chart.evaluate("chart => chart.scrollLeft") == 50


def test_pause_in_one_browser_appears_in_another(site: BrowserSite, new_page: NewPage) -> None:
    """`bench/live_updates.py` measures the delay."""
    site.active_worker("idle")
    one = live(new_page(site.create_link(), is_operator=False))
    other = live(new_page(site.create_link("viewer"), is_operator=False))
    expect(other.get_by_text("read only")).to_be_visible()
    assert other.locator("form[data-confirm]").count() == 0
    chip = other.locator("#fleet-idle .chip")
    expect(chip).not_to_have_text("paused")
    other.evaluate("window.wasNotReloaded = true")
    confirm_in(one, "#fleet-idle", "Pause")
    expect(chip).to_have_text("paused")
    expect(one.locator("#fleet-idle .chip")).to_have_text("paused")
    # Screen readers announce both: a later announcement does not replace an earlier one.
    expect(other.locator("#announcements")).to_contain_text("Fleet idle: paused.")
    expect(other.locator("#announcements")).to_contain_text("Fleet idle is paused: its workers claim no tasks")
    confirm_in(one, "#fleet-idle", "Resume")
    expect(chip).not_to_have_text("paused")
    assert other.evaluate("window.wasNotReloaded") is True


def test_hidden_tabs_close_their_stream_and_refresh_when_shown(site: BrowserSite, new_page: NewPage) -> None:
    first = live(new_page("/"))
    tabs = [first, *(first.context.new_page() for _ in range(6))]
    for tab in tabs:
        # In headless Chromium every tab is visible, so the script sets document.hidden.
        tab.add_init_script("Object.defineProperty(document, 'hidden', {get: () => window.isHidden === true})")
        live_tab = live(tab) if tab.goto("/workers") else tab
        if tab is not tabs[-1]:
            live_tab.evaluate("window.isHidden = true; document.dispatchEvent(new Event('visibilitychange'))")
    # Six open streams would leave no connection for the seventh tab.
    first.evaluate("document.querySelector('h1').textContent = 'outdated'")
    first.evaluate("window.isHidden = false; document.dispatchEvent(new Event('visibilitychange'))")
    expect(first.get_by_role("heading", name="Workers", exact=True)).to_be_visible()
    live(first)


def confirm_in(page: Page, part: str, button: str, confirm_button: str | None = None) -> None:
    page.locator(part).get_by_role("button", name=button, exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name=confirm_button or button, exact=True).click()
    expect(page.get_by_role("dialog")).to_be_hidden()


# ----------------------------------------------------------------------------------------------------------- operations


def until(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, TIMEOUT_S, what)


def test_cancelled_dialog_changes_nothing(site: BrowserSite, new_page: NewPage) -> None:
    worker = site.active_worker()
    page = live(new_page(f"/workers/{worker.id}"))
    button = page.get_by_role("button", name="Pause")
    for close_dialog in (
        lambda: page.keyboard.press("Escape"),
        lambda: page.get_by_role("button", name="Cancel").click(),
    ):
        button.click()
        expect(page.get_by_role("dialog")).to_be_visible()
        expect(page.get_by_role("dialog").get_by_role("button", name="Cancel")).to_be_focused()
        close_dialog()
        expect(page.get_by_role("dialog")).to_be_hidden()
        expect(button).to_be_focused()
    assert not next(w for w in site.workers() if w.id == worker.id).is_paused


def test_worker_buttons_pause_resume_restart_drain_and_terminate(site: BrowserSite, new_page: NewPage) -> None:
    def state(worker_id: str) -> Any:
        return site.query(lambda store: store.worker(worker_id))

    worker = site.active_worker()
    page = live(new_page(f"/workers/{worker.id}"))
    confirm(page, "Pause")
    until(lambda: state(worker.id).is_paused, "the pause")
    expect(page.locator(".head .chip", has_text="paused")).to_be_visible()
    confirm(page, "Resume")
    until(lambda: not state(worker.id).is_paused, "the resumption")
    confirm(page, "Restart")
    until(lambda: state(worker.id).status == WorkerStatus.TERMINATED, "the restart")
    expect(page.locator(".head .chip")).to_have_text("terminated")

    drained = site.active_worker()
    page.goto(f"/workers/{drained.id}")
    confirm(page, "Drain")
    until(lambda: state(drained.id).status == WorkerStatus.TERMINATED, "the drain")

    task_id = site.start_blocked_task()
    terminated = site.task(task_id).worker_id
    assert terminated is not None
    page.goto(f"/workers/{terminated}")
    confirm(page, "Terminate now")
    until(lambda: state(terminated).status in (WorkerStatus.ERROR, WorkerStatus.TERMINATED), "the termination")
    assert state(terminated).code == "MANUAL"


def test_fleet_buttons_pause_resume_add_worker_and_restart(site: BrowserSite, new_page: NewPage) -> None:
    old = site.active_worker("idle").id
    page = live(new_page("/"))
    confirm_in(page, "#fleet-idle", "Pause")
    expect(page.locator("#fleet-idle .chip")).to_have_text("paused")
    expect(page.locator("#item-paused-idle")).to_be_visible()
    confirm_in(page, "#fleet-idle", "Resume")
    expect(page.locator("#item-paused-idle")).to_have_count(0)
    confirm_in(page, "#fleet-idle", "Add worker")
    until(lambda: len(site.workers("idle")) == 2, "a second worker")
    confirm_in(page, "#fleet-idle", "Restart")
    until(lambda: old not in [worker.id for worker in site.workers("idle")], "the replacement")


def test_task_buttons_retry_and_cancel(site: BrowserSite, new_page: NewPage) -> None:
    failed = site.create_failed_task()
    page = live(new_page("/tasks?status=failed"))
    row = page.locator(f"#task-{failed}")
    row.get_by_role("button", name="Retry").click()
    page.get_by_role("dialog").get_by_role("button", name="Retry").click()
    expect(page.locator("#toast")).to_have_text(f"Task {failed} requeued.")
    expect(page.locator("#announcements")).to_contain_text(f"Task {failed} requeued.")
    events = site.query(lambda store: store.events(task_id=failed))
    assert "TASK_RETRIED" in [event.code for event in events]

    queued = site.enqueue("later")
    page.goto(f"/tasks/{queued}")
    confirm(page, "Cancel", "Cancel the task")
    assert site.wait_for_task(queued, TaskStatus.FAILED).error_code == "CANCELLED"
    expect(page.locator(".head .chip")).to_have_text("cancelled")

    site.wait_for_task(failed, TaskStatus.FAILED)
    page.goto("/tasks?status=failed&queue=renders")
    confirm(page, "Retry all failed", "Retry all")
    retried = site.query(lambda store: store.events(task_id=failed))
    assert [event.code for event in retried].count("TASK_RETRIED") == 2


def test_failed_operation_is_reported_in_the_dialog(site: BrowserSite, new_page: NewPage) -> None:
    worker = site.active_worker()
    page = live(new_page(f"/workers/{worker.id}", allow_errors=True))
    page.route("**/pause", lambda route: route.continue_(post_data="csrf=wrong&is_confirmed=yes"))
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("Failed: X-CSRF-Token is missing or wrong")
    assert not next(w for w in site.workers() if w.id == worker.id).is_paused


def test_forms_work_without_javascript(site: BrowserSite, new_page: NewPage) -> None:
    site.active_worker("idle")
    page = new_page("/", java_script_enabled=False)
    page.locator("#fleet-idle").get_by_role("button", name="Pause").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Pause fleet idle?")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator(".notice")).to_have_text(re.compile("Fleet idle paused, with 1 worker"))
    page.locator("#fleet-idle").get_by_role("button", name="Resume").click()
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".notice")).to_have_text(re.compile("Fleet idle resumed"))
    page.reload()
    expect(page.locator(".notice")).to_have_count(0)


def test_browser_without_login_is_read_only(site: BrowserSite, new_page: NewPage) -> None:
    page = live(new_page("/", is_operator=False))
    expect(page.get_by_text("read only")).to_be_visible()
    assert page.locator("form[data-confirm]").count() == 0
    answer = httpx.post(f"{site.url}/fleets/idle/pause", data={"is_confirmed": "yes"}, trust_env=False)
    assert answer.status_code == 401
    elsewhere = {"Host": "evil.example"}
    assert httpx.get(f"{site.url}/", headers=elsewhere, trust_env=False).status_code == 401


def test_login_link_works_once_and_sign_out_ends_the_session(
    site: BrowserSite, new_page: NewPage, chromium: Browser
) -> None:
    used = site.create_link()
    new_page(used, is_operator=False)
    page = new_page(used, is_operator=False, allow_errors=True)
    expect(page.get_by_role("heading", name="Link expired")).to_be_visible()
    expect(page.get_by_text("read only")).to_have_count(0)
    expect(page.locator("main").get_by_role("link")).to_have_count(0)
    context = chromium.new_context(base_url=site.url)
    try:
        page_of_link = context.new_page()
        page_of_link.set_viewport_size(PHONE)
        page_of_link.goto(site.create_link())
        page_of_link.get_by_role("button", name="Sign out").click()
        expect(page_of_link.get_by_role("button", name="Sign out")).to_have_count(0)
    finally:
        context.close()


# ----------------------------------------------------------------------------------------------- accessibility and size


def test_theme_follows_the_system_until_the_switch_is_used(new_page: NewPage) -> None:
    def background(page: Page) -> Any:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    page = new_page("/cost", color_scheme="dark")
    dark = background(page)
    page.emulate_media(color_scheme="light")
    light = background(page)
    assert light != dark
    page.get_by_role("button", name="Switch between light and dark").click()
    assert background(page) == dark
    page.goto("/workers")
    assert background(page) == dark, "the theme is remembered"
    page.emulate_media(color_scheme="dark")
    page.get_by_role("button", name="Switch between light and dark").click()
    assert background(page) == light


def test_keyboard_focus_is_visible_and_starts_with_skip_link(site: BrowserSite, new_page: NewPage) -> None:
    page = live(new_page("/workers"))
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="All fleets")).to_be_focused()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "focus is visible"


def test_first_load_is_below_100_kb(site: BrowserSite, new_page: NewPage) -> None:
    page = new_page("/", allow_errors=True)
    loaded = page.evaluate("""
      [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
        .filter((entry) => !entry.name.includes('/api/')).map((entry) => [entry.name, entry.encodedBodySize])
    """)
    assert len(loaded) >= 4, loaded
    assert sum(size for _, size in loaded) < FIRST_LOAD_BYTES, loaded
    assert all(name.startswith(site.url) for name, _ in loaded), "loaded from another host"
    again = httpx.get(site.url, headers={"Accept-Encoding": "identity"}, trust_env=False)
    assert len(gzip.compress(again.content)) < FIRST_LOAD_BYTES


# --------------------------------------------------------------------------------------------- outages and large fleets


def test_page_reports_lost_server_and_reconnects(site: BrowserSite, new_page: NewPage) -> None:
    page = live(new_page("/tasks", allow_errors=True))
    page.evaluate("window.mark = 'the same page'")
    site.kill()
    expect(page.locator("#connection")).to_have_text("offline")
    expect(page.locator("#offline")).to_contain_text(
        re.compile(r"Connection lost, showing data from \d\d:\d\d:\d\d UTC")
    )
    task_id = site.enqueue("later")
    site.start()
    live(page)
    expect(page.locator("#offline")).to_be_hidden()
    expect(page.locator(f"#task-{task_id}")).to_be_visible()
    assert page.evaluate("window.mark") == "the same page"


def test_page_reports_lost_database_and_recovers(site: BrowserSite, new_page: NewPage, embedded_server: Server) -> None:
    page = live(new_page("/workers", allow_errors=True))
    other = new_page("/cycles", allow_errors=True)
    embedded_server.crash()
    try:
        expect(page.locator("#offline")).to_contain_text("database unavailable")
        other.reload()
        expect(other.get_by_role("heading", level=1)).to_have_text("Database unavailable")
    finally:
        embedded_server.start()
    live(page)
    expect(page.locator("#offline")).to_be_hidden()


def test_ten_thousand_workers_are_shown_in_pages(site: BrowserSite, new_page: NewPage) -> None:
    site.execute("""
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
