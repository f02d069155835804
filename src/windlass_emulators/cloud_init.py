"""Reads the user_data of a server, as far as the emulator follows it.

Two parts of a `#cloud-config` document count: `write_files`, and among those files the systemd unit to run
(`windlass-worker.service`, otherwise the first service). Packages, users, `runcmd` and other units are ignored: they
prepare a real machine for what this host already has. Pure; `process_host` executes the result.
"""

import base64
import binascii
import gzip
import posixpath
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

WORKER_UNIT = "windlass-worker.service"
_UNIT_FOLDERS = ("/etc/systemd/system/", "/lib/systemd/system/", "/usr/lib/systemd/system/")
# Prefixes that systemd allows before the path of an executable. They are ignored here.
_EXEC_PREFIXES = "-@:+!"
# systemd's default.
_DEFAULT_RESTART_S = 0.1


class UnusableUserData(Exception):
    """The document cannot be followed. A real server would boot and run nothing."""


@dataclass(frozen=True, slots=True)
class File:
    # Absolute and without "..": it stays under the root it is written to.
    path: str
    content: bytes
    mode: int
    is_appended: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    command: tuple[str, ...]
    working_directory: str
    environment: Mapping[str, str] = field(default_factory=dict)
    environment_files: tuple[str, ...] = ()
    restarts_on_success: bool = False
    restarts_on_failure: bool = False
    restart_s: float = _DEFAULT_RESTART_S


@dataclass(frozen=True, slots=True)
class Disk:
    files: tuple[File, ...]
    unit: Unit | None


def read_user_data(user_data: str) -> Disk:
    """Raises UnusableUserData."""
    if not user_data.strip():
        return Disk((), None)
    if not user_data.startswith("#cloud-config"):
        raise UnusableUserData("user_data does not start with #cloud-config, and the emulator reads no other format")
    try:
        document = yaml.safe_load(user_data)
    except yaml.YAMLError as error:
        raise UnusableUserData(f"user_data is not YAML ({' '.join(str(error).split())})") from error
    entries = (document or {}).get("write_files") if isinstance(document or {}, dict) else None
    if not isinstance(entries or [], list):
        raise UnusableUserData("write_files is not a list")
    files = tuple(_file(entry) for entry in entries or [])
    return Disk(files, _chosen_unit(files))


def _file(entry: Any) -> File:
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        raise UnusableUserData("an entry of write_files has no path")
    path = inside(entry["path"])
    try:
        content = _decoded(str(entry.get("content") or ""), str(entry.get("encoding") or "text/plain").lower())
        # In YAML either a quoted "0600" or an octal number.
        permissions = entry.get("permissions", "0644")
        mode = permissions if isinstance(permissions, int) else int(str(permissions), 8)
    except (ValueError, OSError, EOFError, binascii.Error) as error:
        raise UnusableUserData(f"{path} cannot be written ({error})") from error
    return File(path, content, mode & 0o777, bool(entry.get("append")))


def inside(path: str) -> str:
    """The absolute path with ".." resolved, so that it stays under its root."""
    return posixpath.normpath("/" + path.lstrip("/"))


def _decoded(content: str, encoding: str) -> bytes:
    if encoding in ("text/plain", ""):
        return content.encode()
    # cloud-init accepts several names for each encoding.
    is_base64 = "b64" in encoding or "base64" in encoding
    data = base64.b64decode("".join(content.split()), validate=True) if is_base64 else content.encode()
    return gzip.decompress(data) if encoding.startswith("gz") else data


def _chosen_unit(files: tuple[File, ...]) -> Unit | None:
    services = [file for file in files if file.path.startswith(_UNIT_FOLDERS) and file.path.endswith(".service")]
    for file in services:
        if file.path.endswith(f"/{WORKER_UNIT}"):
            return read_unit(file.content.decode(errors="replace"))
    return read_unit(services[0].content.decode(errors="replace")) if services else None


def read_unit(text: str) -> Unit:
    """The settings of a service that the emulator honours. Raises UnusableUserData."""
    settings = _service_settings(text)
    words = _words((settings.get("ExecStart") or [""])[-1])
    if not words:
        raise UnusableUserData("the unit has no ExecStart")
    words[0] = words[0].lstrip(_EXEC_PREFIXES)
    restart = (settings.get("Restart") or ["no"])[-1]
    directory = (settings.get("WorkingDirectory") or ["/"])[-1].lstrip("-")
    pairs = [word.partition("=") for line in settings.get("Environment", []) for word in _words(line)]
    return Unit(
        command=tuple(words),
        working_directory="/root" if directory.startswith("~") else inside(directory),
        environment={name: value for name, equals, value in pairs if equals},
        environment_files=tuple(path.lstrip("-") for path in settings.get("EnvironmentFile", [])),
        restarts_on_success=restart in ("always", "on-success"),
        restarts_on_failure=restart in ("always", "on-failure", "on-abnormal", "on-abort"),
        restart_s=_seconds((settings.get("RestartSec") or [str(_DEFAULT_RESTART_S)])[-1]),
    )


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UnusableUserData(f"the unit has a line that cannot be split into words ({error})") from error


def _service_settings(text: str) -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    section = ""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip()  # noqa: PLW2901
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            values = settings.setdefault(name.strip(), [])
            # Like in systemd, an empty value clears the earlier ones.
            if value.strip():
                values.append(value.strip())
            else:
                values.clear()
    return settings


_UNITS_S = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "": 1.0}


def _seconds(text: str) -> float:
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text.strip()[len(number) :].strip()
    try:
        return float(number) * _UNITS_S[unit]
    except (ValueError, KeyError) as error:
        raise UnusableUserData(f"the unit's RestartSec={text} is not a number of seconds") from error
