"""Fingerprints of fleets: what a worker that is spawned now would run.

A fingerprint covers the settings that reach a worker, the version of Windlass and, where workers are processes of this
host, the content of the handler's code. It does not cover what a rented machine installs under the same name: a moved
image tag or a new release of an unpinned requirement. It reveals no secret: values of `env` enter through scrypt.

Code of a handler: all .py files below its folder, without hidden folders and installed packages. In a folder with more
than MAX_FILES of them, or for an installed package, only the handler's own module or package. Code of a command: the
files that the command names.
"""

import asyncio
import hashlib
import json
import os
import shlex
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from windlass.model.fleet import FleetConfig
from windlass.model.rollout import WorkingVersion

# Settings that reach a worker. The others decide how many run, where, and when they have failed.
_RUN_SETTINGS = {"handler", "exec", "is_inline", "concurrency", "run_as", "redact", "has_gpu", "queues", "engine"}
_HETZNER_SETTINGS = {"image"}
_RUNPOD_SETTINGS = {"image", "template_id", "registry_id", "args", "network_volume_id", "volume_path", "gpu_count"}
_SSH_SETTINGS = {"start_command", "checks", "installs_windlass"}
# A project has fewer. Reading more in every cycle would delay it.
MAX_FILES = 2_000
MAX_DEPTH = 12
MAX_FILE_BYTES = 2_000_000
# Folders without code of the project.
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist"})
# Reading the files must not delay a cycle: on a slow disk the last known version is used.
READ_TIMEOUT_S = 3.0
CHARACTERS = 12
log = structlog.get_logger(__name__)


class FingerprintReader:
    """Reads the fingerprint of one fleet. `version`: of Windlass. Unchanged files and settings are not read again."""

    def __init__(self, name: str, instance_id: str, version: str) -> None:
        self._name = name
        self._version = version
        self._salt = instance_id.encode()
        self._settings: tuple[FleetConfig, dict[str, Any]] | None = None
        # What restore() returned for a fleet and a version.
        self._restored: tuple[FleetConfig, WorkingVersion, FleetConfig | None] | None = None
        # The last fingerprint, and what it covers as JSON.
        self._described = ("", "")
        # Path to (size, modification time, hash), of the files of the last read.
        self._files: dict[str, tuple[int, int, str]] = {}
        self._last: str | None = None
        # The read that has not ended, or whose result was not taken, and the settings that it is for.
        self._pending: tuple[FleetConfig, Future[str]] | None = None

    async def read(self, fleet: FleetConfig) -> str | None:
        """The current fingerprint; the last known one if the files cannot be read in time.

        A read that outlasts its time limit continues, and a later call takes its result. No other begins meanwhile.
        """
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                if self._pending is not None and self._pending[0] != fleet:
                    # The read is of former settings: wait for its end and drop its result.
                    with suppress(OSError):
                        await asyncio.wrap_future(self._pending[1])
                    self._pending = None
                if self._pending is None:
                    self._pending = fleet, self._start_read(fleet)
                self._last = await asyncio.wrap_future(self._pending[1])
        except (OSError, TimeoutError) as error:
            log.warning("read code version failed", fleet=self._name, error=str(error) or type(error).__name__)
        finally:
            if self._pending is not None and self._pending[1].done():
                self._pending = None
        return self._last

    def _start_read(self, fleet: FleetConfig) -> Future[str]:
        """In a thread of its own: a disk that hangs must neither fill a shared pool nor delay the process's end."""
        result: Future[str] = Future()
        # Running, so that a caller that stops waiting does not cancel it.
        result.set_running_or_notify_cancel()

        def run() -> None:
            try:
                result.set_result(self.compute(fleet))
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, name=f"fingerprint {self._name}", daemon=True).start()
        return result

    def compute(self, fleet: FleetConfig) -> str:
        if self._settings is None or self._settings[0] != fleet:
            self._settings = fleet, self._settings_of(fleet)
        settings, code = self._settings[1], hashlib.sha256()
        files: dict[str, tuple[int, int, str]] = {}
        if fleet.is_of_this_host:
            base = (fleet.chdir or Path.cwd()).absolute()
            for path in sorted(code_files(fleet, base)):
                found = _read_file(path, self._files.get(str(path)))
                if found is not None:
                    files[str(path)] = found
                # An editor replaces files, so that one may be missing for a moment.
                content = found[2] if found is not None else "missing"
                code.update(f"\0{os.path.relpath(path, base)}\0{content}".encode())
            settings = {**settings, "code": code.hexdigest()}
        self._files = files
        fingerprint, text = _hashed(settings)
        self._described = (fingerprint, text)
        return fingerprint

    def describe(self, fingerprint: str) -> str | None:
        """What the fingerprint covers, as a JSON object, if it is the last one that was read. Contains no secret."""
        last, text = self._described
        return text if last == fingerprint else None

    def restore(self, fleet: FleetConfig, working: WorkingVersion) -> FleetConfig | None:
        """The fleet with the settings of a former version that reach its workers; None if they cannot be restored.

        They can if the fingerprint comes out as it was: then values of `env` and the version of Windlass are the same,
        and no setting was masked when it was stored. Code on this host is not stored, so local fleets have none.
        """
        if self._restored is None or self._restored[:2] != (fleet, working):
            self._restored = fleet, working, self._restore(fleet, working)
        return self._restored[2]

    def _restore(self, fleet: FleetConfig, working: WorkingVersion) -> FleetConfig | None:
        stored = json.loads(working.settings)
        if fleet.is_of_this_host or stored.get("provider") != fleet.provider:
            return None
        values = fleet.model_dump()
        for name, value in stored.items():
            if name in FleetConfig.model_fields and name not in ("env", "provider"):
                nested = isinstance(value, dict) and isinstance(values[name], dict)
                values[name] = {**values[name], **value} if nested else value
        values["chdir"] = None if stored["chdir"] == str(None) else stored["chdir"]
        if "ssh" in stored:
            values["runpod"]["ssh"] = {**values["runpod"]["ssh"], **stored["ssh"]}
        try:
            former = FleetConfig.model_validate(values)
        except ValidationError:  # with other settings that changed meanwhile
            return None
        return former if _hashed(self._settings_of(former))[0] == working.fingerprint else None

    def _settings_of(self, fleet: FleetConfig) -> dict[str, Any]:
        return _settings(fleet, self._salt, self._version)


def _read_file(path: Path, known: tuple[int, int, str] | None) -> tuple[int, int, str] | None:
    """Size, modification time and hash of a file; `known` if it has not changed, None if it is missing."""
    try:
        found = path.stat()
        if known is not None and known[:2] == (found.st_size, found.st_mtime_ns):
            return known
        with path.open("rb") as file:
            content = hashlib.sha256(file.read(MAX_FILE_BYTES)).hexdigest()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns, content


def _hashed(settings: dict[str, Any]) -> tuple[str, str]:
    """The fingerprint of these settings, and the JSON text from which it is computed."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:CHARACTERS], text


def _settings(fleet: FleetConfig, salt: bytes, version: str) -> dict[str, Any]:
    plain: dict[str, Any] = fleet.model_dump(mode="json", include=_RUN_SETTINGS | {"ray"})
    plain |= {"chdir": str(fleet.chdir), "windlass": version, "provider": fleet.provider}
    variables = fleet.env
    if fleet.provider == "hetzner":
        plain["hetzner"] = fleet.hetzner.model_dump(mode="json", include=_HETZNER_SETTINGS)
        plain["bootstrap"] = fleet.bootstrap.model_dump(mode="json")
    elif fleet.provider == "runpod":
        plain["runpod"] = fleet.runpod.model_dump(mode="json", include=_RUNPOD_SETTINGS)
        if fleet.auto_start_worker:
            plain["ssh"] = fleet.runpod.ssh.model_dump(mode="json", include=_SSH_SETTINGS)
            plain["bootstrap"] = fleet.bootstrap.model_dump(mode="json")
        variables = {**variables, **fleet.runpod.env}
    if variables:
        # Slow on purpose: a short value must not be found by trying all of them. About 50 ms, once per configuration.
        text = json.dumps(variables, sort_keys=True).encode()
        plain["env"] = hashlib.scrypt(text, salt=salt, n=2**14, r=8, p=1).hex()[:CHARACTERS]
    return plain


def code_files(fleet: FleetConfig, base: Path) -> list[Path]:
    """The files of a local fleet's code. `base`: the folder that its workers run in."""
    if fleet.exec is not None:
        return _command_files(fleet.exec, base)
    if fleet.handler is None:
        return []
    module = fleet.handler.partition(":")[0]
    top = module.partition(".")[0]
    own = next((path for path in (base / top, base / f"{top}.py") if path.exists()), None)
    if own is None:
        return []  # installed, and identified by its own release
    files = list(_python_files(base))
    if len(files) > MAX_FILES:
        files = [own] if own.is_file() else list(_python_files(own))[:MAX_FILES]
    return files


def _command_files(command: str, base: Path) -> list[Path]:
    try:
        words = shlex.split(command)
    except ValueError:
        return []
    program = shutil.which(words[0]) if words else None
    named = [base / word for word in words if not word.startswith("-")]
    return [path for path in ([Path(program)] if program else []) + named if path.is_file()]


def _python_files(folder: Path) -> Iterator[Path]:
    """At most one more than MAX_FILES."""
    count = 0
    for root, folders, names in os.walk(folder):
        depth = len(Path(root).relative_to(folder).parts)
        is_project = depth == 0 or not os.path.exists(os.path.join(root, "pyvenv.cfg"))  # noqa: PTH110, PTH118
        keeps = is_project and depth < MAX_DEPTH
        folders[:] = sorted(name for name in folders if keeps and name not in _SKIPPED and not name.startswith("."))
        for name in sorted(names) if is_project else ():
            if name.endswith(".py"):
                yield Path(root, name)
                count += 1
                if count > MAX_FILES:
                    return
