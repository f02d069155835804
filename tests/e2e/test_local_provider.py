"""Workers as real processes of this host: how they start, crash, are found again, and end without a trace.

Where the database is not the point, a stand-in takes the worker's place: the same launch, the same marks, and then one
of the behaviours below instead of `windlass worker`.
"""

import asyncio
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from support.stores import PostgresStores
from support.worker_harness import is_alive, until
from windlass.control.cycle import FleetCycle
from windlass.model.config import Config
from windlass.model.errors import BadInput, Refused
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.machine import Machine, MachineRequest, MachineState
from windlass.model.task import TaskStatus, new_task
from windlass.model.worker import Worker, WorkerStatus
from windlass.providers.local import LocalProvider
from windlass.providers.local.logs import MAX_KEPT_LOGS, MAX_LOG_BYTES
from windlass.providers.local.processes import Process, ProcFs, send_signal
from windlass.providers.local.provider import children
from windlass.providers.local.spawn import MARK
from windlass.wiring import stores

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")

STAND_IN = '''
import ctypes, json, os, signal, subprocess, sys, time
from pathlib import Path

place, how = Path(os.environ["PLACE"]), os.environ.get("HOW", "wait")

def say(name, text="done"):
    """A file that is whole as soon as it is there."""
    (place / f"{name}.new").write_text(str(text))
    (place / f"{name}.new").rename(place / name)

def sleeper(**options):
    return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], **options).pid

def family():
    """A child, one that made a session of its own and forgot its environment, and one that lost its parent too."""
    daemon = "import os\\nif os.fork() == 0:\\n os.setsid()\\n print(os.getpid(), flush=True)\\n os.close(1)\\n" \\
             " import signal; signal.pause()"
    lost = subprocess.run([sys.executable, "-c", daemon], stdout=subprocess.PIPE, check=True)
    pids = [sleeper(), sleeper(env={}, start_new_session=True), sleeper(env={}), int(lost.stdout)]
    say("family", json.dumps(pids))

if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    family()
elif how == "leaves a family":
    family()
elif how == "polite":
    def bye(*_):
        print("goodbye", flush=True)
        say("bye")
        sys.exit(0)
    signal.signal(signal.SIGTERM, bye)
elif how == "segfault":
    ctypes.string_at(0)
elif how == "exit":
    sys.exit("cannot go on: no model")
elif how == "chatter":
    line = "x" * 99
    while not (place / "quiet").exists():
        for _ in range(10_000):
            print(line)
        sys.stdout.flush()
    print("the last line", flush=True)
elif how == "forget":
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    with open("/proc/self/mem", "r+b", 0) as memory:
        memory.seek(start)
        memory.write(bytes(end - start))
elif how in ("fork", "fork with a session"):
    if os.fork() == 0:
        if how != "fork":
            os.setsid()
        say("fork", os.getpid())
        signal.pause()
say("up", json.dumps({"pid": os.getpid(), "cwd": os.getcwd(), "argv": sys.argv[1:], "env": dict(os.environ)}))
while True:
    signal.pause()
'''

ORCHESTRATOR = """
import asyncio, json, os, random, sys
from pathlib import Path
from windlass.control.cycle import FleetCycle
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.providers.local import LocalProvider
from windlass.store.control import PostgresStores

async def main():
    given = json.loads(sys.argv[1])
    dsn, state_dir, config = given["dsn"], Path(given["state_dir"]), FleetConfig(**given["fleet"])
    provider = LocalProvider(
        "crowd", config, identity=given["identity"], state_dir=state_dir, database_url=dsn
    )
    async with PostgresStores(dsn) as store:
        cycle = FleetCycle("crowd", config, store, provider, Candidate("first", ttl_s=2.0), random.Random())
        while True:
            await cycle.run()
            await asyncio.sleep(0.1)

asyncio.run(main())
"""

# Dies after the fork and before anything else is done about it.
SHORT_LIVED = """
import asyncio, json, os, signal, sys
from pathlib import Path
from windlass.model.fleet import FleetConfig
from windlass.model.machine import MachineRequest
from windlass.providers.local import LocalProvider
from windlass.providers.local.processes import ProcFs

class Death(ProcFs):
    is_near = False

    def pids(self):
        self.is_near = True
        return super().pids()

    def read(self, pid):
        if self.is_near and super().read(pid).parent_pid == os.getpid():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(pid)

given = json.loads(sys.argv[1])
provider = LocalProvider(
    "crowd", FleetConfig(**given["fleet"]), identity=given["identity"], state_dir=Path(given["state_dir"]),
    program=["stand_in"], table=Death(),
)
asyncio.run(provider.create(MachineRequest("crowd-0-aa", "crowd", 0)))
"""

HANDLERS = """
import os, subprocess, sys, time
from pathlib import Path

def where(task):
    return {"cwd": os.getcwd(), "colour": os.environ.get("COLOUR"), "worker": os.environ.get("WINDLASS_WORKER_ID")}

async def where_inline(task):
    return where(task)

def long(task):
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    Path(task.payload).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
"""


class Ground:
    """A place for local workers, and proof that none of them is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        self.identity = uuid4().hex
        self._badge = f"GROUND_{uuid4().hex}"
        self._providers: list[LocalProvider] = []
        (folder / "stand_in.py").write_text(STAND_IN)
        (folder / "some_handlers.py").write_text(HANDLERS)
        (folder / "leaves_at_import.py").write_text("import sys\nsys.exit('no licence for this model')\n")

    def config(self, how: str = "wait", **settings: Any) -> FleetConfig:
        given = {"handler": "some_handlers:where", "chdir": self.folder, "heartbeat_interval_s": 0.2, **settings}
        path = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH"))))
        env = {"PYTHONPATH": path, "PLACE": str(self.folder), "HOW": how, self._badge: "1"}
        return FleetConfig(**{**given, "env": {**env, **settings.get("env", {})}})

    def provider(self, how: str = "wait", *, stop_grace_s: float = 10.0, **settings: Any) -> LocalProvider:
        return self._add(
            LocalProvider(
                "crowd",
                self.config(how, **settings),
                identity=self.identity,
                state_dir=self.state_dir,
                program=["stand_in"],
                stop_grace_s=stop_grace_s,
            )
        )

    def real_provider(self, dsn: str, **settings: Any) -> LocalProvider:
        return self._add(
            LocalProvider(
                "crowd",
                self.config(**settings),
                identity=self.identity,
                state_dir=self.state_dir,
                database_url=dsn,
            )
        )

    def _add(self, provider: LocalProvider) -> LocalProvider:
        self._providers.append(provider)
        return provider

    async def said(self, name: str) -> Any:
        """What a stand-in wrote there."""
        text = await until(lambda: _text(self.folder / name), f"{name} is said")
        return json.loads(text) if name != "bye" else text

    def log(self, worker_id: str) -> str:
        (path,) = self.state_dir.rglob(f"{worker_id}.log")
        return path.read_text()

    def remains(self) -> list[psutil.Process]:
        """By our own badge, not the provider's mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if self._badge in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    async def clear(self) -> None:
        try:
            for provider in self._providers:
                for machine in await provider.list_machines():
                    await provider.delete(machine)
                assert await provider.list_machines() == ()
            await until(lambda: not self.remains(), f"nothing is left, but {self.remains()}", 5.0)
        finally:
            for process in self.remains():
                process.kill()
            for log in self.state_dir.rglob("*.log"):
                print(f"--- {log.name}\n{log.read_text()[-4000:]}")


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


@pytest.fixture
async def ground(tmp_path: Path) -> AsyncIterator[Ground]:
    made = Ground(tmp_path)
    yield made
    await made.clear()


def named(name: str) -> MachineRequest:
    return MachineRequest(name=name, fleet="crowd", slot=0)


def pid_of(machine: Machine) -> int:
    return int(machine.id.rpartition("/")[2].partition("-")[0])


def start_script(text: str, given: dict[str, Any]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", text, json.dumps(given)])


async def exited(provider: LocalProvider, name: str) -> Machine:
    """The machine, once it is listed as exited."""

    async def find() -> Machine | None:
        machines = [machine for machine in await provider.list_machines() if machine.name == name]
        return next((machine for machine in machines if machine.state is MachineState.EXITED), None)

    found: Machine = await until(find, f"{name} has exited")
    return found


# --------------------------------------------------------------------------------------------------------- beginning


async def test_worker_gets_the_settings_of_its_fleet(ground: Ground) -> None:
    folder = ground.folder / "work"
    folder.mkdir()
    provider = ground.provider(
        queues=("renders", "thumbs"), concurrency=3, chdir=folder, heartbeat_timeout_s=7.5, env={"COLOUR": "blue"}
    )
    await provider.create(named("crowd-0-aa"))
    up = await ground.said("up")
    expected = "--queue renders --queue thumbs --handler some_handlers:where"
    expected += f" --chdir {folder} --concurrency 3 --heartbeat-interval 0.2 --lease 7.5 --config /dev/null"
    assert " ".join(up["argv"]) == expected
    assert up["env"]["COLOUR"] == "blue"
    assert (up["env"]["WINDLASS_WORKER_ID"], up["env"]["WINDLASS_FLEET"]) == ("crowd-0-aa", "crowd")
    assert up["env"]["WINDLASS_WORKER__DRAIN_TIMEOUT_S"] == "30"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"exec": "convert - out.png", "handler": None, "env": {"PATH": "/"}}, "--exec convert - out.png"),
        ({"is_inline": True}, "--inline"),
    ],
    ids=["a command", "an inline handler"],
)
async def test_worker_runs_the_configured_program(ground: Ground, settings: dict[str, Any], expected: str) -> None:
    command = ground.folder / "convert"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    settings = {**settings, "env": {"PATH": f"{ground.folder}:{os.environ['PATH']}"}}
    await ground.provider(**settings).create(named("crowd-0-aa"))
    assert expected in " ".join((await ground.said("up"))["argv"])


async def test_worker_leads_its_own_session(ground: Ground) -> None:
    pid = pid_of(await ground.provider().create(named("crowd-0-aa")))
    assert os.getsid(pid) == os.getpgid(pid) == pid


async def test_worker_environment_has_settings_but_no_secrets(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNPOD_API_KEY", "WINDLASS_RUNPOD_API_KEY", "SUPABASE_SERVICE_ROLE_KEY", "MODEL_DIR"):
        monkeypatch.setenv(name, "ours")
    monkeypatch.setenv("WINDLASS_WORKER__TIMEOUT_S", "1")
    provider = ground._add(
        LocalProvider(
            "crowd",
            ground.config(env={"SUPABASE_SERVICE_ROLE_KEY": "theirs"}),
            identity=ground.identity,
            state_dir=ground.state_dir,
            settings={"WINDLASS_WORKER__TIMEOUT_S": "7"},
            withheld=["RUNPOD_API_KEY", "WINDLASS_RUNPOD_API_KEY", "SUPABASE_SERVICE_ROLE_KEY"],
            program=["stand_in"],
        )
    )
    await provider.create(named("crowd-0-aa"))
    env = (await ground.said("up"))["env"]
    assert (env["MODEL_DIR"], env["WINDLASS_WORKER__TIMEOUT_S"]) == ("ours", "7")
    assert "RUNPOD_API_KEY" not in env
    assert "WINDLASS_RUNPOD_API_KEY" not in env
    assert env["SUPABASE_SERVICE_ROLE_KEY"] == "theirs", "what a fleet's env says is meant for its workers"


async def test_process_of_another_host_is_not_touched(ground: Ground) -> None:
    """It was started by an orchestrator there; its pid here, if there is one, is somebody else."""
    provider = ground.provider()
    machine = await provider.create(named("crowd-0-aa"))
    host, _, process = machine.id.partition("/")
    assert provider.traits.host == host
    await provider.delete(replace(machine, id=f"other-{host}/{process}"))
    assert is_alive(pid_of(machine))


async def test_command_line_contains_no_password(ground: Ground) -> None:
    url = "postgresql://somebody:s3cret@db.example/tasks"
    provider = ground._add(
        LocalProvider(
            "crowd",
            ground.config(),
            identity=ground.identity,
            state_dir=ground.state_dir,
            database_url=url,
            program=["stand_in"],
        )
    )
    machine = await provider.create(named("crowd-0-aa"))
    assert (await ground.said("up"))["env"]["WINDLASS_WORKER_DATABASE_URL"] == url
    assert "s3cret" not in " ".join(psutil.Process(pid_of(machine)).cmdline())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chdir": Path("/no/such/folder")}, "folder /no/such/folder not found. Check chdir of fleet crowd"),
        ({"chdir": Path("/etc/hostname")}, "folder /etc/hostname not found"),
        ({"handler": None, "exec": "no-such-command --fast"}, "command 'no-such-command' not found"),
        ({"handler": None, "exec": "./not-here"}, "command './not-here' not found"),
        ({"handler": None, "exec": "sh 'unfinished"}, "(No closing quotation)"),
        ({"handler": None}, "neither handler nor exec"),
        ({"env": {"A=B": "1"}}, "Check env"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_impossible_start_is_refused(ground: Ground, settings: dict[str, Any], message: str) -> None:
    provider = ground.provider(**settings)
    with pytest.raises(Refused) as refusal:
        await provider.create(named("crowd-0-aa"))
    assert str(refusal.value).startswith("creating worker crowd-0-aa: ")
    assert message in str(refusal.value)
    assert await provider.list_machines() == ()
    assert not list(ground.state_dir.rglob("*.log"))


async def test_create_does_not_block_the_event_loop(ground: Ground) -> None:
    has_turned = threading.Event()

    class WaitingTable(ProcFs):
        def pids(self) -> list[int]:
            assert has_turned.wait(10), "the loop stood still"
            return super().pids()

    provider = ground.provider()
    provider._table = WaitingTable()
    asyncio.get_running_loop().call_soon(has_turned.set)
    await provider.create(named("crowd-0-aa"))


# ------------------------------------------------------------------------------------------------------- real workers


COMMAND = (
    """import json, os; print(json.dumps([os.getcwd(), *map(os.environ.get, ["COLOUR", "WINDLASS_WORKER_ID"])]))"""
)


@pytest.mark.parametrize(
    "runs",
    [
        {"handler": "some_handlers:where"},
        {"handler": "some_handlers:where_inline", "is_inline": True},
        {"handler": None, "exec": shlex.join([sys.executable, "-c", COMMAND])},
    ],
    ids=["a handler", "an inline handler", "a command"],
)
async def test_spawned_worker_runs_tasks_under_its_given_id(ground: Ground, dsn: str, runs: dict[str, Any]) -> None:
    provider = ground.real_provider(dsn, env={"COLOUR": "green"}, **runs)
    async with PostgresStores(dsn) as store:
        task_id = await store.enqueue(new_task("default", None))
        machine = await provider.create(named("crowd-0-aa"))
        task = await until(lambda: _complete(store, task_id), "the task is complete")
        result = json.loads(task.result)
        # Its name is for the worker alone.
        assert list(result.values() if "exec" not in runs else result) == [str(ground.folder), "green", None]
        (row,) = await store.workers()
        assert (row.id, row.fleet, row.pid, row.lease_s) == ("crowd-0-aa", "crowd", pid_of(machine), 30.0)
        await provider.delete(machine)
        # Asked politely, it left in good order.
        (row,) = await store.workers(include_terminated=True)
        assert row.status is WorkerStatus.TERMINATED
        assert not is_alive(pid_of(machine))


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU here")
async def test_gpu_worker_claims_nothing_on_a_host_without_gpu(ground: Ground, dsn: str) -> None:
    provider = ground.real_provider(dsn, has_gpu=True)
    async with PostgresStores(dsn) as store:
        task_id = await store.enqueue(new_task("default", None))
        machine = await provider.create(named("crowd-0-aa"))

        async def says_so() -> bool:
            return any(worker.vram_total_mb == 0 for worker in await store.workers())

        await until(says_so, "its heartbeat says that there is no GPU")
        assert "claiming stopped: no GPU found" in ground.log("crowd-0-aa")
        await provider.delete(machine)
        task = await store.task(task_id)
        assert task is not None
        assert (task.status, task.attempts) == (TaskStatus.QUEUED, 0)


async def test_worker_uses_the_embedded_database_of_its_orchestrator(ground: Ground, embedded_server: Any) -> None:
    data_dir = embedded_server.socket_dir.parent
    provider = ground._add(
        LocalProvider(
            "crowd",
            ground.config(queues=[ground.identity]),
            identity=ground.identity,
            state_dir=ground.state_dir,
            data_dir=data_dir,
        )
    )
    async with stores.store(Config(data_dir=data_dir)) as store:
        task_id = await store.enqueue(new_task(ground.identity, None))
        machine = await provider.create(named("crowd-0-aa"))
        await until(lambda: _complete(store, task_id), "the task is complete")
        await provider.delete(machine)


async def test_handler_that_exits_at_import_is_reported(ground: Ground, dsn: str) -> None:
    provider = ground.real_provider(dsn, handler="leaves_at_import:handler")
    await provider.create(named("crowd-0-aa"))
    found = await exited(provider, "crowd-0-aa")
    says = "windlass: cannot import handler leaves_at_import:handler: SystemExit: no licence for this model"
    assert (found.note or "").startswith(f"its process exited with code 2; last log line: {says}")


async def test_delete_ends_the_handler_and_its_children(ground: Ground, dsn: str) -> None:
    provider = ground.real_provider(dsn, handler="some_handlers:long", stop_timeout_s=60)
    async with PostgresStores(dsn) as store:
        task_id = await store.enqueue(new_task("default", str(ground.folder / "running")))
        machine = await provider.create(named("crowd-0-aa"))
        pids = await until(lambda: _text(ground.folder / "running"), "the task runs")
        await provider.delete(machine)
        assert not any(is_alive(int(pid)) for pid in [*pids.split(), pid_of(machine)])
        # It was given back at once, and does not wait for the lease to run out.
        task = await store.task(task_id)
        assert task is not None
        assert task.status is TaskStatus.QUEUED


async def test_processes_of_a_killed_worker_are_deleted(ground: Ground, dsn: str) -> None:
    provider = ground.real_provider(dsn, handler="some_handlers:long")
    async with PostgresStores(dsn) as store:
        await store.enqueue(new_task("default", str(ground.folder / "running")))
        machine = await provider.create(named("crowd-0-aa"))
        pids = await until(lambda: _text(ground.folder / "running"), "the task runs")
        os.kill(pid_of(machine), signal.SIGKILL)
        # The worker's own guard sees to its handler; no orchestrator need be there.
        await until(lambda: not any(is_alive(int(pid)) for pid in pids.split()), "the handler is gone")
        found = await exited(provider, "crowd-0-aa")
        assert (found.note or "").startswith("its process was killed by SIGKILL (out of memory?)")


async def _complete(store: PostgresStores, task_id: int) -> Any:
    task = await store.task(task_id)
    return task if task is not None and task.status is TaskStatus.COMPLETE else None


# ------------------------------------------------------------------------------------------------------------ crashes


@pytest.mark.parametrize(
    ("how", "note"),
    [
        ("exit", "its process exited with code 1; last log line: cannot go on: no model"),
        ("segfault", "its process was killed by SIGSEGV; last log line: Fatal Python error: Segmentation fault"),
    ],
)
async def test_crash_is_reported_with_its_reason(ground: Ground, how: str, note: str) -> None:
    provider = ground.provider(how)
    created = await provider.create(named("crowd-0-aa"))
    found = await exited(provider, "crowd-0-aa")
    assert (found.id, found.note) == (created.id, note)
    # Reaped: nothing of it is in the process table any more.
    assert not psutil.pid_exists(pid_of(created))


async def test_crash_is_listed_until_the_machine_is_deleted(ground: Ground) -> None:
    provider = ground.provider("exit")
    await provider.create(named("crowd-0-aa"))
    found = await exited(provider, "crowd-0-aa")
    assert await provider.list_machines() == (found,)
    await provider.delete(found)
    assert await provider.list_machines() == ()


async def test_crash_is_listed_for_a_limited_time(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = ground.provider("exit")
    await provider.create(named("crowd-0-aa"))
    await exited(provider, "crowd-0-aa")
    monkeypatch.setattr("windlass.providers.local.provider.EXITED_LISTED_S", 0.0)
    assert await provider.list_machines() == ()


async def test_end_of_an_adopted_worker_is_reported(ground: Ground) -> None:
    machine = await ground.provider().create(named("crowd-0-aa"))
    await ground.said("up")
    adopter = ground.provider()
    assert [found.id for found in await adopter.list_machines()] == [machine.id]
    # As if the process that started it were another one than ours.
    child = children.pop(machine.id)
    child.kill()
    child.wait()
    note = (await exited(adopter, "crowd-0-aa")).note
    assert note == "its process is gone; its exit code is known only to the orchestrator that started it"


# ---------------------------------------------------------------------------------------------------- found again


async def test_new_orchestrator_adopts_workers_of_a_killed_one(ground: Ground, dsn: str) -> None:
    fleet = {"queues": ("default",), "min_workers": 2, "max_workers": 2, "poll_interval_s": 0.1}
    config = ground.config(**fleet)
    given = {
        "identity": ground.identity,
        "dsn": dsn,
        "state_dir": str(ground.state_dir),
        "fleet": config.model_dump(mode="json"),
    }
    first = start_script(ORCHESTRATOR, given)
    provider = ground.real_provider(dsn, **fleet)
    try:
        async with PostgresStores(dsn) as store:

            async def active() -> list[Worker]:
                return [row for row in await store.workers() if row.status is WorkerStatus.ACTIVE]

            before = await until(lambda: _if_two(active), "two workers are active")
            first.kill()
            first.wait()
            # Its workers do not notice, and its successor finds them.
            listed = {machine.name: pid_of(machine) for machine in await provider.list_machines()}
            assert listed == {row.id: row.pid for row in before}
            second = FleetCycle("crowd", config, store, provider, Candidate("second", ttl_s=2.0), random.Random(1))  # noqa: S311
            await until(lambda: _leads(second), "the second one leads")
            for _ in range(3):
                await second.run()
            assert [(row.id, row.pid) for row in await active()] == [(row.id, row.pid) for row in before]
            assert len(await store.workers(include_terminated=True)) == 2

            # And it replaces one that dies, though it is not its child.
            os.kill(listed[before[0].id], signal.SIGKILL)
            after = await until(lambda: _replaced(second, active, before[0].id), "the dead one is replaced")
            assert before[1].id in {row.id for row in after}
    finally:
        first.kill()
        first.wait()


async def _if_two(active: Callable[[], Any]) -> Any:
    rows = await active()
    return rows if len(rows) == 2 else None


async def _leads(cycle: FleetCycle) -> bool:
    return (await cycle.run()).is_leader


async def _replaced(cycle: FleetCycle, active: Callable[[], Any], lost: str) -> Any:
    await cycle.run()
    rows = await active()
    return rows if len(rows) == 2 and lost not in {row.id for row in rows} else None


async def test_worker_is_found_if_its_orchestrator_dies_after_the_fork(ground: Ground) -> None:
    given = {
        "identity": ground.identity,
        "state_dir": str(ground.state_dir),
        "fleet": ground.config().model_dump(mode="json"),
    }
    provider = ground.provider()
    assert start_script(SHORT_LIVED, given).wait(30) == -signal.SIGKILL

    async def find() -> tuple[Machine, ...]:
        return await provider.list_machines()

    (found,) = await until(find, "the process is found")
    up = await ground.said("up")
    assert (found.name, pid_of(found)) == ("crowd-0-aa", up["pid"])
    # Asked for again, it is the same one.
    assert (await provider.create(named("crowd-0-aa"))).id == found.id


async def test_orphaned_children_of_a_dead_worker_are_deleted(ground: Ground) -> None:
    creator = ground.provider("leaves a family")
    machine = await creator.create(named("crowd-0-aa"))
    family = await ground.said("family")
    await ground.said("up")
    os.kill(pid_of(machine), signal.SIGKILL)
    await exited(creator, "crowd-0-aa")
    # An orchestrator that never knew the worker: only its family is there.
    provider = ground.provider()
    (found,) = await provider.list_machines()
    assert (found.name, found.state) == ("crowd-0-aa", MachineState.EXITED)
    assert "2 of its processes still run" in (found.note or "")
    await provider.delete(found)
    child, apart, in_session, lost = family
    assert not any(is_alive(pid) for pid in (child, lost))
    # Out of reach, as documented: without environment, and their parent is gone. Here we know them.
    for pid in (apart, in_session):
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["fork", "fork with a session"])
async def test_fork_of_a_worker_is_not_listed_as_a_machine(ground: Ground, how: str) -> None:
    """Every process that a worker starts is such a fork for a moment."""
    provider = ground.provider(how)
    machine = await provider.create(named("crowd-0-aa"))
    fork = await ground.said("fork")
    assert [found.id for found in await provider.list_machines()] == [machine.id]
    assert [found.id for found in await ground.provider().list_machines()] == [machine.id]
    await provider.delete(machine)
    assert not is_alive(fork)


async def test_worker_that_overwrites_its_environment_stays_listed(ground: Ground) -> None:
    provider = ground.provider("forget")
    machine = await provider.create(named("crowd-0-aa"))
    await ground.said("up")
    assert MARK.encode() not in (ProcFs().environment(pid_of(machine)) or b"")
    assert [found.id for found in await provider.list_machines()] == [machine.id]
    await provider.delete(machine)
    assert not is_alive(pid_of(machine))


async def test_duplicate_worker_is_listed_and_deleted_alone(ground: Ground) -> None:
    class Blind(ProcFs):
        def pids(self) -> list[int]:
            return []

    provider = ground.provider()
    first = await provider.create(named("crowd-0-aa"))
    blind = ground.provider()
    blind._table = Blind()
    blind._logs.discard("crowd-0-aa")
    second = await blind.create(named("crowd-0-aa"))
    assert {machine.id for machine in await provider.list_machines()} == {first.id, second.id}
    await provider.delete(second)
    assert [machine.id for machine in await provider.list_machines()] == [first.id]
    assert is_alive(pid_of(first))


# --------------------------------------------------------------------------------------------------------------- ends


async def test_delete_sends_sigterm_first(ground: Ground) -> None:
    provider = ground.provider("polite")
    machine = await provider.create(named("crowd-0-aa"))
    await ground.said("up")
    await provider.delete(machine)
    assert await ground.said("bye") == "done"
    assert await provider.list_machines() == ()


async def test_worker_that_ignores_sigterm_is_killed_with_its_children(ground: Ground) -> None:
    provider = ground.provider("stubborn", stop_grace_s=0.2)
    machine = await provider.create(named("crowd-0-aa"))
    family = await ground.said("family")
    await ground.said("up")
    assert all(is_alive(pid) for pid in family)
    await provider.delete(machine)
    assert [pid for pid in [pid_of(machine), *family] if is_alive(pid)] == []


async def test_children_of_a_terminated_worker_are_killed(ground: Ground) -> None:
    provider = ground.provider("leaves a family")
    machine = await provider.create(named("crowd-0-aa"))
    family = await ground.said("family")
    await provider.delete(machine)
    assert [pid for pid in family if is_alive(pid)] == []


async def test_stopped_worker_is_deleted(ground: Ground) -> None:
    provider = ground.provider(stop_grace_s=0.1)
    machine = await provider.create(named("crowd-0-aa"))
    os.kill(pid_of(machine), signal.SIGSTOP)
    assert [found.state for found in await provider.list_machines()] == [MachineState.RUNNING]
    await provider.delete(machine)
    assert not is_alive(pid_of(machine))


async def test_reused_pid_is_not_signalled(ground: Ground) -> None:
    provider = ground.provider()
    machine = await provider.create(named("crowd-0-aa"))
    process, _, started = machine.id.rpartition("-")
    pid, earlier = pid_of(machine), int(started) - 1
    await provider.delete(replace(machine, id=f"{process}-{earlier}"))
    send_signal(ProcFs(), Process(pid, earlier, os.getpid(), pid, is_zombie=False), signal.SIGKILL)
    assert is_alive(pid)
    assert [found.id for found in await provider.list_machines()] == [machine.id]


# --------------------------------------------------------------------------------------------------------------- logs


async def test_log_size_is_bounded(ground: Ground) -> None:
    provider = ground.provider("chatter")
    await provider.create(named("crowd-0-aa"))
    log = provider._logs.path_of("crowd-0-aa")
    aside = log.with_name(f"{log.name}.1")
    await until(lambda: aside.exists() and aside.stat().st_size, "the log is put aside once")
    (ground.folder / "quiet").touch()
    await ground.said("up")
    await until(lambda: log.stat().st_size <= MAX_LOG_BYTES, "the log is short again")
    assert aside.stat().st_size <= MAX_LOG_BYTES
    assert sorted(path.name for path in log.parent.iterdir()) == [log.name, aside.name]
    # Read across both files.
    lines = [line async for line in provider._logs.read("crowd-0-aa", 1000)]
    assert len(lines) == 1000
    assert lines[-1] == "the last line"


async def test_log_can_be_followed_until_the_worker_ends(ground: Ground) -> None:
    provider = ground.provider("polite")
    machine = await provider.create(named("crowd-0-aa"))
    await ground.said("up")

    async def follow() -> list[str]:
        return [line async for line in provider._logs.read("crowd-0-aa", 100, follow=True)]

    following = asyncio.create_task(follow())
    await provider.delete(machine)
    assert (await asyncio.wait_for(following, 10))[-1] == "goodbye"


async def test_log_of_a_terminated_worker_can_be_read(ground: Ground) -> None:
    provider = ground.provider("exit")
    await provider.create(named("crowd-0-aa"))
    await exited(provider, "crowd-0-aa")
    assert [line async for line in ground.provider()._logs.read("crowd-0-aa", 1)] == ["cannot go on: no model"]


async def test_worker_without_a_log_is_unknown(ground: Ground) -> None:
    with pytest.raises(BadInput, match="no log of worker crowd-9-zz on this host"):
        [line async for line in ground.provider()._logs.read("crowd-9-zz", 100)]


async def test_old_logs_are_removed_unless_in_use(ground: Ground) -> None:
    provider = ground.provider()
    folder = ground.state_dir / "logs" / "crowd"
    folder.mkdir(parents=True)
    for number in range(MAX_KEPT_LOGS + 5):
        for name in (f"old-{number:03}.log", f"old-{number:03}.log.1"):
            (folder / name).write_text("old")
            os.utime(folder / name, (number + 1, number + 1))
    await provider.create(named("crowd-0-aa"))
    in_use = provider._logs.path_of("crowd-0-aa")
    os.utime(in_use, (0, 0))
    await provider.list_machines()
    left = sorted(path.name for path in folder.glob("*.log"))
    assert left == [in_use.name, *(f"old-{number:03}.log" for number in range(5, MAX_KEPT_LOGS + 5))]
    assert len(list(folder.iterdir())) == 2 * MAX_KEPT_LOGS + 1
