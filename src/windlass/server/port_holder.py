"""Finds the process that listens on a port, so that an error can name it."""

from pathlib import PurePath

import psutil


def describe_port_holder(port: int) -> str | None:
    """For example "`windlass up` with pid 4711"; None if it is unknown, as for processes of other users."""
    try:
        pids = {
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        }
        # Servers of one program share the port: the lowest pid is the one that started the others.
        pid = min((pid for pid in pids if pid is not None), default=None)
        return f"{_program(psutil.Process(pid))} with pid {pid}" if pid is not None else None
    except (psutil.Error, OSError):
        return None


def _program(process: psutil.Process) -> str:
    """The command of windlass, otherwise the name. Other programs may have secrets among their arguments."""
    arguments = process.cmdline()
    for number, argument in enumerate(arguments[:-1]):
        if PurePath(argument).name == "windlass" and not argument.startswith("-"):
            return f"`windlass {arguments[number + 1]}`"
    return process.name()
