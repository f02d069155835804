"""Runs the boot scripts with a control plane on loopback that serves a wheel and a folder as the root.

Not real are only what would change the machine that runs the tests (systemctl, useradd, docker), and sleep.
"""

import getpass
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import yaml

from support.wheel_server import WheelServer, serving_wheel, tiny_wheel
from windlass.model.bootstrap import BootstrapSettings
from windlass.model.machine import MachineRequest
from windlass.worker.bootstrap import fetch_wheel, render_user_data

TIMEOUT_S = 110.0
TOKEN = "wjt_3f1c9a"
WHEEL = "windlass-9.9.9-py3-none-any.whl"


def serving(wheel: bytes, certificate: tuple[Path, Path] | None = None) -> AbstractContextManager[WheelServer]:
    return serving_wheel(wheel, TOKEN, WHEEL, certificate)


@pytest.fixture
def control_plane() -> Iterator[WheelServer]:
    with serving(tiny_wheel("windlass", "9.9.9")) as found:
        yield found


# ------------------------------------------------------------------------------------------------- fetching the wheel


class Fetched:
    def __init__(
        self, folder: Path, url: str, token: str = TOKEN, env: dict[str, str] | None = None, **more: str
    ) -> None:
        folder.mkdir(exist_ok=True)
        join_file = folder / "join.json"
        join_file.write_text(json.dumps({"worker_id": "w", "url": url, "join_token": token, **more}))
        self.wheels = folder / "wheels"
        done = subprocess.run(
            [sys.executable, "-I", fetch_wheel.__file__, join_file, self.wheels, "--first-wait-s", "0.001"],
            capture_output=True,
            text=True,
            env={**os.environ, **(env or {})},
            timeout=TIMEOUT_S,
            check=False,
        )
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        assert token not in self.out + self.err

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.wheels.glob("*"))


def test_wheel_is_fetched_with_join_token(tmp_path: Path, control_plane: WheelServer) -> None:
    fetched = Fetched(tmp_path, control_plane.url)
    assert (fetched.code, fetched.out, fetched.err) == (0, f"{fetched.wheels / WHEEL}\n", "")
    assert (fetched.wheels / WHEEL).read_bytes() == control_plane.wheel
    assert control_plane.requests == [
        ("/internal/wheel", f"Bearer {TOKEN}"),
        (f"/internal/wheel/{WHEEL}", f"Bearer {TOKEN}"),
    ]


def test_token_is_not_sent_through_proxy(tmp_path: Path, control_plane: WheelServer) -> None:
    with serving(b"") as proxy:
        environment = {"http_proxy": proxy.url, "HTTP_PROXY": proxy.url, "all_proxy": proxy.url, "no_proxy": ""}
        fetched = Fetched(tmp_path, control_plane.url, env=environment)
    assert proxy.requests == []
    assert (fetched.code, fetched.files) == (0, [WHEEL])


def test_restarting_control_plane_is_retried(tmp_path: Path, control_plane: WheelServer) -> None:
    control_plane.failures = [503, 502]
    fetched = Fetched(tmp_path, control_plane.url)
    assert (fetched.code, fetched.files) == (0, [WHEEL])
    assert fetched.err.count("retrying") == 2


def test_interrupted_download_is_retried(tmp_path: Path, control_plane: WheelServer) -> None:
    control_plane.cuts_downloads = 1
    fetched = Fetched(tmp_path, control_plane.url)
    assert (fetched.code, fetched.files) == (0, [WHEEL])
    assert (fetched.wheels / WHEEL).read_bytes() == control_plane.wheel


def test_wheel_with_wrong_hash_is_not_kept(tmp_path: Path, control_plane: WheelServer) -> None:
    control_plane.wheel = tiny_wheel("windlass", "6.6.6")
    fetched = Fetched(tmp_path, control_plane.url)
    assert (fetched.code, fetched.out, fetched.files) == (1, "", [])
    assert f"is damaged: its SHA-256 differs from the announced one ({fetch_wheel.MAX_ATTEMPTS} attempts)" in (
        fetched.err
    )


def test_retries_are_limited(tmp_path: Path, control_plane: WheelServer) -> None:
    control_plane.failures = [500] * 100
    assert Fetched(tmp_path, control_plane.url).code == 1
    assert len(control_plane.requests) == fetch_wheel.MAX_ATTEMPTS


def test_unreachable_control_plane_gives_one_sentence(tmp_path: Path, control_plane: WheelServer) -> None:
    with serving(b"") as gone:
        url = gone.url
    fetched = Fetched(tmp_path, url)
    assert fetched.code == 1
    assert "Connection refused" in fetched.err
    assert "Traceback" not in fetched.err


def test_worker_token_is_used_after_join(tmp_path: Path, control_plane: WheelServer) -> None:
    (tmp_path / "join.json").write_text(json.dumps({"worker_id": "w", "url": control_plane.url}))
    (tmp_path / "join.json.token").write_text(f"{TOKEN}\n")
    assert fetch_wheel.fetch(fetch_wheel.control_plane_of(tmp_path / "join.json"), tmp_path) == tmp_path / WHEEL


def test_certificate_is_verified_with_given_ca(tmp_path: Path, control_plane: WheelServer) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    making = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    files = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "ca.pem"]
    subprocess.run([*making.split(), *files], capture_output=True, timeout=TIMEOUT_S, check=True)
    with serving(control_plane.wheel, certificate=(tmp_path / "ca.pem", tmp_path / "key.pem")) as secured:
        url = secured.url.replace("127.0.0.1", "localhost")
        stranger = Fetched(tmp_path, url)
        friend = Fetched(tmp_path, url, ca_file="ca.pem")
    assert stranger.code == 1
    assert "certificate" in stranger.err
    assert (friend.code, friend.err) == (0, "")


def test_refused_token_is_not_retried(tmp_path: Path, control_plane: WheelServer) -> None:
    fetched = Fetched(tmp_path, control_plane.url, token="wjt_spent")
    assert fetched.code == 1
    assert "answered 401: the join token is invalid or expired" in fetched.err
    assert len(control_plane.requests) == 1


def test_token_does_not_follow_redirect(tmp_path: Path, control_plane: WheelServer) -> None:
    with serving(b"") as stranger:
        control_plane.redirect_to = stranger.url
        assert Fetched(tmp_path, control_plane.url).code == 1
        assert stranger.requests == []


@pytest.mark.parametrize(
    "announcement",
    [
        pytest.param({"filename": "../../etc/cron.d/x.whl", "sha256": "0" * 64}, id="path"),
        pytest.param({"filename": "windlass.tar.gz", "sha256": "0" * 64}, id="not a wheel"),
        pytest.param({"filename": WHEEL, "sha256": "abc"}, id="invalid hash"),
        pytest.param({"filename": WHEEL}, id="hash missing"),
        pytest.param({"filename": 7, "sha256": None}, id="not text"),
        pytest.param(["windlass"], id="list"),
    ],
)
def test_invalid_announcement_is_refused(tmp_path: Path, control_plane: WheelServer, announcement: object) -> None:
    control_plane.announcement = announcement
    fetched = Fetched(tmp_path, control_plane.url)
    assert (fetched.code, fetched.files) == (1, [])
    assert "did not return a wheel" in fetched.err


def test_oversized_wheel_is_refused(
    control_plane: WheelServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fetch_wheel, "MAX_WHEEL_BYTES", 100)
    with pytest.raises(fetch_wheel.DownloadRefused, match="more than 100 bytes"):
        fetch_wheel.fetch(fetch_wheel.WheelSource(control_plane.url, TOKEN), tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"url": 7, "join_token": "wjt_3f1c9a"}', "\xff"])
def test_invalid_join_file_gives_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "join.json").write_text(content, encoding="latin-1")
    done = subprocess.run(
        [sys.executable, "-I", fetch_wheel.__file__, tmp_path / "join.json", tmp_path],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == f"windlass: cannot use {tmp_path}/join.json: {done.stderr.split(': ')[-1]}"


# ---------------------------------------------------------------------------------------------------------- the boot


class Root:
    """A folder as the machine's root, with the files that cloud-init writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        programs = folder / "stubs"
        programs.mkdir(parents=True)
        record = f'echo "$(basename "$0") $*" >>"{self.calls}"\n'
        stubs = {
            "systemctl": record,
            "useradd": record,
            "passwd": record,
            "apt-get": record,
            "docker": record + 'case "$*" in *bad*) exit 1 ;; esac\n',
            "sleep": "",
            "python3": f'exec "{sys.executable}" "$@"\n',
        }
        for name, text in stubs.items():
            (programs / name).write_text(f"#!/bin/sh\n{text}")
            (programs / name).chmod(0o755)

    def write(self, document: str) -> list[str]:
        """Write the files like cloud-init and return the commands it would run."""
        content = yaml.safe_load(document)
        for file in content["write_files"]:
            path = self.path(file["path"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file["content"])
            path.chmod(int(file["permissions"], 8))
        (command,) = content["runcmd"]
        return [str(self.path(part)) if part.startswith("/") else part for part in command]

    def path(self, path: str) -> Path:
        return self.folder / path.lstrip("/")

    def boot(self, settings: BootstrapSettings, url: str) -> "subprocess.CompletedProcess[str]":
        # Our own user, which exists and may own the files.
        settings = settings.model_copy(update={"user": getpass.getuser()})
        command = self.write(render_user_data(settings, MachineRequest("f-0-00", "f", 0, TOKEN), url))
        self.calls.unlink(missing_ok=True)
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={
                "PATH": f"{self.folder}/stubs:{os.environ['PATH']}",
                "HOME": str(self.folder),
                "WINDLASS_ROOT": str(self.folder),
                "PIP_NO_INDEX": "1",
            },
            timeout=TIMEOUT_S,
            check=False,
        )

    def called(self, program: str) -> list[str]:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(f"{program} ")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    if importlib.util.find_spec("ensurepip") is None:
        pytest.skip("this Python has no ensurepip: install the package python3-venv")
    return Root(tmp_path_factory.mktemp("machine"))


ENABLE_WORKER = "enable --now windlass-worker.service"


def test_boot_installs_windlass_and_starts_worker(root: Root, control_plane: WheelServer, tmp_path: Path) -> None:
    (tmp_path / "app-1.2-py3-none-any.whl").write_bytes(tiny_wheel("app", "1.2"))
    settings = BootstrapSettings(
        has_docker=True,
        images=("python:3.11-slim", "example.org/bad:1", "rgrid/ffmpeg:latest"),
        requirements=(f"--find-links {tmp_path}", "app==1.2"),
        setup=("app > first", "test -s first\npwd > second"),
    )
    booted = root.boot(settings, control_plane.url)
    assert booted.returncode == 0, booted.stdout + booted.stderr
    for program, version in (("windlass", "9.9.9"), ("app", "1.2")):
        path = root.path(f"/opt/windlass/bin/{program}")
        ran = subprocess.run([path], capture_output=True, text=True, env={}, timeout=TIMEOUT_S, check=True)
        assert ran.stdout == f"{program} {version}\n"
    # Setup commands run in order, in the worker's folder, and see the installed packages.
    assert root.path("/var/lib/windlass/first").read_text() == "app 1.2\n"
    assert root.path("/var/lib/windlass/second").read_text() == f"{root.path('/var/lib/windlass')}\n"
    # A failed pull is retried and does not stop the boot.
    pulls = root.called("docker")
    assert [pulls.count(f"pull --quiet {image}") for image in settings.images] == [1, 4, 1]
    assert "could not pull example.org/bad:1, continuing without it" in booted.stdout
    assert root.called("systemctl") == ["daemon-reload", ENABLE_WORKER]
    assert root.called("apt-get") == []
    # The first step locks the root password that a provider generates.
    assert root.calls.read_text().splitlines()[0] == "passwd -l root"
    # Only the worker's user may read the token, and the boot does not print it.
    assert root.path("/etc/windlass").stat().st_mode & 0o777 == 0o700
    assert root.path("/etc/windlass/join.json").stat().st_mode & 0o777 == 0o600
    assert TOKEN not in booted.stdout + booted.stderr


def test_repeated_boot_is_harmless_and_starts_ray_first(root: Root, control_plane: WheelServer, tmp_path: Path) -> None:
    (tmp_path / "ray-2.49.0-py3-none-any.whl").write_bytes(tiny_wheel("ray", "2.49.0"))
    settings = BootstrapSettings(ray_address="10.0.0.2:6379", requirements=(f"--find-links {tmp_path}", "ray==2.49.0"))
    for _ in range(2):
        booted = root.boot(settings, control_plane.url)
        assert booted.returncode == 0, booted.stdout + booted.stderr
        assert root.called("systemctl") == ["daemon-reload", "enable --now windlass-ray.service", ENABLE_WORKER]
    root.path("/etc/systemd/system/windlass-ray.service").unlink()


@pytest.mark.parametrize(
    ("setup", "fault", "sentence"),
    [
        pytest.param(("true", "exit 7"), None, "FAILED while running the setup command 002 (exit code 7)", id="setup"),
        pytest.param(("false\ntrue",), None, "FAILED while running the setup command 001", id="line in the middle"),
        pytest.param((), "none", "FAILED while fetching windlass from the control plane", id="wheel unavailable"),
        pytest.param((), "wheel", "FAILED while installing windlass-9.9.9-py3-none-any.whl", id="broken wheel"),
    ],
)
def test_failed_boot_names_step_and_starts_no_worker(
    root: Root, control_plane: WheelServer, setup: tuple[str, ...], fault: str | None, sentence: str
) -> None:
    for old in root.path("/usr/local/lib/windlass/setup").glob("*.sh"):
        old.unlink()
    if fault == "none":
        control_plane.failures = [404]
    if fault == "wheel":
        control_plane.wheel = b"no wheel"
        control_plane.announcement["sha256"] = hashlib.sha256(b"no wheel").hexdigest()
    booted = root.boot(BootstrapSettings(setup=setup), control_plane.url)
    assert booted.returncode != 0
    assert sentence in booted.stdout
    assert ENABLE_WORKER not in root.called("systemctl")
    assert TOKEN not in booted.stdout + booted.stderr


def test_failed_boot_posts_its_last_lines_with_the_join_token(root: Root, control_plane: WheelServer) -> None:
    log = root.path("/var/log/cloud-init-output.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(f"line {number}: ü\n" for number in range(5_000)))
    booted = root.boot(BootstrapSettings(setup=("exit 3",)), control_plane.url)
    assert booted.returncode != 0
    assert control_plane.steps
    for path, authorization, body in control_plane.steps:
        assert (path, authorization) == ("/internal/workers/f-0-00/boot-step", f"Bearer {TOKEN}")
        assert body["output"].endswith("line 4999: ü\n")
        assert len(body["output"].encode()) <= 12_288 + 10
    # Steps before it are posted in the background, and may arrive later.
    failures = {body["step"] for _, _, body in control_plane.steps if body["has_failed"]}
    assert failures == {"failed while running the setup command 001"}
