"""Checks and creates the data directory of the embedded server.

A directory is used only if no other user could have planted a database in it: it belongs to this user or to root, and
others cannot write to it. A user who controls the directory controls the server, its data and what its clients send.
"""

import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from windlass.model.errors import ConfigError

# May exist in a data directory before its database: logs of workers with another database, and a volume's own folder.
MAY_EXIST = {"logs", "lost+found"}


def check_data_dir(data_dir: Path) -> None:
    """Raise ConfigError for a directory that is not ours, or that is used for something else. Creates nothing."""
    if data_dir.exists() and not data_dir.is_dir():
        raise ConfigError(f"the data directory {data_dir} is a file: name a directory.")
    check_owner(data_dir)
    if foreign := _foreign(data_dir):
        raise ConfigError(
            f"{data_dir} has other files ({foreign}) and no database of Windlass: name an empty or new directory, "
            f"such as {data_dir / 'windlass'}."
        )


def make_data_dir(data_dir: Path) -> None:
    check_data_dir(data_dir)
    with suppress(FileExistsError):
        data_dir.mkdir(parents=True)
        # For root: the server's user must be able to enter. Everything inside is closed to other users.
        data_dir.chmod(0o711 if os.geteuid() == 0 else 0o700)


def check_owner(data_dir: Path) -> None:
    """Raise ConfigError if another user owns the directory or can write to it."""
    try:
        found = data_dir.stat()
    except FileNotFoundError:
        return
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"the data directory {data_dir} belongs to user {_name_of(found.st_uid)}, who controls its database: "
            "run as that user, or name another directory."
        )
    # Where each user has a group of their own, new directories are often writable for it.
    is_open_to_group = found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid()
    if found.st_mode & stat.S_IWOTH or is_open_to_group:
        raise ConfigError(
            f"other users can write to the data directory {data_dir}: run `chmod go-w {data_dir}`, "
            "or name another directory."
        )


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _foreign(data_dir: Path) -> str | None:
    """A file which shows that the directory is used for something else; None if it is ours or empty."""
    names = {path.name for path in data_dir.iterdir()} if data_dir.is_dir() else set()
    # start.lock is the first file that open() creates.
    if names & {"start.lock", "postgres"}:
        return None
    return min(names - MAY_EXIST, default=None)
