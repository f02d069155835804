"""Servers as real processes of this host, from what their user_data says.

A server's first boot writes the files of its user_data under `<folder>/<server id>/root` and never outside it; every
boot starts the unit among them with paths mapped into that root, its output in `<folder>/<server id>/machine.log`.
`/opt/windlass/bin/windlass` is this very program, and its environment is bare, as a real one's would be. `Restart=` is
honoured, within systemd's own limit.
"""

import os
import sys
from pathlib import Path

from windlass_emulators.cloud_init import Disk, File, Unit, Unusable, inside, read_user_data
from windlass_emulators.processes import MAX_STARTS, EmulatedMachine, MachineProgram, Processes, bare_environment

__all__ = ["MAX_STARTS", "ProcessHost", "map_path", "mapped_command", "write_file"]

# Where the bootstrap puts them on a real machine, and what they are here.
_PROGRAMS = {
    "/opt/windlass/bin/windlass": (sys.executable, "-m", "windlass"),
    "/opt/windlass/bin/python": (sys.executable,),
    "/opt/windlass/bin/python3": (sys.executable,),
}


class ProcessHost(Processes):
    def start(self, server_id: int, name: str, user_data: str) -> None:
        with self._lock:
            self._start(self._machines.get(server_id) or self._install(server_id, name, user_data))

    def _install(self, server_id: int, name: str, user_data: str) -> EmulatedMachine:
        machine = self._prepare(server_id, name)
        try:
            disk: Disk = read_user_data(user_data)
            for file in disk.files:
                write_file(machine.root, file)
            unit = disk.unit
            if unit is None:
                machine.note("there is no systemd unit in user_data: nothing runs here")
            else:
                machine.program = lambda: _program(machine.root, unit)
        except (Unusable, OSError) as error:
            machine.note(f"{error}: nothing runs here")
        return machine


def write_file(root: Path, file: File) -> None:
    path = root / file.path.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if file.is_appended else os.O_TRUNC)
    # Closed to others from the first byte on: join tokens are among these files.
    with os.fdopen(os.open(path, flags, 0o600), "wb") as out:
        out.write(file.content)
    # Ours to read and write whatever it says: on a real machine root may do so anyway.
    path.chmod(file.mode & 0o700 | 0o600)


def _program(root: Path, unit: Unit) -> MachineProgram:
    environment = bare_environment(root)
    environment.update({name: map_path(root, value) for name, value in unit.environment.items()})
    for path in unit.environment_files:
        environment.update(_read_environment_file(root / inside(path).lstrip("/")))
    return MachineProgram(
        mapped_command(root, unit.command),
        root / unit.working_directory.lstrip("/"),
        environment,
        unit.restarts_on_success,
        unit.restarts_on_failure,
        unit.restart_s,
    )


def mapped_command(root: Path, command: tuple[str, ...]) -> list[str]:
    """As it would run with this root: paths that exist under it are those, others are this host's."""
    program, *arguments = command
    mapped = _PROGRAMS.get(program) or (map_path(root, program),)
    return [*mapped, *(map_path(root, word) for word in arguments)]


def map_path(root: Path, word: str) -> str:
    """The path under this root, if it exists there; any other word as it is."""
    # Also as in --join=/etc/windlass/join.json.
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    if not value.startswith("/"):
        return word
    path = root / inside(value).lstrip("/")
    return f"{option}{equals}{path}" if path.exists() else word


def _read_environment_file(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = [line.partition("=") for line in lines if not line.lstrip().startswith(("#", ";"))]
    return {name.strip(): value.strip().strip("\"'") for name, equals, value in pairs if equals}
