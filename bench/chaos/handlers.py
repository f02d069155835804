"""Handlers of the fault run. Each run leaves its record in a file, outside the database and outside Windlass.

A line has kind, monotonic time, task, attempt, claim token and pid. `S`: the run began. `A`: it is still alive.
`E`: the handler returned. One `write` with O_APPEND per line: lines of different processes never mix.
"""

import contextlib
import functools
import os
import resource
import time

import psutil

from windlass import RunningTask

ALIVE_INTERVAL_S = 0.25
FLOOD_BYTES = 1 << 30
# Bound of the fork bomb, of a user of its own if the worker runs as root: the kernel exempts root from the limit.
MAX_PROCESSES = 100
BOMB_UID = 61_743
BOMB_S = 60.0


def work(task: RunningTask) -> str:
    _record("S", task)
    payload = task.payload
    if payload.get("kind") == "flood":
        _flood()
    elif payload.get("kind") == "bomb":
        _explode()
    until = time.monotonic() + payload["seconds"]
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, ALIVE_INTERVAL_S))
        _record("A", task)
    _record("E", task)
    return task.claim_token


def _record(kind: str, task: RunningTask) -> None:
    line = f"{kind} {time.monotonic()} {task.id} {task.attempt} {task.claim_token} {os.getpid()}\n"
    os.write(_file(), line.encode())


@functools.cache
def _file() -> int:
    return os.open(os.environ["CHAOS_RUNS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def _flood() -> None:
    line = b"x" * 1023 + b"\n"
    for _ in range(FLOOD_BYTES // len(line)):
        os.write(1, line)


def _explode() -> None:
    """Fork without end, in processes that ignore SIGTERM, until the limit of the user; then wait for the time limit."""
    ends_at = time.monotonic() + BOMB_S
    if os.fork() == 0:
        try:
            _become_bounded()
            while time.monotonic() < ends_at:
                with contextlib.suppress(OSError):
                    os.fork()
                time.sleep(0.05)
        finally:
            os._exit(0)
    time.sleep(BOMB_S)


def _become_bounded() -> None:
    limit = MAX_PROCESSES
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(BOMB_UID, BOMB_UID, BOMB_UID)
        # The limit applies to a user's processes; as the last step, because only then is this process bounded.
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
        os.setresuid(BOMB_UID, BOMB_UID, BOMB_UID)
    else:
        uid = os.getuid()
        limit += sum(process.info["uids"].real == uid for process in psutil.process_iter(["uids"]))
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
