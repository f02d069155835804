"""Local workers for tests: real processes, and stand-ins with scripted behaviour.

A stand-in is launched and marked like a worker, and then shows one of the behaviours below instead of
`windlass worker`, where the database does not matter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from support.worker_harness import until
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineRequest, MachineState
from windlass.providers.local import LocalProvider

STAND_IN = '''
import ctypes, json, os, signal, subprocess, sys, time
from pathlib import Path

place, how = Path(os.environ["PLACE"]), os.environ.get("HOW", "wait")

def say(name, text="done"):
    """Write a file that is complete as soon as it exists."""
    (place / f"{name}.new").write_text(str(text))
    (place / f"{name}.new").rename(place / name)

def sleeper(**options):
    return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], **options).pid

def family():
    """A child, one with its own session and no environment, and one that also lost its parent."""
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
from support.stores import PostgresStores
from windlass.control.cycle import FleetCycle
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.providers.local import LocalProvider

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


# An orchestrator that is killed right after the fork.
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


class LocalWorkers:
    """Creates local providers in a folder. At the end it deletes their workers and checks that no process is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        self.identity = uuid4().hex
        self._test_mark = f"TEST_{uuid4().hex}"
        self._providers: list[LocalProvider] = []
        (folder / "stand_in.py").write_text(STAND_IN)
        (folder / "some_handlers.py").write_text(HANDLERS)
        (folder / "leaves_at_import.py").write_text("import sys\nsys.exit('no licence for this model')\n")

    def config(self, how: str = "wait", **settings: Any) -> FleetConfig:
        given = {"handler": "some_handlers:where", "chdir": self.folder, "heartbeat_interval_s": 0.2, **settings}
        path = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH"))))
        env = {"PYTHONPATH": path, "PLACE": str(self.folder), "HOW": how, self._test_mark: "1"}
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

    async def read_file(self, name: str) -> Any:
        """The content of a file that a stand-in writes."""
        text = await until(lambda: read_if_exists(self.folder / name), f"{name} is written")
        return json.loads(text) if name != "bye" else text

    def log(self, worker_id: str) -> str:
        (path,) = self.state_dir.rglob(f"{worker_id}.log")
        return path.read_text()

    def remaining_processes(self) -> list[psutil.Process]:
        """Found by our own mark in the environment, independent of the provider's."""
        found = []
        for process in psutil.process_iter():
            try:
                if self._test_mark in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    async def delete_all(self) -> None:
        try:
            for provider in self._providers:
                for machine in await provider.list_machines():
                    await provider.delete(machine)
                assert await provider.list_machines() == ()
            await until(lambda: not self.remaining_processes(), "no process is left", 5.0)
        finally:
            for process in self.remaining_processes():
                process.kill()
            for log in self.state_dir.rglob("*.log"):
                print(f"--- {log.name}\n{log.read_text()[-4000:]}")


def read_if_exists(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def request_named(name: str) -> MachineRequest:
    return MachineRequest(name=name, fleet="crowd", slot=0)


def pid_of(machine: Machine) -> int:
    return int(machine.id.rpartition("/")[2].partition("-")[0])


def start_script(text: str, given: dict[str, Any]) -> "subprocess.Popen[bytes]":
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen([sys.executable, "-c", text, json.dumps(given)], env={**os.environ, "PYTHONPATH": path})


async def exited(provider: LocalProvider, name: str) -> Machine:
    """The machine, once it is listed as exited."""

    async def find() -> Machine | None:
        machines = [machine for machine in await provider.list_machines() if machine.name == name]
        return next((machine for machine in machines if machine.state is MachineState.EXITED), None)

    found: Machine = await until(find, f"{name} has exited")
    return found
