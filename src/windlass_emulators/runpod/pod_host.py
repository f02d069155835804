"""Pods as real processes of this host: the image's program, an OpenSSH server, and hardware that is read from a file.

What a pod runs is decided by what a real one would be told:
- `args`, if there are any, are its program: they stand for the entrypoint and its arguments;
- else, with WINDLASS_JOIN in its environment (or WINDLASS_URL, WINDLASS_WORKER_ID and WINDLASS_JOIN_TOKEN), it is an
  image that runs the worker: `windlass worker --join /etc/windlass/join.json`;
- an image of Runpod's own (`runpod/…`) runs no worker by itself, as in the cloud: somebody logs in and starts one.

With `22/tcp` among its ports and a PUBLIC_KEY in its environment it answers SSH, on a port of 127.0.0.1 that is another
at every start, with a host key that is as new as its disk. Every start is on an empty disk; a persistent mount and
network volumes keep what is in them.
"""

import contextlib
import json
import os
import pwd
import shlex
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windlass_emulators.cloud_init import File, inside
from windlass_emulators.process_host import map_path, mapped_command, write_file
from windlass_emulators.processes import STOP_GRACE_S, EmulatedMachine, MachineProgram, Processes, bare_environment
from windlass_emulators.runpod.containers import LOOPBACK, SSH_PORT, Container, ContainerLogLine

HARDWARE = Path(__file__).parent / "hardware"
JOIN_FILE = "/etc/windlass/join.json"
DRIVER = "570.86.15"
OFFICIAL_PREFIX = "runpod/"
KEYGEN_TIMEOUT_S = 20.0
# What a fresh container's system takes of its disk, and a loaded driver of a GPU's memory.
SYSTEM_GB, DRIVER_MB = 2.0, 4
MAX_LOG_LINES = 5_000
_JOIN_PARTS = {"worker_id": "WINDLASS_WORKER_ID", "url": "WINDLASS_URL", "join_token": "WINDLASS_JOIN_TOKEN"}
# An image's start script puts them into a file and takes them out of the environment.
_JOIN_VARIABLES = ("WINDLASS_JOIN", *_JOIN_PARTS.values())
# Where sshd is that is not in a user's PATH.
_SSHD_PLACES = os.pathsep.join(("/usr/sbin", "/usr/local/sbin", "/sbin"))
# It insists, when it is root.
_SSHD_EMPTY_FOLDER = Path("/run/sshd")
_SFTP_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server")

_SSHD_CONFIG = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
AllowUsers {user}
PermitRootLogin prohibit-password
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
AllowTcpForwarding no
AllowAgentForwarding no
X11Forwarding no
PrintMotd no
LogLevel VERBOSE
# Nothing in the home of whoever runs the emulator takes part.
SetEnv "HOME={home}"
ForceCommand {command}
"""


def find_sshd() -> str | None:
    """OpenSSH's server, if this host has it."""
    return shutil.which("sshd") or shutil.which("sshd", path=_SSHD_PLACES)


class RealPodHost(Processes):
    address = LOOPBACK

    def __init__(self, folder: Path | None = None, stop_grace_s: float = STOP_GRACE_S) -> None:
        super().__init__(folder, stop_grace_s)
        # On a real pod it is root. Here it is whoever runs the emulator, and the API says so.
        self.user = pwd.getpwuid(os.geteuid()).pw_name
        self._shell = shutil.which("bash") or "/bin/sh"

    # ------------------------------------------------------------------------------------------- the contract

    def start(self, container: Container) -> Mapping[int, int]:
        with self._lock:
            if (old := self._machines.get(container.pod_id)) is not None:
                self._end_now(old)
            machine = self._prepare(container.pod_id, container.name)
            # Bound here, so that nobody else gets the port; it refuses, until the pod listens.
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
                listener.bind((LOOPBACK, 0))
                ssh_port: int = listener.getsockname()[1]
                try:
                    settings = self._furnish(machine, container)
                    machine.program = lambda: _first_process(machine, settings, listener.fileno())
                    self._start(machine)
                except OSError as error:
                    machine.note(f"{error}: nothing runs here")
            return {port: ssh_port if port == SSH_PORT else port for port in container.tcp_ports}

    def refit(self, container: Container) -> None:
        with self._lock:
            if (machine := self._machines.get(container.pod_id)) is not None:
                _write_hardware(machine, container, self._folders(machine, container))

    def erase(self, machine_id: int | str) -> None:
        with self._lock:
            super().erase(machine_id)
            # Its log stays, its own disk does not.
            shutil.rmtree(self._persistent(str(machine_id)), ignore_errors=True)

    def erase_volume(self, volume_id: str) -> None:
        shutil.rmtree(self.volume_folder(volume_id), ignore_errors=True)

    def volume_folder(self, volume_id: str) -> Path:
        """What is in a network volume. Whoever rehearses may put there what is to be found in it."""
        folder = self.folder / "volumes" / volume_id
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def log(self, pod_id: str) -> Sequence[ContainerLogLine]:
        try:
            lines = (self.folder / pod_id / "container.log").read_text().splitlines()
        except OSError:
            return ()
        said = []
        for line in lines[-MAX_LOG_LINES:]:
            # The last may be half written.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                said.append(ContainerLogLine(entry["at"], entry["text"]))
        return said

    # ------------------------------------------------------------------------------------------------ the disk

    def _persistent(self, pod_id: str) -> Path:
        return self.folder / "persistent" / pod_id

    def _folders(self, machine: EmulatedMachine, container: Container) -> dict[str, Path]:
        """What stands for each mount."""
        folders = {}
        for mount in container.mounts:
            kept = self.volume_folder(mount.volume_id) if mount.volume_id else self._persistent(container.pod_id)
            kept.mkdir(parents=True, exist_ok=True)
            place = machine.root / inside(mount.path).lstrip("/")
            if not place.is_symlink() and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(kept)
            folders[mount.path] = place
        return folders

    def _furnish(self, machine: EmulatedMachine, container: Container) -> dict[str, Any]:
        """Everything on its disk; gives what its first process is to do."""
        root = machine.root
        folders = self._folders(machine, container)
        _write_hardware(machine, container, folders)
        for name in ("root", "tmp"):
            (root / name).mkdir(exist_ok=True)
        _write_tools(root, has_driver=container.has_driver)
        environment = _environment(machine, container)
        described = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
        write_file(root, File("/etc/rp_environment", described.encode(), 0o600))
        join = join_document(container.env)
        if join is not None:
            write_file(root, File(JOIN_FILE, join.encode(), 0o600))
        command = program_of(container)
        if container.luck.program_fails is not None:
            command = ["/bin/sh", "-c", 'echo "$1"; exit 1', "program", container.luck.program_fails]
        return {
            "command": None if command is None else mapped_command(root, tuple(command)),
            "directory": str(root / "root"),
            "environment": environment,
            "log": str(machine.folder / "container.log"),
            "ssh": self._ssh(machine, container, environment),
        }

    def _ssh(
        self, machine: EmulatedMachine, container: Container, environment: Mapping[str, str]
    ) -> dict[str, Any] | None:
        key, sshd = container.env.get("PUBLIC_KEY", "").strip(), find_sshd()
        if SSH_PORT not in container.tcp_ports or not key or container.luck.has_no_ssh:
            return None
        if sshd is None:
            machine.note("this host has no OpenSSH server (sshd): nobody can log in")
            return None
        folder = machine.folder / "ssh"
        folder.mkdir(mode=0o700)
        try:
            _make_host_key(folder / "host_key")
        except (OSError, subprocess.SubprocessError) as error:
            machine.note(f"cannot make a host key ({error}): nobody can log in")
            return None
        _write_private(folder / "authorized_keys", key + "\n")
        session = {
            "root": str(machine.root),
            # Also what does not exist there yet is the pod's.
            "own": [*(mount.path for mount in container.mounts), "/root", "/etc/windlass"],
            "environment": _login_environment(environment, self.user, self._shell),
            "shell": self._shell,
            "failures": dict(container.luck.ssh_failures),
        }
        _write_private(machine.folder / "session.json", json.dumps(session))
        command = shlex.join([sys.executable, "-I", "-S", str(HARDWARE / "session.py"), str(machine.folder)])
        config = _SSHD_CONFIG.format(folder=folder, user=self.user, home=environment["HOME"], command=command)
        if (sftp := next((each for each in _SFTP_SERVERS if Path(each).exists()), None)) is not None:
            config += f"Subsystem sftp {sftp}\n"
        _write_private(folder / "sshd_config", config)
        if os.geteuid() == 0:
            _SSHD_EMPTY_FOLDER.mkdir(mode=0o755, exist_ok=True)
        log = str(machine.folder / "sshd.log")
        words = [sshd, "-i", "-f", str(folder / "sshd_config"), "-E", log]
        return {"command": words, "log": log, "after_s": container.luck.ssh_after_s}


def _first_process(machine: EmulatedMachine, settings: Mapping[str, Any], listener: int) -> MachineProgram | None:
    if settings["command"] is None and settings["ssh"] is None:
        machine.note("no args, nothing to join and nobody to log in: nothing runs here")
        return None
    ssh = None if settings["ssh"] is None else {**settings["ssh"], "fd": listener}
    path = machine.folder / "init.json"
    _write_private(path, json.dumps({**settings, "ssh": ssh}))
    return MachineProgram(
        [sys.executable, "-I", "-S", str(HARDWARE / "pod_init.py"), str(path)],
        machine.folder,
        bare_environment(machine.root),
        guards_itself=True,
        files=() if ssh is None else (listener,),
    )


def program_of(container: Container) -> list[str] | None:
    """What the image runs, or None for nothing."""
    if container.args.strip():
        try:
            return shlex.split(container.args)
        except ValueError:
            return ["/bin/sh", "-c", container.args]
    if container.image.startswith(OFFICIAL_PREFIX) or join_document(container.env) is None:
        return None
    return ["/opt/windlass/bin/windlass", "worker", "--join", JOIN_FILE]


def join_document(env: Mapping[str, str]) -> str | None:
    """The join file that an image's start script makes of its environment."""
    if env.get("WINDLASS_JOIN"):
        return env["WINDLASS_JOIN"]
    if all(env.get(variable) for variable in _JOIN_PARTS.values()):
        return json.dumps({name: env[variable] for name, variable in _JOIN_PARTS.items()})
    return None


def _environment(machine: EmulatedMachine, container: Container) -> dict[str, str]:
    bare = bare_environment(machine.root)
    told = {
        "RUNPOD_POD_ID": container.pod_id,
        "RUNPOD_POD_HOSTNAME": container.pod_id,
        "RUNPOD_DC_ID": container.data_center or "",
        "RUNPOD_GPU_COUNT": str(container.gpu_count),
        "RUNPOD_GPU_NAME": container.gpu_name or "",
        "RUNPOD_PUBLIC_IP": LOOPBACK,
        "RUNPOD_VOLUME_ID": next((each.volume_id for each in container.mounts if each.volume_id), ""),
        "CUDA_VERSION": container.cuda_version or "",
    }
    own = {name: map_path(machine.root, value) for name, value in container.env.items() if name not in _JOIN_VARIABLES}
    hardware = {
        "EMULATED_HARDWARE": str(machine.folder / "hardware.json"),
        "PATH": f"{machine.root / 'usr/local/bin'}{os.pathsep}{bare.get('PATH', os.defpath)}",
        "PYTHONPATH": f"{HARDWARE}{os.pathsep}{bare['PYTHONPATH']}",
    }
    return {**bare, **told, **own, **hardware}


def _login_environment(environment: Mapping[str, str], user: str, shell: str) -> dict[str, str]:
    """A fresh login's. What stands for the machine itself is everywhere in it."""
    names = ("PATH", "PYTHONPATH", "HOME", "EMULATED_HARDWARE", "SSL_CERT_FILE", "SSL_CERT_DIR", "TZ")
    known = {name: environment[name] for name in names if name in environment}
    return {**known, "USER": user, "LOGNAME": user, "SHELL": shell}


def _write_hardware(machine: EmulatedMachine, container: Container, folders: Mapping[str, Path]) -> None:
    free_gb = container.luck.disk_free_gb
    used_gb = min(SYSTEM_GB, container.disk_gb) if free_gb is None else max(0.0, container.disk_gb - free_gb)
    gpu = {"name": container.gpu_name, "total_mb": container.vram_mb, "used_mb": DRIVER_MB}
    mounts = [
        {"path": mount.path, "folder": str(folders[mount.path]), "size_gb": mount.size_gb, "used_gb": mount.used_gb}
        for mount in container.mounts
    ]
    whole = {"path": "/", "folder": str(machine.root), "size_gb": container.disk_gb, "used_gb": used_gb}
    readings = {
        "has_driver": container.has_driver,
        "driver": DRIVER,
        "cuda": container.cuda_version or "",
        "gpus": [gpu] * container.gpu_count if container.has_driver else [],
        "mounts": [*mounts, whole],
    }
    # Whoever reads it meanwhile sees the old one or the new one.
    path = machine.folder / "hardware.json"
    _write_private(path.with_suffix(".new"), json.dumps(readings))
    path.with_suffix(".new").replace(path)


def _write_tools(root: Path, *, has_driver: bool) -> None:
    python = [sys.executable, "-S"]
    tools = {
        f"/usr/local/bin/{name}": [*python, HARDWARE / "storage.py", name] for name in ("df", "mountpoint", "findmnt")
    }
    if has_driver:
        tools["/usr/local/bin/nvidia-smi"] = [*python, HARDWARE / "nvidia_smi.py"]
    for path in ("/usr/local/bin/windlass", "/opt/windlass/bin/windlass"):
        tools[path] = [sys.executable, "-m", "windlass"]
    tools["/opt/windlass/bin/python"] = [sys.executable]
    for path, words in tools.items():
        text = f'#!/bin/sh\nexec {shlex.join(str(word) for word in words)} "$@"\n'
        write_file(root, File(path, text.encode(), 0o755))


def _make_host_key(path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "emulated pod", "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=KEYGEN_TIMEOUT_S,
    )


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, stat.S_IRUSR | stat.S_IWUSR), "w") as file:
        file.write(text)
