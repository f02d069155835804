"""`windlass reload`: asks the running `windlass up` to read its configuration again.

Only a process that recorded itself as a control process of `windlass up` gets a signal. `windlass cycle` may hold the
same lease and reads its configuration at each start, so it never gets one.
"""

import os
import signal
import socket
from collections.abc import Sequence

import psutil

from windlass.cli.options import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import print_json
from windlass.model.errors import BadInput
from windlass.model.lease import process_of_holder
from windlass.model.process import ProcessKind, ProcessRecord
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
        processes = await store.processes()
    leader = process_of_holder(holder) if holder is not None else None
    running = [process for process in processes if process.kind is ProcessKind.CONTROL]
    host, pid = _find_control_process(running, leader)
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


def _find_control_process(running: Sequence[ProcessRecord], leader: tuple[str, int] | None) -> tuple[str, int]:
    """Host and pid of the leading `windlass up`, or of the only one, while no `up` leads. Raises BadInput."""
    found = {(process.host, process.pid) for process in running}
    if leader in found and leader is not None:
        return leader
    if len(found) == 1:
        return found.pop()
    if found:
        raise BadInput(
            f"{len(found)} processes of `windlass up` use this database, and none of them is the leader yet: "
            "wait until one leads, then reload again."
        )
    if leader is not None:
        host, pid = leader
        raise BadInput(
            f"no running `windlass up` was found in this database. The process with pid {pid} on host {host} leads: "
            "a `windlass cycle`, which reads its configuration at each start, or an `up` that has ended."
        )
    raise BadInput("no running `windlass up` was found in this database: start it, or check --data-dir.")


def _find_main_process(pid: int) -> int:
    """The process that handles signals: a process of `windlass up` may be the child of another. Raises BadInput.

    The record of a killed process stays for some seconds, and its pid may belong to another program by then.
    """
    try:
        process = psutil.Process(pid)
        arguments = process.cmdline()
        if not any("windlass" in argument for argument in arguments) or "up" not in arguments:
            raise BadInput(f"`windlass up` with pid {pid} has ended. Start it again, or wait for another leader.")
        return main_process(process).pid
    except psutil.NoSuchProcess:
        raise BadInput(f"`windlass up` with pid {pid} has ended. Start it again, or wait for another leader.") from None
    except psutil.AccessDenied:
        return pid
