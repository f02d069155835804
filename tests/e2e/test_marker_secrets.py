"""A different secret in every setting, payload and fleet environment, and where none of them may be found.

`windlass up` runs a local fleet, a Hetzner fleet and a Runpod fleet against the emulators. Its handler prints its key
and quotes it, and the private part of its payload, in an error. Then logs, events, cycles, all other tables, the API,
the dashboard, metrics, user data, pod environments and command lines are searched, plain and encoded.
"""

import asyncio
import base64
import importlib
import inspect
import json
import pkgutil
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import SystemRandom
from typing import Any
from urllib.parse import quote

import httpx
import psutil
import pytest

from support.command_line import CommandLine
from windlass.config_sources import fields, is_secret, read_sources
from windlass.model.auth import API_PREFIX, Role, hash_of, new_token
from windlass.model.config import Config
from windlass.server import routes
from windlass.server.routes.login import create_login_link
from windlass.store.connection import connected
from windlass_emulators.hetzner import HetznerEmulator
from windlass_emulators.hetzner.settings import HetznerEmulatorSettings
from windlass_emulators.http_server import serving
from windlass_emulators.runpod import RunpodEmulator
from windlass_emulators.runpod.settings import RunpodEmulatorSettings

TIMEOUT_S = 100.0
# Filters of lists, besides every page that has a route.
OTHER_PAGES = ("/tasks?which=failed", "/errors?queue=near", "/metrics", "/healthz", "/readyz")
APP = """
import base64, html, json, os
from urllib.parse import quote, quote_plus
ENCODERS = (
    str, repr, json.dumps, html.escape, quote, quote_plus,
    lambda text: quote(text, safe=""), lambda text: json.dumps(json.dumps(text)), lambda text: quote(json.dumps(text)),
    lambda text: text.encode().hex(), lambda text: base64.b64encode(text.encode()).decode(),
    lambda text: base64.urlsafe_b64encode(b"user:" + text.encode()).decode(),
)
# Parts of payloads are hidden in each encoding, and not in mixtures of two.
SINGLE = [encode for place, encode in enumerate(ENCODERS) if place not in (7, 8)]
def encoded(text, encoders=ENCODERS):
    return " ".join(encode(text) for encode in encoders)
def print_key(key):
    # In lines that are printed, and so sent, one after the other.
    for text in (key, key.replace("\\n", "\\r\\n"), base64.encodebytes(key.encode()).decode()):
        for line in text.splitlines(keepends=True):
            print(line, end="", flush=True)
def work(task):
    print_key(os.environ["NEAR_PEM"])
    print("starting with", encoded(os.environ["NEAR_KEY"]), flush=True)
    if task.payload["way"] == "encoded":
        texts = encoded(os.environ["NEAR_KEY"]), encoded(task.payload["prompt"], SINGLE)
        key = base64.encodebytes(os.environ["NEAR_PEM"].encode()).decode()
        raise ValueError("key and prompt: " + " ".join(texts) + "\\n" + key)
    raise ValueError("401 for key " + os.environ["NEAR_KEY"] + " while drawing " + task.payload["prompt"])
"""
# Characters that change in addresses, JSON, HTML, shells and TOML.
SPECIAL = "+/=\"\\&<%41'"


@dataclass
class Markers:
    """One value per place. Each begins with a word of its own, so that a finding says where it came from.

    URLs, JSON, HTML and shells leave the word as it is, so it is found in each of these encodings and their mixtures.
    """

    values: dict[str, str] = field(default_factory=dict)

    def new(self, place: str, special: str = f"{SPECIAL} é") -> str:
        return self.values.setdefault(place, f"{_word(place)}{special}")

    def new_key(self, place: str) -> str:
        """A marker of several lines, as a private key has them."""
        lines = (f"{_word(place)}{number:032x}" for number in range(20))
        return self.values.setdefault(
            place, "\n".join(["-----BEGIN PRIVATE KEY-----", *lines, "-----END PRIVATE KEY-----"])
        )

    def in_toml(self, place: str) -> str:
        return json.dumps(self.new(place), ensure_ascii=False)

    def in_url(self, place: str) -> str:
        return quote(self.new(place, SPECIAL), safe="")

    def found_in(self, text: str) -> set[str]:
        # A marker may continue on the next line.
        text = f"{text} {''.join(text.split())}"
        lower, standard = text.lower(), text.replace("-", "+").replace("_", "/")
        return {
            place
            for place in self.values
            if (word := _word(place)) in text
            or word.encode().hex() in lower
            or any(part in standard for part in _base64_parts(word))
        }


def _word(place: str) -> str:
    return f"{place}Marker0123456789abcdefXYZ"


def _base64_parts(word: str) -> Iterator[str]:
    """What a text that contains the word has in base64, for each place of the word in groups of three."""
    for before in range(3):
        encoded = base64.b64encode(b"?" * before + word.encode()).decode()
        yield encoded[4 : len(encoded) // 4 * 4 - 4]


def test_markers_are_found_in_every_encoding() -> None:
    marks = Markers()
    value = marks.new("key")
    names: dict[str, Any] = {}
    exec(APP, names)  # noqa: S102 - the handler of this test
    for encode in names["ENCODERS"]:
        assert marks.found_in(f"an error with {encode(value)} in it") == {"key"}
        assert marks.found_in(json.dumps(f"x{encode(value)}")) == {"key"}
    assert marks.found_in("key ******** Marker0123") == set()


@dataclass
class Installation:
    windlass: CommandLine
    dsn: str
    port: int
    markers: Markers
    hetzner: HetznerEmulator
    runpod: RunpodEmulator
    log: Path


@pytest.fixture
def installation(tmp_path: Path, dsn: str) -> Iterator[Installation]:
    marks = Markers()
    marks.new_key("nearPem")
    now: Callable[[], datetime] = lambda: datetime.now(UTC)  # noqa: E731
    hetzner = HetznerEmulator(
        now, HetznerEmulatorSettings(boot_s=0, action_s=0, delete_s=0, token=marks.new("hetznerKey", SPECIAL))
    )
    runpod = RunpodEmulator(now, RunpodEmulatorSettings(key=marks.new("runpodKey", SPECIAL)))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "app.py").write_text(APP)
    with ExitStack() as stack:
        hetzner_url, runpod_url = stack.enter_context(serving(hetzner)), stack.enter_context(serving(runpod))
        (tmp_path / "windlass.toml").write_text(
            f"""
data_dir = "state"
hetzner_endpoint = "{hetzner_url}/v1"
runpod_endpoint = "{runpod_url}/v2"
supabase_service_role_key = {marks.in_toml("supabaseKey")}
[oidc]
client_secret = {marks.in_toml("oidcSecret")}
[api]
port = {port}
[logs]
in_database = true
[alerts]
webhook_url = "http://127.0.0.1:1/hook/{marks.in_url("webhook")}"
apprise_urls = "json://user:{marks.in_url("apprise")}@127.0.0.1:1/"
slack_url = "http://127.0.0.1:1/slack/{marks.in_url("slack")}"
email_to = ["ops@example.com"]
smtp_url = "smtp://user:{marks.in_url("mailPassword")}@127.0.0.1:1"
[fleets.near]
queues = ["near"]
handler = "app:work"
chdir = "{tmp_path}"
min_workers = 1
max_workers = 1
poll_interval_s = 0.3
heartbeat_interval_s = 0.5
redact = ["$.prompt"]
[fleets.near.env]
NEAR_KEY = {marks.in_toml("nearEnv")}
NEAR_PEM = {marks.in_toml("nearPem")}
PLAIN_NAME = {marks.in_toml("plainlyNamedEnv")}
[fleets.far]
provider = "hetzner"
queues = ["far"]
handler = "app:work"
max_workers = 1
poll_interval_s = 0.5
env = {{FAR_TOKEN = {marks.in_toml("farEnv")}}}
[fleets.far.bootstrap]
requirements = ["--extra-index-url https://user:{marks.in_url("packageIndex")}@pypi.example/simple"]
setup = ["git clone https://{marks.in_url("gitToken")}@git.example/app"]
[fleets.pods]
provider = "runpod"
queues = ["pods"]
handler = "app:work"
max_workers = 1
poll_interval_s = 0.5
auto_start_worker = false
env = {{POD_SECRET = {marks.in_toml("podFleetEnv")}}}
[fleets.pods.runpod]
image = "any"
env = {{POD_IMAGE_TOKEN = {marks.in_toml("podEnv")}}}
"""
        )
        # The password is not asked for on this socket, but it is a secret of the settings.
        secret_dsn = dsn.replace("postgresql://windlass@", f"postgresql://windlass:{marks.in_url('databasePassword')}@")
        assert secret_dsn != dsn
        windlass = CommandLine(
            tmp_path,
            {
                "DATABASE_URL": secret_dsn,
                "HCLOUD_TOKEN": marks.values["hetznerKey"],
                "RUNPOD_API_KEY": marks.values["runpodKey"],
                "MARKED_PROCESS": "yes",
            },
        )
        log = tmp_path / "up.log"
        with log.open("w") as output:
            up = windlass.start("up", stdout=output, stderr=output, start_new_session=True)
        try:
            yield Installation(windlass, dsn, port, marks, hetzner, runpod, log)
        finally:
            up.terminate()
            up.wait(60)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():
            await asyncio.sleep(0.2)


async def test_every_secret_setting_has_a_marker(installation: Installation) -> None:
    folder, environment = installation.windlass.folder, installation.windlass.environment()
    given = read_sources(folder / "windlass.toml", "this test", environment).values
    secrets = {key for key, info in fields(Config) if is_secret(info)}
    assert len(secrets) > 5
    assert {key for key in secrets if not installation.markers.found_in(str(given.get(key)))} == set()


async def test_marker_secrets_are_found_nowhere_they_must_not_be(installation: Installation) -> None:
    it, marks = installation, installation.markers
    prompt = marks.new("privatePrompt")
    async with connected(it.dsn, "reading tables") as connection:
        enqueue = "select windlass.enqueue($1, $2::text::jsonb, p_max_attempts => 1)"
        near = [("near", {"prompt": prompt, "way": way}) for way in ("plain", "encoded")]
        for queue, payload in (*near, ("far", None), ("pods", None)):
            await connection.fetchval(enqueue, queue, json.dumps(payload))
        near_ids = [row["id"] for row in await connection.fetch("select id from windlass.tasks where queue = 'near'")]

        async def is_done() -> bool:
            failed = await connection.fetchval("select count(*) from windlass.tasks where error is not null")
            return bool(failed == len(near) and it.hetzner.project.servers and it.runpod.account.pods)

        await until(is_done)
        command_lines = [" ".join(process.cmdline()) for process in psutil.process_iter() if _is_marked(process)]
        environments = [process.environ() for process in psutil.process_iter() if _is_handler(process)]
        error = await connection.fetchval(
            "select error from windlass.tasks where error is not null order by id limit 1"
        )
        assert "ValueError: 401 for key ******** while drawing ********" in error
        pages = await _read_pages(it)
        tables = {
            name: await connection.fetchval(f"select coalesce(string_agg(t::text, ' '), '') from windlass.{name} t")  # noqa: S608
            for (name,) in await connection.fetch(
                "select relname from pg_class where relnamespace = 'windlass'::regnamespace and relkind = 'r'"
            )
        }
        # Payloads are data. They are stored as they were given.
        tables["tasks"] = await connection.fetchval(
            "select string_agg((to_jsonb(t) - 'payload')::text, ' ') from windlass.tasks t"
        )
    assert len(command_lines) >= 2
    # Handlers see the environment of their fleet, and a DATABASE_URL that is in the environment of `up`.
    seen = {name: found for each in environments for name, value in each.items() if (found := marks.found_in(value))}
    assert seen == {
        "NEAR_KEY": {"nearEnv"},
        "NEAR_PEM": {"nearPem"},
        "PLAIN_NAME": {"plainlyNamedEnv"},
        "DATABASE_URL": {"databasePassword"},
    }
    user_data = " ".join(server.user_data for server in it.hetzner.project.servers.values())
    assert "wlj_" in user_data
    worker = _worker(tables["workers"])
    places = {
        "the log of up": it.log.read_text(),
        "command lines": " ".join(command_lines),
        "user data": user_data,
        "pod environments": " ".join(repr(pod) for pod in it.runpod.account.pods.values()),
        "output of the worker": it.windlass("workers", "logs", worker).out,
        "windlass config show": it.windlass("config", "show").out,
        "windlass status": it.windlass("status").out,
        "windlass audit": it.windlass("audit").out,
        **{f"windlass tasks logs {task_id}": it.windlass("tasks", "logs", task_id).out for task_id in near_ids},
        **{f"windlass tasks show {task_id}": it.windlass("tasks", "show", task_id).out for task_id in near_ids},
        **{f"windlass explain {name}": it.windlass("explain", name).out for name in (*near_ids, worker, "near", "far")},
        **{f"table {name}": text for name, text in tables.items()},
        **pages,
    }
    for name in ("events", "cycles", "logs", "workers", "fleets"):
        assert places[f"table {name}"], name
    assert {name for name, text in places.items() if not text and not name.startswith("table ")} == set()
    found = {place: names for place, text in places.items() if (names := marks.found_in(text))}
    # A person with the rights of the orchestrator reads the payload of a task.
    for task_id in near_ids:
        assert found.pop(f"windlass tasks show {task_id}") == {"privatePrompt"}
    # The machine runs these commands before it joins.
    assert found.pop("user data") == {"packageIndex", "gitToken"}
    # The image of the pod gets these variables from the vendor.
    assert found.pop("pod environments") == {"podEnv"}
    assert found == {}


def _is_marked(process: psutil.Process) -> bool:
    try:
        return process.environ().get("MARKED_PROCESS") == "yes"
    except psutil.Error:
        return False


def _is_handler(process: psutil.Process) -> bool:
    try:
        return _is_marked(process) and "windlass.worker.child" in process.cmdline()
    except psutil.Error:
        return False


def _worker(text: str) -> str:
    found = re.search(r"near-0-[0-9a-z]+", text)
    assert found is not None
    return found[0]


def _pages() -> Iterator[str]:
    """The path of every page, as the modules of routes declare them."""
    for info in pkgutil.iter_modules(routes.__path__):
        module = importlib.import_module(f"{routes.__name__}.{info.name}")
        for place, name in re.findall(
            r'@router\.get\(\s*(?:"([^"]+)"|(\w+)).*include_in_schema=False', inspect.getsource(module)
        ):
            yield place or getattr(module, name)


async def _read_pages(it: Installation) -> dict[str, str]:
    """Every page and every GET of the API as an administrator, the tasks as a viewer, and the stream as both.

    Also a requested cycle, as pg_cron asks for it."""
    from support.stores import PostgresStores

    url = f"http://127.0.0.1:{it.port}"
    found: dict[str, str] = {}
    async with PostgresStores(it.dsn) as store, httpx.AsyncClient(base_url=url, timeout=60) as browser:
        (await browser.get(await create_login_link(store, url, Role.ADMIN))).raise_for_status()
        description = (await browser.get("/api/v1/openapi.json")).json()
        task_ids = [task.id for task in await store.tasks()]
        workers = [worker.id for worker in await store.workers(include_terminated=True)]
        cycle_ids = [cycle.id for name in ("near", "far", "pods") for cycle in await store.cycles(name, 3)]
        values = {"fleet": ["near", "far", "pods"], "worker_id": workers, "cycle_id": cycle_ids, "task_id": task_ids}
        for path, methods in description["paths"].items():
            names = re.findall(r"\{(\w+)\}", path)
            if "get" not in methods or path.endswith("/stream") or path.startswith("/internal/"):
                continue
            if path == "/api/v1/tasks/{task_id}":
                continue  # payloads are data for administrators; viewers are checked below
            for value in values.get(names[0], []) if names else [""]:
                filled = re.sub(r"\{\w+\}", quote(str(value)), path)
                found[filled] = (await browser.get(filled)).text
        found["stream"] = await _read_stream(browser)
        values |= {"queue": ["near", "far", "pods"], "code": ["HANDLER_ERROR"]}
        for path in (*OTHER_PAGES, *_pages()):
            names = re.findall(r"\{(\w+)", path)
            for value in values[names[0]] if names else [""]:
                filled = re.sub(r"\{.+\}", quote(str(value)), path)
                found[filled] = (await browser.get(filled, follow_redirects=True)).raise_for_status().text
    async with PostgresStores(it.dsn) as store, httpx.AsyncClient(base_url=url, timeout=60) as viewer:
        token = new_token(API_PREFIX, SystemRandom())
        await store.create_token("scheduler", Role.OPERATOR, hash_of(token))
        cycle = await viewer.post("/internal/cycle", headers={"Authorization": f"Bearer {token}"})
        found["POST /internal/cycle"] = cycle.raise_for_status().text
        (await viewer.get(await create_login_link(store, url, Role.VIEWER))).raise_for_status()
        near = [task.id for task in await store.tasks(queue="near")]
        for task_id in near:
            found[f"task {task_id} as a viewer"] = (
                (await viewer.get(f"/api/v1/tasks/{task_id}")).raise_for_status().text
            )
        found["stream as a viewer"] = await _read_stream(viewer)
    return found


async def _read_stream(browser: httpx.AsyncClient) -> str:
    """All events so far, up to the failures of the tasks, and an overview."""
    text = ""
    async with (
        asyncio.timeout(TIMEOUT_S),
        browser.stream("GET", "/api/v1/stream", headers={"Last-Event-ID": "0"}) as response,
    ):
        async for part in response.aiter_text():
            text += part
            if text.count("TASK_FAILED") >= 2 and "event: overview" in text:
                return text
    raise AssertionError(f"the stream ended early: {text}")
