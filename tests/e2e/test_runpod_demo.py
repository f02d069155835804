"""`windlass demo --on runpod`: pods are real processes behind a real OpenSSH server.

Runpod's published contract checks every request between the control plane and the emulated cloud.
"""

import asyncio

import pytest

from support.runpod_contract import Contract
from support.vendor_contract import RecordingEmulator
from windlass.demo.runpod import GPUS, RunpodDemo
from windlass_emulators.http import Emulator
from windlass_emulators.runpod.pod_host import find_sshd

TASKS, PODS = 60, 3
# It takes 50 s on a quiet machine. The time limit of the demo itself is shorter.
TIMEOUT_S = 480.0

pytestmark = [
    pytest.mark.timeout(540),
    pytest.mark.skipif(find_sshd() is None, reason="sshd not found: install openssh-server"),
]


async def test_demo_on_runpod_replaces_failed_pods_and_the_bill_matches() -> None:
    printed: list[str] = []
    recorders: list[RecordingEmulator] = []

    def with_contract(emulator: Emulator) -> Emulator:
        contract = Contract.find_or_none()
        if contract is None:  # the published contract is not installed
            return emulator
        recorders.append(RecordingEmulator(emulator, contract))
        return recorders[-1]

    demo = RunpodDemo(TASKS, PODS, printed.append, wrap=with_contract)
    async with asyncio.timeout(TIMEOUT_S), demo.run() as (report, _):
        output = "\n".join(printed)
        assert report.problems() == [], f"{report.problems()}\n{output}"
        assert report.complete == report.accepted_once >= TASKS
        assert report.accepted_twice == 0
        assert report.bill is not None
        pods, details = report.bill.machines, report.details
        for code in ("GPU_NOT_DETECTED", "GPU_READY_NOT_CLAIMING", "STUCK_TASK"):
            assert [pod.terminated_as for pod in pods].count(code) == 1, output
        assert report.worker_ended_as == "STUCK_TASK"
        assert report.completed_by not in (None, report.killed_worker_id)
        assert details["drained_completed_by"] == details["drained_worker_id"]
        # The first pods have the first choice of GPU, their replacements the second.
        assert [pod.gpu for pod in pods[:PODS]] == [GPUS[0]] * PODS
        assert {pod.gpu for pod in pods[PODS:]} == {GPUS[1]}
        # Each was checked and started over SSH, once.
        assert details["starts"] == details["prepared"] == len(pods)
        assert (details["volume_gb"], details["volume_grown_gb"]) == (100, 150)
        for pod in pods:
            assert pod.ledger_micros == pod.bill_micros > 0
        assert report.bill.ledger_micros == report.bill.total_micros
    for recorder in recorders:
        assert recorder.violations == []
        # All requests except the one that created the volume before the server started.
        assert recorder.checked >= report.bill.requests - 1
