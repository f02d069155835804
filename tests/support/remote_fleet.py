"""`windlass up` with simulated remote machines: `python remote_fleet.py FOLDER URL up --port P ...`

Each machine is a local process that has only a join file, like a machine in a cloud. It has no database address and
outlives the control plane that created it.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from windlass.cli.app import main
from windlass.model.machine import Machine, MachineRequest, MachineState, ProviderTraits
from windlass.wiring import providers


class RemoteProvider:
    traits = ProviderTraits(is_remote=True)

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url

    async def create(self, request: MachineRequest) -> Machine:
        home = self._folder / request.name
        home.mkdir(parents=True)
        join = {"worker_id": request.name, "url": self._url, "join_token": request.join_token}
        (home / "join.json").write_text(json.dumps(join))
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-m", "windlass", "worker", "--join", "join.json", "--log-format", "json"],
                cwd=home,
                env={name: value for name, value in os.environ.items() if name != "DATABASE_URL"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (home / "pid").write_text(str(process.pid))
        return Machine(str(process.pid), request.name, MachineState.RUNNING)

    async def list_machines(self) -> tuple[Machine, ...]:
        homes = [home for home in self._folder.glob("*") if (home / "pid").exists()]
        return tuple(self._machine(home) for home in homes)

    def _machine(self, home: Path) -> Machine:
        pid = int((home / "pid").read_text())
        return Machine(str(pid), home.name, MachineState.RUNNING if _is_alive(pid) else MachineState.EXITED)

    async def delete(self, machine: Machine) -> None:
        if _is_alive(int(machine.id)):
            os.killpg(int(machine.id), signal.SIGKILL)
        (self._folder / machine.name / "pid").unlink(missing_ok=True)

    async def close(self) -> None: ...


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    folder, url = Path(sys.argv[1]), sys.argv[2]
    del sys.argv[1:3]

    def provider(_name: str, _fleet: Any, _config: Any, _instance_id: str) -> Any:
        return RemoteProvider(folder, url)

    providers.make_provider = provider
    main()
