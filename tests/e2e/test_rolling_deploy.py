"""`windlass deploy` with real local processes: new code, a failing version, settings, abort, and `up --watch`."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.local_fleet import FleetHost, open_fleet_host
from support.worker_harness import until
from windlass.model.rollout import Rollout, RolloutStatus
from windlass.model.task import TaskStatus
from windlass.model.worker import Worker, WorkerStatus

# Several process starts, one after another, on a busy machine.
ROLLOUT_TIMEOUT_S = 150.0
VERSIONED = """
import time
from pathlib import Path
import helper

def work(task):
    go = task.payload and task.payload.get("go")
    while go and not Path(go).exists():
        time.sleep(0.01)
    return helper.VERSION
"""
FAILING = """
def work(task):
    raise RuntimeError("the new version is broken")
"""


@pytest.fixture
async def host(tmp_path: Path, dsn: str) -> AsyncIterator[FleetHost]:
    async with open_fleet_host(tmp_path, dsn) as host:
        (host.folder / "app.py").write_text(VERSIONED)
        set_version(host, 1)
        yield host


def set_version(host: FleetHost, number: int) -> None:
    (host.folder / "helper.py").write_text(f"VERSION = {number}\n")


async def until_rollout(host: FleetHost, status: RolloutStatus, request_id: int = 0) -> Rollout:
    async def ended() -> Rollout | None:
        rollout = (await host.fleet()).rollout
        is_match = rollout is not None and rollout.id >= request_id and rollout.status is status
        return rollout if is_match else None

    found: Rollout = await until(ended, f"a rollout that is {status}\n{host.log()}", ROLLOUT_TIMEOUT_S)
    return found


class Availability:
    """Samples how many workers could claim, while a rollout runs."""

    def __init__(self, host: FleetHost) -> None:
        self._host = host
        self.lowest = 1_000
        self.most = 0

    async def __aenter__(self) -> "Availability":
        self._sampling = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sampling.cancel()
        await asyncio.gather(self._sampling, return_exceptions=True)

    async def _sample(self) -> None:
        while True:
            workers = await self._host.store.workers()
            self.lowest = min(self.lowest, sum(worker.status is WorkerStatus.ACTIVE for worker in workers))
            self.most = max(self.most, len(workers))
            await asyncio.sleep(0.02)


async def test_deploy_replaces_all_workers_without_a_gap(host: FleetHost) -> None:
    """New code in a module that the handler imports, with a task under way and others queued all the time."""
    host.configure(min_workers=3, max_workers=4)
    up = host.up()
    old = await host.until_workers(3)
    assert len({worker.fingerprint for worker in old}) == 1
    go = host.folder / "go"
    (slow,) = await host.enqueue({"go": str(go)})
    await host.until_status(TaskStatus.RUNNING, slow)
    set_version(host, 2)
    fleet = await until(lambda: changed_fleet(host, old), "the new version is noticed")
    assert host.windlass("status").out.count("3 of 3 on the old version") == 1
    async with Availability(host) as seen:
        assert host.windlass("deploy", "default").out.startswith("deploy 1 of fleet default requested for 3 workers")
        tasks = await host.enqueue(*[None] * 12)
        go.touch()
        await until_rollout(host, RolloutStatus.COMPLETE)
    assert seen.lowest >= 3, "fewer workers than before could claim"
    assert seen.most <= 4, "more than max_workers"
    new = await host.until_workers(3)
    assert {worker.fingerprint for worker in new} == {fleet}
    assert not {worker.id for worker in new} & {worker.id for worker in old}
    await host.until_status(TaskStatus.COMPLETE, slow, *tasks)
    (last,) = await host.enqueue(None)
    await host.until_status(TaskStatus.COMPLETE, last)
    assert (await host.task(last)).result == "2"
    report = host.windlass("deploy", "default", "--status", "--json").json
    assert (report["changed"], report["workers"], report["rollout"]["status"]) == (0, 3, "complete")
    codes = [event.code for event in await host.store.events(limit=500)]
    assert [code for code in codes if code.startswith("DEPLOY")] == [
        "DEPLOY_REQUESTED", "DEPLOY_STARTED", "DEPLOY_COMPLETE"
    ]  # fmt: skip
    ended = [w for w in await host.store.workers(include_terminated=True) if w.id in {each.id for each in old}]
    assert {worker.code for worker in ended} == {"DEPLOY"}
    await host.stop(up)


async def changed_fleet(host: FleetHost, old: list[Worker]) -> str | None:
    current = (await host.fleet()).fingerprint
    return current if current is not None and current != old[0].fingerprint else None


@pytest.mark.parametrize("defect", ["cannot be imported", "fails every task"])
async def test_failing_version_is_rolled_back_and_old_workers_stay(host: FleetHost, defect: str) -> None:
    host.configure(min_workers=2, max_workers=3)
    up = host.up()
    old = await host.until_workers(2)
    # While a task runs, a new worker without tasks does not pass the health probe before it has one.
    finish = host.folder / "finish"
    await host.until_status(TaskStatus.RUNNING, *await host.enqueue({"go": str(finish)}))
    (host.folder / "app.py").write_text("import nothing_like_this\n" if defect == "cannot be imported" else FAILING)
    assert host.windlass("deploy", "default").code == 0

    async def enqueue_until_rolled_back() -> Rollout | None:
        # Old workers compete for tasks: the new one needs several to show that it fails.
        await host.enqueue(*[None] * 6)
        rollout = (await host.fleet()).rollout
        return rollout if rollout is not None and rollout.status is RolloutStatus.ROLLED_BACK else None

    rollout = await until(enqueue_until_rolled_back, f"a rollback\n{host.log()}", ROLLOUT_TIMEOUT_S)
    assert rollout.reason
    finish.touch()

    async def only_old_ones() -> bool:
        # A version that fails only once it has tasks may pass the health probe and replace some of them first.
        workers = {worker.id for worker in await host.store.workers()}
        return bool(workers) and workers <= {worker.id for worker in old}

    await until(only_old_ones, f"only the old workers\n{host.log()}")
    fleet = await host.fleet()
    assert fleet.hold is not None
    assert fleet.hold.code == "VERSION_REJECTED"
    assert "rolled back" in host.windlass("deploy", "default", "--status").out
    # The fixed version goes out, and the hold ends.
    (host.folder / "app.py").write_text(VERSIONED)
    set_version(host, 3)
    done = host.windlass("deploy", "default", "--max-unavailable", 1, "--wait")
    assert done.code == 0, done
    assert "all 2 on the current version" in done.out
    assert (await host.fleet()).hold is None
    await host.stop(up)


async def test_deploy_reads_changed_settings_first(host: FleetHost) -> None:
    host.configure(min_workers=1, max_workers=1, env={"MODEL": "small"})
    up = host.up()
    (small,) = await host.until_workers(1)
    host.configure(min_workers=1, max_workers=1, env={"MODEL": "large"})
    done = host.windlass("deploy", "default", "--wait", "--json")
    assert done.json["rollout"]["status"] == "complete", done
    (worker,) = await host.until_workers(1)
    assert worker.fingerprint == (await host.fleet()).fingerprint
    assert worker.id != small.id
    (host.folder / "app.py").write_text("import os\ndef work(task):\n    return os.environ['MODEL']\n")
    assert host.windlass("deploy", "default", "--wait").code == 0
    (task,) = await host.enqueue(None)
    await host.until_status(TaskStatus.COMPLETE, task)
    assert (await host.task(task)).result == '"large"'
    await host.stop(up)


async def test_aborted_deploy_keeps_both_versions(host: FleetHost) -> None:
    host.configure(min_workers=2, max_workers=3)
    up = host.up()
    old = await host.until_workers(2)
    # While other workers run tasks, a new worker without a task passes after a minute only.
    tasks = await host.enqueue(*[{"go": str(host.folder / "never")}] * 2)
    await host.until_status(TaskStatus.RUNNING, *tasks)
    set_version(host, 2)
    assert host.windlass("deploy", "default", "--surge", 1).code == 0

    async def has_new_worker() -> bool:
        return any(worker.id not in {each.id for each in old} for worker in await host.store.workers())

    await until(has_new_worker, f"a new worker\n{host.log()}")
    assert host.windlass("deploy", "default", "--abort").out == "rollout of fleet default is aborted\n"
    await until_rollout(host, RolloutStatus.ABORTED)

    async def are_old_ones_left() -> bool:
        live = [worker.id for worker in await host.store.workers() if worker.status is WorkerStatus.ACTIVE]
        return set(live) == {worker.id for worker in old}

    await until(are_old_ones_left, f"the old workers\n{host.log()}")
    assert host.windlass("deploy", "default", "--abort").out == "fleet default has no rollout to abort\n"
    (host.folder / "never").touch()
    await host.stop(up)


async def test_up_with_watch_rolls_out_every_change(host: FleetHost) -> None:
    host.configure(min_workers=1, max_workers=2)
    up = host.up("--watch")
    await host.until_workers(1)
    for version in (2, 3):
        set_version(host, version)

        async def result_is(expected: int) -> bool:
            (task,) = await host.enqueue(None)
            await host.until_status(TaskStatus.COMPLETE, task)
            return bool((await host.task(task)).result == str(expected))

        await until(lambda expected=version: result_is(expected), f"version {version}\n{host.log()}", ROLLOUT_TIMEOUT_S)
    await host.stop(up)


BAD_INPUT: list[tuple[tuple[Any, ...], str]] = [
    (("deploy", "unknown"), "fleet unknown not found"),
    (("deploy", "default", "--surge", 1, "--max-unavailable", 1), "pass one of --status, --abort, --surge"),
    (("deploy", "default", "--status", "--abort"), "pass one of --status, --abort, --surge"),
    (("deploy", "default", "--surge", 99), "at most 3 workers"),
    (("deploy", "default", "--surge", 0), "surge"),
]


async def test_bad_input_is_refused_with_a_sentence(host: FleetHost) -> None:
    up = host.up()
    await until(lambda: "cycle" in host.log(), f"a first cycle\n{host.log()}")
    for arguments, sentence in BAD_INPUT:
        done = host.windlass(*arguments)
        assert (done.code, done.out) == (2, ""), arguments
        assert sentence in done.err, done.err
    assert (await host.fleet()).rollout is None
    await host.stop(up)
