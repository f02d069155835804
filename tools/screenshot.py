"""Takes the README's screenshot of the dashboard from a real run: `python tools/screenshot.py [FOLDER]`.

Opens `windlass demo --on hetzner --keep` in Chromium. After the demo's own burst it enqueues a second one and takes the
screenshot in the middle of it. With a folder it stores screenshots of every page: light, dark and phone.
"""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

import windlass

TARGET = Path(__file__).parent.parent / "docs" / "images" / "dashboard.png"
DEMO = ("demo", "--on", "hetzner", "--tasks", "300", "--workers", "6", "--hour-s", "60", "--keep")
# The demo prints its data directory when its own scenario has finished.
DATA_DIR = r"status --watch --data-dir (\S+)"
SECOND_BURST = 260
# The screenshot is taken when fewer than this many tasks are queued.
QUEUED_AT_SCREENSHOT = 150
SETTLE_MS = 1_000
TIMEOUT_S = 300.0
QUEUED = "Number(document.querySelector('.tile dd').textContent)"
# Tall, because a full-page screenshot shows the navigation at the bottom of the first screen.
DESKTOP, PHONE = {"width": 1280, "height": 860}, {"width": 360, "height": 1_500}
PAGES = {"overview": "/", "workers": "/workers", "tasks": "/tasks", "cycles": "/cycles", "cost": "/cost?days=1"}


def main() -> None:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("Chromium not found. Install the package chromium.")
    command = [sys.executable, "-m", "windlass", *DEMO]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo, sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            link = wait_for(demo, r"dashboard: (\S+)")
            page = browser.new_page(viewport=DESKTOP, device_scale_factor=1, color_scheme="light")
            page.goto(link)
            with windlass.SyncClient(data_dir=wait_for(demo, DATA_DIR)) as client:
                for number in range(SECOND_BURST):
                    client.enqueue("demo", {"number": number, "work_s": 0.5, "is_poisonous": False})
            page.wait_for_function(f"() => {QUEUED} > {QUEUED_AT_SCREENSHOT}", timeout=TIMEOUT_S * 1_000)
            page.wait_for_function(f"() => {QUEUED} < {QUEUED_AT_SCREENSHOT}", timeout=TIMEOUT_S * 1_000)
            page.wait_for_timeout(SETTLE_MS)
            if len(sys.argv) > 1:
                take_all(browser, page, Path(sys.argv[1]))
            else:
                TARGET.parent.mkdir(parents=True, exist_ok=True)
                page.screenshot(path=TARGET)
                print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")
            browser.close()
        finally:
            demo.terminate()


def wait_for(demo: "subprocess.Popen[str]", pattern: str) -> str:
    """Read the demo's output up to a line that matches the pattern; return its first group."""
    deadline = time.monotonic() + TIMEOUT_S
    if demo.stdout is None:
        raise AssertionError("the output is not a pipe")
    for line in demo.stdout:
        print(line, end="")
        if (found := re.search(pattern, line)) is not None:
            return found[1]
        if time.monotonic() > deadline:
            break
    sys.exit(f"the demo printed no line that matches {pattern}.")


def take_all(browser: Browser, operator: Page, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    here = operator.url
    state = operator.context.storage_state()
    for name, looks in {
        "light": {"color_scheme": "light", "viewport": DESKTOP},
        "dark": {"color_scheme": "dark", "viewport": DESKTOP},
        "phone": {"color_scheme": "light", "viewport": PHONE},
    }.items():
        context = browser.new_context(storage_state=state, base_url=here, **looks)  # type: ignore[arg-type]
        page = context.new_page()
        for title, path in PAGES.items():
            page.goto(path)
            page.locator("#connection", has_text="live").wait_for()
            page.wait_for_timeout(300)
            page.screenshot(path=folder / f"{title}-{name}.png", full_page=name != "phone")
        for listed, title in (("/workers", "worker"), ("/tasks", "task"), ("/cycles", "cycle")):
            page.goto(listed)
            page.locator("tbody th a").first.click()
            page.wait_for_timeout(300)
            page.screenshot(path=folder / f"{title}-{name}.png", full_page=name != "phone")
        context.close()


if __name__ == "__main__":
    main()
