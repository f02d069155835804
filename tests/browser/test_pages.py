"""Pages about queues, fleets, errors and decisions in Chromium: contents, selection, time ranges, without scripts."""

import re

from playwright.sync_api import Page, expect

from support.browser_site import BrowserSite, NewPage
from windlass.model.task import TaskStatus


def live(page: Page) -> Page:
    expect(page.locator("#connection")).to_have_text("live")
    return page


def test_unserved_queue_needs_attention_until_its_tasks_are_cancelled(site: BrowserSite, new_page: NewPage) -> None:
    task_id = site.enqueue("thumnails", {"video": "a.mp4"})
    page = live(new_page("/"))
    item = page.locator("#item-unserved-thumnails")
    expect(item).to_contain_text("No fleet and no worker serves queue thumnails, which has 1 task.")
    item.get_by_role("link", name="View queue").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Queue thumnails")
    expect(page.locator(f"#task-{task_id}")).to_contain_text("a.mp4")
    page.goto("/queues")
    expect(page.locator("#queue-thumnails")).to_contain_text("not served")
    expect(page.locator("#queue-renders")).to_contain_text("worker")
    site.query(lambda store: store.cancel_task(task_id, "a typo"))
    page.goto("/")
    expect(live(page).locator("#item-unserved-thumnails")).to_have_count(0)


def test_search_finds_tasks_by_error_of_an_earlier_attempt(site: BrowserSite, new_page: NewPage) -> None:
    task_id = site.create_failed_task("CUDA error: illegal memory access")
    worker = site.task(task_id).worker_id
    page = live(new_page("/errors?search=illegal+memory"))
    row = page.locator("tbody tr").first
    expect(row).to_contain_text("CUDA error: illegal memory access")
    expect(row.get_by_role("link", name=str(worker))).to_be_visible()
    page.goto("/tasks?search=illegal+memory&status=failed")
    expect(page.locator(f"#task-{task_id}")).to_be_visible()
    page.get_by_role("link", name="Remove the search for illegal memory").click()
    expect(page.locator(".filter")).to_have_count(0)
    expect(page).to_have_url(re.compile(r"/tasks\?status=failed$"))


def test_selected_tasks_survive_a_refresh_and_are_cancelled(site: BrowserSite, new_page: NewPage) -> None:
    chosen = [site.enqueue("later", {"number": number}) for number in range(2)]
    other = site.enqueue("later")
    page = live(new_page("/tasks?queue=later"))
    for task_id in chosen:
        page.get_by_role("checkbox", name=f"Select task {task_id}").check()
    new = site.enqueue("later")
    expect(page.locator(f"#task-{new}")).to_be_visible()
    expect(page.get_by_role("checkbox", name=f"Select task {chosen[0]}")).to_be_checked()
    page.locator("#bulk").get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel the selected tasks").click()
    expect(page.locator("#toast")).to_have_text("2 tasks cancelled.")
    for task_id in chosen:
        assert site.wait_for_task(task_id, TaskStatus.FAILED).error_code == "CANCELLED"
    assert site.task(other).status is TaskStatus.QUEUED
    expect(page.get_by_role("checkbox", checked=True)).to_have_count(0)


def test_pages_work_without_javascript(site: BrowserSite, new_page: NewPage) -> None:
    task_id = site.enqueue("later", {"prompt": "a lighthouse"})
    page = new_page("/tasks?queue=later", java_script_enabled=False)
    page.get_by_role("checkbox", name=f"Select task {task_id}").check()
    page.locator("#bulk").get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Change the selected tasks?")
    page.get_by_role("button", name="Cancel the selected tasks").click()
    expect(page.locator(".notice")).to_have_text("1 task cancelled.")
    for path, heading in (
        ("/queues", "Queues"),
        ("/queues/renders", "Queue renders"),
        ("/fleets/cloud?range=24h", "Fleet cloud"),
        ("/errors", "Errors"),
        ("/cycles?fleet=renders", "Cycles"),
    ):
        page.goto(path)
        expect(page.get_by_role("heading", level=1)).to_have_text(heading)
    page.goto("/fleets/renders")
    page.get_by_text("settings with their defaults").click()
    expect(page.locator("#defaults")).to_contain_text("scale_up_multiplier")


def test_time_range_is_kept_by_live_updates(site: BrowserSite, new_page: NewPage) -> None:
    site.execute("""
        insert into windlass.sample_averages (
          fleet, at, queued, running, spawning, active, terminating, error, completed_per_minute
        )
        select 'cloud', date_bin('5 minutes', now(), 'epoch') - n * interval '5 minutes', n % 40, 3, 0, 3, 0, 0, 5
        from generate_series(2, 1500) as n
        on conflict do nothing
    """)
    page = live(new_page("/fleets/cloud"))
    page.get_by_role("navigation", name="Time range").get_by_role("link", name="7 d").click()
    chart = live(page).locator("#chart-cloud-tasks")
    expect(chart).to_have_attribute("aria-label", re.compile(r"Tasks over the last \d d"))
    expect(chart.locator("canvas")).to_be_visible()
    shown_at = page.locator("#main").get_attribute("data-now")
    expect(page.locator("#main")).not_to_have_attribute("data-now", shown_at or "")
    expect(page.get_by_role("link", name="7 d")).to_have_attribute("aria-current", "true")


def test_fleet_page_shows_budget_settings_slots_and_decisions(site: BrowserSite, new_page: NewPage) -> None:
    site.active_worker("idle")
    page = live(new_page("/fleets/idle"))
    expect(page.get_by_text("idle, per day: 0.00 of 10.00")).to_be_visible()
    expect(page.locator(".settings-list").first).to_contain_text("app:work")
    expect(page.locator(".slot")).to_have_count(2)
    expect(page.locator(".timeline").first).to_contain_text("spawn 1")
    page.goto("/cycles?fleet=idle")
    assert page.locator("tbody tr").count() < 50
    expect(page.locator("#chart-idle-workers canvas")).to_be_visible()
    page.get_by_role("link", name="All cycles").click()
    expect(page.get_by_role("link", name="Only changes")).to_be_visible()


def test_worker_started_by_hand_is_shown_beside_the_fleets(site: BrowserSite, new_page: NewPage) -> None:
    with site.worker_by_hand("by-hand") as worker_id:
        page = live(new_page("/"))
        card = page.locator("#fleet-default")
        expect(card).to_contain_text("1 worker started by hand")
        expect(card.get_by_role("button")).to_have_count(0)
        card.get_by_role("link", name="its workers").click()
        row = page.locator(f"#worker-{worker_id}")
        expect(row).to_contain_text("started by hand")
        row.get_by_role("link", name=worker_id).click()
        expect(page.locator(".head")).to_contain_text("started by hand")
        expect(page.get_by_role("button", name="Restart")).to_have_count(0)
        page.get_by_role("button", name="Drain").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Nothing replaces it.")
        dialog.get_by_role("button", name="Drain").click()
        expect(page.locator(".head .chip")).to_have_text("terminated")
        page.goto("/fleets/idle")
        expect(live(page).get_by_role("button", name="Deploy")).to_be_visible()


def test_fleet_without_cycles_has_no_tab_among_the_cycles(site: BrowserSite, new_page: NewPage) -> None:
    with site.worker_by_hand("by-hand"):
        tabs = live(new_page("/cycles")).get_by_role("navigation", name="Fleet")
        expect(tabs.get_by_role("link", name="idle", exact=True)).to_be_visible()
        expect(tabs.get_by_role("link", name="default", exact=True)).to_have_count(0)


def test_anonymous_page_says_how_to_become_operator(new_page: NewPage) -> None:
    page = live(new_page("/queues", is_operator=False))
    page.get_by_text("read only").click()
    expect(page.get_by_text("windlass tokens link", exact=True)).to_be_visible()
    expect(page.get_by_role("checkbox")).to_have_count(0)


def test_footer_entries_are_on_one_line(new_page: NewPage) -> None:
    page = new_page("/queues")
    middles = page.evaluate("""
      [...document.querySelectorAll('.foot > *')].map((entry) => {
        const range = document.createRange();
        range.selectNodeContents(entry);
        const box = range.getBoundingClientRect();
        return box.top + box.height / 2;
      })
    """)
    assert len(middles) >= 4
    assert max(middles) - min(middles) < 2, middles


def test_what_if_page_compares_settings_and_draws_charts(site: BrowserSite, new_page: NewPage) -> None:
    """Its tasks are deleted: the history alone remains."""
    site.execute("""
        insert into windlass.tasks (queue, status, created_at, started_at, finished_at)
        select 'idle', 'complete', t.at, t.at, t.at + interval '20 s'
        from (
          select now() - interval '6 days' + n * interval '20 minutes' as at from generate_series(1, 400) as n
        ) as t;
        delete from windlass.tasks where queue = 'idle';
    """)
    page = live(new_page("/what-if", is_operator=False))
    expect(page.get_by_role("heading", level=1)).to_have_text("What if")
    page.get_by_role("navigation", name="Fleet").get_by_role("link", name="idle").click()
    expect(page.locator("#calculating")).to_have_count(0, timeout=60_000)
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text("running: adaptive")
    expect(page.locator("#verdict + span")).to_contain_text("calculated")
    for title in ("Queued tasks", "Machines", "Machine hours billed", "distribution of waits"):
        expect(page.get_by_role("img", name=title, exact=True)).to_be_visible()
    expect(page.locator("section", has_text="Basis").last).to_contain_text("400 tasks over")
