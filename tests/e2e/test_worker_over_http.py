"""Workers over HTTP: real `windlass worker --join` processes and a real server on loopback."""

import json
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from support.command_line import CommandLine
from support.fake_control_plane import FakeControlPlane
from support.postgres_servers import reachable_temp_dir
from support.stores import PostgresStores
from support.worker_harness import HERE, PROGRAM, QUEUE, KillableServer, WorkerHarness, WorkerProcess, until
from windlass.model.action import Fail, Plan
from windlass.model.auth import API_PREFIX, JOIN_PREFIX, Role, hash_of, new_token
from windlass.model.config import WorkerConfig
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.outcome import Deleted, Intent
from windlass.model.snapshot import PlannerState
from windlass.model.task import MAX_PAYLOAD_BYTES, TaskStatus
from windlass.model.worker import WorkerStatus
from windlass.policy.plan import plan
from windlass.server.app import make_app
from windlass.server.context import WorkerApiContext
from windlass.server.long_poll import LongPollHub
from windlass.server.server import listen, serving

ANN = Candidate("ann", ttl_s=3600.0)
SETTINGS: dict[str, Any] = {
    "queues": (QUEUE,),
    "handler": "handlers:wait_for_file",
    "chdir": HERE,
    "heartbeat_interval_s": 0.2,
    "heartbeat_timeout_s": 10.0,
    "stop_timeout_s": 20.0,
    "max_workers": 8,
}


class Plane:
    """The HTTP server of a control plane without its control loop: the tests spawn and terminate workers."""

    def __init__(self, harness: WorkerHarness) -> None:
        self.harness = harness
        self.store = PostgresStores(harness.dsn)
        self.control = FakeControlPlane()
        self.configure()
        self.port = 0
        self._open = AsyncExitStack()

    def configure(self, **settings: Any) -> None:
        self.fleet = self.control.default_fleet = FleetConfig(**{**SETTINGS, **settings})

    async def open(self) -> None:
        listener = listen("127.0.0.1", self.port)
        self.port = listener.getsockname()[1]
        long_poll_hub = LongPollHub(self.store.wait_for_work)
        context = WorkerApiContext(
            worker_store=self.store,
            auth_store=self.store,
            long_poll_hub=long_poll_hub,
            control=self.control,
            worker_defaults=WorkerConfig(),
            max_payload_bytes=MAX_PAYLOAD_BYTES,
            version="test",
        )
        await self._open.enter_async_context(serving(make_app(context), listener))
        self._open.push_async_callback(long_poll_hub.close)

    async def close(self) -> None:
        await self._open.aclose()

    async def add_worker(self, worker_id: str, slot: int = 0) -> Path:
        """Insert the worker's row and return its join file, as an orchestrator does."""
        token = new_token(JOIN_PREFIX, random.SystemRandom())
        observed = await self.store.observe(ANN, "far", self.fleet)
        assert isinstance(observed, tuple)
        intent = Intent(
            worker_id, slot, "wanted", self.fleet.heartbeat_timeout_s, join_token_hash=hash_of(token), join_ttl_s=600.0
        )
        committed = await self.store.commit_plan(ANN, observed[0], observed[1], Plan((), PlannerState(), "x"), [intent])
        assert committed.granted
        file = self.harness.folder / f"{worker_id}.json"
        url = f"http://127.0.0.1:{self.port}"
        file.write_text(json.dumps({"worker_id": worker_id, "url": url, "join_token": token}))
        return file

    def start(self, file: Path) -> WorkerProcess:
        # A worker that used a database would fail.
        return self.harness.start_command(
            [PROGRAM, "worker", "--join", file, "--log-format", "json"], {"DATABASE_URL": "postgresql://127.0.0.1:1/x"}
        )

    async def machine(self, worker_id: str = "far-0", slot: int = 0) -> WorkerProcess:
        process = self.start(await self.add_worker(worker_id, slot))
        await until(lambda: self.has_heartbeat(worker_id), f"a heartbeat of {worker_id}\n{process.last_lines()}")
        return process

    async def has_heartbeat(self, worker_id: str) -> bool:
        worker = await self.store.worker(worker_id)
        return worker is not None and worker.last_heartbeat is not None

    async def end(self, worker_id: str) -> None:
        term = await self.store.acquire_lease(ANN)
        assert isinstance(term, int)
        await self.store.record_outcomes("far", 0, [Deleted(worker_id, None, "IDLE", "idle")], None)


async def open_plane(harness: WorkerHarness) -> AsyncIterator[Plane]:
    plane = Plane(harness)
    async with plane.store:
        await plane.open()
        yield plane
        await plane.close()


@pytest.fixture
async def plane(dsn: str, tmp_path: Path) -> AsyncIterator[Plane]:
    async with WorkerHarness(dsn, tmp_path) as harness:
        async for plane in open_plane(harness):
            yield plane


def files(harness: WorkerHarness, number: int = 1) -> dict[str, str]:
    return {"running": str(harness.folder / f"running-{number}"), "go": str(harness.folder / f"go-{number}")}


async def started(plane: Plane) -> tuple[WorkerProcess, int]:
    """A machine that runs a task until the file go-1 exists."""
    process = await plane.machine()
    task_id = await plane.harness.enqueue(files(plane.harness))
    await until((plane.harness.folder / "running-1").exists, f"the handler runs\n{process.last_lines()}")
    return process, task_id


async def test_machine_joins_works_and_drains_over_http(plane: Plane) -> None:
    process, first = await started(plane)
    second = await plane.harness.enqueue(files(plane.harness, 2))
    process.send(signal.SIGTERM)
    await until(lambda: '"event": "drain worker"' in process.log(), "the worker drains")
    (plane.harness.folder / "go-1").touch()
    assert await process.exit_code() == 0
    assert (await plane.harness.wait_for_result(first))["attempt"] == 1
    assert (await plane.harness.task(second)).status is TaskStatus.QUEUED
    worker = await plane.store.worker("far-0")
    assert worker is not None
    # The orchestrator terminates it.
    assert (worker.status, worker.code) == (WorkerStatus.TERMINATING, "DEREGISTERED")


async def test_fleet_environment_reaches_handlers_by_work_order(plane: Plane) -> None:
    command = """python3 -c "import json, os; print(json.dumps([os.environ['GREETING'], os.getcwd()]))" """
    plane.configure(handler=None, exec=command, env={"GREETING": "a secret"})
    process = await plane.machine()
    task_id = await plane.harness.enqueue()
    assert await plane.harness.wait_for_result(task_id) == ["a secret", str(HERE)]
    assert "a secret" not in process.log()
    assert "a secret" not in (plane.harness.folder / "far-0.json").read_text()


async def test_burst_is_shared_by_several_machines(plane: Plane) -> None:
    plane.configure(handler="handlers:inline", is_inline=True, concurrency=20)
    for number in range(2):
        await plane.machine(f"far-{number}", number)
    tasks = [await plane.harness.enqueue({"how": number}) for number in range(300)]
    assert [await plane.harness.wait_for_result(task_id) for task_id in tasks] == list(range(300))


async def test_control_plane_restart_costs_no_attempt(plane: Plane) -> None:
    process, task_id = await started(plane)
    await plane.close()
    await until(lambda: '"event": "send heartbeat failed"' in process.log(), "the worker has noticed")
    (plane.harness.folder / "go-1").touch()
    await until(lambda: f'"undelivered": [{task_id}]' in process.log(), "an undelivered result")
    await plane.open()
    assert (await plane.harness.wait_for_result(task_id))["attempt"] == 1
    next_id = await plane.harness.enqueue({**files(plane.harness, 2), "go": files(plane.harness)["go"]})
    assert (await plane.harness.wait_for_result(next_id))["attempt"] == 1
    assert (await plane.harness.task(next_id)).worker_id == "far-0"


async def test_restarted_service_keeps_its_worker_id(plane: Plane) -> None:
    process = await plane.machine()
    process.send(signal.SIGKILL)
    await process.exit_code()
    file = plane.harness.folder / "far-0.json"
    assert "join_token" not in json.loads(file.read_text())
    plane.configure(handler="handlers:echo")
    again = plane.start(file)
    task_id = await plane.harness.enqueue("hello")
    assert await plane.harness.wait_for_result(task_id) == "hello"
    assert (await plane.harness.task(task_id)).worker_id == "far-0"
    assert again.is_running()


async def test_attempt_of_killed_worker_counts_after_service_restart(plane: Plane) -> None:
    process, task_id = await started(plane)
    process.send(signal.SIGKILL)
    await process.exit_code()
    plane.configure(handler="handlers:echo")
    plane.start(plane.harness.folder / "far-0.json")
    await plane.harness.wait_for_result(task_id)
    task = await plane.harness.task(task_id)
    assert (task.worker_id, task.attempts) == ("far-0", 2)


async def test_machine_of_terminated_worker_exits_with_code_3(plane: Plane) -> None:
    process, task_id = await started(plane)
    await plane.end("far-0")
    assert await process.exit_code() == 3
    task = await plane.harness.task(task_id)
    assert (task.status, task.worker_id) == (TaskStatus.QUEUED, None)
    # A restarted service exits with 3 too.
    again = plane.start(plane.harness.folder / "far-0.json")
    assert await again.exit_code() == 3
    assert "windlass: reading the work order: worker far-0 has terminated" in again.log()


async def test_used_join_token_is_refused_elsewhere(plane: Plane) -> None:
    file = await plane.add_worker("far-0")
    copy = plane.harness.folder / "stolen.json"
    copy.write_text(file.read_text())
    plane.start(file)
    await until(lambda: plane.has_heartbeat("far-0"), "a heartbeat")
    thief = plane.start(copy)
    assert await thief.exit_code() == 3
    assert "windlass: joining as far-0: the join token of worker far-0 was already used." in thief.log()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"handler": "nosuch:f"}, "cannot import handler nosuch:f: No module named 'nosuch'"),
        ({"chdir": Path("/nosuch")}, "cannot change to /nosuch"),
    ],
)
async def test_machine_without_handler_reports_reason_and_fails(
    plane: Plane, settings: dict[str, Any], message: str
) -> None:
    plane.configure(**settings)
    process = plane.start(await plane.add_worker("far-0"))
    assert await process.exit_code() == 2
    observed = await plane.store.observe(ANN, "far", plane.fleet)
    assert isinstance(observed, tuple)
    (failed,) = [action for action in plan(observed[1], plane.fleet).actions if isinstance(action, Fail)]
    assert (failed.worker_id, failed.code) == ("far-0", "HANDLER_NOT_FOUND")
    assert failed.reason.startswith(message)


# ------------------------------------------------------------------------------------------ self-registered workers


async def self_register(plane: Plane) -> WorkerProcess:
    """Start `windlass worker --url` as on a machine that was not spawned."""
    token = new_token(API_PREFIX, random.SystemRandom())
    await plane.store.create_token("anywhere", Role.WORKER, hash_of(token))
    command = [PROGRAM, "worker", "--url", f"http://127.0.0.1:{plane.port}", "--queue", QUEUE, "--chdir", HERE]
    command += ["--handler", "handlers:wait_for_file", "--heartbeat-interval", "0.2", "--log-format", "json"]
    return plane.harness.start_command(command, {"DATABASE_URL": "postgresql://127.0.0.1:1/x", "WINDLASS_TOKEN": token})


async def names(plane: Plane) -> list[str]:
    found = await plane.store.workers()
    return [worker.id for worker in found if worker.last_heartbeat is not None and worker.status is WorkerStatus.ACTIVE]


async def test_self_registered_worker_works_over_http(plane: Plane) -> None:
    process = await self_register(plane)
    first = await plane.harness.enqueue(files(plane.harness))
    await until((plane.harness.folder / "running-1").exists, f"the handler runs\n{process.last_lines()}")
    (name,) = await until(lambda: names(plane), f"its heartbeat\n{process.last_lines()}")
    worker = await plane.store.worker(name)
    assert worker is not None
    assert (worker.fleet, worker.slot) == ("default", None)
    # When it is terminated, it registers again under a new id, like any worker started by hand.
    await plane.store.terminate_worker(name, "by hand")

    async def is_back() -> bool:
        return bool(await names(plane)) and await names(plane) != [name]

    await until(is_back, f"it joins again\n{process.last_lines()}")
    (plane.harness.folder / "go-1").touch()
    assert (await plane.harness.wait_for_result(first))["attempt"] == 2
    (again,) = await names(plane)
    process.send(signal.SIGTERM)
    assert await process.exit_code() == 0
    left = await plane.store.worker(again)
    assert left is not None
    assert (left.status, left.code) == (WorkerStatus.TERMINATED, "DEREGISTERED")
    assert "wlt_" not in process.log().replace("wlt_********", "")


async def test_revoked_api_token_terminates_its_workers(plane: Plane) -> None:
    process = await self_register(plane)
    await plane.harness.enqueue(files(plane.harness))
    await until((plane.harness.folder / "running-1").exists, f"the handler runs\n{process.last_lines()}")
    await plane.store.revoke_token("anywhere")
    assert await process.exit_code() == 3
    assert "windlass: registering the worker: unknown or revoked token." in process.log()


# -------------------------------------------------------------------------------------------------------- databases


@pytest.fixture(scope="module")
def server() -> Iterator[KillableServer]:
    with reachable_temp_dir() as folder:
        server = KillableServer(folder)
        yield server
        server.close()


@pytest.fixture
async def killable_plane(server: KillableServer, tmp_path: Path) -> AsyncIterator[Plane]:
    server.start()
    async with WorkerHarness(server.dsn, tmp_path) as harness:
        async for plane in open_plane(harness):
            yield plane
        server.start()


async def test_result_waits_for_database_behind_control_plane(server: KillableServer, killable_plane: Plane) -> None:
    plane = killable_plane
    process, task_id = await started(plane)
    server.end(signal.SIGQUIT)
    await until(lambda: '"event": "send heartbeat failed"' in process.log(), "the worker has noticed")
    (plane.harness.folder / "go-1").touch()
    await until(lambda: f'"undelivered": [{task_id}]' in process.log(), "an undelivered result")
    assert process.is_running()
    server.start()

    async def is_complete() -> bool:
        return (await plane.harness.task(task_id)).status is TaskStatus.COMPLETE

    await until(is_complete, f"the result is delivered\n{process.last_lines()}")
    task = await plane.harness.task(task_id)
    assert (task.attempts, task.worker_id) == (1, "far-0")


# ---------------------------------------------------------------------------------------------------- the command line

WORK = ("--queue", "q", "--handler", "a:b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(("--join", "f", "--queue", "q"), "--join cannot be combined", id="join with queue"),
        pytest.param(("--join", "f", "--handler", "a:b"), "--join cannot be combined", id="join with handler"),
        pytest.param(("--join", "missing"), "cannot read the join file missing: No such file", id="missing file"),
        pytest.param(("--handler", "a:b"), "no queue to serve", id="no queue"),
        pytest.param(
            (*WORK, "--url", "http://192.0.2.1:80000"), "--url has an invalid host or port", id="invalid port"
        ),
        pytest.param(
            (*WORK, "--url", "http://example.com"), "--url uses http to example.com, which", id="http to a public host"
        ),
        pytest.param((*WORK, "--url", "https://example.com"), "no token in WINDLASS_TOKEN", id="no token"),
        pytest.param(
            (*WORK, "--url", "https://e.com", "--token-file", "f"), "cannot read the token file f", id="missing file"
        ),
        pytest.param((*WORK, "--token-file", "f"), "--token-file needs --url", id="token file without url"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = CommandLine(tmp_path)("worker", *arguments)
    assert done.code == 2
    assert done.err.startswith(f"windlass: {message}")
    assert done.err.count("\n") == 1
