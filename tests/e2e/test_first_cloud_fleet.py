"""Every command of docs/first-cloud-fleet.md runs, from an empty host to the first result of an emulated cloud."""

import json
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from support.postgres_servers import reachable_temp_dir, wait_until
from support.rehearsed_page import FolderHost, blocks
from support.wheel_folder import write_wheels
from windlass.config_loader import load_config
from windlass.wiring.providers import check_worker_start
from windlass_emulators.hetzner import HetznerEmulator
from windlass_emulators.hetzner.settings import HetznerEmulatorSettings
from windlass_emulators.http_server import serving
from windlass_emulators.process_host import ProcessHost
from windlass_emulators.runpod import RunpodEmulator, RunpodEmulatorSettings
from windlass_emulators.runpod.pod_host import RealPodHost, find_sshd

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "first-cloud-fleet.md").read_text()
SOURCES = ("src", "deploy", "docs/runbooks.md", "pyproject.toml", "README.md", "LICENSE")
KEY = "a-key-of-the-vendor"
# Two boots, one of them a rehearsal, and two installations by pip.
pytestmark = pytest.mark.timeout(900)
# What pip needs to build Windlass.
BUILD_PACKAGES = ("hatchling",)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wheels(tmp_path_factory.mktemp("wheels"), also=BUILD_PACKAGES)


@pytest.fixture
def host(wheels: Path) -> Iterator[FolderHost]:
    # The embedded PostgreSQL may run as another user, who must be able to enter the folder.
    with reachable_temp_dir() as folder, new_host(folder / "host", wheels) as host:
        yield host


@contextmanager
def new_host(root: Path, wheels: Path) -> Iterator[FolderHost]:
    port = free_port()
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    host = FolderHost(
        root,
        {**pip, "LANG": "C.UTF-8"},
        {"https://windlass.example.com": f"http://127.0.0.1:{port}", "port = 8080": f"port = {port}"},
    )
    copy = host.root / "home" / "windlass"
    copy.mkdir()
    for name in SOURCES:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (copy / name).parent.mkdir(exist_ok=True)
            shutil.copy(source, copy / name)
    host.give_home()
    try:
        yield host
    finally:
        host.kill()


def run_part(host: FolderHost, part: str, settings: str, more: str = "") -> str:
    """Run the set-up and one part of the page. `settings` and `more` are put before and after its windlass.toml."""
    output = ""
    # A function that one block defines is used by later ones.
    setup = [text for language, text in blocks(PAGE, "The control plane") if language == "sh"]
    for text in setup:
        host.run(text)
    steps = blocks(PAGE, part)
    configuration = next(text for language, text in steps if language == "toml")
    (host.root / "srv" / "app" / "windlass.toml").write_text(host.translated(f"{settings}{configuration}{more}"))
    for language, text in steps:
        if language == "sh":
            output += host.run(f"{setup[-1]}{text}", stdin=f"{KEY}\n")
    return output


def assert_result(host: FolderHost, output: str, queue: str) -> None:
    assert "complete after" in output, "the rehearsal ran a task"
    assert '"status": "complete"' in output
    assert re.search(rf"queue\s+{queue}\b", output), output
    assert [line for line in host.commands if line.startswith("sudo ufw allow")] == [
        "sudo ufw allow 22/tcp", "sudo ufw allow 80/tcp", "sudo ufw allow 443/tcp",
    ]  # fmt: skip
    assert KEY not in (host.root / "up.log").read_text()


@contextmanager
def runpod(folder: Path) -> Iterator[tuple[RunpodEmulator, str]]:
    limits: dict[str, Any] = {"requests_per_minute": 10**5, "requests_per_hour": 10**6, "requests_per_day": 10**6}
    settings = RunpodEmulatorSettings(provisioning_s=0.5, starting_s=1, runtime_s=0.5, key=KEY, **limits)
    with RealPodHost(folder, stop_grace_s=2.0) as pods:
        emulator = RunpodEmulator(lambda: datetime.now(UTC), settings, pods)
        with serving(emulator) as address:
            yield emulator, address


@pytest.mark.skipif(find_sshd() is None, reason="no OpenSSH here: install openssh-server")
def test_every_command_of_the_runpod_part_runs(host: FolderHost, tmp_path: Path, wheels: Path) -> None:
    with runpod(tmp_path / "pods") as (emulator, address):
        requirements = json.dumps(["--no-index", f"--find-links {wheels}"])
        output = run_part(
            host,
            "Runpod",
            f'runpod_endpoint = "{address}/v2"\n',
            f"\n[fleets.gpu.bootstrap]\nrequirements = {requirements}\n",
        )
        assert_result(host, output, "renders")
        emulator.settle()
        assert emulator.account.pods == {}, "no pod is billed any more"
        # One of the rehearsal, and one of the fleet.
        assert len(emulator.bill()["pods"]) == 2


def test_every_command_of_the_hetzner_part_runs(host: FolderHost, tmp_path: Path) -> None:
    with ProcessHost(tmp_path / "servers", stop_grace_s=2.0) as servers:
        settings = HetznerEmulatorSettings(boot_s=1, delete_s=0, token=KEY)
        emulator = HetznerEmulator(lambda: datetime.now(UTC), settings, servers)
        with serving(emulator) as address:
            output = run_part(host, "Hetzner", f'hetzner_endpoint = "{address}/v1"\n')
            assert_result(host, output, "reports")
            assert emulator.project.servers == {}, "no server is billed any more"
            assert len(emulator.bill()["servers"]) == 2


@pytest.mark.parametrize(
    ("credential", "files"),
    [
        ("WINDLASS:/etc/windlass", {"WINDLASS_DATABASE_URL": "url", "WINDLASS_more_KEY": "key"}),
        ("DATABASE_URL:/etc/windlass/DATABASE_URL", {"DATABASE_URL": "url"}),
        ("-RUNPOD_API_KEY:/etc/windlass/RUNPOD_API_KEY", None),
        ("WINDLASS:/etc/nothing", None),
    ],
)
def test_rehearsed_service_has_the_credentials_that_systemd_gives(
    credential: str, files: dict[str, str] | None
) -> None:
    """No path is optional: the `-` of other directives is a part of the name here."""
    with reachable_temp_dir() as folder:
        host = FolderHost(folder / "host", {})
        secrets = host.root / "etc" / "windlass"
        (secrets / "more").mkdir(parents=True)
        (secrets / "DATABASE_URL").write_text("url")
        (secrets / "more" / "KEY").write_text("key")
        (secrets / "linked").symlink_to("DATABASE_URL")
        (host.root / "srv" / "program").write_text(
            '#!/bin/sh\ncd "$CREDENTIALS_DIRECTORY" && for name in *; do echo "$name $(cat $name)"; done\n'
        )
        (host.root / "srv" / "program").chmod(0o755)
        (host.root / "etc" / "systemd" / "system" / "windlass.service").write_text(
            f"User=app\nWorkingDirectory=/srv\nUMask=0077\nLoadCredential={credential}\nExecStart=/srv/program\n"
        )
        start = "sudo systemctl enable --now windlass"
        if files is None:
            with pytest.raises(AssertionError, match="status=243: Failed to set up credentials"):
                host.run(start)
            return
        host.run(start)
        log = host.root / "up.log"
        wait_until(lambda: len(log.read_text().splitlines()) == len(files), 30.0, "the program")
        assert dict(line.split() for line in log.read_text().splitlines()) == files


def test_page_has_only_commands_that_a_part_runs() -> None:
    known = sum(len(blocks(PAGE, part)) for part in ("The control plane", "Runpod", "Hetzner"))
    assert PAGE.count("\n```") == 2 * known


@pytest.mark.parametrize("part", ["Runpod", "Hetzner"])
def test_every_configuration_of_the_page_is_valid(part: str, tmp_path: Path) -> None:
    keys = 'runpod_api_key = "k"\nhetzner_api_token = "k"\n'
    for number, text in enumerate(text for language, text in blocks(PAGE, part) if language == "toml"):
        file = tmp_path / f"{number}.toml"
        file.write_text(f"{keys}{text}")
        loaded = load_config(file)
        assert loaded.warnings == ()
        check_worker_start(loaded.config)
        assert all(fleet.budget_per_day for fleet in loaded.config.fleets.values())
