"""A real Chromium in front of a real Windlass. One of each for a module."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from support.browser_site import CLOUD_SQL, House, NewPage
from support.postgres_servers import Server, do_without, reachable_temp_dir

# The machine may be busy with other tests.
PATIENCE_MS = 20_000
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def house(embedded_server: Server) -> Iterator[House]:
    with reachable_temp_dir() as folder, embedded_server.migrated_database() as dsn:
        made = House(folder, dsn)
        made.execute(CLOUD_SQL)
        made.up()
        try:
            yield made
        finally:
            made.end()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        do_without("there is no Chromium here: install the package chromium to see the dashboard in it")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        # Root has no sandbox; all that is opened is ours.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def session(house: House, chromium: Browser) -> Any:
    """The cookie of whoever opened the link that `windlass up` printed."""
    context = chromium.new_context()
    page = context.new_page()
    page.goto(house.new_link())
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    state = context.storage_state()
    context.close()
    return state


@pytest.fixture
def new_page(house: House, chromium: Browser, session: Any) -> Iterator[NewPage]:
    """A page of an operator, in a browser of its own. Whatever its console complains about fails the test."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def make(path: str = "/", *, is_operator: bool = True, may_complain: bool = False, **options: Any) -> Page:
        options.setdefault("viewport", {"width": 1280, "height": 900})
        state = session if is_operator else None
        context = chromium.new_context(base_url=house.url, storage_state=state, reduced_motion="reduce", **options)
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        if not may_complain:
            page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path)
        return page

    yield make
    for context in contexts:
        context.close()
    house.release()
    assert complaints == []
