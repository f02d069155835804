"""`windlass demo --on hetzner`: servers are real processes.

Hetzner's published contract checks every request between the control plane and the emulated cloud.
"""

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest
from test_demo import leftovers_of

from support.command_line import CommandLine
from support.hetzner_contract import Contract
from support.postgres_servers import wait_until
from support.vendor_contract import RecordingEmulator
from windlass.demo.hetzner import SECOND_BURST, HetznerDemo
from windlass_emulators.http import Emulator

TASKS, SERVERS, HOUR_S = 40, 2, 30
# It takes a minute on a quiet machine. The time limit of the demo itself is shorter.
TIMEOUT_S = 480.0
CLEANUP_TIMEOUT_S = 60.0

pytestmark = pytest.mark.timeout(540)


@pytest.fixture
def windlass(reachable_path: Path) -> CommandLine:
    (reachable_path / "tmp").mkdir()
    return CommandLine(reachable_path, {"TMPDIR": str(reachable_path / "tmp"), "HCLOUD_TOKEN": "not for the emulator"})


async def test_demo_on_hetzner_replaces_a_crashed_server_and_the_bill_matches() -> None:
    printed: list[str] = []
    recorders: list[RecordingEmulator] = []

    def with_contract(emulator: Emulator) -> Emulator:
        contract = Contract.find_or_none()
        if contract is None:  # the published contract is not installed
            return emulator
        recorders.append(RecordingEmulator(emulator, contract))
        return recorders[-1]

    demo = HetznerDemo(TASKS, SERVERS, printed.append, hour_s=HOUR_S, wrap=with_contract)
    async with asyncio.timeout(TIMEOUT_S), demo.run() as (report, _):
        output = "\n".join(printed)
        assert report.problems() == [], output
        assert (report.complete, report.accepted_once, report.accepted_twice) == (TASKS + SECOND_BURST,) * 2 + (0,)
        assert report.worker_ended_as == "STALE_HEARTBEAT_ACTIVE_TASK"
        assert report.bill is not None
        servers = report.bill.machines
        # Each crashed server was replaced, and each server joined with its own token.
        assert len(servers) == SERVERS + [server.terminated_as for server in servers].count("CRASHED") > SERVERS
        assert output.count("booted and joined with its token") == len(servers)
        for server in servers:
            assert server.ledger_micros == server.bill_micros == (server.hours or 0) * 5_600
        assert report.bill.ledger_micros == report.bill.total_micros > 0
        assert report.bill.requests < report.took_s + 30
    requests = {(method, path) for _, method, path in demo.emulator.requests}
    assert {("POST", "/v1/servers"), ("GET", "/v1/servers"), ("GET", "/v1/pricing")} <= requests
    for recorder in recorders:
        assert recorder.violations == []
        assert recorder.checked >= report.bill.requests


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_demo_leaves_no_server(windlass: CommandLine, number: signal.Signals) -> None:
    arguments = ("demo", "--on", "hetzner", "--workers", 2)
    with windlass.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any("is active" in line for line in process.stdout), process.stderr.read()
        process.send_signal(number)
        assert process.stderr.read() == ""
    assert process.returncode == (-number if number is signal.SIGKILL else 128 + number)
    wait_until(lambda: not leftovers_of(windlass), CLEANUP_TIMEOUT_S, "cleaning up")
    if number is signal.SIGINT:
        assert leftovers_of(windlass) == []


def test_hour_that_does_not_divide_3600_is_refused(windlass: CommandLine) -> None:
    done = windlass("demo", "--on", "hetzner", "--hour-s", 70)
    assert (done.code, done.out) == (2, "")
    assert "--hour-s 70 does not divide 3600: use 30, 60 or 120." in done.err
