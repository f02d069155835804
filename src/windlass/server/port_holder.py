"""Finds the process that listens on a port, so that an error can name it, and the main process of a program."""

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
        # Servers of one program share the port.
        pid = min((pid for pid in pids if pid is not None), default=None)
        if pid is None:
            return None
        process = main_process(psutil.Process(pid))
        return f"{_program(process)} with pid {process.pid}"
    except (psutil.Error, OSError):
        return None


def main_process(process: psutil.Process) -> psutil.Process:
    """The process that a person started and that handles signals: processes of one program have the same arguments."""
    arguments = process.cmdline()
    while (parent := process.parent()) is not None and parent.cmdline() == arguments:
        process = parent
    return process


def _program(process: psutil.Process) -> str:
    """The command of windlass, otherwise the name. Other programs may have secrets among their arguments."""
    arguments = process.cmdline()
    for number, argument in enumerate(arguments[:-1]):
        if PurePath(argument).name == "windlass" and not argument.startswith("-"):
            return f"`windlass {arguments[number + 1]}`"
    return process.name()
