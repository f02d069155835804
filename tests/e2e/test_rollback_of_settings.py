"""A version of a rented fleet that fails: `windlass up` goes on with the settings of the last version that worked."""

import json
import socket
from datetime import UTC, datetime
from pathlib import Path

from support.command_line import CommandLine
from support.queue_sql import connected
from support.worker_harness import until
from windlass_emulators.http_server import serving
from windlass_emulators.runpod import RunpodEmulator

LIMIT_S = 150.0
# Pods of the emulator start no worker here: what never joins has failed after spawn_timeout_s.
CONFIG = """
data_dir = "state"
runpod_endpoint = "{url}/v2"
runpod_api_key = "key-1234567890"
[api]
port = {port}
[fleets.far]
queues = ["far"]
provider = "runpod"
exec = "true"
auto_start_worker = false
min_workers = 1
has_gpu = false
max_workers = 4
poll_interval_s = 0.3
spawn_timeout_s = 10
heartbeat_timeout_s = 3600
[fleets.far.runpod]
image = "{image}"
"""
# The worker of the first pod, as if it had joined and finished a task.
PROVEN = """
update windlass.workers
set status = 'active', activated_at = now(), first_claimed_at = now(), is_proven = true, last_heartbeat = now()
where slot = 0 and status = 'spawning'
"""


async def test_rejected_image_is_replaced_by_the_last_one_that_worked(tmp_path: Path, dsn: str) -> None:
    emulator, log = RunpodEmulator(lambda: datetime.now(UTC)), tmp_path / "up.log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn})
    images: set[str] = set()

    def seen_images() -> set[str]:
        images.update(pod.config.image for pod in emulator.account.pods.values())
        return images

    with serving(emulator) as url, log.open("w") as output:

        def configure(image: str) -> None:
            (tmp_path / "windlass.toml").write_text(CONFIG.format(url=url, port=port, image=image))

        configure("team/worker:1")
        up = windlass.start("up", stdout=output, stderr=output)
        try:
            async with connected(dsn) as sql:

                async def state(*path: str) -> str | None:
                    found: str | None = await sql.fetchval("select planner_state #>> $1 from windlass.fleets", path)
                    return found

                async def has_worked() -> bool:
                    await sql.execute(PROVEN)
                    return await state("working", "fingerprint") is not None

                await until(has_worked, "a version that works", LIMIT_S)
                working = await state("working", "fingerprint")
                configure("team/worker:2")
                assert windlass("deploy", "far", "--surge", "1").code == 0

                async def is_rolled_back() -> bool:
                    seen_images()
                    return await state("rollout", "status") == "rolled_back"

                await until(is_rolled_back, f"the rollback\n{log.read_text()[-3000:]}", LIMIT_S)
                assert seen_images() == {"team/worker:1", "team/worker:2"}
                known = set(emulator.account.pods)
                assert windlass("spawn", "far").code == 0
                pods = emulator.account.pods
                await until(lambda: set(pods) - known, f"a pod after it\n{log.read_text()[-3000:]}", LIMIT_S)
                assert {pods[pod].config.image for pod in set(pods) - known} == {"team/worker:1"}
                assert (await state("fingerprint"), await state("hold", "code")) == (working, None)
                assert json.loads(await state("rollout", "changes") or "") == ["runpod.image"]
                assert "changed: runpod.image" in windlass("deploy", "far", "--status").out
        finally:
            up.kill()
            up.wait(60)
