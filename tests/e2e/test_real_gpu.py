"""A worker reports the same memory figures of a real NVIDIA GPU as nvidia-smi."""

import shutil
import subprocess
from pathlib import Path

import pytest

from support.worker_harness import WorkerHarness, until

EXAMPLES = Path(__file__).parents[2] / "examples"
# The driver reserves a little for each context, and both sides round to MiB.
TOLERANCE_MIB = 16
HELD_MIB = 4096

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA GPU here")


def nvidia_smi(column: str) -> int:
    command = ["nvidia-smi", f"--query-gpu={column}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return sum(int(line) for line in answer.stdout.split())


async def test_heartbeat_reports_same_gpu_memory_as_nvidia_smi(dsn: str, tmp_path: Path) -> None:
    async with WorkerHarness(dsn, tmp_path) as harness:
        worker = await harness.start_registered("--chdir", str(EXAMPLES), "--handler", "gpu:hold")

        async def used_mib() -> int:
            row = await harness.worker_row(worker)
            assert row is not None
            assert row.vram_total_mb == nvidia_smi("memory.total")
            assert row.vram_used_mb is not None
            return row.vram_used_mb

        async def agree_on(least: int, most: int) -> bool:
            ours, theirs = await used_mib(), nvidia_smi("memory.used")
            print(f"heartbeat {ours} MiB, nvidia-smi {theirs} MiB")
            return abs(ours - theirs) <= TOLERANCE_MIB and least <= ours <= most

        await until(lambda: agree_on(0, HELD_MIB - 1), "heartbeat and nvidia-smi agree before the task")
        at_rest = await used_mib()

        task_id = await harness.enqueue({"mib": HELD_MIB, "seconds": 600})
        await until(lambda: agree_on(at_rest + HELD_MIB, at_rest + 2 * HELD_MIB), "the allocation is seen")

        await harness.store.cancel_task(task_id, "seen enough")
        await until(lambda: agree_on(0, at_rest + TOLERANCE_MIB), "the memory is free again")
