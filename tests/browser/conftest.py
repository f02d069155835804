"""Chromium and a running site, one of each per test module."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from support.browser_site import CLOUD_SQL, BrowserSite, NewPage
from support.postgres_servers import Server, do_without, reachable_temp_dir

# Generous: the machine may be busy with other tests.
TIMEOUT_MS = 20_000
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def site(embedded_server: Server) -> Iterator[BrowserSite]:
    with reachable_temp_dir() as folder, embedded_server.migrated_database() as dsn:
        made = BrowserSite(folder, dsn)
        made.execute(CLOUD_SQL)
        made.start()
        try:
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        do_without("Chromium not found: install the package chromium")
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        # Root cannot use the sandbox. Only our own pages are opened.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=TIMEOUT_MS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def session(site: BrowserSite, chromium: Browser) -> Any:
    """Storage state of a browser that opened a login link."""
    context = chromium.new_context()
    page = context.new_page()
    page.goto(site.create_link())
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    state = context.storage_state()
    context.close()
    return state


@pytest.fixture
def new_page(site: BrowserSite, chromium: Browser, session: Any) -> Iterator[NewPage]:
    """Opens pages in new browser contexts, by default as operator. Errors in the console fail the test."""
    contexts: list[BrowserContext] = []
    errors: list[str] = []

    def make(path: str = "/", *, is_operator: bool = True, allow_errors: bool = False, **options: Any) -> Page:
        options.setdefault("viewport", {"width": 1280, "height": 900})
        state = session if is_operator else None
        context = chromium.new_context(base_url=site.url, storage_state=state, reduced_motion="reduce", **options)
        context.set_default_timeout(TIMEOUT_MS)
        contexts.append(context)
        page = context.new_page()
        if not allow_errors:
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(path)
        return page

    yield make
    for context in contexts:
        context.close()
    site.release_tasks()
    assert errors == []
