"""A Hetzner fleet, whole: `windlass demo --on hetzner` with servers that are real processes, and the vendor's published
contract between the control plane and the emulated cloud."""

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest
from test_demo import remains_of

from support.command_line import CommandLine
from support.hetzner_contract import Contract
from support.postgres_servers import wait_until
from support.vendor_contract import RecordingEmulator
from windlass.demo.hetzner import SECOND_BURST, HetznerDemo
from windlass_emulators.http import Emulator

TASKS, SERVERS, HOUR_S = 40, 2, 30
# For an hour of whoever came last and the second hour of somebody who was late; it takes half of that.
TIMEOUT_S = 110.0
TIDY_TIMEOUT_S = 30.0


@pytest.fixture
def windlass(reachable_path: Path) -> CommandLine:
    (reachable_path / "tmp").mkdir()
    return CommandLine(reachable_path, {"TMPDIR": str(reachable_path / "tmp"), "HCLOUD_TOKEN": "not for the emulator"})


async def test_servers_are_hired_crash_are_replaced_and_leave_before_their_next_hour() -> None:
    told: list[str] = []
    judges: list[RecordingEmulator] = []

    def judged(emulator: Emulator) -> Emulator:
        contract = Contract.find_or_none()
        if contract is None:  # the rest is worth seeing all the same
            return emulator
        judges.append(RecordingEmulator(emulator, contract))
        return judges[-1]

    demonstration = HetznerDemo(TASKS, SERVERS, told.append, hour_s=HOUR_S, front=judged)
    async with asyncio.timeout(TIMEOUT_S), demonstration.running() as (report, _):
        story = "\n".join(told)
        assert report.problems() == [], story
        assert (report.complete, report.accepted_once, report.accepted_twice) == (TASKS + SECOND_BURST,) * 2 + (0,)
        assert report.worker_ended_as == "STALE_HEARTBEAT_ACTIVE_TASK"
        # Two, and one in the place of the one that crashed; each had a join token of its own.
        assert len(report.servers) == SERVERS + len(report.crashed) > SERVERS
        assert story.count("has booted and joined by its token") == len(report.servers)
        for line in report.servers:
            assert line.ledger_micros == line.bill_micros == line.hours * 6_400
        assert report.ledger_micros == report.bill_micros > 0
        assert report.requests < report.took_s + 30
    assert demonstration.cloud is not None
    requests = {(method, path) for _, method, path in demonstration.cloud.emulator.requests}
    assert {("POST", "/v1/servers"), ("GET", "/v1/servers"), ("GET", "/v1/pricing")} <= requests
    for judge in judges:
        assert judge.violations == []
        assert judge.checked >= report.requests


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ended_before_its_time_no_server_stays_behind(windlass: CommandLine, number: signal.Signals) -> None:
    arguments = ("demo", "--on", "hetzner", "--workers", 2)
    with windlass.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any("is ready for work, over HTTP" in line for line in process.stdout), process.stderr.read()
        process.send_signal(number)
        assert process.stderr.read() == ""
    assert process.returncode == (-number if number is signal.SIGKILL else 128 + number)
    wait_until(lambda: not remains_of(windlass), TIDY_TIMEOUT_S, "tidying up")
    if number is signal.SIGINT:
        assert remains_of(windlass) == []


def test_an_hour_that_does_not_fit_is_refused(windlass: CommandLine) -> None:
    done = windlass("demo", "--on", "hetzner", "--hour-s", 70)
    assert (done.code, done.out) == (2, "")
    assert "3600 s are no whole number of hours of 70 s: take 30, 60 or 120 for --hour-s." in done.err
