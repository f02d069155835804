"""Servers as local processes: the program from user_data, restarts, and complete clean-up."""

import base64
import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from support.postgres_servers import wait_until
from windlass_emulators.cloud_init import UnusableUserData, read_unit, read_user_data
from windlass_emulators.process_host import MAX_STARTS, ProcessHost, mapped_command

TIMEOUT_S = 20.0
UNIT_PATH = "/etc/systemd/system/windlass-worker.service"

# A stand-in for a worker: records its arguments and environment, starts a child, and waits.
PROGRAM = textwrap.dedent(
    """\
    #!/bin/sh
    printf '%s\\n' "$PWD" "$1" "$COLOUR" "${DATABASE_URL-unset}" > "$HOME/../said.part"
    mv "$HOME/../said.part" "$HOME/../said"
    trap 'echo asked >> "$HOME/../said"; exit 0' TERM
    sleep 600 & echo $! > "$HOME/../child"
    wait
    """
)


def user_data(program: str = PROGRAM, unit: str = "", command: str = "/opt/app/run.sh /etc/windlass/join.json") -> str:
    service = f"[Unit]\nAfter=network.target\n[Service]\nExecStart={command}\nWorkingDirectory=/opt/app\n{unit}"
    document = {
        "packages": ["docker.io"],
        "write_files": [
            {"path": "/opt/app/run.sh", "permissions": "0755", "content": program},
            {"path": "/etc/windlass/join.json", "permissions": "0600", "content": '{"token": "t"}'},
            {"path": "/root/.keep", "content": ""},
            {"path": UNIT_PATH, "content": service},
        ],
        "runcmd": [["systemctl", "enable", "--now", "windlass-worker.service"]],
    }
    return "#cloud-config\n" + json.dumps(document)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessHost]:
    monkeypatch.setenv("DATABASE_URL", "postgresql://control-plane-only")
    with ProcessHost(tmp_path / "machines", stop_grace_s=1.0) as host:
        yield host


def said(host: ProcessHost, server_id: int) -> list[str]:
    path = host.folder / str(server_id) / "root" / "said"
    wait_until(path.exists, TIMEOUT_S, "starting")
    return path.read_text().splitlines()


def log_of(host: ProcessHost, server_id: int) -> str:
    path = host.folder / str(server_id) / "machine.log"
    return path.read_text() if path.exists() else ""


# ----------------------------------------------------------------------------------------------------- user_data


def test_user_data_yields_files_and_one_unit() -> None:
    disk = read_user_data(user_data(unit="Restart=on-failure\nRestartSec=250ms\nEnvironment=A=1 'B=x y'\n"))
    assert [(file.path, oct(file.mode)) for file in disk.files][:2] == [
        ("/opt/app/run.sh", "0o755"),
        ("/etc/windlass/join.json", "0o600"),
    ]
    assert disk.unit is not None
    assert disk.unit.command == ("/opt/app/run.sh", "/etc/windlass/join.json")
    assert disk.unit.environment == {"A": "1", "B": "x y"}
    assert (disk.unit.restarts_on_failure, disk.unit.restarts_on_success, disk.unit.restart_s) == (True, False, 0.25)


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("b64", base64.b64encode(b"hello").decode()),
        ("base64", base64.b64encode(b"hello").decode()),
        ("gz+b64", base64.b64encode(gzip.compress(b"hello", mtime=0)).decode()),
        ("gzip+base64", base64.b64encode(gzip.compress(b"hello", mtime=0)).decode()),
        ("text/plain", "hello"),
    ],
)
def test_encoded_files_are_decoded(encoding: str, content: str) -> None:
    entry = {"path": "/a", "encoding": encoding, "content": content}
    assert read_user_data("#cloud-config\n" + json.dumps({"write_files": [entry]})).files[0].content == b"hello"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("#!/bin/sh\necho hi\n", "does not start with #cloud-config"),
        ("#cloud-config\n: [", "not YAML"),
        ("#cloud-config\nwrite_files: 3\n", "not a list"),
        ("#cloud-config\nwrite_files: [{content: a}]\n", "no path"),
        ("#cloud-config\nwrite_files: [{path: /a, encoding: b64, content: '%%%'}]\n", "/a cannot be written"),
        (f"#cloud-config\nwrite_files: [{{path: {UNIT_PATH}, content: '[Service]'}}]\n", "no ExecStart"),
    ],
)
def test_unusable_user_data_reports_the_reason(text: str, problem: str) -> None:
    with pytest.raises(UnusableUserData, match=problem):
        read_user_data(text)


def test_unit_supports_continuations_and_cleared_values() -> None:
    unit = read_unit(
        "[Service]\nExecStart=/bin/false\nExecStart=\nExecStart=-/bin/echo \\\n  a\nRestart=always\n"
        "[Install]\nExecStart=x\n"
    )
    assert unit.command == ("/bin/echo", "a")
    assert unit.restarts_on_success and unit.restarts_on_failure
    assert unit.working_directory == "/"


def test_bootstrap_worker_runs_this_program_with_mapped_paths(tmp_path: Path) -> None:
    join = tmp_path / "etc" / "windlass" / "join.json"
    join.parent.mkdir(parents=True)
    join.write_text("{}")
    command = ("/opt/windlass/bin/windlass", "worker", "--join", "/etc/windlass/join.json", "/nowhere")
    assert mapped_command(tmp_path, command) == [
        sys.executable, "-m", "windlass", "worker", "--join", str(join), "/nowhere",
    ]  # fmt: skip
    assert mapped_command(tmp_path, ("/bin/sh", "--file=/etc/windlass/join.json"))[1] == f"--file={join}"


# ---------------------------------------------------------------------------------------------------- real machines


def test_machine_starts_its_unit_in_its_own_folder(host: ProcessHost) -> None:
    host.start(7, "worker-7", user_data(unit="Environment=COLOUR=red\n"))
    root = host.folder / "7" / "root"
    assert said(host, 7) == [str(root / "opt/app"), str(root / "etc/windlass/join.json"), "red", "unset"]
    assert host.is_running(7)
    assert (root / "etc/windlass/join.json").stat().st_mode & 0o777 == 0o600
    assert host.folder.stat().st_mode & 0o077 == 0


def test_stopping_machine_ends_all_its_processes(host: ProcessHost) -> None:
    host.start(7, "worker-7", user_data())
    said(host, 7)
    child = host.folder / "7" / "root" / "child"
    wait_until(lambda: child.exists() and child.read_text().endswith("\n"), TIMEOUT_S, "starting its child")
    host.stop(7)
    wait_until(lambda: not host.is_running(7), TIMEOUT_S, "stopping")
    assert said(host, 7)[-1] == "asked"
    wait_until(lambda: not _is_alive(int(child.read_text())), TIMEOUT_S, "ending its child")


def test_machine_that_ignores_sigterm_is_killed(host: ProcessHost) -> None:
    deaf = "#!/bin/sh\ntrap '' TERM\necho up > $HOME/../said\nwhile :; do sleep 600; done\n"
    host.start(7, "worker-7", user_data(deaf))
    said(host, 7)
    began = time.monotonic()
    host.stop(7)
    wait_until(lambda: not host.is_running(7), TIMEOUT_S, "stopping")
    assert time.monotonic() - began >= 1.0


def test_crashing_machine_gets_no_sigterm(host: ProcessHost) -> None:
    host.start(7, "worker-7", user_data())
    said(host, 7)
    host.stop(7, is_sudden=True)
    wait_until(lambda: not host.is_running(7), TIMEOUT_S, "stopping")
    assert "asked" not in said(host, 7)


def test_processes_of_a_crashing_machine_end_together(host: ProcessHost) -> None:
    """Otherwise a worker could report that its handler ended, which no worker on a dead machine can."""
    program = PROGRAM.replace("wait\n", "wait $!\necho bereaved >> $HOME/../said\n")
    for server_id in range(1, 6):
        host.start(server_id, "worker-1", user_data(program))
    children = [host.folder / str(server_id) / "root" / "child" for server_id in range(1, 6)]
    wait_until(lambda: all(child.exists() for child in children), TIMEOUT_S, "starting")
    for server_id in range(1, 6):
        host.stop(server_id, is_sudden=True)
    wait_until(lambda: not any(map(host.is_running, range(1, 6))), TIMEOUT_S, "stopping")
    assert all("bereaved" not in said(host, server_id) for server_id in range(1, 6))


def test_machine_keeps_its_disk_until_it_is_erased(host: ProcessHost) -> None:
    host.start(7, "worker-7", user_data())
    said(host, 7)
    own = host.folder / "7" / "root" / "own"
    own.write_text("kept")
    host.stop(7)
    host.start(7, "worker-7", user_data())
    assert host.is_running(7) and own.exists()
    host.erase(7)
    host.start(7, "worker-7", user_data())
    assert host.is_running(7) and not own.exists()
    assert said(host, 7)
    host.erase(7)
    wait_until(lambda: not (host.folder / "7" / "root").exists(), TIMEOUT_S, "erasing")
    assert not host.is_running(7)


def test_failing_program_is_restarted_up_to_the_limit(host: ProcessHost) -> None:
    count = "#!/bin/sh\necho x >> $HOME/../said\nexit 1\n"
    host.start(7, "worker-7", user_data(count, unit="Restart=always\nRestartSec=10ms\n"))
    wait_until(lambda: "start limit reached" in log_of(host, 7), TIMEOUT_S, "reaching the start limit")
    assert said(host, 7) == ["x"] * MAX_STARTS
    assert not host.is_running(7)


def test_successful_program_restarts_only_with_restart_always(host: ProcessHost) -> None:
    once = "#!/bin/sh\necho x >> $HOME/../said\n"
    host.start(7, "worker-7", user_data(once, unit="Restart=on-failure\nRestartSec=10ms\n"))
    wait_until(lambda: "ended with 0" in log_of(host, 7), TIMEOUT_S, "ending")
    assert said(host, 7) == ["x"]


def test_files_stay_within_the_machine(host: ProcessHost) -> None:
    document = {
        "write_files": [{"path": "../../../../escaped", "content": "x"}, {"path": "/a/../../b", "content": "y"}]
    }
    host.start(7, "worker-7", "#cloud-config\n" + json.dumps(document))
    root = host.folder / "7" / "root"
    assert (root / "escaped").read_text() == "x"
    assert (root / "b").read_text() == "y"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no systemd unit"),
        ("#!/bin/sh\n", "does not start with #cloud-config"),
        (user_data(command="/opt/missing"), "cannot start /opt/missing"),
    ],
)
def test_machine_without_a_program_logs_the_reason(host: ProcessHost, text: str, reason: str) -> None:
    host.start(7, "worker-7", text)
    assert reason in log_of(host, 7)
    assert not host.is_running(7)


def test_closing_host_leaves_no_processes() -> None:
    # Shared servers of other tests may run at the same time.
    others = {process.pid for process in psutil.Process().children()}
    with ProcessHost(stop_grace_s=0.2) as host:
        for server_id in (1, 2, 3):
            host.start(server_id, f"worker-{server_id}", user_data())
        for server_id in (1, 2, 3):
            said(host, server_id)
        folder = host.folder
        mine = [process for process in psutil.Process().children() if process.pid not in others]
        pids = {process.pid for parent in mine for process in (parent, *parent.children(recursive=True))}
        assert pids
    wait_until(lambda: not any(_is_alive(pid) for pid in pids), TIMEOUT_S, "ending")
    assert not folder.exists()


# ------------------------------------------------------------------------------------------------- windlass emulate


class Command:
    """`windlass emulate hetzner`, as a process."""

    def __init__(self, folder: Path) -> None:
        words = ["emulate", "hetzner", "--port", "0", "--boot-s", "0.1", "--dir", str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "windlass", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()
        self.address = self.first_line.split()[3].removesuffix("/v1")

    def create(self, text: str) -> int:
        order = {"name": "worker-1", "server_type": "cx23", "image": "debian-12", "user_data": text}
        return int(self._ask("POST", "/v1/servers", order)["server"]["id"])

    def machines(self) -> list[dict[str, Any]]:
        machines: list[dict[str, Any]] = self._ask("GET", "/_emulator/machines")["machines"]
        return machines

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": "Bearer any"}
        answered = requests.request(method, self.address + path, json=body, headers=headers, timeout=TIMEOUT_S)
        answered.raise_for_status()
        return answered.json()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path / "machines")
    try:
        yield command
    finally:
        command.process.kill()
        command.process.communicate(timeout=TIMEOUT_S)


def _boot(command: Command, tmp_path: Path) -> list[int]:
    """The processes of a running machine."""
    server_id = command.create(user_data())
    wait_until(lambda: command.machines()[0]["is_running"], TIMEOUT_S, "booting")
    child = tmp_path / "machines" / str(server_id) / "root" / "child"
    wait_until(child.exists, TIMEOUT_S, "starting its child")
    return [process.pid for process in psutil.Process(command.process.pid).children(recursive=True)]


def test_booted_server_starts_its_worker(command: Command, tmp_path: Path) -> None:
    assert command.first_line.startswith("emulated Hetzner Cloud: http://127.0.0.1:")
    assert len(_boot(command, tmp_path)) >= 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_machines_end_with_the_emulator(command: Command, tmp_path: Path, number: int) -> None:
    pids = _boot(command, tmp_path)
    os.kill(command.process.pid, number)
    wait_until(lambda: not any(_is_alive(pid) for pid in pids), TIMEOUT_S, "ending")
    _, errors = command.process.communicate(timeout=TIMEOUT_S)
    assert errors == ""
    assert (
        command.process.returncode
        == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[signal.Signals(number)]
    )


def test_taken_port_is_reported(command: Command) -> None:
    port = command.address.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "windlass", "emulate", "hetzner", "--port", port],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    reason = f"cannot listen on port {port}: Address already in use. Choose another port with --port."
    assert done.stderr == f"windlass: {reason}\n"


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
