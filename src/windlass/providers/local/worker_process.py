"""Starts a worker as a process of this host: its command line, its environment, and the start itself.

Every worker process carries a mark in its environment and on its command line. The mark names the database, the fleet
and the worker; provider.py finds workers by it. Secrets are never put on the command line, which every user can read.
"""

import errno
import os
import pwd
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.model.errors import NoCapacity, Refused, Unavailable
from windlass.model.fleet import FleetConfig

# The prefix is an underscore because `windlass` commands started by a worker inherit the variable, and read names that
# begin with WINDLASS_ as settings.
MARK = "_WINDLASS_MACHINE"
# Identity of the worker and address of its database. The worker removes them from its environment.
WORKER_ID = "WINDLASS_WORKER_ID"
FLEET = "WINDLASS_FLEET"
NEEDS_GPU = "WINDLASS_NEEDS_GPU"
DATABASE_URL = "WINDLASS_WORKER_DATABASE_URL"
SECRET = "WINDLASS_WORKER_SECRET"  # noqa: S105 - the name of a variable

# Temporary lack of resources: the host, or our limit, has no room for another process or file.
OUT_OF_RESOURCES = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC})


class ChildProcess(subprocess.Popen[bytes]):
    """A process that may outlive its parent on purpose; Popen would warn about that."""

    def __del__(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """How the workers of one fleet are started.

    `settings` are passed as environment variables: workers read no file, which might have changed since. `withheld`
    names variables of our environment that workers must not get. `program` is a Python module and its first arguments.
    """

    fleet: str
    config: FleetConfig
    mark_prefix: str
    database_url: str | None
    data_dir: Path | None
    settings: Mapping[str, str]
    withheld: Collection[str]
    program: Sequence[str]

    def mark_arguments(self, name: str) -> list[str]:
        # Python accepts any -X option and does not pass unknown ones on: the worker has it, its children do not.
        return ["-X", f"windlass={self.mark_prefix}{name}"]

    def command(self, name: str, log: Path) -> list[str]:
        config = self.config
        # -P: windlass must not be imported from the current folder.
        command = [sys.executable, "-P", *self.mark_arguments(name)]
        command += ["-m", "windlass.providers.local.entry_point", str(log), *self.program]
        for queue in config.queues:
            command += ["--queue", queue]
        if config.handler is not None:
            command += ["--handler", config.handler]
        if config.exec is not None:
            command += ["--exec", config.exec]
        if config.is_inline:
            command += ["--inline"]
        if config.chdir is not None:
            command += ["--chdir", str(config.chdir.absolute())]
        if config.run_as is not None:
            command += ["--run-as", config.run_as]
        for path in config.redact:
            command += ["--redact", path]
        command += ["--concurrency", str(config.concurrency)]
        command += ["--heartbeat-interval", f"{config.heartbeat_interval_s:g}"]
        command += ["--lease", f"{config.heartbeat_timeout_s:g}"]
        command += ["--config", os.devnull]
        if self.data_dir is not None:
            command += ["--data-dir", str(self.data_dir.absolute())]
        return command

    def environment(self, name: str, secret: str | None = None) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if key not in self.withheld}
        environment = {**inherited, **self.settings, **self.config.env}
        # The worker drains for exactly as long as the control loop waits for it.
        environment["WINDLASS_WORKER__DRAIN_TIMEOUT_S"] = f"{self.config.stop_timeout_s:g}"
        if self.database_url is not None:
            # Not as DATABASE_URL, which handlers read: an address that only windlass.toml has is not theirs.
            environment[DATABASE_URL] = self.database_url
        if secret is not None:
            environment[SECRET] = secret
        if self.config.has_gpu and self.config.engine is None:
            # The GPUs of a Ray node are reported by Ray.
            environment[NEEDS_GPU] = "yes"
        return environment | {MARK: f"{self.mark_prefix}{name}", WORKER_ID: name, FLEET: self.fleet}

    def start(
        self, name: str, secret: str | None, log_path: Path, log: int, doing: str, deadline: float
    ) -> ChildProcess:
        """Start the process with `log` as its output. Raises Refused, NoCapacity or Unavailable."""
        if time.monotonic() > deadline:
            # The caller has timed out: a process started now would be unexpected.
            raise Unavailable(f"{doing}: it took too long")
        try:
            return ChildProcess(
                self.command(name, log_path),
                env=self.environment(name, secret),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            if error.errno in OUT_OF_RESOURCES:
                raise NoCapacity(f"{doing}: this host cannot start another process ({error.strerror})") from error
            raise Refused(f"{doing}: cannot start {sys.executable} ({error.strerror}).") from error
        except ValueError as error:
            raise Refused(f"{doing}: invalid environment or command ({error}). Check env and exec.") from error


def _problem_of_user(name: str) -> str | None:
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        return f"user {name} not found on this host."
    if os.geteuid() not in (0, user.pw_uid):
        return f"only root can run handlers as {name}."
    return None


def startup_problem(fleet: str, config: FleetConfig, path: str | None) -> str | None:
    """Why a worker with this configuration could only fail, in a sentence; None if nothing is known against it.

    Whether the handler can be imported is only known to its process. `path` is the PATH of the worker's environment.
    """
    if config.run_as is not None:
        problem = _problem_of_user(config.run_as)
        if problem is not None:
            return f"{problem} Check run_as of fleet {fleet}."
    if config.handler is None and config.exec is None:
        return f"fleet {fleet} has neither handler nor exec. Set one of them."
    folder = Path() if config.chdir is None else config.chdir
    if not folder.is_dir():
        return f"folder {folder} not found. Check chdir of fleet {fleet}."
    if not os.access(folder, os.X_OK):
        return f"folder {folder} cannot be entered. Check chdir of fleet {fleet} and its permissions."
    if config.exec is None:
        return None
    try:
        words = shlex.split(config.exec)
    except ValueError as error:
        return f"cannot parse the command {config.exec!r} ({error}). Check exec of fleet {fleet}."
    name = words[0] if words else ""
    # A name with a slash is relative to the worker's folder; any other is searched in its PATH.
    place = str(folder / name) if "/" in name else name
    if not name or shutil.which(place, path=path) is None:
        return f"command {name!r} not found. Check exec of fleet {fleet} and the PATH of its workers."
    return None
