"""Removes everything that `windlass demo` started: `python -m windlass.demo.cleanup FOLDER MARK`.

Workers outlive their orchestrator by design, but those of a demo must not. This process waits for the end of its
standard input, which the kernel closes even if the demo was killed. Then it kills every process with the mark in its
environment or with its home in the folder (emulated machines), stops PostgreSQL, and deletes the folder. If this
process is killed too, nothing cleans up.
"""

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from windlass.model.errors import WindlassError
from windlass.store.embedded import EmbeddedPostgres

# An environment variable with a value of its own for each demo. All processes of the demo inherit it.
MARK = "_WINDLASS_DEMO"
# A killed process may have forked just before, so the search is repeated until nothing is found.
MAX_ROUNDS = 50
KILL_TIMEOUT_S = 5.0


def main() -> None:
    folder, mark = Path(sys.argv[1]), sys.argv[2]
    # Ctrl-C and hang-ups are for the demo.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for _ in range(MAX_ROUNDS):
        found = _find_processes(folder, mark)
        if not found:
            break
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, KILL_TIMEOUT_S)
    data_dir = folder / "data"
    if (data_dir / "postgres" / "postmaster.pid").exists():
        # A server whose last user was killed keeps running. Opening and closing it stops it.
        with suppress(WindlassError), EmbeddedPostgres(data_dir):
            pass
    shutil.rmtree(folder, ignore_errors=True)


def _find_processes(folder: Path, mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_alive = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            environment = process.environ() if is_alive else {}
            if environment.get(MARK) == mark or environment.get("HOME", "").startswith(f"{folder}/"):
                found.append(process)
    return found


if __name__ == "__main__":
    main()
