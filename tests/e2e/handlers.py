"""Handlers for tests: working, slow and misbehaving ones."""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windlass import DoNotRetry, RunningTask

_calls = 0


def echo(task: RunningTask) -> Any:
    return task.payload


def token(task: RunningTask) -> str:
    """Shows whose result was accepted."""
    return task.claim_token


def who(_task: RunningTask) -> dict[str, int]:
    """The process id and its number of calls, which a warm process remembers."""
    global _calls  # noqa: PLW0603
    _calls += 1
    return {"pid": os.getpid(), "calls": _calls}


def wait_for_file(task: RunningTask) -> Any:
    """Create one file, then wait for another. payload: {"running": path, "go": path}"""
    Path(task.payload["running"]).write_text(f"{os.getpid()} {task.attempt}")
    while not Path(task.payload["go"]).exists():
        time.sleep(0.01)
    return {"attempt": task.attempt, "pid": os.getpid()}


def wait_for_file_of_attempt(task: RunningTask) -> Any:
    """payload: the same, by attempt number"""
    files = task.payload[str(task.attempt)]
    Path(files["running"]).touch()
    while not Path(files["go"]).exists():
        time.sleep(0.01)
    return {"attempt": task.attempt}


async def wait_for_file_inline(task: RunningTask) -> Any:
    Path(task.payload["running"]).touch()  # noqa: ASYNC240
    while not Path(task.payload["go"]).exists():  # noqa: ASYNC240
        await asyncio.sleep(0.01)
    return {"attempt": task.attempt}


def block_the_first_time(task: RunningTask) -> str:
    """The first attempt forks, writes both process ids, and then blocks the interpreter."""
    if task.attempt > 1:
        return "the second attempt"
    copy = os.fork()
    if copy == 0:
        time.sleep(600)
    Path(task.payload["file"]).write_text(f"{os.getpid()} {copy}")
    ctypes.PyDLL(None).sleep(600)
    return "never"


def report(task: RunningTask) -> str:
    task.progress(0.25, "a quarter")
    task.progress(float("nan"), "a loss that exploded")
    while not Path(task.payload["go"]).exists():
        time.sleep(0.01)
    return "done"


def tally(task: RunningTask) -> dict[str, Any]:
    """Append a line to a file for each run, and return the claim token."""
    with Path(task.payload["file"]).open("a") as file:
        file.write(f"{task.id} {task.attempt} {task.claim_token}\n")
    time.sleep(task.payload.get("seconds", 0))
    return {"token": task.claim_token, "double": task.payload["number"] * 2}


async def inline(task: RunningTask) -> Any:
    """payload: {"how": ...}"""
    how = task.payload["how"]
    if how == "block":
        Path(task.payload["running"]).touch()  # noqa: ASYNC240
        while not Path(task.payload["go"]).exists():  # noqa: ASYNC240
            time.sleep(0.05)  # noqa: ASYNC251
    elif how == "sleep":
        await asyncio.sleep(600)
    elif how == "refuse to be cancelled":
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)
    elif how == "sleep in a thread":
        await asyncio.to_thread(time.sleep, 600)
    elif how == "raise":
        raise ValueError("the cause")
    elif how == "sys.exit":
        sys.exit(3)
    elif how == "cancel":
        await cancel_something(task)
    return how


# ---------------------------------------------------------------------------------------------------- misbehaviour


def misbehave(task: RunningTask) -> Any:
    """payload: {"how": name, ...}"""
    return MISBEHAVIOURS[task.payload["how"]](task)


def spin(_task: RunningTask) -> None:
    while True:
        pass


def hold_the_gil(_task: RunningTask) -> None:
    # PyDLL, unlike CDLL, keeps the lock during the call.
    ctypes.PyDLL(None).sleep(600)


def segfault(_task: RunningTask) -> None:
    print("about to read address zero")
    ctypes.string_at(0)


def kill_itself(_task: RunningTask) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def eat_memory(_task: RunningTask) -> None:
    eaten = []
    while True:
        eaten.append(b"x" * (16 << 20))
        time.sleep(0.01)


def eat_memory_in_a_copy(task: RunningTask) -> None:
    if os.fork() == 0:
        eat_memory(task)
    os.wait()


def share_memory_with_copies(_task: RunningTask) -> str:
    """Uses less memory than it seems, because the forks share it."""
    shared = b"x" * (150 << 20)
    copies = [os.fork() for _ in range(4) if os.getpid() == PID]
    time.sleep(2)
    if os.getpid() != PID:
        os._exit(0)
    for pid in copies:
        os.waitpid(pid, 0)
    return f"{len(shared)}"


def flood(_task: RunningTask) -> None:
    line = b"x" * ((1 << 20) - 1) + b"\n"
    for _ in range(1024):
        os.write(1, line)


def raise_an_endless_message(_task: RunningTask) -> None:
    raise ValueError("x" * (20 << 20) + "the end")


def fork_and_return_from_both(_task: RunningTask) -> str:
    copy = os.fork()
    if copy == 0:
        return "the copy"
    os.waitpid(copy, 0)
    return "the original"


def fork_and_exit_in_the_copy(_task: RunningTask) -> str:
    copy = os.fork()
    if copy == 0:
        sys.exit(3)
    os.waitpid(copy, 0)
    return "the original"


def die_before_its_copy(task: RunningTask) -> None:
    """The fork holds the socket and the output open, so only the exit shows the death of the process."""
    copy = os.fork()
    if copy == 0:
        time.sleep(600)
    Path(task.payload["file"]).write_text(str(copy))
    os._exit(3)


def hang_with_a_detached_process(task: RunningTask) -> None:
    detached = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(task.payload["file"]).write_text(str(detached.pid))
    time.sleep(600)


def leave_a_detached_family(task: RunningTask) -> str:
    """Three generations, each in its own session, that write their process ids."""
    script = 'echo $$ >> "$1"; [ "$2" = 1 ] || setsid sh -c "$0" "$0" "$1" $(($2 - 1)); sleep 600'
    family = subprocess.Popen(["sh", "-c", script, script, task.payload["file"], "3"], start_new_session=True)
    family.returncode = 0  # or Popen would warn that it lives on
    return "they live on"


def hang_with_a_detached_family(task: RunningTask) -> None:
    leave_a_detached_family(task)
    time.sleep(600)


def hang_with_another_group(task: RunningTask) -> None:
    other = subprocess.Popen(["sleep", "600"], process_group=0)
    Path(task.payload["file"]).write_text(str(other.pid))
    time.sleep(600)


def terminate_what_it_started(_task: RunningTask) -> int:
    """Processes that a handler starts handle SIGTERM and SIGINT normally."""
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(["sleep", "600"]) as started:
            started.send_signal(number)
            assert started.wait() == -number
        copy = os.fork()
        if copy == 0:
            time.sleep(600)
        os.kill(copy, number)
        assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == -number
    return 4


def close_every_file(_task: RunningTask) -> None:
    os.closerange(3, 1024)
    time.sleep(600)


def scribble_on_every_socket(_task: RunningTask) -> None:
    for fd in range(3, 64):
        try:
            os.write(fd, b"\xff" * 64)
        except OSError:
            continue
    time.sleep(600)


def report_after_the_end(task: RunningTask) -> str:
    """A thread keeps reporting for its attempt during the next one."""
    threading.Thread(target=_report_for, args=(task,), daemon=True).start()
    return "done"


def flood_after_the_end(task: RunningTask) -> str:
    threading.Thread(target=flood, args=(task,), daemon=True).start()
    return "done"


def die_after_the_answer(_task: RunningTask) -> str:
    """The process dies as soon as its result is sent."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.shutdown(socket.SHUT_RD)
    sock.detach()
    return "answered"


def _report_for(task: RunningTask) -> None:
    while True:
        task.progress(1.0, "after the end")
        time.sleep(0.01)


def cyclic(_task: RunningTask) -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


def raise_error(error: BaseException) -> Callable[[RunningTask], None]:
    def raises(_task: RunningTask) -> None:
        raise error

    return raises


async def cancel_something(_task: RunningTask) -> None:
    forever = asyncio.get_running_loop().create_future()
    forever.cancel()
    await forever


PID = os.getpid()
MISBEHAVIOURS: dict[str, Callable[[RunningTask], Any]] = {
    "nothing": lambda task: task.payload,
    "spin": spin,
    "hold the GIL": hold_the_gil,
    "segfault": segfault,
    "kill itself": kill_itself,
    "eat memory": eat_memory,
    "eat memory in a copy": eat_memory_in_a_copy,
    "share memory with copies": share_memory_with_copies,
    "flood": flood,
    "raise": raise_error(ValueError("the cause")),
    "raise an endless message": raise_an_endless_message,
    "raise with what PostgreSQL cannot store": raise_error(ValueError("a\0b\ud800c")),
    "raise DoNotRetry": raise_error(DoNotRetry("never")),
    "raise KeyboardInterrupt": raise_error(KeyboardInterrupt()),
    "raise MemoryError": raise_error(MemoryError()),
    "sys.exit": lambda _task: sys.exit("enough"),
    "os._exit": lambda _task: os._exit(7),
    "os._exit with 0": lambda _task: os._exit(0),
    "return an object": lambda _task: object(),
    "return NaN": lambda _task: [float("nan")],
    "return NUL": lambda _task: "a\0b",
    "return half a surrogate pair": lambda _task: "\ud800",
    "return too much": lambda _task: "x" * (1 << 20),
    "return a cycle": cyclic,
    "fork and return from both": fork_and_return_from_both,
    "fork and exit in the copy": fork_and_exit_in_the_copy,
    "die before its copy": die_before_its_copy,
    "hang with a detached process": hang_with_a_detached_process,
    "leave a detached family": leave_a_detached_family,
    "hang with a detached family": hang_with_a_detached_family,
    "hang with another group": hang_with_another_group,
    "terminate what it started": terminate_what_it_started,
    "close every file": close_every_file,
    "scribble on every socket": scribble_on_every_socket,
    "report after the end": report_after_the_end,
    "cancel something": cancel_something,
    "flood after the end": flood_after_the_end,
    "die after the answer": die_after_the_answer,
}
