"""`windlass init`: by options, by a dialog at a terminal, its refusals, and that what it writes works."""

import json
import os
import pty
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from support.command_line import CommandLine
from windlass.config_loader import load_config
from windlass.wiring.project import ProjectAnswers, project_files, supervisor_stop_s
from windlass_emulators.hetzner import HetznerEmulator
from windlass_emulators.hetzner.settings import HetznerEmulatorSettings
from windlass_emulators.http_server import serving
from windlass_emulators.process_host import ProcessHost
from windlass_emulators.runpod import RunpodEmulator

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
LIMIT_S = 60.0
URL = "https://windlass.example.com"


@pytest.fixture
def windlass(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)


def until(condition: Callable[[], bool], description: Callable[[], str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {description()}"
        time.sleep(0.05)


def test_local_project_runs_a_task(tmp_path: Path, dsn: str) -> None:
    written = CommandLine(tmp_path)("init", "shop", "--provider", "local", "--min", 0, "--max", 2)
    assert (written.code, written.err) == (0, ""), written
    assert written.out.startswith(f"wrote windlass.toml, app.py in {tmp_path}/shop\n\nnext:\n  cd shop\n")
    windlass = CommandLine(tmp_path / "shop", {"DATABASE_URL": dsn})
    checked = windlass("doctor")
    assert (checked.code, "FAIL" in checked.out) == (0, False), checked
    log = (tmp_path / "up.log").open("w+")
    up = windlass.start("up", "--port", "0", stdout=log, stderr=log)
    try:
        with psycopg.connect(dsn, autocommit=True) as sql:
            task = windlass("enqueue", "default", '{"name": "Ada"}').out.strip()
            result = "select result ->> 'greeting' from windlass.tasks where id = %s and status = 'complete'"
            until(
                lambda: sql.execute(result, (task,)).fetchone() == ("Hello, Ada!",),
                lambda: (tmp_path / "up.log").read_text(),
            )
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(LIMIT_S)
        log.close()


class Conversation:
    """`windlass init` at a terminal."""

    def __init__(self, windlass: CommandLine, *arguments: str) -> None:
        self.shown = ""
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            os.chdir(windlass.folder)
            program = [sys.executable, "-m", "windlass", "init", *arguments]
            os.execve(program[0], program, windlass.environment())  # noqa: S606

    def answer(self, question: str, text: str) -> None:
        """Wait for the question after the last answer, then type."""
        seen = len(self.shown)
        until(lambda: question in self._read()[seen:], lambda: f"{question}\n{self.shown}")
        os.write(self._master, text.encode())

    def end(self) -> int:
        codes: list[int] = []

        def has_ended() -> bool:
            self._read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            codes.extend([os.waitstatus_to_exitcode(status)] if pid else [])
            return bool(pid)

        until(has_ended, lambda: self.shown)
        self._read()
        os.close(self._master)
        return codes[0]

    def _read(self) -> str:
        while select.select([self._master], [], [], 0)[0]:
            try:
                self.shown += os.read(self._master, 65_536).decode(errors="replace")
            except OSError:
                break  # it has ended
        return self.shown


def test_dialog_asks_for_what_is_not_given(windlass: CommandLine, tmp_path: Path) -> None:
    dialog = Conversation(windlass, "--max", "3", "--queue", "reports")
    dialog.answer("Where do workers run: local, hetzner or runpod? [local]", "mars\n")
    dialog.answer("write one of local, hetzner, runpod", "hetzner\n")
    dialog.answer("Deploy files: none, systemd, docker or kubernetes? [none]", "systemd\n")
    dialog.answer("Image of the machines? [ubuntu-24.04]", "\n")
    dialog.answer("Budget per day, in EUR? [5.00]", "-1\n")
    dialog.answer("write an amount above 0", "7.50\n")
    dialog.answer("as machines reach it?", "\n")
    dialog.answer("an answer is required", f"{URL}\n")
    dialog.answer("Minimum number of workers? [0]", "1\n")
    assert dialog.end() == 0, dialog.shown
    assert "Maximum" not in dialog.shown, "given as an option"
    config = load_config(tmp_path / "windlass.toml").config
    fleet = config.fleets["default"]
    assert (fleet.provider, str(fleet.budget_per_day), fleet.hetzner.image) == ("hetzner", "7.50", "ubuntu-24.04")
    assert (fleet.min_workers, fleet.max_workers, fleet.queues) == (1, 3, ("reports",))
    assert config.api.url == URL
    stop_s = supervisor_stop_s(fleet)
    assert stop_s >= 600 + 15 + 3 * 2
    assert f"TimeoutStopSec={stop_s}\n" in (tmp_path / "windlass.service").read_text()


def test_closed_dialog_writes_nothing(windlass: CommandLine, tmp_path: Path) -> None:
    dialog = Conversation(windlass)
    dialog.answer("[local]", "\x04")
    assert dialog.end() == 2
    assert "windlass: the dialog was closed. Nothing was written." in dialog.shown
    assert list(tmp_path.iterdir()) == []


def test_dialog_ends_after_five_wrong_answers(windlass: CommandLine, tmp_path: Path) -> None:
    dialog = Conversation(windlass)
    for _ in range(5):
        dialog.answer("[local]", "mars\n")
    assert dialog.end() == 2
    assert "5 answers were not valid. Nothing was written." in dialog.shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "there is no terminal to ask at. Give --provider, --min, --max, or --yes for the defaults."),
        (
            ("--provider", "hetzner", "--min", 1),
            "there is no terminal to ask at. Give --image, --budget, --url, --max, or --yes for the defaults.",
        ),
        (("--yes", "--provider", "mars"), "--provider is 'mars': write one of local, hetzner, runpod."),
        (
            ("--yes", "--provider", "hetzner"),
            "--url is missing. Give the address at which rented machines reach this host and its `windlass up`, ",
        ),
        (
            ("--yes", "--provider", "runpod", "--url", URL, "--deploy", "docker"),
            "--image is missing. Give an image that starts a worker by itself",
        ),
        (("--yes", "--deploy", "heroku"), "--deploy is 'heroku': write one of none, systemd, docker, kubernetes."),
        (("--yes", "--budget", "3"), "--budget is for rented machines, and --provider is local. Remove it."),
        (("--yes", "--deploy", "kubernetes"), "--deploy kubernetes is for rented machines, and --provider is local"),
        (
            ("--yes", "--provider", "hetzner", "--url", URL, "--budget", "free"),
            "--budget is 'free': write an amount above 0, for example 5.00.",
        ),
        (("--yes", "--min", 9), "windlass: --min is 9 and --max is 4: the minimum must not exceed the maximum.\n"),
        (("--yes", "--min", 5, "--max", 2), "windlass: --min is 5 and --max is 2: the minimum must not exceed"),
        (
            ("--yes", "--provider", "hetzner", "--url", "ftp://x"),
            "windlass: --url is 'ftp://x': it is not a URL: write https://host:port.",
        ),
        (
            ("--yes", "--provider", "runpod", "--url", URL, "--image", "!"),
            "windlass: --image is '!': '!' is not an image: ",
        ),
        (("--yes", "--queue", "a b"), "windlass: --queue is ['a b']: 'a b' cannot be a queue's name: use letters, "),
        (("--yes", "--queue", 'a"]\n[alerts]\ncommand="x'), "windlass: --queue is "),
    ],
)
def test_bad_input_is_refused_and_writes_nothing(
    windlass: CommandLine, tmp_path: Path, options: tuple[object, ...], sentence: str
) -> None:
    refused = windlass("init", *options)
    assert refused.code == 2
    assert refused.err.startswith("windlass: ") and sentence in refused.err, refused.err
    assert "windlass.toml" not in refused.err, "no such file exists"
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_kept_without_force(windlass: CommandLine, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere.py"
    outside.write_text("mine = True\n")
    project = tmp_path / "shop"
    project.mkdir()
    (project / "app.py").symlink_to(outside)
    refused = windlass("init", "shop", "--yes")
    assert (refused.code, refused.err) == (
        2,
        "windlass: app.py exists in shop. Nothing was written: choose another folder, or replace it with --force.\n",
    )
    assert [file.name for file in project.iterdir()] == ["app.py"]
    assert windlass("init", "shop", "--yes", "--force").code == 0
    assert outside.read_text() == "mine = True\n", "the link is replaced, not followed"
    assert "def handle(" in (project / "app.py").read_text()
    assert sorted(file.name for file in project.iterdir()) == ["app.py", "windlass.toml"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_that_may_not_be_written_is_refused(windlass: CommandLine, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    refused = windlass("init", "shop", "--yes")
    tmp_path.chmod(0o700)
    assert (refused.code, "cannot write shop: Permission denied" in refused.err) == (2, True), refused


def test_file_in_the_place_of_the_folder_is_refused(windlass: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "shop").write_text("")
    refused = windlass("init", "shop", "--yes")
    assert (refused.code, refused.err) == (2, "windlass: cannot write shop: File exists.\n")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_hetzner_project_runs_a_task_on_an_emulated_server(windlass: CommandLine, tmp_path: Path, dsn: str) -> None:
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    assert windlass("init", "--provider", "hetzner", "--yes", "--url", url, "--budget", "1").code == 0
    with ProcessHost(tmp_path / "machines") as host:
        emulator = HetznerEmulator(lambda: datetime.now(UTC), HetznerEmulatorSettings(boot_s=1, delete_s=0), host)
        with serving(emulator) as endpoint:
            environment = {
                "DATABASE_URL": dsn,
                "HETZNER_API_TOKEN": "any",
                "HCLOUD_ENDPOINT": f"{endpoint}/v1",
                "WINDLASS_API__PORT": str(port),
            }
            done = windlass.with_env(**environment)("doctor", "--fleet", "default", "--live", "--json")
            found = {each["check"]: each["verdict"] for each in json.loads(done.out)}
            assert (done.code, found["task"], found["delete"]) == (0, "ok", "ok"), done
            assert emulator.project.servers == {}


def test_runpod_project_passes_the_doctor(windlass: CommandLine, tmp_path: Path, dsn: str) -> None:
    written = windlass("init", "--provider", "runpod", "--yes", "--url", URL)
    assert written.code == 0
    (command,) = [line.partition("#")[0] for line in written.out.splitlines() if "ssh-keygen" in line]
    subprocess.run(shlex.split(command), check=True, cwd=tmp_path, timeout=LIMIT_S)
    with serving(RunpodEmulator(lambda: datetime.now(UTC))) as endpoint:
        environment = {"DATABASE_URL": dsn, "RUNPOD_API_KEY": "any", "RUNPOD_ENDPOINT": f"{endpoint}/v2"}
        done = windlass.with_env(**environment)("doctor", "--json")
    failed = [each for each in json.loads(done.out) if each["verdict"] == "fail"]
    assert (done.code, failed) == (0, []), done


def _project(**answers: Any) -> dict[str, str]:
    return project_files(ProjectAnswers(queue="default", min_workers=0, max_workers=2, **answers), "0.1.0")


def test_variables_of_another_program_do_not_refuse_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("MAX_ACTIVE_GPUS=7\n")
    monkeypatch.chdir(tmp_path)
    # The second one has no effect, because the first selects another policy.
    monkeypatch.setenv("SCALE_UP_MULTIPLIER", "3")
    monkeypatch.setenv("TASKS_PER_GPU_THRESHOLD", "3")
    assert "max_workers = 2" in _project(provider="local")["windlass.toml"]


def test_compose_file_has_the_files_and_the_key(tmp_path: Path) -> None:
    texts = _project(provider="hetzner", budget_per_day="5", image="ubuntu-24.04", url=URL, deploy="docker")
    (tmp_path / "compose.yaml").write_text(texts["compose.yaml"])
    checker = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", tmp_path / "compose.yaml"]
    subprocess.run(checker, check=True, timeout=LIMIT_S)
    compose = yaml.safe_load(texts["compose.yaml"])
    service = compose["services"]["windlass"]
    assert service["secrets"] == ["database_url", "hetzner_api_token"]
    assert {"./windlass.toml:/app/windlass.toml:ro", "./app.py:/app/app.py:ro"} <= set(service["volumes"])
    assert compose["secrets"]["hetzner_api_token"] == {"file": "./secrets/hetzner_api_token"}
    assert "build" not in service
    local = yaml.safe_load(_project(provider="local", deploy="docker")["compose.yaml"])
    assert local["services"]["windlass"]["secrets"] == ["database_url"]


def test_kubernetes_files_name_the_key_of_the_provider() -> None:
    texts = _project(provider="hetzner", budget_per_day="5", image="ubuntu-24.04", url=URL, deploy="kubernetes")
    for name in ("up.yaml", "cycle.yaml"):
        assert "value: /run/secrets/windlass/HETZNER_API_TOKEN\n" in texts[name]
    assert "--from-literal=HETZNER_API_TOKEN=" in texts["kustomization.yaml"]
    assert [name for name, text in texts.items() if "RUNPOD" in text] == []


def test_kubernetes_files_are_valid_and_complete(tmp_path: Path) -> None:
    image = "ghcr.io/example/worker:1"
    texts = _project(provider="runpod", budget_per_day="20", image=image, url=URL, deploy="kubernetes")
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for name in ("up.yaml", "cycle.yaml", "service.yaml"):
        validator = [BIN / "kubernetes-validate", "--strict", tmp_path / name]
        subprocess.run(validator, check=True, timeout=LIMIT_S)
    described = yaml.safe_load(texts["kustomization.yaml"])
    assert {*described["resources"], *described["configMapGenerator"][0]["files"]} <= texts.keys()
    containers = yaml.safe_load(texts["up.yaml"])["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in containers[0]["env"]}
    assert variables["RUNPOD_API_KEY_FILE"] == "/run/secrets/windlass/RUNPOD_API_KEY"
    config = load_config(tmp_path / "windlass.toml").config
    assert (config.api.host, config.api.plain_http) == ("0.0.0.0", True)  # noqa: S104
    # In a container there is no SSH key: the image starts the worker, with the handler in it.
    assert not config.fleets["default"].auto_start_worker
    assert config.fleets["default"].handler == "app:handle"


def test_unknown_provider_is_named_before_missing_flags(windlass: CommandLine) -> None:
    done = windlass("init", "--provider", "mars")
    assert (done.code, done.err) == (2, "windlass: --provider is 'mars': write one of local, hetzner, runpod.\n")
