"""`windlass reload`: asks the running `windlass up` to read its configuration again."""

import os
import signal
import socket

import psutil

from windlass.cli.options import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import print_json
from windlass.model.errors import BadInput
from windlass.model.lease import process_of_holder
from windlass.server.port_holder import main_process
from windlass.wiring import stores


@command
async def reload(config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Make the running `windlass up` read its configuration again.

    Added fleets start, changed ones continue with their new settings, and removed ones are shut down. A configuration
    with a mistake changes nothing. The log of `windlass up` says what changed. It must run on this host.
    """
    async with stores.store(load(config, data_dir).config, may_create=False) as store:
        holder = await store.leader()
    leader = process_of_holder(holder) if holder is not None else None
    if leader is None:
        raise BadInput("no running `windlass up` was found in this database: start it, or check --data-dir.")
    host, pid = leader
    if host != socket.gethostname():
        raise BadInput(f"`windlass up` runs on host {host} with pid {pid}: run `windlass reload` there.")
    pid = _find_main_process(pid)
    try:
        os.kill(pid, signal.SIGHUP)
    except PermissionError:
        raise BadInput(f"`windlass up` with pid {pid} belongs to another user: reload as that user.") from None
    if as_json:
        print_json({"pid": pid, "host": host})
    else:
        print(f"`windlass up` with pid {pid} reloads its configuration; its log says what changed")


def _find_main_process(pid: int) -> int:
    """The process that handles signals: a process of `windlass up` may be the child of another. Raises BadInput."""
    try:
        process = psutil.Process(pid)
        if not any("windlass" in argument for argument in process.cmdline()):
            raise BadInput(f"`windlass up` with pid {pid} has ended. Start it again, or wait for another leader.")
        return main_process(process).pid
    except psutil.NoSuchProcess:
        raise BadInput(f"`windlass up` with pid {pid} has ended. Start it again, or wait for another leader.") from None
    except psutil.AccessDenied:
        return pid
