"""A Runpod fleet, whole: `windlass demo --on runpod` with pods that are real processes behind a real OpenSSH server,
and the vendor's published contract between the control plane and the emulated cloud."""

import asyncio

import pytest

from support.runpod_contract import Contract
from support.vendor_contract import RecordingEmulator
from windlass.demo.runpod import GPUS, RunpodDemo
from windlass_emulators.http import Emulator
from windlass_emulators.runpod.pod_host import find_sshd

TASKS, PODS = 60, 3
TIMEOUT_S = 110.0

pytestmark = pytest.mark.skipif(find_sshd() is None, reason="no OpenSSH here: install openssh-server")


async def test_pods_that_do_not_work_are_gone_and_every_second_is_in_the_ledger() -> None:
    told: list[str] = []
    judges: list[RecordingEmulator] = []

    def judged(emulator: Emulator) -> Emulator:
        contract = Contract.find_or_none()
        if contract is None:  # the rest is worth seeing all the same
            return emulator
        judges.append(RecordingEmulator(emulator, contract))
        return judges[-1]

    demonstration = RunpodDemo(TASKS, PODS, told.append, front=judged)
    async with asyncio.timeout(TIMEOUT_S), demonstration.running() as (report, _):
        story = "\n".join(told)
        assert report.problems() == [], story
        assert report.complete == report.accepted_once >= TASKS
        assert report.accepted_twice == 0
        for code in ("GPU_NOT_DETECTED", "GPU_READY_NOT_CLAIMING", "STUCK_TASK"):
            assert len(report.ended_as(code)) == 1, story
        assert report.worker_ended_as == "STUCK_TASK"
        assert report.completed_by not in (None, report.killed_worker_id)
        assert report.drained_completed_by == report.drained_worker_id
        # The first ones have the first choice, and whoever came after them the second.
        assert [line.gpu for line in report.pods[:PODS]] == [GPUS[0]] * PODS
        assert {line.gpu for line in report.pods[PODS:]} == {GPUS[1]}
        # Each was looked over and started over SSH, once.
        assert report.starts == report.prepared == len(report.pods)
        assert (report.volume_gb, report.volume_grown_gb) == (100, 150)
        for line in report.pods:
            assert line.ledger_micros == line.bill_micros > 0
        assert report.ledger_micros == report.bill_micros
    for judge in judges:
        assert judge.violations == []
        # All but the one that made the volume before anybody listened.
        assert judge.checked >= report.requests - 1
