"""Parts of the Runpod provider without an API: error kinds, stock, tags, pod checks and the launch script."""

import asyncio
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.postgres_servers import wait_until
from windlass.model.errors import NotPrepared
from windlass.model.redaction import Mask, mask_of
from windlass.model.runpod import RunpodSettings
from windlass.providers.runpod import naming, provisioning
from windlass.providers.runpod.catalog import read_offers, read_price
from windlass.providers.runpod.errors import response_error, transport_error
from windlass.providers.runpod.installation import INSTALL_FOLDER, INSTALL_SCRIPT, PodInstallation, failure_of
from windlass.providers.runpod.provisioning import (
    CHECK_JOIN_FILE,
    WRITE_JOIN_FILE,
    Preparer,
    dependency_checks,
    last_lines,
    launch_script,
    machine_checks,
    missing_disk,
    missing_gpus,
)
from windlass.providers.runpod.ssh import CommandResult, Endpoint, Unreachable
from windlass.providers.vendor_error import MAX_MESSAGE, ErrorKind
from windlass_emulators.runpod.images import (
    BARE_IMAGE,
    OLD_RUNPOD_IMAGE,
    WINDLASS_IMAGE,
    ImageContents,
    environment_file,
)

TIMEOUT_S = 20.0
NO_CAPACITY = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)


def response(status: int, detail: object = "detail", **headers: str) -> httpx.Response:
    body = json.dumps({"title": "T", "status": status, "detail": detail})
    return httpx.Response(status, headers=headers, content=body)


@pytest.mark.parametrize(
    ("status", "detail", "kind"),
    [
        (400, NO_CAPACITY, ErrorKind.NO_CAPACITY),
        (400, "No machines with enough GPUs are available right now", ErrorKind.NO_CAPACITY),
        (400, "This GPU type is currently unavailable", ErrorKind.NO_CAPACITY),
        (400, "Insufficient GPU capacity", ErrorKind.NO_CAPACITY),
        (400, "There are no available GPUs", ErrorKind.NO_CAPACITY),
        (400, "NVIDIA L40S is unavailable in EU-RO-1", ErrorKind.NO_CAPACITY),
        (409, "pod is locked: unlock it first", ErrorKind.PROTECTED),
        (409, "another action is in progress", ErrorKind.BUSY),
        (
            400,
            "This machine does not have the resources to deploy your pod. Please try another.",
            ErrorKind.NO_CAPACITY,
        ),
        (400, "gpu.count must be at most 8", ErrorKind.REFUSED),
        (400, "Your account balance is too low to deploy a pod", ErrorKind.LIMIT),
        (400, "Insufficient funds: add funds to your account", ErrorKind.LIMIT),
        (400, "You have reached your spending limit of $80 per hour", ErrorKind.LIMIT),
        (400, "the pod is locked: unlock it first", ErrorKind.PROTECTED),
        (400, "network volume 'x' not found", ErrorKind.REFUSED),
        (400, "data center 'EU-XX-1' not found", ErrorKind.REFUSED),
        (401, "no", ErrorKind.DENIED),
        (402, "no", ErrorKind.LIMIT),
        (403, "no", ErrorKind.FORBIDDEN),
        (404, "no", ErrorKind.NOT_FOUND),
        (409, "no", ErrorKind.BUSY),
        (413, "no", ErrorKind.INVALID),
        (422, "no", ErrorKind.INVALID),
        (429, "no", ErrorKind.THROTTLED),
        (408, "no", ErrorKind.LOST),
        (418, "no", ErrorKind.LOST),
        (302, "no", ErrorKind.LOST),
        # Prose about capacity counts only for the documented status.
        (500, NO_CAPACITY, ErrorKind.LOST),
        (503, NO_CAPACITY, ErrorKind.LOST),
    ],
)
def test_each_response_maps_to_one_error_kind(status: int, detail: str, kind: ErrorKind) -> None:
    error = response_error(response(status, detail))
    assert (error.kind, str(error)) == (kind, f"{detail} ({status})")


def test_response_of_a_proxy_is_classified_by_status() -> None:
    assert str(response_error(httpx.Response(502, content=b"<html>"))) == "Bad Gateway (502)"
    assert response_error(httpx.Response(403, content=b"[1]")).kind is ErrorKind.FORBIDDEN
    upgrade = response(400, "unlock this GPU type by a first payment")
    assert response_error(upgrade, is_creation=True).kind is ErrorKind.REFUSED
    assert len(str(response_error(response(400, "x" * 5000)))) < MAX_MESSAGE + 10


def test_retry_after_is_read_if_it_is_a_number() -> None:
    assert response_error(httpx.Response(429, headers={"Retry-After": "12"})).retry_after_s == 12
    assert response_error(httpx.Response(429, headers={"Retry-After": "soon"})).retry_after_s is None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx.ReadTimeout(""), "request timed out"),
        (TimeoutError(), "request timed out"),
        (httpx.WriteTimeout(""), "request timed out"),
        (httpx.ReadError(""), "API unreachable (ReadError)"),
        (httpx.WriteError("Broken pipe"), "API unreachable (Broken pipe)"),
        (httpx.RemoteProtocolError("Server disconnected"), "API unreachable (Server disconnected)"),
        (ValueError("no JSON"), "unreadable response (ValueError: no JSON)"),
    ],
)
def test_missing_response_is_lost(error: Exception, words: str) -> None:
    assert (transport_error(error).kind, str(transport_error(error))) == (ErrorKind.LOST, words)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx.ConnectError("Connection refused"), "API unreachable (Connection refused)"),
        (httpx.ConnectTimeout(""), "API unreachable (ConnectTimeout)"),
        (httpx.PoolTimeout(""), "API unreachable (PoolTimeout)"),
    ],
)
def test_request_without_a_connection_was_not_sent(error: Exception, words: str) -> None:
    assert (transport_error(error).kind, str(transport_error(error))) == (ErrorKind.UNSENT, words)


@pytest.mark.parametrize(
    ("dollars", "micros"),
    [(0.69, 690_000), (0.1234565, 123_457), (0, None), (0.0, None), (None, None), ("1.5", 1_500_000)],
)
def test_price_is_integer_micros_and_zero_is_unknown(dollars: object, micros: int | None) -> None:
    assert read_price(dollars) == micros


def test_stock_is_read_per_data_center() -> None:
    gpu = {
        "id": "X", "secure": True, "community": False, "price": {"secure": 0.5, "community": 0},
        "maxCount": {"secure": 8, "community": 0},
        "dataCenters": [{"id": "A", "availability": "LOW"}, {"id": "B", "availability": "NONE"}],
    }  # fmt: skip
    offer = read_offers({"gpus": [gpu]}, "SECURE")["X"]
    assert (offer.micros_per_hour, offer.max_count) == (500_000, 8)
    assert [offer.is_in_stock(places) for places in ((), ("A",), ("B",), ("B", "A"), ("C",))] == [
        True, True, False, True, False,
    ]  # fmt: skip
    assert read_offers({"gpus": [{**gpu, "dataCenters": []}]}, "COMMUNITY")["X"].micros_per_hour is None


@pytest.mark.parametrize(
    ("pod", "is_ours"),
    [
        ({"name": "w", "env": {"WINDLASS_POD": "T/red/w"}}, True),
        ({"name": "other", "env": {"WINDLASS_POD": "T/red/w"}}, False),
        ({"name": "w", "env": {"WINDLASS_POD": "T/redder/w"}}, False),
        ({"name": "w", "env": {}}, False),
        ({"name": "w", "env": None}, False),
        ({"name": "w"}, False),
    ],
)
def test_pod_belongs_to_fleet_by_tag_and_name(pod: dict[str, object], is_ours: bool) -> None:
    assert naming.is_of_fleet(pod, "T/red/") is is_ours


# ---------------------------------------------------------------------------------------------------------- inventory


@pytest.mark.parametrize(
    ("said", "wanted", "problem"),
    [
        ("NVIDIA L40S, 46068\n", 1, None),
        ("NVIDIA L40S, 46068\nNVIDIA L40S, 46068\n", 2, None),
        ("NVIDIA L40S, 46068\nNVIDIA L40S, 0\n", 2, "1 of 2 GPUs have memory"),
        ("NVIDIA L40S, [N/A]\n", 1, "0 of 1 GPUs have memory"),
        ("", 1, "0 of 1 GPUs have memory"),
    ],
)
def test_gpu_without_memory_does_not_count(said: str, wanted: int, problem: str | None) -> None:
    assert missing_gpus(said, wanted) == problem


@pytest.mark.parametrize(
    ("free_kb", "problem"),
    [("4000000", None), ("1000000", "only 1.0 GB"), ("-", "unreadable output of df")],
)
def test_free_disk_is_read_from_df(free_kb: str, problem: str | None) -> None:
    said = f"Filesystem 1024-blocks Used Available Capacity Mounted on\noverlay 9 9 {free_kb} 9% /\n"
    assert missing_disk(said, 2.0) == problem


def test_only_configured_checks_run() -> None:
    plain = RunpodSettings(ssh={"min_free_disk_gb": 0})  # type: ignore[arg-type]
    assert [check.code for check in machine_checks(plain)] == [
        "GPU_NOT_DETECTED", "JOIN_DATA_MISSING", "JOIN_DATA_INVALID",
    ]  # fmt: skip
    assert list(dependency_checks(plain)) == []
    whole = RunpodSettings(network_volume_id="v", ssh={"checks": ("true", "false")})  # type: ignore[arg-type]
    assert [check.code for check in machine_checks(whole)] == [
        "STORAGE_NOT_MOUNTED", "GPU_NOT_DETECTED", "DISK_FULL", "JOIN_DATA_MISSING", "JOIN_DATA_INVALID",
    ]  # fmt: skip
    assert [check.code for check in dependency_checks(whole)] == ["DEPENDENCY_MISSING", "DEPENDENCY_MISSING"]


@pytest.mark.parametrize(
    ("last_line", "failure"),
    [
        ("PYTHON_MISSING: the image has no Python", ("PYTHON_MISSING", "the image has no Python")),
        ("REQUIREMENTS_FAILED: ERROR: no torch: x", ("REQUIREMENTS_FAILED", "ERROR: no torch: x")),
        ("MADE_UP: anything", ("INSTALL_FAILED", "MADE_UP: anything")),
        ("Killed", ("INSTALL_FAILED", "Killed")),
    ],
)
def test_only_known_codes_are_taken_from_an_installation(last_line: str, failure: tuple[str, str]) -> None:
    assert failure_of(last_line) == failure


def test_index_options_also_apply_to_what_windlass_needs() -> None:
    lines = ("--index-url https://pypi.example.org", "-i x", "-f=/w", "app==1.4", "-e .", "--require-hashes")
    command = PodInstallation("1", {}, lines).command("/join", 60)
    (written,) = [line for line in command.split(" || exit 1\n") if line.endswith("mv index.txt.$$ index.txt")]
    assert written == (
        "printf %s '--index-url https://pypi.example.org\n-i x\n-f=/w\n' > index.txt.$$ && mv index.txt.$$ index.txt"
    )


def test_output_is_shortened_to_its_last_lines() -> None:
    assert last_lines("".join(f"line {n}\n\n" for n in range(99)), Mask()).splitlines()[0] == "line 79"
    assert len(last_lines("x" * 10_000, Mask())) == 2000


OUTPUT = (
    f"join with wlj_{'a' * 64} or a part of it: wlw_{'0' * 20}\n+ export RUNPOD_API_KEY=rpa_ABC\n"
    "cannot reach postgresql://app:pa55word@db.internal/app with hf-secret-4"
)
MASKED_LINES = [
    "join with wlj_******** or a part of it: wlw_********",
    "+ export RUNPOD_API_KEY=********",
    "cannot reach postgresql://app:********@db.internal/app with ********",
]


async def failed_preparation(output: str, failing: str = "", **options: Any) -> NotPrepared:
    """`failing`: a part of the commands that fail with this output."""

    class Pod:
        host_key = "ssh-ed25519 AAAA"

        async def run(self, command: str, timeout_s: float) -> CommandResult:
            return CommandResult(1, output) if failing in command else CommandResult(0, "GPU, 81920")

    @asynccontextmanager
    async def open_shell(_endpoint: Endpoint, _host_key: str | None) -> AsyncIterator[Pod]:
        yield Pod()

    async def find_endpoint() -> Endpoint:
        return Endpoint("10.0.0.1", 22, "root")

    async def on_host_key(_host_key: str) -> None:
        return

    settings = RunpodSettings(ssh={"min_free_disk_gb": 0})  # type: ignore[arg-type]
    with pytest.raises(NotPrepared) as failed:
        await Preparer(settings, open_shell, **options).prepare("pod p", find_endpoint, None, on_host_key)
    return failed.value


async def test_pod_output_is_reported_without_secrets() -> None:
    failed = await failed_preparation(OUTPUT, mask=mask_of(["hf-secret-4"]))
    assert failed.output.splitlines() == MASKED_LINES
    assert str(failed).endswith(MASKED_LINES[-1])


async def test_reason_of_an_unreachable_pod_is_its_last_failed_log_in() -> None:
    """The time runs out while the second connection is opened."""
    attempts = 0

    @asynccontextmanager
    async def open_shell(_endpoint: Endpoint, _host_key: str | None) -> AsyncIterator[Any]:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise Unreachable("Permission denied")
        await asyncio.Event().wait()
        yield

    async def find_endpoint() -> Endpoint:
        return Endpoint("10.0.0.1", 22, "root")

    async def on_host_key(_host_key: str) -> None:
        return

    settings = RunpodSettings(ssh={"timeout_s": 1})  # type: ignore[arg-type]
    with pytest.raises(NotPrepared, match=r"not done within 1 s \(Permission denied\)"):
        await Preparer(settings, open_shell, retry_s=0.01).prepare("pod p", find_endpoint, None, on_host_key)
    assert attempts == 2


INDEXES = ("--extra-index-url https://ci:pass%2Bword@pypi.example.org/simple", "--index-url=https://tokentoken@x.org/s")


async def test_credentials_of_package_indexes_are_not_reported() -> None:
    """Secrets are hidden outside of an address, too."""
    output = "GET https://ci:pass%2Bword@pypi.example.org/\nREQUIREMENTS_FAILED: 401 for pass+word, tokentoken"
    installation = PodInstallation("1", {}, (*INDEXES, "app @ git+https://x.org/app@v1"))
    failed = await failed_preparation(output, "requirements.txt", installation=installation)
    assert failed.code == "REQUIREMENTS_FAILED"
    assert str(failed).endswith("401 for ********, ********")
    assert failed.output.splitlines()[0] == "GET https://ci:********@pypi.example.org/"
    assert installation.secrets == ("pass%2Bword", "pass+word", "tokentoken")


def test_other_users_of_a_pod_cannot_read_the_requirements(tmp_path: Path) -> None:
    folder = tmp_path / "windlass"
    command = PodInstallation("1", {INSTALL_SCRIPT: "umask; : > made"}, INDEXES).command("/join", 60)
    done = subprocess.run(
        ["sh", "-c", command.replace(INSTALL_FOLDER, str(folder))],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    modes = {name: (folder / name).stat().st_mode & 0o777 for name in ("requirements.txt", "index.txt")}
    assert modes == {"requirements.txt": 0o600, "index.txt": 0o600}
    assert "tokentoken" in (folder / "index.txt").read_text()
    assert folder.stat().st_mode & 0o777 == 0o755
    assert int(done.stdout, 8) == 0o022, "other users can run what is installed"


# ----------------------------------------------------------------------------------------------------------- starting


class Disk:
    """A folder as a pod's disk, and a shell on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "etc").mkdir()

    def run(self, command: str, shell: str = "sh") -> subprocess.CompletedProcess[str]:
        text = command.replace("/etc/", f"{self.folder}/etc/").replace("/proc/1/", f"{self.folder}/proc-1-")
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder)}
        return subprocess.run(
            [*shell.split(), "-c", text], env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )

    def path(self, name: str) -> Path:
        return self.folder / "etc" / name


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


JOIN = json.dumps({"worker_id": "w", "url": "http://u", "join_token": "it's secret"})


# Values that a shell would change, or run.
AWKWARD = {
    "QUOTES": """a "b" it's""",
    "DOLLARS": "$HOME $(touch made) `touch made` \\",
    "LINES": " two\n\nlines\n",
    "lower": "x=y=z",
    "COLOUR": "dark red",
}


def with_first_process(disk: Disk, **env: str) -> None:
    text = "".join(f"{name}={value}\0" for name, value in {"PATH": "/usr/bin:/bin", **env}.items())
    (disk.folder / "proc-1-environ").write_text(text)


def with_environment_file(disk: Disk, image: ImageContents, **env: str) -> None:
    disk.path("rp_environment").write_text(environment_file(image, env) or "")


def test_join_file_is_written_from_the_first_process(disk: Disk) -> None:
    with_environment_file(disk, BARE_IMAGE, WINDLASS_JOIN="that of the first process counts")
    with_first_process(disk, A="1", WINDLASS_JOIN=JOIN, B="2")
    assert disk.run(WRITE_JOIN_FILE).returncode == 0
    join = disk.path("windlass/join.json")
    assert join.read_text() == JOIN
    assert join.stat().st_mode & 0o777 == 0o600


def test_two_orchestrators_write_the_join_file_at_once(disk: Disk) -> None:
    with_first_process(disk, WINDLASS_JOIN=JOIN)
    arrived = f"{disk.folder}/arrived"
    until_both = f"&& touch {arrived}.$$ && until [ $(ls {arrived}.* | wc -l) = 2 ]; do sleep 0.01; done && mv "
    command = WRITE_JOIN_FILE.replace("&& mv ", until_both)
    assert command != WRITE_JOIN_FILE
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(disk.run, [command] * 2)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert [path.name for path in disk.path("windlass").iterdir()] == ["join.json"]
    assert disk.path("windlass/join.json").read_text() == JOIN


def test_join_file_is_written_from_the_file_of_runpods_images(disk: Disk) -> None:
    """An SSH user other than root may not read the environment of the first process."""
    with_environment_file(disk, BARE_IMAGE, WINDLASS_JOIN=JOIN)
    assert f'export WINDLASS_JOIN="{JOIN}"' in disk.path("rp_environment").read_text(), "nothing is escaped"
    assert disk.run(WRITE_JOIN_FILE).returncode == 0
    assert disk.path("windlass/join.json").read_text() == JOIN
    assert disk.run(CHECK_JOIN_FILE).returncode == 0


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        (JOIN, True),
        (json.dumps({**json.loads(JOIN), "ca_pem": "-----BEGIN\nx\n"}, indent=2), True),
        ('{"url": "http://u","worker_id":"w"}', True),
        (JOIN.replace('"', ""), False),
        ("", False),
        (JOIN[:-1], False),
        ("[]", False),
    ],
)
def test_join_text_that_is_no_json_is_refused_without_the_token(disk: Disk, text: str, is_valid: bool) -> None:
    disk.path("windlass").mkdir()
    disk.path("windlass/join.json").write_text(text)
    done = disk.run(CHECK_JOIN_FILE)
    assert done.returncode == (0 if is_valid else 1)
    assert "is not JSON" in done.stdout or is_valid
    assert "secret" not in done.stdout + done.stderr


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox sh"])
@pytest.mark.parametrize("image", [WINDLASS_IMAGE, BARE_IMAGE, OLD_RUNPOD_IMAGE])
def test_program_has_the_environment_of_the_container(disk: Disk, image: ImageContents, shell: str) -> None:
    if shutil.which(shell.split(maxsplit=1)[0]) is None:
        pytest.skip(f"no {shell.split(maxsplit=1)[0]} here")
    env = {**AWKWARD, "WINDLASS_JOIN": JOIN, "UID": "7", "not-a-name": "x", "RUNPOD_POD_ID": "p"}
    with_first_process(disk, **env)
    with_environment_file(disk, image, **env)
    program = "import json, os; json.dump(dict(os.environ), open('seen.new', 'w')); os.rename('seen.new', 'seen')"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}"
    assert launch(disk, command, shell=shell).returncode == 0
    seen = disk.folder / "seen"
    wait_until(seen.exists, TIMEOUT_S, "the start")
    found = json.loads(seen.read_text())
    assert {name: found.get(name) for name in AWKWARD} == AWKWARD
    assert found["RUNPOD_POD_ID"] == "p"
    assert not {"WINDLASS_JOIN", "not-a-name"} & found.keys()
    assert not [name for name in found if name.startswith("windlass_")]
    assert not list(disk.folder.rglob("made")), "no value is run"


def test_environment_without_the_first_process_is_that_of_the_file(disk: Disk) -> None:
    with_environment_file(disk, BARE_IMAGE, **AWKWARD)
    command = 'printf "%s|" "$QUOTES" "$DOLLARS" "$LINES" "${lower-none}" "$COLOUR" > said.new; mv said.new said'
    assert launch(disk, command).returncode == 0
    said = disk.folder / "said"
    wait_until(said.exists, TIMEOUT_S, "the start")
    assert said.read_text() == f"{AWKWARD['QUOTES']}|{AWKWARD['DOLLARS']}| two|none|dark red|"


def test_existing_join_file_is_kept(disk: Disk) -> None:
    disk.path("windlass").mkdir()
    disk.path("windlass/join.json").write_text("mine")
    assert disk.run(WRITE_JOIN_FILE).returncode == 0
    assert disk.path("windlass/join.json").read_text() == "mine"


def test_missing_join_data_is_reported(disk: Disk) -> None:
    (disk.folder / "proc-1-environ").write_bytes(b"A=1\0")
    done = disk.run(WRITE_JOIN_FILE)
    assert done.returncode == 1
    assert "WINDLASS_JOIN is not in the container's environment" in done.stdout


def launch(disk: Disk, command: str, watch_s: float = 2.0, shell: str = "sh") -> subprocess.CompletedProcess[str]:
    disk.path("windlass").mkdir(exist_ok=True)
    settings = RunpodSettings(ssh={"start_command": command, "start_watch_s": watch_s})  # type: ignore[arg-type]
    # The program is started by `sh` of the image.
    return disk.run(launch_script(settings).replace("nohup sh ", f"nohup {shell} "), shell)


def test_program_starts_once_with_environment_but_without_token(disk: Disk) -> None:
    with_first_process(disk, COLOUR="dark red", WINDLASS_JOIN="secret")
    command = 'echo "$COLOUR, ${WINDLASS_JOIN-none}, $PWD" >> said # it\'s done'
    assert launch(disk, command).returncode == 0
    assert launch(disk, command).returncode == 0
    said = disk.folder / "said"
    wait_until(said.exists, TIMEOUT_S, "the start")
    assert said.read_text() == f"dark red, none, {disk.folder}\n"


def test_running_program_is_not_awaited(disk: Disk) -> None:
    done = launch(disk, "exec sh -c 'echo $$ > pid; exec sleep 600'", watch_s=0.2)
    assert (done.returncode, done.stdout) == (0, "")
    pid = disk.folder / "pid"
    wait_until(lambda: pid.exists() and pid.read_text().strip().isdigit(), TIMEOUT_S, "the start")
    subprocess.run(["kill", pid.read_text().strip()], check=True)


def test_failed_program_is_quoted(disk: Disk) -> None:
    done = launch(disk, "echo no model found; exit 3")
    assert done.returncode == 75
    assert done.stdout.splitlines() == ["no model found", "exit status 3"]
    assert launch(disk, "echo another").stdout.splitlines() == ["no model found", "exit status 3"]


def test_program_log_is_bounded_and_keeps_its_end(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provisioning, "MAX_LOG_BYTES", 10_000)
    monkeypatch.setattr(provisioning, "LOG_CHECK_S", 0.05)
    printed = "".join(f"line {n}\n" for n in range(5_000))
    (disk.folder / "printed").write_text(printed)
    command = "cat printed; while [ ! -e more ]; do sleep 0.05; done; echo bye"
    assert launch(disk, command, watch_s=0.2).returncode == 0
    log, before = disk.path("windlass/worker.log"), disk.path("windlass/worker.log.1")

    def is_rotated() -> bool:
        has_both = before.exists() and log.stat().st_size <= 10_000
        return has_both and printed.endswith(before.read_text() + log.read_text())

    try:
        wait_until(is_rotated, TIMEOUT_S, "the rotation")
    finally:
        (disk.folder / "more").touch()
    assert 0 < before.stat().st_size <= 10_000
    assert before.stat().st_mode & 0o777 == 0o600
    wait_until(disk.path("windlass/launch/status").exists, TIMEOUT_S, "the end")
    assert log.read_text().endswith("bye\n")


def test_nothing_starts_if_the_marker_cannot_be_created(disk: Disk) -> None:
    disk.path("windlass").write_text("a file")
    settings = RunpodSettings(ssh={"start_command": "touch started"})  # type: ignore[arg-type]
    assert disk.run(launch_script(settings)).returncode == 1
    assert not (disk.folder / "started").exists()
