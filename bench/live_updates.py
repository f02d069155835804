"""Two browsers: the delay between pausing a fleet in one and seeing it in the other.

    python -m bench.live_updates                    # 20 pauses and resumes
    python -m bench.live_updates --rounds 50

A real `windlass up` on an embedded PostgreSQL, and two Chromium windows that share only the server. Both use this
machine's clock: the first window records when its button was pressed, the second when its page changed.
"""

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright

from bench.figures import percentile, table

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
START_TIMEOUT_S = 60.0
FLEET = "idle"
TOML = f"""
[fleets.{FLEET}]
handler = "app:work"
min_workers = 1
max_workers = 2
"""
RECORD_CLICK = "document.querySelector('#confirm').addEventListener('click', () => { clickedAt = Date.now(); })"
RECORD_CHANGE = f"""
  wanted = null;
  new MutationObserver(() => {{
    const isPaused = document.querySelector('#fleet-{FLEET} .chip').textContent === 'paused';
    if (isPaused === wanted) {{ seenAt = Date.now(); wanted = null; }}
  }}).observe(document.getElementById('main'), {{subtree: true, childList: true, characterData: true}});
"""


@contextmanager
def up(folder: Path) -> Iterator[str]:
    """Run `windlass up` and yield the login link that it printed."""
    (folder / "app.py").write_text("def work(task):\n    return None\n")
    (folder / "windlass.toml").write_text(TOML)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    environment.pop("DATABASE_URL", None)
    output = folder / "output"
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "windlass", "up", "--port", str(port)],
            cwd=folder,
            env={**environment, "WINDLASS_DATA_DIR": str(folder / "data")},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield _link(output, process)
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)


def _link(output: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while (found := re.search(r"http://\S+/login\?key=\w+", output.read_text())) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"`windlass up` did not start:\n{output.read_text()}")
        time.sleep(0.1)
    return found[0]


def measure(new_page: Callable[[], Page], link: str, rounds: int) -> list[float]:
    """Milliseconds from each click to its sight."""
    one, other = new_page(), new_page()
    one.goto(link)
    cookies: Any = one.context.cookies()
    other.context.add_cookies(cookies)
    other.goto(link.partition("/login")[0])
    for page in (one, other):
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator(f"#fleet-{FLEET} .chip")).to_have_count(1)
    one.evaluate(RECORD_CLICK)
    other.evaluate(RECORD_CHANGE)
    chip = other.locator(f"#fleet-{FLEET} .chip")
    waits = []
    for number in range(rounds):
        verb, is_paused = ("Resume", False) if number % 2 else ("Pause", True)
        other.evaluate("isPaused => { seenAt = null; wanted = isPaused; }", is_paused)
        one.locator(f"#fleet-{FLEET}").get_by_role("button", name=verb, exact=True).click()
        one.get_by_role("dialog").get_by_role("button", name=verb, exact=True).click()
        seen = expect(chip)
        (seen.to_have_text if is_paused else seen.not_to_have_text)("paused")
        expect(one.get_by_role("dialog")).to_be_hidden()
        waits.append(float(other.evaluate("seenAt")) - float(one.evaluate("clickedAt")))
    return waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        sys.exit("there is no Chromium here: install the package chromium")
    expect.set_options(timeout=1000 * START_TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="windlass-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with up(folder) as link, sync_playwright() as playwright:
            browsers = []

            def new_page() -> Page:
                # Root has no sandbox; all that is opened is ours.
                browsers.append(playwright.chromium.launch(executable_path=program, args=["--no-sandbox"]))
                return browsers[-1].new_page()

            waits = measure(new_page, link, rounds)
            for browser in browsers:
                browser.close()
    figures = [percentile(waits, share) for share in (0.5, 0.95)] + [max(waits)]
    print(table(["ms", "p50", "p95", "highest"], [[f"{rounds} clicks", *(f"{figure:.0f}" for figure in figures)]]))


if __name__ == "__main__":
    main()
