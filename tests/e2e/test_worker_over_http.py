"""Workers on machines that have no database: real `windlass worker --join` processes and a real server on loopback."""

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
from support.worker_harness import HERE, PROGRAM, QUEUE, Crew, Hand, MortalServer, until
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
from windlass.server import auth as gate
from windlass.server.app import make_app
from windlass.server.context import WorkerApiContext
from windlass.server.long_poll import LongPollHub
from windlass.server.server import listen, serving
from windlass.store.auth import PostgresAuthStore

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
    """The control plane's HTTP face without its loop: this test hires and ends by itself."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.store = PostgresAuthStore(crew.dsn)
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

    async def hire(self, worker_id: str, slot: int = 0) -> Path:
        """What an orchestrator does and a machine is made with: a row, and a join file."""
        token = new_token(JOIN_PREFIX, random.SystemRandom())
        observed = await self.store.observe(ANN, "far", self.fleet)
        assert isinstance(observed, tuple)
        intent = Intent(
            worker_id, slot, "wanted", self.fleet.heartbeat_timeout_s, join_token_hash=hash_of(token), join_ttl_s=600.0
        )
        committed = await self.store.commit_plan(ANN, observed[0], observed[1], Plan((), PlannerState(), "x"), [intent])
        assert committed.granted
        file = self.crew.folder / f"{worker_id}.json"
        url = f"http://127.0.0.1:{self.port}"
        file.write_text(json.dumps({"worker_id": worker_id, "url": url, "join_token": token}))
        return file

    def start(self, file: Path) -> Hand:
        # A worker that reached for a database would find none.
        return self.crew.start_command(
            [PROGRAM, "worker", "--join", file, "--log-format", "json"], {"DATABASE_URL": "postgresql://127.0.0.1:1/x"}
        )

    async def machine(self, worker_id: str = "far-0", slot: int = 0) -> Hand:
        hand = self.start(await self.hire(worker_id, slot))
        await until(lambda: self.is_heard(worker_id), f"a heartbeat of {worker_id}\n{hand.last_lines()}")
        return hand

    async def is_heard(self, worker_id: str) -> bool:
        worker = await self.store.worker(worker_id)
        return worker is not None and worker.last_heartbeat is not None

    async def end(self, worker_id: str) -> None:
        term = await self.store.acquire_lease(ANN)
        assert isinstance(term, int)
        await self.store.commit_outcomes(ANN, term, "far", 0, [Deleted(worker_id, None, "IDLE", "let go")], [], None)


async def plane_over(crew: Crew) -> AsyncIterator[Plane]:
    plane = Plane(crew)
    async with plane.store:
        await plane.open()
        yield plane
        await plane.close()


@pytest.fixture
async def plane(dsn: str, tmp_path: Path) -> AsyncIterator[Plane]:
    async with Crew(dsn, tmp_path) as crew:
        async for plane in plane_over(crew):
            yield plane


def files(crew: Crew, number: int = 1) -> dict[str, str]:
    return {"running": str(crew.folder / f"running-{number}"), "go": str(crew.folder / f"go-{number}")}


async def started(plane: Plane) -> tuple[Hand, int]:
    """A machine in the middle of a task that ends when the file go-1 is there."""
    hand = await plane.machine()
    task_id = await plane.crew.enqueue(files(plane.crew))
    await until((plane.crew.folder / "running-1").exists, f"the handler runs\n{hand.last_lines()}")
    return hand, task_id


async def test_a_machine_joins_works_and_drains_without_a_database(plane: Plane) -> None:
    hand, first = await started(plane)
    second = await plane.crew.enqueue(files(plane.crew, 2))
    hand.send(signal.SIGTERM)
    await until(lambda: '"event": "draining"' in hand.log(), "it was told")
    (plane.crew.folder / "go-1").touch()
    assert await hand.exit_code() == 0
    assert (await plane.crew.complete(first))["attempt"] == 1
    assert (await plane.crew.task(second)).status is TaskStatus.QUEUED
    worker = await plane.store.worker("far-0")
    assert worker is not None
    # Whoever hired it ends it.
    assert (worker.status, worker.code) == (WorkerStatus.TERMINATING, "DEREGISTERED")


async def test_the_fleets_environment_reaches_handlers_and_only_by_the_work_order(plane: Plane) -> None:
    command = """python3 -c "import json, os; print(json.dumps([os.environ['GREETING'], os.getcwd()]))" """
    plane.configure(handler=None, exec=command, env={"GREETING": "a secret"})
    hand = await plane.machine()
    task_id = await plane.crew.enqueue()
    assert await plane.crew.complete(task_id) == ["a secret", str(HERE)]
    assert "a secret" not in hand.log()
    assert "a secret" not in (plane.crew.folder / "far-0.json").read_text()


async def test_a_burst_is_shared_by_several_machines_in_batches(plane: Plane) -> None:
    plane.configure(handler="handlers:inline", is_inline=True, concurrency=20)
    for number in range(2):
        await plane.machine(f"far-{number}", number)
    tasks = [await plane.crew.enqueue({"how": number}) for number in range(300)]
    assert [await plane.crew.complete(task_id) for task_id in tasks] == list(range(300))


async def test_a_restart_of_the_control_plane_costs_no_attempt(plane: Plane) -> None:
    hand, task_id = await started(plane)
    await plane.close()
    await until(lambda: '"event": "heartbeat failed"' in hand.log(), "it has noticed")
    (plane.crew.folder / "go-1").touch()
    await until(lambda: f'"undelivered": [{task_id}]' in hand.log(), "it has a result and nobody to give it to")
    await plane.open()
    assert (await plane.crew.complete(task_id))["attempt"] == 1
    next_id = await plane.crew.enqueue({**files(plane.crew, 2), "go": files(plane.crew)["go"]})
    assert (await plane.crew.complete(next_id))["attempt"] == 1
    assert (await plane.crew.task(next_id)).worker_id == "far-0"


async def test_a_service_that_is_restarted_goes_on_under_its_name(plane: Plane) -> None:
    hand = await plane.machine()
    hand.send(signal.SIGKILL)
    await hand.exit_code()
    file = plane.crew.folder / "far-0.json"
    assert "join_token" not in json.loads(file.read_text())
    plane.configure(handler="handlers:echo")
    again = plane.start(file)
    task_id = await plane.crew.enqueue("hello")
    assert await plane.crew.complete(task_id) == "hello"
    assert (await plane.crew.task(task_id)).worker_id == "far-0"
    assert again.is_running()


async def test_the_attempt_under_which_a_worker_was_killed_counts_when_its_service_is_back(plane: Plane) -> None:
    hand, task_id = await started(plane)
    hand.send(signal.SIGKILL)
    await hand.exit_code()
    plane.configure(handler="handlers:echo")
    plane.start(plane.crew.folder / "far-0.json")
    await plane.crew.complete(task_id)
    task = await plane.crew.task(task_id)
    assert (task.worker_id, task.attempts) == ("far-0", 2)


async def test_a_machine_whose_worker_has_ended_drops_everything_and_exits_with_3(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that the token is refused, and not only the worker.
    monkeypatch.setattr(gate, "IDENTITY_TTL_S", 0.0)
    hand, task_id = await started(plane)
    await plane.end("far-0")
    assert await hand.exit_code() == 3
    task = await plane.crew.task(task_id)
    assert (task.status, task.worker_id) == (TaskStatus.QUEUED, None)
    # And so does a service that starts it again.
    again = plane.start(plane.crew.folder / "far-0.json")
    assert await again.exit_code() == 3
    assert "windlass: asking for the work order: worker far-0 has terminated" in again.log()


async def test_a_join_token_that_was_used_elsewhere_lets_nobody_in(plane: Plane) -> None:
    file = await plane.hire("far-0")
    copy = plane.crew.folder / "stolen.json"
    copy.write_text(file.read_text())
    plane.start(file)
    await until(lambda: plane.is_heard("far-0"), "a heartbeat")
    thief = plane.start(copy)
    assert await thief.exit_code() == 3
    assert "windlass: joining as far-0: the join token of worker far-0 was already used." in thief.log()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"handler": "nosuch:f"}, "cannot import handler nosuch:f: No module named 'nosuch'"),
        ({"chdir": Path("/nosuch")}, "cannot change to /nosuch"),
    ],
)
async def test_a_machine_whose_handler_is_not_there_says_why_and_is_failed_for_it(
    plane: Plane, settings: dict[str, Any], sentence: str
) -> None:
    plane.configure(**settings)
    hand = plane.start(await plane.hire("far-0"))
    assert await hand.exit_code() == 2
    observed = await plane.store.observe(ANN, "far", plane.fleet)
    assert isinstance(observed, tuple)
    (failed,) = [action for action in plan(observed[1], plane.fleet).actions if isinstance(action, Fail)]
    assert (failed.worker_id, failed.code) == ("far-0", "HANDLER_NOT_FOUND")
    assert failed.reason.startswith(sentence)


# ------------------------------------------------------------------------------------------ workers that nobody hired


async def self_register(plane: Plane) -> Hand:
    """`windlass worker --url`, as somebody starts it on a machine of their own."""
    token = new_token(API_PREFIX, random.SystemRandom())
    await plane.store.create_token("anywhere", Role.WORKER, hash_of(token))
    command = [PROGRAM, "worker", "--url", f"http://127.0.0.1:{plane.port}", "--queue", QUEUE, "--chdir", HERE]
    command += ["--handler", "handlers:wait_for_file", "--heartbeat-interval", "0.2", "--log-format", "json"]
    return plane.crew.start_command(command, {"DATABASE_URL": "postgresql://127.0.0.1:1/x", "WINDLASS_TOKEN": token})


async def names(plane: Plane) -> list[str]:
    found = await plane.store.workers()
    return [worker.id for worker in found if worker.last_heartbeat is not None and worker.status is WorkerStatus.ACTIVE]


async def test_a_worker_that_nobody_hired_works_over_http_with_an_api_token(plane: Plane) -> None:
    hand = await self_register(plane)
    first = await plane.crew.enqueue(files(plane.crew))
    await until((plane.crew.folder / "running-1").exists, f"the handler runs\n{hand.last_lines()}")
    (name,) = await until(lambda: names(plane), f"its heartbeat\n{hand.last_lines()}")
    worker = await plane.store.worker(name)
    assert worker is not None
    assert (worker.fleet, worker.slot) == ("default", None)
    # Somebody ends it: like any worker started by hand it joins again, under a new name.
    await plane.store.terminate_worker(name, "by hand")

    async def is_back() -> bool:
        return bool(await names(plane)) and await names(plane) != [name]

    await until(is_back, f"it joins again\n{hand.last_lines()}")
    (plane.crew.folder / "go-1").touch()
    assert (await plane.crew.complete(first))["attempt"] == 2
    (again,) = await names(plane)
    hand.send(signal.SIGTERM)
    assert await hand.exit_code() == 0
    left = await plane.store.worker(again)
    assert left is not None
    assert (left.status, left.code) == (WorkerStatus.TERMINATED, "DEREGISTERED")
    assert "wlt_" not in hand.log().replace("wlt_********", "")


async def test_revoking_the_api_token_ends_the_workers_it_let_in(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "IDENTITY_TTL_S", 0.0)
    hand = await self_register(plane)
    await plane.crew.enqueue(files(plane.crew))
    await until((plane.crew.folder / "running-1").exists, f"the handler runs\n{hand.last_lines()}")
    await plane.store.revoke_token("anywhere")
    assert await hand.exit_code() == 3
    assert "windlass: registering the worker: unknown or revoked token." in hand.log()


# -------------------------------------------------------------------------------------------------------- databases


@pytest.fixture(scope="module")
def server() -> Iterator[MortalServer]:
    with reachable_temp_dir() as folder:
        server = MortalServer(folder)
        yield server
        server.close()


@pytest.fixture
async def mortal_plane(server: MortalServer, tmp_path: Path) -> AsyncIterator[Plane]:
    server.start()
    async with Crew(server.dsn, tmp_path) as crew:
        async for plane in plane_over(crew):
            yield plane
        server.start()


async def test_a_result_waits_for_the_database_behind_the_control_plane(
    server: MortalServer, mortal_plane: Plane
) -> None:
    plane = mortal_plane
    hand, task_id = await started(plane)
    server.end(signal.SIGQUIT)
    await until(lambda: '"event": "heartbeat failed"' in hand.log(), "it has noticed")
    (plane.crew.folder / "go-1").touch()
    await until(lambda: f'"undelivered": [{task_id}]' in hand.log(), "it has a result and nobody to give it to")
    assert hand.is_running()
    server.start()

    async def is_complete() -> bool:
        return (await plane.crew.task(task_id)).status is TaskStatus.COMPLETE

    await until(is_complete, f"the result is delivered\n{hand.last_lines()}")
    task = await plane.crew.task(task_id)
    assert (task.attempts, task.worker_id) == (1, "far-0")


# ---------------------------------------------------------------------------------------------------- the command line

WORK = ("--queue", "q", "--handler", "a:b")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(("--join", "f", "--queue", "q"), "--join brings the work order along", id="a queue too"),
        pytest.param(("--join", "f", "--handler", "a:b"), "--join brings the work order along", id="a handler too"),
        pytest.param(("--join", "missing"), "cannot read the join file missing: No such file", id="no file"),
        pytest.param(("--handler", "a:b"), "a worker needs a queue to serve", id="nothing to serve"),
        pytest.param((*WORK, "--url", "http://192.0.2.1:80000"), "--url has a host or port that", id="no address"),
        pytest.param((*WORK, "--url", "http://example.com"), "--url is http to example.com, where", id="not private"),
        pytest.param((*WORK, "--url", "https://example.com"), "there is no token in WINDLASS_TOKEN", id="no token"),
        pytest.param((*WORK, "--url", "https://e.com", "--token-file", "f"), "the token in f cannot", id="no file"),
        pytest.param((*WORK, "--token-file", "f"), "--token-file goes with --url", id="nowhere to go"),
    ],
)
def test_refused_in_one_sentence(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    done = CommandLine(tmp_path)("worker", *arguments)
    assert done.code == 2
    assert done.err.startswith(f"windlass: {sentence}")
    assert done.err.count("\n") == 1
