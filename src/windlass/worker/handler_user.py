"""The user of the operating system that handlers run as (`run_as`), and the warning if that is root.

Only root can change to another user. The worker itself keeps its user: it holds the credentials of the queue, which the
handler's user then cannot read.
"""

import grp
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass

from windlass.model.errors import BadInput


@dataclass(frozen=True, slots=True)
class HandlerUser:
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment of the worker, with the names and folders of this user."""
        # A runtime directory of the worker's user is closed to others.
        kept = {name: value for name, value in inherited.items() if name not in ("XDG_RUNTIME_DIR", "MAIL")}
        return {**kept, "HOME": self.home, "USER": self.name, "LOGNAME": self.name}


def find_handler_user(name: str) -> HandlerUser | None:
    """None if this process runs as that user already. Raises BadInput if it cannot become that user."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise BadInput(f"user {name} not found on this host. Check run_as.") from None
    if entry.pw_uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        raise BadInput(f"cannot run handlers as {name}: only root can change to another user. Check run_as.")
    groups = {group.gr_gid for group in grp.getgrall() if name in group.gr_mem} | {entry.pw_gid}
    return HandlerUser(name, entry.pw_uid, entry.pw_gid, tuple(sorted(groups)), entry.pw_dir)


def runs_handlers_as_root(run_as: str | None) -> bool:
    return os.geteuid() == 0 and run_as in (None, "root")
