"""Runs emulated servers as local processes, from their user_data.

The first boot writes the files of user_data under `<folder>/<server id>/root`, never outside it. Every boot starts the
systemd unit among those files, with paths mapped into that root and output in `<folder>/<server id>/machine.log`.
`/opt/windlass/bin/windlass` is the program that runs the emulator. The environment is as bare as on a real server.
`Restart=` is honoured, within systemd's start limit.
"""

import os
import sys
from pathlib import Path

from windlass_emulators.cloud_init import Disk, File, Unit, UnusableUserData, inside, read_user_data
from windlass_emulators.processes import MAX_STARTS, EmulatedMachine, MachineProgram, Processes, bare_environment

__all__ = ["MAX_STARTS", "ProcessHost", "map_path", "mapped_command", "write_file"]

# Paths of the bootstrap on a real machine -> commands on this host.
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
                machine.note("nothing to run: user_data has no systemd unit")
            else:
                machine.program = lambda: _program(machine.root, unit)
        except (UnusableUserData, OSError) as error:
            machine.note(f"nothing to run: {error}")
        return machine


def write_file(root: Path, file: File) -> None:
    path = root / file.path.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if file.is_appended else os.O_TRUNC)
    # Private from the first byte: the files include join tokens.
    with os.fdopen(os.open(path, flags, 0o600), "wb") as out:
        out.write(file.content)
    # Always readable and writable by the owner: on a real machine root can read and write everything.
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
    """The command with paths that exist under the root mapped into it. Other paths are those of this host."""
    program, *arguments = command
    mapped = _PROGRAMS.get(program) or (map_path(root, program),)
    return [*mapped, *(map_path(root, word) for word in arguments)]


def map_path(root: Path, word: str) -> str:
    """The path under the root if it exists there; any other word unchanged."""
    # Options too: --join=/etc/windlass/join.json.
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
