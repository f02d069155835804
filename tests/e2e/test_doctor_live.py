"""`windlass doctor --live`: one machine of an emulated cloud is created, joins, runs a task and is deleted."""

import json
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from support.command_line import CommandLine
from windlass_emulators.hetzner import HetznerEmulator
from windlass_emulators.hetzner.settings import HetznerEmulatorSettings
from windlass_emulators.http_server import serving
from windlass_emulators.process_host import ProcessHost

WAIT_S = 90.0
STEPS = ("create", "boot", "reach", "join", "task", "delete", "cost")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def configure(folder: Path, endpoint: str, **settings: str) -> None:
    more = "".join(f"{name} = {value}\n" for name, value in settings.items())
    (folder / "windlass.toml").write_text(
        f'hetzner_api_token = "any"\nhetzner_endpoint = "{endpoint}/v1"\n[api]\nport = {_free_port()}\n'
        f'[fleets.crunch]\nprovider = "hetzner"\nhandler = "app:crunch"\nqueues = ["crunch"]\n{more}'
    )


def test_rehearsal_of_one_server_reports_each_step_and_the_cost(tmp_path: Path, dsn: str) -> None:
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn})
    with ProcessHost(tmp_path / "machines") as host:
        emulator = HetznerEmulator(lambda: datetime.now(UTC), HetznerEmulatorSettings(boot_s=1, delete_s=0), host)
        with serving(emulator) as endpoint:
            configure(tmp_path, endpoint)
            done = windlass("doctor", "--fleet", "crunch", "--live", "--json")
            found = {each["check"]: (each["verdict"], each["what"]) for each in json.loads(done.out)}
            assert done.code == 0, done
            assert {step: found.get(step, ("missing",))[0] for step in STEPS} == dict.fromkeys(STEPS, "ok"), found
            assert "cx23 in nbg1" in found["create"][1]
            assert found["task"][1].startswith("complete after ")
            assert_durations_add_up([found[step][1] for step in ("boot", "reach", "join", "ready", "task", "delete")])
            assert found["cost"][1] == "EUR 0.00560 at EUR 0.00560 per hour"
            assert emulator.project.servers == {}, "the machine is gone"
            assert emulator.bill()["total_micros"] == 5_600


def assert_durations_add_up(messages: list[str]) -> None:
    """Each step says the time since the machine was requested, and its own part of that."""
    elapsed_s = 0
    for message in messages:
        times = re.search(r"after (\d+) s, (\d+) s of them for this step", message)
        assert times is not None, message
        assert int(times[2]) == max(0, int(times[1]) - elapsed_s), messages
        elapsed_s = max(elapsed_s, int(times[1]))
    assert elapsed_s > 0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="the signal at a parent's end is Linux's")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_rehearsal_that_is_killed_leaves_no_machine_and_no_leader(
    tmp_path: Path, dsn: str, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    # Under nohup, programs ignore the end of the terminal, and so do those that they start.
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, former))
    # The folder of the child's log, which the killed process leaves behind.
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn, "TMPDIR": str(tmp_path)})
    emulator = HetznerEmulator(lambda: datetime.now(UTC), HetznerEmulatorSettings(boot_s=1, delete_s=0))
    with serving(emulator) as endpoint, (tmp_path / "doctor.log").open("w") as log:
        configure(tmp_path, endpoint)
        doctor = windlass.start("doctor", "--fleet", "crunch", "--live", stdout=log, stderr=log)
        try:
            until(lambda: bool(emulator.project.servers), "a server")
        finally:
            doctor.send_signal(number)
            # A shutdown may take 77 s.
            doctor.wait(2 * WAIT_S)
        (up_log,) = tmp_path.glob("windlass-doctor-*/up.log")
        until(
            lambda: '"event": "stopped orchestrator"' in up_log.read_text(),
            f"the end of `windlass up`\n{up_log.read_text()}",
        )
        assert emulator.project.servers == {}, "the server is deleted"


def test_rehearsal_says_why_a_machine_cannot_be_created(tmp_path: Path, dsn: str) -> None:
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn})
    emulator = HetznerEmulator(lambda: datetime.now(UTC), HetznerEmulatorSettings(boot_s=0, server_limit=0))
    with serving(emulator) as endpoint:
        configure(tmp_path, endpoint)
        done = windlass("doctor", "--fleet", "crunch", "--live", "--json")
        found = {each["check"]: (each["verdict"], each["what"]) for each in json.loads(done.out)}
        assert done.code == 1
        assert found["worker"][0] == "fail"
        assert "LIMIT_REACHED" in found["worker"][1] and "server limit exceeded" in found["worker"][1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--live",), "--live needs --fleet"),
        (("--fleet", "crunch"), "--fleet needs --live"),
    ],
)
def test_rehearsal_needs_a_fleet(tmp_path: Path, options: tuple[str, ...], sentence: str) -> None:
    done = CommandLine(tmp_path, {})("doctor", *options)
    assert (done.code, sentence in done.err) == (2, True)
