"""systemctl of a host that is a folder ($HOST_ROOT): starts and stops a service as systemd 252 does.

It applies the directives that decide whether a service finds its files and secrets: User, WorkingDirectory,
Environment, StateDirectory and LoadCredential. It ignores the sandbox, dependencies and restarts. The output of a
service goes to $HOST_ROOT/up.log.
"""

import os
import pwd
import signal
import subprocess
import sys
import time
from pathlib import Path

# systemd's exit statuses of a service that it could not start.
CHDIR_FAILED, CREDENTIALS_FAILED = 200, 243
STOP_TIMEOUT_S = 120


class NotStarted(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Service:
    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        self.pid_file = root / f"{name}.pid"
        unit = (root / "etc/systemd/system" / f"{name}.service").read_text()
        pairs = [line.partition("=")[::2] for line in unit.splitlines() if "=" in line and not line.startswith("#")]
        self.directives = [(directive.strip(), value.strip()) for directive, value in pairs]

    def all_of(self, directive: str) -> list[str]:
        return [value for name, value in self.directives if name == directive]

    def one(self, directive: str) -> str:
        return self.all_of(directive)[-1]

    def host_path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def start(self) -> None:
        user = account(self.one("User"))
        for folder in self.all_of("StateDirectory"):
            state = self.root / "var/lib" / folder
            state.mkdir(parents=True, exist_ok=True)
            own(state, user)
        environment = dict(each.split("=", 1) for each in self.all_of("Environment"))
        environment = {name: str(self.host_path(value)) for name, value in environment.items()}
        environment["CREDENTIALS_DIRECTORY"] = str(self.load_credentials(user))
        folder = self.host_path(self.one("WorkingDirectory"))
        # The page's user has its home there.
        environment["HOME"] = str(folder)
        if not folder.is_dir():
            raise NotStarted(CHDIR_FAILED, f"no folder {folder}")
        program, *words = self.one("ExecStart").split()
        with (self.root / "up.log").open("a") as log:
            started = subprocess.Popen(
                [str(self.host_path(program)), *words],
                cwd=folder, env={**os.environ, **environment}, start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, umask=int(self.one("UMask"), 8),
                **({} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}),
            )  # fmt: skip
        self.pid_file.write_text(str(started.pid))

    def load_credentials(self, user: "pwd.struct_passwd | None") -> Path:
        """`ID:PATH`: the file, or each file of a folder as ID_NAME, without symbolic links and hidden files. A path
        that does not exist fails the start; no character of it makes it optional."""
        folder = self.root / "run/credentials" / f"{self.name}.service"
        folder.mkdir(parents=True, exist_ok=True)
        for each in self.all_of("LoadCredential"):
            name, _, path = each.partition(":")
            source = self.host_path(path)
            if not path.startswith("/") or not source.exists():
                raise NotStarted(CREDENTIALS_FAILED, f"Failed to set up credentials: {each}: No such file or directory")
            files = {name: source}
            if source.is_dir():
                files = {
                    f"{name}_{found.relative_to(source)}".replace("/", "_"): found
                    for found in sorted(source.rglob("[!.]*"))
                    if found.is_file() and not found.is_symlink()
                }
            for file_name, found in files.items():
                (folder / file_name).write_bytes(found.read_bytes())
                (folder / file_name).chmod(0o400)
                own(folder / file_name, user)
        own(folder, user)
        return folder

    def stop(self) -> None:
        if not self.pid_file.exists():
            return
        pid = int(self.pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while is_running(pid):
            if time.monotonic() > deadline:
                sys.exit(f"{self.name} did not stop")
            time.sleep(0.1)
        self.pid_file.unlink()


def account(name: str) -> "pwd.struct_passwd | None":
    """The user of this host that stands for a user of the page. None: every user is the one who runs the test."""
    stand_in = os.environ.get(f"HOST_USER_{name}")
    return pwd.getpwnam(stand_in) if stand_in else None


def own(path: Path, user: "pwd.struct_passwd | None") -> None:
    if user is not None:
        os.chown(path, user.pw_uid, user.pw_gid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def main(words: list[str]) -> int:
    root = Path(os.environ["HOST_ROOT"])
    if words in (["daemon-reload"], ["reload", "caddy"]):
        return 0
    if words[:2] == ["enable", "--now"]:
        service = Service(root, words[2])
        try:
            service.start()
        except NotStarted as error:
            print(f"{service.name}.service: status={error.status}: {error}", file=sys.stderr)
            return 1
        return 0
    if words[:1] == ["stop"]:
        Service(root, words[1]).stop()
        return 0
    print(f"not rehearsed: systemctl {' '.join(words)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
