"""Takes screenshots of every page of the dashboard: `python tools/page_screenshots.py FOLDER [PAGE ...]`.

Starts `windlass up` with a local fleet in a temporary folder, adds the rows of page_screenshots.sql (two rented fleets
in two currencies, a hold, failures, a week of history, Ray nodes, workers started by hand), and opens each page in
Chromium: light, dark, on a phone, without a login, and with a login link that was used. For people to look at: nothing
is compared.
"""

import asyncio
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import asyncpg
import httpx
from playwright.sync_api import Page, sync_playwright

import windlass
from windlass.config_loader import load_config
from windlass.wiring.stores import running_database_url

SQL = Path(__file__).with_suffix(".sql")
DESKTOP, PHONE = {"width": 1280, "height": 860}, {"width": 375, "height": 740}
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": DESKTOP},
    "dark": {"color_scheme": "dark", "viewport": DESKTOP},
    "phone": {"color_scheme": "light", "viewport": PHONE},
}
PAGES = {
    "overview": "/",
    "overview-7d": "/?range=7d",
    "queues": "/queues",
    "queue": "/queues/upscale",
    "queue-unserved": "/queues/thumnails",
    "fleet": "/fleets/crunch?range=24h",
    "fleet-hold": "/fleets/gpus",
    "fleet-local": "/fleets/renders",
    "fleet-ray": "/fleets/science",
    "fleet-by-hand": "/fleets/default",
    "workers": "/workers",
    "workers-ray": "/workers?fleet=science",
    "workers-by-hand": "/workers?fleet=default",
    "workers-terminated": "/workers?terminated=yes",
    "tasks": "/tasks",
    "tasks-failed": "/tasks?status=failed",
    "tasks-search": "/tasks?search=CUDA",
    "tasks-none": "/tasks?search=nothing-like-this",
    "errors": "/errors?search=CUDA",
    "cycles": "/cycles",
    "cycles-fleet": "/cycles?fleet=crunch&range=24h",
    "cycles-all": "/cycles?all=yes&fleet=renders",
    "cost": "/cost",
    "what-if": "/fleets/renders/what-if",
    "audit": "/audit",
    "access": "/access",
    "not-found": "/tasks/99999999",
    "invalid": "/tasks?status=bogus",
    "runbooks": "/runbooks",
}
# Pages of the first row of a list.
FIRST_ROWS = {
    "worker": "/workers",
    "worker-ray": "/workers?fleet=science",
    "worker-by-hand": "/workers?fleet=default",
    "task": "/tasks?status=failed",
    "cycle": "/cycles?fleet=renders",
}
APP = """
import random, time

def render(task):
    for step in range(10):
        task.progress((step + 1) / 10, f"step {step + 1} of 10")
        time.sleep(task.payload.get("seconds", 1) / 10)
    if random.random() < 0.15:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return {"image": "out.png"}
"""
TOML = """
[api]
open_reading = true

[fleets.renders]
queues = ["renders"]
handler = "app:render"
chdir = {folder!r}
min_workers = 1
max_workers = 3
poll_interval_s = 1
budget_per_day = 10
env = {{ API_KEY = "not shown" }}
"""
TIMEOUT_S = 60.0
# Checks for the first cycle.
MAX_CHECKS = 300


def main() -> None:
    target = Path(sys.argv[1])
    wanted = sys.argv[2:] or [*PAGES, *FIRST_ROWS, "confirm", "anonymous", "login-expired"]
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="windlass-pages-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "app.py").write_text(APP)
        (folder / "windlass.toml").write_text(TOML.format(folder=name))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "windlass", "up", "--port", str(port), "--data-dir", str(folder / "data")]
        log = folder / "up.log"
        with log.open("wb") as output:
            up = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(port, log)
            link = create_link(folder, port)
            fill(folder)
            take_all(link, target, wanted)
        finally:
            up.terminate()
            up.wait(TIMEOUT_S)


def wait_until_ready(port: int, log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False, timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    sys.exit(f"`windlass up` did not start:\n{log.read_text()}")


def create_link(folder: Path, port: int) -> str:
    command = [
        sys.executable,
        "-m",
        "windlass",
        "tokens",
        "link",
        "--role",
        "admin",
        "--url",
        f"http://127.0.0.1:{port}",
    ]
    done = subprocess.run(
        [*command, "--data-dir", str(folder / "data")], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip().splitlines()[-1]


def fill(folder: Path) -> None:
    data_dir = folder / "data"
    config = load_config(folder / "windlass.toml", {"data_dir": data_dir}).config
    dsn = running_database_url(config)
    if dsn is None:
        sys.exit("the database of `windlass up` is not running.")

    async def run() -> None:
        connection = await asyncpg.connect(dsn)
        try:
            # The rows of rented fleets have a snapshot of the real one.
            for _ in range(MAX_CHECKS):
                if await connection.fetchval("select exists (select from windlass.cycles)"):
                    break
                await asyncio.sleep(0.2)
            await connection.execute(SQL.read_text())
        finally:
            await connection.close()

    asyncio.run(run())
    command = [sys.executable, "-m", "windlass", "tokens", "create", "continuous-integration", "--role", "producer"]
    subprocess.run([*command, "--data-dir", str(data_dir)], cwd=folder, capture_output=True, check=True)
    with windlass.SyncClient(data_dir=data_dir) as client:
        for number in range(60):
            prompt = ("a lighthouse at night", "a harbour in fog", "a red kite over fields")[number % 3]
            client.enqueue("renders", {"prompt": prompt, "seed": number, "seconds": 3})


def take_all(link: str, target: Path, wanted: list[str]) -> None:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        first = browser.new_context().new_page()
        first.goto(link)
        state = first.context.storage_state()
        site = link.partition("/login")[0]
        first.wait_for_timeout(12_000)
        for look, options in LOOKS.items():
            context = browser.new_context(base_url=site, storage_state=state, reduced_motion="reduce", **options)
            page = context.new_page()
            for name, path in PAGES.items():
                if name in wanted:
                    page.goto(path)
                    page.locator("#calculating").wait_for(state="detached", timeout=TIMEOUT_S * 1000)
                    shoot(page, target / f"{name}-{look}.png")
            for name, listed in FIRST_ROWS.items():
                if name in wanted:
                    page.goto(listed)
                    page.locator("tbody th a[href^='/']").first.click()
                    shoot(page, target / f"{name}-{look}.png")
            context.close()
            if "confirm" in wanted:
                # Without scripts, an action asks for confirmation on a page of its own.
                context = browser.new_context(base_url=site, storage_state=state, java_script_enabled=False, **options)
                page = context.new_page()
                page.goto("/fleets/renders")
                page.get_by_role("button", name="Restart").first.click()
                page.screenshot(path=target / f"confirm-{look}.png")
                context.close()
            if "anonymous" in wanted:
                context = browser.new_context(base_url=site, **options)
                page = context.new_page()
                page.goto("/")
                page.get_by_text("read only").click()
                page.wait_for_timeout(400)
                page.screenshot(path=target / f"anonymous-{look}.png")
                context.close()
            if "login-expired" in wanted:
                context = browser.new_context(**options)
                page = context.new_page()
                page.goto(link)  # used above
                shoot(page, target / f"login-expired-{look}.png")
                context.close()
        browser.close()


def shoot(page: Page, path: Path) -> None:
    page.wait_for_timeout(500)
    height = page.evaluate("document.documentElement.scrollHeight")
    usual = page.viewport_size or DESKTOP
    if usual["width"] == PHONE["width"]:
        # A full-page screenshot would show the navigation at the bottom of the first screen.
        page.set_viewport_size({**PHONE, "height": max(height, PHONE["height"])})
    page.screenshot(path=path, full_page=usual != PHONE)
    page.set_viewport_size(usual)
    print(f"{path.name}: {height} px high")


if __name__ == "__main__":
    main()
