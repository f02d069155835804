"""Runs emulated pods as local processes: the image's program, an OpenSSH server, and hardware read from a file.

A pod runs:
- its `args`, if it has any: they stand for the image's entrypoint and its arguments;
- otherwise, with WINDLASS_JOIN in its environment (or WINDLASS_URL, WINDLASS_WORKER_ID and WINDLASS_JOIN_TOKEN), the
  worker: `windlass worker --join /etc/windlass/join.json`, if its image brings one (images.py);
- otherwise nothing: as in the cloud, the worker is started over SSH.

With `22/tcp` among its ports and a PUBLIC_KEY in its environment, the pod answers SSH on 127.0.0.1, with a new port and
a new host key at every start, if its image has an SSH server. Every start has an empty disk; a persistent mount and
network volumes keep their content.
"""

import json
import os
import pwd
import shlex
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass_emulators.cloud_init import File, inside
from windlass_emulators.process_host import map_path, mapped_command, write_file
from windlass_emulators.processes import STOP_GRACE_S, EmulatedMachine, MachineProgram, Processes, bare_environment
from windlass_emulators.runpod.containers import LOOPBACK, SSH_PORT, Container
from windlass_emulators.runpod.images import (
    ImageContents,
    contents_of,
    environment_file,
    hidden_packages,
    link_programs,
    python_of_image,
    without_windlass,
)

HARDWARE = Path(__file__).parent / "hardware"
JOIN_FILE = "/etc/windlass/join.json"
DRIVER = "570.86.15"
MAX_LOG_READ_BYTES = 1 << 20
KEYGEN_TIMEOUT_S = 20.0
# Disk space used by a fresh container, and GPU memory used by the driver.
SYSTEM_GB, DRIVER_MB = 2.0, 4
_JOIN_PARTS = {"worker_id": "WINDLASS_WORKER_ID", "url": "WINDLASS_URL", "join_token": "WINDLASS_JOIN_TOKEN"}
# The start script of an image with a worker writes these to the join file and removes them from the environment.
_JOIN_VARIABLES = ("WINDLASS_JOIN", *_JOIN_PARTS.values())
# Folders that are not in the pod's Python path (hardware/sitecustomize.py).
HIDDEN_PACKAGES = "EMULATED_HIDDEN_PACKAGES"
# Folders of sshd that are not in a user's PATH.
_SSHD_PLACES = os.pathsep.join(("/usr/sbin", "/usr/local/sbin", "/sbin"))
# sshd requires it when it runs as root.
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
# The home of the user who runs the emulator is not used.
SetEnv "HOME={home}"
ForceCommand {command}
"""


def find_sshd() -> str | None:
    """The path of OpenSSH's server, if it is installed."""
    return shutil.which("sshd") or shutil.which("sshd", path=_SSHD_PLACES)


class RealPodHost(Processes):
    address = LOOPBACK

    def __init__(
        self,
        folder: Path | None = None,
        stop_grace_s: float = STOP_GRACE_S,
        images: Mapping[str, ImageContents] | None = None,
    ) -> None:
        """`images`: contents of images, by the start of their name."""
        super().__init__(folder, stop_grace_s)
        self.images = dict(images or {})
        # root on a real pod. Here the user who runs the emulator; the API publishes this name.
        self.user = pwd.getpwuid(os.geteuid()).pw_name
        self._shell = shutil.which("bash") or "/bin/sh"

    # ----------------------------------------------------------------------------------------------------- PodHost

    def start(self, container: Container) -> Mapping[int, int]:
        with self._lock:
            if (old := self._machines.get(container.pod_id)) is not None:
                self._kill_now(old)
            machine = self._prepare(container.pod_id, container.name)
            # Bound here to reserve the port. Connections are refused until the pod listens.
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
                listener.bind((LOOPBACK, 0))
                ssh_port: int = listener.getsockname()[1]
                try:
                    settings = self._prepare_disk(machine, container)
                    machine.program = lambda: _first_process(machine, settings, listener.fileno())
                    self._start(machine)
                except OSError as error:
                    machine.note(f"cannot start: {error}")
            return {port: ssh_port if port == SSH_PORT else port for port in container.tcp_ports}

    def refit(self, container: Container) -> None:
        with self._lock:
            if (machine := self._machines.get(container.pod_id)) is not None:
                _write_hardware(machine, container, self._folders(machine, container))

    def erase(self, machine_id: int | str) -> None:
        with self._lock:
            super().erase(machine_id)
            shutil.rmtree(self._persistent(str(machine_id)), ignore_errors=True)

    def log_lines(self, pod_id: str) -> list[str]:
        try:
            with (self.folder / pod_id / "container.log").open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - MAX_LOG_READ_BYTES))
                return log.read().decode(errors="replace").splitlines()
        except OSError:
            return []

    def erase_volume(self, volume_id: str) -> None:
        shutil.rmtree(self.volume_folder(volume_id), ignore_errors=True)

    def volume_folder(self, volume_id: str) -> Path:
        """The content of a network volume. A rehearsal may put files there."""
        folder = self.folder / "volumes" / volume_id
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # ------------------------------------------------------------------------------------------------ the disk

    def _persistent(self, pod_id: str) -> Path:
        return self.folder / "persistent" / pod_id

    def _folders(self, machine: EmulatedMachine, container: Container) -> dict[str, Path]:
        """The folder of each mount, by its path in the pod."""
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

    def _prepare_disk(self, machine: EmulatedMachine, container: Container) -> dict[str, Any]:
        """Write the pod's disk. Returns the settings of its first process."""
        root = machine.root
        image = contents_of(container.image, self.images)
        folders = self._folders(machine, container)
        _write_hardware(machine, container, folders)
        for name in ("root", "tmp"):
            (root / name).mkdir(exist_ok=True)
        _write_tools(root, image, has_driver=not container.faults.has_no_driver)
        environment = _environment(machine, container)
        if not image.has_windlass:
            programs = self.folder / "programs"
            link_programs(programs)
            environment["PATH"] = f"{root / 'usr/local/bin'}{os.pathsep}{programs}"
            environment["PYTHONPATH"] = without_windlass(environment["PYTHONPATH"])
            environment[HIDDEN_PACKAGES] = os.pathsep.join(hidden_packages())
        initial = "".join(f"{name}={value}\0" for name, value in environment.items())
        write_file(root, File("/proc/1/environ", initial.encode(), 0o400))
        written = environment_file(image, environment)
        if written is not None:
            write_file(root, File("/etc/rp_environment", written.encode(), 0o644))
        command = program_of(container, image)
        join = join_document(container.env)
        if join is not None and command is not None and not container.args.strip():
            write_file(root, File(JOIN_FILE, join.encode(), 0o600))
            environment = {name: value for name, value in environment.items() if name not in _JOIN_VARIABLES}
        if container.faults.program_fails is not None:
            command = ["/bin/sh", "-c", 'echo "$1"; exit 1', "program", container.faults.program_fails]
        return {
            "command": command and _mapped(root, image, command),
            "directory": str(root / "root"),
            "environment": environment,
            "log": str(machine.folder / "container.log"),
            "ssh": self._ssh(machine, container, environment) if image.has_ssh else None,
        }

    def _ssh(
        self, machine: EmulatedMachine, container: Container, environment: Mapping[str, str]
    ) -> dict[str, Any] | None:
        key, sshd = container.env.get("PUBLIC_KEY", "").strip(), find_sshd()
        if SSH_PORT not in container.tcp_ports or not key or container.faults.has_no_ssh:
            return None
        if sshd is None:
            machine.note("SSH is off: this host has no sshd; install openssh-server")
            return None
        folder = machine.folder / "ssh"
        folder.mkdir(mode=0o700)
        try:
            _make_host_key(folder / "host_key")
        except (OSError, subprocess.SubprocessError) as error:
            machine.note(f"SSH is off: cannot make a host key ({error})")
            return None
        _write_private(folder / "authorized_keys", key + "\n")
        session = {
            "root": str(machine.root),
            # Paths of the pod, even if they do not exist yet.
            "own": [*(mount.path for mount in container.mounts), "/root", "/etc/windlass", "/var/lib/windlass"],
            "environment": _login_environment(environment, self.user, self._shell),
            "shell": self._shell,
            "failures": dict(container.faults.ssh_failures),
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
        return {"command": words, "log": log, "after_s": container.faults.ssh_after_s}


def _first_process(machine: EmulatedMachine, settings: Mapping[str, Any], listener: int) -> MachineProgram | None:
    if settings["command"] is None and settings["ssh"] is None:
        machine.note("nothing to run: no args, no join data and no SSH key")
        return None
    ssh = None if settings["ssh"] is None else {**settings["ssh"], "fd": listener}
    path = machine.folder / "init.json"
    _write_private(path, json.dumps({**settings, "ssh": ssh}))
    return MachineProgram(
        [sys.executable, "-I", "-S", str(HARDWARE / "pod_init.py"), str(path)],
        machine.folder,
        bare_environment(machine.root),
        watches_emulator=True,
        files=() if ssh is None else (listener,),
    )


def program_of(container: Container, image: ImageContents) -> list[str] | None:
    """The command that the image runs, or None."""
    if container.args.strip():
        try:
            return shlex.split(container.args)
        except ValueError:
            return ["/bin/sh", "-c", container.args]
    if not image.starts_worker or join_document(container.env) is None:
        return None
    return ["/opt/windlass/bin/windlass", "worker", "--join", JOIN_FILE]


def _mapped(root: Path, image: ImageContents, command: list[str]) -> list[str]:
    if image.has_windlass:
        return mapped_command(root, tuple(command))
    return [map_path(root, word) for word in command]


def join_document(env: Mapping[str, str]) -> str | None:
    """The join file that an image's start script would write, from the environment."""
    if env.get("WINDLASS_JOIN"):
        return env["WINDLASS_JOIN"]
    if all(env.get(variable) for variable in _JOIN_PARTS.values()):
        return json.dumps({name: env[variable] for name, variable in _JOIN_PARTS.items()})
    return None


def _environment(machine: EmulatedMachine, container: Container) -> dict[str, str]:
    bare = bare_environment(machine.root)
    runpod = {
        "RUNPOD_POD_ID": container.pod_id,
        "RUNPOD_POD_HOSTNAME": container.pod_id,
        "RUNPOD_DC_ID": container.data_center,
        "RUNPOD_GPU_COUNT": str(container.gpu_count),
        "RUNPOD_GPU_NAME": container.gpu_name,
        "RUNPOD_PUBLIC_IP": LOOPBACK,
        "RUNPOD_VOLUME_ID": next((each.volume_id for each in container.mounts if each.volume_id), ""),
        "CUDA_VERSION": container.cuda_version,
    }
    own = {name: map_path(machine.root, value) for name, value in container.env.items()}
    hardware = {
        "EMULATED_HARDWARE": str(machine.folder / "hardware.json"),
        "PATH": f"{machine.root / 'usr/local/bin'}{os.pathsep}{bare.get('PATH', os.defpath)}",
        "PYTHONPATH": f"{HARDWARE}{os.pathsep}{bare['PYTHONPATH']}",
    }
    return {**bare, **runpod, **own, **hardware}


def _login_environment(environment: Mapping[str, str], user: str, shell: str) -> dict[str, str]:
    """The environment of a fresh login, with the variables that emulate the machine."""
    names = (
        "PATH", "PYTHONPATH", "HOME", "EMULATED_HARDWARE", HIDDEN_PACKAGES, "SSL_CERT_FILE", "SSL_CERT_DIR", "TZ",
    )  # fmt: skip
    known = {name: environment[name] for name in names if name in environment}
    return {**known, "USER": user, "LOGNAME": user, "SHELL": shell}


def _write_hardware(machine: EmulatedMachine, container: Container, folders: Mapping[str, Path]) -> None:
    free_gb = container.faults.disk_free_gb
    used_gb = min(SYSTEM_GB, container.disk_gb) if free_gb is None else max(0.0, container.disk_gb - free_gb)
    gpu = {"name": container.gpu_name, "total_mb": container.vram_mb, "used_mb": DRIVER_MB}
    mounts = [
        {"path": mount.path, "folder": str(folders[mount.path]), "size_gb": mount.size_gb, "used_gb": mount.used_gb}
        for mount in container.mounts
    ]
    whole = {"path": "/", "folder": str(machine.root), "size_gb": container.disk_gb, "used_gb": used_gb}
    readings = {
        "has_driver": not container.faults.has_no_driver,
        "driver": DRIVER,
        "cuda": container.cuda_version,
        "gpus": [gpu] * container.gpu_count if not container.faults.has_no_driver else [],
        "mounts": [*mounts, whole],
    }
    # Replaced atomically: readers see the old or the new version.
    path = machine.folder / "hardware.json"
    _write_private(path.with_suffix(".new"), json.dumps(readings))
    path.with_suffix(".new").replace(path)


def _write_tools(root: Path, image: ImageContents, *, has_driver: bool) -> None:
    python = [sys.executable, "-S"]
    tools = {
        f"/usr/local/bin/{name}": [*python, HARDWARE / "storage.py", name] for name in ("df", "mountpoint", "findmnt")
    }
    if has_driver:
        tools["/usr/local/bin/nvidia-smi"] = [*python, HARDWARE / "nvidia_smi.py"]
    if image.has_windlass:
        for path in ("/usr/local/bin/windlass", "/opt/windlass/bin/windlass"):
            tools[path] = [sys.executable, "-m", "windlass"]
        tools["/opt/windlass/bin/python"] = [sys.executable]
    elif image.has_python:
        for name in ("python3", "python"):
            write_file(root, File(f"/usr/local/bin/{name}", python_of_image().encode(), 0o755))
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
